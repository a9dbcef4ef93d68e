"""Prove the invariant from plan, orders and parts alone."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa
import pyarrow.compute as pc

from shards import footers, parts
from shards.errors import OutputError, PartDamaged
from shards.layout import Layout
from shards.orders import Order, read_orders, shards_of
from shards.plan import only_plan
from shards.reconcile import windowed
from shards.records import weight
from shards.snapshot import open_private
from shards.types import Failure, Footer, Plan, Shard, ShardKey

_MEMORY = "2GB"
_COMPLETE = (0, 3)
_NAMED = 5
_FINISHED = """
SELECT shard_id, generation FROM shards WHERE model_version = ? AND epoch = ? AND state IN ('done', 'dead')
"""
_LAST = "SELECT exit_code FROM runs WHERE model_version = ? ORDER BY run DESC LIMIT 1"


@dataclass(frozen=True, slots=True, kw_only=True)
class Verification:
    """What stands in the output. All `*_docs` count keys (document-query pairs where a query set is used)."""

    model_version: str
    ok: bool
    """No duplicate, no damaged or unexpected part, no acknowledged part missing; after exit 0 or 3, no document."""
    expected_docs: int
    scored_docs: int
    dead_docs: int
    missing_docs: int
    duplicate_keys: int
    duplicates: tuple[str, ...]
    """Some of the duplicate keys, for a message."""
    parts: int
    damaged_parts: int
    damaged: tuple[str, ...]
    damaged_keys: tuple[ShardKey, ...]
    missing_parts: tuple[ShardKey, ...]
    """Acknowledged, and not there."""
    unexpected_parts: tuple[str, ...]
    """Parts of no shard of the plan."""
    complete: bool
    """Whether the last run claims (exit 0 or 3) that nothing is missing."""

    def as_json(self) -> dict[str, Any]:
        """What `verify --json` prints."""
        return asdict(self)

    def lines(self) -> list[str]:
        """The same for people."""
        verdict = "ok" if self.ok else "NOT OK"
        lines = [
            f"{verdict}: {self.expected_docs:,} expected, {self.scored_docs:,} scored, {self.dead_docs:,} dead,"
            f" {self.missing_docs:,} missing, in {self.parts:,} parts of {self.model_version}"
        ]
        if self.duplicate_keys:
            lines.append(f"{self.duplicate_keys:,} duplicate keys: {', '.join(self.duplicates)} …")
        lines.extend(f"damaged: {line}" for line in self.damaged)
        lines.extend(
            f"acknowledged, and not there: {name}.g{generation}" for name, generation in self.missing_parts
        )
        lines.extend(f"of no planned shard: {path}" for path in self.unexpected_parts)
        return lines


@dataclass(frozen=True, slots=True)
class _Work:
    """A part on disk and the shard that it must answer (None: no shard has this key)."""

    path: Path
    shard: Shard | None


@dataclass(slots=True)
class _Tally:
    """What reading all parts brought."""

    scored: int = 0
    dead: int = 0
    good: int = 0
    damaged: dict[ShardKey, str] = field(default_factory=dict)


def verify(layout: Layout, model_version: str | None) -> Verification:
    """Read and check every part of a model_version (None: the only one there is).

    Raises UsageError if it is not there, PlanError if plan or orders are damaged.
    """
    plan = only_plan(layout, model_version)
    # In this order, so that a run at work cannot make us see an acknowledgement, but not yet its part,
    # or a part, but not yet the order that asked for it.
    acknowledged, complete = _acknowledged(layout, plan)
    found = parts.scan(layout, plan.model_version, plan.epoch)
    orders = [order for order in read_orders(layout, plan.model_version) if order.epoch == plan.epoch]
    shards = {shard.key: shard for shard in (*plan.shards, *shards_of(plan, orders))}
    work = [_Work(path, shards[key]) for key, path in found.items() if key in shards]
    tally, duplicates, named = _read_all(plan, orders, work)
    missing_parts = tuple(sorted(key for key in acknowledged if key in shards and key not in found))
    unexpected = tuple(sorted(str(path) for key, path in found.items() if key not in shards))
    expected = sum(shard.keys(plan.queries) for shard in plan.shards)
    missing = expected - tally.scored - tally.dead
    wrong = duplicates or tally.damaged or missing_parts or unexpected or missing < 0
    return Verification(
        model_version=plan.model_version,
        ok=not wrong and not (complete and missing),
        expected_docs=expected,
        scored_docs=tally.scored,
        dead_docs=tally.dead,
        missing_docs=max(0, missing),
        duplicate_keys=duplicates,
        duplicates=named,
        parts=tally.good,
        damaged_parts=len(tally.damaged),
        damaged=tuple(sorted(tally.damaged.values())),
        damaged_keys=tuple(sorted(tally.damaged)),
        missing_parts=missing_parts,
        unexpected_parts=unexpected,
        complete=complete,
    )


def _acknowledged(layout: Layout, plan: Plan) -> tuple[list[ShardKey], bool]:
    """What the snapshot says was acknowledged, and whether the last run claims to be complete."""
    try:
        with open_private(layout) as connection:
            keys = connection.execute(_FINISHED, [plan.model_version, plan.epoch]).fetchall()
            last = connection.execute(_LAST, [plan.model_version]).fetchone()
    except (OutputError, duckdb.Error):
        return [], False  # an index that is lost or damaged proves nothing; the files still do
    return [(name, generation) for name, generation in keys], last is not None and last[0] in _COMPLETE


def _read_all(plan: Plan, orders: Sequence[Order], work: Sequence[_Work]) -> tuple[_Tally, int, tuple[str, ...]]:
    tally = _Tally()
    redriven = _Redriven(orders)
    # Not in the output, which may be read-only for whoever verifies it.
    with tempfile.TemporaryDirectory(prefix="rescore-verify-") as folder:
        config: dict[str, Any] = {"memory_limit": _MEMORY, "temp_directory": folder}
        with duckdb.connect(":memory:", config=config) as connection:
            # Hashes first: 8 bytes a key. Only if two agree are the keys themselves read and compared.
            _stream(connection, plan, _keys(plan, redriven, work, tally), _SUSPECTS)
            if connection.execute("SELECT count(*) FROM suspects").fetchall() == [(0,)]:
                return tally, 0, ()
            _stream(connection, plan, _keys(plan, redriven, work, _Tally()), _DUPLICATES)
            row = connection.execute("SELECT coalesce(sum(n), 0), count(*) FROM doubles").fetchone()
            named = connection.execute("SELECT id, query_id FROM doubles ORDER BY ALL LIMIT ?", [_NAMED]).fetchall()
    return tally, int(row[1]) if row else 0, tuple(_key_text(*key) for key in named)


_SUSPECTS = "CREATE TABLE suspects AS SELECT hash(id, query_id) AS h FROM keys GROUP BY h HAVING count(*) > 1"
_DUPLICATES = """
CREATE TABLE doubles AS SELECT id, query_id, count(*) AS n FROM keys
WHERE hash(id, query_id) IN (SELECT h FROM suspects) GROUP BY id, query_id HAVING count(*) > 1
"""


def _stream(connection: duckdb.DuckDBPyConnection, plan: Plan, batches: Iterator[pa.RecordBatch], sql: str) -> None:
    reader = pa.RecordBatchReader.from_batches(_schema(plan), batches)
    connection.register("keys", reader)
    try:
        connection.execute(sql)
    finally:
        connection.unregister("keys")


def _schema(plan: Plan) -> pa.Schema:
    kind: Any = pa.int64() if plan.id_type == "int64" else pa.large_binary()
    return pa.schema([("id", kind), ("query_id", pa.string())])


def _keys(plan: Plan, redriven: _Redriven, work: Sequence[_Work], tally: _Tally) -> Iterator[pa.RecordBatch]:
    """Every key of every good part; on the way the tally is filled."""
    for item, read in zip(work, windowed(lambda item: _check(item, plan), work), strict=True):
        assert item.shard is not None
        if isinstance(read, PartDamaged):
            tally.damaged[item.shard.key] = str(item.path)
            continue
        footer, table = read
        dead = [failure for failure in footer.failures if not redriven.covers(footer, failure)]
        tally.good += 1
        tally.scored += footer.scored
        tally.dead += sum(weight(footer, failure, plan.queries) for failure in dead)
        schema = _schema(plan)
        queries: Any = table.column("query_id") if plan.query_set else pa.nulls(table.num_rows, pa.string())
        ids: Any = pc.cast(table.column("doc_id"), schema.field("id").type)
        yield from pa.table({"id": ids, "query_id": queries}, schema=schema).to_batches()
        known = [failure for failure in dead if failure.doc_id is not None]
        values: list[Any] = [
            failure.doc_id if isinstance(failure.doc_id, int) else str(failure.doc_id).encode() for failure in known
        ]
        yield pa.RecordBatch.from_pydict(
            {"id": values, "query_id": [failure.query_id for failure in known]}, schema=schema
        )


def _check(item: _Work, plan: Plan) -> tuple[Footer, pa.Table] | PartDamaged:
    assert item.shard is not None
    keys = item.shard.keys(plan.queries)
    try:
        footer, table = parts.read_part(item.path)
    except PartDamaged as error:
        return error
    right = footers.answers(
        footer,
        item.shard,
        model_version=plan.model_version,
        epoch=plan.epoch,
        binding=plan.binding.digest,
        keys=keys,
    )
    counted = sum(weight(footer, failure, plan.queries) for failure in footer.failures)
    if not right or counted != footer.dead:
        return PartDamaged(f"{item.path}: its footer does not answer its shard")
    if table.schema.names != _columns(plan):
        return PartDamaged(f"{item.path}: its columns are not those of this output")
    if plan.query_set and _rest_is_scored(footer, table):
        return PartDamaged(f"{item.path}: a document is both dead and scored")
    return footer, table


def _rest_is_scored(footer: Footer, table: pa.Table) -> bool:
    # A failure without query_id stands for all of its document's queries: none of them may have a row.
    dead = {failure.doc_id for failure in footer.failures if failure.query_id is None} - {None}
    return bool(dead) and not dead.isdisjoint(table.column("doc_id").to_pylist())


def _columns(plan: Plan) -> list[str]:
    schema = parts.part_schema(plan.id_type, query_set=plan.query_set, label_scores=plan.binding.label_scores)
    return list(schema.names)


class _Redriven:
    """Which dead letters a later order covers: they are pending, or a later part speaks for them."""

    def __init__(self, orders: Sequence[Order]) -> None:
        self._by_shard: dict[str, list[Order]] = {}
        for order in orders:
            for name in order.shards:
                self._by_shard.setdefault(name, []).append(order)

    def covers(self, footer: Footer, failure: Failure) -> bool:
        name, row, query_id = footer.shard_id, failure.row, failure.query_id
        for order in self._by_shard.get(name, ()):
            if order.generation <= footer.generation:
                continue
            rows = order.shards[name]
            if rows is None or row is None:
                return True
            asked = order.queries.get(name, {}).get(row)
            if row in rows and (asked is None or query_id is None or query_id in asked):
                return True
        return False


def _key_text(doc_id: Any, query_id: str | None) -> str:
    shown = doc_id.decode(errors="backslashreplace") if isinstance(doc_id, bytes) else str(doc_id)
    return shown if query_id is None else f"{shown} × {query_id}"
