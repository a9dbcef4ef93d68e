"""The real scheduler through thousands of failures: a fake pool, a fake clock and one seeded `Random`.

A seed decides a small corpus, the poison planted in it (documents that fail, kill, eat the memory, hang,
or kill only in company; shards that kill when they are read, that fail for a while, that fail for ever)
and what strikes from outside: workers killed while they start, idle or hold shards, workers frozen past
their lease that wake up and go on writing, nodes that vanish, reports that come late, twice, out of order
or never, a driver that dies between any two of its effects and starts again from what is durable.

After every step the invariant is checked (`Ledger`); at the end every document must stand exactly once
and have the fate it deserves. Two disks carry the durable state:

- `ModelDisk` keeps parts and events in memory, by the manifest's rules: 2 to 4 ms a seed, so the
  ordinary test run can afford thousands.
- `RealDisk` is the real `Manifest`, `reconcile`, `ManifestStore` and parts on a file system: about a
  hundred times slower, for the fsyncs. It carries a `ModelDisk` along and compares what both know at every
  start of a driver, so a few dozen seeds also prove that the model is a fair one.

What outside strikes may not do is in `Simulation.spares`: nobody can tell a document that kills from one
during which, alone and on a fresh worker, somebody else kills the process twice in a row.

    python -m tests.simulation --seed 17 [--real]      replays one seed, with its trace
    python -m tests.simulation --seeds 100000          tries many
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from enum import IntEnum, StrEnum
from functools import partial
from pathlib import Path
from random import Random
from typing import Any, Protocol

import numpy as np

from jobs.protocol import (
    Died,
    Done,
    ErrorReport,
    Failed,
    Lease,
    Loss,
    PoolEvent,
    Probed,
    Progress,
    Ready,
    Refused,
    WorkerId,
    WorkerInfo,
)
from jobs.retry import RetryPolicy
from jobs.scheduler import Scheduler
from jobs.store import ManifestStore
from shards import parts
from shards.layout import Layout
from shards.manifest import Manifest
from shards.reconcile import released
from shards.types import (
    CHARGE_RETURNED,
    STATE_AFTER,
    Event,
    EventKind,
    Failure,
    Footer,
    History,
    Plan,
    Shard,
    ShardKey,
    ShardState,
    Stage,
)
from shards.verify import verify
from tests import outputs
from tests.fakes import FakeClock, a_footer

POLICY = RetryPolicy(lease_s=8.0, backoff_s=0.5, backoff_max_s=2.0, max_deaths=1000)
MAX_STEPS = 6000
MAX_LIVES = 60
MAX_STOPS = 8
"""Runs in a row that the breaker ends, before it is asked whether it is right."""
_FINISHED = (ShardState.DONE, ShardState.DEAD)
_RETURNED = frozenset(CHARGE_RETURNED.values())
_ENDS = (EventKind.FAILED, EventKind.DIED, EventKind.HUNG, EventKind.RELEASED)


class Violation(AssertionError):  # noqa: N818 - what it says of a run
    """Something that must hold does not."""


class Crash(Exception):  # noqa: N818 - no error: the driver's kill -9
    """The driver dies here."""


# -- the world -----------------------------------------------------------------------------------------


class Nature(StrEnum):
    """What a document does to whoever scores it. eats: its process is killed by the memory monitor.
    crowd: it kills unless it is alone in its batch."""

    GOOD = "good"
    FAILS = "fails"
    KILLS = "kills"
    EATS = "eats"
    HANGS = "hangs"
    CROWD = "crowd"


class Ill(StrEnum):
    """What is wrong with a whole shard. cold: it kills when it is read. doomed: every document passes
    alone, the shard kills even at batch size 1. permanent, broken: every attempt fails."""

    NONE = "none"
    UNREADABLE = "unreadable"
    COLD = "cold"
    DOOMED = "doomed"
    PERMANENT = "permanent"
    BROKEN = "broken"


_ILL: Mapping[Ill, set[str]] = {
    Ill.NONE: set(),
    Ill.UNREADABLE: {"read"},
    Ill.COLD: {"worker"},
    Ill.DOOMED: {"worker"},
    Ill.PERMANENT: {"read", "worker"},
    Ill.BROKEN: {"read", "worker"},
}
"""At what stage all documents of such a shard are dead. `worker` stands for a budget spent in earlier runs."""
_KILLERS = {Nature.KILLS, Nature.EATS, Nature.HANGS}
_SCORED = "scored"


@dataclass(slots=True)
class Subject:
    """A shard and what is planted in it: `natures` by the document's offset."""

    shard: Shard
    natures: dict[int, Nature]
    ill: Ill = Ill.NONE
    hiccups: int = 0
    """Attempts that will fail with an error that passes."""

    def fates(self) -> dict[int, set[str]]:
        """What each document deserves: to be scored, or the stage at which it is dead."""
        return {offset: _ILL[self.ill] or {_fate(nature)} for offset, nature in self.natures.items()}


def _fate(nature: Nature) -> str:
    if nature in _KILLERS:
        return str(Stage.WORKER)
    return str(Stage.SCORE) if nature is Nature.FAILS else _SCORED


def offsets(shard: Shard) -> list[int]:
    """The documents of a shard, as offsets."""
    every = shard.only if shard.only is not None else range(shard.rows)
    return [offset for offset in every if offset not in shard.excluded]


def invent_shards(random: Random) -> list[Shard]:
    """A small corpus: row groups of a few shards, some with rows excluded, some redriven."""
    shards: list[Shard] = []
    for n in range(random.randint(1, 12)):
        rows = random.randint(1, 6)
        whole = range(rows)
        excluded = (
            tuple(sorted(random.sample(whole, random.randint(0, rows - 1)))) if random.random() < 0.15 else ()
        )
        only = tuple(sorted(random.sample(whole, random.randint(1, rows)))) if random.random() < 0.1 else None
        shards.append(
            Shard(
                shard_id=f"{n:032x}",
                file="a.parquet",
                fingerprint="f",
                size=1,
                mtime_ns=1,
                row_group=n // 3,
                start=n * 10,
                rows=rows,
                first_row=n * 10,
                excluded=() if only is not None else excluded,
                generation=0 if only is None else 1,
                only=only,
            )
        )
    return shards


def plant(shards: Sequence[Shard], random: Random, *, unreadable: bool) -> list[Subject]:
    """Poison for the shards; how much of it is the seed's mood."""
    mood = random.choice((0.0, 0.1, 0.3, 0.6))
    ills = [i for i in Ill if i is not Ill.NONE and (unreadable or i is not Ill.UNREADABLE)]
    subjects = []
    for shard in shards:
        natures = dict.fromkeys(offsets(shard), Nature.GOOD)
        ill = random.choice(ills) if random.random() < mood / 4 else Ill.NONE
        if ill is Ill.UNREADABLE:
            shard = replace(shard, unreadable="not Parquet")
        elif ill is Ill.NONE and random.random() < mood / 4:
            natures = dict.fromkeys(natures, Nature.FAILS)
        elif ill is Ill.NONE and random.random() < mood:
            for offset in random.sample(list(natures), min(len(natures), random.randint(1, 2))):
                natures[offset] = random.choice(list(Nature)[1:])
        hiccups = random.randint(0, POLICY.max_attempts - 1) if random.random() < mood else 0
        subjects.append(Subject(shard, natures, ill, hiccups))
    return subjects


# -- what is durable -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """A published verdict. Compared by identity: another one with the same words is another file."""

    footer: Footer
    scored: tuple[int, ...]
    step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Known:
    """What a starting driver learns from what is durable."""

    histories: Mapping[ShardKey, History]
    trusted: bool
    events: Sequence[Event]
    """What reconciling has added."""


class Disk(Protocol):
    """Parts and manifest, whatever drivers and workers come and go."""

    def start(self) -> Known:
        """What every driver does first: reconcile."""
        ...

    def crash(self, *, lose_manifest: bool) -> None: ...

    def commit(self, events: Sequence[Event]) -> None: ...

    def find(self, shard: Shard) -> Footer | None: ...

    def bury(self, shard: Shard, failure: Failure, *, attempt: int, attempts: int, worker: str) -> Footer: ...

    def publish(self, shard: Shard, footer: Footer, scored: Sequence[int]) -> tuple[Footer, bool]:
        """As a worker does. The footer that stands, and whether it is another's."""
        ...

    def stamp(self, key: ShardKey) -> object:
        """Changes whenever the part does; None if there is none."""
        ...

    def read(self, key: ShardKey) -> tuple[Footer, tuple[int, ...]]:
        """A part's footer and the offsets of its rows."""
        ...

    def blank(self, shard: Shard) -> Footer:
        """A footer without a verdict."""
        ...


class ModelDisk:
    """Parts and events in memory, by the rules of `shards.parts`, `shards.reconcile` and the manifest."""

    def __init__(self, clock: Callable[[], int]) -> None:
        self.parts: dict[ShardKey, Part] = {}
        self.histories: dict[ShardKey, History] = {}
        self._step = clock

    def start(self) -> Known:
        events = [
            Event(
                kind=EventKind.DEAD if part.footer.whole else EventKind.DONE,
                shard_id=key[0],
                generation=key[1],
                attempt=part.footer.attempt,
                worker=part.footer.worker,
                footer=part.footer,
                adopted=True,
            )
            for key, part in self.parts.items()
            if key not in self.histories or self.histories[key].state not in _FINISHED
        ]
        adopted = {(event.shard_id, event.generation) for event in events}
        for key, history in self.histories.items():
            if history.state is ShardState.LEASED and key not in adopted:
                events.append(released(key, "DriverDied", "the driver died"))
            elif history.state in _FINISHED and key not in self.parts:
                events.append(released(key, "PartMissing", "its part is gone"))
        self.commit(events)
        finished = [key for key, history in self.histories.items() if history.state in _FINISHED]
        trusted = any(self.parts[key].footer.scored for key in finished)
        return Known(histories=dict(self.histories), trusted=trusted, events=events)

    def crash(self, *, lose_manifest: bool) -> None:
        if lose_manifest:
            self.histories.clear()

    def commit(self, events: Sequence[Event]) -> None:
        for event in events:
            key = (event.shard_id, event.generation)
            history = self.histories.get(key, History(state=ShardState.PENDING))
            self.histories[key] = _after(history, event)

    def find(self, shard: Shard) -> Footer | None:
        part = self.parts.get(shard.key)
        return part.footer if part else None

    def bury(self, shard: Shard, failure: Failure, *, attempt: int, attempts: int, worker: str) -> Footer:
        blank = replace(self.blank(shard), attempt=attempt, attempts=attempts, worker=worker)
        return self.publish(shard, replace(blank, dead=blank.expected, failures=(failure,), whole=True), ())[0]

    def publish(self, shard: Shard, footer: Footer, scored: Sequence[int]) -> tuple[Footer, bool]:
        standing = self.parts.get(shard.key)
        if standing is not None:
            return standing.footer, True
        self.write(shard.key, Part(footer, tuple(scored), self._step()))
        return footer, False

    def write(self, key: ShardKey, part: Part) -> None:
        """Whatever stands there is replaced."""
        self.parts[key] = part

    def stamp(self, key: ShardKey) -> object:
        return self.parts.get(key)

    def read(self, key: ShardKey) -> tuple[Footer, tuple[int, ...]]:
        part = self.parts[key]
        return part.footer, part.scored

    def blank(self, shard: Shard) -> Footer:
        return replace(a_footer(shard, whole=True), dead=0, whole=False)


def _after(history: History, event: Event) -> History:
    """The manifest's views `last_events` and `shard_states`, one event at a time."""
    kind, because = event.kind, event.error_type if event.kind is EventKind.RELEASED else ""
    return History(
        state=STATE_AFTER[kind],
        attempts=max(history.attempts, event.attempt) if kind is EventKind.LEASED else history.attempts,
        failed=history.failed + (kind is EventKind.FAILED) - (because == "FailureReturned"),
        died=history.died + (kind in (EventKind.DIED, EventKind.HUNG)) - (because == "DeathReturned"),
        released=history.released + (kind is EventKind.RELEASED and because not in _RETURNED),
        voided=history.voided + (because == "DriverDied"),
    )


class RealDisk:
    """The real manifest and real parts; a model beside it must know the same at every start."""

    def __init__(self, root: Path, clock: Callable[[], int], random: Random) -> None:
        docs = random.randint(4, 16)
        self._output = outputs.make_output(root, docs=docs, group=8, shard_size=random.randint(2, 4))
        self.plan: Plan = self._output.plan
        self.layout: Layout = self._output.layout
        self._model = ModelDisk(clock)
        self._manifest: Manifest | None = None

    def start(self) -> Known:
        self._manifest = manifest = self._output.open()
        manifest.register(self.plan, [])
        schema = parts.part_schema(self.plan.id_type, query_set=False, label_scores=False)
        parts.write_seed(self.layout, self.plan.model_version, self.plan.epoch, schema)
        name = self.plan.model_version
        run = manifest.begin_run(
            model_version=name, pid=1, host="here", command="test", config_json="{}", versions={}
        )
        manifest.reconcile(self.plan, [])
        self._store = ManifestStore(manifest, self.layout, self.plan, run)
        model = self._model.start()
        histories = {k: replace(h, first_leased_at=None) for k, h in manifest.histories(name).items()}
        pending = History(state=ShardState.PENDING)
        if histories != {key: model.histories.get(key, pending) for key in histories}:
            raise Violation(f"manifest and model differ: {histories} / {model.histories}")
        trusted = manifest.counts(name).scored > 0
        if trusted != model.trusted:
            raise Violation(f"the manifest says trusted={trusted}")
        return Known(histories=histories, trusted=trusted, events=model.events)

    def crash(self, *, lose_manifest: bool) -> None:
        if self._manifest is not None:
            self._manifest.close()
        if lose_manifest:
            for path in self.layout.private.glob("live.duckdb*"):
                path.unlink()
        self._model.crash(lose_manifest=lose_manifest)

    def commit(self, events: Sequence[Event]) -> None:
        self._store.commit(events)
        self._model.commit(events)

    def find(self, shard: Shard) -> Footer | None:
        return self._store.find(shard)

    def bury(self, shard: Shard, failure: Failure, *, attempt: int, attempts: int, worker: str) -> Footer:
        footer = self._store.bury(shard, failure, attempt=attempt, attempts=attempts, worker=worker)
        self._model.publish(shard, footer, ())
        return footer

    def publish(self, shard: Shard, footer: Footer, scored: Sequence[int]) -> tuple[Footer, bool]:
        schema = parts.part_schema(self.plan.id_type, query_set=False, label_scores=False)
        rows = parts.make_rows(
            schema,
            doc_ids=[f"d{shard.first_row + offset}" for offset in scored],
            query_ids=None,
            model_version=self.plan.model_version,
            scores=np.zeros(len(scored), dtype=np.float32),
            label_scores=None,
            n_tokens=[1] * len(scored),
            truncated=[False] * len(scored),
            text_hashes=[0] * len(scored),
            shard_id=shard.shard_id,
        )
        self._model.publish(shard, footer, scored)
        return parts.publish(self.layout, footer, rows)

    def stamp(self, key: ShardKey) -> object:
        try:
            stat = self._path(key).stat()
        except FileNotFoundError:
            return None
        return stat.st_ino, stat.st_size, stat.st_mtime_ns

    def read(self, key: ShardKey) -> tuple[Footer, tuple[int, ...]]:
        footer, table = parts.read_part(self._path(key))
        rows = [int(doc_id[1:]) for doc_id in table.column("doc_id").to_pylist()]
        return footer, tuple(row - footer.first_row for row in rows)

    def blank(self, shard: Shard) -> Footer:
        return outputs.make_footer(self.plan, shard)

    def verify(self) -> None:
        """The proof of `rescore verify`, as after exit code 0 or 3."""
        assert self._manifest is not None
        self._manifest.publish()
        found = verify(self.layout, self.plan.model_version)
        if not found.ok or found.missing_docs:
            raise Violation("; ".join(found.lines()))

    def _path(self, key: ShardKey) -> Path:
        return self.layout.part(self.plan.model_version, self.plan.epoch, *key)


# -- what must hold ------------------------------------------------------------------------------------


@dataclass
class Ledger:
    """The invariant. It sees every commit and every submit, and looks at the parts after every step."""

    subjects: Mapping[ShardKey, Subject]
    disk: Disk
    acked: dict[ShardKey, object] = field(default_factory=dict)
    """Stamp of every part that was acknowledged, ever."""
    states: dict[ShardKey, ShardState] = field(default_factory=dict)
    last: dict[ShardKey, int] = field(default_factory=dict)
    """The last attempt that was leased."""
    failures: set[tuple[ShardKey, int]] = field(default_factory=set)
    """Attempts of which a worker has really said that they failed."""
    gone: set[WorkerId] = field(default_factory=set)
    """Workers of this driver that are really gone, or were killed for it."""
    charges: dict[tuple[ShardKey, int], str] = field(default_factory=dict)
    """What was charged to an attempt, as the error_type that would give it back."""
    ended: Counter[tuple[ShardKey, int]] = field(default_factory=Counter)
    """Processes that really ended while they were asked for this document alone."""
    stood: set[ShardKey] = field(default_factory=set)
    """Parts that were there when the present tick began."""
    _seen: dict[ShardKey, object] = field(default_factory=dict)

    def forget_manifest(self) -> None:
        """It was lost: attempts count from the beginning, what was acknowledged still is."""
        self.states.clear()
        self.last.clear()
        self.charges.clear()

    def committed(self, events: Sequence[Event]) -> None:
        for event in events:
            self._check_event(event, (event.shard_id, event.generation))

    def _check_event(self, event: Event, key: ShardKey) -> None:
        state, attempt = self.states.get(key, ShardState.PENDING), event.attempt
        _must(state not in _FINISHED, f"{event.kind} after {key} was acknowledged as {state}")
        if event.kind is EventKind.LEASED:
            _must(state is ShardState.PENDING, f"{key} is leased twice")
            _must(attempt > self.last.get(key, 0), f"attempt {attempt} of {key} after {self.last.get(key)}")
            self.last[key] = attempt
        elif event.kind is EventKind.RELEASED and event.error_type in _RETURNED:
            _must(state is ShardState.PENDING, f"a charge is given back to {key}, which is {state}")
            charge = self.charges.pop((key, attempt), "none")
            _must(
                charge == event.error_type, f"{event.error_type} for {key} attempt {attempt}: charged was {charge}"
            )
        elif event.kind in _ENDS:
            _must(state is ShardState.LEASED, f"{event.kind} of {key}, which is not leased")
            _must(
                attempt in (0, self.last[key]), f"{event.kind} of attempt {attempt}, not {self.last[key]}, of {key}"
            )
            self._check_end(event, key)
            if event.kind in CHARGE_RETURNED:
                self.charges[key, attempt] = CHARGE_RETURNED[event.kind]
        else:
            self._check_ack(event, key)
        self.states[key] = STATE_AFTER[event.kind]

    def _check_end(self, event: Event, key: ShardKey) -> None:
        if event.kind is EventKind.FAILED:
            _must((key, event.attempt) in self.failures, f"charged: attempt {event.attempt} of {key} never failed")
        if event.error_type in ("WorkerDied", "LeaseExpired"):
            _must(event.worker in self.gone, f"{event.worker} has died of {key}, and is alive")
            _must(key not in self.stood, f"{event.kind}, and nobody has looked for the part of {key}")

    def _check_ack(self, event: Event, key: ShardKey) -> None:
        stamp = self.disk.stamp(key)
        if stamp is None:
            raise Violation(f"{event.kind} of {key}, which has no part")
        footer, _ = self.disk.read(key)
        _must(event.footer == footer, f"{event.kind} of {key} with another verdict than its part's")
        _must((event.kind is EventKind.DEAD) == footer.whole, f"{event.kind} of {key}, whole={footer.whole}")
        self.acked.setdefault(key, stamp)

    def submitted(self, lease: Lease) -> None:
        key = lease.key
        leased = self.states.get(key) is ShardState.LEASED and self.last[key] == lease.attempt
        _must(leased, f"attempt {lease.attempt} of {key} was sent before it was committed")
        for conviction in lease.probe.convicted if lease.probe else ():
            deaths = self.ended[key, conviction.offset]
            _must(deaths > 1, f"document {conviction.offset} of {key} is convicted for {deaths} deaths")

    def bury(self, process: Process) -> None:
        """A process has ended, by itself or by force."""
        self.gone.add(process.worker)
        for key, job in process.jobs.items():
            if job.lease.probe is not None and job.lease.probe.offset is not None:
                self.ended[key, job.lease.probe.offset] += 1

    def check_parts(self) -> None:
        """What was acknowledged stands as it stood, and each part speaks once for each of its documents."""
        for key, stamp in self.acked.items():
            _must(self.disk.stamp(key) == stamp, f"{key} was acknowledged, and its part has changed")
        for key, subject in self.subjects.items():
            stamp = self.disk.stamp(key)
            if stamp is not None and self._seen.get(key) != stamp:
                self._seen[key] = stamp
                _check_part(subject, *self.disk.read(key))

    def check_end(self) -> None:
        """Nothing is leased or pending, and every document has the fate it deserves."""
        for key, subject in self.subjects.items():
            state = self.states.get(key, ShardState.PENDING)
            _must(state in _FINISHED, f"the run has ended, and {key} is {state}")
            found, deserved = fates(subject, *self.disk.read(key)), subject.fates()
            just = all(fate in deserved[offset] for offset, fate in found.items())
            _must(just, f"{key} ({subject.ill}, {subject.natures}): {found}, deserved {deserved}")


def _must(holds: bool, message: str) -> None:
    if not holds:
        raise Violation(message)


def fates(subject: Subject, footer: Footer, scored: Sequence[int]) -> dict[int, str]:
    """What a part says of each document: scored, or the stage at which it died."""
    if footer.whole:
        return dict.fromkeys(subject.natures, str(footer.failures[0].stage))
    dead = {(f.row or 0) - footer.first_row: str(f.stage) for f in footer.failures}
    return {**dead, **dict.fromkeys(scored, _SCORED)}


def _check_part(subject: Subject, footer: Footer, scored: Sequence[int]) -> None:
    key = subject.shard.key
    dead = [] if footer.whole else [(f.row or 0) - footer.first_row for f in footer.failures]
    said = [*scored, *(subject.natures if footer.whole else dead)]
    _must(len(said) == len(set(said)), f"the part of {key} speaks twice of a document")
    _must(set(said) == set(subject.natures), f"the part of {key} speaks of {sorted(said)}")
    _must(
        footer.scored == len(scored), f"the part of {key} has {len(scored)} rows, its footer says {footer.scored}"
    )


# -- workers -------------------------------------------------------------------------------------------


class Phase(IntEnum):
    """Where a worker is with a shard."""

    READ = 0
    SCORE = 1
    WRITE = 2
    REPORT = 3


@dataclass(slots=True)
class Job:
    lease: Lease
    phase: Phase = Phase.READ
    verdict: tuple[Footer, bool] | None = None


@dataclass(slots=True)
class Process:
    """A worker's process. It may live on when nobody counts on it any more."""

    worker: WorkerId
    node: str
    starting: int
    """Steps until it is ready."""
    jobs: dict[ShardKey, Job] = field(default_factory=dict)
    touched: set[ShardKey] = field(default_factory=set)
    """All shards it was ever asked about."""
    read: ShardKey | None = None
    """The shard whose documents it has at hand for probes."""
    stuck: bool = False
    """In a document that never returns."""
    frozen: int = 0
    """Stopped from outside until this step."""
    rests: int = 0
    dead: bool = False


class SimPool:
    """Workers as `RayPool` gives them: a dead or killed one is replaced under a new id, and after its
    death or kill nothing of it arrives but what the simulation delivers late on purpose."""

    def __init__(self, sim: Simulation, count: int) -> None:
        self._sim, self._count, self._started = sim, count, 0
        self.members: dict[WorkerId, Process] = {}
        self._mail: list[tuple[int, int, PoolEvent]] = []
        self._sent = 0
        self._fill()

    def _fill(self) -> None:
        while len(self.members) < self._count:
            self._started += 1
            worker, random = f"w{self._started}", self._sim.random
            self.members[worker] = Process(worker, f"n{random.randint(1, 2)}", random.randint(0, 4))

    def send(self, event: PoolEvent, delay: int = 0) -> None:
        """On its way to the driver; arrives so many polls later."""
        self._sent += 1
        self._mail.append((self._sim.step + delay, self._sent, event))

    def poll(self, timeout_s: float) -> Sequence[PoolEvent]:
        self._sim.point("poll")
        now = self._sim.step
        due = sorted(item for item in self._mail if item[0] <= now)
        self._mail = [item for item in self._mail if item[0] > now]
        events = [event for _, _, event in due]
        for event in events:
            if isinstance(event, Died | Refused):
                self.members.pop(event.worker, None)
                self._fill()
            self._sim.note("arrives", event)
        return events

    def submit(self, worker: WorkerId, lease: Lease) -> None:
        self._sim.point("submit")
        self._sim.note("submit", (worker, lease))
        self._sim.ledger.submitted(lease)
        process = self.members.get(worker)
        if process is None or process.dead:
            if process is not None and not self._sim.spares(process):
                self._excuse(worker)  # the death that is on its way would be counted against this question
            return  # a worker that is already gone is reported by the next poll
        if lease.probe is not None and not lease.probe.whole:
            others = process.touched - {lease.key}
            _must(not others, f"{worker} searches {lease.key}, and has done {others}")
        process.touched.add(lease.key)
        process.jobs[lease.key] = Job(lease)
        if process.frozen > self._sim.step and not self._sim.spares(process):
            process.frozen = 0

    def kill(self, worker: WorkerId) -> None:
        process = self.members.pop(worker, None)
        self._sim.note("kill", worker)
        if process is not None:
            self._sim.ledger.bury(process)
            self.recall(worker)
            self._sim.outlive(process)
        self._fill()

    def close(self) -> None:
        for process in self.members.values():
            self._sim.outlive(process)
        self.members.clear()

    def die(self, process: Process, loss: Loss) -> None:
        """The process is gone; the driver hears of it soon. What it said last arrives, or late, or never."""
        process.dead = True
        self._sim.ledger.bury(process)
        process.jobs.clear()
        self._sim.note(f"lost {loss}" if loss is not Loss.PROCESS else "dies", process.worker)
        answered = self.recall(process.worker)
        delay = 0 if answered else self._sim.random.randint(0, 3)
        self.send(Died(worker=process.worker, loss=loss, message=f"{process.worker} was killed"), delay)

    def _excuse(self, worker: WorkerId) -> None:
        """It was the node after all."""
        self._mail = [
            (
                due,
                number,
                replace(event, loss=Loss.NODE) if isinstance(event, Died) and event.worker == worker else event,
            )
            for due, number, event in self._mail
        ]

    def recall(self, worker: WorkerId) -> bool:
        """What is on its way from a worker that is gone: some arrives at once, some too late, most never.
        Whether the answer to a probe is among what arrives at once: the next question would be asked of
        the dead, and be blamed for it, if the death came any later than with it (see `spares`)."""
        answered = False
        mine = [item for item in self._mail if item[2].worker == worker]
        self._mail = [item for item in self._mail if item[2].worker != worker]
        for _, _, event in mine:
            luck = self._sim.random.random()
            if luck < 0.25 and worker in self.members:
                self.send(event)
                answered |= isinstance(event, Probed)
            elif luck < 0.5 and isinstance(event, Progress | Probed | Done | Failed):
                self.send(event, self._sim.random.randint(4, 12))
        return answered


class SimStore:
    """The disk as the scheduler sees it, with every place at which the driver can die in between."""

    def __init__(self, sim: Simulation) -> None:
        self._sim = sim

    def commit(self, events: Sequence[Event]) -> None:
        self._sim.point("before commit")
        self._sim.disk.commit(events)
        for event in events:
            self._sim.note("commit", event)
        self._sim.ledger.committed(events)
        self._sim.point("after commit")

    def last_words(self, worker: str) -> str:
        return ""

    def find(self, shard: Shard) -> Footer | None:
        footer = self._sim.disk.find(shard)
        self._sim.point("find")
        self._sim.race()
        return footer

    def bury(self, shard: Shard, failure: Failure, *, attempt: int, attempts: int, worker: str) -> Footer:
        self._sim.point("before bury", often=True)
        self._sim.race()
        footer = self._sim.disk.bury(shard, failure, attempt=attempt, attempts=attempts, worker=worker)
        self._sim.note("bury", footer)
        self._sim.point("after bury", often=True)
        return footer


# -- the simulation ------------------------------------------------------------------------------------


class Simulation:
    """One seed, from the first driver to the end of the last. Raises Violation."""

    def __init__(
        self, seed: int, *, root: Path | None = None, scheduler: Callable[..., Scheduler] = Scheduler
    ) -> None:
        self.random = Random(seed)
        self.clock = FakeClock()
        self.step = 0
        self.trace: deque[tuple[int, str, object]] = deque(maxlen=40)
        self.seen: Counter[str] = Counter()
        self.disk: Disk = self._real(root) if root else ModelDisk(lambda: self.step)
        shards = self.disk.plan.shards if isinstance(self.disk, RealDisk) else invent_shards(self.random)
        planted = plant(shards, self.random, unreadable=root is None)
        self.subjects = {subject.shard.key: subject for subject in planted}
        self.ledger = Ledger(self.subjects, self.disk)
        self._new_scheduler = scheduler
        self._draw_faults()
        self._zombies: list[Process] = []
        self._lives = self._stops = 0

    def _real(self, root: Path) -> RealDisk:
        return RealDisk(root, lambda: self.step, self.random)

    def _draw_faults(self) -> None:
        random = self.random
        self._workers, self._in_flight = random.randint(1, 5), random.randint(1, 3)
        self._strikes, self._rate = random.choice((0, 4, 12, 30)), random.choice((0.05, 0.15, 0.4))
        self._crashes = random.choice((0, 0, 1, 2, 4))
        self._doubles, self._delay = random.choice((0.0, 0.2, 0.5)), random.randint(0, 2)

    # -- lives of the driver --

    def run(self) -> None:
        """To the end: every document stands exactly once, or the breaker rightly says that nothing can."""
        while not self._live():
            _must(self._lives < MAX_LIVES, "drivers come and go, and the run does not end")
        while self._zombies:
            self.step += 1
            self._haunt()
            self.ledger.check_parts()
        self.ledger.check_parts()

    def _live(self) -> bool:
        """One life of a driver. True: the run has ended."""
        self._lives += 1
        self._struck: dict[object, int] = {}
        self.ledger.gone.clear()
        self._crash_in = self.random.randint(1, 250) if self._crashes else 0
        known = self.disk.start()
        self.note("driver", self._lives)
        self.ledger.committed(known.events)
        todo = [s.shard for k, s in self.subjects.items() if not _is_finished(known.histories.get(k))]
        self.pool = SimPool(self, self._workers)
        try:
            return self._drive(todo, known)
        except Crash as crash:
            self._crashes -= 1
            lose = self.random.random() < 0.1
            self.note(f"crash: {crash}", "the manifest is lost" if lose else "")
            self.seen["manifest lost"] += lose
            self.pool.close()
            self.disk.crash(lose_manifest=lose)
            if lose:
                self.ledger.forget_manifest()
            return False

    def _drive(self, todo: Sequence[Shard], known: Known) -> bool:
        self.scheduler: Scheduler | None = None
        self.scheduler = scheduler = self._new_scheduler(
            todo,
            pool=self.pool,
            store=SimStore(self),
            clock=self.clock,
            random=self.random,
            policy=POLICY,
            histories=known.histories,
            in_flight=self._in_flight,
            trusted=known.trusted,
        )
        draining = self.random.randint(1, 200) if self._crashes and self.random.random() < 0.2 else 0
        while not scheduler.finished and scheduler.stop is None:
            self._step(scheduler)
            draining -= 1
            if draining == 0:
                self.note("drain", "")
                self._crashes -= 1
                scheduler.drain()
        self.pool.close()
        scheduler.abandon("the run ended")
        self.ledger.check_parts()
        if scheduler.stop is None and not scheduler.unfinished:
            self.ledger.check_end()
            if isinstance(self.disk, RealDisk):
                self.disk.verify()
        self.disk.crash(lose_manifest=False)
        self.seen["stale"] += scheduler.tally.stale
        self.note(scheduler.stop.kind if scheduler.stop else "ends", scheduler.stop)
        self._stops = self._stops + 1 if scheduler.stop else 0
        return not scheduler.unfinished or (self._stops >= MAX_STOPS and self._is_hopeless())

    def _is_hopeless(self) -> bool:
        """Whether the breaker may be right: nothing was ever scored, and much cannot be."""
        scored = any(self.disk.read(key)[0].scored for key in self.ledger.acked)
        bad = [s for s in self.subjects.values() if {_SCORED} not in s.fates().values()]
        all_bad, many_bad = len(bad) == len(self.subjects), len(bad) >= (POLICY.breaker_after or 0) // 2
        return not scored and (all_bad or many_bad)

    def _step(self, scheduler: Scheduler) -> None:
        self.step += 1
        _must(self.step < MAX_STEPS, "the run does not end")
        self.clock.now += self.random.choice((0.3, 0.6))
        for process in list(self.pool.members.values()):
            self._work(process)
        self._haunt()
        if self._strikes and self.random.random() < self._rate:
            self._strike()
        self.ledger.check_parts()
        self.ledger.stood = {key for key in self.subjects if self.disk.stamp(key) is not None}
        scheduler.tick(1.0)
        self.ledger.check_parts()

    def point(self, where: str, *, often: bool = False) -> None:
        """A place between two effects of the driver, where it may die."""
        if not self._crashes:
            return
        self._crash_in -= 1
        if self._crash_in <= 0 or (often and self.random.random() < 0.1):
            raise Crash(where)

    def note(self, what: str, about: object) -> None:
        """One line for the trace of a failing seed; counted too."""
        self.trace.append((self.step, what, about))
        self.seen[what] += 1

    # -- what workers do --

    def _work(self, process: Process) -> None:
        if process.dead or process.stuck or process.frozen > self.step:
            return
        if process.starting >= 0:
            process.starting -= 1
            if process.starting < 0:
                info = WorkerInfo(worker=process.worker, node=process.node, pid=1)
                self.pool.send(Ready(worker=process.worker, info=info))
            return
        if not process.jobs or (process.rests < 3 and self.random.random() < 0.3):
            process.rests += 1
            return
        process.rests = 0
        job = self.random.choice(list(process.jobs.values())) if len(process.jobs) > 1 else _first(process.jobs)
        if job.lease.probe is not None and not job.lease.probe.whole:
            self._probe(process, job)
        else:
            self._advance(process, job)

    def _probe(self, process: Process, job: Job) -> None:
        lease, subject = job.lease, self.subjects[job.lease.key]
        assert lease.probe is not None
        offset = lease.probe.offset
        if offset is None:
            if self._stumbles(process, job, subject):
                return
            process.read = lease.key
        else:
            _must(process.read == lease.key, f"{process.worker} is asked for a document of {lease.key} unread")
            if self._is_lethal(process, subject, [offset]) or self._hiccups(process, job, subject, 0.2):
                return
        del process.jobs[lease.key]
        self.pool.send(
            Probed(worker=process.worker, key=lease.key, attempt=lease.attempt, offset=lease.probe.offset),
            self._late(),
        )

    def _advance(self, process: Process, job: Job) -> None:
        """One phase of a shard further."""
        lease, subject = job.lease, self.subjects[job.lease.key]
        left = self._left(lease, subject)
        match job.phase:
            case Phase.READ:
                if self._stumbles(process, job, subject):
                    return
                self._report(process, Progress(worker=process.worker, key=lease.key, attempt=lease.attempt, keys=0))
            case Phase.SCORE:
                single = lease.probe is not None and lease.probe.single
                if self._is_lethal(process, subject, left, crowd=not single and len(left) > 1):
                    return
                if left and not lease.trusted and all(subject.natures[o] is Nature.FAILS for o in left):
                    self._fail(process, job, _error("NonFinite", Stage.SCORE), barren=True)
                    return
                self._report(process, Progress(worker=process.worker, key=lease.key, attempt=lease.attempt, keys=1))
            case Phase.WRITE:
                job.verdict = self._publish(process, lease, subject)
                if self._hiccups(process, job, subject, 0.3):
                    return  # the name is taken, but the directory could not be synced
            case Phase.REPORT:
                assert job.verdict is not None
                footer, adopted = job.verdict
                del process.jobs[lease.key]
                done = Done(
                    worker=process.worker, key=lease.key, attempt=lease.attempt, footer=footer, adopted=adopted
                )
                self._report(process, done)
                return
        job.phase = Phase(job.phase + 1)

    def _left(self, lease: Lease, subject: Subject) -> list[int]:
        convicted = {c.offset for c in lease.probe.convicted} if lease.probe else set()
        return [offset for offset in subject.natures if offset not in convicted]

    def _stumbles(self, process: Process, job: Job, subject: Subject) -> bool:
        """Reading the shard: whether it ends the attempt."""
        if subject.ill is Ill.COLD:
            self._end(process, Loss.PROCESS)
        elif subject.ill is Ill.PERMANENT:
            self._fail(process, job, _error("ShardUnreadable", Stage.READ))
        elif subject.ill is Ill.BROKEN:
            self._fail(process, job, _error("OSError", Stage.READ))
        else:
            return self._hiccups(process, job, subject, 0.5)
        return True

    def _hiccups(self, process: Process, job: Job, subject: Subject, chance: float) -> bool:
        if not subject.hiccups or self.random.random() > chance:
            return False
        subject.hiccups -= 1
        self._fail(process, job, _error("OSError", Stage.READ))
        return True

    def _is_lethal(
        self, process: Process, subject: Subject, docs: Sequence[int], *, crowd: bool | None = None
    ) -> bool:
        """A forward pass over `docs`: whether it ends the process. `crowd` None: a document alone."""
        natures = [subject.natures[offset] for offset in docs]
        if Nature.HANGS in natures:
            process.stuck = True
            self.note("hangs", process.worker)
        elif Nature.EATS in natures:
            self._end(process, Loss.MEMORY)
        elif Nature.KILLS in natures or self._kills_whole(subject, natures, crowd):
            self._end(process, Loss.PROCESS)
        else:
            return False
        return True

    def _kills_whole(self, subject: Subject, natures: Sequence[Nature], crowd: bool | None) -> bool:
        return crowd is not None and (subject.ill is Ill.DOOMED or (crowd and Nature.CROWD in natures))

    def _publish(self, process: Process, lease: Lease, subject: Subject) -> tuple[Footer, bool]:
        shard = subject.shard
        left = self._left(lease, subject)
        scored = [offset for offset in left if subject.natures[offset] is not Nature.FAILS]
        dead = [o for o in subject.natures if o not in scored]
        convicted = {c.offset: str(c.error.stage) for c in lease.probe.convicted} if lease.probe else {}
        footer = replace(
            self.disk.blank(shard),
            scored=len(scored),
            dead=len(dead),
            failures=tuple(_failure(shard, offset, Stage(convicted.get(offset, "score"))) for offset in dead),
            attempt=lease.attempt,
            worker=process.worker,
            attempts=lease.charged,
        )
        verdict = self.disk.publish(shard, footer, scored)
        what = f"{'late ' if process in self._zombies else ''}{'adopted' if verdict[1] else 'publish'}"
        self.note(what, (process.worker, lease.key, lease.attempt))
        return verdict

    def _fail(self, process: Process, job: Job, error: ErrorReport, *, barren: bool = False) -> None:
        lease = job.lease
        del process.jobs[lease.key]
        if not barren:
            self.ledger.failures.add((lease.key, lease.attempt))
        failed = Failed(worker=process.worker, key=lease.key, attempt=lease.attempt, error=error, barren=barren)
        self._report(process, failed)

    def _report(self, process: Process, event: Progress | Done | Failed) -> None:
        """To the driver, if there is one that could hear it; perhaps twice, perhaps the second time late."""
        if process in self._zombies and self.random.random() < 0.5:
            return
        self.pool.send(event, self._late())
        if self.random.random() < self._doubles:
            self.pool.send(event, self.random.randint(0, 10))

    def _late(self) -> int:
        return self.random.randint(0, self._delay)

    def _end(self, process: Process, loss: Loss) -> None:
        """A process dies of what it does."""
        if process in self._zombies:
            process.dead = True
        else:
            self.pool.die(process, loss)

    # -- processes that nobody counts on any more --

    def outlive(self, process: Process) -> None:
        """Its driver has given it up. Some live on for a while, and may publish."""
        whole = {k: j for k, j in process.jobs.items() if j.lease.probe is None or j.lease.probe.whole}
        if whole and not process.stuck and not process.dead and self.random.random() < 0.7:
            process.jobs = whole
            process.frozen = self.step + self.random.randint(0, 60)
            self._zombies.append(process)

    def _haunt(self) -> None:
        for process in list(self._zombies):
            self._work(process)
            if process.dead or process.stuck or not process.jobs:
                self._zombies.remove(process)

    def race(self) -> None:
        """In the very middle of a tick somebody whom the driver believes dead publishes."""
        if self._zombies and self.random.random() < 0.3:
            process = self.random.choice(self._zombies)
            process.frozen = 0
            for _ in range(40):
                if process.dead or process.stuck or not process.jobs:
                    return
                if _first(process.jobs).phase is Phase.REPORT:
                    return
                self._work(process)

    # -- what strikes from outside --

    def _strike(self) -> None:
        self._strikes -= 1
        alive = [p for p in self.pool.members.values() if not p.dead and not p.stuck]
        if not alive:
            return
        searched = [p for p in alive if any(job.lease.probe for job in p.jobs.values())]
        process = self.random.choice(searched if searched and self.random.random() < 0.5 else alive)
        blows = (self._kill, self._kill, self._freeze, self._freeze, self._node, self._device, self._away)
        blow = self.random.choice(blows)
        blow(process)

    def _kill(self, process: Process) -> None:
        if process.starting >= 0 and self.random.random() < 0.3:
            process.dead = True
            self.pool.send(Refused(worker=process.worker, error=_error("ImportError", Stage.WORKER), fatal=False))
        elif self.spares(process):
            self.pool.die(process, self.random.choice((Loss.PROCESS, Loss.PROCESS, Loss.MEMORY)))

    def _freeze(self, process: Process) -> None:
        if self.spares(process):
            process.frozen = self.step + self.random.randint(1, 60)
            self.note("frozen", (process.worker, process.frozen))

    def _node(self, process: Process) -> None:
        for other in list(self.pool.members.values()):
            if other.node == process.node and not other.dead:
                self.pool.die(other, Loss.NODE)

    def _device(self, process: Process) -> None:
        """A CUDA error: the worker says so and ends itself."""
        if process.jobs:
            job = _first(process.jobs)
            self.ledger.bury(process)
            self._fail(process, job, _error("DeviceBroken", Stage.SCORE))
        self.pool.die(process, Loss.NODE)

    def _away(self, process: Process) -> None:
        """The driver itself is suspended for a while."""
        self.clock.now += 60.0
        self.note("away", "")

    def spares(self, process: Process) -> bool:
        """Whether to strike. Blame is confirmed by a second death on the same question; no design can tell
        two outside kills on it from a killer. So a question about one document is struck once in a driver's
        life; reading the shard, and scoring all of it, twice."""
        view = self.scheduler.workers.get(process.worker) if self.scheduler else None
        for key, lease in view.held.items() if view else ():
            if lease.probe is not None:
                question = (key, lease.probe.offset, lease.probe.whole, lease.probe.single)
                self._struck[question] = self._struck.get(question, 0) + 1
                if self._struck[question] > (2 if lease.probe.offset is None else 1):
                    return False
        return True

    # -- what a person reads --

    def story(self) -> str:
        """The last steps."""
        return "\n".join(f"{step:5d} {what:14s} {_short(about)}" for step, what, about in self.trace)


def _first(jobs: Mapping[ShardKey, Job]) -> Job:
    return next(iter(jobs.values()))


def _is_finished(history: History | None) -> bool:
    return history is not None and history.state in _FINISHED


def _error(name: str, stage: Stage) -> ErrorReport:
    return ErrorReport(
        error_type=name, bases=(name, "Exception"), message=f"planted {name}", traceback="", stage=stage
    )


def _failure(shard: Shard, offset: int, stage: Stage) -> Failure:
    row = shard.first_row + offset
    return Failure(row=row, doc_id=f"d{row}", stage=stage, error_type="Planted", message="", traceback="")


def _short(about: object) -> str:
    match about:
        case Event():
            key = _key((about.shard_id, about.generation))
            return f"{about.kind} {key} attempt {about.attempt} {about.worker} {about.error_type}"
        case Lease():
            return f"{_key(about.key)} attempt {about.attempt} {_probe(about)}"
        case Progress() | Probed() | Done() | Failed():
            error = f" {about.error.error_type}" if isinstance(about, Failed) else ""
            return f"{type(about).__name__} {about.worker} {_key(about.key)} attempt {about.attempt}{error}"
        case Died():
            return f"Died {about.worker} {about.loss}"
        case Ready() | Refused():
            return f"{type(about).__name__} {about.worker}"
        case Footer():
            return f"{_key(about.key)} {about.scored} scored, {about.dead} dead"
        case (str(), int()) if len(about[0]) == 32:
            return _key(about)
        case tuple():
            return " ".join(_short(item) for item in about)
        case _:
            return str(about)


def _key(key: ShardKey) -> str:
    return f"{key[0][:4] if key[0][:4] != '0000' else key[0][-4:]}.g{key[1]}"


def _probe(lease: Lease) -> str:
    probe = lease.probe
    if probe is None:
        return ""
    if probe.whole:
        return f"whole{' single' if probe.single else ''} without {[c.offset for c in probe.convicted]}"
    return f"probe {probe.offset}"


# -- running it ----------------------------------------------------------------------------------------


@contextmanager
def _root(real: bool) -> Iterator[Path | None]:
    if not real:
        yield None
        return
    with tempfile.TemporaryDirectory(prefix="rescore-simulation-") as folder:
        yield Path(folder)


def simulate(seed: int, *, real: bool = False, scheduler: Callable[..., Scheduler] = Scheduler) -> str | None:
    """What went wrong with a seed, its last steps, and how to see it again; None if all is well."""
    with _root(real) as root:
        simulation = Simulation(seed, root=root, scheduler=scheduler)
        try:
            simulation.run()
        except Exception as e:
            name = "" if isinstance(e, Violation) else f"{type(e).__name__}: "
            again = f"python -m tests.simulation --seed {seed}{' --real' if real else ''}"
            return f"{simulation.story()}\nseed {seed}: {name}{e}\nreplay: {again}"
    return None


def first_failure(seeds: range, **how: Any) -> tuple[int, str] | None:
    """The first seed that fails, and what is to be said of it."""
    for seed in seeds:
        found = simulate(seed, **how)
        if found is not None:
            return seed, found
    return None


def main(arguments: Sequence[str] | None = None) -> int:
    """Try many seeds, or replay one."""
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--seed", type=int, help="replay this one")
    parser.add_argument("--seeds", type=int, default=2000, help="try so many")
    parser.add_argument("--start", type=int, default=0, help="from this one on")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--real", action="store_true", help="on the real manifest and real parts")
    args = parser.parse_args(arguments)
    if args.seed is not None:
        found = simulate(args.seed, real=args.real)
        print(found or f"seed {args.seed}: ok")
        return int(found is not None)
    begun, chunk = time.monotonic(), 250
    starts = range(args.start, args.start + args.seeds, chunk)
    chunks = [range(n, min(n + chunk, args.start + args.seeds)) for n in starts]
    failed = 0
    with ProcessPoolExecutor(args.jobs) as executor:
        for number, found in enumerate(executor.map(partial(first_failure, real=args.real), chunks), 1):
            if found is not None:
                failed += 1
                print(found[1] if failed == 1 else found[1].split("\n", 40)[-1], flush=True)
            elif number % 40 == 0:
                print(f"{chunks[number - 1].stop - args.start:,} seeds", flush=True)
    seconds = time.monotonic() - begun
    print(f"{args.seeds:,} seeds in {seconds:.1f} s, {failed} of {len(chunks)} chunks with a failure")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
