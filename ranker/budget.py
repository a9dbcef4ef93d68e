"""How many padded tokens one forward pass should have on this device: found by trying."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ranker.errors import DeviceBroken
from ranker.score import Backend
from ranker.types import Pair
from ranker.verdict import Verdict, one_line, verdict

FIRST, LAST = 8_192, 262_144
"""Budgets that are tried, each twice the one before."""

WORTH = 1.05
"""How much faster the next budget must be. Larger batches than needed cost memory, and progress is rarer."""


def largest_worthwhile(rate: Callable[[int], float | None]) -> int:
    """Double the budget for as long as it pays. Pure.

    Args:
        rate: tokens per second with a budget; None if it does not fit into memory.

    Returns:
        The budget, in padded tokens; half of FIRST if not even that fits (a run halves it further).
    """
    budget, best = FIRST, rate(FIRST)
    if best is None:
        return FIRST // 2
    while budget < LAST:
        faster = rate(2 * budget)
        if faster is None or faster < best * WORTH:
            break
        budget, best = 2 * budget, faster
    return budget


def probe(backend: Backend[Any], longest: Pair, clock: Callable[[], float]) -> int:
    """Find the budget of a backend with rows as long as they come, which need the most memory.

    Args:
        backend: whose forward passes are timed.
        longest: a pair that fills the model's input.
        clock: seconds.

    Raises:
        DeviceBroken: the accelerator fails.
    """
    width = int(backend.encode([longest]).lengths[0])

    def rate(budget: int) -> float | None:
        count = max(budget // width, 1)
        block = backend.encode([longest] * count)
        rows = np.arange(count, dtype=np.intp)
        try:
            backend.forward(block, rows)()  # the first pass of a shape pays for its kernels
            start = clock()
            backend.forward(block, rows)()
            return count * width / max(clock() - start, 1e-9)
        except Exception as error:
            if verdict(error) is Verdict.DEVICE:
                raise DeviceBroken(one_line(error)) from error
            if verdict(error) is not Verdict.MEMORY:
                raise
        backend.release()  # out of the except clause: its traceback keeps the failed pass's tensors alive
        return None

    return largest_worthwhile(rate)
