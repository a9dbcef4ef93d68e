"""What every start does first: the parts are the truth, the events are made to agree."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from shards import files, footers, parts
from shards.errors import PartDamaged
from shards.types import Event, EventKind, Footer, Plan, Shard, ShardKey

if TYPE_CHECKING:
    from shards.manifest import Manifest

_THREADS = 8
_COMMIT = 5000
_FINISHED = (EventKind.DONE, EventKind.DEAD)
T = TypeVar("T")
R = TypeVar("R")


@dataclass(frozen=True, slots=True, kw_only=True)
class Resume:
    """What a start found, in shards."""

    adopted: int
    """Parts without an acknowledgement: their writer or the driver died in between."""
    released: int
    """Leases that a dead driver left; charged to nobody."""
    lost: int
    """Acknowledged shards whose part is gone: they are scored again."""
    damaged: tuple[str, ...]
    """Parts that are not what their writer wrote; they will be replaced."""
    stray: tuple[str, ...]
    """Parts of no shard of this plan, moved aside so that no reader counts them."""
    done: int
    """Shards with a verdict now, those that are dead as a whole included."""
    pending: int


def reconcile(manifest: Manifest, plan: Plan, ordered: Sequence[Shard]) -> Resume:
    """Adopt parts that nobody acknowledged, release leases and shards whose parts are gone."""
    files.remove_temps(manifest.layout.epoch_dir(plan.model_version, plan.epoch))
    shards = {shard.key: shard for shard in (*plan.shards, *ordered)}
    states = manifest.states(plan.model_version, plan.epoch)
    found = parts.scan(manifest.layout, plan.model_version, plan.epoch)
    stray = [_set_aside(path) for key, path in found.items() if key not in shards]
    present = {key: path for key, path in found.items() if key in shards}
    finished = {key for key, kind in states.items() if kind in _FINISHED and key in shards}

    open_ = [(shards[key], path) for key, path in present.items() if key not in finished]
    adopted, damaged = _adopt(manifest, plan, open_)
    leased = [key for key, kind in states.items() if kind == EventKind.LEASED and key not in adopted]
    lost = [key for key in finished if key not in present]
    manifest.append(
        [
            *(released(key, "DriverDied", "the driver died while the shard was leased") for key in leased),
            *(released(key, "PartMissing", "its part is gone") for key in lost),
        ],
        model_version=plan.model_version,
    )
    done = len(finished) - len(lost) + len(adopted)
    return Resume(
        adopted=len(adopted),
        released=len(leased),
        lost=len(lost),
        damaged=tuple(sorted(damaged)),
        stray=tuple(sorted(stray)),
        done=done,
        pending=len(shards) - done,
    )


def windowed(work: Callable[[T], R], items: Iterable[T], threads: int = _THREADS) -> Iterator[R]:
    """`map` in threads, in order, that holds a bounded number of results."""
    source = iter(items)
    with ThreadPoolExecutor(threads) as pool:
        waiting: list[Future[R]] = [pool.submit(work, item) for item in islice(source, 4 * threads)]
        while waiting:
            done = waiting.pop(0)
            waiting.extend(pool.submit(work, item) for item in islice(source, 1))
            yield done.result()


def _adopt(manifest: Manifest, plan: Plan, open_: Sequence[tuple[Shard, Path]]) -> tuple[set[ShardKey], list[str]]:
    binding = plan.binding.digest

    def look(item: tuple[Shard, Path]) -> tuple[Path, Footer | None, datetime]:
        shard, path = item
        at = datetime.fromtimestamp(path.stat().st_mtime, UTC).replace(tzinfo=None)
        try:
            footer = parts.read_footer(path)
        except PartDamaged:
            return path, None, at
        keys = shard.keys(plan.queries)
        right = footers.answers(
            footer, shard, model_version=plan.model_version, epoch=plan.epoch, binding=binding, keys=keys
        )
        return path, footer if right else None, at

    adopted: set[ShardKey] = set()
    damaged: list[str] = []
    looked = windowed(look, open_)
    while chunk := list(islice(looked, _COMMIT)):
        good = [(footer, at) for _, footer, at in chunk if footer is not None]
        damaged.extend(str(path) for path, footer, _ in chunk if footer is None)
        manifest.append(
            [_verdict(footer) for footer, _ in good],
            model_version=plan.model_version,
            at=[at for _, at in good],
        )
        adopted.update(footer.key for footer, _ in good)
    return adopted, damaged


def _verdict(footer: Footer) -> Event:
    return Event(
        kind=EventKind.DEAD if footer.whole else EventKind.DONE,
        shard_id=footer.shard_id,
        generation=footer.generation,
        attempt=footer.attempt,
        worker=footer.worker,
        footer=footer,
        adopted=True,
    )


def released(key: ShardKey, error_type: str, message: str) -> Event:
    """The event that gives a shard back without charging anybody."""
    return Event(
        kind=EventKind.RELEASED,
        shard_id=key[0],
        generation=key[1],
        attempt=0,
        error_type=error_type,
        message=message,
    )


def _set_aside(path: Path) -> str:
    path.rename(path.with_name(f".stray-{path.name}.aside"))
    return str(path)
