"""Where a worker's time goes: each call's stages, and the time in which no stage is busy."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field


class Waiting:
    """Seconds in which none of a worker's threads was in a stage: it waited for leases, or for the driver."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._busy = 0
        self._since = clock()
        self._seconds = 0.0

    def enter(self) -> None:
        with self._lock:
            if not self._busy:
                self._seconds += self._clock() - self._since
            self._busy += 1

    def leave(self) -> None:
        with self._lock:
            self._busy -= 1
            self._since = self._clock()

    def take(self) -> float:
        """What has been waited since the last time this was asked. The caller is in no stage itself."""
        with self._lock:
            if not self._busy:
                now = self._clock()
                self._seconds += now - self._since
                self._since = now
            seconds, self._seconds = self._seconds, 0.0
            return seconds


@dataclass(slots=True)
class Stopwatch:
    """The seconds of one call, by stage. Stages of neighbouring calls overlap: their sum can exceed 1."""

    waiting: Waiting
    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def time(self, stage: str) -> Iterator[None]:
        self.waiting.enter()
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[stage] = self.seconds.get(stage, 0.0) + time.perf_counter() - start
            self.waiting.leave()

    def each(self, stage: str, steps: Iterator[int]) -> Iterator[int]:
        """`steps`, each timed by itself: the time between two of them is the caller's."""
        while True:
            with self.time(stage):
                step = next(steps, None)
            if step is None:
                return
            yield step

    def report(self) -> dict[str, float]:
        """The seconds by stage, and as `wait` what the worker has waited since the last report."""
        return {**self.seconds, "wait": self.waiting.take()}
