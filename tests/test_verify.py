"""Verification: every way in which an output can be wrong is told apart."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pytest

from shards import parts, sealed
from shards.errors import UsageError
from shards.types import QuerySet
from shards.verify import Verification, verify
from tests.outputs import Output, make_footer, make_output, write_corpus


@pytest.fixture
def output(tmp_path: Path) -> Output:
    return make_output(tmp_path, docs=25, group=10, shard_size=4)


def check(output: Output) -> Verification:
    return verify(output.layout, "m1")


def part(output: Output, index: int) -> Path:
    return output.layout.part("m1", 0, *output.plan.shards[index].key)


def test_verify_complete_run_is_ok(output: Output) -> None:
    output.score_all(dead=[3])
    result = check(output)
    assert result.ok
    assert result.complete
    assert (result.expected_docs, result.scored_docs, result.dead_docs, result.missing_docs) == (25, 24, 1, 0)
    assert (result.parts, result.damaged_parts, result.duplicate_keys) == (8, 0, 0)
    assert result.lines() == ["ok: 25 expected, 24 scored, 1 dead, 0 missing, in 8 parts of m1"]
    assert verify(output.layout, None) == result


def test_verify_unfinished_run_is_ok_with_documents_missing(output: Output) -> None:
    with output.open() as manifest:
        run, plan, shards = output.start(manifest)
        output.score(manifest, run, plan, shards[0])
        manifest.publish()
    result = check(output)
    assert (result.ok, result.complete, result.missing_docs) == (True, False, 21)


def test_verify_without_any_manifest_uses_the_files(output: Output) -> None:
    output.score_all()
    output.layout.manifest.unlink()
    output.layout.live.unlink()
    result = check(output)
    assert (result.ok, result.scored_docs) == (True, 25)
    part(output, 0).unlink()
    assert (check(output).ok, check(output).missing_docs) == (True, 4)


def test_verify_acknowledged_part_that_is_gone_is_not_ok(output: Output) -> None:
    output.score_all()
    part(output, 2).unlink()
    result = check(output)
    assert (result.ok, result.missing_docs) == (False, 2)
    assert result.missing_parts == (output.plan.shards[2].key,)


@pytest.mark.parametrize("position", [0.0, 0.1, 0.5, 0.9, 0.999])
def test_verify_flipped_bit_is_not_ok(output: Output, position: float) -> None:
    output.score_all()
    path = part(output, 0)
    data = bytearray(path.read_bytes())
    data[int(len(data) * position)] ^= 4
    path.write_bytes(data)
    result = check(output)
    assert (result.ok, result.damaged_parts, result.missing_docs) == (False, 1, 4)
    assert result.damaged_keys == (output.plan.shards[0].key,)
    assert str(path) in result.damaged[0]


def test_verify_repaired_output_is_ok_again(output: Output) -> None:
    output.score_all()
    part(output, 0).write_bytes(b"PAR1")
    part(output, 1).unlink()
    result = check(output)
    with output.open() as manifest:
        output.start(manifest)
        manifest.repair("m1", [*result.damaged_keys, *result.missing_parts])
    output.score_all()
    assert check(output).ok


def test_verify_part_of_no_shard_is_not_ok(output: Output) -> None:
    output.score_all()
    output.publish(output.plan, replace(output.plan.shards[0], shard_id="ab" * 16))
    result = check(output)
    assert (result.ok, len(result.unexpected_parts)) == (False, 1)


def test_verify_part_under_another_shards_name_is_damaged(output: Output) -> None:
    output.score_all()
    part(output, 0).write_bytes(part(output, 1).read_bytes())
    assert check(output).damaged_keys == (output.plan.shards[0].key,)


def test_verify_part_of_another_ranker_is_damaged(output: Output) -> None:
    output.score_all()
    other = replace(output.plan, binding=replace(output.plan.binding, components={"weights": "w2"}))
    part(output, 0).unlink()
    output.publish(other, output.plan.shards[0])
    assert check(output).damaged_parts == 1


def overwrite(output: Output, index: int, doc_ids: list[str | int]) -> None:
    """A part with a good hash and other ids: what a program error would write."""
    shard = output.plan.shards[index]
    footer, rows = parts.read_part(part(output, index))
    column = pa.array(doc_ids, rows.schema.field("doc_id").type)
    rows = rows.set_column(0, rows.schema.field("doc_id"), column)
    part(output, index).unlink()
    parts.publish(output.layout, footer, rows)
    assert shard.key == footer.key


def test_verify_key_in_two_parts_is_a_duplicate(output: Output) -> None:
    output.score_all()
    overwrite(output, 0, ["d0", "d1", "d2", "d9"])
    overwrite(output, 3, ["d10", "d11", "d12", "d0"])
    result = check(output)
    assert (result.ok, result.duplicate_keys, result.duplicates) == (False, 2, ("d0", "d9"))


def test_verify_key_twice_in_one_part_is_a_duplicate(output: Output) -> None:
    output.score_all()
    overwrite(output, 0, ["d0", "d1", "d2", "d2"])
    assert check(output).duplicates == ("d2",)


def test_verify_scored_and_dead_key_is_a_duplicate(output: Output) -> None:
    output.score_all(dead=[20])
    overwrite(output, 0, ["d0", "d1", "d2", "d20"])
    assert check(output).duplicates == ("d20",)


def test_verify_integer_ids_compare_exactly(output: Output) -> None:
    write_corpus(output.root / "corpus" / "a.parquet", [2**53 + i for i in range(8)])
    output.score_all(dead=[2])
    assert check(output).ok
    overwrite(output, 0, [2**53, 2**53 + 1, 2**53 + 7])
    assert check(output).duplicates == (str(2**53 + 7),)


def test_verify_with_queries_counts_keys(output: Output) -> None:
    output.queries = QuerySet(ids=("a", "b"), texts=("x", "y"))
    output.score_all(dead=[3])
    result = check(output)
    assert (result.ok, result.expected_docs, result.scored_docs, result.dead_docs) == (True, 50, 48, 2)


def test_verify_document_that_is_dead_and_scored_in_one_part_is_damaged(output: Output) -> None:
    output.queries = QuerySet(ids=("a", "b"), texts=("x", "y"))
    output.score_all(dead=[3])
    overwrite(output, 0, ["d0", "d0", "d1", "d1", "d3", "d3"])
    assert check(output).damaged_parts == 1


def test_verify_null_ids_are_dead_and_no_duplicates(output: Output) -> None:
    write_corpus(output.root / "corpus" / "a.parquet", ["x", None, None, "y", None], text=list("abcde"))
    output.score_all()
    result = check(output)
    assert (result.ok, result.scored_docs, result.dead_docs) == (True, 2, 3)


def test_verify_rows_fewer_than_the_footer_says_are_damaged(output: Output) -> None:
    output.score_all()
    footer, rows = parts.read_part(part(output, 0))
    value = sealed.unseal(part(output, 0).read_bytes(), "part")
    part(output, 0).write_bytes(sealed.seal(rows.slice(1), value))
    assert check(output).damaged_parts == 1
    assert footer.scored == 4


def test_verify_after_exit_0_with_a_shard_unscored_is_not_ok(output: Output) -> None:
    with output.open() as manifest:
        run, plan, shards = output.start(manifest)
        for shard in shards[1:]:
            output.score(manifest, run, plan, shard)
        manifest.end_run(run, state="complete", exit_code=0, message="", summary={})
        manifest.publish()
    result = check(output)
    assert (result.ok, result.complete, result.missing_docs) == (False, True, 4)


def test_verify_whole_dead_shard_counts_all_its_documents(output: Output) -> None:
    with output.open() as manifest:
        _, plan, shards = output.start(manifest)
        output.bury(plan, shards[0])
    assert (check(output).dead_docs, check(output).missing_docs) == (4, 21)
    assert make_footer(plan, shards[0]).expected == 4


def test_verify_unknown_name_says_what_there_is(output: Output) -> None:
    output.score_all()
    with pytest.raises(UsageError, match="m1"):
        verify(output.layout, "other")
