"""Cross-encoders: one forward pass sees query and document together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ranker.batching import Cut, IntArray
from ranker.clip import Clipper
from ranker.encode import Features, ahead, answer, features, untruncated_ids
from ranker.errors import RankerError
from ranker.rooms import Rooms
from ranker.score import Answer
from ranker.types import Pair, RankerSpec


class CrossEncoderBackend:
    """A `sentence_transformers.CrossEncoder`, taken over after it is loaded: its `predict`, pass by pass."""

    def __init__(self, model: Any, spec: RankerSpec, *, limit: int, score_label: int, cut: Cut) -> None:
        self._model = model.eval()
        self._device: torch.device = model.device
        # `preprocess` does not look at default_prompt_name; `predict` resolves it first.
        self._prompt = model.prompts.get(model.default_prompt_name) if model.default_prompt_name else None
        self.labels: int = model.num_labels
        self.score_label = score_label
        self.budget, self.overhead = cut.budget, cut.overhead
        self.ahead = ahead(self._device)
        self._text_kwargs: dict[str, Any] = {} if spec.max_length is None else {"max_length": spec.max_length}
        self._document_only = spec.truncation == "document"
        if self._document_only:
            self._rooms = Rooms(self._bare_lengths, limit - 1)  # at least one token for the document
            self._cut_document_only(spec)
        self._clip = Clipper(
            model.tokenizer,
            limit,
            kept=lambda document: int(self._features([("a", document)]).lengths[0]),
            ids=lambda document: untruncated_ids(model, [("a", document)], prompt=self._prompt)[0],
        )

    def refuse(self, pairs: Sequence[Pair]) -> Mapping[int, BaseException]:
        return self._rooms.refuse(pairs) if self._document_only else {}

    def encode(self, pairs: Sequence[Pair]) -> Features:
        queries = [query for query, _ in pairs]
        cut_as_well = [] if self._document_only else [(self._prompt or "") + query for query in queries]
        documents = self._clip([text for _, text in pairs], cut_as_well)
        return self._features(list(zip(queries, documents, strict=True)))

    def forward(self, block: Features, rows: IntArray) -> Answer:
        with torch.inference_mode():
            scores = self._model(block.batch(rows, self._device))["scores"]  # [rows, labels]
            # First to float32, then through the activation: a sigmoid in half precision ties the top at 1.0.
            scores = self._model.activation_fn(scores.float())
            return answer(scores.reshape(len(rows), self.labels))

    def release(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def describe(self) -> dict[str, str]:
        return {"max_length": str(self._model.max_seq_length)}

    def _features(self, pairs: list[Pair]) -> Features:
        kwargs = {"text": dict(self._text_kwargs)}
        return features(self._model.preprocess(pairs, prompt=self._prompt, processing_kwargs=kwargs))

    def _bare_lengths(self, queries: list[str]) -> list[int]:
        """Tokens of each query with an empty document: prompt, template, special tokens and all."""
        pairs = [(query, "") for query in queries]
        return [len(ids) for ids in untruncated_ids(self._model, pairs, prompt=self._prompt)]

    def _cut_document_only(self, spec: RankerSpec) -> None:
        """Make truncation spare the query.

        A plain pair takes the tokenizer's `only_second`. A chat template renders the pair to one text, which
        the library cuts on the right and then repairs the template's tail of: that spares the query exactly
        when the template puts the document after it, so this is tried out, not guessed from a name.
        """
        if "message" not in self._model[0].modality_config:
            self._text_kwargs["truncation"] = "only_second"
        elif self._model.tokenizer.truncation_side != "right" or not self._query_before_document():
            raise RankerError(
                f"ranker.checkpoint {spec.checkpoint}: its chat template puts the document before the query, so "
                "that truncation would cut the query; set ranker.truncation: reference to accept that"
            )

    def _query_before_document(self) -> bool:
        """Whether everything from the document's first token on is the same for any query."""
        pairs = [("alpha", "bravo"), ("zulu", "bravo"), ("alpha", "yankee")]
        base, other_query, other_document = untruncated_ids(self._model, pairs, prompt=self._prompt)
        from_document = len(base) - _common_prefix(base, other_document)
        return _common_prefix(base[::-1], other_query[::-1]) >= from_document


def _common_prefix(left: Sequence[int], right: Sequence[int]) -> int:
    pairs = zip(left, right, strict=False)
    return next((index for index, (a, b) in enumerate(pairs) if a != b), min(len(left), len(right)))
