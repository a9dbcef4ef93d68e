"""What a name is bound to beyond the checkpoint, and when a standing plan, or other hardware, refuses it."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from jobs import binding, driver, specs
from jobs.binding import Bound
from jobs.config import Config
from jobs.identity import Identity
from jobs.outcome import Exit
from jobs.progress import Reporter
from shards import plan
from shards.errors import PlanError
from tests.outputs import Output, write_corpus
from tests.test_cli import config, rescore


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A corpus, two queries, and a checkpoint whose files have the right names and are never loaded."""
    write_corpus(tmp_path / "corpus" / "a.parquet", [f"d{i}" for i in range(10)])
    (tmp_path / "queries.jsonl").write_text('{"query_id": 1, "text": "a"}\n{"query_id": 2, "text": "b"}\n')
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    (tmp_path / "model" / "model.safetensors").write_bytes(b"weights")
    return tmp_path


def loaded(root: Path, *, corpus: dict[str, Any] | None = None, gpus: float | str = 0, **ranker: Any) -> Config:
    return Config.model_validate(
        {
            "corpus": {"path": str(root / "corpus"), **(corpus or {"query": "q"})},
            "ranker": {"checkpoint": str(root / "model"), "model_version": "m1", **ranker},
            "output": {"path": str(root / "out")},
            "workers": {"gpus": gpus},
        }
    )


def bound(config: Config, *, gpus: float = 0.0, dtype: str | None = None) -> Bound:
    return binding.bind(config, gpus=lambda: gpus, note=print, dtype=dtype)


def make_plan(config: Config, *, scored: bool = False) -> None:
    """The plan as a run makes it; with its first part if `scored`."""
    made = bound(config)
    output = Output(Path(config.corpus.path).parent, specs.corpus(config), queries=made.queries)
    output.components = made.binding.components
    with output.open() as manifest:
        run, made_plan, shards = output.start(manifest)
        if scored:
            output.publish(made_plan, shards[0], run=run)


def differing(config: Config, **how: Any) -> set[str]:
    found = binding.standing(config, bound(config, **how))
    assert found is not None
    return {difference.name for difference in found.differences}


def by_queries(root: Path, name: str = "queries.jsonl") -> Config:
    return loaded(root, corpus={"queries": str(root / name)})


def test_bind_same_content_at_another_path_is_the_same(root: Path) -> None:
    first = bound(by_queries(root))
    (root / "queries.jsonl").rename(root / "moved.jsonl")
    (root / "model").rename(root / "moved")
    second = bound(loaded(root, corpus={"queries": str(root / "moved.jsonl")}, checkpoint=str(root / "moved")))
    assert second.binding == first.binding


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"corpus": {"query": "q "}}, "query"),
        ({"dtype": "bfloat16"}, "dtype"),
        ({"attention": "sdpa"}, "attention"),
        ({"max_length": 64}, "max_length"),
        ({"batch_tokens": 64}, None),
    ],
)
def test_bind_digest_covers_what_decides_and_nothing_else(root: Path, change: Any, named: str | None) -> None:
    base, other = bound(loaded(root)).binding, bound(loaded(root, **change)).binding
    names = base.components.keys() | other.components.keys()
    assert {n for n in names if base.components.get(n) != other.components.get(n)} == ({named} - {None})
    assert (base.digest == other.digest) == (named is None)


def test_bind_digest_covers_the_content_of_the_query_set(root: Path) -> None:
    before = bound(by_queries(root)).binding
    (root / "queries.jsonl").write_text('{"query_id": 1, "text": "a"}\n{"query_id": 2, "text": "c"}\n')
    after = bound(by_queries(root)).binding
    assert before.digest != after.digest
    assert {n for n, value in before.components.items() if after.components[n] != value} == {"queries"}


def test_plan_changed_query_set_under_the_same_path_is_refused_by_name(root: Path) -> None:
    make_plan(by_queries(root), scored=True)
    (root / "moved.jsonl").write_bytes((root / "queries.jsonl").read_bytes())
    make_plan(by_queries(root, "moved.jsonl"))
    (root / "queries.jsonl").write_text('{"query_id": 1, "text": "a"}\n{"query_id": 2, "text": "c"}\n')
    with pytest.raises(PlanError, match=r"planned otherwise \(queries: [0-9a-f]{12}… → [0-9a-f]{12}…\)"):
        make_plan(by_queries(root))


def test_plan_bound_before_the_query_set_was_a_component_stays_valid(root: Path) -> None:
    made = bound(by_queries(root))
    old = {name: value for name, value in made.binding.components.items() if name != "queries"}
    output = Output(root, specs.corpus(by_queries(root)), queries=made.queries, components=old)
    assert output.plan
    assert differing(by_queries(root)) == set()
    assert output.plan.binding.components == old


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("copy a file", "copy a directory", 'query: "copy a file" → "copy a directory"'),
        ("copy", "copy ", 'query: "copy" → "copy "'),
        ("a\nb", "a b", r'query: "a\nb" → "a b"'),
        (None, "q", 'query: none → "q"'),
        ("", "q", 'query: "" → "q"'),
        ("same " * 20 + "old end", "same " * 20 + "new end", '→ "…same same same same new end"'),
        ("x" * 200, "y" * 200, f'query: "{"x" * 40}…" → "{"y" * 40}…"'),
        ("a" * 32, "b" * 32, f'query: "{"a" * 32}" → "{"b" * 32}"'),
    ],
)
def test_difference_of_queries_shows_where_they_differ(old: str | None, new: str, says: str) -> None:
    text = str(plan.Difference(name="query", old=old, new=new))
    assert says in text
    assert len(text) < 110


def test_difference_of_other_components_is_short() -> None:
    assert (
        str(plan.Difference(name="weights", old="a" * 32, new="b" * 32)) == "weights: aaaaaaaaaaaa… → bbbbbbbbbbbb…"
    )
    assert str(plan.Difference(name="attention", old=None, new="sdpa")) == "attention: auto → sdpa"
    assert str(plan.Difference(name="tokenizer", old=None, new="x")) == "tokenizer: none → x"


# -- what auto means ----------------------------------------------------------------------------------


@pytest.mark.parametrize(("gpus", "dtype"), [(0.0, "float32"), (1.0, "bfloat16"), (0.25, "bfloat16")])
def test_bind_auto_is_what_the_devices_want(root: Path, gpus: float, dtype: str) -> None:
    assert bound(loaded(root), gpus=gpus).ranker.dtype == dtype


@pytest.mark.parametrize("options", [{"dtype": "float16"}, {}], ids=["explicit", "known"])
def test_bind_dtype_that_is_known_asks_for_no_device(root: Path, options: dict[str, str]) -> None:
    def gpus() -> float:
        raise AssertionError("this starts a cluster")

    made = binding.bind(loaded(root, **options), gpus=gpus, note=print, dtype="bfloat16")
    assert made.ranker.dtype == options.get("dtype", "bfloat16")


@pytest.mark.parametrize(
    ("scored", "gpus", "says"),
    [
        ("float32", 0.0, None),
        ("bfloat16", 1.0, None),
        ("bfloat16", 0.0, "means float32 on CPUs.*ranker.dtype: bfloat16$"),
        ("float32", 1.0, "means bfloat16 on GPUs.*ranker.dtype: float32$"),
        ("float16", 1.0, "ranker.dtype: float16$"),
    ],
)
def test_other_dtype_is_refused_with_the_line_to_write(
    root: Path, scored: str, gpus: float, says: str | None
) -> None:
    text = binding.other_dtype(loaded(root), scored, gpus)
    if says is None:
        assert text is None
    else:
        assert text is not None
        assert re.search(says, text)


def test_scored_dtype_is_that_of_scores_and_asked_for_only_by_auto(root: Path) -> None:
    config = loaded(root, dtype="bfloat16")
    make_plan(config)
    assert binding.scored_dtype(loaded(root)) is None  # a plan without scores is made anew
    make_plan(config, scored=True)
    assert binding.scored_dtype(loaded(root)) == "bfloat16"
    assert binding.scored_dtype(config) is None


def test_run_on_other_hardware_is_told_to_name_the_dtype(root: Path) -> None:
    make_plan(loaded(root, dtype="bfloat16"), scored=True)
    complete = driver.run(loaded(root), Reporter())
    assert complete.exit is Exit.COMPLETE  # nothing is left to score, on whatever hardware
    write_corpus(root / "corpus" / "b.parquet", ["d10"])
    outcome = driver.run(loaded(root), Reporter())
    assert outcome.exit is Exit.USAGE
    assert outcome.message == (
        "model_version 'm1' has scores in bfloat16, and ranker.dtype: auto means float32 on CPUs: "
        "to go on with it here, write ranker.dtype: bfloat16"
    )


# -- rescore fingerprint ------------------------------------------------------------------------------


def shown(config: Config) -> Identity:
    made = bound(config)
    return Identity(config=config, bound=made, standing=binding.standing(config, made))


def test_fingerprint_shows_every_component_and_the_digest_last(root: Path) -> None:
    identity = shown(loaded(root))
    rows = identity.rows()
    assert [name for name, _, _ in rows] == [*identity.bound.binding.components, "fingerprint"]
    assert ("query", '"q"', "") in rows
    assert ("dtype", "float32", "auto") in rows
    assert ("max_length", "–", "") in rows
    assert rows[-1] == ("fingerprint", identity.bound.binding.digest, "")
    assert "No plan" in identity.lines()[0]
    assert not identity.refused


def test_fingerprint_beside_the_same_plan_says_so(root: Path) -> None:
    make_plan(loaded(root), scored=True)
    identity = shown(loaded(root))
    assert [remark for _, _, remark in identity.rows() if remark] == ["auto"]
    assert "bound to the same" in identity.lines()[0]
    assert not identity.refused


def test_fingerprint_beside_scores_of_another_marks_the_components(root: Path) -> None:
    make_plan(loaded(root, attention="sdpa"), scored=True)
    (root / "model" / "model.safetensors").write_bytes(b"others")
    identity = shown(loaded(root, corpus={"query": "r", "shard_size": 5}))
    marked = {name: (value, remark) for name, value, remark in identity.rows() if remark.startswith("≠")}
    assert marked.keys() == {"weights", "query", "attention", "shard_size"}
    assert marked["query"] == ('"r"', '≠ "q" in the plan')
    assert marked["attention"] == ("–", "≠ sdpa in the plan")
    assert marked["shard_size"] == ("5", "≠ 1000 in the plan")
    assert identity.refused
    assert "another model_version" in identity.lines()[0]
    differs = {item["name"]: item for item in identity.as_json()["plan"]["differs"]}
    assert differs["query"] == {"name": "query", "plan": "q", "here": "r"}


def test_fingerprint_beside_a_plan_without_scores_refuses_nothing(root: Path) -> None:
    make_plan(loaded(root))
    identity = shown(loaded(root, max_length=64))
    assert ("max_length", "64", "≠ none in the plan") in identity.rows()
    assert "plans anew" in identity.lines()[0]
    assert not identity.refused


def test_fingerprint_of_auto_beside_scores_of_other_hardware_names_the_line_to_write(root: Path) -> None:
    make_plan(loaded(root, dtype="bfloat16"), scored=True)
    identity = shown(loaded(root))
    assert ("dtype", "float32", "≠ bfloat16 in the plan") in identity.rows()
    assert "write ranker.dtype: bfloat16" in identity.lines()[0]
    assert identity.refused


def test_fingerprint_says_with_its_exit_code_whether_a_run_may_go_on(root: Path) -> None:
    make_plan(loaded(root, dtype="float32"), scored=True)
    done = rescore("fingerprint", config(root), "--set", "corpus.query=r", "--set", "workers.gpus=0")
    assert done.returncode == 1, done.stderr
    lines = done.stdout.splitlines()
    assert lines[-2].split(maxsplit=2) == ["query", '"r"', '≠ "q" in the plan']
    assert lines[-1].split() == ["fingerprint", bound(loaded(root, corpus={"query": "r"})).binding.digest]
    assert "bound otherwise (query)" in done.stderr


def test_fingerprint_without_an_output_creates_nothing_and_starts_no_cluster(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setenv("RAY_TMPDIR", str(root / "ray"))
    done = rescore("fingerprint", config(root), "--json")
    assert (done.returncode, done.stderr) == (0, "")
    printed = json.loads(done.stdout)
    assert printed["components"]["dtype"] in ("float32", "bfloat16")
    assert printed["plan"] is None
    assert not (root / "out").exists()
    assert not (root / "ray").exists()
