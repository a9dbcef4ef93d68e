"""Which queries leave room for a document. Asked once a query, not once a pair."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from ranker.types import Pair
from ranker.verdict import is_document_error

REMEMBERED = 10_000
"""Queries whose answer is kept; enough for a query set, little enough for one query a document."""


class QueryTooLong(ValueError):  # noqa: N818 - read by people in the dead letters
    """The query alone takes the model's whole input."""


class Rooms:
    """Refuses the pairs whose query cannot be tokenised or leaves a document no token.

    Without it a query that is too long would fail every pair of a shard one by one, inside the tokenizer, with
    "Sequence to truncate too short to respect the provided max_length".
    """

    def __init__(self, bare_lengths: Callable[[list[str]], list[int]], limit: int) -> None:
        """`bare_lengths(queries)` is the tokens each query takes without any document; `limit` what it may take."""
        self._bare_lengths = bare_lengths
        self._limit = limit
        self._known: dict[str, BaseException | None] = {}

    def refuse(self, pairs: Sequence[Pair]) -> Mapping[int, BaseException]:
        """Index → reason of each pair that cannot be scored because of its query."""
        if len(self._known) > REMEMBERED:
            self._known.clear()
        self._learn([query for query in dict.fromkeys(query for query, _ in pairs) if query not in self._known])
        problems = ((index, self._known[query]) for index, (query, _) in enumerate(pairs))
        return {index: problem for index, problem in problems if problem is not None}

    def _learn(self, queries: list[str]) -> None:
        if not queries:
            return
        try:
            lengths = self._bare_lengths(queries)
        except BaseException as error:
            if not is_document_error(error):
                raise
            if len(queries) == 1:
                self._known[queries[0]] = error
                return
            for query in queries:  # one of them broke the call: each for itself
                self._learn([query])
            return
        self._known |= {query: self._judge(length) for query, length in zip(queries, lengths, strict=True)}

    def _judge(self, length: int) -> BaseException | None:
        if length <= self._limit:
            return None
        return QueryTooLong(f"the query takes {length} tokens where {self._limit} leave room for a document")
