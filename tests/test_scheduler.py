"""The scheduler, driven with a fake pool and a fake clock."""

from __future__ import annotations

import errno
from collections.abc import Mapping, Sequence
from dataclasses import replace
from random import Random

import pytest

from jobs.protocol import Died, Done, ErrorReport, Lease, Loss, Probed, Refused
from jobs.retry import RetryPolicy, table
from jobs.scheduler import Scheduler
from jobs.state import StopKind
from shards.types import EventKind, History, Shard, ShardKey, ShardState, Stage
from tests.fakes import FakeClock, FakePool, FakeStore, a_failure, a_footer, a_shard, an_error


class Bench:
    """A scheduler and its surroundings."""

    def __init__(
        self,
        shards: Sequence[Shard],
        *,
        workers: int = 1,
        in_flight: int = 1,
        policy: RetryPolicy | None = None,
        histories: Mapping[ShardKey, History] | None = None,
        trusted: bool = True,
    ) -> None:
        self.pool, self.store, self.clock = FakePool(workers), FakeStore(), FakeClock()
        self.shards = shards
        self.scheduler = Scheduler(
            shards,
            pool=self.pool,
            store=self.store,
            clock=self.clock,
            random=Random(7),
            policy=policy or RetryPolicy(backoff_s=0.0),
            histories=histories,
            in_flight=in_flight,
            trusted=trusted,
        )

    def tick(self, after_s: float = 0.0) -> None:
        self.clock.now += after_s
        self.scheduler.tick(0.5)

    def leases(self) -> list[Lease]:
        return [lease for _, lease in self.pool.submitted]


def test_scheduler_all_shards_scored_finishes_with_one_lease_and_one_ack_each() -> None:
    bench = Bench([a_shard(i) for i in range(5)])
    bench.tick()
    while not bench.scheduler.finished:
        bench.pool.done()
        bench.tick()
    assert [bench.store.kinds(s) for s in bench.shards] == [["leased", "done"]] * 5
    assert bench.scheduler.tally.scored == 50


def test_scheduler_lease_is_committed_before_it_is_sent() -> None:
    bench = Bench([a_shard(0)])
    sent_when: list[int] = []
    submit = bench.pool.submit
    bench.pool.submit = lambda worker, lease: (sent_when.append(len(bench.store.commits)), submit(worker, lease))[1]  # type: ignore[method-assign]
    bench.tick()
    assert sent_when == [1]
    assert bench.store.commits[0][0].kind is EventKind.LEASED


def test_scheduler_in_flight_bounds_what_a_worker_holds() -> None:
    bench = Bench([a_shard(i) for i in range(9)], workers=2, in_flight=3)
    bench.tick()
    held = {w: sum(1 for x, _ in bench.pool.submitted if x == w) for w in ("w1", "w2")}
    assert held == {"w1": 3, "w2": 3}
    bench.tick()
    assert len(bench.pool.submitted) == 6


def test_scheduler_few_shards_every_worker_gets_one_before_any_gets_two() -> None:
    bench = Bench([a_shard(i) for i in range(2)], workers=2, in_flight=2)
    bench.tick()
    assert {w for w, _ in bench.pool.submitted} == {"w1", "w2"}


def test_scheduler_report_of_an_old_attempt_is_refused() -> None:
    bench = Bench([a_shard(0)])
    bench.tick()
    bench.pool.fail()
    bench.tick()
    stale = bench.leases()[0]
    bench.pool.say(
        Done(worker="w1", key=stale.key, attempt=stale.attempt, footer=a_footer(stale.shard), adopted=False)
    )
    bench.tick()
    assert bench.store.kinds(stale.shard) == ["leased", "failed", "leased"]
    assert bench.scheduler.tally.stale == 1


def test_scheduler_duplicate_report_is_refused() -> None:
    bench = Bench([a_shard(0)])
    bench.tick()
    bench.pool.done()
    bench.pool.done()
    bench.tick()
    assert bench.store.kinds(bench.shards[0]) == ["leased", "done"]
    assert bench.scheduler.tally.scored == 10


def test_scheduler_late_report_of_a_killed_worker_is_refused() -> None:
    bench = Bench([a_shard(0)], policy=RetryPolicy(lease_s=10.0, backoff_s=0.0))
    bench.tick()
    bench.tick(after_s=1.0)
    for _ in range(10):
        bench.tick(after_s=1.0)
    assert bench.pool.killed == ["w1"]
    bench.pool.done(0)
    bench.tick()
    assert bench.scheduler.tally.stale == 1
    assert not bench.scheduler.finished


def test_scheduler_transient_failure_is_tried_again_after_its_backoff() -> None:
    bench = Bench([a_shard(0)], policy=RetryPolicy(backoff_s=100.0, backoff_max_s=100.0))
    bench.tick()
    bench.pool.fail()
    bench.tick()
    assert len(bench.pool.submitted) == 1
    for _ in range(100):
        bench.tick(after_s=1.0)
    assert [lease.attempt for lease in bench.leases()] == [1, 2]
    assert bench.leases()[1].charged == 2


def test_scheduler_attempts_spent_shard_is_buried_and_its_part_comes_first() -> None:
    bench = Bench([a_shard(0)], policy=RetryPolicy(max_attempts=3, backoff_s=0.0))
    bench.tick()
    for _ in range(3):
        bench.pool.fail()
        bench.tick()
    assert bench.store.kinds(bench.shards[0]) == ["leased", "failed"] * 3 + ["dead"]
    assert bench.store.parts[bench.shards[0].key].whole
    assert bench.scheduler.finished


def test_scheduler_permanent_failure_is_dead_at_once() -> None:
    bench = Bench([a_shard(0)])
    bench.tick()
    bench.pool.fail(error=an_error("ShardUnreadable"))
    bench.tick()
    assert bench.store.kinds(bench.shards[0]) == ["leased", "failed", "dead"]


def test_scheduler_worker_died_its_shards_are_suspects_and_go_alone() -> None:
    bench = Bench([a_shard(i) for i in range(6)], workers=1, in_flight=2)
    bench.tick()
    held = [lease.shard for lease in bench.leases()]
    bench.pool.die("w1")
    bench.tick()
    assert [bench.store.kinds(s)[-1] for s in held] == ["leased", "died"]
    worker, lease = bench.pool.lease()
    assert worker == "w2"
    assert lease.shard == held[0]
    assert len(bench.pool.submitted) == 3


def test_scheduler_worker_died_charges_no_attempt() -> None:
    bench = Bench([a_shard(0)])
    bench.tick()
    bench.pool.die("w1")
    bench.tick()
    assert [(lease.attempt, lease.charged) for lease in bench.leases()] == [(1, 1), (2, 1)]


def test_scheduler_deaths_of_all_runs_spent_shard_is_dead_and_neighbours_are_scored() -> None:
    bench = Bench([a_shard(i) for i in range(4)], in_flight=2, policy=RetryPolicy(max_deaths=3, backoff_s=0.0))
    killer = bench.shards[0]
    bench.tick()
    for _ in range(50):
        if bench.scheduler.finished:
            break
        for worker, view in list(bench.scheduler.workers.items()):
            if killer.key in view.held:
                bench.pool.die(worker)
            else:
                for n, (w, lease) in enumerate(bench.pool.submitted):
                    if w == worker and lease.key in view.held:
                        bench.pool.done(n)
        bench.tick()
    assert bench.store.kinds(killer)[-1] == "dead"
    assert [bench.store.kinds(s)[-1] for s in bench.shards[1:]] == ["done"] * 3
    assert bench.scheduler.tally.deaths == 3


def test_scheduler_suspects_leave_other_workers_to_the_rest() -> None:
    bench = Bench([a_shard(i) for i in range(8)], workers=2, in_flight=2)
    bench.tick()
    bench.pool.die("w1")
    bench.tick()
    suspects = {lease.key for w, lease in bench.pool.submitted[:4] if w == "w1"}
    others = [(w, lease) for w, lease in bench.pool.submitted[4:] if lease.key not in suspects]
    alone = [(w, lease) for w, lease in bench.pool.submitted[4:] if lease.key in suspects]
    assert len(alone) == 1
    assert all(w != alone[0][0] for w, _ in others)


def test_scheduler_worker_died_after_publishing_its_part_is_adopted() -> None:
    bench = Bench([a_shard(0)])
    bench.tick()
    bench.store.parts[bench.shards[0].key] = a_footer(bench.shards[0])
    bench.pool.die("w1")
    bench.tick()
    assert bench.store.kinds(bench.shards[0]) == ["leased", "done"]
    assert bench.store.events[-1].adopted
    assert bench.scheduler.finished


def test_scheduler_node_lost_costs_neither_attempts_nor_suspicion() -> None:
    bench = Bench([a_shard(0)])
    bench.tick()
    bench.pool.die("w1", loss=Loss.NODE)
    bench.tick()
    assert bench.store.kinds(bench.shards[0]) == ["leased", "released", "leased"]


def test_scheduler_infrastructure_budget_spent_shard_is_dead() -> None:
    bench = Bench([a_shard(0)], policy=RetryPolicy(max_losses=4, backoff_s=0.0))
    bench.tick()
    for n in range(1, 5):
        bench.pool.die(f"w{n}", loss=Loss.NODE)
        bench.tick()
    assert bench.store.kinds(bench.shards[0]) == ["leased", "released"] * 4 + ["dead"]


def test_scheduler_no_progress_ends_the_lease_and_the_worker() -> None:
    bench = Bench([a_shard(0)], policy=RetryPolicy(lease_s=10.0, backoff_s=0.0))
    bench.tick()
    for _ in range(11):
        bench.tick(after_s=1.0)
    assert bench.pool.killed == ["w1"]
    assert bench.store.kinds(bench.shards[0]) == ["leased", "hung", "leased"]


def test_scheduler_progress_renews_the_lease_for_ever() -> None:
    bench = Bench([a_shard(0)], policy=RetryPolicy(lease_s=10.0))
    bench.tick()
    for n in range(100):
        bench.pool.progress(keys=n)
        bench.tick(after_s=1.0)
    assert bench.pool.killed == []


def test_scheduler_driver_was_away_leases_are_extended_not_ended() -> None:
    bench = Bench([a_shard(0)], policy=RetryPolicy(lease_s=10.0))
    bench.tick()
    bench.tick(after_s=3600.0)
    assert bench.pool.killed == []


def test_scheduler_idle_worker_is_never_killed() -> None:
    bench = Bench([a_shard(0)], workers=2, policy=RetryPolicy(lease_s=10.0, backoff_s=0.0))
    bench.tick()
    for _ in range(30):
        bench.pool.progress()
        bench.tick(after_s=1.0)
    assert bench.pool.killed == []


def test_scheduler_barren_shards_open_the_breaker_and_charge_nobody() -> None:
    bench = Bench(
        [a_shard(i) for i in range(50)], trusted=False, policy=RetryPolicy(breaker_after=5, backoff_s=0.0)
    )
    bench.tick()
    for _ in range(5):
        bench.pool.fail(barren=True)
        bench.tick()
    assert bench.scheduler.stop is not None
    assert bench.scheduler.stop.kind is StopKind.BREAKER
    assert "it broke" in bench.scheduler.stop.message
    assert {e.kind.value for e in bench.store.events} == {"leased", "released"}
    assert not bench.store.parts


def test_scheduler_only_shard_barren_stops_at_once() -> None:
    bench = Bench([a_shard(0)], trusted=False)
    bench.tick()
    bench.pool.fail(barren=True)
    bench.tick()
    assert bench.scheduler.stop is not None


def test_scheduler_barren_shard_is_published_once_another_has_succeeded() -> None:
    bench = Bench([a_shard(0), a_shard(1)], trusted=False)
    bench.tick()
    bench.pool.fail(barren=True)
    bench.tick()
    assert bench.pool.lease()[1].shard == bench.shards[1]
    assert not bench.pool.lease()[1].trusted
    bench.pool.done()
    bench.tick()
    assert bench.pool.lease()[1].shard == bench.shards[0]
    assert bench.pool.lease()[1].trusted


def test_scheduler_shards_fail_one_after_another_breaker_opens() -> None:
    bench = Bench([a_shard(i) for i in range(50)], trusted=False)
    bench.tick()
    for _ in range(5):
        bench.pool.fail()
        bench.tick()
    assert bench.scheduler.stop is not None
    assert bench.scheduler.stop.kind is StopKind.BREAKER


def test_scheduler_disk_full_stops_the_run() -> None:
    bench = Bench([a_shard(0)])
    bench.tick()
    bench.pool.fail(error=an_error(stage=Stage.WRITE, errno=errno.ENOSPC))
    bench.tick()
    assert bench.scheduler.stop is not None
    assert bench.scheduler.stop.kind is StopKind.FATAL
    assert bench.store.kinds(bench.shards[0]) == ["leased", "released"]


def test_scheduler_ranker_refused_stops_as_the_users_mistake() -> None:
    bench = Bench([a_shard(0)], workers=0)
    error = an_error("RankerError", message="no such label")
    bench.pool.say(Refused(worker="w8", error=error, fatal=True))
    bench.tick()
    assert bench.scheduler.stop is None, "another node may take it"
    bench.pool.say(Refused(worker="w9", error=error, fatal=True, last=True))
    bench.tick()
    assert bench.scheduler.stop is not None
    assert bench.scheduler.stop.kind is StopKind.REFUSED
    assert bench.scheduler.stop.message == "no such label"


def test_scheduler_ranker_refused_where_others_have_started_stops_nothing() -> None:
    bench = Bench([a_shard(0)])
    bench.tick()
    for n in range(10):
        bench.pool.say(Refused(worker=f"w{9 + n}", error=an_error("RankerError"), fatal=True, last=True))
        bench.tick()
    assert bench.scheduler.stop is None
    bench.pool.done()
    bench.tick()
    assert bench.scheduler.finished


def test_scheduler_workers_that_never_start_open_the_breaker() -> None:
    bench = Bench([a_shard(0)], workers=0, policy=RetryPolicy(max_starts=3))
    for n in range(3):
        assert bench.scheduler.stop is None
        bench.pool.die(f"w{n}")
        bench.pool.poll(0.0)
        bench.pool.say(Refused(worker=f"w{n}", error=an_error("ImportError"), fatal=False))
        bench.tick()
    assert bench.scheduler.stop is not None
    assert bench.scheduler.stop.kind is StopKind.BREAKER


@pytest.mark.parametrize(("loss", "stops"), [(Loss.PROCESS, True), (Loss.MEMORY, True), (Loss.NODE, False)])
def test_scheduler_workers_that_die_while_they_load_open_the_breaker_unless_their_nodes_went(
    loss: Loss, stops: bool
) -> None:
    bench = Bench([a_shard(0)], workers=0, policy=RetryPolicy(max_starts=3))
    for n in range(3):
        bench.pool.say(Died(worker=f"w{n + 9}", loss=loss, message="killed"))
        bench.tick()
    assert (bench.scheduler.stop is not None) == stops


def test_scheduler_second_answer_to_the_last_question_is_refused() -> None:
    shard = a_shard(0)
    bench = Bench([shard], histories={shard.key: History(state=ShardState.PENDING, died=2)})
    bench.tick()
    warmed = Probed(worker="w1", key=shard.key, attempt=1, offset=None)
    bench.pool.say(warmed)
    bench.pool.say(warmed)
    bench.tick()
    assert bench.scheduler.tally.stale == 1
    assert [lease.probe.offset for lease in bench.leases() if lease.probe] == [None, 0]


def test_scheduler_drain_finishes_what_is_in_flight_and_leases_nothing_more() -> None:
    bench = Bench([a_shard(i) for i in range(5)], in_flight=2)
    bench.tick()
    bench.scheduler.drain()
    bench.pool.done(0)
    bench.tick()
    assert not bench.scheduler.finished
    bench.pool.done(1)
    bench.tick()
    assert bench.scheduler.finished
    assert bench.scheduler.unfinished == 3
    assert len(bench.pool.submitted) == 2


def test_scheduler_abandon_releases_what_is_in_flight() -> None:
    bench = Bench([a_shard(0)])
    bench.tick()
    bench.scheduler.abandon("interrupted")
    assert bench.store.kinds(bench.shards[0]) == ["leased", "released"]
    assert bench.store.events[-1].message == "interrupted"


def test_scheduler_resumed_attempts_go_on_counting() -> None:
    shard = a_shard(0)
    history = History(state=ShardState.PENDING, attempts=4, failed=2)
    bench = Bench([shard], histories={shard.key: history})
    bench.tick()
    assert (bench.leases()[0].attempt, bench.leases()[0].charged) == (5, 3)
    bench.pool.fail()
    bench.tick()
    assert bench.store.kinds(shard)[-1] == "dead"


@pytest.mark.parametrize("history", [{"failed": 3}, {"died": 50}])
def test_scheduler_budget_spent_in_earlier_runs_is_dead_without_a_lease(history: dict[str, int]) -> None:
    shard = a_shard(0)
    bench = Bench([shard], histories={shard.key: History(state=ShardState.PENDING, **history)})
    bench.scheduler.abandon("end")
    assert bench.scheduler.finished
    assert bench.store.kinds(shard) == ["dead"]


def test_scheduler_unreadable_file_is_buried_without_a_worker() -> None:
    shard = a_shard(0, unreadable="not Parquet", rows=0)
    bench = Bench([shard])
    bench.tick()
    assert bench.store.kinds(shard) == ["dead"]
    assert bench.pool.submitted == []


def test_scheduler_commit_fails_nothing_is_sent() -> None:
    bench = Bench([a_shard(0)])

    def refuse(events: object) -> None:
        raise OSError("disk full")

    bench.store.commit = refuse  # type: ignore[assignment,method-assign]
    with pytest.raises(OSError, match="disk full"):
        bench.tick()
    assert bench.pool.submitted == []


# -- the circuit breaker: what it waits for, and what it gives back ------------------------------


def returned(bench: Bench) -> list[tuple[str, int]]:
    """(error_type, attempt) of every charge that was taken back."""
    return [(e.error_type, e.attempt) for e in bench.store.events if e.error_type.endswith("Returned")]


def fail_all(bench: Bench, error: ErrorReport, *, ticks: int = 200) -> None:
    """Every lease fails, until the run stops or ends; then as the driver does."""
    bench.tick()
    answered = 0
    for _ in range(ticks):
        if bench.scheduler.stop is not None or bench.scheduler.finished:
            break
        for n in range(answered, len(bench.pool.submitted)):
            bench.pool.fail(n, error=error)
        answered = len(bench.pool.submitted)
        bench.tick(after_s=1.0)
    bench.scheduler.abandon("the run stopped")


def test_breaker_streak_gives_every_attempt_back_and_buries_nothing() -> None:
    bench = Bench([a_shard(i) for i in range(50)], workers=2, in_flight=2, trusted=False)
    fail_all(bench, an_error("FileNotFoundError", message="/corpus/a.parquet"))
    assert bench.scheduler.stop is not None
    assert "in a row and none succeeded" in bench.scheduler.stop.message
    assert "FileNotFoundError: /corpus/a.parquet" in bench.scheduler.stop.message
    failed = [e.attempt for e in bench.store.events if e.kind is EventKind.FAILED]
    assert len(failed) >= 5
    assert returned(bench) == [("FailureReturned", attempt) for attempt in failed]
    assert not bench.store.parts


def test_breaker_permanent_failures_from_the_start_bury_nothing_before_it_opens() -> None:
    bench = Bench([a_shard(i) for i in range(50)], trusted=False)
    fail_all(bench, an_error("ShardUnreadable"))
    assert bench.scheduler.stop is not None
    assert "5 shards in a row" in bench.scheduler.stop.message
    assert not bench.store.parts
    assert {bench.store.kinds(s)[-1] for s in bench.shards[:5]} == {"released"}


def test_breaker_names_the_cause_that_most_failures_have() -> None:
    bench = Bench([a_shard(i) for i in range(50)], trusted=False)
    bench.tick()
    for name in ["TimeoutError", "ShardUnreadable", "ShardUnreadable", "TimeoutError", "ShardUnreadable"]:
        bench.pool.fail(error=an_error(name, message=f"by {name}"))
        bench.tick()
    assert bench.scheduler.stop is not None
    assert "(3 by this cause): ShardUnreadable: by ShardUnreadable" in bench.scheduler.stop.message


def test_breaker_first_shards_dead_for_good_are_buried_once_another_succeeds() -> None:
    bench = Bench([a_shard(i) for i in range(4)], trusted=False)
    bench.tick()
    bench.pool.fail(error=an_error("ShardUnreadable"))
    bench.tick()
    assert not bench.store.parts
    bench.pool.done()
    bench.tick()
    assert bench.store.kinds(bench.shards[0]) == ["leased", "failed", "dead"]


def test_breaker_small_corpus_that_is_dead_as_a_whole_ends_as_dead() -> None:
    bench = Bench([a_shard(i) for i in range(3)], trusted=False)
    fail_all(bench, an_error("ShardUnreadable"))
    assert bench.scheduler.stop is None
    assert [bench.store.kinds(s)[-1] for s in bench.shards] == ["dead"] * 3


def test_breaker_barren_and_hopeless_shards_only_stop_the_run() -> None:
    bench = Bench([a_shard(0), a_shard(1)], trusted=False)
    bench.tick()
    bench.pool.fail(error=an_error("ShardUnreadable"))
    bench.tick()
    bench.pool.fail(barren=True)
    bench.tick()
    assert bench.scheduler.stop is not None
    assert not bench.store.parts


def test_breaker_storage_gone_in_the_middle_of_a_run_stops_it_with_full_budgets() -> None:
    bench = Bench([a_shard(i) for i in range(200)])
    bench.tick()
    bench.pool.done()
    fail_all(bench, an_error("FileNotFoundError"), ticks=1000)
    assert bench.scheduler.stop is not None
    assert "20 shards in a row failed for good" in bench.scheduler.stop.message
    assert not bench.store.parts
    assert {bench.store.kinds(s)[-1] for s in bench.shards[1:21]} == {"released"}


def test_breaker_damaged_file_in_the_middle_of_a_run_costs_that_file() -> None:
    bench = Bench([a_shard(i) for i in range(200)], policy=RetryPolicy(max_dead_fraction=None))
    bench.tick()
    bench.pool.done()
    fail_all(bench, an_error("ShardUnreadable"), ticks=1000)
    assert bench.scheduler.stop is None
    assert bench.scheduler.tally.shards_dead == 199


def test_breaker_none_never_opens() -> None:
    policy = RetryPolicy(breaker_after=None, max_dead_fraction=None, backoff_s=0.0)
    bench = Bench([a_shard(i) for i in range(50)], trusted=False, policy=policy)
    fail_all(bench, an_error(), ticks=1000)
    assert bench.scheduler.stop is None
    assert bench.scheduler.tally.shards_dead == 50


def test_breaker_ranker_that_kills_every_worker_stops_and_gives_the_deaths_back() -> None:
    bench = Bench([a_shard(i) for i in range(100)], trusted=False)
    bench.tick()
    for _ in range(100):
        if bench.scheduler.stop is not None:
            break
        bench.pool.die(bench.pool.lease()[0])
        bench.tick()
    assert bench.scheduler.stop is not None
    assert "WorkerDied" in bench.scheduler.stop.message
    bench.scheduler.abandon("stopped")
    died = sum(e.kind is EventKind.DIED for e in bench.store.events)
    assert [name for name, _ in returned(bench)] == ["DeathReturned"] * died
    assert not bench.store.parts


def test_breaker_interrupted_hopeless_shard_gets_its_last_try_back() -> None:
    policy = RetryPolicy(breaker_after=9, backoff_s=0.0)
    bench = Bench([a_shard(0), a_shard(1)], workers=2, trusted=False, policy=policy)
    bench.tick()
    for n in (0, 2, 3):  # the second shard stays with its worker
        bench.pool.fail(n)
        bench.tick()
    bench.scheduler.drain()
    bench.scheduler.abandon("interrupted")
    assert bench.store.kinds(bench.shards[0]) == ["leased", "failed"] * 3 + ["released"]
    assert returned(bench) == [("FailureReturned", 3)]
    assert not bench.store.parts


def test_breaker_half_the_documents_dead_stops_and_says_why() -> None:
    bench = Bench([a_shard(i, rows=250) for i in range(20)])
    bench.tick()
    for _ in range(20):
        if bench.scheduler.stop is not None:
            break
        bench.pool.done(footer=a_footer(bench.pool.lease()[1].shard, dead=150, failures=(a_failure("NullValue"),)))
        bench.tick()
    assert bench.scheduler.stop is not None
    assert bench.scheduler.stop.kind is StopKind.BREAKER
    assert "750 of the 1,250 documents judged in this run are dead" in bench.scheduler.stop.message
    assert "retry.max_dead_fraction (0.5)" in bench.scheduler.stop.message
    assert "NullValue: it broke" in bench.scheduler.stop.message


def test_breaker_redriven_documents_that_die_again_do_not_count() -> None:
    shards = [replace(a_shard(i, rows=500), generation=1, only=tuple(range(500))) for i in range(20)]
    bench = Bench(shards)
    bench.tick()
    while not bench.scheduler.finished:
        bench.pool.done(footer=a_footer(bench.pool.lease()[1].shard, dead=500))
        bench.tick()
        assert bench.scheduler.stop is None


def test_scheduler_disk_that_fails_again_and_again_stops_the_run_and_makes_no_dead_letters() -> None:
    bench = Bench([a_shard(0)])
    fail_all(bench, an_error(stage=Stage.WRITE, errno=errno.EIO))
    assert bench.scheduler.stop is not None
    assert bench.scheduler.stop.kind is StopKind.FATAL
    assert not bench.store.parts
    assert bench.store.kinds(bench.shards[0])[-3:] == ["released"] * 3


def test_scheduler_users_table_decides() -> None:
    policy = RetryPolicy(verdicts=table(permanent=["TimeoutError"]), backoff_s=0.0)
    bench = Bench([a_shard(0), a_shard(1)], policy=policy)
    bench.tick()
    bench.pool.fail(error=an_error("TimeoutError"))
    bench.tick()
    assert bench.store.kinds(bench.shards[0]) == ["leased", "failed", "dead"]


def test_breaker_gives_nothing_back_to_shards_that_are_dead() -> None:
    bench = Bench([a_shard(i) for i in range(3)])
    bench.tick()
    bench.pool.fail(error=an_error("ShardUnreadable"))
    bench.tick()
    bench.pool.fail(error=an_error(stage=Stage.WRITE, errno=errno.ENOSPC))
    bench.tick()
    bench.scheduler.abandon("the disk is full")
    assert bench.store.kinds(bench.shards[0]) == ["leased", "failed", "dead"]
    assert returned(bench) == []
