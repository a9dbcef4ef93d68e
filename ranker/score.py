"""The course of a shard, the same for every kind of ranker: distinct pairs → blocks → batches → scores.

No torch here. What a kind of ranker does differently stands behind `Backend`, so that halving, narrowing down
and restoring the order are tested with a backend of ten lines.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Generic, Protocol, TypeVar, cast

import numpy as np
import numpy.typing as npt

from ranker.batching import IntArray, batches
from ranker.errors import DeviceBroken, DocumentTooLarge, NonFiniteScore
from ranker.types import Pair, PairFailure, Preflight, Prepared, Scored
from ranker.verdict import Verdict, failure, is_document_error, let_go, one_line, verdict

log = logging.getLogger(__name__)

FloatArray = npt.NDArray[np.float32]


Answer = Callable[[], FloatArray]


class Encoded(Protocol):
    """Some pairs of a shard, tokenised together."""

    @property
    def lengths(self) -> npt.NDArray[np.int32]:
        """[n] tokens of each pair, after truncation: what a forward pass costs."""
        ...

    @property
    def n_tokens(self) -> npt.NDArray[np.int32]:
        """[n] the number that is reported; 0 where the ranker does not tokenise."""
        ...

    @property
    def truncated(self) -> npt.NDArray[np.bool_]:
        """[n] whether tokens were cut off."""
        ...


E_ = TypeVar("E_", bound=Encoded)


class Backend(Protocol[E_]):
    """What differs between kinds of rankers."""

    labels: int
    score_label: int
    """Which of the labels is the score."""
    budget: int
    """Padded tokens of one forward pass. `ShardRanker` makes it smaller when memory runs out."""
    overhead: int
    """What a pass costs beside its tokens, in tokens: batches are cut so that padding costs no more than that."""
    ahead: int
    """Passes that may be on their way at once: 1 where `forward` computes at once, more where it only enqueues."""

    def refuse(self, pairs: Sequence[Pair]) -> Mapping[int, BaseException]:
        """The pairs that are known not to be scorable before anything is encoded (say, a query too long)."""
        ...

    def encode(self, pairs: Sequence[Pair]) -> E_:
        """Tokenise the pairs; raises if any of them cannot be."""
        ...

    def forward(self, block: E_, rows: IntArray) -> Answer:
        """Start a pass; what is returned waits for it: [rows, labels] in float32, after the activation."""
        ...

    def release(self) -> None:
        """Give cached memory back after running out of it."""
        ...

    def describe(self) -> dict[str, str]:
        """What was resolved, for people."""
        ...


@dataclass(slots=True, kw_only=True)
class Block(Generic[E_]):
    """What was encoded in one go. Batches never cross a block: widths and padding sides are those of one call."""

    members: IntArray
    """[rows] → index among the distinct pairs."""
    encoded: E_


@dataclass(slots=True, kw_only=True)
class PreparedPairs(Generic[E_]):
    """n pairs of which u are distinct, and what is known about each of the u so far."""

    pairs: list[Pair]
    """[u]"""
    inverse: IntArray
    """[n] → [0, u)"""
    weights: IntArray
    """[u] how many of the n pairs each distinct one stands for"""
    unencoded: deque[IntArray] = field(default_factory=deque)
    """Spans of distinct pairs that are still text."""
    blocks: list[Block[E_]] = field(default_factory=list)
    values: FloatArray
    """[u, labels], NaN until scored"""
    failures: dict[int, PairFailure] = field(default_factory=dict)
    """By distinct pair."""

    def __len__(self) -> int:
        return len(self.inverse)


class ShardRanker(Generic[E_]):
    """A `Ranker` over a backend: every promise of the protocol that is not about tensors is kept here."""

    def __init__(
        self, backend: Backend[E_], info: Mapping[str, str], *, max_document_bytes: int | None = None
    ) -> None:
        self._backend = backend
        self._info = dict(info)
        self.preflight = Preflight()
        self._max_document_bytes = max_document_bytes

    @property
    def info(self) -> Mapping[str, str]:
        """What was resolved; `batch_tokens` is the present budget, smaller after running out of memory."""
        return {**self._info, **self._backend.describe(), "batch_tokens": str(self._backend.budget)}

    @property
    def label_scores(self) -> bool:
        return self._backend.labels > 1

    def prepare(self, pairs: Sequence[Pair]) -> PreparedPairs[E_]:
        distinct: dict[Pair, int] = {}
        inverse = np.array([distinct.setdefault(pair, len(distinct)) for pair in pairs], dtype=np.intp)
        unique = list(distinct)
        prepared = PreparedPairs[E_](
            pairs=unique,
            inverse=inverse,
            weights=np.bincount(inverse, minlength=len(unique)).astype(np.intp),
            values=np.full((len(unique), self._backend.labels), np.nan, dtype=np.float32),
        )
        refused = {**self._backend.refuse(unique), **_too_large(unique, self._max_document_bytes)}
        for index, error in refused.items():
            prepared.failures[index] = failure(index, "tokenize", error)
        fine = np.array([i for i in range(len(unique)) if i not in prepared.failures], dtype=np.intp)
        prepared.unencoded.extend(_spans(unique, fine))
        return prepared

    def tokenize(self, prepared: Prepared) -> Iterator[int]:
        state = cast(PreparedPairs[E_], prepared)
        while state.unencoded:
            self._encode(state.pairs, state.unencoded.popleft(), state)
            yield sum(int(state.weights[block.members].sum()) for block in state.blocks)

    def score(self, prepared: Prepared) -> Iterator[int]:
        state = cast(PreparedPairs[E_], prepared)
        for _ in self.tokenize(state):
            pass
        done = sum(int(state.weights[index]) for index in state.failures)
        for block in state.blocks:
            for finished in self._score_block(state, block):
                done += int(state.weights[finished].sum())
                yield done
        if not state.blocks:
            yield done  # nothing to score: the last number is still n

    def result(self, prepared: Prepared) -> Scored:
        state = cast(PreparedPairs[E_], prepared)
        n_tokens = np.zeros(len(state.weights), dtype=np.int32)
        truncated = np.zeros(len(state.weights), dtype=np.bool_)
        for block in state.blocks:
            n_tokens[block.members] = block.encoded.n_tokens
            truncated[block.members] = block.encoded.truncated
        values = state.values[state.inverse]  # [n, labels]
        failed = [(index, state.failures.get(int(u))) for index, u in enumerate(state.inverse)]
        return Scored(
            scores=np.ascontiguousarray(values[:, self._backend.score_label]),
            label_scores=values if self.label_scores else None,
            n_tokens=n_tokens[state.inverse],
            truncated=truncated[state.inverse],
            failures=[replace(record, index=index) for index, record in failed if record is not None],
        )

    def _encode(self, unique: Sequence[Pair], members: IntArray, prepared: PreparedPairs[E_]) -> None:
        """Encode in one go; what fails is halved until the pairs that fail alone are found."""
        todo = [members]
        while todo:
            rows = todo.pop()
            try:
                encoded = self._backend.encode([unique[row] for row in rows])
            except BaseException as error:
                if not is_document_error(error):
                    raise
                if len(rows) == 1:
                    prepared.failures[int(rows[0])] = failure(int(rows[0]), "tokenize", error)
                else:
                    todo += _halves(rows)
            else:
                prepared.blocks.append(Block(members=rows, encoded=encoded))

    def _score_block(self, state: PreparedPairs[E_], block: Block[E_]) -> Iterator[IntArray]:
        """Score a block; yields the distinct pairs that are settled after each forward pass."""
        lengths = block.encoded.lengths
        todo = self._cut(lengths, np.arange(len(block.members), dtype=np.intp))
        started: deque[tuple[IntArray, Answer]] = deque()
        while todo or started:
            if todo and len(started) < self._backend.ahead:
                rows = todo.pop()
                if len(rows) > 1 and len(rows) * int(lengths[rows].max()) > self._backend.budget:
                    todo += self._cut(lengths, rows)  # it was cut before memory ran out
                    continue
                answer, error = self._start(block, rows)
                if answer is not None:
                    started.append((rows, answer))
                    continue
            else:
                rows, answer = started.popleft()
                error = self._finish(state, block, rows, answer)
            members = block.members[rows]
            if error is None:
                yield members
                continue
            match verdict(error), len(rows):
                case Verdict.DEVICE, _:
                    raise DeviceBroken(one_line(error)) from error
                case Verdict.MEMORY, count if count > 1:
                    self._shrink(count * int(lengths[rows].max()), error)
                    todo.append(rows)
                case Verdict.PAIR, count if count > 1:
                    todo += _halves(rows)
                case _:
                    for member in members:
                        state.failures[int(member)] = failure(int(member), "score", error)
                    yield members

    def _cut(self, lengths: npt.NDArray[np.int32], rows: IntArray) -> list[IntArray]:
        """Batches of `rows`, the widest last: that is where they are taken from."""
        cut = batches(lengths[rows], self._backend.budget, self._backend.overhead)
        return [rows[part] for part in reversed(cut)]

    def _start(self, block: Block[E_], rows: IntArray) -> tuple[Answer | None, BaseException | None]:
        """Start a forward pass: what waits for it, or what it raised."""
        try:
            return self._backend.forward(block.encoded, rows), None
        except Exception as error:  # noqa: BLE001 - where a pair's failure becomes a record
            return None, let_go(error)

    def _finish(
        self, state: PreparedPairs[E_], block: Block[E_], rows: IntArray, answer: Answer
    ) -> BaseException | None:
        """The values of a pass into `state`, or what it raised."""
        try:
            values = answer()
        except Exception as error:  # noqa: BLE001 - where a pair's failure becomes a record
            return let_go(error)
        members = block.members[rows]
        finite = np.isfinite(values).all(axis=1)
        state.values[members[finite]] = values[finite]
        for member, value in zip(members[~finite], values[~finite], strict=True):
            problem = NonFiniteScore(f"the score is not a finite number: {_numbers(value)}")
            state.failures[int(member)] = failure(int(member), "score", problem)
        return None

    def _shrink(self, tokens: int, error: BaseException) -> None:
        """Halve the budget below what did not fit, for good."""
        if tokens > self._backend.budget:
            return  # it was started before the pass that has made the budget smaller
        self._backend.release()
        self._backend.budget = max(tokens // 2, 1)
        log.warning("out of memory (%s): batch_tokens is now %d", one_line(error), self._backend.budget)


def _too_large(pairs: Sequence[Pair], limit: int | None) -> Mapping[int, BaseException]:
    """Index → reason of each pair whose document has more than `limit` bytes of UTF-8.

    A character has one to four, so that for nearly every text its length alone tells.
    """
    if limit is None:
        return {}
    problems = {}
    for index, (_, text) in enumerate(pairs):
        if 4 * len(text) <= limit:
            continue
        over = len(text) > limit
        size = len(text) if over else len(text.encode("utf-8", "surrogatepass"))
        if size > limit:
            problems[index] = DocumentTooLarge(
                f"the document has {'at least ' if over else ''}{size} bytes, and ranker.max_document_bytes is "
                f"{limit}: set it higher (null: no limit), and redrive"
            )
    return problems


SPAN_CHARS = 8_000_000
"""Characters that are tokenised in one call: of documents that are tokenised whole, what is cut off stays in memory
until its call is over, 80 bytes a character (eight texts of 5 MB in one call: 3.2 GB; one by one: 0.8 GB)."""


def _spans(pairs: Sequence[Pair], members: IntArray) -> Iterator[IntArray]:
    """Cut `members` where the characters since the last cut exceed SPAN_CHARS; one span for ordinary shards."""
    start, chars = 0, 0
    for stop, member in enumerate(members):
        query, text = pairs[member]
        size = len(query) + len(text)
        if chars and chars + size > SPAN_CHARS:
            yield members[start:stop]
            start, chars = stop, 0
        chars += size
    if start < len(members):
        yield members[start:]


def _halves(rows: IntArray) -> list[IntArray]:
    middle = len(rows) // 2
    return [rows[middle:], rows[:middle]]  # the first half is popped first


def _numbers(values: npt.NDArray[Any]) -> str:
    return ", ".join(str(value) for value in values[:5])
