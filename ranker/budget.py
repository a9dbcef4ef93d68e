"""How a shard should be cut into forward passes on this device: found by trying."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ranker.batching import Cut
from ranker.score import Backend
from ranker.types import Pair
from ranker.verdict import Verdict, check_device, let_go, verdict

OVERHEAD = 1_024
"""What a pass on a GPU costs beside its tokens, in tokens, where nothing could be tried. Not measured."""

FIRST, LAST = 8_192, 262_144
"""Budgets that are tried, each twice the one before."""

WORTH = 1.05
"""How much faster the next budget must be. Larger batches than needed cost memory, and progress is rarer."""


def largest_worthwhile(seconds: Callable[[int], float | None]) -> Cut:
    """Double the budget for as long as it pays. Pure.

    Args:
        seconds: of a pass with so many tokens; None if they do not fit into memory.

    Returns:
        The budget, half of FIRST if not even that fits (a run halves it further); and the overhead of a pass, from
        the line through the first two: seconds = overhead + tokens × slope.
    """
    first = seconds(FIRST)
    if first is None:
        return Cut(budget=FIRST // 2, overhead=OVERHEAD)
    second = seconds(2 * FIRST)
    if second is None:
        return Cut(budget=FIRST, overhead=OVERHEAD)
    slope = max(second - first, 1e-9) / FIRST
    overhead = int(min(max(first / slope - FIRST, 0), FIRST))
    budget, took = FIRST, first
    following: float | None = second
    while following is not None and 2 * took >= following * WORTH:
        budget, took = 2 * budget, following
        following = seconds(2 * budget) if budget < LAST else None
    return Cut(budget=budget, overhead=overhead)


def probe(backend: Backend[Any], longest: Pair, clock: Callable[[], float]) -> Cut:
    """Find the cut for a backend with rows as long as they come, which need the most memory.

    Args:
        backend: whose forward passes are timed.
        longest: a pair that fills the model's input.
        clock: seconds.

    Raises:
        DeviceBroken: the accelerator fails.
    """
    width = int(backend.encode([longest]).lengths[0])

    def seconds(budget: int) -> float | None:
        count = max(budget // width, 1)
        block = backend.encode([longest] * count)
        rows = np.arange(count, dtype=np.intp)
        try:
            backend.forward(block, rows)()  # the first pass of a shape pays for its kernels
            start = clock()
            backend.forward(block, rows)()
            return clock() - start
        except Exception as error:
            check_device(error)
            if verdict(error) is not Verdict.MEMORY:
                raise
            let_go(error)
        backend.release()
        return None

    return largest_worthwhile(seconds)
