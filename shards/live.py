"""The live database: opened, moved aside where it is damaged (the files can rebuild it), and written to."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa

from shards import files
from shards.errors import ManifestError, ManifestRefused
from shards.layout import Layout
from shards.migrations import migrate

_DISK_WORDS = tuple(
    os.strerror(code) for code in (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EIO)
)
_TABLES = ("model_versions", "corpus_files", "shards", "ordered", "events", "letters", "runs", "lag_samples")


class Live:
    """A DuckDB connection whose errors are ManifestErrors. Not for several threads."""

    def __init__(self, connection: duckdb.DuckDBPyConnection) -> None:
        self._connection = connection

    def close(self) -> None:
        self._connection.close()

    @contextmanager
    def connection(self) -> Iterator[duckdb.DuckDBPyConnection]:
        """The connection itself."""
        try:
            yield self._connection
        except duckdb.Error as error:
            raise ManifestError(f"the manifest: {_line(error)}") from error

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """All or nothing; durable once the block has ended."""
        self.execute("BEGIN")
        try:
            yield
            self.execute("COMMIT")
        except BaseException:
            with suppress(duckdb.Error):  # the first error says more; the driver ends, and nothing was committed
                self._connection.rollback()
            raise

    @contextmanager
    def tables(self, **tables: pa.Table) -> Iterator[None]:
        """Arrow tables that statements in the block can name."""
        for name, table in tables.items():
            self._connection.register(name, table)
        try:
            yield
        finally:
            for name in tables:
                self._connection.unregister(name)

    def append(self, name: str, table: pa.Table) -> None:
        """Rows in bulk: a million in 0.6 s, where `executemany` would take minutes."""
        with self.tables(batch=table):
            self.execute(f"INSERT INTO {name} BY NAME SELECT * FROM batch")

    def execute(self, sql: str, values: Sequence[object] = ()) -> None:
        with self.connection() as connection:
            connection.execute(sql, list(values))

    def rows(self, sql: str, values: Sequence[object] = ()) -> list[tuple[Any, ...]]:
        with self.connection() as connection:
            return connection.execute(sql, list(values)).fetchall()

    def table(self, sql: str, values: Sequence[object] = ()) -> pa.Table:
        with self.connection() as connection:
            found: pa.Table | None = connection.sql(sql, params=list(values)).to_arrow_table()
        assert found is not None
        return found

    def scalar(self, sql: str, values: Sequence[object] = ()) -> int:
        return int(self.rows(sql, values)[0][0])


def utc(time: datetime) -> datetime:
    """UTC without a zone, as the manifest stores times."""
    return time.astimezone(UTC).replace(tzinfo=None)


def open_live(layout: Layout, now: datetime) -> tuple[Live, bool]:
    """The connection, and whether the database was lost or damaged and begins anew.

    Only the holder of the run lock may call this. Raises ManifestRefused for a newer schema, or when another
    process has the file open; ManifestError where the disk does not let it be opened.
    """
    _tidy(layout)
    if not layout.live.exists():
        _set_aside(layout.live, now)  # a WAL without its database would be replayed into the new one
        return _begin(layout), _has_parts(layout)
    try:
        return Live(_connect(layout.live)), False
    except duckdb.Error as error:
        if "set lock" in str(error) or "Conflicting lock" in str(error):
            raise ManifestRefused(f"another process has {layout.live} open: {_line(error)}") from error
        if any(word in str(error) for word in _DISK_WORDS):
            # Nothing is wrong with the file, and a new one would not fit either.
            raise ManifestError(f"the manifest: {_line(error)}") from error
    _set_aside(layout.live, now)
    return _begin(layout), True


def _begin(layout: Layout) -> Live:
    try:
        return Live(_connect(layout.live))
    except duckdb.Error as error:
        raise ManifestError(f"the manifest: {_line(error)}") from error


def _tidy(layout: Layout) -> None:
    """Remove what a killed driver left: half-written snapshots, plans and orders, the id check's spill.
    (Those of parts go when the epoch is known: see `reconcile`.)"""
    for folder in (layout.private, layout.plans, layout.root / "orders"):
        files.remove_temps(folder)
    for folder in layout.private.glob("ids-*"):
        shutil.rmtree(folder, ignore_errors=True)


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
