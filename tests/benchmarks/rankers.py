"""Rankers that cost nothing, or a little, so that what is around them shows. No torch."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

CHUNK = 64
"""Documents between two lines of the tally; what `rescore` gives a ranker of one's own at once."""


class Length:
    """The score is the length of the text."""

    @classmethod
    def fingerprint(cls) -> str:
        return "length"

    def score(self, pairs: Sequence[tuple[str, str]]) -> list[float]:
        return [float(len(text)) for _, text in pairs]


class Tallied:
    """`rounds` rounds of SHA-256 a document (800 are about a quarter of a millisecond). What was scored is tallied
    in a file that survives any kill -9, one line a call."""

    def __init__(self, tally: str, rounds: int) -> None:
        self._tally, self._rounds = Path(tally), rounds

    @classmethod
    def fingerprint(cls, rounds: int, **_: Any) -> str:
        return f"hash {rounds}"

    def score(self, pairs: Sequence[tuple[str, str]]) -> list[float]:
        scores = [hashed(text, self._rounds) for _, text in pairs]
        tally(self._tally, sum(text.startswith("document") for _, text in pairs))  # and no warm-up pair
        return scores


def hashed(text: str, rounds: int) -> float:
    """The first bytes of the last digest, exact in float32."""
    digest = text.encode()
    for _ in range(rounds):
        digest = hashlib.sha256(digest).digest()
    return int.from_bytes(digest[:3], "big") / 2**24


def tally(path: Path, documents: int) -> None:
    """Add a line; O_APPEND keeps the lines of several processes apart."""
    with path.open("a") as file:
        file.write(f"{documents}\n")


def tallied(path: Path) -> int:
    """Documents in the tally; a last line that is half there counts when it is whole."""
    if not path.exists():
        return 0
    whole, _, _ = path.read_text().rpartition("\n")
    return sum(map(int, whole.split()))
