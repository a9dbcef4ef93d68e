"""Publish the manifest: a file of its own, replaced by rename, that anybody may open."""

from __future__ import annotations

import glob
import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from uuid import uuid4

import duckdb

from shards import files
from shards.layout import Layout

_STORAGE = "v1.4.0"  # what the DuckDB programs people have can read

# One row; parameters: the model_version, three times. A shard's state is that of its latest generation.
_COUNTS = """
WITH epochs AS (SELECT max(epoch) AS epoch FROM model_versions WHERE model_version = ?),
mine AS (SELECT * FROM {shards} WHERE model_version = ? AND epoch = (FROM epochs)),
latest AS (SELECT shard_id, arg_max(state, generation) AS state FROM mine GROUP BY shard_id)
SELECT (SELECT count(*) FROM latest WHERE state = 'pending') AS pending,
       (SELECT count(*) FROM latest WHERE state = 'leased') AS leased,
       (SELECT count(*) FROM latest WHERE state = 'done') AS done,
       (SELECT count(*) FROM latest WHERE state = 'dead') AS dead,
       (SELECT coalesce(sum(docs), 0)::BIGINT FROM mine WHERE generation = 0) AS docs_total,
       (SELECT coalesce(sum(scored), 0)::BIGINT FROM mine) AS docs_scored,
       (SELECT coalesce(sum(docs), 0)::BIGINT FROM dead_letters
        WHERE model_version = ? AND epoch = (FROM epochs) AND state = 'dead') AS docs_dead
"""
COUNTS = _COUNTS.format(shards="shard_states")
"""For the live database."""
COUNTS_PUBLISHED = _COUNTS.format(shards="shards")
"""For the snapshot."""

_TABLES = {
    "model_versions": "SELECT * FROM model_versions",
    "corpus_files": "SELECT * FROM corpus_files",
    "shards": """
      SELECT model_version, epoch, seq, shard_id, generation, file, row_group, start, rows, docs, state, attempts,
             worker, scored, dead, updated_at
      FROM shard_states ORDER BY model_version, epoch, seq, generation""",
    "attempts": """
      SELECT seq, run, model_version, epoch, shard_id, generation, attempt, happened_at, kind AS event, worker,
             node, error_type, message, traceback, scored, dead, adopted
      FROM events ORDER BY seq""",
    "runs": "SELECT * FROM runs ORDER BY run",
    "lag_samples": "SELECT * FROM lag_samples ORDER BY run, sampled_at",
}
_LETTERS = "SELECT * REPLACE (doc_id::{kind} AS doc_id) FROM dead_letters ORDER BY model_version, file, row, id"


def publish(connection: duckdb.DuckDBPyConnection, layout: Layout, workers: Sequence[Mapping[str, object]]) -> None:
    """Write the live state into a new database and move the readers over by one rename."""
    temp = layout.private / f".tmp-{uuid4().hex}.duckdb"
    try:
        _write(connection, layout, temp, workers)
        files.fsync_file(temp)
        # A shell that had the old file open read-write may have left its WAL, which belongs to no new file.
        layout.manifest.with_name(layout.manifest.name + ".wal").unlink(missing_ok=True)
        temp.replace(layout.manifest)
        files.fsync_dir(layout.root)
    finally:
        temp.unlink(missing_ok=True)
        temp.with_name(temp.name + ".wal").unlink(missing_ok=True)


def _write(
    connection: duckdb.DuckDBPyConnection,
    layout: Layout,
    temp: Path,
    workers: Sequence[Mapping[str, object]],
) -> None:
    connection.execute(f"ATTACH '{quoted(temp)}' AS snap (STORAGE_VERSION '{_STORAGE}')")
    try:
        epochs = connection.execute(
            "SELECT model_version, max(epoch) FROM model_versions GROUP BY ALL ORDER BY ALL"
        ).fetchall()
        integers = connection.execute(
            "SELECT coalesce(bool_and(id_type = 'int64'), false) FROM model_versions"
        ).fetchone()
        kind = "BIGINT" if integers and integers[0] else "VARCHAR"
        connection.execute("BEGIN")
        for name, query in _TABLES.items():
            connection.execute(f"CREATE TABLE snap.{name} AS {query}")
        connection.execute(f"CREATE TABLE snap.dead_letters AS {_LETTERS.format(kind=kind)}")
        _write_workers(connection, workers)
        connection.execute("CREATE TABLE snap.meta AS SELECT ?::VARCHAR AS root", [str(layout.root)])
        connection.execute(f"CREATE VIEW snap.scores AS {scores_sql(layout, epochs)}")
        connection.execute("COMMIT")
        connection.execute("CHECKPOINT snap")
    except duckdb.Error:
        with suppress(duckdb.Error):  # not in a transaction; the first error is the one to tell
            connection.rollback()
        raise
    finally:
        connection.execute("DETACH snap")


def _write_workers(connection: duckdb.DuckDBPyConnection, workers: Sequence[Mapping[str, object]]) -> None:
    connection.execute("CREATE TABLE snap.workers (worker VARCHAR, info JSON)")
    for worker in workers:
        info = json.dumps(dict(worker), default=str)
        connection.execute("INSERT INTO snap.workers VALUES (?, ?)", [str(worker.get("worker", "")), info])


def scores_sql(layout: Layout, epochs: Sequence[tuple[str, int]]) -> str:
    """The query behind the `scores` view: the parts of each model_version's current epoch."""
    # Absolute paths: the view must work from any directory. The seed comes first, because its schema is the
    # view's: the view is valid before the first part, and a damaged part fails queries, not publishing.
    lists = [
        f"['{quoted(folder)}/_seed/seed.parquet', '{quoted(folder)}/*/*.parquet']"
        for folder, seeded in (_epoch(layout, *epoch) for epoch in epochs)
        if seeded
    ]
    if not lists:
        return "SELECT NULL::VARCHAR AS doc_id, NULL::VARCHAR AS model_version, NULL::FLOAT AS score WHERE false"
    return " UNION ALL BY NAME ".join(f"SELECT * FROM read_parquet({item})" for item in lists)


def _epoch(layout: Layout, model_version: str, epoch: int) -> tuple[str, bool]:
    """The epoch's directory as a glob for itself, and whether its seed is there."""
    folder = layout.epoch_dir(model_version, epoch)
    return glob.escape(str(folder)), (folder / "_seed" / "seed.parquet").is_file()


def quoted(value: object) -> str:
    """A value between single quotes, where SQL takes no bound one (views, ATTACH)."""
    return str(value).replace("'", "''")
