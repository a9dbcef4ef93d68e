"""Which rows carry a doc_id that stands elsewhere. Exact, and in bounded memory."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from shards import columns, nested, staged
from shards.errors import CorpusError
from shards.types import CorpusFile, Duplicates, IdType

_MEMORY = "1GB"
_BATCH = 64 * 1024
_NAMED = 5

# Rows of planned files (`old`) are never excluded again; they push out every later row with their id.
_EXCLUDED = """
SELECT file, row FROM (
  SELECT file, row, old, bool_or(old) OVER same AS planned, count(*) OVER same AS times,
         row_number() OVER (PARTITION BY id ORDER BY file {direction}, row {direction}) AS rank
  FROM places WINDOW same AS (PARTITION BY id)
) WHERE times > 1 AND NOT old AND (planned OR rank > 1) ORDER BY file, row
"""
_CLASHES = """
SELECT id, list({'file': file, 'row': row} ORDER BY file, row)[1:2] AS places
FROM places GROUP BY id HAVING count(*) > 1 AND NOT bool_and(old) ORDER BY min((file, row)) LIMIT ?
"""


class UnreadableIdsError(Exception):
    """A file's id column cannot be decoded: the planner decides what becomes of the file."""

    def __init__(self, number: int, why: str) -> None:
        super().__init__(why)
        self.number = number
        self.why = why


@dataclass(frozen=True, slots=True, kw_only=True)
class IdSource:
    """The ids of `files` (in corpus order). `planned[i]`: file i was cut into shards by an earlier start."""

    files: Sequence[CorpusFile]
    planned: Sequence[bool]
    id_column: str
    id_type: IdType


def find(source: IdSource, *, policy: Duplicates, temp: Path) -> dict[int, list[int]]:
    """File number → rows (in the file, ascending) that are no documents under the policy.

    Null ids are no duplicates. Documents of planned files stay whatever the policy says, because what
    was acknowledged never changes. Raises CorpusError under `fail`, and UnreadableIdsError.
    """
    with tempfile.TemporaryDirectory(dir=temp, prefix="ids-") as folder:
        config: dict[str, Any] = {"memory_limit": _MEMORY, "temp_directory": folder}
        with duckdb.connect(":memory:", config=config) as connection:
            # Hashes first: 8 bytes a document instead of its id. What is left is compared exactly.
            _scan(
                connection,
                source,
                "CREATE TABLE suspects AS SELECT hash(id) AS h FROM ids WHERE id IS NOT NULL"
                " GROUP BY h HAVING count(*) > 1",
            )
            if connection.execute("SELECT count(*) FROM suspects").fetchall() == [(0,)]:
                return {}
            _scan(
                connection,
                source,
                "CREATE TABLE places AS SELECT id, file, row, old FROM ids"
                " WHERE id IS NOT NULL AND hash(id) IN (SELECT h FROM suspects)",
            )
            if policy == "fail":
                _refuse(connection, source)
            return _excluded(connection, policy)


def _scan(connection: duckdb.DuckDBPyConnection, source: IdSource, statement: str) -> None:
    failed: list[UnreadableIdsError] = []
    reader = pa.RecordBatchReader.from_batches(_schema(source.id_type), _batches(source, failed))
    connection.register("ids", reader)
    try:
        connection.execute(statement)
    except (duckdb.Error, pa.ArrowException, OSError, UnreadableIdsError) as error:
        # An error inside the stream comes back in DuckDB's words; the one that was raised says more.
        raise (failed[0] if failed else error) from None
    finally:
        connection.unregister("ids")


def _schema(id_type: IdType) -> pa.Schema:
    kind: Any = pa.int64() if id_type == "int64" else pa.large_binary()
    return pa.schema([("id", kind), ("file", pa.int32()), ("row", pa.int64()), ("old", pa.bool_())])


def _batches(source: IdSource, failed: list[UnreadableIdsError]) -> Iterator[pa.RecordBatch]:
    schema = _schema(source.id_type)
    for number, file in enumerate(source.files):
        row = 0
        try:
            with columns.open_file(file.data) as parquet:
                for batch in parquet.iter_batches(batch_size=_BATCH, columns=[source.id_column]):
                    count = batch.num_rows
                    ids = nested.column(pa.Table.from_batches([batch]), source.id_column).combine_chunks()
                    values: list[Any] = [
                        _ids(ids, source.id_type),
                        pa.repeat(pa.scalar(number, pa.int32()), count),
                        pa.array(np.arange(row, row + count)),
                        pa.repeat(pa.scalar(source.planned[number]), count),
                    ]
                    yield pa.RecordBatch.from_arrays(values, schema=schema)
                    row += count
        except (pa.ArrowException, OSError, CorpusError) as error:
            failed.append(UnreadableIdsError(number, columns.reason(file.data, error)))
            raise failed[0] from error


def _ids(values: pa.Array[Any], id_type: IdType) -> pa.Array[Any]:
    """Strings as bytes, which compare even where they are no UTF-8; integers beyond int64 as null."""
    values = columns.decoded(values)
    if id_type == "string":
        return pc.cast(values, pa.large_binary())
    if columns.is_text(values.type):  # of a staged file: an integer's literal text
        return columns.integers(values)
    if pa.types.is_uint64(values.type):
        fits: Any = pc.less_equal(values, pa.scalar(columns.INT64_MAX, pa.uint64()))
        values = pc.if_else(fits, values, pa.scalar(None, pa.uint64()))
    return pc.cast(values, pa.int64())


def _excluded(connection: duckdb.DuckDBPyConnection, policy: Duplicates) -> dict[int, list[int]]:
    direction = "DESC" if policy == "keep_last" else "ASC"
    found: dict[int, list[int]] = {}
    for file, row in connection.execute(_EXCLUDED.format(direction=direction)).fetchall():
        found.setdefault(file, []).append(row)
    return found


def _refuse(connection: duckdb.DuckDBPyConnection, source: IdSource) -> None:
    clashes = connection.execute(_CLASHES, [_NAMED + 1]).fetchall()
    if not clashes:
        return  # different ids with the same hash
    named = "; ".join(_clash(source, doc_id, at) for doc_id, at in clashes[:_NAMED])
    more = ", and more" if len(clashes) > _NAMED else ""
    raise CorpusError(
        f"duplicate ids in column {source.id_column!r}: {named}{more}."
        " Make them unique, or set corpus.duplicates to keep_first or keep_last (default: fail)"
    )


def _clash(source: IdSource, doc_id: Any, at: Sequence[dict[str, int]]) -> str:
    shown = doc_id.decode(errors="backslashreplace") if isinstance(doc_id, bytes) else doc_id
    places = " and ".join(staged.place(source.files[place["file"]], place["row"]) for place in at)
    return f"{shown!r} at {places}"
