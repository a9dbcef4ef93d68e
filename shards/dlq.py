"""Read the dead letters of the snapshot."""

from __future__ import annotations

from typing import Any, Literal

import duckdb

from shards.errors import UsageError
from shards.layout import Layout
from shards.snapshot import open_private
from shards.status import choose

LetterState = Literal["dead", "redriven", "resolved"]


def dead_letters(
    layout: Layout,
    *,
    model_version: str | None = None,
    state: LetterState | None = "dead",
    limit: int | None = None,
) -> list[dict[str, Any]]:
    """The letters in corpus order, newest generation last; `state` None: all. Raises UsageError."""
    with open_private(layout) as connection:
        name = choose(connection, model_version)
        return _rows(
            connection,
            "SELECT * FROM dead_letters WHERE model_version = ? AND (?::VARCHAR IS NULL OR state = ?)"
            " ORDER BY file, row, generation, id LIMIT ?",
            [name, state, state, 2**62 if limit is None else limit],
        )


def dead_letter(layout: Layout, letter_id: str) -> dict[str, Any]:
    """One letter by its id or an unambiguous beginning of it. Raises UsageError."""
    with open_private(layout) as connection:
        found = _rows(
            connection,
            "SELECT * FROM dead_letters WHERE starts_with(id, ?) ORDER BY id = ? DESC, id LIMIT 6",
            [letter_id, letter_id],
        )
    if not found or not letter_id:
        raise UsageError(f"no dead letter with id {letter_id!r}")
    if len(found) > 1 and found[0]["id"] != letter_id:
        ids = ", ".join(str(letter["id"]) for letter in found)
        raise UsageError(f"{letter_id!r} is the beginning of several ids: {ids}")
    return found[0]


def _rows(connection: duckdb.DuckDBPyConnection, sql: str, values: list[Any]) -> list[dict[str, Any]]:
    answer = connection.execute(sql, values)
    names = [column[0] for column in answer.description or []]
    return [dict(zip(names, row, strict=True)) for row in answer.fetchall()]
