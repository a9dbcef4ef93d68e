"""The export of dead letters' documents: what is in the file, and what cannot be."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from shards.errors import UsageError
from shards.export import Exported, export
from shards.types import EventKind, QuerySet
from tests.outputs import Output, event, invalid_strings, make_output, verdict, write_corpus

ABOUT = ["dead_letter_id", "file", "row", "error_type", "message"]


@pytest.fixture
def output(tmp_path: Path) -> Output:
    """25 documents with a column that is not read, three of them dead."""
    made = make_output(tmp_path, docs=25, group=10, shard_size=4)
    ids = [f"d{i}" for i in range(25)]
    write_corpus(tmp_path / "corpus" / "a.parquet", ids, group=10, size=list(range(25)))
    made.score_all(dead=[1, 12, 24])
    return made


def exported(output: Output, name: str = "bad.parquet", **options: object) -> tuple[Exported, pa.Table]:
    path = output.root / name
    return export(output.layout, path, **options), pq.read_table(path)  # type: ignore[arg-type]


def test_export_has_the_whole_rows_and_what_went_wrong(output: Output) -> None:
    result, table = exported(output)
    assert (result.letters, result.docs, result.left_out) == (3, 3, ())
    assert table.column_names == ["doc_id", "text", "size", *ABOUT]
    assert table.column("doc_id").to_pylist() == ["d1", "d12", "d24"]
    assert table.column("size").to_pylist() == [1, 12, 24]
    assert table.column("row").to_pylist() == [1, 12, 24]
    assert set(table.column("file").to_pylist()) == {str(output.root / "corpus" / "a.parquet")}
    assert table.column("error_type").to_pylist() == ["NonFinite"] * 3
    assert table.column("message").to_pylist() == ["row 1", "row 12", "row 24"]
    assert all(table.column("dead_letter_id").to_pylist())
    assert not list(output.root.glob(".tmp-*"))


def test_export_where_chooses(output: Output) -> None:
    result, table = exported(output, where="row > 5 AND doc_id <> 'd24'")
    assert (result.letters, table.column("doc_id").to_pylist()) == (1, ["d12"])
    with pytest.raises(UsageError, match="no_such"):
        export(output.layout, output.root / "x.parquet", where="no_such = 1")


def test_export_nothing_to_export_writes_no_file(output: Output) -> None:
    assert export(output.layout, output.root / "x.parquet", where="false").docs == 0
    assert not (output.root / "x.parquet").exists()


def test_export_never_overwrites_unless_told(output: Output) -> None:
    path = output.root / "mine.parquet"
    path.write_bytes(b"mine")
    with pytest.raises(UsageError, match="--force"):
        export(output.layout, path)
    assert path.read_bytes() == b"mine"
    assert exported(output, "mine.parquet", force=True)[1].num_rows == 3


def test_export_file_that_appears_meanwhile_is_not_overwritten(
    output: Output, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = output.root / "mine.parquet"
    real = os.link

    def late(source: Path, target: Path) -> None:
        path.write_bytes(b"mine")
        real(source, target)

    monkeypatch.setattr(os, "link", late)
    with pytest.raises(UsageError, match="exists already"):
        export(output.layout, path)
    assert path.read_bytes() == b"mine"
    assert not list(output.root.glob(".tmp-*"))


@pytest.mark.parametrize(("name", "says"), [("no/x.parquet", "no such directory"), ("out/x.parquet", "taken for")])
def test_export_to_a_place_that_will_not_do_is_refused(output: Output, name: str, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        export(output.layout, output.root / name)


def test_export_invalid_utf8_keeps_its_bytes(tmp_path: Path) -> None:
    output = make_output(tmp_path, docs=3)
    raw = [b"fine", b"\xff\xfe broken", None]
    write_corpus(tmp_path / "corpus" / "a.parquet", ["a", "b", "c"], text=invalid_strings(raw))
    output.score_all()
    result, table = exported(output)
    assert result.docs == 2
    assert table.column("text").cast(pa.binary()).to_pylist() == [b"\xff\xfe broken", None]
    assert table.column("error_type").to_pylist() == ["UnicodeDecodeError", "NullValue"]


def test_export_shard_that_is_dead_as_a_whole_gives_all_its_documents(tmp_path: Path) -> None:
    output = make_output(tmp_path, docs=25, group=10, shard_size=4, duplicates="keep_first")
    ids = [f"d{i}" for i in range(25)]
    ids[6] = "d0"  # a duplicate, which is no document
    write_corpus(tmp_path / "corpus" / "a.parquet", ids, group=10)
    with output.open() as manifest:
        run, plan, shards = output.start(manifest)
        manifest.commit(run, [verdict(output.bury(plan, shards[1]))])
        manifest.publish()
    result, table = exported(output)
    assert (result.letters, result.docs) == (1, 3)
    assert table.column("doc_id").to_pylist() == ["d4", "d5", "d7"]
    assert set(table.column("error_type").to_pylist()) == {"Gone"}


def test_export_redriven_part_of_a_shard_gives_only_that_part(output: Output) -> None:
    with output.open() as manifest:
        output.start(manifest)
        manifest.redrive("m1", where="row IN (1, 12)", dry_run=False)
        run, plan, shards = output.start(manifest)
        again = [shard for shard in shards if shard.generation]
        manifest.commit(run, [event(EventKind.LEASED, shard) for shard in again])
        manifest.commit(run, [verdict(output.bury(plan, shard)) for shard in again])
        manifest.publish()
    assert exported(output)[1].column("doc_id").to_pylist() == ["d1", "d12", "d24"]


def test_export_unreadable_file_is_listed_and_the_rest_is_there(output: Output) -> None:
    (output.root / "corpus" / "z.parquet").write_bytes(b"PAR1 not really")
    output.spec = replace(output.spec, skip_unreadable=True)
    output.score_all()
    result, table = exported(output)
    assert table.num_rows == 3
    (line,) = result.left_out
    assert "z.parquet" in line


def test_export_changed_or_vanished_file_is_listed(output: Output) -> None:
    corpus = output.root / "corpus" / "a.parquet"
    moved = corpus.rename(output.root / "elsewhere.parquet")
    result = export(output.layout, output.root / "x.parquet")
    assert result.docs == 0
    assert "No such file" in result.left_out[0]
    assert not (output.root / "x.parquet").exists()
    write_corpus(corpus, [f"other{i}" for i in range(25)], group=10)
    assert "changed" in export(output.layout, output.root / "x.parquet").left_out[0]
    moved.replace(corpus)
    os.utime(corpus)  # another time, the same content
    assert exported(output)[0].docs == 3


def test_export_damaged_row_group_costs_its_own_documents(output: Output) -> None:
    corpus = output.root / "corpus" / "a.parquet"
    stat = corpus.stat()
    data = bytearray(corpus.read_bytes())
    column = pq.read_metadata(corpus).row_group(1).column(1)
    data[column.data_page_offset : column.data_page_offset + 8] = b"\xff" * 8
    corpus.write_bytes(data)
    os.utime(corpus, ns=(stat.st_atime_ns, stat.st_mtime_ns))  # a flipped bit leaves the time alone
    result, table = exported(output)
    assert table.column("doc_id").to_pylist() == ["d1", "d24"]
    assert "1 documents of" in result.left_out[0]


def test_export_files_with_other_columns_are_joined_and_names_never_collide(tmp_path: Path) -> None:
    output = make_output(tmp_path, docs=3)
    write_corpus(tmp_path / "corpus" / "b.parquet", ["x", "y"], message=["m0", "m1"])
    output.score_all(dead=[0])
    table = exported(output)[1]
    assert table.column_names == [
        "doc_id",
        "text",
        "message",
        "dead_letter_id",
        "file",
        "row",
        "error_type",
        "dead_letter_message",
    ]
    assert table.column("message").to_pylist() == [None, "m0"]


def test_export_files_whose_columns_contradict_each_other_are_refused(tmp_path: Path) -> None:
    output = make_output(tmp_path, docs=3)
    write_corpus(tmp_path / "corpus" / "b.parquet", ["x", "y"], extra=[1, 2])
    write_corpus(tmp_path / "corpus" / "c.parquet", ["z"], extra=["text"])
    output.score_all(dead=[0])
    with pytest.raises(UsageError, match="one file at a time"):
        export(output.layout, tmp_path / "x.parquet")
    assert exported(output, where="file LIKE '%b.parquet'")[1].column("extra").to_pylist() == [1]


def test_export_of_a_document_that_failed_against_several_queries_has_it_once(tmp_path: Path) -> None:
    output = make_output(tmp_path, docs=3)
    output.queries = QuerySet(ids=("a", "b"), texts=("x", "y"))
    output.score_all(dead=[1])
    assert exported(output)[1].column("doc_id").to_pylist() == ["d1"]


def test_export_dictionary_encoded_and_nested_columns_survive(tmp_path: Path) -> None:
    output = make_output(tmp_path, docs=3)
    text = pa.array(["a", "b", "c"]).dictionary_encode()
    write_corpus(tmp_path / "corpus" / "a.parquet", ["x", "y", "z"], text=text, tags=[["p"], [], None])
    output.score_all(dead=[0, 2])
    table = exported(output)[1]
    assert table.column("text").to_pylist() == ["a", "c"]
    assert table.column("tags").to_pylist() == [["p"], None]
