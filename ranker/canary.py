"""Canaries: pairs of every kind that a checkpoint must score sanely before the first document does.

Each is scored alone and beside others, in float32 and in the run's dtype. No torch: it speaks to rankers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ranker.errors import NonFiniteScore, RankerError
from ranker.score import Backend, FloatArray, ShardRanker
from ranker.types import Pair, PairFailure, Preflight, Scored
from ranker.verdict import Verdict, check_device, one_line, verdict

LONGEST = 1_024
"""Words of the longest canary: enough to be cut by the usual limits, few enough for a CPU and a large model."""

TOLERANCE = {"float32": 1e-3, "float16": 1e-2, "bfloat16": 6e-2}
"""How far a score may move, times 1 + |score|. Far above rounding (float32: 1e-5), far below what padding
that is not masked does; bfloat16 keeps 8 bits, and a dozen layers add up some 15 half-steps of 2^-8."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Canaries:
    """What the canaries score: NaN where they fail. `alone` and `batched` [n], in the order of `pairs`."""

    alone: FloatArray
    batched: FloatArray
    failures: Mapping[str, PairFailure]


def pairs(limit: int) -> dict[str, Pair]:
    """Name → pair. `limit`: the longest input in tokens; the last pair is longer, where that is affordable."""
    words = ["copy", "a", "file", "from", "one", "directory", "to", "another", "and", "keep", "its", "permissions"]
    count = min(2 * limit, LONGEST)
    return {
        "short": ("a", "b"),
        "ordinary": ("a", "Copy a file, and keep its permissions."),
        "long": ("a", " ".join(words * 4)),
        "empty": ("a", ""),
        "blank": ("a", " \n\t "),
        "not Latin": ("a", "複製檔案 копировать файл ファイルをコピーする نسخ ملف 파일 복사"),
        "symbols": ("a", "é e\u0301 👩‍👩‍👧 \u200b\u00a0 ½ ∑ \x07 <b>&amp;</b> [SEP] </s>"),
        "very long": ("a", " ".join(words[n % len(words)] for n in range(count))),
    }


def filling(limit: int) -> Pair:
    """A pair that fills an input of `limit` tokens, however long."""
    return ("a", "file " * 2 * limit)


def score(where: str, backend: Backend[Any], limit: int) -> Canaries:
    """Score the canaries alone, then together: short beside long, so that there is padding.

    Raises:
        RankerError: pairs that can be scored alone cannot be scored together.
        DeviceBroken: the accelerator fails.
    """
    named = pairs(limit)
    names, every = list(named), list(named.values())
    ranker = ShardRanker[Any](backend, {})
    failures: dict[str, PairFailure] = {}
    alone = np.full(len(every), np.nan, dtype=np.float32)
    for n, name in enumerate(names):
        result = _scored(ranker, every[n])
        alone[n] = result.scores[0]
        if result.failures:
            failures[name] = result.failures[0]
    fine = [n for n, name in enumerate(names) if name not in failures]
    batched = np.full(len(every), np.nan, dtype=np.float32)
    # The very long one beside the shortest only: all of them that wide would be slow on a CPU.
    for batch in (fine[:1] + fine[-1:], fine[:-1]):
        if batch:
            batched[batch] = _together(where, backend, [every[n] for n in batch])
    return Canaries(alone=alone, batched=batched, failures=failures)


def _scored(ranker: ShardRanker[Any], pair: Pair) -> Scored:
    prepared = ranker.prepare([pair])
    for _ in ranker.score(prepared):
        pass
    return ranker.result(prepared)


def _together(where: str, backend: Backend[Any], pairs: Sequence[Pair]) -> FloatArray:
    """One forward pass, and no second try: a model that only takes one pair at a time is refused here."""
    try:
        scores = backend.forward(backend.encode(pairs), np.arange(len(pairs)))()
    except Exception as error:
        check_device(error)
        if verdict(error) is Verdict.MEMORY:  # the run itself halves its batches; here there is nothing to compare
            return np.full(len(pairs), np.nan, dtype=np.float32)
        raise RankerError(f"{where} cannot score a pair: {type(error).__name__}: {one_line(error)}") from error
    return scores[:, backend.score_label]


def judge(where: str, dtype: str, found: Canaries, reference: Canaries | str | None) -> Preflight:
    """What the canaries say of a checkpoint in `dtype`; `reference`: the same in float32, or why there is none.

    Raises:
        RankerError: it cannot score ordinary pairs, scores all alike, or lets padding into a score.
    """
    _refuse_failures(where, dtype, found)
    _refuse_constant(where, dtype, found)
    exact = found if dtype == "float32" else reference
    if isinstance(exact, Canaries):
        _refuse_padding(where, exact)
    warnings = [_failing(name, failure) for name, failure in found.failures.items()]
    figures: dict[str, float] = {
        "canaries": len(found.alone),
        "spread": float(np.nanmax(found.alone) - np.nanmin(found.alone)),
    }
    batched = _largest(found.alone, found.batched)
    if batched is not None:
        figures["alone_against_batched"] = batched
    if reference is not None:
        warnings += _compare(dtype, found, reference, figures)
    return Preflight(figures=figures, warnings=tuple(warnings))


def _refuse_failures(where: str, dtype: str, found: Canaries) -> None:
    for name in ("short", "ordinary"):
        failure = found.failures.get(name)
        if failure is None:
            continue
        if failure.error_type == NonFiniteScore.__name__:
            raise RankerError(f"{where}: scores are not finite in ranker.dtype {dtype}; try bfloat16 or float32")
        if failure.error_type == "QueryTooLong":
            raise RankerError(
                f"ranker.max_length leaves no room for a document: with prompt or chat template, {failure.message}"
            )
        raise RankerError(f"{where} cannot score a pair: {failure.error_type}: {failure.message}")


def _refuse_constant(where: str, dtype: str, found: Canaries) -> None:
    scores = found.alone[np.isfinite(found.alone)]
    if (scores == scores[0]).all():
        raise RankerError(
            f"{where}: {len(scores)} different pairs all score {scores[0]:g} in ranker.dtype {dtype}: "
            "it does not rank; check its weights and its activation, or try float32"
        )


def _refuse_padding(where: str, exact: Canaries) -> None:
    beyond = _beyond(exact.alone, exact.batched, TOLERANCE["float32"])
    if beyond.any():
        n = int(np.argmax(beyond))
        raise RankerError(
            f"{where}: a pair ({list(pairs(0))[n]}) scores {exact.alone[n]:g} alone and {exact.batched[n]:g} "
            "beside others: its padding is not masked (does pad_token_id of config.json match the tokenizer's?)"
        )


def _failing(name: str, failure: PairFailure) -> str:
    return (
        f"a canary document ({name}) cannot be scored: {failure.error_type}: {failure.message}; "
        "documents like it will be dead letters"
    )


def _compare(dtype: str, found: Canaries, reference: Canaries | str, figures: dict[str, float]) -> list[str]:
    """Warnings about half precision; fills in its figures."""
    warnings = []
    if _beyond(found.alone, found.batched, TOLERANCE[dtype]).any():
        warnings.append(
            f"in {dtype} a document's score moves by {figures['alone_against_batched']:.2g} with its batch-mates"
        )
    if isinstance(reference, str):
        return [*warnings, f"{dtype} was not compared with float32: {reference}"]
    difference = _largest(found.alone, reference.alone)
    if difference is None:
        return [*warnings, f"{dtype} was not compared with float32: no canary can be scored in it"]
    figures["against_float32"] = difference
    figures["new_ties"] = float(_new_ties(found.alone, reference.alone))
    if _beyond(found.alone, reference.alone, TOLERANCE[dtype]).any():
        warnings.append(f"{dtype} moves scores by up to {figures['against_float32']:.2g} against float32")
    if figures["new_ties"]:
        warnings.append(f"{figures['new_ties']:.0f} pairs of canaries tie in {dtype} that differ in float32")
    return warnings


def _new_ties(scores: FloatArray, reference: FloatArray) -> int:
    """Pairs of canaries with one score that differ by more than rounding in float32."""
    tied = scores[:, None] == scores[None, :]
    differ = np.abs(reference[:, None] - reference[None, :]) > 1e-5 * (1 + np.abs(reference))
    return int(np.triu(tied & differ, 1).sum())


def _beyond(scores: FloatArray, reference: FloatArray, tolerance: float) -> npt.NDArray[np.bool_]:
    with np.errstate(invalid="ignore"):
        difference = np.abs(scores - reference)
        return np.asarray(difference > tolerance * (1 + np.abs(reference)))


def _largest(scores: FloatArray, reference: FloatArray) -> float | None:
    """The largest difference; None where there is nothing to compare."""
    differences = np.abs(scores - reference)
    finite = differences[np.isfinite(differences)]
    return float(finite.max()) if len(finite) else None
