"""The corpus: which files, which fingerprint, and what a reader makes of hostile rows."""

from __future__ import annotations

import os
from dataclasses import replace
from itertools import chain
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from shards.corpus import FingerprintCache, Reader, fingerprint, list_files, read_queries
from shards.cut import id_type
from shards.errors import CorpusChanged, CorpusError, ShardUnreadable
from shards.types import CorpusSpec, Shard, Stage
from tests.outputs import invalid_strings, make_output, write_corpus

COLUMNS = ["doc_id", "text"]


def spec_of(path: Path, **kwargs: object) -> CorpusSpec:
    spec = CorpusSpec(path=str(path), id_column="doc_id", text_column="text")
    return replace(spec, **kwargs)  # type: ignore[arg-type]


def shard_of(path: Path, rows: int, **kwargs: object) -> Shard:
    file = fingerprint(str(path), COLUMNS)
    shard = Shard(
        shard_id="0" * 32,
        file=str(path),
        fingerprint=file.fingerprint,
        size=file.size,
        mtime_ns=file.mtime_ns,
        row_group=0,
        start=0,
        rows=rows,
        first_row=0,
    )
    return replace(shard, **kwargs)  # type: ignore[arg-type]


# -- files ---------------------------------------------------------------------------------------


def test_list_files_directory_finds_visible_parquet_sorted(tmp_path: Path) -> None:
    for name in ("b.parquet", "a/c.parquet", "_temporary/x.parquet", ".hidden.parquet", "note.txt"):
        write_corpus(tmp_path / name, ["x"])
    assert list_files(str(tmp_path)) == [str(tmp_path / "a/c.parquet"), str(tmp_path / "b.parquet")]


def test_list_files_recursive_glob_finds_all_levels(tmp_path: Path) -> None:
    for name in ("b.parquet", "a/c.parquet"):
        write_corpus(tmp_path / name, ["x"])
    assert len(list_files(f"{tmp_path}/**/*.parquet")) == 2


def test_list_files_nothing_raises_with_path(tmp_path: Path) -> None:
    with pytest.raises(CorpusError, match="none-here"):
        list_files(str(tmp_path / "none-here"))


# -- fingerprints --------------------------------------------------------------------------------


def test_fingerprint_copy_elsewhere_is_equal(tmp_path: Path) -> None:
    one = write_corpus(tmp_path / "a.parquet", ["x", "y"])
    two = tmp_path / "b.parquet"
    two.write_bytes(one.read_bytes())
    assert fingerprint(str(one), COLUMNS).fingerprint == fingerprint(str(two), COLUMNS).fingerprint


def test_fingerprint_any_changed_byte_of_a_read_column_differs(tmp_path: Path) -> None:
    path = write_corpus(tmp_path / "a.parquet", [f"id-{i}" for i in range(20)])
    before = fingerprint(str(path), COLUMNS).fingerprint
    chunk = pq.read_metadata(path).row_group(0).column(1)
    data = bytearray(path.read_bytes())
    for offset in range(chunk.total_compressed_size):
        at = chunk.dictionary_page_offset + offset
        changed = bytearray(data)
        changed[at] ^= 1
        path.write_bytes(changed)
        assert fingerprint(str(path), COLUMNS).fingerprint != before, offset


def test_fingerprint_cache_damaged_file_is_ignored(tmp_path: Path) -> None:
    path = write_corpus(tmp_path / "a.parquet", ["x"])
    for content in (b"\xff{", b"[1]", b'{"k": 1}', b'{"k": [1]}', b""):
        (tmp_path / "cache").write_bytes(content)
        cache = FingerprintCache(tmp_path / "cache")
        assert cache.get(str(path), COLUMNS) == fingerprint(str(path), COLUMNS)


def test_fingerprint_cache_known_file_is_not_read_again(tmp_path: Path) -> None:
    path = write_corpus(tmp_path / "a.parquet", ["x"])
    cache = FingerprintCache(tmp_path / "cache")
    first = cache.get(str(path), COLUMNS)
    cache.save()
    stat = path.stat()
    path.write_bytes(b"x" * stat.st_size)
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert FingerprintCache(tmp_path / "cache").get(str(path), COLUMNS) == first


@pytest.mark.parametrize("keep", [0, 3, 11, 200, -1])
def test_fingerprint_half_written_file_raises_and_names_it(tmp_path: Path, keep: int) -> None:
    path = write_corpus(tmp_path / "broken.parquet", ["x", "y"])
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(CorpusError, match=r"broken\.parquet") as error:
        fingerprint(str(path), COLUMNS)
    assert "\n" not in str(error.value)


# -- schemas -------------------------------------------------------------------------------------


def check(tmp_path: Path, **columns: object) -> str:
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table(columns), path)
    return id_type([fingerprint(str(path), COLUMNS)], spec_of(path))


def test_schema_missing_column_error_lists_the_columns(tmp_path: Path) -> None:
    with pytest.raises(CorpusError, match=r"no column 'text'.*doc_id, body"):
        check(tmp_path, doc_id=["x"], body=["y"])


@pytest.mark.parametrize(
    ("value", "kind"), [(["a"], "list<"), ({"a": 1}, "struct<"), (1, "int64"), (b"x", "binary")]
)
def test_schema_text_of_wrong_type_error_names_column_and_type(tmp_path: Path, value: object, kind: str) -> None:
    with pytest.raises(CorpusError, match=f"column 'text' in .* has type {kind}"):
        check(tmp_path, doc_id=["x"], text=[value])


@pytest.mark.parametrize("value", [[1.5], [True], [["a"]]])
def test_schema_id_of_wrong_type_error_names_column(tmp_path: Path, value: list[object]) -> None:
    with pytest.raises(CorpusError, match=r"'doc_id'.*an id is an integer or a string"):
        check(tmp_path, doc_id=value, text=["x"])


@pytest.mark.parametrize("kind", [pa.int8(), pa.uint16(), pa.int64(), pa.uint64()])
def test_schema_any_integer_id_becomes_int64(tmp_path: Path, kind: pa.DataType) -> None:
    assert check(tmp_path, doc_id=pa.array([1], kind), text=["x"]) == "int64"


def test_schema_two_id_types_error_names_both_files(tmp_path: Path) -> None:
    one, two = write_corpus(tmp_path / "a.parquet", ["x"]), write_corpus(tmp_path / "b.parquet", [1])
    files = [fingerprint(str(path), COLUMNS) for path in (one, two)]
    with pytest.raises(CorpusError, match=r"a\.parquet.*b\.parquet"):
        id_type(files, spec_of(tmp_path))


def test_schema_null_id_column_follows_the_others(tmp_path: Path) -> None:
    null = tmp_path / "a.parquet"
    pq.write_table(pa.table({"doc_id": pa.nulls(1), "text": ["x"]}), null)
    other = write_corpus(tmp_path / "b.parquet", [1])
    assert id_type([fingerprint(str(path), COLUMNS) for path in (null, other)], spec_of(tmp_path)) == "int64"
    with pytest.raises(CorpusError, match="only nulls"):
        id_type([fingerprint(str(null), COLUMNS)], spec_of(tmp_path))


# -- the reader ----------------------------------------------------------------------------------


def test_reader_null_text_costs_one_document(tmp_path: Path) -> None:
    path = write_corpus(tmp_path / "a.parquet", ["x", "y", "z"], text=["a", None, "c"])
    rows = Reader(spec_of(path), "string").read(shard_of(path, 3))
    assert (rows.doc_ids, rows.rows, rows.texts) == (["x", "z"], [0, 2], ["a", "c"])
    (failure,) = rows.failures
    assert (failure.row, failure.doc_id, failure.stage) == (1, "y", Stage.READ)


def test_reader_invalid_utf8_costs_one_document_and_names_file_and_row(tmp_path: Path) -> None:
    text = invalid_strings([b"good", b"\xff\xfe", b"\xed\xa0\x80", "schön".encode()])
    path = write_corpus(tmp_path / "a.parquet", ["w", "x", "y", "z"], text=text)
    rows = Reader(spec_of(path), "string").read(shard_of(path, 4))
    assert rows.texts == ["good", "schön"]
    assert [failure.doc_id for failure in rows.failures] == ["x", "y"]
    assert str(path) in rows.failures[0].message
    assert "row 1" in rows.failures[0].message
    assert "UnicodeDecodeError" in rows.failures[0].traceback


def test_reader_invalid_utf8_id_is_a_failure_without_id(tmp_path: Path) -> None:
    path = write_corpus(tmp_path / "a.parquet", invalid_strings([b"x", b"\xff"]), text=["a", "b"])
    rows = Reader(spec_of(path), "string").read(shard_of(path, 2))
    assert rows.doc_ids == ["x"]
    assert [(failure.row, failure.doc_id) for failure in rows.failures] == [(1, None)]


def test_reader_large_int_ids_beside_nulls_are_exact(tmp_path: Path) -> None:
    big = 2**53 + 1
    path = write_corpus(tmp_path / "a.parquet", [big, None, -(2**63)], text=["a", "b", "c"])
    rows = Reader(spec_of(path), "int64").read(shard_of(path, 3))
    assert rows.doc_ids == [big, -(2**63)]
    assert [(failure.row, failure.doc_id) for failure in rows.failures] == [(1, None)]


def test_reader_uint64_beyond_int64_is_a_dead_letter(tmp_path: Path) -> None:
    ids = pa.array([2**63, 2**63 - 1], pa.uint64())
    path = write_corpus(tmp_path / "a.parquet", ids, text=["a", "b"])
    rows = Reader(spec_of(path), "int64").read(shard_of(path, 2))
    assert rows.doc_ids == [2**63 - 1]
    assert str(2**63) in rows.failures[0].message


@pytest.mark.parametrize(
    "kind",
    [pa.large_string(), pa.string_view(), pa.dictionary(pa.int32(), pa.string()), pa.string()],
)
def test_reader_every_kind_of_string_reads_the_same(tmp_path: Path, kind: pa.DataType) -> None:
    path = tmp_path / "a.parquet"
    columns = {"doc_id": pa.array(["x", "y", "z"]).cast(kind), "text": pa.array(["a", None, "a"]).cast(kind)}
    pq.write_table(pa.table(columns), path)
    rows = Reader(spec_of(path), "string").read(shard_of(path, 3))
    assert (rows.doc_ids, rows.texts, len(rows.failures)) == (["x", "z"], ["a", "a"], 1)


def test_reader_text_column_of_nulls_makes_every_document_a_failure(tmp_path: Path) -> None:
    path = write_corpus(tmp_path / "a.parquet", ["x", "y"], text=pa.nulls(2))
    rows = Reader(spec_of(path), "string").read(shard_of(path, 2))
    assert rows.doc_ids == []
    assert [failure.doc_id for failure in rows.failures] == ["x", "y"]


def test_reader_own_query_null_is_a_failure(tmp_path: Path) -> None:
    path = write_corpus(tmp_path / "a.parquet", ["x", "y"], q=["one", None])
    file = fingerprint(str(path), [*COLUMNS, "q"])
    shard = shard_of(path, 2, fingerprint=file.fingerprint)
    rows = Reader(spec_of(path, query_column="q"), "string").read(shard)
    assert rows.queries == ["one"]
    assert "'q'" in rows.failures[0].message


def test_reader_only_and_excluded_leave_the_other_rows_out(tmp_path: Path) -> None:
    path = write_corpus(tmp_path / "a.parquet", list("abcdef"))
    reader = Reader(spec_of(path), "string")
    shard = shard_of(path, 3, start=1, first_row=1)
    assert reader.read(replace(shard, excluded=(1,))).rows == [1, 3]
    again = reader.read(replace(shard, only=(2,)))
    assert (again.doc_ids, again.rows) == (["d"], [3])


def test_reader_shards_in_any_order_give_the_same_rows(tmp_path: Path) -> None:
    output = make_output(tmp_path, docs=95, group=40, shard_size=7)
    plan = output.plan
    straight = [Reader(output.spec, "string").read(shard).doc_ids for shard in plan.shards]
    reader = Reader(output.spec, "string")
    order = [5, 0, 3, 4, 1, 2, *range(12, 5, -1), *range(13, len(plan.shards))]
    mixed = {index: reader.read(plan.shards[index]).doc_ids for index in order}
    assert [mixed[index] for index in range(len(plan.shards))] == straight
    assert list(chain.from_iterable(straight)) == [f"d{i}" for i in range(95)]


def test_reader_neighbours_continue_one_stream(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    output = make_output(tmp_path, docs=40, group=40, shard_size=4)
    plan = output.plan
    opened: list[str] = []
    real = pq.ParquetFile

    def counting(path: str, **kwargs: object) -> pq.ParquetFile:
        opened.append(path)
        return real(path, **kwargs)

    monkeypatch.setattr(pq, "ParquetFile", counting)
    reader = Reader(output.spec, "string")
    for shard in plan.shards:
        reader.read(shard)
    assert len(opened) == 1


def test_reader_file_that_changed_raises(tmp_path: Path) -> None:
    path = write_corpus(tmp_path / "a.parquet", ["x", "y"])
    shard = shard_of(path, 2)
    write_corpus(path, ["x", "Y"])
    with pytest.raises(CorpusChanged, match=r"a\.parquet"):
        Reader(spec_of(path), "string").read(shard)


def test_reader_file_that_changed_while_its_stream_is_open_raises(tmp_path: Path) -> None:
    path = write_corpus(tmp_path / "a.parquet", [f"x{i}" for i in range(8)])
    shard = shard_of(path, 4)
    reader = Reader(spec_of(path, shard_size=4), "string")
    reader.read(shard)
    path.unlink()
    write_corpus(path, [f"y{i}" for i in range(8)])
    with pytest.raises(CorpusChanged):
        reader.read(replace(shard, start=4, first_row=4))


def test_reader_touched_file_with_the_same_content_reads(tmp_path: Path) -> None:
    path = write_corpus(tmp_path / "a.parquet", ["x", "y"])
    shard = shard_of(path, 2)
    os.utime(path, ns=(1, 1))
    assert Reader(spec_of(path), "string").read(shard).doc_ids == ["x", "y"]


def test_reader_damaged_page_raises_unreadable(tmp_path: Path) -> None:
    path = write_corpus(tmp_path / "a.parquet", [f"id{i}" for i in range(50)])
    chunk = pq.read_metadata(path).row_group(0).column(1)
    data = bytearray(path.read_bytes())
    for at in range(chunk.data_page_offset, chunk.data_page_offset + 12):
        data[at] ^= 0xFF
    path.write_bytes(data)
    with pytest.raises(ShardUnreadable, match=r"a\.parquet, row group 0"):
        Reader(spec_of(path), "string").read(shard_of(path, 50))


def test_reader_missing_file_raises_oserror_that_may_pass(tmp_path: Path) -> None:
    path = write_corpus(tmp_path / "a.parquet", ["x"])
    shard = shard_of(path, 1)
    path.unlink()
    with pytest.raises(FileNotFoundError):
        Reader(spec_of(path), "string").read(shard)


def test_reader_error_of_the_file_system_is_passed_on_as_it_is(tmp_path: Path) -> None:
    path = write_corpus(tmp_path / "a.parquet", ["x"])
    shard = shard_of(path, 1)
    path.unlink()
    path.mkdir()
    with pytest.raises(IsADirectoryError):
        Reader(spec_of(path), "string").read(shard)


def test_reader_works_again_after_an_error(tmp_path: Path) -> None:
    path = write_corpus(tmp_path / "a.parquet", ["x"])
    shard = shard_of(path, 1)
    reader = Reader(spec_of(path), "string")
    data = path.read_bytes()
    path.unlink()
    with pytest.raises(FileNotFoundError):
        reader.read(shard)
    path.write_bytes(data)
    assert reader.read(shard).doc_ids == ["x"]


# -- queries -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("q.jsonl", '{"query_id": 1, "text": "a"}\n\n{"query_id": "2", "text": "b"}\n'),
        ("q.csv", "query_id,text\n1,a\n2,b\n"),
        ("q.tsv", "\ufeffquery_id\ttext\tmore\n1\ta\tx\n2\tb\ty\n"),
    ],
)
def test_queries_text_formats_give_string_ids(tmp_path: Path, name: str, content: str) -> None:
    path = tmp_path / name
    path.write_text(content, encoding="utf-8")
    queries = read_queries(str(path))
    assert (queries.ids, queries.texts) == (("1", "2"), ("a", "b"))


def test_queries_parquet_integer_ids_become_strings(tmp_path: Path) -> None:
    path = tmp_path / "q.parquet"
    pq.write_table(pa.table({"query_id": [2**60 + 1], "text": ["a"]}), path)
    assert read_queries(str(path)).ids == (str(2**60 + 1),)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"query_id": 1, "text": "a"}\n{"query_id": "1", "text": "b"}', "'1' stands twice"),
        ('{"query_id": 1, "text": null}', "text is null"),
        ('{"query_id": 1}', "no column 'text'"),
        ("", "no queries"),
        ("{", "cannot read"),
        ("[1]", "no JSON object"),
        ('{"query_id": 1.5, "text": "a"}', "a string or an integer"),
        ('{"query_id": 1, "text": "a\\ud800"}', "not valid Unicode"),
    ],
)
def test_queries_wrong_content_is_one_line(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "q.jsonl"
    path.write_text(content)
    with pytest.raises(CorpusError, match=message) as error:
        read_queries(str(path))
    assert "\n" not in str(error.value)


def test_queries_invalid_utf8_or_missing_file_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "q.csv").write_bytes(b"query_id,text\n1,\xff\n")
    for name in ("q.csv", "none.csv", "q.txt"):
        with pytest.raises(CorpusError):
            read_queries(str(tmp_path / name))
