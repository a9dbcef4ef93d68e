"""The command line: what it prints, and one line with exit code 2 for every mistake of a user's."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import yaml
from typer.main import get_command

from jobs.cli import app
from jobs.outcome import Exit
from shards.types import CorpusSpec, Event, EventKind
from tests.outputs import Output, write_corpus

REPO = Path(__file__).resolve().parents[1]


def rescore(*args: str, cwd: Path = REPO) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(REPO / "jobs" / "rescore.py"), *args]
    return subprocess.run(command, capture_output=True, text=True, cwd=cwd, check=False, timeout=60)


def assert_refused(done: subprocess.CompletedProcess[str], *says: str) -> None:
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1, done.stderr
    for text in says:
        assert text in done.stderr


def config(root: Path, **ranker: object) -> str:
    data = {
        "corpus": {"path": str(root / "corpus"), "query": "q"},
        "ranker": {"checkpoint": str(root / "model"), "model_version": "m1", **ranker},
        "output": {"path": str(root / "out")},
    }
    path = root / "config.yaml"
    path.write_text(yaml.safe_dump(data))
    return str(path)


@pytest.fixture
def scored(tmp_path: Path) -> Output:
    """An output of one finished shard, its fourth document dead."""
    write_corpus(tmp_path / "corpus" / "a.parquet", [f"d{i}" for i in range(10)])
    output = Output(tmp_path, CorpusSpec(path=str(tmp_path / "corpus"), id_column="doc_id", text_column="text"))
    with output.open() as manifest:
        run, plan, shards = output.start(manifest)
        footer = output.publish(plan, shards[0], dead=[3], run=run)
        done = Event(
            kind=EventKind.DONE, shard_id=footer.shard_id, generation=0, attempt=1, worker="w1", footer=footer
        )
        manifest.commit(run, [done])
        manifest.end_run(run, state="complete_with_dead_letters", exit_code=3, message="", summary={})
        manifest.publish()
    return output


def run_dir(output: Output) -> str:
    return str(output.root / "out")


def test_run_missing_configuration_is_refused() -> None:
    assert_refused(rescore("run", "nowhere.yaml"), "nowhere.yaml")


def test_run_missing_corpus_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    assert_refused(rescore("run", config(tmp_path, dtype="float32")), "corpus")


def test_run_missing_checkpoint_is_refused(tmp_path: Path) -> None:
    write_corpus(tmp_path / "corpus" / "a.parquet", ["d1"])
    assert_refused(rescore("run", config(tmp_path)), str(tmp_path / "model"))


def test_run_output_is_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "out").write_text("mine")
    assert_refused(rescore("run", config(tmp_path)), str(tmp_path / "out"))
    assert (tmp_path / "out").read_text() == "mine"


def test_run_model_version_that_is_a_path_is_refused(tmp_path: Path) -> None:
    assert_refused(rescore("run", config(tmp_path, model_version="../escape")), "model_version")
    assert not (tmp_path / "escape").exists()


@pytest.mark.parametrize(
    "command",
    [
        ["status"],
        ["sql", "SELECT 1"],
        ["dlq", "list"],
        ["dlq", "show", "x"],
        ["dlq", "redrive"],
        ["dlq", "export", "x"],
        ["verify"],
    ],
    ids=" ".join,
)
def test_commands_no_output_there_is_refused_and_nothing_is_created(tmp_path: Path, command: list[str]) -> None:
    where = 2 if command[0] == "dlq" else 1
    missing = str(tmp_path / "missing")
    assert_refused(rescore(*command[:where], missing, *command[where:]), missing)
    assert not (tmp_path / "missing").exists()


def test_status_json_has_the_documented_shape(scored: Output) -> None:
    state = json.loads(rescore("status", run_dir(scored), "--json").stdout)
    assert state["model_version"] == "m1"
    assert state["state"] == "complete_with_dead_letters"
    assert state["shards"] == {"pending": 0, "leased": 0, "done": 1, "dead": 0}
    assert state["docs"] == {"total": 10, "scored": 9, "dead": 1}
    assert {"docs_per_s", "eta_s", "oldest_pending_s", "workers"} <= state.keys()


def test_status_says_it_to_a_person(scored: Output) -> None:
    done = rescore("status", run_dir(scored))
    assert "complete with dead letters" in done.stdout
    assert "9 scored, 1 dead of 10 (100.0%)" in done.stdout


def test_sql_prints_each_format(scored: Output) -> None:
    query = "SELECT doc_id, score FROM scores ORDER BY score LIMIT 2"
    assert rescore("sql", run_dir(scored), query, "--format", "csv").stdout == "doc_id,score\nd0,0.0\nd1,1.0\n"
    rows = rescore("sql", run_dir(scored), query, "--format", "json").stdout.splitlines()
    assert [json.loads(row) for row in rows] == [{"doc_id": "d0", "score": 0.0}, {"doc_id": "d1", "score": 1.0}]
    assert rescore("sql", run_dir(scored), query).stdout.split() == ["doc_id", "score", "d0", "0", "d1", "1"]


def test_sql_from_another_directory_works(scored: Output, tmp_path: Path) -> None:
    done = rescore("sql", "out", "SELECT count(*) AS n FROM scores", "--format", "csv", cwd=scored.root)
    assert done.stdout == "n\n9\n"


@pytest.mark.parametrize("query", ["SELEC 1", "DROP TABLE runs", "SELECT * FROM nothing"])
def test_sql_that_cannot_be_run_is_one_line(scored: Output, query: str) -> None:
    assert_refused(rescore("sql", run_dir(scored), query), "SQL")


def test_dlq_list_and_show_tell_everything(scored: Output) -> None:
    letters = [json.loads(x) for x in rescore("dlq", "list", run_dir(scored), "--json").stdout.splitlines()]
    assert [(x["doc_id"], x["row"], x["state"]) for x in letters] == [("d3", 3, "dead")]
    shown = rescore("dlq", "show", run_dir(scored), letters[0]["id"][:6]).stdout
    assert letters[0]["id"] in shown
    assert letters[0]["traceback"].strip() in shown
    assert_refused(rescore("dlq", "show", run_dir(scored), "zzz"), "zzz")


def test_dlq_redrive_dry_run_changes_nothing_and_redrive_puts_back(scored: Output) -> None:
    assert "Would put back 1 dead letter" in rescore("dlq", "redrive", run_dir(scored), "--dry-run").stdout
    assert len(rescore("dlq", "list", run_dir(scored), "--json").stdout.splitlines()) == 1
    assert "Put back 1 dead letter" in rescore("dlq", "redrive", run_dir(scored)).stdout
    assert rescore("dlq", "list", run_dir(scored)).stdout == "No dead letters.\n"
    assert len(rescore("dlq", "list", run_dir(scored), "--json", "--all").stdout.splitlines()) == 1


def test_dlq_redrive_bad_condition_is_one_line(scored: Output) -> None:
    assert_refused(rescore("dlq", "redrive", run_dir(scored), "--where", "no_such_column = 1"), "no_such_column")


def test_dlq_export_writes_the_documents_once(scored: Output) -> None:
    path = scored.root / "bad.parquet"
    done = rescore("dlq", "export", run_dir(scored), str(path), "--where", "doc_id = 'd3'")
    assert done.stdout == f"Exported 1 documents of 1 dead letters to {path}.\n"
    assert pq.read_table(path).column("text").to_pylist() == ["text of d3"]
    assert_refused(rescore("dlq", "export", run_dir(scored), str(path)), "--force")
    assert rescore("dlq", "export", run_dir(scored), str(path), "--force").returncode == 0
    assert "nothing to export" in rescore("dlq", "export", run_dir(scored), "x", "--where", "false").stdout


def test_dlq_export_what_cannot_be_read_is_named_on_stderr(scored: Output) -> None:
    (scored.root / "corpus" / "a.parquet").unlink()
    done = rescore("dlq", "export", run_dir(scored), str(scored.root / "bad.parquet"))
    assert done.returncode == 0
    assert done.stdout == "No document could be exported.\n"
    assert done.stderr.startswith("not exported: 1 documents of ")


def test_verify_exit_code_says_whether_it_holds(scored: Output) -> None:
    done = rescore("verify", run_dir(scored), "--json")
    assert done.returncode == 0, done.stdout
    keys = {
        "ok",
        "expected_docs",
        "scored_docs",
        "dead_docs",
        "missing_docs",
        "duplicate_keys",
        "parts",
        "damaged_parts",
    }
    assert keys <= json.loads(done.stdout).keys()
    next(scored.layout.root.glob("scores/m1/*/*/*.g0.parquet")).unlink()
    done = rescore("verify", run_dir(scored))
    assert done.returncode == 1
    assert "missing" in done.stdout


def test_every_command_is_in_the_readme_and_explains_itself() -> None:
    readme = (REPO / "README.md").read_text()
    groups = get_command(app).commands  # type: ignore[attr-defined]
    commands = [*(name for name in groups if name != "dlq"), *(f"dlq {name}" for name in groups["dlq"].commands)]
    assert {"run", "dlq export"} <= set(commands)
    for command in commands:
        assert f"rescore {command}" in readme
        assert rescore(*command.split(), "--help").returncode == 0


def test_every_exit_code_is_explained_in_the_readme_and_for_operators() -> None:
    for page in ("README.md", "docs/operations.md"):
        text = (REPO / page).read_text()
        assert [code for code in Exit if f"\n| {code.value} | " not in text] == [], page


def test_every_link_of_the_pages_leads_somewhere() -> None:
    for page in (REPO / "README.md", REPO / "ARCHITECTURE.md", REPO / "docs" / "operations.md"):
        text = page.read_text()
        anchors = {
            re.sub(r"[^a-z0-9 -]", "", h.lower()).replace(" ", "-") for h in re.findall(r"^#+ (.+)$", text, re.M)
        }
        for target in re.findall(r"\]\(([^)]+)\)", text):
            path, _, anchor = target.partition("#")
            assert not path or (page.parent / path).exists(), f"{page.name}: {target}"
            assert path or anchor in anchors, f"{page.name}: {target}"


def test_entry_script_leaves_its_own_directory_off_the_path() -> None:
    code = """
import runpy, sys
sys.argv = ["rescore", "--help"]
try:
    runpy.run_path("jobs/rescore.py", run_name="__main__")
except SystemExit:
    pass
assert not any(path.endswith("/jobs") for path in sys.path), sys.path
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=REPO, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
