"""What the scheduler, the pool and the workers say to each other. Pure: no Ray, no files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

from shards.types import Event, Failure, Footer, Shard, ShardKey, Stage

WorkerId = str


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorReport:
    """An exception, as far as it can travel: names instead of classes, so that nothing is unpickled."""

    error_type: str
    bases: tuple[str, ...]
    """Names of the exception's classes, most specific first: what the retry table is looked up by."""
    message: str
    traceback: str
    stage: Stage
    errno: int | None = None
    node: str = ""
    """Where it happened, if that is known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Conviction:
    """A document that ends whatever process touches it: `offset` in its shard, and what is known of it."""

    offset: int
    error: ErrorReport


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """One question of a search for killers. Not `whole`: score the document at `offset` alone (None: read
    the shard and score a warm-up pair), publish nothing. `whole`: score and publish the shard without the
    convicted; `single`: one document a batch."""

    offset: int | None = None
    whole: bool = False
    single: bool = False
    convicted: tuple[Conviction, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Lease:
    """A worker's claim on a shard. `attempt` is the fencing token: every report about it carries it."""

    shard: Shard
    attempt: int
    charged: int
    """Attempts charged to the shard so far, this one included; goes into the part's footer."""
    trusted: bool
    """Whether some shard of this run has scored documents. Until then a shard whose every document
    failed is not published: a broken model would otherwise write a dead-letter table of the corpus."""
    probe: Probe | None = None
    """Set while documents that kill are searched for in the shard."""

    @property
    def key(self) -> ShardKey:
        return self.shard.key


class Loss(StrEnum):
    """Why a worker is gone."""

    PROCESS = "process"
    NODE = "node"
    MEMORY = "memory"


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerInfo:
    """Who a worker is. `ranker` is what its model plane resolved (device, dtype, versions); `preflight` and
    `warnings` what it found out about the ranker before the first document."""

    worker: WorkerId
    node: str
    pid: int
    ranker: Mapping[str, str] = field(default_factory=dict)
    preflight: Mapping[str, float] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Ready:
    """The worker has loaded its ranker and can be leased to."""

    worker: WorkerId
    info: WorkerInfo


@dataclass(frozen=True, slots=True, kw_only=True)
class Refused:
    """The worker cannot load the ranker. `fatal`: and will not by trying again, so its node gets no more
    workers. `last`: no node is left that could take one."""

    worker: WorkerId
    error: ErrorReport
    fatal: bool
    last: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """A heartbeat: so many keys of the shard are through the forward pass."""

    worker: WorkerId
    key: ShardKey
    attempt: int
    keys: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Probed:
    """The worker has survived the lease's probe of the document at `offset` (None: the warm-up). All probes
    of a search share an attempt; the offset tells a second answer to the last question from one to this."""

    worker: WorkerId
    key: ShardKey
    attempt: int
    offset: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Done:
    """The part is durable. `seconds`: where the shard's time went, by stage; `truncated`: keys whose document
    was cut to `max_length`."""

    worker: WorkerId
    key: ShardKey
    attempt: int
    footer: Footer
    adopted: bool
    seconds: Mapping[str, float] = field(default_factory=dict)
    truncated: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Failed:
    """The shard failed as a whole; nothing was published."""

    worker: WorkerId
    key: ShardKey
    attempt: int
    error: ErrorReport
    barren: bool = False
    """Every document failed while scoring, and no shard had succeeded yet."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Died:
    """The worker is gone, and whatever it held with it."""

    worker: WorkerId
    loss: Loss
    message: str


PoolEvent = Ready | Refused | Progress | Probed | Done | Failed | Died


class Pool(Protocol):
    """The workers, as the scheduler sees them. A dead or killed worker is replaced under a new id."""

    def poll(self, timeout_s: float) -> Sequence[PoolEvent]:
        """What happened, waiting at most `timeout_s` for the first event."""
        ...

    def submit(self, worker: WorkerId, lease: Lease) -> None: ...

    def kill(self, worker: WorkerId) -> None:
        """End the worker and start another; no `Died` follows."""
        ...

    def close(self) -> None: ...


class Clock(Protocol):
    """Seconds that only go forward."""

    def monotonic(self) -> float: ...


class Store(Protocol):
    """What the scheduler makes durable."""

    def commit(self, events: Sequence[Event]) -> None:
        """All of them in one transaction, or an exception that ends the driver."""
        ...

    def find(self, shard: Shard) -> Footer | None:
        """The verdict on `shard` that some worker has published already, if any."""
        ...

    def bury(self, shard: Shard, failure: Failure, *, attempt: int, attempts: int, worker: str) -> Footer:
        """Publish a part that says the whole shard is dead; returns the verdict that stands."""
        ...

    def last_words(self, worker: WorkerId) -> str:
        """The stacks that a worker wrote down when a fatal signal ended it; empty if it could not."""
        ...
