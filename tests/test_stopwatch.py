"""Where a worker's time goes."""

from __future__ import annotations

import pytest

from jobs.stopwatch import Stopwatch, Waiting


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now

    def pass_(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock() -> Clock:
    return Clock()


def test_waiting_counts_only_while_no_stage_is_busy(clock: Clock) -> None:
    waiting = Waiting(clock)
    clock.pass_(1)
    waiting.enter()
    clock.pass_(10)
    waiting.enter()  # another thread, meanwhile
    clock.pass_(10)
    waiting.leave()
    clock.pass_(10)
    waiting.leave()
    clock.pass_(2)
    waiting.enter()
    assert waiting.take() == 3


def test_waiting_is_told_once(clock: Clock) -> None:
    waiting = Waiting(clock)
    clock.pass_(1)
    assert waiting.take() == 1
    clock.pass_(2)
    assert waiting.take() == 2
    assert waiting.take() == 0


def test_stopwatch_adds_up_a_stages_steps_and_leaves_out_what_is_between_them(clock: Clock) -> None:
    watch = Stopwatch(Waiting(clock))
    steps = watch.each("forward", iter([1, 2, 3]))
    for _ in steps:
        clock.pass_(5)
    report = watch.report()
    assert report["wait"] == 15
    assert list(report) == ["forward", "wait"]
    assert 0 <= report["forward"] < 1


def test_stopwatch_of_a_stage_that_raises_is_stopped(clock: Clock) -> None:
    watch = Stopwatch(Waiting(clock))
    with pytest.raises(OSError, match="gone"), watch.time("read"):
        raise OSError("gone")
    clock.pass_(4)
    assert watch.report()["wait"] == 4
