"""A file of queries: every document is scored against each of them."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from shards.errors import CorpusError
from shards.types import QuerySet

_COLUMNS = ("query_id", "text")


def read_queries(path: str) -> QuerySet:
    """Read `query_id, text` from .parquet, .jsonl, .csv or .tsv. Raises CorpusError in one line."""
    try:
        pairs = [_pair(path, place, record) for place, record in _records(path)]
    except OSError as error:
        raise CorpusError(f"cannot read queries {path}: {error.strerror or error}") from error
    except (ValueError, csv.Error, pa.ArrowException) as error:
        raise CorpusError(f"cannot read queries {path}: {' '.join(str(error).split())}") from error
    if not pairs:
        raise CorpusError(f"no queries in {path}")
    seen: set[str] = set()
    for query_id, _ in pairs:
        if query_id in seen:
            raise CorpusError(f"query_id {query_id!r} stands twice in {path}")
        seen.add(query_id)
    return QuerySet(ids=tuple(query_id for query_id, _ in pairs), texts=tuple(text for _, text in pairs))


def _records(path: str) -> Iterator[tuple[int, dict[str, Any]]]:
    """(line or row, from 1; the record) of each query."""
    suffix = Path(path).suffix.lower()
    if suffix == ".parquet":
        table = pq.read_table(path)
        present = [name for name in _COLUMNS if name in table.column_names]
        yield from enumerate(table.select(present).to_pylist(), 1)
    elif suffix == ".jsonl":
        with Path(path).open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, 1):
                if line.strip():
                    value = json.loads(line)
                    if not isinstance(value, dict):
                        raise CorpusError(f"line {number} of {path} is no JSON object")
                    yield number, value
    elif suffix in (".csv", ".tsv"):
        with Path(path).open(encoding="utf-8-sig", newline="") as lines:
            yield from enumerate(csv.DictReader(lines, delimiter="," if suffix == ".csv" else "\t"), 1)
    else:
        raise CorpusError(f"queries {path}: .parquet, .jsonl, .csv or .tsv is needed")


def _pair(path: str, place: int, record: dict[str, Any]) -> tuple[str, str]:
    for name in _COLUMNS:
        if name not in record:
            raise CorpusError(f"no column {name!r} in {path} (row {place}); it has: {', '.join(map(str, record))}")
        if record[name] is None:
            raise CorpusError(f"{name} is null in {path}, row {place}")
    query_id, text = record["query_id"], record["text"]
    if isinstance(query_id, bool) or not isinstance(query_id, str | int):
        raise CorpusError(f"query_id {query_id!r} in {path}, row {place}: a string or an integer is needed")
    if not isinstance(text, str):
        raise CorpusError(f"text in {path}, row {place} is no string")
    for value in (str(query_id), text):
        try:
            value.encode()
        except UnicodeEncodeError as error:  # a lone surrogate, which JSON lets through
            raise CorpusError(f"row {place} of {path} is not valid Unicode: {error.reason}") from error
    return str(query_id), text
