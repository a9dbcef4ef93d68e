"""The configuration: every mistake is one line that names its key."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from jobs import specs
from jobs.config import Config, ConfigError, load_config, resolve_paths

REPO = Path(__file__).resolve().parents[1]

GOOD: dict[str, Any] = {
    "corpus": {"path": "corpus", "query": "q"},
    "ranker": {"checkpoint": "model", "model_version": "m1"},
    "output": {"path": "out"},
}


def write(tmp_path: Path, data: Any) -> str:
    path = tmp_path / "config.yaml"
    path.write_text(data if isinstance(data, str) else yaml.safe_dump(data))
    return str(path)


def changed(**sections: dict[str, Any]) -> dict[str, Any]:
    return {**GOOD, **{name: {**GOOD.get(name, {}), **keys} for name, keys in sections.items()}}


def test_load_config_least_one_gets_the_defaults(tmp_path: Path) -> None:
    config = load_config(write(tmp_path, GOOD))
    assert config.corpus.id_column == "doc_id"
    assert config.ranker.kind == "cross-encoder"
    assert config.retry.max_attempts == 3
    assert specs.ranker(config).max_document_bytes == 16 * 2**20


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (changed(ranker={"max_lenght": 3}), ["ranker.max_lenght", "unknown key", "max_length"]),
        ({**GOOD, "corpsu": {}}, ["corpsu", "unknown key", "corpus"]),
        (changed(corpus={"shard_size": "many"}), ["corpus.shard_size", "integer"]),
        (changed(corpus={"shard_size": 0}), ["corpus.shard_size", "greater than or equal to 1"]),
        (changed(workers={"count": "some"}), ["workers.count", "auto"]),
        (changed(ranker={"dtype": "int8"}), ["ranker.dtype", "bfloat16"]),
        (changed(ranker={"attention": "flash"}), ["ranker.attention", "flash_attention_2"]),
        (changed(ranker={"model_version": 2026.10}), ["ranker.model_version", "quotes"]),
        (changed(corpus={"query_column": "q"}), ["corpus", "exactly one", "query, query_column"]),
        (changed(corpus={"query": None}), ["corpus", "exactly one"]),
        (changed(corpus={"format": "xml"}), ["corpus.format", "jsonl"]),
        (changed(corpus={"text_template": "{title"}), ["corpus.text_template", "{title"]),
        (changed(corpus={"text_template": "{a}", "text_column": "b"}), ["corpus", "not both"]),
        (changed(ranker={"checkpoint": None}), ["ranker", "needs a checkpoint"]),
        (changed(ranker={"kind": "custom"}), ["ranker", "class"]),
        (changed(ranker={"options": {"a": 1}}), ["ranker", "custom"]),
        (changed(retry={"transient": ["botocore.errors.Throttled"]}), ["retry.transient", "exception class"]),
        (
            changed(retry={"transient": ["A", "B"], "permanent": ["B"]}),
            ["retry", "both transient and permanent"],
        ),
        (changed(retry={"max_dead_fraction": 1.5}), ["retry.max_dead_fraction", "less than or equal to 1"]),
        ({"corpus": GOOD["corpus"], "ranker": GOOD["ranker"]}, ["output", "missing"]),
        ("corpus: [", ["line", "not valid YAML"]),
        ("- a list", ["must be a mapping"]),
    ],
)
def test_load_config_mistake_is_one_line_that_names_it(tmp_path: Path, data: Any, says: list[str]) -> None:
    path = write(tmp_path, data)
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    message = str(caught.value)
    assert "\n" not in message
    for text in [path, *says]:
        assert text in message


def test_load_config_retry_lists_and_switched_off_breakers(tmp_path: Path) -> None:
    retry = {"transient": ["Throttled"], "permanent": ["Gone"], "breaker_after": None, "max_dead_fraction": None}
    config = load_config(write(tmp_path, changed(retry=retry)))
    assert (config.retry.transient, config.retry.permanent) == (("Throttled",), ("Gone",))
    assert config.retry.breaker_after is None
    assert config.retry.max_dead_fraction is None


def test_load_config_limit_of_documents_reaches_the_ranker(tmp_path: Path) -> None:
    path = write(tmp_path, GOOD)
    given = [load_config(path, [f"ranker.max_document_bytes={value}"]) for value in ("7", "null")]
    assert [specs.ranker(config).max_document_bytes for config in given] == [7, None]


def test_load_config_no_such_file_says_so(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere\.yaml.*No such file"):
        load_config(str(tmp_path / "nowhere.yaml"))


def test_load_config_union_problem_names_the_users_key_only(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(write(tmp_path, changed(workers={"cpus": -1})))
    assert "constrained" not in str(caught.value)
    assert "workers.cpus:" in str(caught.value)


def test_set_override_is_parsed_as_yaml_and_laid_over(tmp_path: Path) -> None:
    path = write(tmp_path, GOOD)
    config = load_config(path, ["ranker.dtype=bfloat16", "workers.count=3", "workers.resources={tpu: 1}"])
    assert (config.ranker.dtype, config.workers.count, config.workers.resources) == ("bfloat16", 3, {"tpu": 1.0})


@pytest.mark.parametrize("override", ["ranker.dtype", "=3", "ranker..dtype=3", "output.path.x=3"])
def test_set_malformed_override_is_refused(tmp_path: Path, override: str) -> None:
    with pytest.raises(ConfigError, match="--set"):
        load_config(write(tmp_path, GOOD), [override])


def test_resolve_paths_relative_ones_start_from_root(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    config = resolve_paths(Config.model_validate(GOOD), root=str(tmp_path))
    assert config.corpus.path == str(tmp_path / "corpus")
    assert config.output.path == str(tmp_path / "out")
    assert config.ranker.checkpoint == str(tmp_path / "model")


def test_resolve_paths_hub_id_stays_unless_a_directory_has_its_name(tmp_path: Path) -> None:
    config = Config.model_validate(changed(ranker={"checkpoint": "org/name"}))
    assert resolve_paths(config, root=str(tmp_path)).ranker.checkpoint == "org/name"
    (tmp_path / "org" / "name").mkdir(parents=True)
    assert resolve_paths(config, root=str(tmp_path)).ranker.checkpoint == str(tmp_path / "org" / "name")


@pytest.mark.parametrize("key", ["corpus.path", "output.path", "ranker.checkpoint"])
def test_resolve_paths_relative_one_in_a_ray_job_is_refused(tmp_path: Path, key: str) -> None:
    data = changed(corpus={"path": "/corpus"}, ranker={"checkpoint": "/model"}, output={"path": "/out"})
    section, name = key.split(".")
    data[section][name] = "relative"
    config = Config.model_validate(data)
    job = {"RAY_JOB_CONFIG_JSON_ENV_VAR": "{}"}
    with pytest.raises(ConfigError, match=f"{key}.*--root"):
        resolve_paths(config, root=None, environ=job)
    assert resolve_paths(config, root=str(tmp_path), environ=job)


@pytest.mark.parametrize("path", sorted((REPO / "configs").glob("*.yaml")), ids=lambda path: path.name)
def test_shipped_configurations_are_valid(path: Path) -> None:
    assert load_config(str(path)).ranker.model_version


def test_readme_explains_every_key() -> None:
    readme = (REPO / "README.md").read_text()
    for section, field in Config.model_fields.items():
        for name, sub in field.annotation.model_fields.items():  # type: ignore[union-attr]
            assert f"`{section}.{sub.alias or name}`" in readme, f"{section}.{name}"
