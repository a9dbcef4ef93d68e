"""Where a run stands, from the snapshot and the lock: it answers while the run works."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import duckdb

from shards.errors import UsageError
from shards.layout import Layout
from shards.lock import holder
from shards.publish import COUNTS_PUBLISHED
from shards.snapshot import open_private


def utc_now() -> datetime:
    """The clock that commands hand in."""
    return datetime.now(UTC)


def status(
    layout: Layout, model_version: str | None = None, *, now: Callable[[], datetime] = utc_now
) -> dict[str, Any]:
    """What `status --json` prints, and `run`: the last run's number, pid, host, start, end, message.

    `docs` count keys (document-query pairs where a query set is used); `docs_per_s`, `eta_s` and
    `oldest_pending_s` (seconds) are None where they say nothing. Without a model_version: that of the
    last run. Raises UsageError for a model_version that is not there.
    """
    held = holder(layout) is not None
    time = now().astimezone(UTC).replace(tzinfo=None)
    with open_private(layout) as connection:
        name = choose(connection, model_version)
        run = _last_run(connection, name)
        counts = _row(connection, COUNTS_PUBLISHED, [name, name, name])
        state = _state(run, held)
        running = state == "running"
        speed = _speed(connection, run) if running else None
        left = counts["docs_total"] - counts["docs_scored"] - counts["docs_dead"]
        return {
            "model_version": name,
            "state": state,
            "shards": {key: counts[key] for key in ("pending", "leased", "done", "dead")},
            "docs": {key: counts[f"docs_{key}"] for key in ("total", "scored", "dead")},
            "docs_per_s": speed,
            "eta_s": left / speed if speed else None,
            "oldest_pending_s": _oldest(connection, name, time),
            "workers": _workers(connection) if running else [],
            "run": run,
        }


def choose(connection: duckdb.DuckDBPyConnection, model_version: str | None) -> str:
    """The model_version that is meant; None: that of the last run. Raises UsageError."""
    known = [
        str(row[0])
        for row in connection.execute(
            "SELECT m.model_version FROM (SELECT DISTINCT model_version FROM model_versions) m"
            " LEFT JOIN (SELECT model_version, max(run) AS run FROM runs GROUP BY ALL) r USING (model_version)"
            " ORDER BY r.run DESC NULLS LAST, m.model_version"
        ).fetchall()
    ]
    if not known:
        raise UsageError("no model_version is planned here yet")
    if model_version is None:
        return known[0]
    if model_version not in known:
        raise UsageError(f"no model_version {model_version!r} here; there is: {', '.join(sorted(known))}")
    return model_version


def _state(run: dict[str, Any] | None, held: bool) -> str:
    if run is None:
        return "running" if held else "interrupted"
    if run["state"] != "running":
        return str(run["state"])
    # A driver that was killed wrote no last word, but the kernel took its lock away.
    return "running" if held else "interrupted"


def _last_run(connection: duckdb.DuckDBPyConnection, name: str) -> dict[str, Any] | None:
    found = _rows(
        connection,
        "SELECT run, state, exit_code, message, pid, host, started_at, ended_at, summary FROM runs"
        " WHERE model_version = ? ORDER BY run DESC LIMIT 1",
        [name],
    )
    if not found:
        return None
    run = found[0]
    run["summary"] = json.loads(run["summary"]) if run["summary"] else None
    for key in ("started_at", "ended_at"):
        run[key] = f"{run[key].isoformat(timespec='seconds')}Z" if run[key] is not None else None
    return run


def _speed(connection: duckdb.DuckDBPyConnection, run: dict[str, Any] | None) -> float | None:
    sql = "SELECT docs_per_s FROM lag_samples WHERE run = ? ORDER BY sampled_at DESC LIMIT 1"
    found = _rows(connection, sql, [run["run"] if run else None])
    return float(found[0]["docs_per_s"]) if found and found[0]["docs_per_s"] is not None else None


def _oldest(connection: duckdb.DuckDBPyConnection, name: str, now: datetime) -> float | None:
    sql = "SELECT min(updated_at) AS since FROM shards WHERE model_version = ? AND state = 'pending'"
    since = _row(connection, sql, [name])["since"]
    return None if since is None else max(0.0, (now - since).total_seconds())


def _workers(connection: duckdb.DuckDBPyConnection) -> list[Any]:
    return [json.loads(row["info"]) for row in _rows(connection, "SELECT info FROM workers ORDER BY worker", [])]


def _row(connection: duckdb.DuckDBPyConnection, sql: str, values: list[Any]) -> dict[str, Any]:
    return _rows(connection, sql, values)[0]


def _rows(connection: duckdb.DuckDBPyConnection, sql: str, values: list[Any]) -> list[dict[str, Any]]:
    answer = connection.execute(sql, values)
    names = [column[0] for column in answer.description or []]
    return [dict(zip(names, row, strict=True)) for row in answer.fetchall()]
