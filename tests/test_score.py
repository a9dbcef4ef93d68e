"""The course of a shard, with a backend of a few lines: no torch, no checkpoint."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import pytest

from ranker import score as course
from ranker.batching import IntArray
from ranker.custom import CustomBlock
from ranker.errors import DeviceBroken
from ranker.score import Answer, FloatArray, ShardRanker
from ranker.types import Pair, Scored
from ranker.verdict import PromiseError, Verdict, verdict


class OutOfMemoryError(RuntimeError):
    """Named as torch's is."""


class AcceleratorError(RuntimeError):
    """Named as torch's is."""


class PanicException(BaseException):
    """Not an Exception, as pyo3's is not."""


class WordBackend:
    """One token a word; the score is the number in the text. `judge` may raise for the texts of a batch."""

    ahead = 1
    overhead = 1_000
    late = False
    """Whether a pass fails when it is waited for, as on a GPU, not when it is started."""

    def __init__(self, *, budget: int = 8, labels: int = 1, judge: Callable[[list[str], int], None] | None = None):
        self.budget = budget
        self.labels = labels
        self.score_label = labels - 1
        self.judge = judge
        self.passes: list[list[str]] = []
        self.released = 0

    def refuse(self, pairs: Sequence[Pair]) -> Mapping[int, BaseException]:
        return {i: ValueError("query too long") for i, (query, _) in enumerate(pairs) if query == "long"}

    def encode(self, pairs: Sequence[Pair]) -> CustomBlock:
        if any("surrogate" in text for _, text in pairs):
            raise TypeError("TextInputSequence must be str")
        if any("panic" in text for _, text in pairs):
            raise PanicException("index out of bounds")
        lengths = np.array([len(text.split()) for _, text in pairs], dtype=np.int32)
        return CustomBlock(pairs=pairs, lengths=lengths, n_tokens=lengths, truncated=lengths > 5)

    def forward(self, block: CustomBlock, rows: IntArray) -> Answer:
        texts = [block.pairs[row][1] for row in rows]
        self.passes.append(texts)
        if self.late:
            return lambda: self._compute(texts, len(rows) * int(block.lengths[rows].max()))
        values = self._compute(texts, len(rows) * int(block.lengths[rows].max()))
        return lambda: values

    def _compute(self, texts: list[str], tokens: int) -> FloatArray:
        if self.judge is not None:
            self.judge(texts, tokens)
        first = np.array([[float(text.split()[0])] for text in texts], dtype=np.float32)
        return np.concatenate([first * (label + 1) for label in range(self.labels)], axis=1)

    def release(self) -> None:
        self.released += 1

    def describe(self) -> dict[str, str]:
        return {}


@pytest.fixture(
    autouse=True, params=[(1, False), (4, False), (4, True)], ids=["at-once", "ahead", "ahead-fails-late"]
)
def _course(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is promised holds however many passes are on their way, and whenever they fail."""
    ahead, late = request.param
    monkeypatch.setattr(WordBackend, "ahead", ahead)
    monkeypatch.setattr(WordBackend, "late", late)


def run(backend: WordBackend, pairs: Sequence[Pair]) -> tuple[Scored, list[int]]:
    ranker = ShardRanker(backend, {})
    prepared = ranker.prepare(pairs)
    assert len(prepared) == len(pairs)
    progress = list(ranker.score(prepared))
    return ranker.result(prepared), progress


def texts(*words: str) -> list[Pair]:
    return [("q", word) for word in words]


def test_score_of_texts_of_all_lengths_keeps_their_order() -> None:
    lengths = np.random.default_rng(0).integers(1, 12, 50)
    pairs = texts(*(" ".join([str(i)] + ["w"] * int(n - 1)) for i, n in enumerate(lengths)))
    scored, progress = run(WordBackend(), pairs)
    assert scored.scores.tolist() == list(range(50))
    assert scored.n_tokens.tolist() == lengths.tolist()
    assert scored.truncated.tolist() == (lengths > 5).tolist()
    assert progress == sorted(progress)
    assert progress[-1] == 50


def test_score_of_a_shard_too_large_for_one_call_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(course, "SPAN_CHARS", 20)
    pairs = texts(*(f"{i} w w" for i in range(30)))
    ranker = ShardRanker(WordBackend(), {})
    tokenized = list(ranker.tokenize(ranker.prepare(pairs)))
    scored, progress = run(WordBackend(), pairs)
    assert len(tokenized) > 5
    assert tokenized[-1] == 30
    assert scored.scores.tolist() == list(range(30))
    assert progress[-1] == 30


def test_score_of_nothing_is_empty() -> None:
    scored, progress = run(WordBackend(), [])
    assert len(scored.scores) == 0
    assert progress == [0]


def test_score_of_identical_pairs_runs_once_and_is_given_to_all() -> None:
    backend = WordBackend()
    scored, progress = run(backend, [("q", "1"), ("q", "2"), ("q", "1"), ("other", "1"), ("q", "1")])
    assert scored.scores.tolist() == [1, 2, 1, 1, 1]
    assert sum(len(batch) for batch in backend.passes) == 3
    assert progress[-1] == 5


def test_score_of_a_failing_identical_pair_fails_all_of_them() -> None:
    scored, progress = run(WordBackend(), texts("nan", "2", "nan"))
    assert [failure.index for failure in scored.failures] == [0, 2]
    assert progress[-1] == 3


def test_score_that_is_not_finite_fails_that_pair_only() -> None:
    scored, _ = run(WordBackend(), texts("1", "nan", "inf", "4"))
    assert [(f.index, f.stage, f.error_type) for f in scored.failures] == [
        (1, "score", "NonFiniteScore"),
        (2, "score", "NonFiniteScore"),
    ]
    assert np.isnan(scored.scores[[1, 2]]).all()
    assert scored.scores[[0, 3]].tolist() == [1, 4]


def test_score_with_several_labels_takes_the_named_one() -> None:
    scored, _ = run(WordBackend(labels=3), texts("1", "2"))
    assert scored.scores.tolist() == [3, 6]
    assert scored.label_scores is not None
    assert scored.label_scores.tolist() == [[1, 2, 3], [2, 4, 6]]


def test_prepare_with_texts_that_cannot_be_tokenised_finds_exactly_those() -> None:
    words = [str(i) for i in range(40)]
    words[7], words[8], words[31] = "surrogate", "surrogate too", "panic"
    scored, progress = run(WordBackend(), texts(*words))
    assert [(f.index, f.stage, f.error_type) for f in scored.failures] == [
        (7, "tokenize", "TypeError"),
        (8, "tokenize", "TypeError"),
        (31, "tokenize", "PanicException"),
    ]
    assert "must be str" in scored.failures[0].traceback
    assert int(np.isnan(scored.scores).sum()) == 3
    assert progress[-1] == 40


def test_prepare_with_every_pair_refused_still_reports_all_as_done() -> None:
    scored, progress = run(WordBackend(), [("long", "1"), ("long", "2")])
    assert [f.message for f in scored.failures] == ["query too long", "query too long"]
    assert progress == [2]


@pytest.mark.parametrize(
    ("text", "limit", "size"),
    [
        ("1 ü", 3, "4"),
        ("1 😀😀", 9, "10"),
        ("1 中", 4, "5"),
        ("1 \ud800", 4, "5"),
        ("1 w w", 4, "at least 5"),
        ("1 üüü", 4, "at least 5"),
    ],
)
def test_prepare_with_a_document_over_the_limit_fails_it_before_it_is_tokenised(
    text: str, limit: int, size: str
) -> None:
    ranker = ShardRanker(WordBackend(), {}, max_document_bytes=limit)
    prepared = ranker.prepare(texts("1", text, "2 w", text))
    assert list(ranker.score(prepared))[-1] == 4
    scored = ranker.result(prepared)
    assert [(f.index, f.stage, f.error_type) for f in scored.failures] == [
        (1, "tokenize", "DocumentTooLarge"),
        (3, "tokenize", "DocumentTooLarge"),
    ]
    assert f"has {size} bytes" in scored.failures[0].message
    assert f"ranker.max_document_bytes is {limit}" in scored.failures[0].message
    assert scored.n_tokens.tolist() == [1, 0, 2, 0]


@pytest.mark.parametrize("limit", [None, 5])
def test_prepare_with_a_document_at_the_limit_scores_it(limit: int | None) -> None:
    ranker = ShardRanker(WordBackend(), {}, max_document_bytes=limit)
    prepared = ranker.prepare([("a query of any length", text) for text in ("1 w w", "2 中", "3 ü")])
    assert list(ranker.score(prepared))[-1] == 3
    assert not ranker.result(prepared).failures


def test_score_with_a_text_that_breaks_its_batch_finds_exactly_that_text() -> None:
    def judge(batch: list[str], tokens: int) -> None:
        if any(text.startswith("13 ") for text in batch):
            raise IndexError("index out of range in self")

    pairs = texts(*(f"{i} w" for i in range(30)))
    backend = WordBackend(budget=60, judge=judge)
    scored, progress = run(backend, pairs)
    assert [(f.index, f.stage, f.error_type) for f in scored.failures] == [(13, "score", "IndexError")]
    assert np.delete(scored.scores, 13).tolist() == [i for i in range(30) if i != 13]
    assert progress[-1] == 30
    assert len(backend.passes) < 15  # by halving, not one by one
    assert backend.budget == 60


def test_score_out_of_memory_halves_the_budget_and_keeps_it() -> None:
    def judge(batch: list[str], tokens: int) -> None:
        if tokens > 10:
            raise OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    backend = WordBackend(budget=64, judge=judge)
    ranker = ShardRanker(backend, {})
    for _ in range(2):  # the second shard starts with the smaller budget
        prepared = ranker.prepare(texts(*(f"{i} w" for i in range(40))))
        assert list(ranker.score(prepared))[-1] == 40
        assert ranker.result(prepared).scores.tolist() == list(range(40))
    assert backend.released == (2 if backend.late else 3)
    assert ranker.info["batch_tokens"] == "8"
    assert not ranker.result(prepared).failures


def test_score_out_of_memory_lets_go_of_the_failed_pass_before_the_next() -> None:
    """What the failed pass held must be free when memory is given back: else a document that fits fails too."""
    alive: list[int] = []

    class Tensor:
        pass

    def judge(batch: list[str], tokens: int) -> None:
        tensor = Tensor()
        alive.append(tokens)
        weakref.finalize(tensor, alive.remove, tokens)
        if tokens > 10:
            raise OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    class Releasing(WordBackend):
        def release(self) -> None:
            held.append(list(alive))

    held: list[list[int]] = []
    run(Releasing(budget=64, judge=judge), texts(*(f"{i} w" for i in range(40))))
    assert held
    assert not any(held)


def test_score_out_of_memory_with_a_batch_far_below_the_budget_shrinks_from_the_batch() -> None:
    def judge(batch: list[str], tokens: int) -> None:
        if len(batch) > 1:
            raise OutOfMemoryError("out of memory")

    backend = WordBackend(budget=1_000_000, judge=judge)
    scored, _ = run(backend, texts("1", "2", "3"))
    assert scored.scores.tolist() == [1, 2, 3]
    assert backend.budget == 1


def test_score_out_of_memory_with_one_row_fails_that_pair() -> None:
    def judge(batch: list[str], tokens: int) -> None:
        if tokens > 4:
            raise OutOfMemoryError("out of memory")

    scored, _ = run(WordBackend(budget=8, judge=judge), texts("1", "2 w w w w w", "3"))
    assert [(f.index, f.error_type) for f in scored.failures] == [(1, "OutOfMemoryError")]
    assert scored.scores[[0, 2]].tolist() == [1, 3]


def test_score_on_a_broken_device_raises() -> None:
    def judge(batch: list[str], tokens: int) -> None:
        raise AcceleratorError("CUDA error: device-side assert triggered")

    ranker = ShardRanker(WordBackend(judge=judge), {})
    with pytest.raises(DeviceBroken, match="device-side assert"):
        list(ranker.score(ranker.prepare(texts("1"))))


def test_score_with_a_broken_promise_fails_the_whole_batch() -> None:
    def judge(batch: list[str], tokens: int) -> None:
        raise PromiseError("3 pairs, 2 numbers")

    backend = WordBackend(judge=judge)
    scored, _ = run(backend, texts("1", "2", "3"))
    assert len(scored.failures) == 3
    assert len(backend.passes) == 1


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (OutOfMemoryError("x"), Verdict.MEMORY),
        (MemoryError(), Verdict.MEMORY),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory"), Verdict.MEMORY),
        (RuntimeError("CUDA out of memory."), Verdict.MEMORY),
        (AcceleratorError("CUDA error: out of memory"), Verdict.MEMORY),
        (AcceleratorError("CUDA error: an illegal memory access was encountered"), Verdict.DEVICE),
        (RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED"), Verdict.DEVICE),
        (RuntimeError("cuDNN error: CUDNN_STATUS_INTERNAL_ERROR"), Verdict.DEVICE),
        (ValueError("out of memory is what this text is about"), Verdict.PAIR),
        (KeyError("a text about a CUDA error"), Verdict.PAIR),
        (IndexError("index out of range in self"), Verdict.PAIR),
        (PromiseError("no numbers"), Verdict.BATCH),
    ],
)
def test_verdict_of_an_error_says_who_is_to_blame(error: BaseException, expected: Verdict) -> None:
    assert verdict(error) is expected


def test_verdict_of_torchs_own_out_of_memory_is_memory() -> None:
    import torch

    assert verdict(torch.OutOfMemoryError("CUDA out of memory.")) is Verdict.MEMORY
