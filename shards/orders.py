"""Redrive orders: create-only files that ask for rows to be tried again, each a generation of its own."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from shards import files
from shards.errors import PlanError
from shards.layout import Layout
from shards.types import Plan, Shard

FORMAT = 1
_NAME = re.compile(r"g([0-9]+)\.json")
Rows = Mapping[str, Sequence[int] | None]
"""shard_id → rows in the file; None: every document of the shard."""
Queries = Mapping[str, Mapping[int, Sequence[str]]]
"""shard_id → row → query ids, for documents of which only some queries failed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """One redrive. `generation` counts from 1 within a model_version."""

    generation: int
    model_version: str
    epoch: int
    shards: Rows
    queries: Queries = field(default_factory=dict)


def write_order(
    layout: Layout, model_version: str, epoch: int, shards: Rows, queries: Queries | None = None
) -> int:
    """Publish an order durably under the next generation and return that. OSErrors propagate."""
    folder = layout.orders_dir(model_version)
    files.make_dir(folder)
    generation = max(_paths(folder), default=0) + 1
    value = {
        "format": FORMAT,
        "generation": generation,
        "model_version": model_version,
        "epoch": epoch,
        "shards": {name: None if rows is None else list(rows) for name, rows in shards.items()},
        "queries": {
            name: {str(row): list(ids) for row, ids in rows.items()} for name, rows in (queries or {}).items()
        },
    }
    data = json.dumps({**value, "hash": _digest(value)}).encode()
    published = files.publish_new(folder / f"g{generation}.json", data)
    assert published, "the lock's holder alone writes orders"
    return generation


def read_orders(layout: Layout, model_version: str) -> list[Order]:
    """All orders, oldest first. Raises PlanError if one is damaged."""
    folder = layout.orders_dir(model_version)
    return [_read(path) for _, path in sorted(_paths(folder).items())] if folder.is_dir() else []


def shards_of(plan: Plan, orders: Sequence[Order]) -> list[Shard]:
    """The shards that the orders of the plan's epoch ask for. Raises PlanError for a shard that is not planned."""
    planned = {shard.shard_id: shard for shard in plan.shards} if orders else {}
    found = []
    for order in orders:
        if order.epoch != plan.epoch:
            continue
        for name in order.shards:
            if name not in planned:
                raise PlanError(f"redrive {order.generation} asks for shard {name}, which is not in the plan")
            found.append(_ordered(planned[name], order))
    return found


def _ordered(shard: Shard, order: Order) -> Shard:
    rows = order.shards[shard.shard_id]
    if rows is None:
        return replace(shard, generation=order.generation)
    asked = order.queries.get(shard.shard_id, {})
    only_queries = tuple(tuple(asked[row]) if row in asked else None for row in rows) if asked else ()
    only = tuple(row - shard.first_row for row in rows)
    return replace(shard, generation=order.generation, only=only, only_queries=only_queries)


def _paths(folder: Path) -> dict[int, Path]:
    found = {}
    for item in folder.iterdir():
        match = _NAME.fullmatch(item.name)
        if match:
            found[int(match[1])] = item
    return found


def _read(path: Path) -> Order:
    try:
        value = json.loads(path.read_bytes())
        digest = value.pop("hash")
    except (ValueError, KeyError, AttributeError) as error:
        raise PlanError(f"damaged redrive order {path}: {error}") from error
    if digest != _digest(value):
        raise PlanError(f"damaged redrive order {path}: its content does not match its hash")
    if value.pop("format") != FORMAT:
        raise PlanError(f"redrive order {path} is of a later format than this program reads")
    queries = {
        name: {int(row): tuple(ids) for row, ids in rows.items()} for name, rows in value.pop("queries").items()
    }
    return Order(**value, queries=queries)


def _digest(value: dict[str, Any]) -> str:
    return hashlib.blake2b(json.dumps(value, sort_keys=True).encode(), digest_size=32).hexdigest()
