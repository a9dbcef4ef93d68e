"""Stands the head of a long document in for the whole, where the tokenizer is known to make the same of both.

A model keeps the first `limit` tokens at most, but a tokenizer reads the document to its end: 5 MB cost seconds and
hundreds of megabytes, for 512 tokens.

A *place* is a position at which the tokenizer starts anew: no token spans it, and the tokens on either side are
the same whatever stands on the other. So the tokens between two places stand in the model's input wherever these
characters do: behind a prompt, in a chat template, before the rest of the document. When a head has more of them
between its first and its last place than the model keeps of an input, then nothing that is kept comes from behind
the last place, and head and whole are both cut off. Whether there is a place shows in the characters on either side
of it, and a head ends with both, so that its last place is one there, too, whatever follows.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

CHARS_PER_TOKEN = 8
"""The first head, by tokens kept; English has 4 to 5, so that one head is usually enough."""
GROWTH = 4
"""How much longer the next head is, if that was not enough. What a document costs before it is taken whole is at
most two thirds of what it costs then."""

_BERT = re.compile(r"[ \n\u4e00-\u9fff]")
"""White space and ideographs part words for BERT's, whatever is beside them. Its normalizer works character by
character, but for NFD, which moves marks between two starters only, and these are starters."""

_BYTE_LEVEL = re.compile(r"(?<=[^\W_]) ")
"""A space after a letter or a digit. No alternative of the expressions below goes on from a letter or a digit to
white space, and none looks back. NFC composes nothing with a space, and makes none of a letter."""

SPLITS = {
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
    + number
    + r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    for number in (r"\p{N}", r"\p{N}{1,3}")
}
"""How Qwen 2 and 3 and Llama 3 split; GPT-2's way, which RoBERTa and ModernBERT share, is built into ByteLevel."""

_NOT_IN_ADDED = re.compile(r"[\s\u4e00-\u9fff]")
_SURROGATE = re.compile("[\ud800-\udfff]")

TRIAL = "x Two  Words,\n\n3 lines\tand more x"


class Clipper:
    """Gives of each document the text that has to be tokenised."""

    def __init__(
        self, tokenizer: Any, limit: int, *, kept: Callable[[str], int], ids: Callable[[str], list[int]]
    ) -> None:
        """`limit` is the most tokens that are kept of an input. `kept(document)` is how many are of that one, with
        whatever surrounds it; `ids(document)` are those before anything is cut off."""
        self._tokenizer = tokenizer
        self._limit = limit
        self._kept = kept
        self._whole_ids = ids

    def __call__(self, documents: Sequence[str], queries: Sequence[str] = ()) -> list[str]:
        """[n] each document, or its head.

        Args:
            documents: [n]
            queries: [n] or none; what is cut together with each document, the longer side first. Where the document
                is the longer one, what is kept of both depends on the query's length alone, so a head needs more
                tokens than the query, too.
        """
        heads = list(documents)
        size = CHARS_PER_TOKEN * self._limit
        # Up to twice its length the head costs as much as the whole: it is tokenised here, and again for the model.
        todo = [index for index, text in enumerate(documents) if len(text) > 2 * size]
        # A text that no tokenizer takes must not pass because its head is a good one.
        todo = [index for index in todo if self._places is not None and not _SURROGATE.search(documents[index])]
        beside = dict(zip(todo, self._counts([queries[index] for index in todo]), strict=True)) if queries else {}
        while todo:
            spans = [self._span(documents[index], size) for index in todo]
            counts = self._counts([documents[index][a:b] for index, (a, b) in zip(todo, spans, strict=True)])
            short = []
            for index, (_, last), count in zip(todo, spans, counts, strict=True):
                if count > max(self._limit, beside.get(index, 0)):
                    heads[index] = documents[index][: last + 1]
                else:
                    short.append(index)
            size *= GROWTH
            todo = [index for index in short if len(documents[index]) > 2 * size]
        return heads

    @cached_property
    def _places(self) -> re.Pattern[str] | None:
        """The places of this model's documents, if it is known that and where there are any.

        Tried out with the first long document: that no more than `limit` tokens are kept, whatever else may set the
        length, and that a document reaches the tokenizer as it is.
        """
        found = places(self._tokenizer)
        if found is None or self._kept("a " * (self._limit + 1)) > self._limit:
            return None
        first, *_, last = (match.start() for match in found.finditer(TRIAL))
        part, whole = self._ids([TRIAL[first:last]])[0], self._whole_ids(TRIAL)
        return found if any(whole[start : start + len(part)] == part for start in range(len(whole))) else None

    def _span(self, text: str, size: int) -> tuple[int, int]:
        """The first and the last place in the first `size` characters; (0, 0) where there are none."""
        assert self._places is not None
        found = [match.start() for match in self._places.finditer(text, 0, size)]
        return (found[0], found[-1]) if found else (0, 0)

    def _counts(self, texts: list[str]) -> list[int]:
        return [len(ids) for ids in self._ids(texts)]

    def _ids(self, texts: list[str]) -> list[list[int]]:
        if not texts:
            return []
        output = self._tokenizer(
            texts,
            add_special_tokens=False,
            truncation=False,
            padding=False,
            return_attention_mask=False,
            verbose=False,
        )
        return list(output["input_ids"])


def places(tokenizer: Any) -> re.Pattern[str] | None:
    """What matches at the places of a text; None for a tokenizer of which none are known.

    Only a pipeline that is known step by step has any: SentencePiece's normalizer, for one, works on whole
    graphemes by a table of its own.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    # A class that comes with a checkpoint may do anything to a text before it calls the library.
    ours = type(tokenizer).__module__.startswith("transformers.")
    if backend is None or not ours or tokenizer.truncation_side != "right":
        return None
    if getattr(backend.model, "dropout", None) is not None or not all(
        _keeps_to_itself(token, backend.normalizer) for token in backend.get_added_tokens_decoder().values()
    ):
        return None
    match _step(backend.normalizer), _step(backend.pre_tokenizer), type(backend.model).__name__:
        case {"type": "BertNormalizer", "handle_chinese_chars": True}, {"type": "BertPreTokenizer"}, "WordPiece":
            return _BERT
        case None | {"type": "NFC"}, {"type": "ByteLevel", "use_regex": True}, "BPE":
            return _BYTE_LEVEL
        case (
            None | {"type": "NFC"},
            {
                "type": "Sequence",
                "pretokenizers": [
                    {"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": False},
                    {"type": "ByteLevel", "use_regex": False},
                ],
            },
            "BPE",
        ) if regex in SPLITS:
            return _BYTE_LEVEL
    return None


def _keeps_to_itself(token: Any, normalizer: Any) -> bool:
    """Whether an added token, which is found before anything else, spans no place and looks at nothing beyond one.

    One with `lstrip` may: it takes the white space before it, up to a place and no further.
    """
    forms = (token.content, normalizer.normalize_str(token.content) if normalizer else "")
    return not (token.rstrip or token.single_word or any(_NOT_IN_ADDED.search(form) for form in forms))


def _step(part: Any) -> Any:
    """A step of the pipeline as tokenizer.json has it; None where there is none."""
    try:
        return None if part is None else json.loads(part.__getstate__())
    except Exception:  # noqa: BLE001 - what the library raises for a step in Python, which no file can have
        return "unknown"
