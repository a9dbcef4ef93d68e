"""Events, shards and letters as Arrow tables: the one way rows enter the manifest in bulk."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import pyarrow as pa

from shards.orders import Order
from shards.types import Event, Failure, Footer, Plan, Shard

_TIME = pa.timestamp("us")
_TEXT = pa.string()


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """An event with its place in the log."""

    seq: int
    at: datetime
    event: Event


def events(entries: Sequence[Entry], *, run: int | None, model_version: str, epoch: int) -> pa.Table:
    count = len(entries)
    log = [entry.event for entry in entries]
    footers = [event.footer for event in log]
    return _table(
        {
            "seq": (pa.int64(), [entry.seq for entry in entries]),
            "run": (pa.int32(), [run] * count),
            "model_version": (_TEXT, [model_version] * count),
            "epoch": (pa.int32(), [epoch] * count),
            "happened_at": (_TIME, [entry.at for entry in entries]),
            "kind": (_TEXT, [str(event.kind) for event in log]),
            "shard_id": (_TEXT, [event.shard_id for event in log]),
            "generation": (pa.int32(), [event.generation for event in log]),
            "attempt": (pa.int32(), [event.attempt for event in log]),
            "worker": (_TEXT, [event.worker for event in log]),
            "node": (_TEXT, [event.node for event in log]),
            "error_type": (_TEXT, [clean(event.error_type) for event in log]),
            "message": (_TEXT, [clean(event.message) for event in log]),
            "traceback": (_TEXT, [clean(event.traceback) for event in log]),
            "scored": (pa.int64(), [footer.scored if footer else None for footer in footers]),
            "dead": (pa.int64(), [footer.dead if footer else None for footer in footers]),
            "adopted": (pa.bool_(), [event.adopted for event in log]),
        }
    )


def letters(entries: Sequence[Entry], *, queries: int) -> pa.Table | None:
    """The dead letters that the entries' footers bring; None if there are none, as nearly always."""
    found = [
        (entry, entry.event.footer, failure)
        for entry in entries
        if entry.event.footer is not None
        for failure in entry.event.footer.failures
    ]
    if not found:
        return None
    footers = [footer for _, footer, _ in found]
    failures = [failure for _, _, failure in found]
    return _table(
        {
            "event": (pa.int64(), [entry.seq for entry, _, _ in found]),
            "id": (_TEXT, [letter_id(footer, failure) for _, footer, failure in found]),
            "model_version": (_TEXT, [footer.model_version for footer in footers]),
            "epoch": (pa.int32(), [footer.epoch for footer in footers]),
            "shard_id": (_TEXT, [footer.shard_id for footer in footers]),
            "generation": (pa.int32(), [footer.generation for footer in footers]),
            "doc_id": (_TEXT, [_doc_id(failure) for failure in failures]),
            "query_id": (_TEXT, [failure.query_id for failure in failures]),
            "file": (_TEXT, [footer.file for footer in footers]),
            "row": (pa.int64(), [failure.row for failure in failures]),
            "stage": (_TEXT, [str(failure.stage) for failure in failures]),
            "error_type": (_TEXT, [clean(failure.error_type) for failure in failures]),
            "message": (_TEXT, [clean(failure.message) for failure in failures]),
            "traceback": (_TEXT, [clean(failure.traceback) for failure in failures]),
            "attempts": (pa.int32(), [footer.attempts for footer in footers]),
            "worker": (_TEXT, [footer.worker for footer in footers]),
            "docs": (pa.int64(), [weight(footer, failure, queries) for _, footer, failure in found]),
            "failed_at": (_TIME, [entry.at for entry, _, _ in found]),
        }
    )


def shards(planned: Sequence[Shard], plan: Plan, *, first: int, at: datetime) -> pa.Table:
    count = len(planned)
    numbers = {file.path: number for number, file in enumerate(plan.files)}
    return _table(
        {
            "model_version": (_TEXT, [plan.model_version] * count),
            "epoch": (pa.int32(), [plan.epoch] * count),
            "seq": (pa.int64(), list(range(first, first + count))),
            "shard_id": (_TEXT, [shard.shard_id for shard in planned]),
            "generation": (pa.int32(), [shard.generation for shard in planned]),
            "file_number": (pa.int32(), [numbers[shard.file] for shard in planned]),
            "row_group": (pa.int32(), [shard.row_group for shard in planned]),
            "start": (pa.int64(), [shard.start for shard in planned]),
            "rows": (pa.int32(), [shard.rows for shard in planned]),
            "first_row": (pa.int64(), [shard.first_row for shard in planned]),
            "docs": (pa.int64(), [shard.keys(plan.queries) for shard in planned]),
            "registered_at": (_TIME, [at] * count),
        }
    )


def corpus_files(plan: Plan) -> pa.Table:
    count = len(plan.files)
    return _table(
        {
            "model_version": (_TEXT, [plan.model_version] * count),
            "epoch": (pa.int32(), [plan.epoch] * count),
            "number": (pa.int32(), list(range(count))),
            "path": (_TEXT, [file.path for file in plan.files]),
            "size": (pa.int64(), [file.size for file in plan.files]),
            "mtime_ns": (pa.int64(), [file.mtime_ns for file in plan.files]),
            "fingerprint": (_TEXT, [file.fingerprint for file in plan.files]),
            "rows": (pa.int64(), [file.rows for file in plan.files]),
            "unreadable": (_TEXT, [file.unreadable for file in plan.files]),
        }
    )


def ordered(orders: Sequence[Order]) -> pa.Table:
    lines = [line for order in orders for line in _order_lines(order)]
    names = ("model_version", "epoch", "generation", "shard_id", "row", "query_id")
    kinds = (_TEXT, pa.int32(), pa.int32(), _TEXT, pa.int64(), _TEXT)
    columns = [[line[number] for line in lines] for number in range(len(names))]
    return _table({name: (kind, values) for name, kind, values in zip(names, kinds, columns, strict=True)})


def letter_id(footer: Footer, failure: Failure) -> str:
    """Short, and the same whenever the part is read again: a rebuilt manifest keeps the ids."""
    key = [footer.model_version, footer.epoch, footer.shard_id, footer.generation, failure.row, failure.query_id]
    return hashlib.blake2b(json.dumps(key).encode(), digest_size=8).hexdigest()


def weight(footer: Footer, failure: Failure, queries: int) -> int:
    """How many keys a failure stands for."""
    if footer.whole:
        return footer.expected
    return queries if failure.query_id is None else 1


def clean(text: str) -> str:
    """Text that can be stored: a lone surrogate in somebody's error message must not fail a commit."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode(errors="backslashreplace").decode()
    return text


def _order_lines(order: Order) -> list[tuple[Any, ...]]:
    lines: list[tuple[Any, ...]] = []
    for name, rows in order.shards.items():
        head = (order.model_version, order.epoch, order.generation, name)
        asked = order.queries.get(name, {})
        for row in [None] if rows is None else rows:
            some: Sequence[str | None] | None = None if row is None else asked.get(row)
            lines.extend((*head, row, query_id) for query_id in (some or [None]))
    return lines


def _doc_id(failure: Failure) -> str | None:
    return None if failure.doc_id is None else clean(str(failure.doc_id))


def _table(columns: dict[str, tuple[Any, list[Any]]]) -> pa.Table:
    arrays: list[Any] = [pa.array(values, type=kind) for kind, values in columns.values()]
    return pa.Table.from_arrays(arrays, names=list(columns))
