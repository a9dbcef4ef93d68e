"""Put dead letters back to be tried, with a fresh budget; their history stays."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import duckdb
import pyarrow as pa

from shards.errors import UsageError
from shards.orders import Order, read_orders, shards_of, write_order
from shards.plan import only_plan
from shards.types import Event, EventKind, Plan

if TYPE_CHECKING:
    from shards.manifest import Manifest


@dataclass(frozen=True, slots=True, kw_only=True)
class Redriven:
    """What was ordered (or, in a dry run, would be: then `generation` is 0)."""

    generation: int
    letters: int
    docs: int
    shards: int


def redrive(
    manifest: Manifest,
    model_version: str | None,
    epoch: int | None = None,
    *,
    where: str | None,
    dry_run: bool,
) -> Redriven:
    """Write an order for the dead letters that are dead and fit `where`, then the events.

    Without a model_version: the only one there is; without an epoch: the current one. Works on a manifest
    that was rebuilt a moment ago. Raises UsageError for a condition that DuckDB refuses, or a
    model_version that is not there.
    """
    plan = only_plan(manifest.layout, model_version)
    model_version, epoch = plan.model_version, plan.epoch if epoch is None else epoch
    orders = read_orders(manifest.layout, model_version)
    manifest.register(plan, orders)
    manifest.reconcile(plan, orders)  # what a dead driver published and did not record can be redriven too
    chosen = select(manifest.letters(model_version, epoch), where, plan)
    docs = sum(letter["docs"] for letter in chosen)
    shards = {letter["shard_id"] for letter in chosen}
    if dry_run or not chosen:
        return Redriven(generation=0, letters=len(chosen), docs=docs, shards=len(shards))
    rows, queries = _asked(chosen, plan, orders)
    generation = write_order(manifest.layout, model_version, epoch, rows, queries)
    manifest.register(plan, read_orders(manifest.layout, model_version))
    manifest.append(
        [
            Event(kind=EventKind.REDRIVEN, shard_id=name, generation=generation, attempt=0)
            for name in sorted(shards)
        ],
        model_version=model_version,
    )
    manifest.publish()
    return Redriven(generation=generation, letters=len(chosen), docs=docs, shards=len(shards))


def select(letters: pa.Table, where: str | None, plan: Plan) -> list[dict[str, Any]]:
    """The letters that fit the user's condition, tried on a copy that holds nothing else.

    Raises UsageError in DuckDB's words.
    """
    kind = "BIGINT" if plan.id_type == "int64" else "VARCHAR"
    with duckdb.connect(":memory:") as connection:
        connection.register("letters", letters)
        connection.execute(f"CREATE TABLE dead_letters AS SELECT * REPLACE (doc_id::{kind} AS doc_id) FROM letters")
        connection.unregister("letters")
        connection.execute("SET enable_external_access = false")
        connection.execute("SET lock_configuration = true")
        # On a line of its own, so that a comment in the condition cannot swallow the closing bracket.
        sql = f"SELECT id FROM dead_letters WHERE (\n{where or 'true'}\n)"
        try:
            statements = connection.extract_statements(sql)
            if len(statements) != 1:
                raise UsageError("--where: one SQL condition is needed")
            chosen = {row[0] for row in connection.execute(statements[0]).fetchall()}
        except duckdb.Error as error:
            raise UsageError(f"--where: {' '.join(str(error).split())}") from error
    return [letter for letter in letters.to_pylist() if letter["id"] in chosen]


def _asked(
    letters: list[dict[str, Any]], plan: Plan, orders: list[Order]
) -> tuple[dict[str, list[int] | None], dict[str, dict[int, list[str]]]]:
    """Rows (and, where only some queries of a document failed, query ids) by shard."""
    later = {shard.key: shard for shard in shards_of(plan, orders)}
    rows: dict[str, list[int] | None] = {}
    queries: dict[str, dict[int, list[str]]] = {}
    whole: dict[str, set[int]] = {}
    for letter in letters:
        name = letter["shard_id"]
        shard = later.get((name, letter["generation"]))
        if letter["row"] is None and (shard is None or shard.only is None):
            rows[name] = None
            continue
        known = rows.setdefault(name, [])
        assert known is not None, "a shard that is dead as a whole has no other letter that is dead"
        if letter["row"] is None:
            assert shard is not None
            assert shard.only is not None
            asked = [shard.first_row + offset for offset in shard.only]
            some = dict(zip(asked, shard.only_queries, strict=False))
        else:
            asked = [letter["row"]]
            some = {letter["row"]: None if letter["query_id"] is None else (letter["query_id"],)}
        for row in asked:
            known.append(row)
            ids = some.get(row)
            if ids is None:
                whole.setdefault(name, set()).add(row)
            else:
                queries.setdefault(name, {}).setdefault(row, []).extend(ids)
    for name, found in rows.items():
        if found is not None:
            rows[name] = sorted(set(found))
            for row in whole.get(name, ()):
                queries.get(name, {}).pop(row, None)
    return rows, {name: asked for name, asked in queries.items() if asked}
