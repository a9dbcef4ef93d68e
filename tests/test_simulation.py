"""The scheduler under thousands of seeded failures; and that the simulation notices when a rule is broken."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from jobs.isolation import Isolation, Step
from jobs.protocol import Died, Done, ErrorReport, Failed, Lease, Probed, Progress, Store
from jobs.scheduler import Scheduler
from jobs.state import WorkerView
from shards import files
from shards.types import Event, EventKind, Failure, Footer, Shard
from tests import simulation
from tests.simulation import ModelDisk, Part, Simulation, first_failure

_CHUNK = 100
_ENOUGH = 400
"""Seeds in which a broken rule must show; most do in the first ten."""


@pytest.mark.parametrize("start", range(0, 2000, _CHUNK))
def test_simulation_whatever_strikes_every_document_stands_exactly_once(start: int) -> None:
    found = first_failure(range(start, start + _CHUNK))
    assert found is None, found[1]


@pytest.mark.parametrize("start", range(0, 20, 4))
def test_simulation_on_the_real_manifest_and_real_parts_holds_too(start: int) -> None:
    found = first_failure(range(start, start + 4), real=True)
    assert found is None, found[1]


def test_simulation_same_seed_goes_the_same_way() -> None:
    stories = []
    for _ in range(2):
        run = Simulation(17)
        run.run()
        stories.append((run.step, run.story()))
    assert stories[0] == stories[1]


def test_simulation_plants_every_fault_it_promises() -> None:
    seen: Counter[str] = Counter()
    for seed in range(200):
        run = Simulation(seed)
        run.run()
        seen += run.seen
    crashes = ("poll", "submit", "before commit", "after commit", "find", "before bury", "after bury")
    strikes = ("dies", "hangs", "frozen", "lost node", "lost memory", "away", "drain", "kill", "manifest lost")
    reports = ("stale", "publish", "adopted", "late publish", "late adopted", "bury", "breaker")
    wanted = {*strikes, *reports, *(f"crash: {where}" for where in crashes)}
    assert not wanted - set(seen)


# -- it can fail: each of these breaks one rule --------------------------------------------------------


class AckBeforeWrite(Scheduler):
    """A shard is done when it is leased."""

    def _lease(self, shard: Shard, worker: WorkerView) -> Lease:
        lease = super()._lease(shard, worker)
        self._record(EventKind.DONE, lease, worker=worker.info)
        return lease


class AnyAttempt(Scheduler):
    """A report is taken for whoever holds the shard now, whatever attempt it is of."""

    def _on_report(self, event: Progress | Probed | Done | Failed) -> None:
        for name, view in self.workers.items():
            if event.key in view.held:
                event = replace(event, worker=name, attempt=view.held[event.key].attempt)
        super()._on_report(event)


class SentBeforeCommitted(Scheduler):
    """The lease is sent, then recorded."""

    def _lease(self, shard: Shard, worker: WorkerView) -> Lease:
        lease = super()._lease(shard, worker)
        self._pool.submit(worker.info.worker, lease)
        return lease


class DeadBeforeWritten(Scheduler):
    """A dead shard is acknowledged first and gets its part afterwards."""

    def _bury(self, shard: Shard, failure: Failure, *, worker: str = "") -> None:
        attempt = self._histories[shard.key].attempts
        event = Event(
            kind=EventKind.DEAD,
            shard_id=shard.shard_id,
            generation=shard.generation,
            attempt=attempt,
            worker=worker,
        )
        self._store.commit([*self._events, event])
        self._events.clear()
        super()._bury(shard, failure, worker=worker)


class NeverLooks(Scheduler):
    """After a death nobody looks whether the part is there."""

    def __init__(self, *args: Any, store: Store, **kwargs: Any) -> None:
        super().__init__(*args, store=_Blind(store), **kwargs)


class BlamesTheUnasked(Scheduler):
    """A worker died between an answer and the next question, and that question's document is accused."""

    def _on_died(self, event: Died) -> None:
        self._asks.pop(event.worker, None)
        super()._on_died(event)


class _Blind:
    def __init__(self, store: Store) -> None:
        self.commit, self.bury = store.commit, store.bury

    def find(self, shard: Shard) -> Footer | None:
        return None


_SCHEDULERS: Sequence[Callable[..., Scheduler]] = (
    AckBeforeWrite,
    AnyAttempt,
    SentBeforeCommitted,
    DeadBeforeWritten,
    NeverLooks,
)


@pytest.mark.parametrize("broken", _SCHEDULERS)
def test_simulation_scheduler_with_a_broken_rule_is_caught(broken: Callable[..., Scheduler]) -> None:
    assert first_failure(range(_ENOUGH), scheduler=broken) is not None


def test_simulation_document_accused_without_being_asked_is_caught() -> None:
    # Two strikes of chance must fall together: near one seed in a thousand.
    assert first_failure(range(1000, 3000), scheduler=BlamesTheUnasked) is not None


def test_simulation_publishing_more_than_once_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    def publish(disk: ModelDisk, shard: Shard, footer: Footer, scored: Sequence[int]) -> tuple[Footer, bool]:
        disk.write(shard.key, Part(footer, tuple(scored), 0))
        return footer, False

    monkeypatch.setattr(ModelDisk, "publish", publish)
    assert first_failure(range(_ENOUGH)) is not None


def test_simulation_real_parts_published_more_than_once_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    def publish_new(path: Path, data: bytes) -> bool:
        if path.suffix != ".parquet":
            return real(path, data)  # the probe at the start, which would notice
        files.replace(path, data)
        return True

    real = files.publish_new

    monkeypatch.setattr(files, "publish_new", publish_new)
    assert first_failure(range(_ENOUGH // 10), real=True) is not None


def test_simulation_conviction_without_confirmation_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    died = Isolation.died

    def convict_at_once(search: Isolation, error: ErrorReport, **how: Any) -> bool:
        first = search.step is Step.WALK and search.warm
        goes_on = died(search, error, **how)
        if first and search.step is Step.CONFIRM:
            search._convict(error)
        return goes_on

    monkeypatch.setattr(Isolation, "died", convict_at_once)
    assert first_failure(range(_ENOUGH)) is not None


def test_simulation_search_that_goes_on_where_nothing_was_read_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Isolation, "interrupted", lambda search: None)
    assert first_failure(range(_ENOUGH)) is not None


def test_simulation_replay_prints_the_failing_seed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(simulation, "Scheduler", AckBeforeWrite)
    found = first_failure(range(5), scheduler=AckBeforeWrite)
    assert found is not None
    assert f"python -m tests.simulation --seed {found[0]}" in found[1]
    assert len(found[1].splitlines()) < 50
    assert simulation.main(["--seed", "3"]) == 0
    assert "seed 3: ok" in capsys.readouterr().out
