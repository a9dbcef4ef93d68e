"""The Parquet file that stands in for a file of another format: its columns, and what its footer says.

It has the wanted columns under the names they were asked for, as strings (an id is its literal text), and for
files of lines where each record begins and, of one that is no document, why.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from shards import columns
from shards.errors import CorpusError
from shards.record import BATCH_BYTES, BATCH_ROWS, Record, Wanted
from shards.types import CorpusFile, CorpusSpec, IdType

FORMAT = 1
"""Part of what names a staged file: another format is staged anew, and its documents are planned anew."""

LINE = "rescore.line"
ERROR_TYPE = "rescore.error_type"
ERROR = "rescore.error"
ABOUT = (LINE, ERROR_TYPE, ERROR)
_KEY = "rescore"


@dataclass(slots=True, kw_only=True)
class Facts:
    """What a whole file says about its columns. `integers`, `strings`: how many ids were written as such, and the
    line of the first."""

    names: list[str] = field(default_factory=list)
    seen: list[str] = field(default_factory=list)
    integers: int = 0
    first_integer: int | None = None
    strings: int = 0
    first_string: int | None = None

    def count(self, record: Record) -> None:
        if record.id is None:
            return
        if record.integer:
            self.integers += 1
            self.first_integer = self.first_integer or record.line
        else:
            self.strings += 1
            self.first_string = self.first_string or record.line


def schema(wanted: Wanted) -> pa.Schema:
    texts = [name for name in wanted.texts if name != wanted.id]
    fields: list[Any] = [pa.field(name, pa.string()) for name in (wanted.id, *texts, ERROR_TYPE, ERROR)]
    return pa.schema([*fields, pa.field(LINE, pa.int64())])


def tables(records: Iterator[Record], wanted: Wanted, facts: Facts) -> Iterator[pa.Table]:
    """The records in batches of bounded size, counted into `facts`."""
    batch: list[Record] = []
    size = 0
    for record in records:
        facts.count(record)
        batch.append(record)
        size += sum(len(text) for text in (record.id, *record.texts) if text is not None)
        if len(batch) == BATCH_ROWS or size > BATCH_BYTES:
            yield _table(batch, wanted)
            batch, size = [], 0
    if batch:
        yield _table(batch, wanted)


def writer(path: Any, kind: pa.Schema) -> pq.ParquetWriter:
    names: Any = [name for name in kind.names if name == ERROR_TYPE]  # little is won where every value is another
    return pq.ParquetWriter(path, kind, compression="zstd", write_page_checksum=True, use_dictionary=names)


def metadata(facts: Facts) -> dict[str, str]:
    return {_KEY: json.dumps(asdict(facts))}


def id_type(file: CorpusFile, parquet: pq.ParquetFile, spec: CorpusSpec) -> IdType | None:
    """The type of the ids of a staged file; None: it has none. Raises CorpusError for a column that will not do."""
    facts = _facts(parquet)
    if facts is None:
        return columns.check(file.path, parquet.schema_arrow, spec)
    if facts.names:
        for name in columns.read_columns(spec):
            if name not in facts.seen:
                raise CorpusError(f"no column {name!r} in {file.path}; it has: {', '.join(facts.names)}")
    if facts.integers and facts.strings:
        raise CorpusError(
            f"column {spec.id_column!r} in {file.path} has integers (first on line {facts.first_integer}) and"
            f" strings (first on line {facts.first_string}); one corpus has one type of id"
        )
    if facts.integers:
        return "int64"
    return "string" if facts.strings else None


def original(table: pa.Table, id_column: str, kind: IdType) -> pa.Table:
    """The rows as the file had them: integer ids are integers (beyond int64: null), and without the errors."""
    table = table.drop_columns([name for name in (ERROR_TYPE, ERROR) if name in table.column_names])
    ids = table.column(id_column)
    if kind == "int64" and columns.is_text(ids.type):
        at = table.column_names.index(id_column)
        table = table.set_column(at, id_column, columns.integers(ids.combine_chunks()))
    return table


def place(file: CorpusFile, row: int) -> str:
    """Where a person finds a row: `path:row`, counted from 0, or the line of a file of lines."""
    if file.staged is not None:
        with columns.open_file(file.staged) as parquet:
            if LINE in parquet.schema_arrow.names:
                return f"{file.path}, line {_line(parquet, row)}"
    return f"{file.path}:{row}"


def _line(parquet: pq.ParquetFile, row: int) -> int:
    group = 0
    while row >= parquet.metadata.row_group(group).num_rows:
        row -= parquet.metadata.row_group(group).num_rows
        group += 1
    return int(parquet.read_row_group(group, columns=[LINE]).column(0)[row].as_py())


def _facts(parquet: pq.ParquetFile) -> Facts | None:
    value = (parquet.metadata.metadata or {}).get(_KEY.encode())
    return None if value is None else Facts(**json.loads(value))


def _table(batch: Sequence[Record], wanted: Wanted) -> pa.Table:
    kind = schema(wanted)
    values: dict[str, list[Any]] = {
        name: [record.texts[at] for record in batch] for at, name in enumerate(wanted.texts)
    }
    values[wanted.id] = [record.id for record in batch]
    values[LINE] = [record.line for record in batch]
    values[ERROR_TYPE] = [record.error[0] if record.error else None for record in batch]
    values[ERROR] = [record.error[1] if record.error else None for record in batch]
    return pa.table({name: values[name] for name in kind.names}, schema=kind)
