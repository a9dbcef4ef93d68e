"""The live manifest's schema, as numbered steps. A step and its record share one transaction."""

from __future__ import annotations

import duckdb

from shards.errors import ManifestRefused

# Times are UTC. `docs` counts keys: documents, or document-query pairs where a query set is used.
# No primary keys: an upsert costs 3 to 50 times an append at a million shards, so state is a view.
_FIRST = """
CREATE TABLE model_versions (
  model_version VARCHAR, epoch INTEGER, id_type VARCHAR, queries INTEGER, query_set BOOLEAN,
  binding VARCHAR, label_scores BOOLEAN, duplicates BIGINT, settings VARCHAR, planned_at TIMESTAMP
);
CREATE TABLE corpus_files (
  model_version VARCHAR, epoch INTEGER, number INTEGER, path VARCHAR, size BIGINT, mtime_ns BIGINT,
  fingerprint VARCHAR, rows BIGINT, unreadable VARCHAR
);
CREATE TABLE shards (
  model_version VARCHAR, epoch INTEGER, seq BIGINT, shard_id VARCHAR, generation INTEGER, file_number INTEGER,
  row_group INTEGER, start BIGINT, rows INTEGER, first_row BIGINT, docs BIGINT, registered_at TIMESTAMP
);
CREATE TABLE ordered (
  model_version VARCHAR, epoch INTEGER, generation INTEGER, shard_id VARCHAR, row BIGINT, query_id VARCHAR
);
CREATE TABLE events (
  seq BIGINT, run INTEGER, model_version VARCHAR, epoch INTEGER, happened_at TIMESTAMP, kind VARCHAR,
  shard_id VARCHAR, generation INTEGER, attempt INTEGER, worker VARCHAR, node VARCHAR, error_type VARCHAR,
  message VARCHAR, traceback VARCHAR, scored BIGINT, dead BIGINT, adopted BOOLEAN
);
CREATE TABLE letters (
  event BIGINT, id VARCHAR, model_version VARCHAR, epoch INTEGER, shard_id VARCHAR, generation INTEGER,
  doc_id VARCHAR, query_id VARCHAR, file VARCHAR, row BIGINT, stage VARCHAR, error_type VARCHAR, message VARCHAR,
  traceback VARCHAR, attempts INTEGER, worker VARCHAR, docs BIGINT, failed_at TIMESTAMP
);
CREATE TABLE runs (
  run INTEGER, model_version VARCHAR, pid INTEGER, host VARCHAR, command VARCHAR, config VARCHAR,
  versions VARCHAR, started_at TIMESTAMP, ended_at TIMESTAMP, state VARCHAR, exit_code INTEGER,
  message VARCHAR, summary VARCHAR
);
CREATE TABLE lag_samples (
  run INTEGER, sampled_at TIMESTAMP, pending_shards BIGINT, leased_shards BIGINT, pending_docs BIGINT,
  docs_per_s DOUBLE
);

CREATE VIEW last_events AS
SELECT model_version, epoch, shard_id, generation, max(seq) AS seq, arg_max(kind, seq) AS kind,
       arg_max(worker, seq) AS worker, arg_max(scored, seq) AS scored, arg_max(dead, seq) AS dead,
       arg_max(happened_at, seq) AS happened_at, coalesce(max(attempt) FILTER (kind = 'leased'), 0) AS attempts,
       count(*) FILTER (kind = 'failed') AS failed, count(*) FILTER (kind IN ('died', 'hung')) AS died,
       count(*) FILTER (kind = 'released') AS released,
       count(*) FILTER (kind = 'released' AND error_type = 'DriverDied') AS voided,
       min(happened_at) FILTER (kind = 'leased') AS first_leased_at,
       min(happened_at) FILTER (kind IN ('failed', 'died', 'hung')) AS first_failed_at
FROM events GROUP BY model_version, epoch, shard_id, generation;

CREATE VIEW shard_states AS
SELECT s.*, f.path AS file,
       CASE WHEN e.kind IN ('leased', 'done', 'dead') THEN e.kind ELSE 'pending' END AS state,
       coalesce(e.attempts, 0) AS attempts, coalesce(e.failed, 0) AS failed, coalesce(e.died, 0) AS died,
       coalesce(e.released, 0) AS released, coalesce(e.voided, 0) AS voided, e.first_leased_at,
       CASE WHEN e.kind IN ('leased', 'done', 'dead') THEN e.worker END AS worker,
       CASE WHEN e.kind IN ('done', 'dead') THEN e.scored ELSE 0 END AS scored,
       CASE WHEN e.kind IN ('done', 'dead') THEN e.dead ELSE 0 END AS dead,
       coalesce(e.happened_at, s.registered_at) AS updated_at, e.seq AS last_event
FROM shards s
JOIN corpus_files f ON (f.model_version, f.epoch, f.number) = (s.model_version, s.epoch, s.file_number)
LEFT JOIN last_events e
  ON (e.model_version, e.epoch, e.shard_id, e.generation)
   = (s.model_version, s.epoch, s.shard_id, s.generation);

-- A letter counts while the verdict that brought it stands (a part that was lost takes its letters along).
-- It is redriven once a later order covers it, and resolved when the latest such generation scored it.
CREATE VIEW dead_letters AS
WITH standing AS (
  SELECT l.*, coalesce(e.first_failed_at, l.failed_at) AS first_failed_at
  FROM letters l JOIN last_events e
    ON (e.model_version, e.epoch, e.shard_id, e.generation, e.seq)
     = (l.model_version, l.epoch, l.shard_id, l.generation, l.event)
), covered AS (
  SELECT l.id, l.model_version, l.epoch, l.shard_id, l.row, l.query_id, max(o.generation) AS latest
  FROM standing l JOIN ordered o
    ON (o.model_version, o.epoch, o.shard_id) = (l.model_version, l.epoch, l.shard_id)
   AND o.generation > l.generation AND (o.row IS NULL OR l.row IS NULL OR o.row = l.row)
   AND (o.query_id IS NULL OR l.query_id IS NULL OR o.query_id = l.query_id)
  GROUP BY ALL
), again AS (
  SELECT DISTINCT c.id
  FROM covered c JOIN standing l
    ON (l.model_version, l.epoch, l.shard_id, l.generation) = (c.model_version, c.epoch, c.shard_id, c.latest)
   AND (c.row IS NULL OR l.row IS NULL OR c.row = l.row)
   AND (c.query_id IS NULL OR l.query_id IS NULL OR c.query_id = l.query_id)
), judged AS (
  SELECT c.id, e.kind IN ('done', 'dead') AND c.id NOT IN (SELECT id FROM again) AS resolved
  FROM covered c LEFT JOIN last_events e
    ON (e.model_version, e.epoch, e.shard_id, e.generation) = (c.model_version, c.epoch, c.shard_id, c.latest)
)
SELECT l.id, l.model_version, l.epoch, l.shard_id, l.generation, l.doc_id, l.query_id, l.file, l.row, l.stage,
       l.error_type, l.message, l.traceback, l.attempts, l.worker, l.first_failed_at,
       l.failed_at AS last_failed_at, l.docs,
       CASE WHEN j.id IS NULL THEN 'dead' WHEN j.resolved THEN 'resolved' ELSE 'redriven' END AS state
FROM standing l LEFT JOIN judged j ON j.id = l.id;
"""

# The circuit breaker takes back what it charged to shards that were not to blame: `CHARGE_RETURNED`.
_RETURNED = """
CREATE OR REPLACE VIEW last_events AS
SELECT model_version, epoch, shard_id, generation, max(seq) AS seq, arg_max(kind, seq) AS kind,
       arg_max(worker, seq) AS worker, arg_max(scored, seq) AS scored, arg_max(dead, seq) AS dead,
       arg_max(happened_at, seq) AS happened_at, coalesce(max(attempt) FILTER (kind = 'leased'), 0) AS attempts,
       count(*) FILTER (kind = 'failed')
         - count(*) FILTER (kind = 'released' AND error_type = 'FailureReturned') AS failed,
       count(*) FILTER (kind IN ('died', 'hung'))
         - count(*) FILTER (kind = 'released' AND error_type = 'DeathReturned') AS died,
       count(*) FILTER (kind = 'released' AND error_type NOT IN ('FailureReturned', 'DeathReturned')) AS released,
       count(*) FILTER (kind = 'released' AND error_type = 'DriverDied') AS voided,
       min(happened_at) FILTER (kind = 'leased') AS first_leased_at,
       min(happened_at) FILTER (kind IN ('failed', 'died', 'hung')) AS first_failed_at
FROM events GROUP BY model_version, epoch, shard_id, generation;
"""

STEPS: tuple[str, ...] = (_FIRST, _RETURNED)
"""Step i leads from schema version i to i + 1. Steps are never edited once released; new ones are added."""


def migrate(connection: duckdb.DuckDBPyConnection) -> None:
    """Bring the schema up to date. Raises ManifestRefused if it is newer than this program."""
    connection.execute("CREATE TABLE IF NOT EXISTS schema_version (version INTEGER, applied_at TIMESTAMP)")
    row = connection.execute("SELECT coalesce(max(version), 0) FROM schema_version").fetchone()
    version = int(row[0]) if row else 0
    if version > len(STEPS):
        raise ManifestRefused(
            f"the manifest has schema version {version}, this program knows {len(STEPS)}: use a newer rescore"
        )
    for number, step in enumerate(STEPS[version:], version + 1):
        connection.execute("BEGIN")
        connection.execute(step)
        connection.execute("INSERT INTO schema_version VALUES (?, now()::TIMESTAMP)", [number])
        connection.execute("COMMIT")
