"""The published manifest: what others read while the driver writes."""

from __future__ import annotations

import shutil
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path

import duckdb
import pytest

from shards import dlq
from shards.errors import OutputError, UsageError
from shards.lock import run_lock
from shards.snapshot import open_private, query
from shards.status import status
from shards.types import EventKind, QuerySet
from tests.outputs import NOW, Output, event, make_output, write_corpus


@pytest.fixture
def output(tmp_path: Path) -> Output:
    return make_output(tmp_path, docs=25, group=10, shard_size=4)


def ask(path: Path, sql: str) -> list[tuple[object, ...]]:
    with duckdb.connect(str(path), read_only=True) as connection:
        return connection.execute(sql).fetchall()


READER = """
import sys, duckdb
for _ in sys.stdin:
    with duckdb.connect(sys.argv[1], read_only=True) as connection:
        shards = connection.execute("SELECT count(*) FROM shards").fetchone()[0]
        scores = connection.execute("SELECT count(*) FROM scores").fetchone()[0]
    print(shards, scores, flush=True)
"""


def test_snapshot_is_readable_in_another_process_while_the_driver_writes(output: Output) -> None:
    with output.open() as manifest:
        run, plan, shards = output.start(manifest)
        manifest.publish()
        with subprocess.Popen(
            [sys.executable, "-c", READER, str(output.layout.manifest)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        ) as reader:
            assert reader.stdin is not None
            assert reader.stdout is not None
            scored = 0
            for shard in shards:
                output.score(manifest, run, plan, shard)
                manifest.publish()
                scored += shard.rows
                reader.stdin.write("\n")
                reader.stdin.flush()
                assert reader.stdout.readline().split() == ["8", str(scored)]


def test_snapshot_open_in_someones_read_write_shell_does_not_block(output: Output) -> None:
    output.score_all()
    shell = "import duckdb, sys; c = duckdb.connect(sys.argv[1]); print('open', flush=True); sys.stdin.readline()"
    with subprocess.Popen(
        [sys.executable, "-c", shell, str(output.layout.manifest)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        assert query(output.layout, "SELECT count(*) FROM scores").rows == [(25,)]
        assert status(output.layout)["state"] == "complete"
        output.score_all()  # publishes over the file that is open
        process.communicate("\n")
    assert ask(output.layout.manifest, "SELECT count(*) FROM runs") == [(2,)]


def test_snapshot_stale_wal_of_a_killed_shell_is_not_replayed(output: Output) -> None:
    output.score_all()
    shell = (
        "import duckdb, os, sys; c = duckdb.connect(sys.argv[1]); c.execute('DROP TABLE runs');"
        "c.execute('CREATE TABLE mine AS SELECT 1'); os.kill(os.getpid(), 9)"
    )
    subprocess.run([sys.executable, "-c", shell, str(output.layout.manifest)], check=False)
    assert output.layout.manifest.with_name("manifest.duckdb.wal").exists()
    output.score_all()
    assert ask(output.layout.manifest, "SELECT count(*) FROM runs") == [(2,)]


def test_snapshot_before_any_part_has_an_empty_scores_view(output: Output) -> None:
    with output.open() as manifest:
        manifest.publish()  # not even a plan
        assert ask(output.layout.manifest, "SELECT count(*) FROM scores") == [(0,)]
        output.start(manifest)
        manifest.publish()
    names = [row[0] for row in ask(output.layout.manifest, "DESCRIBE scores")]
    assert names == ["doc_id", "model_version", "score", "n_tokens", "truncated", "text_hash", "shard_id"]


def test_snapshot_scores_view_works_from_any_directory(
    output: Output, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output.score_all()
    monkeypatch.chdir("/")
    assert ask(output.layout.manifest, "SELECT count(*) FROM scores") == [(25,)]


def test_snapshot_path_with_special_characters_works(tmp_path: Path) -> None:
    output = make_output(tmp_path / "it's [a] dir *")
    output.score_all()
    assert ask(output.layout.manifest, "SELECT count(*) FROM scores") == [(25,)]
    assert query(output.layout, "SELECT count(*) FROM scores").rows == [(25,)]


def test_snapshot_of_a_moved_output_reads_the_parts_where_they_are(output: Output, tmp_path: Path) -> None:
    output.score_all()
    shutil.move(output.root / "out", tmp_path / "moved")
    layout = type(output.layout)(tmp_path / "moved")
    assert query(layout, "SELECT count(*) FROM scores").rows == [(25,)]


def test_snapshot_tables_join_on_keys(output: Output) -> None:
    output.score_all(dead=[3])
    sql = """
      SELECT (SELECT count(*) FROM scores JOIN shards USING (shard_id) WHERE generation = 0),
             (SELECT count(*) FROM dead_letters d JOIN shards s USING (shard_id, generation)),
             (SELECT count(*) FROM attempts WHERE event = 'done'), (SELECT count(*) FROM model_versions),
             (SELECT sum(scored) + sum(dead) FROM shards)
    """
    assert query(output.layout, sql).rows == [(24, 1, 8, 1, 25)]


def test_snapshot_with_a_query_set_has_query_ids(output: Output) -> None:
    output.queries = QuerySet(ids=("a", "b"), texts=("x", "y"))
    output.score_all()
    assert query(output.layout, "SELECT query_id, count(*) FROM scores GROUP BY 1 ORDER BY 1").rows == [
        ("a", 25),
        ("b", 25),
    ]


def test_snapshot_leaves_no_temp_behind(output: Output) -> None:
    output.score_all()
    names = {item.name for item in output.layout.private.iterdir()} - {"fingerprints.json"}
    assert names == {"live.duckdb"}
    assert {item.name for item in output.layout.root.iterdir()} == {
        ".rescore",
        "manifest.duckdb",
        "orders",
        "plan",
        "scores",
    }


def test_open_private_without_or_with_a_damaged_manifest_is_one_line(output: Output) -> None:
    with pytest.raises(OutputError, match="nothing has run"), open_private(output.layout):
        pass
    output.layout.manifest.write_bytes(b"x" * 9999)
    with pytest.raises(OutputError) as error, open_private(output.layout):
        pass
    assert "\n" not in str(error.value)


# -- status --------------------------------------------------------------------------------------


def test_status_of_a_running_run_has_speed_and_workers(output: Output) -> None:
    later = NOW + timedelta(seconds=30)
    with run_lock(output.layout, purpose="run"), output.open() as manifest:
        run, plan, shards = output.start(manifest)
        output.score(manifest, run, plan, shards[0], dead=[0])
        manifest.commit(run, [event(EventKind.LEASED, shards[1])])
        manifest.sample(run, pending_shards=6, leased_shards=1, pending_docs=21, docs_per_s=7.0)
        manifest.publish([{"worker": "w1", "docs": 4, "device": "cpu"}])
        found = status(output.layout, "m1", now=lambda: later)
    run_info = found.pop("run")
    assert found == {
        "model_version": "m1",
        "state": "running",
        "shards": {"pending": 6, "leased": 1, "done": 1, "dead": 0},
        "docs": {"total": 25, "scored": 3, "dead": 1},
        "docs_per_s": 7.0,
        "eta_s": 3.0,
        "oldest_pending_s": 30.0,
        "workers": [{"worker": "w1", "docs": 4, "device": "cpu"}],
    }
    assert (run_info["run"], run_info["started_at"]) == (1, "2026-11-30T12:00:00Z")


def test_status_of_a_driver_that_was_killed_is_interrupted(output: Output) -> None:
    with output.open() as manifest:
        output.start(manifest)
        manifest.publish([{"worker": "w1"}])
    found = status(output.layout)
    assert (found["state"], found["workers"], found["docs_per_s"], found["eta_s"]) == (
        "interrupted",
        [],
        None,
        None,
    )


@pytest.mark.parametrize("dead", [(), (1,)])
def test_status_after_the_end_says_how_it_ended(output: Output, dead: tuple[int, ...]) -> None:
    output.score_all(dead=dead)
    found = status(output.layout)
    assert found["state"] == ("complete_with_dead_letters" if dead else "complete")
    assert found["oldest_pending_s"] is None
    assert found["docs"]["dead"] == len(dead)


def test_status_without_a_name_is_that_of_the_last_run(output: Output) -> None:
    output.score_all()
    output.model_version = "a-later-one"
    output.score_all()
    assert status(output.layout)["model_version"] == "a-later-one"
    assert status(output.layout, "m1")["model_version"] == "m1"
    with pytest.raises(UsageError, match="a-later-one, m1"):
        status(output.layout, "other")


# -- dead letters --------------------------------------------------------------------------------


def test_dlq_lists_what_is_dead_in_corpus_order(output: Output) -> None:
    write_corpus(output.root / "corpus" / "0.parquet", ["x", "y"])
    output.score_all(dead=[1, 3])
    letters = dlq.dead_letters(output.layout)
    assert [letter["doc_id"] for letter in letters] == ["y", "d1", "d3"]
    assert {letter["state"] for letter in letters} == {"dead"}
    assert len(dlq.dead_letters(output.layout, limit=2)) == 2


def test_dlq_shows_one_by_a_unique_beginning(output: Output) -> None:
    output.score_all(dead=[1, 3])
    one = dlq.dead_letters(output.layout)[0]
    for given in (one["id"], one["id"][:12]):
        letter = dlq.dead_letter(output.layout, given)
        assert letter == one
    assert {"traceback", "message", "shard_id", "generation", "attempts", "worker", "row"} <= set(one)


@pytest.mark.parametrize("given", ["", "zz", "%", "' OR true --"])
def test_dlq_unknown_or_ambiguous_id_is_refused(output: Output, given: str) -> None:
    output.score_all(dead=list(range(25)))
    with pytest.raises(UsageError):
        dlq.dead_letter(output.layout, given)
    letters = dlq.dead_letters(output.layout)
    shared = next(a for a in "0123456789abcdef" if sum(x["id"].startswith(a) for x in letters) > 1)
    with pytest.raises(UsageError, match="several ids"):
        dlq.dead_letter(output.layout, shared)


def test_status_default_clock_is_now(output: Output) -> None:
    output.now = datetime.now(UTC)
    with output.open() as manifest:
        output.start(manifest)
        manifest.publish()
    assert 0 <= status(output.layout)["oldest_pending_s"] < 3600
