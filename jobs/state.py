"""What the scheduler remembers of workers, failures and verdicts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TypeVar

from jobs.protocol import ErrorReport, Lease, WorkerInfo
from shards.types import EventKind, Failure, Footer, History, Shard, ShardKey, Stage


class StopKind(StrEnum):
    """refused: the user must change something. breaker: nothing succeeds. fatal: the output fails."""

    REFUSED = "refused"
    BREAKER = "breaker"
    FATAL = "fatal"


@dataclass(frozen=True, slots=True, kw_only=True)
class Stop:
    """Why the run ends before its work does."""

    kind: StopKind
    message: str
    traceback: str = ""


@dataclass(slots=True, kw_only=True)
class WorkerView:
    """A worker that is ready: what it holds, until when, and what it has done."""

    info: WorkerInfo
    since: float = 0.0
    """When it became ready, by the monotonic clock."""
    fresh: bool = True
    """Whether it has not been leased anything yet."""
    held: dict[ShardKey, Lease] = field(default_factory=dict)
    deadline: float = 0.0
    keys: int = 0
    shards: int = 0
    seconds: dict[str, float] = field(default_factory=dict)
    progress: dict[ShardKey, int] = field(default_factory=dict)


@dataclass(slots=True, kw_only=True)
class Tally:
    """What this run has done so far, in keys (documents × queries) and shards."""

    scored: int = 0
    truncated: int = 0
    dead: int = 0
    shards_done: int = 0
    shards_dead: int = 0
    adopted: int = 0
    retries: int = 0
    deaths: int = 0
    stale: int = 0


@dataclass(frozen=True, slots=True)
class Charge:
    """An event that was charged to a shard (or made it a suspect while no worker had ever scored anything),
    and that the breaker may take back."""

    kind: EventKind
    lease: Lease
    worker: WorkerInfo


@dataclass(frozen=True, slots=True)
class Hopeless:
    """Why a shard is to be dead, once it is known that its neighbours are not all like it."""

    failure: Failure
    worker: str


@dataclass(slots=True)
class Judged:
    """What this run has given a verdict on, in keys; redriven documents apart, which were dead before."""

    keys: int = 0
    dead: int = 0
    shards: int = 0
    causes: Counter[str] = field(default_factory=Counter)
    samples: dict[str, Failure] = field(default_factory=dict)

    def add(self, footer: Footer) -> None:
        self.keys += footer.expected
        self.dead += footer.dead
        self.shards += 1
        for failure in footer.failures:
            self.causes[failure.error_type] += footer.expected if footer.whole else 1
            self.samples[failure.error_type] = failure


T = TypeVar("T", ErrorReport, Failure)


def most_common(errors: Collection[T]) -> tuple[T, int]:
    """The last error of the type that most of them have, and how many have it."""
    last = {error.error_type: error for error in errors}
    name, count = Counter(error.error_type for error in errors).most_common(1)[0]
    return last[name], count


def whole_failure(error: ErrorReport) -> Failure:
    """The one failure that stands for all documents of a dead shard: it has no row, or a redrive would ask
    for that row alone."""
    return Failure(
        row=None,
        doc_id=None,
        stage=error.stage,
        error_type=error.error_type,
        message=error.message,
        traceback=error.traceback,
    )


def unreadable(shard: Shard) -> Failure:
    """For a file that could not be read when it was planned."""
    return Failure(
        row=None,
        doc_id=None,
        stage=Stage.READ,
        error_type="UnreadableFile",
        message=f"{shard.file}: {shard.unreadable}",
        traceback="",
    )


def spent(history: History) -> Failure:
    """For a shard whose budget earlier runs have spent."""
    return Failure(
        row=None,
        doc_id=None,
        stage=Stage.WORKER,
        error_type="BudgetSpent",
        message=f"{history.failed} failed attempts and {history.died} dead workers before this run; "
        "see the table `attempts`",
        traceback="",
    )
