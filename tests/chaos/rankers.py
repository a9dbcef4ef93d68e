"""A ranker of about 20 ms a document and no torch, so that a worker is up in a second."""

from __future__ import annotations

import hashlib
import os
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any


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
