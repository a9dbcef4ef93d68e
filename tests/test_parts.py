"""Parts: written once, whole or not at all, and no flipped bit goes unnoticed."""

from __future__ import annotations

import errno
import os
import random
import resource
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shards import files, parts, sealed
from shards.errors import PartDamaged
from shards.types import Failure, Footer, Plan, Stage
from tests.outputs import Output, make_footer, make_output


@pytest.fixture
def output(tmp_path: Path) -> Output:
    return make_output(tmp_path, docs=25, shard_size=10)


def rows_of(output: Output, plan: Plan, value: float = 1.0, count: int = 10) -> pa.Table:
    return parts.make_rows(
        parts.part_schema("string", query_set=False, label_scores=False),
        doc_ids=[f"d{i}" for i in range(count)],
        query_ids=None,
        model_version=plan.model_version,
        scores=np.full(count, value, np.float32),
        label_scores=None,
        n_tokens=[1] * count,
        truncated=[False] * count,
        text_hashes=[2**64 - 1] * count,
        shard_id=plan.shards[0].shard_id,
    )


def footer_of(plan: Plan, **kwargs: object) -> Footer:
    return replace(make_footer(plan, plan.shards[0]), **{"scored": 10, **kwargs})  # type: ignore[arg-type]


def path_of(output: Output, footer: Footer) -> Path:
    return output.layout.part("m1", 0, footer.shard_id, footer.generation)


# -- what a part is ------------------------------------------------------------------------------


def test_part_read_back_gives_footer_and_rows(output: Output) -> None:
    plan = output.plan
    failure = Failure(row=9, doc_id="d9", stage=Stage.SCORE, error_type="E", message="m", traceback="t")
    footer = footer_of(plan, scored=9, dead=1, failures=(failure,))
    rows = rows_of(output, plan, count=9)
    assert parts.publish(output.layout, footer, rows) == (footer, False)
    assert parts.read_footer(path_of(output, footer)) == footer
    read_footer, read_rows = parts.read_part(path_of(output, footer))
    assert (read_footer, read_rows) == (footer, rows)


def test_part_file_is_plain_parquet_with_the_stated_encodings(output: Output) -> None:
    plan = output.plan
    footer, _ = parts.publish(output.layout, footer_of(plan), rows_of(output, plan))
    metadata = pq.read_metadata(path_of(output, footer))
    assert metadata.num_row_groups == 1
    columns = {metadata.schema.column(i).name: metadata.row_group(0).column(i) for i in range(metadata.num_columns)}
    assert {name for name, column in columns.items() if column.has_dictionary_page} == {"model_version", "shard_id"}
    assert "BYTE_STREAM_SPLIT" in columns["score"].encodings
    assert {column.compression for column in columns.values()} == {"ZSTD"}
    assert set(metadata.metadata) == {b"rescore", b"rescore.hash"}
    kinds = duckdb.sql(f"DESCRIBE SELECT * FROM '{path_of(output, footer)}'").fetchall()
    assert [(name, kind) for name, kind, *_ in kinds] == [
        ("doc_id", "VARCHAR"),
        ("model_version", "VARCHAR"),
        ("score", "FLOAT"),
        ("n_tokens", "INTEGER"),
        ("truncated", "BOOLEAN"),
        ("text_hash", "UBIGINT"),
        ("shard_id", "VARCHAR"),
    ]


def test_schema_with_queries_and_labels_keeps_the_order() -> None:
    schema = parts.part_schema("int64", query_set=True, label_scores=True)
    assert schema.names[:5] == ["doc_id", "query_id", "model_version", "score", "label_scores"]
    rows = parts.make_rows(
        schema,
        doc_ids=[2**53 + 1, -1],
        query_ids=["a", "b"],
        model_version="m",
        scores=np.array([1, 2], np.float32),
        label_scores=np.array([[1, 2, 3], [4, 5, 6]], np.float32),
        n_tokens=np.array([1, 2]),
        truncated=np.array([True, False]),
        text_hashes=[0, 2**64 - 1],
        shard_id="s",
    )
    assert rows.schema == schema
    assert rows.column("doc_id").to_pylist() == [2**53 + 1, -1]
    assert rows.column("label_scores").to_pylist() == [[1, 2, 3], [4, 5, 6]]


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_rows_score_that_is_not_finite_is_refused(output: Output, value: float) -> None:
    with pytest.raises(AssertionError):
        rows_of(output, output.plan, value)


@given(st.tuples(st.text(), st.text()), st.tuples(st.text(), st.text()))
def test_text_hash_differs_where_query_or_text_differ(one: tuple[str, str], two: tuple[str, str]) -> None:
    first, second = parts.text_hashes([one, two])
    assert (first == second) == (one == two)
    assert len(set(parts.text_hashes([("ab", "c"), ("a", "bc"), ("ab", "d"), ("b", "d")]))) == 4
    assert 0 <= first < 2**64
    assert parts.text_hashes([one, one, two, one]) == [first, first, second, first]


def test_part_long_messages_are_cut_and_lone_surrogates_survive(output: Output) -> None:
    plan = output.plan
    failure = Failure(
        row=0,
        doc_id="d0",
        stage=Stage.READ,
        error_type="E",
        message="m" * 5000,
        traceback="a" * 9000 + "rescore.hash \ud800",
    )
    footer = footer_of(plan, scored=9, dead=1, failures=(failure,))
    stands, _ = parts.publish(output.layout, footer, rows_of(output, plan, count=9))
    assert len(stands.failures[0].message) == 2048
    assert len(stands.failures[0].traceback) == 8192
    assert stands.failures[0].traceback.endswith("rescore.hash \ud800")
    assert parts.read_footer(path_of(output, footer)) == stands


def test_part_whose_counts_do_not_add_up_is_never_written(output: Output) -> None:
    plan = output.plan
    with pytest.raises(AssertionError):
        parts.publish(output.layout, footer_of(plan, dead=1), rows_of(output, plan))
    with pytest.raises(AssertionError):
        parts.publish(output.layout, footer_of(plan), rows_of(output, plan, count=9))


# -- damage --------------------------------------------------------------------------------------


def test_part_any_flipped_bit_is_noticed(output: Output) -> None:
    plan = output.plan
    footer, _ = parts.publish(output.layout, footer_of(plan), rows_of(output, plan))
    data = path_of(output, footer).read_bytes()
    sealed.unseal(data, "whole")
    for at in range(len(data)):
        changed = bytearray(data)
        changed[at] ^= 1 << random.Random(at).randrange(8)
        with pytest.raises(PartDamaged):
            sealed.unseal(bytes(changed), "flipped")


def test_part_cut_or_lengthened_anywhere_is_noticed(output: Output) -> None:
    plan = output.plan
    footer, _ = parts.publish(output.layout, footer_of(plan), rows_of(output, plan))
    path = path_of(output, footer)
    data = path.read_bytes()
    for changed in [*(data[:keep] for keep in range(0, len(data), 13)), data + b"\0", b"\0" + data]:
        path.write_bytes(changed)
        with pytest.raises(PartDamaged):
            parts.read_footer(path)


# -- write once ----------------------------------------------------------------------------------


def test_publish_second_writer_adopts_what_stands(output: Output) -> None:
    plan = output.plan
    first, _ = parts.publish(output.layout, footer_of(plan, worker="first"), rows_of(output, plan, 1.0))
    data = path_of(output, first).read_bytes()
    second = footer_of(plan, worker="second", attempt=2)
    assert parts.publish(output.layout, second, rows_of(output, plan, 2.0)) == (first, True)
    assert path_of(output, first).read_bytes() == data


def test_publish_many_writers_at_once_agree_on_one(output: Output) -> None:
    plan = output.plan
    layout, rows = output.layout, rows_of(output, plan)

    def write(number: int) -> tuple[Footer, bool]:
        return parts.publish(layout, footer_of(plan, worker=f"w{number}"), rows)

    with ThreadPoolExecutor(16) as pool:
        results = list(pool.map(write, range(32)))
    assert len({footer for footer, _ in results}) == 1
    assert [adopted for _, adopted in results].count(False) == 1


def test_publish_over_a_damaged_part_repairs_it(output: Output) -> None:
    plan = output.plan
    first, _ = parts.publish(output.layout, footer_of(plan), rows_of(output, plan))
    path = path_of(output, first)
    path.write_bytes(path.read_bytes()[:-9])
    second = footer_of(plan, worker="second")
    assert parts.publish(output.layout, second, rows_of(output, plan)) == (second, False)
    assert parts.read_footer(path) == second


def test_publish_over_a_part_of_another_ranker_replaces_it(output: Output) -> None:
    plan = output.plan
    parts.publish(output.layout, footer_of(plan, binding="other"), rows_of(output, plan))
    ours = footer_of(plan)
    assert parts.publish(output.layout, ours, rows_of(output, plan)) == (ours, False)


def test_publish_leaves_no_temp_file(output: Output) -> None:
    plan = output.plan
    footer, _ = parts.publish(output.layout, footer_of(plan), rows_of(output, plan))
    parts.publish(output.layout, footer_of(plan), rows_of(output, plan))
    assert [item.name for item in path_of(output, footer).parent.iterdir()] == [path_of(output, footer).name]


def test_publish_write_that_fails_raises_and_leaves_nothing(output: Output) -> None:
    plan = output.plan
    footer, rows, layout = footer_of(plan), rows_of(output, plan), output.layout
    path = path_of(output, footer)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))  # as a full disk: the write stops in the middle
    try:
        with pytest.raises(OSError, match="too large"):
            parts.publish(layout, footer, rows)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert not list(path.parent.iterdir())


def test_publish_without_hard_links_uses_a_rename_that_refuses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_links(source: object, target: object) -> None:
        raise OSError(errno.EPERM, "no links here")

    monkeypatch.setattr(os, "link", no_links)
    assert files.publish_new(tmp_path / "a", b"1")
    assert not files.publish_new(tmp_path / "a", b"2")
    assert (tmp_path / "a").read_bytes() == b"1"
    assert [item.name for item in tmp_path.iterdir()] == ["a"]


def test_scan_ignores_temps_seeds_and_strays(output: Output) -> None:
    plan = output.plan
    footer, _ = parts.publish(output.layout, footer_of(plan), rows_of(output, plan))
    parts.write_seed(output.layout, "m1", 0, rows_of(output, plan).schema)
    folder = path_of(output, footer).parent
    for name in (".tmp-0123", f".stray-{footer.shard_id}.g0.parquet.aside", "x.parquet"):
        (folder / name).write_bytes(b"torn")
    assert parts.scan(output.layout, "m1", 0) == {footer.key: path_of(output, footer)}
    assert files.remove_temps(output.layout.epoch_dir("m1", 0)) == 1


def test_seed_written_again_is_left_as_it_is(output: Output) -> None:
    plan = output.plan
    schema = rows_of(output, plan).schema
    parts.write_seed(output.layout, "m1", 0, schema)
    seed = output.layout.epoch_dir("m1", 0) / "_seed" / "seed.parquet"
    inode = seed.stat().st_ino
    parts.write_seed(output.layout, "m1", 0, schema)
    assert seed.stat().st_ino == inode
    seed.write_bytes(b"torn")
    parts.write_seed(output.layout, "m1", 0, schema)
    assert pq.read_schema(seed).remove_metadata() == schema
