"""Which shard a worker takes next, so that a row group is read by one stream where possible. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from itertools import pairwise

from jobs.protocol import WorkerId
from shards.types import Shard

_Span = tuple[int, int]
"""Shards [start, stop) of the plan, all of one row group."""


class Spans:
    """The untried shards, in runs of neighbours.

    A worker keeps taking from the front of its own span: the reader's stream then just goes on. An idle
    worker gets the next unowned span, and when there is none, the back half of the longest owned one:
    that costs it one skip through the row group, and the owner none.
    """

    def __init__(self, shards: Sequence[Shard]) -> None:
        """`shards` in corpus order."""
        self._shards = shards
        self._unowned: deque[_Span] = deque(_runs(shards))
        self._owned: dict[WorkerId, _Span] = {}
        self._left = len(shards)

    def __len__(self) -> int:
        """How many shards nobody has taken."""
        return self._left

    def take(self, worker: WorkerId) -> Shard | None:
        """The next shard for `worker`, or None if all are taken."""
        start, stop = self._owned.get(worker) or self._next_span()
        if start == stop:
            return None
        self._own(worker, start + 1, stop)
        self._left -= 1
        return self._shards[start]

    def release(self, worker: WorkerId) -> None:
        """`worker` is gone: what is left of its span is free for all."""
        span = self._owned.pop(worker, None)
        if span:
            self._unowned.appendleft(span)

    def _own(self, worker: WorkerId, start: int, stop: int) -> None:
        if start < stop:
            self._owned[worker] = (start, stop)
        else:
            self._owned.pop(worker, None)

    def _next_span(self) -> _Span:
        if self._unowned:
            return self._unowned.popleft()
        if not self._owned:
            return 0, 0
        owner, (start, stop) = max(self._owned.items(), key=lambda item: item[1][1] - item[1][0])
        middle = (start + stop) // 2
        self._own(owner, start, middle)
        return middle, stop


def _runs(shards: Sequence[Shard]) -> list[_Span]:
    starts = [
        i
        for i, shard in enumerate(shards)
        if i == 0 or (shard.file, shard.row_group) != (shards[i - 1].file, shards[i - 1].row_group)
    ]
    return list(pairwise([*starts, len(shards)]))
