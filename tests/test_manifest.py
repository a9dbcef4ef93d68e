"""The live manifest: what a start finds, whatever died before it."""

from __future__ import annotations

import random
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import duckdb
import pytest

from shards import migrations, parts
from shards.errors import ManifestError
from shards.manifest import Manifest
from shards.orders import read_orders
from shards.types import CHARGE_RETURNED, EventKind, QuerySet, ShardState
from shards.verify import verify
from tests.outputs import NOW, Output, event, make_output, verdict, write_corpus


@pytest.fixture
def output(tmp_path: Path) -> Output:
    return make_output(tmp_path, docs=25, group=10, shard_size=4)  # 8 shards


def rows(manifest_path: Path, sql: str) -> list[tuple[object, ...]]:
    with duckdb.connect(str(manifest_path), read_only=True) as connection:
        return connection.execute(sql).fetchall()


# -- runs ----------------------------------------------------------------------------------------


def test_begin_run_marks_a_run_that_never_ended_interrupted(output: Output) -> None:
    with output.open() as manifest:
        first, _, _ = output.start(manifest)
    output.now += timedelta(hours=1)
    with output.open() as manifest:
        second, _, _ = output.start(manifest)
        manifest.publish()
    assert (first, second) == (1, 2)
    found = rows(output.layout.manifest, "SELECT run, state, exit_code, started_at FROM runs ORDER BY run")
    assert found == [
        (1, "interrupted", 5, NOW.replace(tzinfo=None)),
        (2, "running", None, (NOW + timedelta(hours=1)).replace(tzinfo=None)),
    ]


def test_begin_run_after_a_lost_manifest_never_reuses_a_number(output: Output) -> None:
    with output.open() as manifest:
        _, plan, shards = output.start(manifest)
        output.publish(plan, shards[0], run=7)
    output.layout.live.unlink()
    with output.open() as manifest:
        assert manifest.rebuilt
        assert output.start(manifest)[0] == 8


def test_rebuilt_is_false_for_a_first_start(output: Output) -> None:
    assert output.plan
    with output.open() as manifest:
        assert not manifest.rebuilt


# -- events and histories ------------------------------------------------------------------------


def test_histories_count_what_a_budget_was_spent_on(output: Output) -> None:
    with output.open() as manifest:
        run, _, shards = output.start(manifest)
        shard = shards[0]
        for attempt, kind in enumerate(
            (EventKind.FAILED, EventKind.DIED, EventKind.HUNG, EventKind.RELEASED, EventKind.FAILED), 1
        ):
            manifest.commit(run, [event(EventKind.LEASED, shard, attempt=attempt)])
            manifest.commit(run, [event(kind, shard, attempt=attempt)])
        history = manifest.histories("m1")[shard.key]
        assert history.state is ShardState.PENDING
        assert (history.attempts, history.failed, history.died, history.released) == (5, 2, 2, 1)
        assert history.first_leased_at == NOW
        untouched = manifest.histories("m1")[shards[1].key]
        assert (untouched.attempts, untouched.first_leased_at) == (0, None)
        assert len(manifest.histories("m1")) == 8


def test_histories_charge_that_was_given_back_does_not_count(output: Output) -> None:
    with output.open() as manifest:
        run, _, shards = output.start(manifest)
        for attempt, kind in enumerate((EventKind.FAILED, EventKind.FAILED, EventKind.HUNG), 1):
            manifest.commit(run, [event(EventKind.LEASED, shards[0], attempt=attempt)])
            manifest.commit(run, [event(kind, shards[0], attempt=attempt)])
        for attempt, name in ((2, CHARGE_RETURNED[EventKind.FAILED]), (3, CHARGE_RETURNED[EventKind.HUNG])):
            manifest.commit(run, [event(EventKind.RELEASED, shards[0], attempt=attempt, error_type=name)])
        history = manifest.histories("m1")[shards[0].key]
    assert history.state is ShardState.PENDING
    assert (history.attempts, history.failed, history.died, history.released) == (3, 1, 0, 0)


def test_commit_counts_follow_events(output: Output) -> None:
    with output.open() as manifest:
        run, plan, shards = output.start(manifest)
        output.score(manifest, run, plan, shards[0], dead=[1])
        manifest.commit(run, [event(EventKind.LEASED, shards[1])])
        manifest.commit(run, [event(EventKind.LEASED, shards[2]), verdict(output.bury(plan, shards[2]))])
        counts = manifest.counts("m1")
    assert counts.shards == {"pending": 5, "leased": 1, "done": 1, "dead": 1}
    assert (counts.total, counts.scored, counts.dead) == (25, 3, 1 + 2)


def test_commit_is_one_transaction(output: Output) -> None:
    with output.open() as manifest:
        run, _, shards = output.start(manifest)
        bad = replace(event(EventKind.LEASED, shards[1]), attempt=2**40)  # beyond what the column holds
        with pytest.raises((ManifestError, OverflowError, ValueError)):
            manifest.commit(run, [event(EventKind.LEASED, shards[0]), bad])
        assert manifest.counts("m1").shards["leased"] == 0
        manifest.commit(run, [event(EventKind.LEASED, shards[0])])
        assert manifest.counts("m1").shards["leased"] == 1


def test_commit_text_with_a_lone_surrogate_is_stored(output: Output) -> None:
    with output.open() as manifest:
        run, _, shards = output.start(manifest)
        failed = replace(event(EventKind.FAILED, shards[0]), message="a\ud800", traceback="b\udfff")
        manifest.commit(run, [failed])
        manifest.publish()
    assert rows(output.layout.manifest, "SELECT message FROM attempts") == [("a\\ud800",)]


def test_commit_keeps_the_letters_id_columns_and_times(output: Output) -> None:
    with output.open() as manifest:
        run, plan, shards = output.start(manifest)
        manifest.commit(run, [event(EventKind.LEASED, shards[0]), event(EventKind.FAILED, shards[0])])
        output.now += timedelta(minutes=5)
        output.score(manifest, run, plan, shards[0], dead=[1])
        manifest.publish()
    sql = "SELECT doc_id, file, row, stage, state, docs, first_failed_at, last_failed_at FROM dead_letters"
    ((doc_id, file, row, stage, state, docs, first, last),) = rows(output.layout.manifest, sql)
    assert (doc_id, file, row) == ("d1", shards[0].file, 1)
    assert (stage, state, docs) == ("score", "dead", 1)
    assert last - first == timedelta(minutes=5)


def test_letters_integer_ids_are_integers_in_the_snapshot(output: Output) -> None:
    write_corpus(output.root / "corpus" / "a.parquet", [2**53 + 1, 7])
    output.score_all(dead=[0])
    sql = "SELECT doc_id, typeof(doc_id) FROM dead_letters"
    assert rows(output.layout.manifest, sql) == [(2**53 + 1, "BIGINT")]


def test_letters_with_queries_weigh_their_keys(output: Output) -> None:
    output.queries = QuerySet(ids=("a", "b", "c"), texts=("x", "y", "z"))
    with output.open() as manifest:
        run, plan, shards = output.start(manifest)
        output.score(manifest, run, plan, shards[0], dead=[1])
        counts = manifest.counts("m1")
    assert (counts.total, counts.scored, counts.dead) == (75, 9, 3)


# -- registering ---------------------------------------------------------------------------------


def test_register_again_and_extended_adds_only_what_is_new(output: Output) -> None:
    with output.open() as manifest:
        run, plan, shards = output.start(manifest)
        output.score(manifest, run, plan, shards[0])
        write_corpus(output.root / "corpus" / "b.parquet", ["x"])
        plan = output.plan
        for _ in range(2):
            manifest.register(plan, [])
            counts = manifest.counts("m1")
            assert (sum(counts.shards.values()), counts.shards["done"], counts.total) == (9, 1, 26)


def test_register_moved_file_shows_its_new_path(output: Output) -> None:
    output.score_all()
    corpus = output.root / "corpus"
    (corpus / "a.parquet").rename(corpus / "moved.parquet")
    output.score_all()
    assert rows(output.layout.manifest, "SELECT DISTINCT file FROM shards") == [(str(corpus / "moved.parquet"),)]


def test_register_replaced_plan_forgets_the_old_one(output: Output) -> None:
    with output.open() as manifest:
        run, _, shards = output.start(manifest)
        manifest.commit(run, [event(EventKind.LEASED, shards[0])])
        output.components = {"weights": "w2"}
        output.spec = replace(output.spec, shard_size=10)
        _, _, shards = output.start(manifest)
        assert set(manifest.histories("m1")) == {shard.key for shard in shards}
        assert manifest.counts("m1").shards == {"pending": 3, "leased": 0, "done": 0, "dead": 0}


def test_register_replaced_plan_with_a_query_set_weighs_its_letters_anew(output: Output) -> None:
    with output.open() as manifest:
        run, _, shards = output.start(manifest)
        manifest.commit(run, [event(EventKind.LEASED, shards[0])])
        output.queries = QuerySet(ids=("a", "b", "c"), texts=("x", "y", "z"))
        run, plan, shards = output.start(manifest)
        output.score(manifest, run, plan, shards[0], dead=[1])
        manifest.publish()
    assert rows(output.layout.manifest, "SELECT docs FROM dead_letters") == [(3,)]


def test_two_model_versions_share_one_output(output: Output) -> None:
    output.score_all(dead=[3])
    output.model_version = "m2"
    output.score_all()
    with output.open() as manifest:
        assert (manifest.counts("m1").scored, manifest.counts("m2").scored) == (24, 25)
    assert rows(output.layout.manifest, "SELECT model_version, count(*) FROM scores GROUP BY ALL ORDER BY 1") == [
        ("m1", 24),
        ("m2", 25),
    ]


# -- reconciling ---------------------------------------------------------------------------------


def test_reconcile_part_without_ack_is_adopted(output: Output) -> None:
    with output.open() as manifest:
        run, plan, shards = output.start(manifest)
        manifest.commit(run, [event(EventKind.LEASED, shards[0])])
        output.publish(plan, shards[0], dead=[2])
        output.bury(plan, shards[1])
    with output.open() as manifest:
        _, plan, _ = output.start(manifest)
        resume = manifest.reconcile(plan, [])
        assert (resume.adopted, resume.released, resume.done, resume.pending) == (2, 0, 2, 6)
        counts = manifest.counts("m1")
        assert (counts.scored, counts.dead) == (3, 1 + 4)
        assert manifest.histories("m1")[shards[1].key].state is ShardState.DEAD
        manifest.publish()
        assert manifest.reconcile(plan, []).adopted == 0
    found = rows(output.layout.manifest, "SELECT count(*) FILTER (adopted), count(*) FROM attempts")
    assert found == [(2, 3)]


def test_reconcile_lease_of_a_dead_driver_is_released_and_charged_to_nobody(output: Output) -> None:
    for _ in range(3):
        with output.open() as manifest:
            run, plan, shards = output.start(manifest)
            resume = manifest.reconcile(plan, [])
            manifest.commit(run, [event(EventKind.LEASED, shards[0])])
    assert resume.released == 1
    with output.open() as manifest:
        output.start(manifest)
        manifest.reconcile(plan, [])
        history = manifest.histories("m1")[shards[0].key]
    assert history.state is ShardState.PENDING
    assert (history.failed, history.died, history.voided, history.released) == (0, 0, 3, 3)


def test_reconcile_acknowledged_part_that_is_gone_is_scored_again(output: Output) -> None:
    output.score_all(dead=[1])
    shard = output.plan.shards[0]
    path = output.layout.part("m1", 0, *shard.key)
    path.unlink()
    with output.open() as manifest:
        run, plan, _ = output.start(manifest)
        resume = manifest.reconcile(plan, [])
        assert (resume.lost, resume.pending) == (1, 1)
        assert (manifest.counts("m1").scored, manifest.counts("m1").dead) == (21, 0)
        output.score(manifest, run, plan, shard, dead=[1])
        assert (manifest.counts("m1").scored, manifest.counts("m1").dead) == (24, 1)
        manifest.publish()
    assert rows(output.layout.manifest, "SELECT count(*) FROM dead_letters") == [(1,)]


def test_reconcile_damaged_part_stays_pending_and_is_repaired(output: Output) -> None:
    with output.open() as manifest:
        run, plan, shards = output.start(manifest)
        output.publish(plan, shards[0])
        path = output.layout.part("m1", 0, *shards[0].key)
        path.write_bytes(path.read_bytes()[:-1])
        resume = manifest.reconcile(plan, [])
        assert (resume.adopted, resume.damaged, resume.pending) == (0, (str(path),), 8)
        output.score(manifest, run, plan, shards[0])
        assert manifest.reconcile(plan, []).damaged == ()
    assert parts.read_footer(path).scored == 4


def test_reconcile_part_of_another_ranker_is_not_adopted(output: Output) -> None:
    with output.open() as manifest:
        _, plan, shards = output.start(manifest)
        other = replace(plan, binding=replace(plan.binding, components={"weights": "other"}))
        output.publish(other, shards[0])
        resume = manifest.reconcile(plan, [])
        assert (resume.adopted, len(resume.damaged)) == (0, 1)


def test_reconcile_part_of_no_shard_is_moved_aside(output: Output) -> None:
    with output.open() as manifest:
        _, plan, shards = output.start(manifest)
        output.publish(plan, replace(shards[0], shard_id="ab" * 16))
        manifest.publish()
        assert rows(output.layout.manifest, "SELECT count(*) FROM scores") == [(4,)]
        assert len(manifest.reconcile(plan, []).stray) == 1
        assert rows(output.layout.manifest, "SELECT count(*) FROM scores") == [(0,)]
        assert manifest.reconcile(plan, []).stray == ()


def test_repair_puts_a_shard_back(output: Output) -> None:
    output.score_all()
    with output.open() as manifest:
        _, plan, shards = output.start(manifest)
        manifest.repair("m1", [shards[3].key])
        assert manifest.histories("m1")[shards[3].key].state is ShardState.PENDING
        assert manifest.counts("m1").shards["pending"] == 1
        assert plan


def test_start_removes_what_a_killed_driver_left(output: Output) -> None:
    output.score_all()
    shard = output.plan.shards[0]
    left = [
        output.layout.private / ".tmp-0123.duckdb",
        output.layout.private / "ids-0123" / "spill",
        output.layout.part("m1", 0, *shard.key).parent / ".tmp-0123",
    ]
    for path in left:
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(b"half")
    output.score_all()
    assert [path for path in left if path.exists()] == []
    assert not (output.layout.private / "ids-0123").exists()


# -- loss and damage -----------------------------------------------------------------------------


def state_of(output: Output) -> tuple[object, ...]:
    """What a rebuilt manifest must agree on."""
    with output.open() as manifest:
        manifest.publish()
        histories = {key: history.state for key, history in manifest.histories("m1").items()}
        counts = manifest.counts("m1")
    letters = rows(
        output.layout.manifest, "SELECT id, state, doc_id, row, docs, message FROM dead_letters ORDER BY ALL"
    )
    return histories, counts, letters


@pytest.fixture(scope="module")
def history(tmp_path_factory: pytest.TempPathFactory) -> Output:
    """Dead letters of every state: dead, redriven, resolved. Read only; tests take a copy."""
    output = make_output(tmp_path_factory.mktemp("history"), docs=25, group=10, shard_size=4)
    output.score_all(dead=[1, 2, 12])
    for where, still in (("row = 1", ()), ("row = 2", (2,))):
        with output.open() as manifest:
            output.start(manifest)
            manifest.redrive("m1", where=where, dry_run=False)
        output.score_all(dead=still)
    with output.open() as manifest:
        output.start(manifest)
        manifest.redrive("m1", where="row = 12", dry_run=False)
    return output


def restart(output: Output) -> bool:
    with output.open() as manifest:
        _, plan, _ = output.start(manifest)
        manifest.reconcile(plan, read_orders(output.layout, "m1"))
        return manifest.rebuilt


def delete(path: Path) -> None:
    path.unlink()


def truncate_to_nothing(path: Path) -> None:
    path.write_bytes(b"")


def garble(path: Path) -> None:
    data = bytearray(path.read_bytes())
    for at in random.Random(1).sample(range(len(data)), 400):
        data[at] ^= 0xFF
    path.write_bytes(data)


def stale_wal(path: Path) -> None:
    path.unlink()
    path.with_name(path.name + ".wal").write_bytes(b"left behind" * 100)


@pytest.mark.parametrize(
    "damage",
    [delete, garble, stale_wal, truncate_to_nothing],  # cut anywhere: see test_crash.py
)
def test_manifest_lost_or_damaged_is_rebuilt_from_the_files(
    history: Output, tmp_path: Path, damage: Callable[[Path], None]
) -> None:
    shutil.copytree(history.root, tmp_path / "copy")
    spec = replace(history.spec, path=str(tmp_path / "copy" / "corpus"))
    output = Output(root=tmp_path / "copy", spec=spec)
    assert not restart(output)
    before = state_of(output)
    damage(output.layout.live)
    assert restart(output)
    assert state_of(output) == before
    output.score_all()
    assert verify(output.layout, "m1").ok


def test_manifest_damaged_is_kept_aside(output: Output) -> None:
    output.score_all()
    output.layout.live.write_bytes(b"x" * 5000)
    assert restart(output)
    (aside,) = output.layout.private.glob("live.duckdb.damaged-*")
    assert aside.read_bytes() == b"x" * 5000


def test_manifest_open_in_another_process_is_an_error_not_damage(output: Output) -> None:
    output.score_all()
    code = "import duckdb, sys; c = duckdb.connect(sys.argv[1]); print('open', flush=True); sys.stdin.readline()"
    with subprocess.Popen(
        [sys.executable, "-c", code, str(output.layout.live)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        with pytest.raises(ManifestError, match="another process"):
            output.open()
        process.kill()
    assert not restart(output)


DRIVER = """
import os, signal, sys
from pathlib import Path
from shards.types import CorpusSpec, EventKind
from tests.outputs import Output, event, verdict
root = Path(sys.argv[1])
spec = CorpusSpec(path=str(root / "corpus"), id_column="doc_id", text_column="text", shard_size=4)
output = Output(root=root, spec=spec)
manifest = output.open()
run, plan, shards = output.start(manifest)
output.score(manifest, run, plan, shards[0], dead=[1])
manifest.publish()
manifest.commit(run, [event(EventKind.LEASED, shard) for shard in shards[1:4]])
manifest.commit(run, [verdict(output.publish(plan, shards[1]))])
output.publish(plan, shards[2])
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_driver_killed_between_part_and_ack_loses_nothing(output: Output) -> None:
    process = subprocess.run(
        [sys.executable, "-c", DRIVER, str(output.root)], check=False, cwd=Path(__file__).parent.parent
    )
    assert process.returncode == -signal.SIGKILL
    with output.open() as manifest:
        assert not manifest.rebuilt
        _, plan, _ = output.start(manifest)
        resume = manifest.reconcile(plan, [])
    assert (resume.adopted, resume.released, resume.done, resume.pending) == (1, 1, 3, 5)
    output.score_all()
    assert verify(output.layout, "m1").ok


# -- migrations ----------------------------------------------------------------------------------


def test_migrations_newer_schema_is_refused_and_left_alone(output: Output) -> None:
    output.score_all()
    with duckdb.connect(str(output.layout.live)) as connection:
        connection.execute("INSERT INTO schema_version VALUES (99, now()::TIMESTAMP)")
    with pytest.raises(ManifestError, match="schema version 99"):
        output.open()
    assert not list(output.layout.private.glob("*.damaged-*"))


def test_migrations_a_step_is_applied_once_and_recorded(output: Output, monkeypatch: pytest.MonkeyPatch) -> None:
    output.score_all()
    monkeypatch.setattr(migrations, "STEPS", (*migrations.STEPS, "ALTER TABLE runs ADD COLUMN more VARCHAR"))
    for _ in range(2):
        output.open().close()
    versions = rows(output.layout.live, "SELECT version FROM schema_version ORDER BY version")
    assert versions == [(number,) for number in range(1, len(migrations.STEPS) + 1)]
    assert rows(output.layout.live, "SELECT more FROM runs") == [(None,)]


def test_migrations_a_step_that_fails_leaves_the_version(output: Output, monkeypatch: pytest.MonkeyPatch) -> None:
    output.score_all()
    step = "ALTER TABLE runs ADD COLUMN more VARCHAR; SELECT nonsense"
    with monkeypatch.context() as patch:
        patch.setattr(migrations, "STEPS", (*migrations.STEPS, step))
        connection = duckdb.connect(str(output.layout.live))
        with pytest.raises(duckdb.Error):
            migrations.migrate(connection)
        connection.close()
    with output.open() as manifest:
        assert not manifest.rebuilt
        assert manifest.counts("m1").scored == 25


def test_manifest_methods_after_a_copy_of_the_output_work(output: Output, tmp_path: Path) -> None:
    output.score_all(dead=[0])
    shutil.copytree(output.root, tmp_path / "copy")
    other = Output(root=tmp_path / "copy", spec=output.spec)
    with Manifest.open(other.layout, now=lambda: NOW) as manifest:
        assert (manifest.counts("m1").scored, manifest.counts("m1").dead) == (24, 1)


def test_whole_letter_without_documents_is_one_letter(output: Output) -> None:
    (output.root / "corpus" / "z.parquet").touch()
    output.spec = replace(output.spec, skip_unreadable=True)
    with output.open() as manifest:
        run, plan, shards = output.start(manifest)
        assert shards[-1].unreadable
        manifest.commit(run, [verdict(output.bury(plan, shards[-1]))])
        (letter,) = manifest.letters("m1", 0).to_pylist()
    assert (letter["docs"], letter["row"], letter["state"]) == (0, None, "dead")
