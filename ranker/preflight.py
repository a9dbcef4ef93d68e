"""What is checked before a checkpoint may score: each check stands for a way to be silently wrong."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from sentence_transformers.cross_encoder.modules import LogitScore
from transformers import PreTrainedModel

from ranker.errors import NodeUnfit, RankerError
from ranker.types import RankerSpec

UNLIMITED = 1_000_000
"""transformers says 10**30 where a tokenizer states no limit."""


def check_directory(spec: RankerSpec, path: Path) -> None:
    """Refuse what is visibly not a checkpoint of this kind.

    Raises:
        RankerError: no configuration, an adapter without its base, the other kind's checkpoint, untrusted code.
    """
    where = f"ranker.checkpoint {spec.checkpoint}"
    if (path / "adapter_config.json").exists():
        raise RankerError(
            f"{where} is an adapter: merge it into its base model first (merge_and_unload), and save that"
        )
    config = _json(path / "config.json")
    if not config and not (path / "modules.json").exists():
        raise RankerError(f"{where} is not a checkpoint: the directory has neither config.json nor modules.json")
    card = _json(path / "config_sentence_transformers.json")
    architectures = config.get("architectures") or [""]
    if spec.kind == "bi-encoder" and (
        card.get("model_type") == "CrossEncoder" or architectures[0].endswith("ForSequenceClassification")
    ):
        raise RankerError(f"{where} is a cross-encoder: set ranker.kind: cross-encoder")
    if spec.kind == "cross-encoder" and not spec.trust_remote_code:
        _check_activation(where, card, config)


def _check_activation(where: str, card: dict[str, Any], config: dict[str, Any]) -> None:
    """The library replaces an activation it does not trust by a default, with a warning in a log."""
    nested = config.get("sentence_transformers") or {}
    named = (
        card.get("activation_fn"),
        nested.get("activation_fn"),
        config.get("sbert_ce_default_activation_function"),
    )
    activation = next((name for name in named if name), "torch.")
    if not activation.startswith("torch."):
        raise RankerError(
            f"{where}: its activation {activation} is code outside torch; "
            "set ranker.trust_remote_code: true to run it"
        )


def check_dtype(dtype: str, device: torch.device) -> None:
    """Refuse bfloat16 on a device that would only emulate it.

    Raises:
        NodeUnfit: another machine may do it.
    """
    emulates = device.type == "cuda" and not torch.cuda.is_bf16_supported(including_emulation=False)
    if dtype == "bfloat16" and emulates:
        raise NodeUnfit(
            f"{device} cannot compute in bfloat16 (compute capability below 8.0): "
            "name another ranker.dtype, or use newer GPUs"
        )


@contextmanager
def complete_weights(spec: RankerSpec) -> Iterator[None]:
    """Within it, loading a model whose checkpoint lacks weights is an error; the library fills them at random.

    It stands in the way of `PreTrainedModel.from_pretrained` and asks for the loading info, instead of loading
    the model a second time: so it sees every module in whatever folder, and costs nothing.

    Raises:
        RankerError: weights are missing (a bi-encoder's pooler, which is not used, excepted).
    """
    original = PreTrainedModel.__dict__["from_pretrained"]
    missing: set[str] = set()

    def from_pretrained(cls: type, *args: Any, **kwargs: Any) -> Any:
        kwargs["output_loading_info"] = True
        model, info = original.__func__(cls, *args, **kwargs)
        missing.update(info["missing_keys"])
        return model

    PreTrainedModel.from_pretrained = classmethod(from_pretrained)
    try:
        yield
    finally:
        PreTrainedModel.from_pretrained = original
    if spec.kind == "bi-encoder":
        missing = {key for key in missing if "pooler" not in key.split(".")}
    if missing:
        first = ", ".join(sorted(missing)[:4])
        raise RankerError(
            f"ranker.checkpoint {spec.checkpoint}: {len(missing)} weights are missing and would be random: "
            f"{first}; this checkpoint was not trained as a ranker of this kind, or is incomplete"
        )


def check_model(spec: RankerSpec, model: Any) -> int:
    """Check a loaded model; returns the longest input in tokens.

    Raises:
        RankerError: no pad token, unusable yes/no tokens, or a max_length that the model cannot take.
    """
    where = f"ranker.checkpoint {spec.checkpoint}"
    tokenizer = model.tokenizer
    if getattr(tokenizer, "pad_token_id", None) is None:
        raise RankerError(f"{where}: its tokenizer has no pad token; set pad_token in its tokenizer_config.json")
    for module in model.modules():
        if isinstance(module, LogitScore):
            _check_yes_no(where, module, tokenizer)
    return _longest_input(spec, model)


def _check_yes_no(where: str, module: Any, tokenizer: Any) -> None:
    yes, no = module.true_token_id, module.false_token_id
    unusable = {None, tokenizer.unk_token_id} if tokenizer.unk_token_id is not None else {None}
    if yes == no or yes in unusable or (no is not None and no in unusable):
        raise RankerError(
            f"{where}: its yes/no tokens are unusable (ids {yes} and {no}): every score would be the same; "
            "use a checkpoint with its own LogitScore module"
        )


def _longest_input(spec: RankerSpec, model: Any) -> int:
    true_limit = position_limit(model.transformers_model)
    if spec.max_length is not None:
        if spec.max_length < 1:
            raise RankerError(f"ranker.max_length is {spec.max_length}: it must be positive")
        if true_limit is not None and spec.max_length > true_limit:
            raise RankerError(
                f"ranker.max_length is {spec.max_length}, but {spec.checkpoint} takes at most {true_limit} tokens"
            )
        return spec.max_length
    pinned = (getattr(model[0], "processing_kwargs", None) or {}).get("text", {}).get("max_length")
    stated = [limit for limit in (pinned, model.max_seq_length, true_limit) if limit is not None]
    if not stated or min(stated) > UNLIMITED:
        raise RankerError(f"ranker.checkpoint {spec.checkpoint} states no longest input: set ranker.max_length")
    return int(min(stated))


def position_limit(model: Any) -> int | None:
    """The longest input in tokens that a transformer has positions for; None where it states none.

    A table of learned positions is what counts: RoBERTa's starts at padding_idx + 1, so of 514 positions 512
    are for tokens; one more is an IndexError on a CPU, and the end of the process's CUDA context on a GPU.
    """
    for module in model.modules() if model is not None else ():
        table = getattr(module, "position_embeddings", None)
        if isinstance(table, torch.nn.Embedding):
            padding = getattr(module, "padding_idx", None)
            return table.num_embeddings - (padding + 1 if isinstance(padding, int) else 0)
    config = getattr(model, "config", None)
    text_config = config.get_text_config() if config is not None else None
    positions = getattr(text_config, "max_position_embeddings", None)
    return positions if isinstance(positions, int) and positions > 0 else None


def score_label(spec: RankerSpec, model: Any) -> int:
    """The index of the label that is the score.

    Raises:
        RankerError: several labels and none named, or no such label.
    """
    count: int = model.num_labels
    names = {int(index): str(name) for index, name in (getattr(model.config, "id2label", None) or {}).items()}
    labels = ", ".join(f"{names.get(index, '?')} ({index})" for index in range(count))
    wanted = spec.score_label
    if wanted is None:
        if count == 1:
            return 0
        raise RankerError(f"ranker.score_label is missing: {spec.checkpoint} has {count} labels: {labels}")
    found = [index for index in range(count) if wanted in (index, names.get(index))]
    if isinstance(wanted, bool) or not found:
        raise RankerError(f"ranker.score_label is {wanted!r}, but the labels of {spec.checkpoint} are {labels}")
    return found[0]


def _json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}
