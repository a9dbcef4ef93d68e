"""What a checkpoint must do before its first document, and what is only warned of."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ranker import canary, checkpoint
from ranker.batching import IntArray
from ranker.custom import CustomBlock
from ranker.errors import DeviceBroken, RankerError
from ranker.load import load
from ranker.score import Answer
from ranker.types import Pair, Preflight, RankerSpec
from tests import checkpoints

Judge = Callable[[str, int], float]
LIMIT = 32


class Backend:
    """Scores a text by its length; `judge(text, rows of the batch)` may say otherwise, or raise."""

    budget = 100_000
    ahead = 1
    overhead = 0
    labels = 1
    score_label = 0

    def __init__(self, judge: Judge) -> None:
        self.judge = judge

    def refuse(self, pairs: Sequence[Pair]) -> Mapping[int, BaseException]:
        return {}

    def encode(self, pairs: Sequence[Pair]) -> CustomBlock:
        lengths = np.array([max(len(text), 1) for _, text in pairs], dtype=np.int32)
        return CustomBlock(pairs=pairs, lengths=lengths, n_tokens=lengths, truncated=lengths > LIMIT)

    def forward(self, block: CustomBlock, rows: IntArray) -> Answer:
        values = np.array([[self.judge(block.pairs[row][1], len(rows))] for row in rows], dtype=np.float32)
        return lambda: values

    def release(self) -> None: ...

    def describe(self) -> dict[str, str]:
        return {}


def by_length(text: str, _: int = 1) -> float:
    return float(len(text)) / 100


def scored(judge: Judge) -> canary.Canaries:
    return canary.score("here", Backend(judge), LIMIT)


def verdict(judge: Judge, dtype: str = "float32", exact: Judge | str | None = None) -> Preflight:
    return canary.judge("here", dtype, scored(judge), scored(exact) if callable(exact) else exact)


def refusal(judge: Judge, dtype: str = "float32", exact: Judge | None = None) -> str:
    with pytest.raises(RankerError) as caught:
        verdict(judge, dtype, exact)
    return str(caught.value)


def test_canaries_of_a_sane_ranker_give_figures_and_no_warning() -> None:
    found = verdict(by_length)
    assert found.warnings == ()
    assert found.figures["canaries"] == len(canary.pairs(LIMIT))
    assert found.figures["alone_against_batched"] == 0
    assert found.figures["spread"] > 1


def test_canaries_hold_a_text_that_is_cut_whatever_the_limit() -> None:
    assert len(canary.pairs(200)["very long"][1].split()) > 200


def test_canary_whose_score_depends_on_its_neighbours_is_refused() -> None:
    assert "its padding is not masked" in refusal(lambda text, rows: by_length(text) + (0.01 if rows > 1 else 0))


def test_canary_that_moves_by_rounding_only_is_fine() -> None:
    found = verdict(lambda text, rows: by_length(text) + (1e-6 if rows > 1 else 0))
    assert 0 < found.figures["alone_against_batched"] < 1e-4
    assert not found.warnings


def test_canaries_that_all_score_alike_are_refused() -> None:
    assert "different pairs all score 0.5" in refusal(lambda text, rows: 0.5)


def test_canaries_that_are_not_finite_are_refused() -> None:
    assert "scores are not finite in ranker.dtype float16" in refusal(lambda text, rows: float("nan"), "float16")


def test_canary_of_an_odd_kind_that_fails_is_a_warning_that_names_it() -> None:
    def judge(text: str, rows: int) -> float:
        if not text.strip():
            raise ValueError("nothing to read")
        return by_length(text)

    warnings = verdict(judge).warnings
    assert len(warnings) == 2
    assert "a canary document (empty) cannot be scored: ValueError: nothing to read" in warnings[0]
    assert "(blank)" in warnings[1]


def test_ordinary_canary_that_fails_is_refused() -> None:
    def judge(text: str, rows: int) -> float:
        raise KeyError("token_type_ids")

    assert "cannot score a pair: KeyError: 'token_type_ids'" in refusal(judge)


def test_canaries_that_cannot_be_scored_together_are_refused() -> None:
    def judge(text: str, rows: int) -> float:
        if rows > 1:
            raise ValueError("Cannot handle batch sizes > 1")
        return by_length(text)

    assert "cannot score a pair: ValueError: Cannot handle batch sizes > 1" in refusal(judge)


def test_canaries_that_run_out_of_memory_together_are_not_compared() -> None:
    def judge(text: str, rows: int) -> float:
        if rows > 1:
            raise MemoryError
        return by_length(text)

    assert "alone_against_batched" not in verdict(judge).figures


def test_canary_on_a_broken_device_says_so() -> None:
    def judge(text: str, rows: int) -> float:
        if rows > 1:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        return by_length(text)

    with pytest.raises(DeviceBroken):
        scored(judge)


def test_half_precision_near_float32_gives_its_difference() -> None:
    found = verdict(lambda text, rows: by_length(text) + 0.01, "bfloat16", by_length)
    assert found.warnings == ()
    assert found.figures["against_float32"] == pytest.approx(0.01, rel=1e-3)
    assert found.figures["new_ties"] == 0


def test_half_precision_far_from_float32_is_a_warning() -> None:
    warnings = verdict(lambda text, rows: 2 * by_length(text) + 1, "bfloat16", by_length).warnings
    assert any("bfloat16 moves scores by up to" in warning for warning in warnings)


def test_half_precision_that_ties_what_differs_is_a_warning() -> None:
    warnings = verdict(lambda text, rows: round(by_length(text)), "float16", by_length).warnings
    assert any("pairs of canaries tie in float16 that differ in float32" in warning for warning in warnings)


def test_half_precision_without_a_comparison_says_so() -> None:
    found = verdict(by_length, "bfloat16", "it is too large")
    assert found.warnings == ("bfloat16 was not compared with float32: it is too large",)
    assert "against_float32" not in found.figures


def test_half_precision_of_a_model_that_scores_nothing_in_float32_is_not_called_equal() -> None:
    def exact(text: str, rows: int) -> float:
        raise RuntimeError("only half precision here")

    found = verdict(by_length, "bfloat16", exact)
    assert "no canary can be scored in it" in found.warnings[0]
    assert "against_float32" not in found.figures


def test_padding_in_float32_is_refused_though_the_run_is_in_half_precision() -> None:
    def exact(text: str, rows: int) -> float:
        return by_length(text) + (0.01 if rows > 1 else 0)

    assert "its padding is not masked" in refusal(by_length, "bfloat16", exact)


def test_load_whose_copy_in_float32_fails_goes_on_without(
    cross_encoder_path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = checkpoint._load

    def load_but_not_twice(spec: RankerSpec, path: str, device: torch.device, dtype: torch.dtype) -> Any:
        if dtype == torch.float32:
            raise RankerError("does not fit into the memory of cuda")
        return original(spec, path, device, dtype)

    monkeypatch.setattr(checkpoint, "_load", load_but_not_twice)
    ranker = load(RankerSpec(kind="cross-encoder", checkpoint=cross_encoder_path, dtype="bfloat16"), threads=1)
    assert ranker.preflight.warnings == (
        "bfloat16 was not compared with float32: does not fit into the memory of cuda",
    )


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_load_tries_the_canaries_in_the_runs_dtype(cross_encoder_path: str, dtype: str) -> None:
    ranker = load(RankerSpec(kind="cross-encoder", checkpoint=cross_encoder_path, dtype=dtype), threads=1)
    figures = ranker.preflight.figures
    assert figures["canaries"] == len(canary.pairs(LIMIT))
    assert figures["alone_against_batched"] < canary.TOLERANCE[dtype]
    assert ("against_float32" in figures) == (dtype == "bfloat16")


def test_load_of_a_checkpoint_that_scores_all_alike_is_refused(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    file = Path(checkpoints.tiny_cross_encoder(tmp_path)) / "model.safetensors"
    weights = load_file(file)
    weights["classifier.weight"].zero_()
    save_file(weights, file, metadata={"format": "pt"})
    with pytest.raises(RankerError, match="different pairs all score"):
        load(RankerSpec(kind="cross-encoder", checkpoint=str(tmp_path)), threads=1)
