"""Columns inside columns: `meta.body.text` is the field `text` of `body` of `meta`.

A column whose own name has the dots in it goes first.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from shards.errors import CorpusError

MISSING: Any = object()


def value(record: Mapping[str, Any], name: str) -> Any:
    """The value of a record's field; MISSING if there is none."""
    if name in record:
        return record[name]
    here: Any = record
    for part in name.split("."):
        if not isinstance(here, dict) or part not in here:
            return MISSING
        here = here[part]
    return here


def kind(path: str, schema: pa.Schema, name: str) -> Any:
    """The type of a column of a file. Raises CorpusError if there is none, or more than one."""
    found = schema.names.count(name)
    if found > 1:
        raise CorpusError(f"column {name!r} stands {found} times in {path}")
    if found == 1:
        return schema.field(name).type
    first, *rest = name.split(".")
    here: Any = schema.field(first).type if schema.names.count(first) == 1 else None
    for part in rest:
        index = here.get_field_index(part) if isinstance(here, pa.StructType) else -1
        here = here.field(index).type if index >= 0 else None
    if here is None or not rest:
        raise CorpusError(f"no column {name!r} in {path}; it has: {', '.join(schema.names)}")
    return here


def column(table: pa.Table, name: str) -> pa.ChunkedArray[Any]:
    """A column of a table that has it."""
    if name in table.column_names:
        return table.column(name)
    first, *rest = name.split(".")
    found: pa.ChunkedArray[Any] = pc.struct_field(table.column(first), rest)
    return found
