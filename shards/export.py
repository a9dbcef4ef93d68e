"""Export the original documents of dead letters, with all their columns, so that the input can be mended."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from uuid import uuid4

import pyarrow as pa
import pyarrow.parquet as pq

from shards import columns, files, planfile, staged, template
from shards.errors import CorpusError, OutputError, UsageError
from shards.fingerprint import fingerprint
from shards.layout import Layout
from shards.orders import read_orders, shards_of
from shards.plan import only_plan
from shards.reader import offsets
from shards.redrive import select
from shards.snapshot import open_private
from shards.status import choose
from shards.types import CorpusFile, IdType, Plan, Shard, ShardKey

_BATCH = 1000
_ABOUT: tuple[tuple[str, pa.DataType], ...] = (
    ("dead_letter_id", pa.string()),
    ("file", pa.string()),
    ("row", pa.int64()),
    ("error_type", pa.string()),
    ("message", pa.string()),
)
_LETTERS = """
SELECT * REPLACE (doc_id::VARCHAR AS doc_id) FROM dead_letters
WHERE model_version = ? AND epoch = ? AND state = 'dead' ORDER BY file, row, generation, id
"""
_PATHS = """
SELECT DISTINCT shard_id, file FROM shards WHERE model_version = ? AND epoch = ?
AND shard_id IN (SELECT shard_id FROM dead_letters WHERE state = 'dead')
"""
_FILES = "SELECT path, size, mtime_ns, fingerprint, rows FROM corpus_files WHERE model_version = ? AND epoch = ?"

Letter = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Exported:
    """What stands in the file, and in `left_out`, one line each, what could not be exported."""

    letters: int
    docs: int
    left_out: tuple[str, ...]


@dataclass(slots=True, kw_only=True)
class _Wanted:
    """The rows of each file that are asked for, with the letter that each of them has."""

    rows: dict[str, dict[int, Letter]] = field(default_factory=dict)
    left_out: list[str] = field(default_factory=list)
    staged: dict[str, str] = field(default_factory=dict)
    """What stands in for a file that is not Parquet."""
    id_column: str
    id_type: IdType

    def original(self, path: str, table: pa.Table) -> pa.Table:
        """Rows of a corpus file, as that file has them."""
        return staged.original(table, self.id_column, self.id_type) if path in self.staged else table


def export(
    layout: Layout, path: Path, *, where: str | None = None, model_version: str | None = None, force: bool = False
) -> Exported:
    """Write the documents of the letters that are dead and fit `where` to a new Parquet file at `path`.

    One row a document: the columns of the corpus, its bytes as they are there (invalid UTF-8 included),
    and `dead_letter_id`, `file`, `row`, `error_type`, `message` (with `dead_letter_` before a name that the
    corpus has too). Without any such document no file is written. Raises UsageError, OutputError.
    """
    _check_target(layout, path, force=force)
    with open_private(layout) as connection:
        plan = only_plan(layout, choose(connection, model_version))
        key = [plan.model_version, plan.epoch]
        letters = connection.sql(_LETTERS, params=key).to_arrow_table()
        paths = {str(name): str(file) for name, file in connection.execute(_PATHS, key).fetchall()}
        known = {str(row[0]): _corpus_file(*row) for row in connection.execute(_FILES, key).fetchall()}
    assert letters is not None
    chosen = select(letters, where, plan)
    read = _columns(layout, plan)
    wanted = _wanted(chosen, layout, plan, paths, id_column=read[0])
    readable = _readable(wanted, known, read)
    docs = _write(path, readable, wanted, force=force) if readable else 0
    return Exported(letters=len(chosen), docs=docs, left_out=tuple(wanted.left_out))


def _check_target(layout: Layout, path: Path, *, force: bool) -> None:
    if path.exists() and (not force or not path.is_file()):
        raise UsageError(f"{path} exists already" + ("; --force replaces it" if path.is_file() else ""))
    if not path.parent.is_dir():
        raise UsageError(f"no such directory: {path.parent}")
    if path.absolute().is_relative_to(layout.root):
        raise UsageError(f"{path} lies in the output itself, where every Parquet file is taken for a part")


def _corpus_file(path: str, size: int, mtime_ns: int, print_: str, rows: int) -> CorpusFile:
    return CorpusFile(path=path, size=size, mtime_ns=mtime_ns, fingerprint=print_, rows=rows)


def _columns(layout: Layout, plan: Plan) -> list[str]:
    base = next(iter(planfile.paths(layout, plan.model_version).values()))
    spec = planfile.decode(base).spec
    text = spec.get("text_template")
    texts = [spec["text_column"]] if text is None else template.parse(text).columns
    return list(dict.fromkeys(name for name in (spec["id_column"], *texts, spec["query_column"]) if name))


def _wanted(
    letters: Sequence[Letter], layout: Layout, plan: Plan, paths: Mapping[str, str], *, id_column: str
) -> _Wanted:
    later = shards_of(plan, read_orders(layout, plan.model_version))
    shards: dict[ShardKey, Shard] = {shard.key: shard for shard in (*plan.shards, *later)}
    wanted = _Wanted(id_column=id_column, id_type=plan.id_type)
    for letter in letters:
        shard = shards[letter["shard_id"], letter["generation"]]
        file = paths.get(shard.shard_id, shard.file)
        if shard.unreadable is not None:
            wanted.left_out.append(f"{file}: {shard.unreadable}")
            continue
        if shard.staged is not None:
            wanted.staged[file] = shard.staged
        rows = wanted.rows.setdefault(file, {})
        for row in _rows_of(letter, shard):
            rows.setdefault(row, letter)  # of a document that failed against several queries, the first
    return wanted


def _rows_of(letter: Letter, shard: Shard) -> list[int]:
    """A shard that is dead as a whole has one letter, without a row, for all its documents."""
    if letter["row"] is None:
        return [int(row) for row in offsets(shard) + shard.first_row]
    return [int(letter["row"])]


def _readable(
    wanted: _Wanted, known: Mapping[str, CorpusFile], read: Sequence[str]
) -> list[tuple[str, pq.ParquetFile]]:
    """The files that are still the planned ones, opened; the others are left out with the reason."""
    found: list[tuple[str, pq.ParquetFile]] = []
    for path, rows in wanted.rows.items():
        try:
            if path not in wanted.staged:
                _check_unchanged(path, known.get(path), read)
            found.append((path, columns.open_file(wanted.staged.get(path, path))))
        except (CorpusError, OSError) as error:
            wanted.left_out.append(f"{len(rows):,} documents of {path}: {columns.reason(path, error)}")
    return found


def _check_unchanged(path: str, planned: CorpusFile | None, read: Sequence[str]) -> None:
    stat = Path(path).stat()
    if planned is None or (stat.st_size, stat.st_mtime_ns) == (planned.size, planned.mtime_ns):
        return
    if fingerprint(path, read).fingerprint != planned.fingerprint:
        raise CorpusError("the file has changed since it was planned, and its rows with it")


def _write(path: Path, readable: Sequence[tuple[str, pq.ParquetFile]], wanted: _Wanted, *, force: bool) -> int:
    corpus = _corpus_schema(
        [wanted.original(name, file.schema_arrow.empty_table()).schema for name, file in readable]
    )
    names = [name if name not in corpus.names else f"dead_letter_{name}" for name, _ in _ABOUT]
    schema = pa.schema([*corpus, *(pa.field(name, kind) for name, (_, kind) in zip(names, _ABOUT, strict=True))])
    temp = path.with_name(f".tmp-{uuid4().hex}")
    docs = 0
    try:
        with pq.ParquetWriter(temp, schema) as writer:
            for name, file in readable:
                for table, letters in _documents(name, file, wanted):
                    writer.write_table(_with_letters(table, corpus, schema, name, letters))
                    docs += len(letters)
        if docs and not files.publish_file(temp, path, replace=force):
            raise UsageError(f"{path} exists already; --force replaces it")
    except OSError as error:
        raise OutputError(f"cannot write {path}: {' '.join(str(error).split())}") from error
    finally:
        temp.unlink(missing_ok=True)
    return docs


def _corpus_schema(schemas: Sequence[pa.Schema]) -> pa.Schema:
    plain = [
        pa.schema(
            [
                pa.field(item.name, item.type.value_type if pa.types.is_dictionary(item.type) else item.type)
                for item in schema
            ]
        )
        for schema in schemas
    ]
    try:
        return pa.unify_schemas(plain, promote_options="permissive")
    except (pa.ArrowInvalid, pa.ArrowTypeError) as error:
        line = " ".join(str(error).split())
        raise UsageError(f"the files' columns differ ({line}): export one file at a time with --where") from error


def _documents(
    path: str, file: pq.ParquetFile, wanted: _Wanted
) -> Iterator[tuple[pa.Table, list[tuple[int, Letter]]]]:
    """The wanted rows with their letters, a batch at a time. What cannot be decoded is left out."""
    rows = wanted.rows[path]
    left = set(rows)
    start = 0
    for group in range(file.num_row_groups):
        count = file.metadata.row_group(group).num_rows
        if any(start <= row < start + count for row in left):
            at = start
            try:
                for batch in file.iter_batches(batch_size=_BATCH, row_groups=[group]):
                    mine = [row for row in range(at, at + batch.num_rows) if row in rows]
                    if mine:
                        table = pa.Table.from_batches([batch]).take([row - at for row in mine])
                        yield wanted.original(path, table), [(row, rows[row]) for row in mine]
                        left.difference_update(mine)
                    at += batch.num_rows
            except (pa.ArrowException, OSError) as error:
                lost = sum(1 for row in left if start <= row < start + count)
                reason = columns.reason(path, error)
                wanted.left_out.append(f"{lost:,} documents of {path}, row group {group}: {reason}")
        start += count
    file.close()


def _with_letters(
    table: pa.Table, corpus: pa.Schema, schema: pa.Schema, file: str, letters: Sequence[tuple[int, Letter]]
) -> pa.Table:
    filled: list[Any] = [
        table.column(item.name).cast(item.type)
        if item.name in table.column_names
        else pa.nulls(table.num_rows, item.type)
        for item in corpus
    ]
    about: list[list[Any]] = [
        [letter["id"] for _, letter in letters],
        [file] * len(letters),
        [row for row, _ in letters],
        [letter["error_type"] for _, letter in letters],
        [letter["message"] for _, letter in letters],
    ]
    filled += [pa.array(values, kind) for values, (_, kind) in zip(about, _ABOUT, strict=True)]
    return pa.Table.from_arrays(filled, schema=schema)
