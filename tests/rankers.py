"""Light rankers (no torch) that misbehave on request. Texts are instructions; see each class."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any


class Length:
    """The score is the length of the text; of text `nan`, not a number; `raise` raises."""

    def __init__(self, version: str = "1") -> None:
        self._version = version

    @classmethod
    def fingerprint(cls, version: str = "1") -> str:
        return f"length {version}"

    def score(self, pairs: Sequence[tuple[str, str]]) -> Sequence[float]:
        return [self._score(text) + len(query) / 1000 for query, text in pairs]

    def _score(self, text: str) -> float:
        if text == "nan":
            return float("nan")
        if text == "raise":
            raise ValueError("this text cannot be scored")
        return float(len(text))


class Broken(Length):
    """Fails for every text while the file `fixed` is missing."""

    def __init__(self, fixed: str) -> None:
        super().__init__()
        self._fixed = Path(fixed)

    @classmethod
    def fingerprint(cls, **options: Any) -> str:
        return "broken"

    def _score(self, text: str) -> float:
        if not self._fixed.exists():
            raise RuntimeError("the head is not attached")
        return super()._score(text)


class Faults(Length):
    """Does once, at the text that names it, what kills a run. `marks` is a directory of what happened.

    `kill-worker`: SIGKILL to its own process. `kill-driver`: SIGKILL to the holder of `output`'s lock.
    `stop-driver`: SIGTERM to it. `gate`: waits until the file `marks`/open exists.
    `always-kill-worker` and `segfault`: every time.
    """

    def __init__(self, marks: str, output: str) -> None:
        super().__init__()
        self._marks, self._output = Path(marks), Path(output)

    @classmethod
    def fingerprint(cls, **options: Any) -> str:
        return "faults"

    def _score(self, text: str) -> float:
        first = self._mark(text) if "-" in text or text == "gate" else False
        if text == "always-kill-worker":
            os.kill(os.getpid(), signal.SIGKILL)
        if text == "segfault":
            ctypes.string_at(0)
        if first and text == "kill-worker":
            os.kill(os.getpid(), signal.SIGKILL)
        if first and text == "kill-driver":
            self._signal_driver(signal.SIGKILL)
        if first and text == "stop-driver":
            self._signal_driver(signal.SIGTERM)
        if text == "gate":
            while not (self._marks / "open").exists():
                time.sleep(0.01)
        return super()._score(text)

    def _mark(self, text: str) -> bool:
        """Whether this is the first time that `text` is seen, over all processes."""
        try:
            (self._marks / text).touch(exist_ok=False)
        except FileExistsError:
            return False
        return True

    def _signal_driver(self, signum: signal.Signals) -> None:
        pid = json.loads((self._output / ".rescore" / "lock").read_text())["pid"]
        os.kill(pid, signum)
        # The driver is gone before this shard can be acknowledged; a drained one still gets it.
        if signum is signal.SIGKILL:
            while _alive(pid):
                time.sleep(0.01)


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(") ", 1)[1][0] != "Z"
    except FileNotFoundError:
        return False


class Picky(Length):
    """`picky` cannot be scored while the file `fixed` is missing."""

    def __init__(self, fixed: str) -> None:
        super().__init__()
        self._fixed = Path(fixed)

    @classmethod
    def fingerprint(cls, **options: Any) -> str:
        return "picky"

    def _score(self, text: str) -> float:
        if text == "picky" and not self._fixed.exists():
            raise ValueError("not in the mood")
        return super()._score(text)


class PickyQuery(Picky):
    """Against the query `bad` nothing can be scored while the file `fixed` is missing."""

    def score(self, pairs: Sequence[tuple[str, str]]) -> Sequence[float]:
        if any(query == "bad" for query, _ in pairs) and not self._fixed.exists():
            raise ValueError("a bad query")
        return super().score(pairs)


class Filler(Length):
    """At every text `fill`, fills the disk that `ballast` lies on, while the file `room` is missing."""

    def __init__(self, ballast: str, room: str) -> None:
        super().__init__()
        self._ballast, self._room = Path(ballast), Path(room)

    @classmethod
    def fingerprint(cls, **options: Any) -> str:
        return "filler"

    def score(self, pairs: Sequence[tuple[str, str]]) -> Sequence[float]:
        if any(text == "fill" for _, text in pairs) and not self._room.exists():
            fill(self._ballast)
        return super().score(pairs)


def fill(ballast: Path) -> None:
    """Write until the disk is full to the last block."""
    with contextlib.suppress(OSError), ballast.open("ab", buffering=0) as file:
        while file.write(b"x" * 4096) == 4096:
            pass


class Thief(Length):
    """Takes the file `corpus` away when it is loaded, while the file `fixed` is missing."""

    def __init__(self, corpus: str, fixed: str) -> None:
        super().__init__()
        if not Path(fixed).exists():
            with contextlib.suppress(FileNotFoundError):
                Path(corpus).rename(f"{corpus}.gone")

    @classmethod
    def fingerprint(cls, **options: Any) -> str:
        return "thief"


class SickDevice(Length):
    """Raises what a broken CUDA context raises, at the first text `sick` only."""

    def __init__(self, marks: str) -> None:
        super().__init__()
        self._marks = Path(marks)

    @classmethod
    def fingerprint(cls, **options: Any) -> str:
        return "sick device"

    def _score(self, text: str) -> float:
        if text == "sick" and not (self._marks / "sick").exists():
            (self._marks / "sick").write_text(str(os.getpid()))
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        return super()._score(text)


class Eater(Length):
    """Of text `eat`, takes memory until somebody ends it; at most 6 GB."""

    @classmethod
    def fingerprint(cls, **options: Any) -> str:
        return "eater"

    def _score(self, text: str) -> float:
        if text == "eat":
            held = [bytearray(os.urandom(1)) * 250_000_000 for _ in range(24)]
            while held:
                time.sleep(0.01)
        return super()._score(text)
