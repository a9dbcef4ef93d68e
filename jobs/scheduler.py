"""The scheduler: collect, judge, lease, record, submit. Pure but for its `Pool`, `Store` and `Clock`.

One tick is one transaction: what the workers reported, what follows from it and what is leased next are
committed together, and only then are the new leases sent. A driver that dies in between leaves leases
that nobody works on, never work that nobody knows of.
"""

from __future__ import annotations

import heapq
import logging
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import replace
from random import Random

from jobs.isolation import Isolation
from jobs.protocol import (
    Clock,
    Died,
    Done,
    ErrorReport,
    Failed,
    Lease,
    Loss,
    Pool,
    PoolEvent,
    Probed,
    Progress,
    Ready,
    Refused,
    Store,
    WorkerId,
    WorkerInfo,
)
from jobs.retry import RetryPolicy, Verdict, backoff, classify, exhausted, streak_limit, too_many_dead
from jobs.spans import Spans
from jobs.state import (
    Charge,
    Hopeless,
    Judged,
    Stop,
    StopKind,
    Tally,
    WorkerView,
    most_common,
    spent,
    unreadable,
    whole_failure,
)
from shards.types import (
    CHARGE_RETURNED,
    Event,
    EventKind,
    Failure,
    Footer,
    History,
    Shard,
    ShardKey,
    ShardState,
    Stage,
)

log = logging.getLogger("rescore")

_MAX_MEMORY_KILLS = 2
_MAX_VOIDED = 3
"""Leases of one shard that drivers took with them when they died, before the shard is searched."""


class Scheduler:
    """Drives `shards` to done or dead on the workers of `pool`.

    `histories` is what the manifest knows of them from earlier runs. `trusted` says that the ranker has
    already scored something. Call `tick` until `finished`; then, or after `stop` is set, `abandon`.
    """

    def __init__(
        self,
        shards: Sequence[Shard],
        *,
        pool: Pool,
        store: Store,
        clock: Clock,
        random: Random,
        policy: RetryPolicy,
        histories: Mapping[ShardKey, History] | None = None,
        in_flight: int = 2,
        trusted: bool = False,
    ) -> None:
        self._pool, self._store, self._clock, self._random = pool, store, clock, random
        self._policy, self._in_flight = policy, in_flight
        self._shards = {shard.key: shard for shard in shards}
        fresh = History(state=ShardState.PENDING)
        self._histories = {key: (histories or {}).get(key, fresh) for key in self._shards}
        self._losses: dict[ShardKey, list[Loss]] = {}
        self._untried = Spans([s for s in shards if self._is_untried(s)])
        self._waiting: list[tuple[float, int, ShardKey]] = []
        self._suspects: deque[ShardKey] = deque()
        self._isolations: dict[ShardKey, Isolation] = {}
        self._gone: set[WorkerId] = set()
        self._unexplained = self._deaths = 0
        self._asks: dict[WorkerId, Lease] = {}
        self._barren: deque[ShardKey] = deque()
        self._unfinished = set(self._shards)
        self._events: list[Event] = []
        self._streak = 0
        self._streak_errors: deque[ErrorReport] = deque(maxlen=100)
        self._charges: list[Charge] = []
        self._hopeless: dict[ShardKey, Hopeless] = {}
        self._judged = Judged()
        self._start_failures = 0
        self._started = False
        self._last_tick = clock.monotonic()
        self.workers: dict[WorkerId, WorkerView] = {}
        self.tally = Tally()
        self.trusted = trusted
        self.draining = False
        self.stop: Stop | None = None
        for shard in shards:
            self._queue_again(shard)

    def _is_untried(self, shard: Shard) -> bool:
        history = self._histories[shard.key]
        troubled = history.failed or history.died or history.voided >= _MAX_VOIDED
        return not (troubled or shard.unreadable)

    def _queue_again(self, shard: Shard) -> None:
        """At the start: what earlier runs had trouble with does not go through the ordinary spans."""
        history = self._histories[shard.key]
        if shard.unreadable:
            self._bury(shard, unreadable(shard))
        elif exhausted(history, self._policy):
            self._bury(shard, spent(history))
        elif history.died or history.voided >= _MAX_VOIDED:
            if history.died > 1 or history.voided >= _MAX_VOIDED:
                self._isolate(shard)
            self._suspects.append(shard.key)
        elif history.failed:
            self._wait(shard.key, 0.0)

    # -- what the driver sees ------------------------------------------------------------------------

    @property
    def finished(self) -> bool:
        """Nothing is left to do; or nothing is in flight and nothing new may be leased."""
        return not self._unfinished or (self.draining and not self.leased)

    @property
    def leased(self) -> int:
        """Shards in flight."""
        return sum(len(worker.held) for worker in self.workers.values())

    @property
    def unfinished(self) -> int:
        """Shards that are neither done nor dead."""
        return len(self._unfinished)

    @property
    def keys_in_flight(self) -> int:
        """Keys that went through a forward pass of a shard that is not done yet."""
        return sum(sum(worker.progress.values()) for worker in self.workers.values())

    def unfinished_docs(self) -> int:
        """Documents of the shards that are neither done nor dead."""
        return sum(self._shards[key].docs for key in self._unfinished)

    def drain(self) -> None:
        """Lease nothing more; what is in flight may finish."""
        self.draining = True

    def abandon(self, reason: str) -> None:
        """Give up what is in flight, charged to nobody, and record it."""
        for worker in self.workers.values():
            for lease in list(worker.held.values()):
                self._record(EventKind.RELEASED, lease, worker=worker.info, message=reason)
            worker.held.clear()
            worker.progress.clear()
        self._give_back(reason)
        self._commit()

    # -- one tick ------------------------------------------------------------------------------------

    def tick(self, timeout_s: float = 1.0) -> None:
        """Collect, judge, lease, record, submit. Waits at most `timeout_s` for something to happen."""
        for event in self._pool.poll(timeout_s):
            self._handle(event)
        self._expire(timeout_s)
        self._settle()
        leases = [] if self.draining or self.stop else self._assign()
        self._commit()
        asks, self._asks = self._asks, {}
        for worker, lease in [*asks.items(), *leases]:
            self._pool.submit(worker, lease)

    def _handle(self, event: PoolEvent) -> None:
        match event:
            case Ready():
                self._start_failures, self._started = 0, True
                self.workers[event.worker] = WorkerView(info=event.info, since=self._clock.monotonic())
            case Refused():
                self._on_refused(event)
            case Died():
                self._on_died(event)
            case Progress() | Probed() | Done() | Failed():
                self._on_report(event)

    def _on_report(self, event: Progress | Probed | Done | Failed) -> None:
        worker = self.workers.get(event.worker)
        lease = worker.held.get(event.key) if worker else None
        if worker is None or lease is None or not _answers(event, lease):
            # A zombie's or an old attempt's. Its part, if it wrote one, is found by whoever tries again.
            self.tally.stale += 1
            log.info("refused a stale report of %s: %s attempt %d", event.worker, event.key, event.attempt)
            return
        worker.deadline = self._clock.monotonic() + self._policy.lease_s
        match event:
            case Progress():
                worker.progress[event.key] = event.keys
            case Probed():
                self._ask_again(event.worker, worker, lease)
            case Done():
                self._let_go(worker, lease)
                worker.keys += event.footer.expected
                worker.shards += 1
                self.tally.truncated += event.truncated
                for stage, seconds in event.seconds.items():
                    worker.seconds[stage] = worker.seconds.get(stage, 0.0) + seconds
                self._done(lease.shard, event.footer, lease.attempt, worker.info, adopted=event.adopted)
            case Failed():
                self._let_go(worker, lease)
                self._on_failed(event, lease, worker.info)

    def _done(
        self, shard: Shard, footer: Footer, attempt: int, worker: WorkerInfo | None, *, adopted: bool
    ) -> None:
        kind = EventKind.DEAD if footer.whole else EventKind.DONE
        self._events.append(
            Event(
                kind=kind,
                shard_id=shard.shard_id,
                generation=shard.generation,
                attempt=attempt,
                worker=worker.worker if worker else footer.worker,
                node=worker.node if worker else "",
                footer=footer,
                adopted=adopted,
            )
        )
        self._unfinished.discard(shard.key)
        self._isolations.pop(shard.key, None)
        self.tally.scored += footer.scored
        self.tally.dead += footer.dead
        self.tally.adopted += adopted
        if footer.whole:
            self.tally.shards_dead += 1
        else:
            self.tally.shards_done += 1
        self._mind_dead(shard, footer)
        if footer.scored:
            self._on_success()

    def _on_failed(self, event: Failed, lease: Lease, worker: WorkerInfo) -> None:
        if lease.key in self._isolations:
            self._isolations[lease.key].interrupted()  # whoever gets it next has not read it yet
        if event.barren:
            self._barren.append(lease.key)
            self._record(EventKind.RELEASED, lease, worker=worker, error=event.error)
            self._mind_streak(event.error, what="every document of a shard failed while scoring")
            return
        verdict = classify(event.error, self._policy.verdicts)
        if verdict is Verdict.FATAL:
            kind = StopKind.REFUSED if "RankerError" in event.error.bases else StopKind.FATAL
            self._record(EventKind.RELEASED, lease, worker=worker, error=event.error)
            self._halt(kind, event.error, event.error.message)
            return
        if verdict is Verdict.INFRASTRUCTURE:
            self._lost(lease, worker, event.error)
            return
        history = replace(self._histories[lease.key], failed=self._histories[lease.key].failed + 1)
        self._histories[lease.key] = history
        self._charge(EventKind.FAILED, lease, worker, event.error)
        if verdict is Verdict.PERMANENT:
            self._give_up(lease.shard, event.error, worker=worker.worker)
        elif not exhausted(history, self._policy):
            self._try_again(lease.key)
        elif event.error.stage is Stage.WRITE and event.error.errno is not None:
            # The documents have their scores, and the disk will not take them: no dead letters for that.
            self._halt(StopKind.FATAL, event.error, event.error.message)
        else:
            self._give_up(lease.shard, event.error, worker=worker.worker, passing=True)
        self._mind_streak(event.error, what="shard after shard failed")

    # -- the circuit breaker -------------------------------------------------------------------------

    def _on_success(self) -> None:
        """Documents were scored: the ranker works, and what failed before failed by itself."""
        self.trusted = True
        self._streak = 0
        self._streak_errors.clear()
        self._charges.clear()
        self._bury_hopeless()

    def _mind_streak(self, error: ErrorReport, *, what: str) -> None:
        """Failures in a row, and nothing has ever succeeded."""
        self._streak += 1
        self._streak_errors.append(error)
        limit = streak_limit(self._policy, trusted=False)
        if not self.trusted and limit is not None and self._streak >= limit:
            cause, count = most_common(self._streak_errors)
            self._halt(
                StopKind.BREAKER,
                cause,
                f"{what}, {self._streak} in a row and none succeeded ({count} by this cause)",
            )

    def _mind_dead(self, shard: Shard, footer: Footer) -> None:
        """The share of the dead among what was judged."""
        if shard.generation:
            return
        judged = self._judged
        judged.add(footer)
        if self._unfinished and too_many_dead(
            dead=judged.dead, judged=judged.keys, shards=judged.shards, policy=self._policy
        ):
            name, count = judged.causes.most_common(1)[0]
            self._halt(
                StopKind.BREAKER,
                judged.samples[name],
                f"{judged.dead:,} of the {judged.keys:,} documents judged in this run are dead, more than "
                f"retry.max_dead_fraction ({self._policy.max_dead_fraction:g}) lets pass; {count:,} of them",
            )

    def _give_up(self, shard: Shard, error: ErrorReport, *, worker: str, passing: bool = False) -> None:
        """The shard's budget is spent: it is dead, unless its neighbours are about to show that it is not
        to blame. `passing`: by something that might have passed, which a whole storage system can have."""
        failure = whole_failure(error)
        limit = streak_limit(self._policy, trusted=self.trusted)
        if limit is None or (self.trusted and not passing):
            self._bury(shard, failure, worker=worker)
            return
        self._hopeless[shard.key] = Hopeless(failure, worker)
        if len(self._hopeless) >= limit:
            cause, count = most_common([item.failure for item in self._hopeless.values()])
            self._halt(
                StopKind.BREAKER,
                cause,
                f"{len(self._hopeless)} shards in a row failed for good and none succeeded ({count} by this cause)",
            )

    def _settle(self) -> None:
        """Where nothing is left but shards that failed, no neighbour can speak for them any more."""
        if self.stop is not None or len(self._hopeless) + len(self._barren) < len(self._unfinished):
            return
        if self._hopeless and not self._barren:
            self._bury_hopeless()
        elif self._barren and not self.trusted:
            cause, _ = most_common(self._streak_errors)
            self._halt(StopKind.BREAKER, cause, "every document of all shards that are left failed while scoring")

    def _bury_hopeless(self) -> None:
        hopeless, self._hopeless = self._hopeless, {}
        for key, item in hopeless.items():
            self._bury(self._shards[key], item.failure, worker=item.worker)

    def _charge(self, kind: EventKind, lease: Lease, worker: WorkerInfo, error: ErrorReport) -> None:
        self._record(kind, lease, worker=worker, error=error)
        self._charges.append(Charge(kind, lease, worker))

    def _give_back(self, reason: str) -> None:
        """After a stop: what was charged since the last success; a plain rerun then has a full budget. Else,
        where shards are hopeless and not yet dead: the last try of each, so that the next run can say why."""
        charges = [charge for charge in self._charges if charge.lease.key in self._unfinished]
        if self.stop is None:
            charges = list(
                {charge.lease.key: charge for charge in charges if charge.lease.key in self._hopeless}.values()
            )
        for charge in charges:
            self._events.append(
                Event(
                    kind=EventKind.RELEASED,
                    shard_id=charge.lease.shard.shard_id,
                    generation=charge.lease.shard.generation,
                    attempt=charge.lease.attempt,
                    worker=charge.worker.worker,
                    node=charge.worker.node,
                    error_type=CHARGE_RETURNED[charge.kind],
                    message=f"given back: {reason}",
                )
            )
        self._charges.clear()
        self._hopeless.clear()

    def _halt(self, kind: StopKind, cause: ErrorReport | Failure, message: str) -> None:
        if self.stop is None:
            words = "" if message == cause.message else f": {cause.error_type}: {cause.message}"
            self.stop = Stop(kind=kind, message=message + words, traceback=cause.traceback)

    # -- workers that go -----------------------------------------------------------------------------

    def _on_refused(self, event: Refused) -> None:
        if event.last and not self.workers:
            self._halt_without_nodes(event)
        elif not event.fatal:
            self._mind_starts(event.error)

    def _halt_without_nodes(self, event: Refused) -> None:
        if event.fatal and not self._started:
            self._halt(StopKind.REFUSED, event.error, event.error.message)
        else:
            self._halt(StopKind.BREAKER, event.error, f"no node is left for a worker: {event.error.message}")

    def _mind_starts(self, error: ErrorReport) -> None:
        self._start_failures += 1
        if self._start_failures >= self._policy.max_starts and not self.workers:
            self._halt(StopKind.BREAKER, error, f"{self._start_failures} workers in a row could not start")

    def _on_died(self, event: Died) -> None:
        worker = self.workers.pop(event.worker, None)
        self._untried.release(event.worker)
        error = ErrorReport(
            error_type="WorkerDied",
            bases=("WorkerDied",),
            message=f"{event.worker}{f' on node {worker.info.node[:12]}' if worker else ''}: {event.message}",
            traceback=self._store.last_words(event.worker),
            stage=Stage.WORKER,
        )
        if worker is None:
            if event.loss is not Loss.NODE:
                self._mind_starts(error)
            return
        self._mourn(worker, error, EventKind.DIED, event.loss)

    def _expire(self, timeout_s: float) -> None:
        """End the workers that made no progress within their lease."""
        now = self._clock.monotonic()
        gap, self._last_tick = now - self._last_tick, now
        if gap > 2 * timeout_s + 1.0:
            # The driver itself was away (suspended, a slow disk): nobody could renew a lease meanwhile.
            for worker in self.workers.values():
                worker.deadline += gap
        for worker_id, worker in list(self.workers.items()):
            if not worker.held or worker.deadline > now:
                continue
            self._pool.kill(worker_id)
            del self.workers[worker_id]
            self._untried.release(worker_id)
            error = ErrorReport(
                error_type="LeaseExpired",
                bases=("LeaseExpired",),
                message=f"no progress for {self._policy.lease_s:g} s; the worker was killed",
                traceback="",
                stage=Stage.WORKER,
            )
            self._mourn(worker, error, EventKind.HUNG, Loss.PROCESS)

    def _mourn(self, worker: WorkerView, error: ErrorReport, kind: EventKind, loss: Loss) -> None:
        """A worker that was ready is gone: judge each shard it held."""
        self.tally.deaths += 1
        self._deaths += loss is not Loss.NODE
        if loss is Loss.PROCESS and not any(self._is_suspect(key) for key in worker.held):
            self._unexplained += 1
        for lease in worker.held.values():
            self._judge_orphan(lease, worker.info, error, kind, loss)

    def _judge_orphan(
        self, lease: Lease, worker: WorkerInfo, error: ErrorReport, kind: EventKind, loss: Loss
    ) -> None:
        """A worker is gone: look for its part before blaming anything."""
        # It may have died after an answer and before the next question: then that one is not to blame.
        asked = self._asks.pop(worker.worker, None) is None
        footer = self._store.find(lease.shard)
        if footer is not None:
            self._done(lease.shard, footer, lease.attempt, worker, adopted=True)
        elif loss is Loss.NODE or (loss is Loss.MEMORY and lease.probe is None):
            self._lost(lease, worker, error, loss)
        else:
            self._suspect(lease, worker, error, kind, asked=asked)

    def _suspect(
        self, lease: Lease, worker: WorkerInfo, error: ErrorReport, kind: EventKind, *, asked: bool
    ) -> None:
        """A worker died with the shard. The first time it is tried again, alone on its worker; if that
        one dies too, its documents are searched."""
        key = lease.key
        self._histories[key] = history = replace(self._histories[key], died=self._histories[key].died + 1)
        if self.trusted:
            self._record(kind, lease, worker=worker, error=error)
        else:
            self._charge(kind, lease, worker, error)
        self.tally.retries += 1
        search = self._isolations.get(key)
        if search is not None:
            disturbances = self._unexplained - search.undisturbed
            goes_on = search.died(error, disturbances=disturbances, deaths=self._deaths, asked=asked)
        else:
            goes_on = True
            if history.died > 1:
                self._isolate(lease.shard)
        if goes_on and not exhausted(history, self._policy):
            self._suspects.append(key)
        else:
            self._give_up(lease.shard, error, worker=worker.worker)

    def _isolate(self, shard: Shard) -> None:
        offsets = shard.only if shard.only is not None else range(shard.rows)
        documents = [offset for offset in offsets if offset not in shard.excluded]
        self._isolations[shard.key] = Isolation(documents, undisturbed=self._unexplained, began=self._deaths)

    def _ask_again(self, worker_id: WorkerId, worker: WorkerView, lease: Lease) -> None:
        """The last probe was survived: the next question, to the same worker."""
        search = self._isolations[lease.key]
        # The accused lives: what took the worker before, nobody knows.
        self._unexplained += search.accuses
        search.survived()
        worker.held[lease.key] = lease = replace(lease, probe=search.next())
        self._asks[worker_id] = lease

    def _lost(self, lease: Lease, worker: WorkerInfo, error: ErrorReport, loss: Loss = Loss.NODE) -> None:
        """Charged to the infrastructure, not to the shard. Two memory kills look like a document, though."""
        losses = self._losses.setdefault(lease.key, [])
        losses.append(loss)
        self._record(EventKind.RELEASED, lease, worker=worker, error=error)
        if lease.key in self._isolations:
            self._isolations[lease.key].interrupted()
        if len(losses) >= self._policy.max_losses:
            self._give_up(lease.shard, error, worker=worker.worker, passing=True)
        elif losses.count(Loss.MEMORY) == _MAX_MEMORY_KILLS and lease.key not in self._isolations:
            self._isolate(lease.shard)
            self._suspects.append(lease.key)
        else:
            self._try_again(lease.key, len(losses))

    # -- leasing -------------------------------------------------------------------------------------

    def _assign(self) -> list[tuple[WorkerId, Lease]]:
        leases: list[tuple[WorkerId, Lease]] = []
        reserved = self._reserve()
        # One each before a second each: with few shards left, every worker still gets one.
        for depth in range(1, self._in_flight + 1):
            for worker_id, worker in self.workers.items():
                if len(worker.held) >= depth or worker_id in self._gone:
                    continue
                shard = self._next_shard(worker_id, worker, reserved)
                if shard is not None:
                    leases.append((worker_id, self._lease(shard, worker)))
        for worker_id in self._gone:
            del self.workers[worker_id]
        self._gone.clear()
        return leases

    def _reserve(self) -> set[WorkerId]:
        """Workers that take suspects, one at a time and nothing beside it; at most half of them."""
        busy = {w for w, view in self.workers.items() if any(self._is_suspect(k) for k in view.held)}
        room = max(1, len(self.workers) // 2) - len(busy)
        idlest = sorted((len(v.held), w) for w, v in self.workers.items() if w not in busy)
        return busy | {w for _, w in idlest[: max(0, min(room, len(self._suspects)))]}

    def _is_suspect(self, key: ShardKey) -> bool:
        return self._histories[key].died > 0 or key in self._isolations

    def _next_shard(self, worker_id: WorkerId, worker: WorkerView, reserved: set[WorkerId]) -> Shard | None:
        if worker_id in reserved:
            return self._next_suspect(worker_id, worker)
        if self._waiting and self._waiting[0][0] <= self._clock.monotonic():
            return self._shards[heapq.heappop(self._waiting)[2]]
        untried = self._untried.take(worker_id)
        if untried is None and self._barren and self.trusted:
            return self._shards[self._barren.popleft()]
        return untried

    def _next_suspect(self, worker_id: WorkerId, worker: WorkerView) -> Shard | None:
        """Alone on its worker, a suspect that kills it again takes no innocent along."""
        if worker.held or not self._suspects:
            return None
        search = self._isolations.get(self._suspects[0])
        if search is not None and search.wants_fresh and not worker.fresh:
            # What the worker did before must not be to blame for its death: it makes room for a fresh one.
            self._pool.kill(worker_id)
            self._untried.release(worker_id)
            self._gone.add(worker_id)
            return None
        return self._shards[self._suspects.popleft()]

    def _lease(self, shard: Shard, worker: WorkerView) -> Lease:
        history = self._histories[shard.key]
        history = replace(history, attempts=history.attempts + 1)
        self._histories[shard.key] = history
        lease = Lease(
            shard=shard,
            attempt=history.attempts,
            charged=history.failed + 1,
            trusted=self.trusted,
            probe=self._isolations[shard.key].next() if shard.key in self._isolations else None,
        )
        worker.fresh = False
        if not worker.held:
            worker.deadline = self._clock.monotonic() + self._policy.lease_s
        worker.held[shard.key] = lease
        self._record(EventKind.LEASED, lease, worker=worker.info)
        return lease

    def _try_again(self, key: ShardKey, failures: int | None = None) -> None:
        self.tally.retries += 1
        if self._is_suspect(key):
            self._suspects.append(key)
            return
        n = failures or max(1, self._histories[key].failed)
        self._wait(key, backoff(n, self._policy, self._random))

    def _wait(self, key: ShardKey, seconds: float) -> None:
        heapq.heappush(self._waiting, (self._clock.monotonic() + seconds, len(self._waiting), key))

    def _let_go(self, worker: WorkerView, lease: Lease) -> None:
        del worker.held[lease.key]
        worker.progress.pop(lease.key, None)

    # -- recording -----------------------------------------------------------------------------------

    def _bury(self, shard: Shard, failure: Failure, *, worker: str = "") -> None:
        """The whole shard is dead: its part says so before the manifest does."""
        history = self._histories[shard.key]
        footer = self._store.bury(
            shard, failure, attempt=history.attempts, attempts=max(1, history.failed), worker=worker
        )
        self._done(shard, footer, history.attempts, None, adopted=not footer.whole)

    def _record(
        self,
        kind: EventKind,
        lease: Lease,
        *,
        worker: WorkerInfo,
        error: ErrorReport | None = None,
        message: str = "",
    ) -> None:
        self._events.append(
            Event(
                kind=kind,
                shard_id=lease.shard.shard_id,
                generation=lease.shard.generation,
                attempt=lease.attempt,
                worker=worker.worker,
                node=worker.node,
                error_type=error.error_type if error else "",
                message=error.message if error else message,
                traceback=error.traceback if error else "",
            )
        )

    def _commit(self) -> None:
        if self._events:
            events, self._events = self._events, []
            self._store.commit(events)


def _answers(event: Progress | Probed | Done | Failed, lease: Lease) -> bool:
    """Whether the report is of this attempt, and of the question that is open."""
    if isinstance(event, Probed):
        probe = lease.probe
        asked = probe is not None and not probe.whole and probe.offset == event.offset
        return asked and lease.attempt == event.attempt
    return lease.attempt == event.attempt
