"""Fakes for the pure control plane: a pool, a clock and a store that do what a test tells them to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from jobs.protocol import (
    Died,
    Done,
    ErrorReport,
    Failed,
    Lease,
    Loss,
    PoolEvent,
    Progress,
    Ready,
    WorkerId,
    WorkerInfo,
)
from shards.types import Event, Failure, Footer, Shard, ShardKey, Stage


class FakeClock:
    """Moves only when told to."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now


def a_shard(
    n: int, *, row_group: int = 0, file: str = "a.parquet", rows: int = 10, unreadable: str | None = None
) -> Shard:
    return Shard(
        shard_id=f"{n:032x}",
        file=file,
        fingerprint="f",
        size=1,
        mtime_ns=1,
        row_group=row_group,
        start=n * rows,
        rows=rows,
        first_row=n * rows,
        unreadable=unreadable,
    )


def a_failure(error_type: str) -> Failure:
    return Failure(
        row=0, doc_id="d0", stage=Stage.READ, error_type=error_type, message="it broke", traceback="Traceback …"
    )


def a_footer(
    shard: Shard,
    *,
    dead: int = 0,
    whole: bool = False,
    attempt: int = 1,
    worker: str = "w1",
    failures: tuple[Failure, ...] = (),
) -> Footer:
    return Footer.of(
        shard,
        model_version="mv",
        epoch=1,
        binding="b",
        expected=shard.docs,
        scored=0 if whole else shard.docs - dead,
        dead=shard.docs if whole else dead,
        failures=failures or ((a_failure("Fake"),) if dead or whole else ()),
        whole=whole,
        run=1,
        attempt=attempt,
        worker=worker,
    )


def an_error(
    name: str = "OSError", *, stage: Stage = Stage.READ, errno: int | None = None, message: str = "it broke"
) -> ErrorReport:
    bases = (name, "OSError", "Exception") if name != "ShardUnreadable" else (name, "RescoreError", "Exception")
    return ErrorReport(
        error_type=name, bases=bases, message=message, traceback="Traceback …", stage=stage, errno=errno
    )


class FakeStore:
    """Keeps what is committed; `parts` is what a worker would have published."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.commits: list[list[Event]] = []
        self.parts: dict[ShardKey, Footer] = {}

    def commit(self, events: Sequence[Event]) -> None:
        self.commits.append(list(events))
        self.events += events

    def find(self, shard: Shard) -> Footer | None:
        return self.parts.get(shard.key)

    def bury(self, shard: Shard, failure: Failure, *, attempt: int, attempts: int, worker: str) -> Footer:
        footer = a_footer(shard, whole=True, attempt=attempt, worker=worker, failures=(failure,))
        return self.parts.setdefault(shard.key, footer)

    def last_words(self, worker: WorkerId) -> str:
        return ""

    def kinds(self, shard: Shard) -> list[str]:
        """The shard's history, as names of events."""
        return [e.kind.value for e in self.events if (e.shard_id, e.generation) == shard.key]


@dataclass
class FakePool:
    """Workers that report what the test says. Dead or killed ones are replaced under a new id at once."""

    workers: int = 1
    submitted: list[tuple[WorkerId, Lease]] = field(default_factory=list)
    killed: list[WorkerId] = field(default_factory=list)
    closed: bool = False

    def __post_init__(self) -> None:
        self._events: list[PoolEvent] = []
        self._started = 0
        for _ in range(self.workers):
            self.start()

    def start(self) -> WorkerId:
        self._started += 1
        worker = f"w{self._started}"
        self._events.append(Ready(worker=worker, info=WorkerInfo(worker=worker, node="n1", pid=self._started)))
        return worker

    # -- Pool --

    def poll(self, timeout_s: float) -> Sequence[PoolEvent]:
        events, self._events = self._events, []
        return events

    def submit(self, worker: WorkerId, lease: Lease) -> None:
        self.submitted.append((worker, lease))

    def kill(self, worker: WorkerId) -> None:
        self.killed.append(worker)
        self.start()

    def close(self) -> None:
        self.closed = True

    # -- what the test makes happen --

    def lease(self, n: int = -1) -> tuple[WorkerId, Lease]:
        return self.submitted[n]

    def say(self, event: PoolEvent) -> None:
        self._events.append(event)

    def done(self, n: int = -1, *, footer: Footer | None = None, adopted: bool = False) -> None:
        worker, lease = self.submitted[n]
        self.say(
            Done(
                worker=worker,
                key=lease.key,
                attempt=lease.attempt,
                footer=footer or a_footer(lease.shard, attempt=lease.attempt, worker=worker),
                adopted=adopted,
            )
        )

    def progress(self, n: int = -1, *, keys: int = 1) -> None:
        worker, lease = self.submitted[n]
        self.say(Progress(worker=worker, key=lease.key, attempt=lease.attempt, keys=keys))

    def fail(self, n: int = -1, *, error: ErrorReport | None = None, barren: bool = False) -> None:
        worker, lease = self.submitted[n]
        self.say(
            Failed(worker=worker, key=lease.key, attempt=lease.attempt, error=error or an_error(), barren=barren)
        )

    def die(self, worker: WorkerId, *, loss: Loss = Loss.PROCESS) -> None:
        self.say(Died(worker=worker, loss=loss, message=f"{worker} was killed"))
        self.start()
