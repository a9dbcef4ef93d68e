"""Open the live database; one that is damaged is moved aside, because the files can rebuild it."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path

import duckdb

from shards.errors import ManifestError
from shards.layout import Layout
from shards.migrations import migrate

_TABLES = ("model_versions", "corpus_files", "shards", "ordered", "events", "letters", "runs", "lag_samples")


def open_live(layout: Layout, now: datetime) -> tuple[duckdb.DuckDBPyConnection, bool]:
    """The connection, and whether the database was lost or damaged and begins anew.

    Only the holder of the run lock may call this. Raises ManifestError for a newer schema, or when another
    process has the file open.
    """
    if not layout.live.exists():
        _set_aside(layout.live, now)  # a WAL without its database would be replayed into the new one
        return _connect(layout.live), _has_parts(layout)
    try:
        return _connect(layout.live), False
    except duckdb.Error as error:
        if "set lock" in str(error) or "Conflicting lock" in str(error):
            raise ManifestError(f"another process has {layout.live} open: {_line(error)}") from error
    _set_aside(layout.live, now)
    return _connect(layout.live), True


def _connect(path: Path) -> duckdb.DuckDBPyConnection:
    connection = duckdb.connect(str(path))
    try:
        migrate(connection)
        for name in _TABLES:
            # Reads every block: DuckDB checks a block only when it is read, and a torn file shall show now.
            connection.execute(f"SELECT bit_xor(hash(t)) FROM {name} t").fetchall()
    except (duckdb.Error, ManifestError):
        connection.close()
        raise
    return connection


def _set_aside(path: Path, now: datetime) -> None:
    stamp = now.strftime("%Y%m%dT%H%M%S%f")
    for item in (path, path.with_name(path.name + ".wal")):
        if item.exists():
            item.rename(item.with_name(f"{item.name}.damaged-{stamp}"))


def _has_parts(layout: Layout) -> bool:
    return any(layout.root.glob("scores/*/e*/[0-9a-f][0-9a-f]/*.parquet"))


def _line(error: Exception) -> str:
    return " ".join(str(error).split())
