"""Tiny checkpoints with real tokenizers and seeded random weights, saved as their libraries save them.

Weights are drawn large, so that scores differ by far more than any tolerance: a mix-up cannot hide.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.base.modules import Transformer
from sentence_transformers.sentence_transformer.modules import Normalize, Pooling
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    BertModel,
    DebertaV2Config,
    DebertaV2ForSequenceClassification,
    ModernBertConfig,
    ModernBertForSequenceClassification,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3ForSequenceClassification,
    RobertaConfig,
    RobertaForSequenceClassification,
    XLMRobertaConfig,
    XLMRobertaForSequenceClassification,
)

TEXT = """
copy a file from one directory to another and keep its permissions
remove a directory tree and everything below it, then report what failed
open a socket, listen for connections, accept one and read a line from it
parse a date, add three days, subtract an hour and format the result again
yes no what which document is relevant for the query given poison marker
a b c d e f g h i j k l m n o p q r s t u v w x y z 0 1 2 3 4 5 6 7 8 9
""".strip().splitlines()

BERT_SPECIALS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
ROBERTA_SPECIALS = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
QWEN_SPECIALS = ["<pad>", "<eos>", "<system>", "<query>", "<document>", "<answer>"]

CHAT_TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'system' %}<system>{{ m.content }}{% endif %}{% endfor %}"
    "<query>{{ messages | selectattr('role', 'eq', 'query') | map(attribute='content') | first }}"
    "<document>{{ messages | selectattr('role', 'eq', 'document') | map(attribute='content') | first }}"
    "<eos><answer>"
)
DOCUMENT_FIRST_TEMPLATE = (
    "<document>{{ messages | selectattr('role', 'eq', 'document') | map(attribute='content') | first }}"
    "<query>{{ messages | selectattr('role', 'eq', 'query') | map(attribute='content') | first }}<answer>"
)


def wordpiece_tokenizer(max_length: int = 128) -> PreTrainedTokenizerFast:
    """As BERT's: uncased WordPiece, `[CLS] a [SEP] b [SEP]`."""
    raw = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    raw.normalizer = normalizers.BertNormalizer()
    raw.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    raw.train_from_iterator(TEXT, trainers.WordPieceTrainer(vocab_size=400, special_tokens=BERT_SPECIALS))
    cls, sep = (raw.token_to_id(token) for token in ("[CLS]", "[SEP]"))
    raw.post_processor = processors.BertProcessing(("[SEP]", sep), ("[CLS]", cls))
    raw.decoder = decoders.WordPiece()
    names = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    return PreTrainedTokenizerFast(
        tokenizer_object=raw,
        model_max_length=max_length,
        model_input_names=["input_ids", "token_type_ids", "attention_mask"],
        mask_token="[MASK]",
        **names,
    )


def byte_tokenizer(max_length: int = 128) -> PreTrainedTokenizerFast:
    """As RoBERTa's: byte-level BPE, `<s> a </s></s> b </s>`, padding id 1."""
    raw = _byte_bpe(ROBERTA_SPECIALS)
    bos, eos = (raw.token_to_id(token) for token in ("<s>", "</s>"))
    raw.post_processor = processors.RobertaProcessing(("</s>", eos), ("<s>", bos))
    names = {"pad_token": "<pad>", "unk_token": "<unk>", "cls_token": "<s>", "sep_token": "</s>"}
    return PreTrainedTokenizerFast(
        tokenizer_object=raw,
        model_max_length=max_length,
        model_input_names=["input_ids", "attention_mask"],
        mask_token="<mask>",
        bos_token="<s>",
        eos_token="</s>",
        **names,
    )


def unigram_tokenizer(specials: list[str], start: str, end: str, between: str) -> PreTrainedTokenizerFast:
    """As XLM-RoBERTa's and DeBERTa-v2's: sentence pieces, spaces as ▁. `between` two texts stands once or twice."""
    raw = Tokenizer(models.Unigram())
    raw.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Replace(Regex(" {2,}"), " ")])
    raw.pre_tokenizer = pre_tokenizers.Metaspace()
    raw.decoder = decoders.Metaspace()
    unknown = next(token for token in specials if token in {"<unk>", "[UNK]"})
    trainer = trainers.UnigramTrainer(vocab_size=400, special_tokens=specials, unk_token=unknown)
    raw.train_from_iterator(TEXT * 4, trainer)
    ends = [(token, raw.token_to_id(token)) for token in (start, end)]
    raw.post_processor = processors.TemplateProcessing(
        single=f"{start} $A {end}", pair=f"{start} $A {between.replace('><', '> <')} $B {end}", special_tokens=ends
    )
    padding = next(token for token in specials if token in {"<pad>", "[PAD]"})
    return PreTrainedTokenizerFast(
        tokenizer_object=raw,
        model_max_length=128,
        model_input_names=["input_ids", "attention_mask"],
        pad_token=padding,
        unk_token=unknown,
        cls_token=start,
        sep_token=end,
        bos_token=start,
        eos_token=end,
    )


def tiny_cross_encoder(
    path: Path | str,
    *,
    seed: int = 0,
    num_labels: int = 1,
    labels: list[str] | None = None,
    positions: int = 128,
    pad_token: bool = True,
    **config: Any,
) -> str:
    """BERT, two layers of 32, with a classifier of `num_labels`. Returns the path."""
    torch.manual_seed(seed)
    tokenizer = wordpiece_tokenizer(positions)
    if labels:
        names = dict(enumerate(labels))
        config |= {"id2label": names, "label2id": {name: index for index, name in names.items()}}
    model = BertForSequenceClassification(
        BertConfig(
            vocab_size=len(tokenizer),
            **_SMALL,
            max_position_embeddings=positions,
            num_labels=len(labels) if labels else num_labels,
            **config,
        )
    )
    if not pad_token:
        tokenizer.pad_token = None
    return _save(path, _spread(model), tokenizer)


def tiny_roberta(path: Path | str, *, seed: int = 0, positions: int = 130) -> str:
    """RoBERTa: of `positions` two less are for tokens (padding id 1). Returns the path."""
    torch.manual_seed(seed)
    tokenizer = byte_tokenizer(1_000)
    config = RobertaConfig(
        vocab_size=len(tokenizer),
        **_SMALL,
        **_ROBERTA,
        max_position_embeddings=positions,
        type_vocab_size=1,
    )
    return _save(path, _spread(RobertaForSequenceClassification(config)), tokenizer)


def tiny_xlm_roberta(path: Path | str, *, seed: int = 0) -> str:
    """XLM-RoBERTa: sentence pieces, `<s> a </s></s> b </s>`, padding id 1. Returns the path."""
    torch.manual_seed(seed)
    tokenizer = unigram_tokenizer(ROBERTA_SPECIALS, "<s>", "</s>", "</s></s>")
    config = XLMRobertaConfig(
        vocab_size=len(tokenizer),
        **_SMALL,
        **_ROBERTA,
        max_position_embeddings=130,
        type_vocab_size=1,
    )
    return _save(path, _spread(XLMRobertaForSequenceClassification(config)), tokenizer)


def tiny_modernbert(path: Path | str, *, seed: int = 0) -> str:
    """ModernBERT: byte-level BPE, rotary positions, local and global attention in turn. Returns the path."""
    torch.manual_seed(seed)
    tokenizer = byte_tokenizer(128)
    config = ModernBertConfig(
        vocab_size=len(tokenizer),
        **_SMALL,
        **_ROBERTA,
        max_position_embeddings=128,
        cls_token_id=0,
        sep_token_id=2,
        global_attn_every_n_layers=2,
        local_attention=8,
    )
    return _save(path, _spread(ModernBertForSequenceClassification(config)), tokenizer)


def tiny_deberta(path: Path | str, *, seed: int = 0) -> str:
    """DeBERTa-v2, whose attention transformers has in its eager form only. Returns the path."""
    torch.manual_seed(seed)
    tokenizer = unigram_tokenizer(BERT_SPECIALS, "[CLS]", "[SEP]", "[SEP]")
    config = DebertaV2Config(vocab_size=len(tokenizer), **_SMALL, max_position_embeddings=128, num_labels=1)
    return _save(path, _spread(DebertaV2ForSequenceClassification(config)), tokenizer)


def tiny_llm_reranker(
    path: Path | str, *, seed: int = 0, template: str = CHAT_TEMPLATE, classifier: bool = False, yes_no: bool = True
) -> str:
    """Qwen3, chat template, left padding: the logit of "yes" over "no", or a classifier. Returns the path."""
    torch.manual_seed(seed)
    raw = _byte_bpe(QWEN_SPECIALS + (["yes", "no"] if yes_no else []))
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=raw, model_max_length=96, pad_token="<pad>", eos_token="<eos>", padding_side="left"
    )
    tokenizer.chat_template = template
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        **_SMALL,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=96,
        pad_token_id=tokenizer.pad_token_id,
        tie_word_embeddings=False,
        num_labels=1,
    )
    model = Qwen3ForSequenceClassification(config) if classifier else Qwen3ForCausalLM(config)
    return _save(path, _spread(model), tokenizer)


def tiny_biencoder(path: Path | str, *, seed: int = 0, prompts: dict[str, str] | None = None) -> str:
    """BERT with mean pooling and normalisation, saved by sentence-transformers. Returns the path."""
    base = headless(Path(path) / "base", seed=seed)
    transformer = Transformer(base)
    model = SentenceTransformer(modules=[transformer, Pooling(32), Normalize()], prompts=prompts, device="cpu")
    model.save_pretrained(str(path))
    for file in Path(base).iterdir():
        file.unlink()
    Path(base).rmdir()
    return str(path)


def headless(path: Path | str, *, seed: int = 0) -> str:
    """A base BERT: as a cross-encoder, its classifier would be random. Returns the path."""
    torch.manual_seed(seed)
    tokenizer = wordpiece_tokenizer()
    model = BertModel(BertConfig(vocab_size=len(tokenizer), **_SMALL, max_position_embeddings=128))
    return _save(path, _spread(model), tokenizer)


def poison(path: Path | str, token: str) -> None:
    """Make every text with `token` score NaN: its embedding becomes NaN, and nobody else's."""
    from safetensors.torch import load_file, save_file

    ids = json.loads((Path(path) / "tokenizer.json").read_text())["model"]["vocab"]
    file = Path(path) / "model.safetensors"
    weights = load_file(file)
    name = next(name for name in weights if name.endswith("word_embeddings.weight"))
    weights[name][ids[token]] = float("nan")
    save_file(weights, file, metadata={"format": "pt"})


_SMALL: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 64,
}


_ROBERTA: dict[str, Any] = {"num_labels": 1, "bos_token_id": 0, "pad_token_id": 1, "eos_token_id": 2}
"""As ROBERTA_SPECIALS are numbered."""


def _byte_bpe(specials: list[str]) -> Tokenizer:
    raw = Tokenizer(models.BPE())
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=500, special_tokens=specials, initial_alphabet=alphabet)
    raw.train_from_iterator(TEXT, trainer)
    return raw


def _spread(model: Any) -> Any:
    """Draw every matrix ten times as large as usual; layer norms and the classifier's bias stay."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.normal_(0.0, 0.2)
    return model


def _save(path: Path | str, model: Any, tokenizer: Any) -> str:
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    return str(path)
