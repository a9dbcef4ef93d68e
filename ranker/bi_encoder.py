"""Bi-encoders: query and document are embedded apart; the score is the cosine of the two."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from ranker.batching import Cut, IntArray, batches
from ranker.clip import Clipper
from ranker.encode import Features, ahead, answer, features, untruncated_ids
from ranker.rooms import Rooms
from ranker.score import Answer
from ranker.types import Pair, RankerSpec

REMEMBERED = 4_096
"""Query embeddings that are kept: 6 MB at 384 dimensions."""

_DOCUMENT_PROMPTS = ("document", "passage", "corpus")
"""The names `encode_document` looks for, in its order."""


@dataclass(slots=True, kw_only=True)
class BiBlock:
    """n documents and the q distinct queries they are asked about, tokenised."""

    documents: Features
    queries: Features
    query_texts: Sequence[str]
    """[q]"""
    query_rows: IntArray
    """[n] → [0, q)"""
    truncated: npt.NDArray[np.bool_]
    """[n] whether the document or its query was cut"""

    @property
    def lengths(self) -> npt.NDArray[np.int32]:
        return self.documents.lengths

    @property
    def n_tokens(self) -> npt.NDArray[np.int32]:
        return self.documents.lengths


class BiEncoderBackend:
    """A `SentenceTransformer`: `cos_sim(encode_query(q), encode_document(d))` of each pair."""

    labels = 1
    score_label = 0

    def __init__(self, model: Any, spec: RankerSpec, *, limit: int, cut: Cut) -> None:
        self._model = model.eval()
        self._device: torch.device = model.device
        self.budget, self.overhead = cut.budget, cut.overhead
        self.ahead = ahead(self._device)
        self._query_prompt = model.prompts.get("query", _default_prompt(model))
        named = (model.prompts[name] for name in _DOCUMENT_PROMPTS if name in model.prompts)
        self._document_prompt = next(named, _default_prompt(model))
        self._text_kwargs: dict[str, Any] = {} if spec.max_length is None else {"max_length": spec.max_length}
        self._vectors: dict[str, torch.Tensor] = {}
        query_limit = spec.max_length or getattr(model[0], "query_length", None) or limit
        document_limit = spec.max_length or getattr(model[0], "document_length", None) or limit
        self._clip = Clipper(
            model.tokenizer,
            document_limit,
            kept=lambda document: int(self._documents([document]).lengths[0]),
            ids=lambda document: untruncated_ids(model, [document], prompt=self._document_prompt, task="document")[
                0
            ],
        )
        # A query has its own input here, so it may fill it; in "reference" it may also be cut.
        self._rooms = Rooms(self._query_lengths, query_limit if spec.truncation == "document" else 1 << 62)

    def refuse(self, pairs: Sequence[Pair]) -> Mapping[int, BaseException]:
        return self._rooms.refuse(pairs)

    def encode(self, pairs: Sequence[Pair]) -> BiBlock:
        distinct: dict[str, int] = {}
        query_rows = np.array([distinct.setdefault(query, len(distinct)) for query, _ in pairs], dtype=np.intp)
        queries = self._features(list(distinct), self._query_prompt, "query")
        documents = self._documents(self._clip([text for _, text in pairs]))
        return BiBlock(
            documents=documents,
            queries=queries,
            query_texts=list(distinct),
            query_rows=query_rows,
            truncated=documents.truncated | queries.truncated[query_rows],
        )

    def forward(self, block: BiBlock, rows: IntArray) -> Answer:
        with torch.inference_mode():
            queries = self._query_vectors(block, block.query_rows[rows])  # [rows, dim]
            documents = self._embed(block.documents, rows, "document")  # [rows, dim]
            return answer((queries * documents).sum(1, keepdim=True))  # [rows, 1]

    def release(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def describe(self) -> dict[str, str]:
        return {"max_length": str(self._model.max_seq_length)}

    def _documents(self, texts: list[str]) -> Features:
        return self._features(texts, self._document_prompt, "document")

    def _features(self, texts: list[str], prompt: str | None, task: str) -> Features:
        kwargs = {"text": dict(self._text_kwargs)}
        return features(self._model.preprocess(texts, prompt=prompt, task=task, processing_kwargs=kwargs))

    def _query_lengths(self, queries: list[str]) -> list[int]:
        return [len(ids) for ids in untruncated_ids(self._model, queries, prompt=self._query_prompt, task="query")]

    def _query_vectors(self, block: BiBlock, wanted: IntArray) -> torch.Tensor:
        """[len(wanted), dim] unit vectors of the block's queries `wanted`, each embedded once and remembered."""
        rows = np.unique(wanted)
        new = np.array([row for row in rows if block.query_texts[row] not in self._vectors], dtype=np.intp)
        for batch in batches(block.queries.lengths[new], self.budget, self.overhead):
            vectors = self._embed(block.queries, new[batch], "query")
            self._vectors |= {
                block.query_texts[row]: vector for row, vector in zip(new[batch], vectors, strict=True)
            }
        found = torch.stack([self._vectors[block.query_texts[row]] for row in rows])
        while len(self._vectors) > REMEMBERED:
            del self._vectors[next(iter(self._vectors))]  # the oldest
        return found[torch.from_numpy(np.searchsorted(rows, wanted)).to(found.device)]

    def _embed(self, texts: Features, rows: IntArray, task: str) -> torch.Tensor:
        """[rows, dim] in float32, each of length 1."""
        vectors = self._model(texts.batch(rows, self._device), task=task)["sentence_embedding"]
        if self._model.truncate_dim is not None:
            vectors = vectors[..., : self._model.truncate_dim]
        return torch.nn.functional.normalize(vectors.float(), dim=1)


def _default_prompt(model: Any) -> str | None:
    return model.prompts.get(model.default_prompt_name) if model.default_prompt_name else None
