"""Rankers without torch, so that a worker is up in a second: one that takes its time, and one that misbehaves."""

from __future__ import annotations

import hashlib
import os
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ranker.errors import NodeUnfit
from tests.rankers import Faults


class Hash:
    """The score is the first bytes of `rounds` rounds of SHA-256 over the text; of text `poison…`, the end.

    `tally` is a directory: one byte a scored document, in a file a process, survives any kill -9.
    """

    def __init__(self, tally: str, rounds: int = 20_000) -> None:
        self._rounds = rounds
        self._tally = os.open(Path(tally) / str(os.getpid()), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)

    @classmethod
    def fingerprint(cls, rounds: int = 20_000, **_: Any) -> str:
        return f"hash {rounds}"

    def score(self, pairs: Sequence[tuple[str, str]]) -> Sequence[float]:
        return [self._score(text) for _, text in pairs]

    def _score(self, text: str) -> float:
        if text.startswith("poison"):
            os.kill(os.getpid(), signal.SIGKILL)
        score = expected(text, self._rounds)
        if text.startswith("document"):  # and no warm-up pair
            os.write(self._tally, b".")
        return score


def expected(text: str, rounds: int) -> float:
    """The score, as a float64 with 24 significant bits: exact in float32."""
    digest = text.encode()
    for _ in range(rounds):
        digest = hashlib.sha256(digest).digest()
    return int.from_bytes(digest[:3], "big") / 2**24


class Sick(Faults):
    """More that goes wrong: `hang` never returns. `stop-itself` stops its process, once, as SIGSTOP does;
    woken up, it goes on. `slow…` takes 50 ms. A file `gone` in `marks`: it cannot be built any more; on a
    node with RESCORE_TEST_UNFIT set, never."""

    def __init__(self, marks: str, output: str) -> None:
        super().__init__(marks, output)
        if os.environ.get("RESCORE_TEST_UNFIT"):
            raise NodeUnfit("no bfloat16 here")
        if (self._marks / "gone").exists():
            raise FileNotFoundError(f"no checkpoint at {marks}/checkpoint")

    def _score(self, text: str) -> float:
        if text.startswith("slow"):
            time.sleep(0.05)
        while text == "hang":
            time.sleep(1)
        if text == "stop-itself" and self._mark(text):
            (self._marks / "stopped").write_text(str(os.getpid()))
            os.kill(os.getpid(), signal.SIGSTOP)
        return super()._score("x" if text == "stop-itself" else text)
