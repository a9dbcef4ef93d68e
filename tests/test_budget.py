"""The batch budget of a device: as large as it pays, as small as memory asks."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from ranker.batching import Cut, IntArray
from ranker.budget import FIRST, LAST, largest_worthwhile, probe
from ranker.custom import CustomBlock
from ranker.errors import DeviceBroken
from ranker.score import Answer
from tests.test_canary import Backend

WIDTH = 256


class Device(Backend):
    """A pass of n tokens takes `seconds(n)` by its own clock, and raises what `seconds` raises."""

    def __init__(self, seconds: Callable[[int], float]) -> None:
        super().__init__(lambda text, rows: 0.0)
        self.seconds = seconds
        self.now = 0.0
        self.passes: list[int] = []
        self.released = 0

    def forward(self, block: CustomBlock, rows: IntArray) -> Answer:
        tokens = len(rows) * WIDTH
        self.passes.append(tokens)
        self.now += self.seconds(tokens)
        values = np.zeros((len(rows), 1), dtype=np.float32)
        return lambda: values

    def release(self) -> None:
        self.released += 1


def found(device: Device) -> int:
    return cut(device).budget


def cut(device: Device) -> Cut:
    return probe(device, ("q", "x" * WIDTH), lambda: device.now)


def saturating(tokens: int) -> float:
    """Constant up to 40,000 tokens, then proportional: a device that is full from there on."""
    return max(tokens, 40_000) / 1e6


def test_budget_grows_until_the_device_is_full() -> None:
    assert found(Device(saturating)) == 65_536


def test_budget_of_a_device_that_gains_nothing_is_the_first() -> None:
    device = Device(lambda tokens: tokens / 1e6)
    assert found(device) == FIRST
    assert max(device.passes) == 2 * FIRST


def test_budget_never_exceeds_the_last() -> None:
    assert found(Device(lambda tokens: 1.0)) == LAST


def test_budget_stays_below_what_runs_out_of_memory() -> None:
    def seconds(tokens: int) -> float:
        if tokens > 20_000:
            raise MemoryError
        return 1.0

    device = Device(seconds)
    assert found(device) == 16_384
    assert device.released == 1


def test_budget_that_fits_nothing_is_half_of_the_first() -> None:
    def seconds(tokens: int) -> float:
        raise MemoryError

    assert found(Device(seconds)) == FIRST // 2


def test_budget_probe_on_a_broken_device_says_so() -> None:
    def seconds(tokens: int) -> float:
        raise RuntimeError("CUDA error: device-side assert triggered")

    with pytest.raises(DeviceBroken):
        found(Device(seconds))


def test_budget_that_is_a_little_faster_is_not_worth_it() -> None:
    took = iter([1.0, 1.94])
    assert largest_worthwhile(lambda budget: next(took)).budget == FIRST


def test_overhead_of_a_pass_is_told_in_tokens() -> None:
    device = Device(lambda tokens: 0.002 + tokens / 1e6)
    assert cut(device).overhead == pytest.approx(2_000, abs=2)
    assert cut(Device(lambda tokens: tokens / 1e6)).overhead == 0


def test_overhead_of_a_device_that_is_never_full_is_no_more_than_the_first_budget() -> None:
    assert cut(Device(lambda tokens: 1.0)).overhead == FIRST
