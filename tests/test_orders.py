"""Redrives: dead letters put back, generation by generation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from shards import dlq, parts
from shards.errors import PlanError, UsageError
from shards.manifest import Redriven
from shards.orders import read_orders, shards_of, write_order
from shards.snapshot import query
from shards.types import Failure, Plan, QuerySet, Shard, Stage
from shards.verify import verify
from tests.outputs import Output, make_footer, make_output, verdict


@pytest.fixture
def output(tmp_path: Path) -> Output:
    return make_output(tmp_path, docs=25, group=10, shard_size=4)


def redrive(output: Output, where: str | None = None, *, dry_run: bool = False) -> Redriven:
    with output.open() as manifest:
        return manifest.redrive("m1", where=where, dry_run=dry_run)


def states(output: Output) -> list[tuple[str | int | None, int, str]]:
    letters = dlq.dead_letters(output.layout, state=None)
    return [(letter["doc_id"], letter["generation"], letter["state"]) for letter in letters]


# -- order files ---------------------------------------------------------------------------------


def test_order_read_back_is_equal_and_generations_count_up(output: Output) -> None:
    plan = output.plan
    a, b = plan.shards[0], plan.shards[3]
    layout = output.layout
    assert write_order(layout, "m1", 0, {a.shard_id: [1, 2], b.shard_id: None}) == 1
    assert write_order(layout, "m1", 0, {b.shard_id: [11]}, {b.shard_id: {11: ["q"]}}) == 2
    assert write_order(layout, "m2", 0, {}) == 1
    shards = shards_of(plan, read_orders(layout, "m1"))
    assert [shard.key for shard in shards] == [(a.shard_id, 1), (b.shard_id, 1), (b.shard_id, 2)]
    assert [shard.only for shard in shards] == [(1, 2), None, (1,)]
    assert [shard.docs for shard in shards] == [2, 4, 1]
    assert [shard.only_queries for shard in shards] == [(), (), (("q",),)]
    assert [shard.keys(5) for shard in shards] == [10, 20, 1]


def test_order_any_flipped_bit_is_noticed(output: Output) -> None:
    write_order(output.layout, "m1", 0, {"ab" * 16: [1]})
    path = output.layout.orders_dir("m1") / "g1.json"
    data = path.read_bytes()
    for at in range(len(data)):
        changed = bytearray(data)
        changed[at] ^= 1
        path.write_bytes(changed)
        with pytest.raises(PlanError, match="damaged redrive order"):
            read_orders(output.layout, "m1")


def test_order_for_a_shard_that_is_not_planned_is_an_error(output: Output) -> None:
    write_order(output.layout, "m1", 0, {"ab" * 16: [1]})
    with pytest.raises(PlanError, match="not in the plan"):
        shards_of(output.plan, read_orders(output.layout, "m1"))


# -- redriving -----------------------------------------------------------------------------------


def test_redrive_success_resolves_the_letter(output: Output) -> None:
    output.score_all(dead=[1, 2, 12])
    assert redrive(output) == Redriven(generation=1, letters=3, docs=3, shards=2)
    assert states(output) == [("d1", 0, "redriven"), ("d2", 0, "redriven"), ("d12", 0, "redriven")]
    output.score_all()
    assert [state for _, _, state in states(output)] == ["resolved"] * 3
    assert dlq.dead_letters(output.layout) == []
    assert query(output.layout, "SELECT count(*), count(DISTINCT doc_id) FROM scores").rows == [(25, 25)]
    result = verify(output.layout, "m1")
    assert (result.ok, result.scored_docs, result.dead_docs) == (True, 25, 0)


def test_redrive_that_fails_again_is_a_new_letter_and_keeps_history(output: Output) -> None:
    output.score_all(dead=[1, 2])
    redrive(output)
    output.score_all(dead=[2])
    assert states(output) == [("d1", 0, "resolved"), ("d2", 0, "redriven"), ("d2", 1, "dead")]
    assert redrive(output) == Redriven(generation=2, letters=1, docs=1, shards=1)
    output.score_all()
    assert states(output) == [("d1", 0, "resolved"), ("d2", 0, "resolved"), ("d2", 1, "resolved")]
    assert verify(output.layout, "m1").ok


def test_redrive_whole_shard_and_then_one_of_its_rows(output: Output) -> None:
    with output.open() as manifest:
        run, plan, shards = output.start(manifest)
        manifest.commit(run, [verdict(output.bury(plan, shards[1]))])
    assert redrive(output) == Redriven(generation=1, letters=1, docs=4, shards=1)
    output.score_all(dead=[5])
    found = states(output)
    assert sorted((generation, state) for _, generation, state in found) == [(0, "redriven"), (1, "dead")]
    redrive(output)
    output.score_all()
    assert {state for _, _, state in states(output)} == {"resolved"}
    assert query(output.layout, "SELECT count(*), count(DISTINCT doc_id) FROM scores").rows == [(25, 25)]
    assert verify(output.layout, "m1").ok


def test_redrive_generation_that_is_buried_asks_for_its_rows_only(output: Output) -> None:
    output.score_all(dead=[1, 2])
    redrive(output)
    with output.open() as manifest:
        run, plan, shards = output.start(manifest)
        manifest.commit(run, [verdict(output.bury(plan, shards[-1]))])
        assert manifest.counts("m1").dead == 2
    assert redrive(output) == Redriven(generation=2, letters=1, docs=2, shards=1)
    assert shards_of(output.plan, read_orders(output.layout, "m1"))[-1].only == (1, 2)
    output.score_all()
    assert verify(output.layout, "m1").ok
    assert {state for _, _, state in states(output)} == {"resolved"}


def test_redrive_dry_run_writes_nothing(output: Output) -> None:
    output.score_all(dead=[1, 2])
    assert redrive(output, "row = 2", dry_run=True) == Redriven(generation=0, letters=1, docs=1, shards=1)
    assert read_orders(output.layout, "m1") == []
    assert [state for _, _, state in states(output)] == ["dead", "dead"]


def test_redrive_twice_finds_nothing_the_second_time(output: Output) -> None:
    output.score_all(dead=[1])
    redrive(output)
    assert redrive(output) == Redriven(generation=0, letters=0, docs=0, shards=0)
    assert len(read_orders(output.layout, "m1")) == 1


def test_redrive_condition_selects_by_any_column(output: Output) -> None:
    output.score_all(dead=[1, 2, 12])
    found = redrive(output, "doc_id LIKE 'd1%' AND stage = 'score' -- comment")
    assert (found.letters, found.shards) == (2, 2)


def test_redrive_condition_cannot_bring_in_letters_of_its_own(output: Output) -> None:
    output.score_all(dead=[1])
    found = redrive(output, "true) UNION ALL SELECT * FROM (VALUES ('made up'), ('made up')")
    assert (found.letters, found.docs) == (1, 1)


@pytest.mark.parametrize(
    "where",
    [
        "nonsense = 1",
        "row =",
        "1 = 1); DROP TABLE dead_letters; SELECT (1",
        "EXISTS (SELECT * FROM read_csv('/etc/passwd'))",
        "true) UNION ALL SELECT id, 1 FROM (SELECT 1 AS id",
    ],
)
def test_redrive_condition_that_is_wrong_is_one_line_and_orders_nothing(output: Output, where: str) -> None:
    output.score_all(dead=[1])
    with pytest.raises(UsageError, match="--where") as error:
        redrive(output, where)
    assert "\n" not in str(error.value)
    assert read_orders(output.layout, "m1") == []


def test_redrive_unknown_model_version_says_what_there_is(output: Output) -> None:
    output.score_all()
    with output.open() as manifest, pytest.raises(UsageError, match="m1"):
        manifest.redrive("other", where=None, dry_run=False)


def test_redrive_on_a_lost_manifest_rebuilds_it_first(output: Output) -> None:
    output.score_all(dead=[1])
    output.layout.live.unlink()
    assert redrive(output).letters == 1


def test_redrive_killed_between_order_and_event_is_done_by_the_next_start(output: Output) -> None:
    output.score_all(dead=[1])
    write_order(output.layout, "m1", 0, {output.plan.shards[0].shard_id: [1]})
    output.score_all()
    assert states(output) == [("d1", 0, "resolved")]
    assert verify(output.layout, "m1").ok


def test_redrive_survives_a_moved_corpus(output: Output) -> None:
    output.score_all(dead=[1])
    redrive(output)
    corpus = output.root / "corpus"
    (corpus / "a.parquet").rename(corpus / "z.parquet")
    output.score_all()
    assert verify(output.layout, "m1").scored_docs == 25


def test_redrive_single_query_of_a_document_leaves_the_others_alone(output: Output) -> None:
    output.queries = QuerySet(ids=("a", "b"), texts=("x", "y"))
    with output.open() as manifest:
        run, plan, shards = output.start(manifest)
        manifest.reconcile(plan, [])
        for shard in shards[1:]:
            output.score(manifest, run, plan, shard)
        publish_with_one_dead_pair(output, plan, shards[0])
        manifest.reconcile(plan, [])
        assert manifest.counts("m1").dead == 1
        manifest.redrive("m1", where=None, dry_run=False)
    (again,) = shards_of(output.plan, read_orders(output.layout, "m1"))
    assert (again.only, again.only_queries, again.keys(2)) == ((1,), (("b",),), 1)
    result = verify(output.layout, "m1")
    assert (result.ok, result.missing_docs, result.dead_docs) == (True, 1, 0)
    with output.open() as manifest:
        _, plan, _ = output.start(manifest)
        schema = parts.part_schema("string", query_set=True, label_scores=False)
        parts.publish(output.layout, replace(make_footer(plan, again), scored=1), pairs(schema, again, [(1, "b")]))
        assert manifest.reconcile(plan, read_orders(output.layout, "m1")).adopted == 1
        assert (manifest.counts("m1").scored, manifest.counts("m1").dead) == (50, 0)
        manifest.publish()
    assert states(output) == [("d1", 0, "resolved")]
    assert verify(output.layout, "m1").missing_docs == 0


def pairs(schema: pa.Schema, shard: Shard, keys: Sequence[tuple[int, str]]) -> pa.Table:
    return parts.make_rows(
        schema,
        doc_ids=[f"d{row}" for row, _ in keys],
        query_ids=[query_id for _, query_id in keys],
        model_version="m1",
        scores=np.full(len(keys), 0.5, np.float32),
        label_scores=None,
        n_tokens=[1] * len(keys),
        truncated=[False] * len(keys),
        text_hashes=[0] * len(keys),
        shard_id=shard.shard_id,
    )


def publish_with_one_dead_pair(output: Output, plan: Plan, shard: Shard) -> None:
    schema = parts.part_schema("string", query_set=True, label_scores=False)
    keys = [(row, query_id) for row in range(4) for query_id in "ab" if (row, query_id) != (1, "b")]
    failure = Failure(
        row=1, doc_id="d1", stage=Stage.SCORE, error_type="E", message="m", traceback="t", query_id="b"
    )
    footer = replace(make_footer(plan, shard), scored=7, dead=1, failures=(failure,))
    parts.publish(output.layout, footer, pairs(schema, shard, keys))


def test_event_of_a_redrive_is_in_the_history(output: Output) -> None:
    output.score_all(dead=[1])
    redrive(output)
    sql = "SELECT event, generation FROM attempts ORDER BY seq DESC LIMIT 1"
    assert query(output.layout, sql).rows == [("redriven", 1)]
