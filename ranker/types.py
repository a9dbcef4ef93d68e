"""The values that cross the borders of the model plane, and what a ranker of the user's own must offer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import numpy as np
import numpy.typing as npt

Pair = tuple[str, str]
"""(query, text)."""

Kind = Literal["cross-encoder", "bi-encoder", "custom"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RankerSpec:
    """Everything that decides how a pair is scored. Plain values: it travels to the workers."""

    kind: Kind
    checkpoint: str = ""
    """A local directory (the driver has already resolved Hub ids to one, or to id + commit)."""
    revision: str | None = None
    class_path: str = ""
    """`module:Name`, for kind custom."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Keyword arguments of the custom class."""
    max_length: int | None = None
    dtype: str = "auto"
    """auto (float32 on CPU, bfloat16 on CUDA) | float32 | bfloat16 | float16."""
    attention: str = "auto"
    """auto (what transformers picks for the architecture) | eager | sdpa | flash_attention_2."""
    batch_tokens: int | None = None
    """Padded tokens in one forward pass; None: a default for the device."""
    truncation: Literal["document", "reference"] = "document"
    score_label: int | str | None = None
    trust_remote_code: bool = False
    max_document_bytes: int | None = 16 << 20
    """Of UTF-8; a document above it is a failure. It decides whether a document is scored, not how, so it is no
    part of the fingerprint."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PairFailure:
    """Why pair `index` has no score. `stage` is "tokenize" or "score"."""

    index: int
    stage: Literal["tokenize", "score"]
    error_type: str
    message: str
    traceback: str


@dataclass(slots=True, kw_only=True)
class Scored:
    """Scores of n pairs, in the order given. A pair in `failures` has NaN as its score."""

    scores: npt.NDArray[np.float32]
    """[n], finite except for failures."""
    label_scores: npt.NDArray[np.float32] | None
    """[n, labels] where the model has several labels."""
    n_tokens: npt.NDArray[np.int32]
    """[n], after truncation, special tokens included."""
    truncated: npt.NDArray[np.bool_]
    """[n]"""
    failures: list[PairFailure]


@dataclass(frozen=True, slots=True, kw_only=True)
class Preflight:
    """What a ranker was found to do before its first document; empty for a ranker of the user's own.

    Figures: `canaries` scored; their `spread`; the largest difference `alone_against_batched` and
    `against_float32`; `new_ties`, pairs of them that differ in float32 only.
    """

    figures: Mapping[str, float] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()
    """One line each, for people."""


class Prepared(Protocol):
    """A shard's pairs. Opaque to the caller."""

    def __len__(self) -> int: ...


class Ranker(Protocol):
    """What a worker holds: built once by `ranker.load.load`, then prepare → tokenize → score → result for
    every shard.

    `tokenize` may run in one thread while `score` runs in another; neither runs twice at the same time.
    """

    @property
    def info(self) -> Mapping[str, str]:
        """What was resolved: device, dtype, threads, library versions, batch_tokens. For people."""
        ...

    @property
    def preflight(self) -> Preflight:
        """What was tried before the first document, and what came of it."""
        ...

    @property
    def label_scores(self) -> bool:
        """Whether the model has several labels, so that `Scored.label_scores` is not None."""
        ...

    def prepare(self, pairs: Sequence[Pair]) -> Prepared:
        """Take in n pairs. A pair that cannot be scored becomes a failure, here as later, never an exception."""
        ...

    def tokenize(self, prepared: Prepared) -> Iterator[int]:
        """Tokenise; yields how many pairs are done now and then. `score` does what is left of it."""
        ...

    def score(self, prepared: Prepared) -> Iterator[int]:
        """Run the forward passes; yields how many pairs are done after each batch (ascending, last = n)."""
        ...

    def result(self, prepared: Prepared) -> Scored:
        """The scores, once `score` is exhausted."""
        ...


class CustomRanker(Protocol):
    """A ranker of the user's own: `kind: custom`, `class: module:Name`, `options: {…}`.

    The class is imported on the driver (for `fingerprint`) and on every worker. torch is not imported
    unless the class does so.
    """

    def __init__(self, **options: Any) -> None: ...

    @classmethod
    def fingerprint(cls, **options: Any) -> str:
        """A text that changes whenever scores would: say, a version and the hash of a weights file."""
        ...

    def score(self, pairs: Sequence[Pair]) -> Sequence[float] | npt.NDArray[np.floating[Any]]:
        """One number a pair, in order. An exception is narrowed down to the pairs that raise it alone."""
        ...
