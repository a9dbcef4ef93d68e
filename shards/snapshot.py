"""Read the published manifest, without being blocked by anybody and without blocking anybody."""

from __future__ import annotations

import glob
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import duckdb

from shards.errors import OutputError, UsageError
from shards.layout import Layout
from shards.publish import publish, quoted, scores_sql

__all__ = ["Result", "open_private", "publish", "query"]

_EXPLAIN = re.compile(r"\s*explain(\s+analyze)?\s*(\([^)]*\))?", re.IGNORECASE)
_READS = {duckdb.StatementType.SELECT, duckdb.StatementType.MULTI, duckdb.StatementType.PRAGMA}


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """A query's answer. `types` are DuckDB's names; times in `rows` are naive and UTC."""

    columns: tuple[str, ...]
    types: tuple[str, ...]
    rows: list[tuple[Any, ...]]


@contextmanager
def open_private(layout: Layout) -> Iterator[duckdb.DuckDBPyConnection]:
    """A read-only connection to a private copy of the snapshot, deleted afterwards.

    A copy, because someone's open read-write shell must not block us. The `scores` view is pointed to
    where the output lies now. The connection can read the parts and no other file. Raises OutputError.
    """
    with tempfile.TemporaryDirectory(prefix="rescore-") as folder:
        copy = Path(folder) / "manifest.duckdb"
        try:
            shutil.copyfile(layout.manifest, copy)
            _point_here(copy, layout)
            connection = duckdb.connect(str(copy), read_only=True, config={"temp_directory": folder})
        except FileNotFoundError as error:
            raise OutputError(f"no manifest in {layout.root}: nothing has run here yet") from error
        except (OSError, duckdb.Error) as error:
            line = " ".join(str(error).split())
            raise OutputError(f"cannot read {layout.manifest}: {line}; the next run publishes it anew") from error
        try:
            # A glob is checked as it is written, its files as they are named.
            scores = str(layout.root / "scores")
            allowed = f"'{quoted(scores)}', '{quoted(glob.escape(scores))}'"
            connection.execute(f"SET allowed_directories = [{allowed}]")
            connection.execute("SET enable_external_access = false")
            connection.execute("SET lock_configuration = true")
            yield connection
        finally:
            connection.close()


def query(layout: Layout, sql: str) -> Result:
    """Run one reading statement over the snapshot. Raises UsageError in one line for anything else."""
    with open_private(layout) as connection:
        try:
            _check(connection, sql)
            answer = connection.execute(sql)
            columns = answer.description or []
            rows = answer.fetchall()
        except duckdb.Error as error:
            raise UsageError(f"SQL: {' '.join(str(error).split())}") from error
    return Result(
        columns=tuple(str(column[0]) for column in columns),
        types=tuple(str(column[1]) for column in columns),
        rows=rows,
    )


def _check(connection: duckdb.DuckDBPyConnection, sql: str) -> None:
    # The database is read-only, but COPY TO could still write beside the parts, which must be readable.
    statements = connection.extract_statements(sql)
    if len(statements) != 1:
        raise UsageError(f"SQL: one statement is needed, not {len(statements)}")
    kind = statements[0].type
    if kind == duckdb.StatementType.EXPLAIN:
        _check(connection, _EXPLAIN.sub("", sql, count=1))  # EXPLAIN ANALYZE runs what it explains
    elif kind not in _READS:
        raise UsageError(f"SQL: only reading is possible here, not {kind.name}")


def _point_here(copy: Path, layout: Layout) -> None:
    """Make the `scores` view of a copy read the parts of this directory, wherever it was published."""
    with duckdb.connect(str(copy)) as connection:
        if connection.execute("SELECT root FROM meta").fetchall() == [(str(layout.root),)]:
            return
        epochs = connection.execute(
            "SELECT model_version, max(epoch) FROM model_versions GROUP BY ALL ORDER BY ALL"
        ).fetchall()
        connection.execute(f"CREATE OR REPLACE VIEW scores AS {scores_sql(layout, epochs)}")
