"""Columns inside columns: `meta.body.text` is the field `text` of `body` of `meta`.

A column whose own name has the dots in it goes first.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

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
