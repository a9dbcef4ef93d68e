"""How n pairs are cut into forward passes. Pure: lengths in, indices out."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.intp]


def batches(lengths: npt.ArrayLike, budget: int) -> list[IntArray]:
    """Cut the indices of `lengths` into batches of at most `budget` padded tokens.

    Widest first: the largest batch comes at once, so running out of memory shows at the start of a shard, and
    neighbours in a batch have nearly the same length, so little of it is padding. Ties keep their order, which
    makes the cut a function of the lengths alone.

    Args:
        lengths: [n] true lengths in tokens.
        budget: rows × width of a batch; a row wider than that goes alone.

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
        rows = max(budget // width, 1)
        cut.append(order[start : start + rows])
        start += rows
    return cut
