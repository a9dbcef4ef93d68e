"""The columns of a corpus file: are they there, are they of a type that can be read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from shards import nested, template
from shards.errors import CorpusError
from shards.types import CorpusSpec, IdType

BUFFER = 1 << 20
INT64_MIN, INT64_MAX = -(2**63), 2**63 - 1


def open_file(path: str) -> pq.ParquetFile:
    """Open a corpus file. Raises CorpusError that names it if it is no whole Parquet file."""
    try:
        # pre_buffer off and 1 MiB buffers: 170 MB for a row group of a million rows, not 2.9 GB.
        return pq.ParquetFile(path, pre_buffer=False, buffer_size=BUFFER, page_checksum_verification=True)
    except (pa.ArrowException, OSError) as error:
        raise CorpusError(f"cannot read {path}: {reason(path, error)}") from error


def reason(path: str, error: Exception) -> str:
    """One line on why a file is no readable Parquet file."""
    try:
        if Path(path).stat().st_size == 0:
            return "the file has 0 bytes"
    except OSError:
        pass
    return " ".join(str(error).split()) or type(error).__name__


def check(path: str, schema: pa.Schema, spec: CorpusSpec) -> IdType | None:
    """The id's type in this file (None: a column of nulls). Raises CorpusError for a column that will not do."""
    kinds = {name: nested.kind(path, schema, name) for name in read_columns(spec)}
    for name in (*text_columns(spec), spec.query_column):
        if name is not None:
            _check_text(path, name, kinds[name])
    return _id_type(path, spec.id_column, kinds[spec.id_column])


def read_columns(spec: CorpusSpec) -> list[str]:
    """The columns that are read, each once."""
    names = [spec.id_column, *text_columns(spec), spec.query_column]
    return list(dict.fromkeys(name for name in names if name is not None))


def text_columns(spec: CorpusSpec) -> list[str]:
    """The columns that make the text."""
    if spec.text_template is not None:
        return template.parse(spec.text_template).columns
    return [spec.text_column]


def is_text(kind: pa.DataType) -> bool:
    value = plain(kind)
    return bool(
        pa.types.is_string(value)
        or pa.types.is_large_string(value)
        or pa.types.is_string_view(value)
        or pa.types.is_null(value)
    )


def integers(values: pa.Array[Any]) -> pa.Array[Any]:
    """The integers that strings are written as; beyond int64, as null."""
    try:
        return pc.cast(values, pa.int64())
    except pa.ArrowInvalid:
        return pa.array([None if text is None else integer(text) for text in values.to_pylist()], pa.int64())


def integer(text: str) -> int | None:
    """The integer that a text is; None: it is beyond int64."""
    if len(text) > 40:  # int() refuses what has thousands of digits
        return None
    value = int(text)
    return value if INT64_MIN <= value <= INT64_MAX else None


def plain(kind: Any) -> Any:
    """The type of the values themselves: that of a dictionary's."""
    return kind.value_type if isinstance(kind, pa.DictionaryType) else kind


def decoded(values: Any) -> Any:
    """The values themselves, where they stand in a dictionary."""
    return pc.cast(values, plain(values.type)) if isinstance(values.type, pa.DictionaryType) else values


def _check_text(path: str, name: str, kind: pa.DataType) -> None:
    if not is_text(kind):
        raise CorpusError(f"column {name!r} in {path} has type {kind}; a string is needed")


def _id_type(path: str, name: str, kind: pa.DataType) -> IdType | None:
    value = plain(kind)
    if pa.types.is_null(value):
        return None
    if pa.types.is_integer(value):
        return "int64"
    if is_text(kind):
        return "string"
    raise CorpusError(f"column {name!r} in {path} has type {kind}; an id is an integer or a string")
