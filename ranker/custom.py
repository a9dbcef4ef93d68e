"""A ranker of the user's own: `kind: custom`, `class: module:Name`. No torch unless that class imports it."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ranker.batching import IntArray
from ranker.errors import NodeUnfit, RankerError
from ranker.score import Answer
from ranker.types import CustomRanker, Pair, RankerSpec
from ranker.verdict import PromiseError, one_line

BATCH_PAIRS = 64
"""Pairs of one call of `score`: enough for a vectorised ranker, few enough for a heartbeat a second."""


def load_class(class_path: str) -> type[CustomRanker]:
    """Import `module:Name` and check that it offers what a ranker must.

    Raises:
        RankerError: it cannot be imported, or lacks `score` or `fingerprint`.
    """
    module_name, _, name = class_path.partition(":")
    if not module_name or not name:
        raise RankerError(f"ranker.class is {class_path!r}: write it as module:Name, say my_rankers:Bm25")
    try:
        module = importlib.import_module(module_name)
    except Exception as error:
        raise RankerError(
            f"ranker.class: cannot import module {module_name!r} ({type(error).__name__}: {one_line(error)}); "
            "it must be importable where the driver and the workers run"
        ) from error
    cls = getattr(module, name, None)
    if not isinstance(cls, type):
        raise RankerError(f"ranker.class: module {module_name!r} has no class {name!r}")
    for method in ("score", "fingerprint"):
        if not callable(getattr(cls, method, None)):
            raise RankerError(f"ranker.class: {class_path} has no method {method!r}; a ranker needs it")
    return cls


def class_fingerprint(class_path: str, options: Mapping[str, Any]) -> str:
    """The class's own `fingerprint(**options)`.

    Raises:
        RankerError: the class cannot be loaded, or its fingerprint raises or is not a text.
    """
    cls = load_class(class_path)
    try:
        text = cls.fingerprint(**options)
    except Exception as error:
        raise RankerError(
            f"ranker.class: {class_path}.fingerprint failed: {type(error).__name__}: {one_line(error)}"
        ) from error
    if not isinstance(text, str) or not text:
        raise RankerError(f"ranker.class: {class_path}.fingerprint must return a non-empty text, not {text!r}")
    return text


@dataclass(slots=True, kw_only=True)
class CustomBlock:
    """Pairs as they are: a custom ranker tokenises for itself, if it does."""

    pairs: Sequence[Pair]
    lengths: npt.NDArray[np.int32]
    n_tokens: npt.NDArray[np.int32]
    truncated: npt.NDArray[np.bool_]


class CustomBackend:
    """Calls the user's `score` with batches of at most `budget` pairs (a pair counts as one token here)."""

    labels = 1
    score_label = 0
    ahead = 1
    overhead = 0  # there is no padding: every pair counts as one token

    def __init__(self, spec: RankerSpec) -> None:
        cls = load_class(spec.class_path)
        try:
            self._ranker = cls(**spec.options)
        except NodeUnfit:
            raise
        except Exception as error:
            raise RankerError(
                f"ranker.class: {spec.class_path}(**options) failed: {type(error).__name__}: {one_line(error)}"
            ) from error
        self._name = spec.class_path
        self.budget = BATCH_PAIRS

    def refuse(self, pairs: Sequence[Pair]) -> Mapping[int, BaseException]:
        return {}

    def encode(self, pairs: Sequence[Pair]) -> CustomBlock:
        n = len(pairs)
        return CustomBlock(
            pairs=pairs,
            lengths=np.ones(n, dtype=np.int32),
            n_tokens=np.zeros(n, dtype=np.int32),
            truncated=np.zeros(n, dtype=np.bool_),
        )

    def forward(self, block: CustomBlock, rows: IntArray) -> Answer:
        answer = self._ranker.score([block.pairs[row] for row in rows])
        try:
            scores = np.asarray(answer, dtype=np.float64)
        except (TypeError, ValueError) as error:
            raise PromiseError(
                f"{self._name}.score returned something else than numbers: {one_line(error)}"
            ) from error
        if scores.shape != (len(rows),):
            raise PromiseError(
                f"{self._name}.score got {len(rows)} pairs and returned an array of shape {scores.shape}"
            )
        with np.errstate(over="ignore"):  # beyond float32 becomes inf, and inf becomes a failure
            values = scores.astype(np.float32).reshape(-1, 1)
        return lambda: values

    def release(self) -> None:
        """Nothing is cached here."""

    def describe(self) -> dict[str, str]:
        return {"class": self._name}
