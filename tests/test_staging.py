"""Corpora that are not Parquet, from the directory to the reader: what is staged, and what is refused."""

from __future__ import annotations

import gzip
import io
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from rich.console import Console

from jobs.progress import Reporter
from jobs.staging import in_processes
from shards import planfile, sealed, staging
from shards.corpus import Reader, list_files
from shards.errors import CorpusError, PlanError
from shards.export import export
from shards.formats import source
from shards.lines import Tell
from shards.plan import read_plan
from shards.record import Wanted
from shards.staged import LINE, place
from shards.staging import Job, Progress, Result, Staging
from shards.types import CorpusSpec, Failure, Plan
from tests.outputs import Output, write_corpus
from tests.projects import REPO, wait_until


class Counting:
    """Stages one by one, and remembers which files."""

    def __init__(self) -> None:
        self.staged: list[str] = []
        self.heard: list[Progress] = []

    def run(self, jobs: Sequence[Job], tell: Tell) -> Iterator[Result]:
        self.staged += [Path(job.source.path).name for job in jobs]
        return staging.one_by_one(jobs, tell)


@pytest.fixture
def output(tmp_path: Path) -> Output:
    return make(tmp_path)


def make(root: Path, **spec: Any) -> Output:
    (root / "corpus").mkdir(parents=True, exist_ok=True)
    columns = {"path": str(root / "corpus"), "id_column": "doc_id", "text_column": "text", **spec}
    counting = Counting()
    made = Output(root, CorpusSpec(**columns), staging=Staging(run=counting.run, report=counting.heard.append))
    made.counting = counting  # type: ignore[attr-defined]
    return made


def staged_of(output: Output) -> list[str]:
    """The files that were staged since the last question."""
    counting: Counting = output.counting  # type: ignore[attr-defined]
    names, counting.staged = counting.staged, []
    return sorted(names)


def write(output: Output, name: str, data: str | bytes | Sequence[Mapping[str, Any]]) -> Path:
    path = output.root / "corpus" / name
    if not isinstance(data, str | bytes):
        data = "".join(json.dumps(record) + "\n" for record in data)
    raw = data.encode() if isinstance(data, str) else data
    path.write_bytes(gzip.compress(raw) if path.suffix == ".gz" else raw)
    return path


def docs(*ids: Any, **more: Any) -> list[dict[str, Any]]:
    return [{"doc_id": value, "text": f"text of {value}", **more} for value in ids]


def read(output: Output, plan: Plan | None = None) -> tuple[dict[Any, str], list[Failure]]:
    """Every document's text by its id, and what failed."""
    plan = plan or output.plan
    reader = Reader(output.spec, plan.id_type)
    found = [reader.read(shard) for shard in plan.shards]
    texts = {name: text for rows in found for name, text in zip(rows.doc_ids, rows.texts, strict=True)}
    return texts, [failure for rows in found for failure in rows.failures]


# -- which files ---------------------------------------------------------------------------------


def test_list_files_directory_takes_every_format_and_wanted_one_alone(output: Output) -> None:
    for name in ("a.parquet", "b.jsonl", "c.ndjson.gz", "d.csv", "e.txt", "_f.csv", ".g.csv", "queries.md"):
        write(output, name, "")
    folder = output.spec.path
    assert [Path(path).name for path in list_files(folder)] == ["a.parquet", "b.jsonl", "c.ndjson.gz", "d.csv"]
    assert [Path(path).name for path in list_files(folder, "jsonl")] == ["b.jsonl", "c.ndjson.gz"]
    assert [Path(path).name for path in list_files(f"{folder}/*.txt", "csv")] == ["e.txt"]


def test_plan_mixed_formats_are_one_corpus(output: Output) -> None:
    write_corpus(output.root / "corpus" / "a.parquet", ["a"])
    write(output, "b.jsonl", docs("b"))
    write(output, "c.csv", 'doc_id,text\nc,"text\nof c"\n')
    write(output, "d.tsv.gz", "text\tdoc_id\ntext of d\td\n")
    table = pa.table({"doc_id": ["e"], "text": pa.array(["text of e"]).dictionary_encode()})
    path = str(output.root / "corpus" / "e.feather")
    with pa.OSFile(path, "wb") as file, pa.ipc.new_file(file, table.schema) as writer:
        writer.write_table(table)
    assert read(output) == ({name: f"text{' ' if name != 'c' else chr(10)}of {name}" for name in "abcde"}, [])


def test_plan_unpackable_file_in_a_directory_is_named(output: Output) -> None:
    write(output, "a.jsonl", docs("a"))
    write(output, "b.jsonl.xz", "")
    with pytest.raises(CorpusError, match=r"b\.jsonl\.xz"):
        assert output.plan


def test_plan_file_whose_name_says_nothing_needs_the_format(output: Output) -> None:
    path = write(output, "a.json", docs("a"))
    output.spec = replace(output.spec, path=str(path))
    with pytest.raises(CorpusError, match=r"a\.json.*corpus\.format"):
        assert output.plan
    output.spec = replace(output.spec, format="jsonl")
    assert list(read(output)[0]) == ["a"]


def test_plan_output_inside_the_corpus_directory_is_no_part_of_it(tmp_path: Path) -> None:
    output = make(tmp_path, path=str(tmp_path))
    write(output, "a.jsonl", docs("a"))
    assert output.plan.docs == 1
    assert output.make_plan()[1].kind == "unchanged"


# -- what becomes of a record --------------------------------------------------------------------


def test_reader_bad_lines_are_failures_that_name_the_original_file_and_line(output: Output) -> None:
    path = write(
        output,
        "a.jsonl",
        b'{"doc_id": 1, "text": "one"}\r\n\n'
        b'{"doc_id": 2, "text": "tw\n'
        b'{"doc_id": 3, "text": "\\ud800"}\n'
        b'{"doc_id": 4, "text": null}\n'
        b'{"doc_id": 5, "text": "five"}',
    )
    texts, failures = read(output)
    assert texts == {1: "one", 5: "five"}
    assert [(f.row, f.doc_id, f.error_type) for f in failures] == [
        (1, None, "MalformedRecord"),
        (2, 3, "MalformedRecord"),
        (3, 4, "NullValue"),
    ]
    for failure, line in zip(failures, (3, 4, 5), strict=True):
        assert failure.message.endswith(f"({path}, line {line})")
    assert "not JSON: Unterminated string" in failures[0].message
    assert {shard.file for shard in output.plan.shards} == {str(path)}


def test_reader_truncated_gzip_keeps_what_came_before_and_one_failure_says_so(output: Output) -> None:
    path = write(output, "a.jsonl.gz", docs(*range(2000)))
    path.write_bytes(path.read_bytes()[:-2000])
    texts, failures = read(output)
    assert list(texts) == list(range(len(texts)))
    assert 500 < len(texts) < 2000
    assert [(f.row, f.error_type) for f in failures] == [(len(texts), "TruncatedFile")]
    assert failures[0].message.endswith(f"({path}, line {len(texts) + 1})")


def test_reader_integer_ids_are_exact_and_beyond_int64_one_failure(output: Output) -> None:
    ids = [2**53 + 1, -(2**63), 2**63 - 1]
    data = "".join(json.dumps(record) + "\n" for record in docs(*ids, 2**63))
    write(output, "a.jsonl", data + '{"doc_id": 1' + "0" * 5000 + ', "text": "x"}')
    texts, failures = read(output)
    assert output.plan.id_type == "int64"
    assert list(texts) == ids
    assert [(f.row, f.doc_id, f.error_type) for f in failures] == [
        (3, None, "IdOutOfRange"),
        (4, None, "IdOutOfRange"),
    ]
    assert f"{2**63} is beyond int64" in failures[0].message


def test_staged_batches_are_bounded_and_rows_keep_their_lines(output: Output) -> None:
    write(output, "a.jsonl", "\n" + "".join(f'{{"doc_id": {i}, "text": "x"}}\n' for i in range(25_000)))
    (file,) = output.plan.files
    assert file.staged is not None
    metadata = pq.read_metadata(file.staged)
    assert [metadata.row_group(at).num_rows for at in range(3)] == [10_000, 10_000, 5_000]
    assert pq.read_table(file.staged).column(LINE).to_pylist() == list(range(2, 25_002))
    assert place(file, 24_999) == f"{file.path}, line 25001"


def test_staged_batches_are_bounded_in_bytes(output: Output) -> None:
    write(output, "a.jsonl", [{"doc_id": i, "text": "x" * (9 << 20)} for i in range(5)])
    (file,) = output.plan.files
    assert file.staged is not None
    assert pq.read_metadata(file.staged).num_row_groups == 2


# -- ids and columns -----------------------------------------------------------------------------


def test_plan_integers_and_strings_in_two_files_error_names_both(output: Output) -> None:
    write(output, "a.jsonl", docs(1))
    write(output, "b.csv", "doc_id,text\n2,x\n")
    with pytest.raises(CorpusError, match=r"int64 in .*a\.jsonl and string in .*b\.csv"):
        assert output.plan


def test_plan_integers_and_strings_in_one_file_error_names_both_lines(output: Output) -> None:
    write(output, "a.jsonl", docs(1, 2, "3"))
    with pytest.raises(
        CorpusError, match=r"a\.jsonl has integers \(first on line 1\) and strings \(first on line 3\)"
    ):
        assert output.plan


def test_plan_staged_integers_go_with_those_of_parquet(output: Output) -> None:
    write_corpus(output.root / "corpus" / "a.parquet", pa.array([1, 2], pa.int32()), text=["a", "b"])
    write(output, "b.jsonl", docs(3))
    assert list(read(output)[0]) == [1, 2, 3]


def test_plan_file_without_any_id_follows_the_others(output: Output) -> None:
    write(output, "a.jsonl", "junk\n")
    write(output, "b.jsonl", docs(3))
    write(output, "c.jsonl", "")
    assert (output.plan.id_type, output.plan.docs) == ("int64", 2)
    (output.root / "corpus" / "b.jsonl").unlink()
    with pytest.raises(CorpusError, match=r"only nulls in .*a\.jsonl"):
        assert output.plan


def test_plan_empty_corpus_of_lines_is_a_plan(output: Output) -> None:
    write(output, "a.jsonl", "\n\n")
    assert (output.plan.docs, output.plan.shards) == (0, ())


@pytest.mark.parametrize(
    ("name", "data"), [("b.jsonl", [{"doc_id": "b", "body": "x"}]), ("b.csv", "doc_id,body\nb,x\n")]
)
def test_plan_column_that_a_whole_file_lacks_is_an_error(output: Output, name: str, data: Any) -> None:
    write(output, "a.jsonl", docs("a"))
    write(output, name, data)
    with pytest.raises(CorpusError, match=rf"no column 'text' in .*{name}; it has: doc_id, body"):
        assert output.plan


def test_plan_column_that_is_always_null_is_no_error_but_every_document_is(output: Output) -> None:
    write(output, "a.jsonl", docs("a"))
    write(output, "b.jsonl", [{"doc_id": "b", "text": None}])
    pq.write_table(pa.table({"doc_id": ["c"], "text": pa.nulls(1)}), output.root / "corpus" / "c.parquet")
    texts, failures = read(output)
    assert (list(texts), [failure.doc_id for failure in failures]) == (["a"], ["b", "c"])


@pytest.mark.parametrize(
    "kinds",
    [
        (pa.int32(), pa.int64(), pa.string(), pa.large_string()),
        (pa.int64(), pa.uint8(), pa.string_view(), pa.string()),
    ],
)
def test_plan_types_that_differ_between_files_read_the_same(output: Output, kinds: tuple[Any, ...]) -> None:
    for name, id_kind, text_kind, value in (("a", kinds[0], kinds[2], 1), ("b", kinds[1], kinds[3], 2)):
        table = {"doc_id": pa.array([value], id_kind), "text": pa.array(["x"]).cast(text_kind)}
        pq.write_table(pa.table(table), output.root / "corpus" / f"{name}.parquet")
    texts = pa.array(["x"]).dictionary_encode()
    pq.write_table(pa.table({"text": texts, "doc_id": [3]}), output.root / "corpus" / "c.parquet")
    assert read(output) == ({1: "x", 2: "x", 3: "x"}, [])


def test_plan_duplicates_across_formats_are_found_and_named_by_line(output: Output) -> None:
    write_corpus(output.root / "corpus" / "a.parquet", [1, 2], text=["a", "b"])
    path = write(output, "b.jsonl", "\n\n" + json.dumps(docs(2)[0]) + "\n" + json.dumps(docs(2**63)[0]))
    with pytest.raises(CorpusError, match=rf"2 at .*a\.parquet:1 and {path}, line 3"):
        assert output.plan
    output.spec = replace(output.spec, duplicates="keep_last")
    texts, failures = read(output)
    assert (texts[2], [failure.error_type for failure in failures]) == ("text of 2", ["IdOutOfRange"])


def test_plan_nested_columns_read_the_same_from_every_format(tmp_path: Path) -> None:
    output = make(tmp_path, id_column="meta.id", text_column="meta.body.text")
    rows: list[Any] = [{"id": 1, "body": {"text": "one"}}, {"id": 2, "body": None}, None]
    write(output, "a.jsonl", [{"meta": row} for row in rows[:2]])
    for name, first in (("b.parquet", 10), ("c.arrow", 20)):
        moved = [row and {**row, "id": row["id"] + first} for row in rows]
        table = pa.table({"other": [0, 0, 0], "meta": moved})
        path = output.root / "corpus" / name
        if name == "b.parquet":
            pq.write_table(table, path)
            continue
        with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, table.schema) as writer:
            writer.write_table(table)
    texts, failures = read(output)
    assert texts == {1: "one", 11: "one", 21: "one"}
    assert [failure.doc_id for failure in failures] == [2, 12, None, 22, None]


def test_plan_parquet_nested_column_that_changed_is_noticed(tmp_path: Path) -> None:
    output = make(tmp_path, text_column="meta.text")
    path = output.root / "corpus" / "a.parquet"
    pq.write_table(pa.table({"doc_id": ["a"], "meta": [{"text": "one"}]}), path, compression="none")
    output.publish(output.plan, output.plan.shards[0])
    data = path.read_bytes()
    path.write_bytes(data.replace(b"one", b"two", 1))
    with pytest.raises(PlanError, match="changed"):
        assert output.plan


# -- templates -----------------------------------------------------------------------------------


def templated(root: Path, text: str = "{title}\n{body}") -> Output:
    output = make(root, text_column="", text_template=text)
    write(
        output, "a.jsonl", [{"doc_id": "a", "title": "T", "body": "B"}, {"doc_id": "b", "title": None, "body": "B"}]
    )
    table = pa.table({"doc_id": ["c", "d"], "title": ["T", "T"], "body": pa.array(["B", None])})
    pq.write_table(table, output.root / "corpus" / "b.parquet")
    return output


def test_template_makes_texts_and_a_null_part_is_a_failure(tmp_path: Path) -> None:
    texts, failures = read(templated(tmp_path))
    assert texts == {"a": "T\nB", "c": "T\nB"}
    assert [(f.doc_id, f.error_type) for f in failures] == [("b", "NullValue"), ("d", "NullValue")]
    assert "column 'title'" in failures[0].message
    assert "column 'body'" in failures[1].message


def test_template_of_an_unknown_column_is_one_error_of_the_plan(tmp_path: Path) -> None:
    with pytest.raises(CorpusError, match=r"no column 'titel' in .*a\.jsonl; it has: doc_id, title, body"):
        assert templated(tmp_path, "{titel}").plan


def test_template_that_changed_is_refused_with_the_difference(tmp_path: Path) -> None:
    output = templated(tmp_path)
    output.publish(output.plan, output.plan.shards[0])
    output.spec = replace(output.spec, text_template="{body}")
    with pytest.raises(PlanError, match=r'text_template: "\{title\}\\n\{body\}" → "\{body\}"'):
        assert output.plan
    output.spec = replace(output.spec, text_template=None, text_column="body")
    with pytest.raises(PlanError, match=r"text_column: none → body, text_template: .* → none"):
        assert output.plan


# -- staged once ---------------------------------------------------------------------------------


def test_staging_again_or_for_another_model_version_reads_no_file_again(output: Output) -> None:
    write(output, "a.jsonl", docs("a"))
    write(output, "b.csv", "doc_id,text\nb,x\n")
    first = output.plan
    assert staged_of(output) == ["a.jsonl", "b.csv"]
    assert output.make_plan()[1].kind == "unchanged"
    output.model_version = "m2"
    assert output.plan.shards == first.shards
    assert read_plan(output.layout, "m1") == first
    assert staged_of(output) == []


def test_staging_follows_content_and_what_is_read_not_names_and_times(output: Output) -> None:
    path = write(output, "a.jsonl", docs("a", title="T"))
    output.publish(output.plan, output.plan.shards[0])
    staged_of(output)
    path.rename(path.with_name("moved.jsonl"))
    os.utime(path.with_name("moved.jsonl"), ns=(1, 1))
    plan, change = output.make_plan()
    assert (change.kind, plan.shards[0].file) == ("unchanged", str(path.with_name("moved.jsonl")))
    assert staged_of(output) == []
    output.spec = replace(output.spec, text_column="title")
    output.model_version = "m2"
    assert read(output)[0] == {"a": "T"}
    assert staged_of(output) == ["moved.jsonl"]


def test_staging_only_new_files_when_the_corpus_grows(output: Output) -> None:
    write(output, "a.jsonl", docs("a"))
    output.publish(output.plan, output.plan.shards[0])
    staged_of(output)
    write(output, "b.jsonl.gz", docs("b"))
    assert output.make_plan()[1].kind == "extended"
    assert staged_of(output) == ["b.jsonl.gz"]


def test_staging_lost_or_damaged_stand_in_is_made_again_for_the_same_plan(output: Output) -> None:
    write(output, "a.jsonl", docs("a"))
    plan = output.plan
    output.publish(plan, plan.shards[0])
    staged_of(output)
    stand_in = Path(plan.shards[0].data)
    for spoil in (stand_in.unlink, lambda: stand_in.write_bytes(b"PAR1 no more")):
        spoil()
        assert output.plan == plan
        assert staged_of(output) == ["a.jsonl"]
        assert read(output)[0] == {"a": "text of a"}


def test_staging_output_that_moved_finds_its_files(tmp_path: Path) -> None:
    output = make(tmp_path / "one")
    write(output, "a.jsonl", docs("a"))
    output.publish(output.plan, output.plan.shards[0])
    shutil.move(tmp_path / "one", tmp_path / "two")
    moved = make(tmp_path / "two")
    assert moved.make_plan()[1].kind == "unchanged"
    assert staged_of(moved) == []
    assert read(moved)[0] == {"a": "text of a"}


def test_staging_temporary_file_of_a_killed_run_is_tidied(output: Output) -> None:
    write(output, "a.jsonl", docs("a"))
    output.layout.staged.mkdir()
    (output.layout.staged / ".tmp-left").write_bytes(b"half")
    (file,) = output.plan.files
    assert [str(item) for item in output.layout.staged.iterdir()] == [file.staged]


def test_staging_planned_file_that_changed_is_refused(output: Output) -> None:
    path = write(output, "a.jsonl", docs("a"))
    output.publish(output.plan, output.plan.shards[0])
    write(output, "a.jsonl", docs("b"))
    with pytest.raises(PlanError, match=rf"planned file {path} changed"):
        assert output.plan


def test_staging_file_that_changes_meanwhile_is_an_error(output: Output) -> None:
    path = write(output, "a.jsonl", docs("a"))

    def late(jobs: Sequence[Job], tell: Tell) -> Iterator[Result]:
        write(output, "a.jsonl", docs("a", "b"))
        return staging.one_by_one(jobs, tell)

    output.staging = Staging(run=late)
    with pytest.raises(CorpusError, match=rf"{path} changed while it was being read"):
        assert output.plan
    assert not list(output.layout.staged.iterdir())


def test_staging_unreadable_file_is_named_or_becomes_a_dead_shard(output: Output) -> None:
    write(output, "a.jsonl", docs("a"))
    path = write(output, "b.jsonl.gz", docs("b"))
    path.write_bytes(path.read_bytes()[:-8] + b"\0" * 8)
    with pytest.raises(CorpusError, match=rf"cannot read {path}: CRC check failed"):
        assert output.plan
    output.spec = replace(output.spec, skip_unreadable=True)
    plan = output.plan
    assert [(Path(shard.file).name, bool(shard.unreadable)) for shard in plan.shards] == [
        ("a.jsonl", False),
        ("b.jsonl.gz", True),
    ]
    assert output.make_plan()[1].kind == "unchanged"


def test_staging_same_content_twice_is_staged_once_and_counts_as_copies(output: Output) -> None:
    for name in ("a.jsonl", "b.jsonl"):
        write(output, name, docs("a"))
    with pytest.raises(CorpusError, match="have the same content"):
        assert output.plan
    assert len(list(output.layout.staged.iterdir())) == 1


def test_staging_progress_counts_files_and_bytes(output: Output) -> None:
    sizes = [write(output, name, docs(name)).stat().st_size for name in ("a.jsonl", "b.jsonl")]
    assert output.plan
    heard = output.counting.heard  # type: ignore[attr-defined]
    assert heard[0] == Progress(files=0, of_files=2, bytes=0, of_bytes=sum(sizes))
    assert heard[-1] == Progress(files=2, of_files=2, bytes=sum(sizes), of_bytes=sum(sizes))
    assert [item.bytes for item in heard] == sorted(item.bytes for item in heard)


def test_staging_reporter_says_the_first_and_the_last_and_no_flood_between() -> None:
    shown = io.StringIO()
    reporter = Reporter(Console(file=shown, width=200))
    for files in range(4):
        for more in (0, 5):
            read = min(files * 10**9 + more, 3 * 10**9)
            reporter.staging(Progress(files=files, of_files=3, bytes=read, of_bytes=3 * 10**9))
    lines = shown.getvalue().splitlines()
    assert lines[0] == "Staging: 0 of 3 files, 0 B of 3.0 GB."
    assert set(lines[1:]) == {"Staging: 3 of 3 files, 3.0 GB of 3.0 GB."}


def test_staging_in_processes_gives_the_same_files_and_the_errors(output: Output) -> None:
    paths = [write(output, f"{name}.jsonl.gz", docs(name)) for name in "ab"]
    paths[1].write_bytes(b"no gzip at all")
    jobs = []
    for path in paths:
        stat = path.stat()
        target = str(output.layout.root / f"{path.name}.parquet")
        wanted = Wanted(id="doc_id", texts=("text",))
        job = Job(
            source=source(str(path)), size=stat.st_size, mtime_ns=stat.st_mtime_ns, target=target, wanted=wanted
        )
        jobs.append(job)
    told: list[int] = []
    found = {result.job.target: result.error for result in in_processes(jobs, told.append, processes=1)}
    assert found[jobs[0].target] is None
    assert pq.read_table(jobs[0].target).column("doc_id").to_pylist() == ["a"]
    assert "cannot read" in (found[jobs[1].target] or "")
    assert told[-1] == 0


# -- what else reads plans -----------------------------------------------------------------------


def test_planfile_of_parquet_alone_is_what_it_was_before(tmp_path: Path) -> None:
    output = make(tmp_path)
    write_corpus(output.root / "corpus" / "a.parquet", ["a"])
    assert output.plan
    path = planfile.path(output.layout, "m1", 0, 0)
    value = sealed.unseal(path.read_bytes(), str(path))
    assert "staged" not in value["files"][0]
    assert "text_template" not in value["spec"]


def test_export_of_staged_documents_has_what_was_read_and_the_line(output: Output) -> None:
    path = write(output, "a.jsonl", 'junk\n{"doc_id": "a", "text": "x"}\n{"doc_id": "b", "text": "y"}\n')
    output.score_all(dead=[2])
    path.unlink()
    result = export(output.layout, output.root / "bad.parquet")
    table = pq.read_table(output.root / "bad.parquet")
    assert (result.docs, result.left_out) == (2, ())
    assert table.column("doc_id").to_pylist() == [None, "b"]
    assert table.column(LINE).to_pylist() == [1, 3]
    assert set(table.column("file").to_pylist()) == {str(path)}
    assert "rescore.error" not in table.column_names


def test_export_of_staged_integer_ids_has_integers_beside_those_of_parquet(output: Output) -> None:
    write_corpus(output.root / "corpus" / "a.parquet", [1, 2], text=["a", "b"])
    write(output, "b.jsonl", docs(3, 2**64, 5))
    output.score_all(dead=[0])
    export(output.layout, output.root / "bad.parquet")
    assert pq.read_table(output.root / "bad.parquet").column("doc_id").to_pylist() == [1, 3, None]


def test_staging_processes_end_with_a_killed_driver(tmp_path: Path) -> None:
    program = (
        "import os, signal, sys\n"
        "from jobs.staging import in_processes\n"
        "from shards.formats import source\n"
        "from shards.record import Wanted\n"
        "from shards.staging import Job\n"
        "if __name__ == '__main__':\n"
        "    job = Job(source=source(sys.argv[1]), size=0, mtime_ns=0, target=sys.argv[1] + '.x',\n"
        "              wanted=Wanted(id='doc_id', texts=()))\n"
        "    found = in_processes([job, job], lambda read: None, processes=1)\n"
        "    next(found)\n"
        "    import multiprocessing\n"
        "    print(multiprocessing.active_children()[0].pid, flush=True)\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    (tmp_path / "a.jsonl").write_text("")
    (tmp_path / "main.py").write_text(program)
    command = [sys.executable, str(tmp_path / "main.py"), str(tmp_path / "a.jsonl")]
    env = {**os.environ, "PYTHONPATH": str(REPO)}
    killed = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60, check=False)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    wait_until(lambda: not psutil.pid_exists(int(killed.stdout)), timeout_s=10)
