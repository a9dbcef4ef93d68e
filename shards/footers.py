"""A part's footer as JSON, and back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any

from shards.errors import PartDamaged
from shards.types import Failure, Footer, Shard, Stage

FORMAT = 1
_MESSAGE = 2 * 1024
_TRACEBACK = 8 * 1024


def to_json(footer: Footer) -> dict[str, Any]:
    return {"format": FORMAT, **asdict(footer)}


def from_json(value: Mapping[str, Any], name: str) -> Footer:
    """Raises PartDamaged for another format or for keys that are not ours."""
    if value.get("format") != FORMAT:
        raise PartDamaged(f"{name}: format {value.get('format')!r}, this program reads {FORMAT}")
    fields = {key: item for key, item in value.items() if key != "format"}
    try:
        failures = tuple(Failure(**{**item, "stage": Stage(item["stage"])}) for item in fields["failures"])
        return Footer(**{**fields, "failures": failures})
    except (KeyError, TypeError, ValueError) as error:
        raise PartDamaged(f"{name}: footer: {error}") from error


def cut(footer: Footer) -> Footer:
    """The footer with messages of at most 2 KiB (their beginning) and tracebacks of 8 KiB (their end)."""
    failures = tuple(
        replace(item, message=item.message[:_MESSAGE], traceback=item.traceback[-_TRACEBACK:])
        for item in footer.failures
    )
    return replace(footer, failures=failures)


def same_work(one: Footer, other: Footer) -> bool:
    """Whether both speak of the same rows, generation and ranker: then either may stand for both."""
    return _work(one) == _work(other)


def answers(footer: Footer, shard: Shard, *, model_version: str, epoch: int, binding: str, keys: int) -> bool:
    """Whether a part is a verdict on this shard of this plan. The path is not compared: files may move."""
    asked = (model_version, epoch, shard.shard_id, shard.generation, shard.fingerprint, binding)
    rows = (shard.row_group, shard.start, shard.rows, shard.first_row, keys)
    return _work(footer) == (*asked, *rows)


def _work(footer: Footer) -> tuple[object, ...]:
    names = (footer.model_version, footer.epoch, footer.shard_id, footer.generation, footer.file_fingerprint)
    rows = (footer.row_group, footer.start, footer.rows, footer.first_row, footer.expected)
    return (*names, footer.binding, *rows)
