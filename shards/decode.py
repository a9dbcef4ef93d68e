"""Arrow columns → Python values. A clean column takes the fast way; in others each bad value is found."""

from __future__ import annotations

import traceback
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import pyarrow as pa

from shards.columns import INT64_MAX, decoded, integer
from shards.types import DocId, Failure, IdType, Stage

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """One column of a shard; `rows` are the values' rows in the file."""

    name: str
    values: pa.ChunkedArray[Any]
    file: str
    rows: list[int]
    lines: list[int] | None = None
    """Where they begin, from 1, in a file of lines."""

    def place(self, index: int) -> str:
        if self.lines is not None:
            return f"{self.file}, line {self.lines[index]}"
        return f"{self.file}, row {self.rows[index]}"


@dataclass(slots=True, kw_only=True)
class Decoded(Generic[T]):
    """`values[i]` is a value for every i that is not in `bad`."""

    values: list[T]
    bad: dict[int, Failure] = field(default_factory=dict)


def read_texts(column: Column) -> Decoded[str]:
    """Strings; null and invalid UTF-8 are failures."""
    values = decoded(column.values)
    if values.null_count == 0:
        try:
            clean: list[Any] = values.to_pylist()
            return Decoded(values=clean)
        except UnicodeDecodeError:
            pass  # pyarrow does not validate when it reads: some value here is no UTF-8
    return _texts_one_by_one(column, values)


def read_ids(column: Column, id_type: IdType) -> Decoded[DocId]:
    """Ids, integers exactly as they are; null, invalid UTF-8 and integers beyond int64 are failures."""
    if id_type == "string":
        texts = read_texts(column)
        return Decoded(values=list(texts.values), bad=texts.bad)
    values: list[Any] = decoded(column.values).to_pylist()
    bad: dict[int, Failure] = {}
    for index, value in enumerate(values):
        if value is None:
            bad[index] = _null(column, index)
            continue
        exact = integer(value) if isinstance(value, str) else value  # a staged file has its literal text
        if exact is None or exact > INT64_MAX:
            bad[index] = _failure(column, index, "IdOutOfRange", f"{value} is beyond int64")
        values[index] = exact
    return Decoded(values=values, bad=bad)


def _texts_one_by_one(column: Column, values: pa.ChunkedArray[Any]) -> Decoded[str]:
    texts: list[str] = []
    bad: dict[int, Failure] = {}
    for index, raw in enumerate(values.cast(pa.large_binary()).to_pylist()):
        text = ""
        if raw is None:
            bad[index] = _null(column, index)
        else:
            try:
                text = raw.decode()
            except UnicodeDecodeError as error:
                bad[index] = _invalid(column, index, error)
        texts.append(text)
    return Decoded(values=texts, bad=bad)


def _null(column: Column, index: int) -> Failure:
    return _failure(column, index, "NullValue", "null")


def _invalid(column: Column, index: int, error: UnicodeDecodeError) -> Failure:
    what = f"not UTF-8 at byte {error.start}: {error.reason}"
    trace = "".join(traceback.format_exception(error))
    return _failure(column, index, "UnicodeDecodeError", what, trace)


def _failure(column: Column, index: int, kind: str, what: str, trace: str = "") -> Failure:
    message = f"column {column.name!r}: {what} ({column.place(index)})"
    return Failure(
        row=column.rows[index],
        doc_id=None,
        stage=Stage.READ,
        error_type=kind,
        message=message,
        traceback=trace or f"{kind}: {message}\n",
    )
