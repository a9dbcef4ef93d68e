"""The search for documents that end their process, driven with a fake pool in which they do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from random import Random

import pytest

from jobs.isolation import Isolation
from jobs.protocol import ErrorReport, Lease, Loss, Probed
from jobs.retry import RetryPolicy
from jobs.scheduler import Scheduler
from shards.types import Footer, History, Shard, ShardKey, ShardState, Stage
from tests.fakes import FakeClock, FakePool, FakeStore, a_footer, a_shard

AN_ERROR = ErrorReport(
    error_type="WorkerDied", bases=("WorkerDied",), message="killed", traceback="", stage=Stage.WORKER
)


@dataclass
class Deadly:
    """Workers that die of documents. `killers`: shard → offsets that kill alone; `crowd`: shards whose
    documents kill only in company; `cold`: shards that kill when they are read."""

    shards: Sequence[Shard]
    killers: Mapping[int, set[int]] = field(default_factory=dict)
    crowd: set[int] = field(default_factory=set)
    cold: set[int] = field(default_factory=set)
    workers: int = 1
    in_flight: int = 2
    hang: bool = False
    histories: Mapping[ShardKey, History] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.pool, self.store, self.clock = FakePool(self.workers), FakeStore(), FakeClock()
        self.answered = 0
        self.published: dict[ShardKey, Lease] = {}
        self.scheduler = Scheduler(
            self.shards,
            pool=self.pool,
            store=self.store,
            clock=self.clock,
            random=Random(1),
            policy=RetryPolicy(backoff_s=0.0, lease_s=5.0),
            histories=self.histories,
            in_flight=self.in_flight,
            trusted=True,
        )

    def run(self, ticks: int = 500) -> None:
        for _ in range(ticks):
            if self.scheduler.finished:
                self.scheduler.abandon("end")
                return
            self.clock.now += 0.1
            self.scheduler.tick(0.5)
            self._work()
        pytest.fail("the run does not end")

    def _work(self) -> None:
        """Every worker does one of its leases, the first it was given."""
        todo, self.answered = self.pool.submitted[self.answered :], len(self.pool.submitted)
        doomed: set[str] = set()
        for worker, lease in todo:
            if worker in doomed or worker in self.pool.killed:
                continue
            if self.kills(lease):
                doomed.add(worker)
                if self.hang:
                    self.clock.now += 2.0
                else:
                    self.pool.die(worker)
            elif lease.probe is not None and not lease.probe.whole:
                self.pool.say(
                    Probed(worker=worker, key=lease.key, attempt=lease.attempt, offset=lease.probe.offset)
                )
            else:
                self.published[lease.key] = lease
                self.pool.done(self.pool.submitted.index((worker, lease)), footer=self.footer(lease))

    def kills(self, lease: Lease) -> bool:
        n = self.shards.index(lease.shard)
        killers, probe = self.killers.get(n, set()), lease.probe
        if n in self.cold:
            return True
        if probe is None:
            return bool(killers) or n in self.crowd
        if probe.whole:
            left = killers - {c.offset for c in probe.convicted}
            return bool(left) or (n in self.crowd and not probe.single)
        return probe.offset in killers

    def footer(self, lease: Lease) -> Footer:
        convicted = lease.probe.convicted if lease.probe else ()
        return a_footer(lease.shard, dead=len(convicted), attempt=lease.attempt)

    def convicted(self, n: int) -> set[int]:
        lease = self.published[self.shards[n].key]
        return {c.offset for c in lease.probe.convicted} if lease.probe else set()

    def kinds(self, n: int) -> list[str]:
        return self.store.kinds(self.shards[n])


def test_isolation_one_killer_costs_one_document_and_four_deaths_at_most() -> None:
    world = Deadly([a_shard(i) for i in range(6)], killers={2: {7}})
    world.run()
    assert world.convicted(2) == {7}
    assert all(world.kinds(n)[-1] == "done" for n in range(6))
    assert world.scheduler.tally.deaths <= 4
    assert world.scheduler.tally.dead == 1


@pytest.mark.parametrize("killers", [{0, 9}, {3, 4, 5}, set(range(10))])
def test_isolation_each_further_killer_costs_two_deaths_at_most(killers: set[int]) -> None:
    world = Deadly([a_shard(0), a_shard(1)], killers={0: killers})
    world.run()
    assert world.convicted(0) == killers
    assert world.scheduler.tally.deaths <= 4 + 2 * (len(killers) - 1)


def test_isolation_neighbours_lose_no_attempt() -> None:
    world = Deadly([a_shard(i) for i in range(6)], killers={2: {7}}, in_flight=3)
    world.run()
    charged = [lease.charged for lease in world.published.values()]
    assert charged == [1] * 6
    assert all("failed" not in world.kinds(n) for n in range(6))


def test_isolation_convicted_only_on_a_fresh_worker_that_was_warmed_up() -> None:
    world = Deadly([a_shard(i) for i in range(4)], killers={0: {5}})
    world.run()
    history = [(w, lease.probe) for w, lease in world.pool.submitted]
    killer = world.shards[0].key
    deaths = [
        (w, lease.probe)
        for w, lease in world.pool.submitted
        if lease.key == killer and lease.probe and lease.probe.offset == 5
    ]
    assert len(deaths) == 2
    for worker, _ in deaths:
        mine = [probe for w, probe in history if w == worker]
        assert mine[0] is not None
        assert mine[0].offset is None
        assert all(probe is not None for probe in mine)


def test_isolation_killer_in_company_only_is_survived_at_batch_size_one() -> None:
    world = Deadly([a_shard(i) for i in range(3)], crowd={1})
    world.run()
    assert world.convicted(1) == set()
    assert world.kinds(1)[-1] == "done"
    probe = world.published[world.shards[1].key].probe
    assert probe is not None
    assert probe.single


def test_isolation_killers_alone_and_in_company_both_are_handled() -> None:
    world = Deadly([a_shard(i) for i in range(3)], killers={1: {4}}, crowd={1})
    world.run()
    assert world.convicted(1) == {4}
    assert world.kinds(1)[-1] == "done"


def test_isolation_shard_that_kills_when_it_is_read_is_dead_as_a_whole() -> None:
    world = Deadly([a_shard(i) for i in range(3)], cold={1})
    world.run()
    assert [world.kinds(n)[-1] for n in range(3)] == ["done", "dead", "done"]
    assert world.scheduler.tally.deaths <= 7


def test_isolation_hanging_document_is_found_by_the_lease() -> None:
    world = Deadly([a_shard(i) for i in range(3)], killers={1: {4}}, hang=True)
    world.run(ticks=2000)
    assert world.convicted(1) == {4}
    assert all(world.kinds(n)[-1] == "done" for n in range(3))
    assert "hung" in world.kinds(1)


def test_isolation_does_not_stop_the_rest() -> None:
    world = Deadly([a_shard(i) for i in range(60)], killers={0: {9}}, workers=2)
    done_during: list[int] = []
    while not world.scheduler.finished:
        world.clock.now += 0.1
        world.scheduler.tick(0.5)
        world._work()
        if world.kinds(0) and world.kinds(0)[-1] != "done":
            done_during.append(world.scheduler.tally.shards_done)
    assert done_during[-1] > 20


def test_isolation_worker_killed_from_outside_convicts_nobody() -> None:
    world = Deadly([a_shard(0, rows=20)])
    # Twice before the search, twice before it touches a document, once at each of two documents.
    kills: dict[object, int] = {"shard": 2, None: 2, 3: 1, 11: 1}
    for _ in range(500):
        if world.scheduler.finished:
            break
        world.clock.now += 0.1
        world.scheduler.tick(0.5)
        worker, lease = world.pool.lease()
        at = lease.probe.offset if lease.probe and not lease.probe.whole else "shard"
        if world.answered < len(world.pool.submitted) and kills.get(at, 0):
            kills[at] -= 1
            world.answered = len(world.pool.submitted)
            world.pool.die(worker)
        else:
            world._work()
    assert sum(kills.values()) == 0
    assert world.scheduler.finished
    assert world.convicted(0) == set()
    assert world.kinds(0)[-1] == "done"


@pytest.mark.parametrize(("elsewhere", "here"), [(0, 2), (3, 5)])
def test_isolation_worker_killed_from_outside_at_the_last_step_condemns_no_shard(elsewhere: int, here: int) -> None:
    search = Isolation(range(2), undisturbed=0)
    while not search.next().whole:
        search.survived()
    assert search.next().single
    deaths = [elsewhere + n for n in range(1, here + 2)]
    went_on = [search.died(AN_ERROR, disturbances=0, deaths=n) for n in deaths]
    assert went_on == [True] * here + [False]


def test_isolation_node_lost_during_the_search_accuses_nobody() -> None:
    world = Deadly([a_shard(0)], killers={0: {5}})
    lost = False
    for _ in range(500):
        if world.scheduler.finished:
            break
        world.clock.now += 0.1
        world.scheduler.tick(0.5)
        worker, lease = world.pool.lease()
        if not lost and lease.probe is not None and lease.probe.offset == 2:
            lost, world.answered = True, len(world.pool.submitted)
            world.pool.die(worker, loss=Loss.NODE)
        else:
            world._work()
    assert lost
    assert world.convicted(0) == {5}


def test_isolation_two_memory_kills_start_a_search_and_the_eater_is_found() -> None:
    world = Deadly([a_shard(0), a_shard(1)], killers={0: {5}})
    die = world.pool.die
    world.pool.die = lambda worker: die(worker, loss=Loss.MEMORY)  # type: ignore[method-assign,misc,assignment]
    world.run()
    assert world.convicted(0) == {5}
    assert world.kinds(1)[-1] == "done"


@pytest.mark.parametrize("history", [{"died": 2}, {"voided": 3}])
def test_isolation_resumed_suspect_is_searched_again(history: dict[str, int]) -> None:
    shards = [a_shard(0), a_shard(1)]
    before = History(state=ShardState.PENDING, attempts=3, **history)
    world = Deadly(shards, killers={0: {5}}, histories={shards[0].key: before})
    world.run()
    assert world.convicted(0) == {5}


def test_isolation_redriven_documents_only_are_searched() -> None:
    shard = replace(a_shard(0), generation=1, only=(2, 5, 8))
    world = Deadly([shard], killers={0: {5}})
    world.run()
    assert world.convicted(0) == {5}
    asked = {lease.probe.offset for _, lease in world.pool.submitted if lease.probe and not lease.probe.whole}
    assert asked == {None, 2, 5, 8}
