"""Loads a transformer checkpoint through sentence-transformers, and refuses what would score silently wrong."""

from __future__ import annotations

import gc
import logging
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import sentence_transformers
import torch
import transformers
from transformers.utils import is_flash_attn_2_available

from ranker import budget, canary, hub, preflight
from ranker.batching import Cut
from ranker.bi_encoder import BiEncoderBackend
from ranker.budget import OVERHEAD
from ranker.cross_encoder import CrossEncoderBackend
from ranker.errors import NodeUnfit, RankerError
from ranker.fingerprint import resolve_dtype
from ranker.score import Backend, ShardRanker
from ranker.types import Ranker, RankerSpec
from ranker.verdict import Verdict, check_device, one_line, verdict

CPU_CUT = Cut(budget=1_024, overhead=24)
"""MiniLM-L6 on one thread: a pass takes 5 ms and 0.29 ms a token in float32 (17 tokens' worth), 0.15 in bfloat16
(33). Docstrings a second by budget: 1,024: 126, 2,048: 117, 4,096: 100 (two processes, forward passes alone)."""
TWICE = 1_500_000_000
"""Parameters of the largest model that is loaded in float32 too, for the canaries: 6 GB for a moment."""


def load_transformer(spec: RankerSpec, *, threads: int, device: str) -> Ranker:
    """Build a cross-encoder or bi-encoder; see `ranker.load.load`."""
    _quiet()
    torch.set_num_threads(threads)
    path, commit = hub.resolve(spec.checkpoint, spec.revision)
    on = _device(device)
    dtype = resolve_dtype(spec.dtype, on.type)
    preflight.check_directory(spec, Path(path))
    preflight.check_dtype(dtype, on)
    model = _load(spec, path, on, getattr(torch, dtype))
    info = {
        "kind": spec.kind,
        "checkpoint": str(spec.checkpoint),
        "commit": commit or "",
        "device": str(model.device),
        "dtype": dtype,
        "attention": _attention(model),
        "threads": str(threads),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "sentence-transformers": sentence_transformers.__version__,
    }
    where = f"ranker.checkpoint {spec.checkpoint}"
    backend, limit = _backend(spec, model)
    found = canary.score(where, backend, limit)
    reference = None if dtype == "float32" else _in_float32(spec, path, model)
    ranker = ShardRanker[Any](backend, info, max_document_bytes=spec.max_document_bytes)
    ranker.preflight = canary.judge(where, dtype, found, reference)
    if spec.batch_tokens is None and on.type == "cuda" and "very long" not in found.failures:
        found_cut = budget.probe(backend, canary.filling(limit), time.perf_counter)
        backend.budget, backend.overhead = found_cut.budget, found_cut.overhead
    return ranker


def _in_float32(spec: RankerSpec, path: str, model: Any) -> canary.Canaries | str:
    """What the canaries score in float32, by a copy of the model that is gone afterwards; or why there is none.

    Raises:
        DeviceBroken: the accelerator fails.
    """
    if sum(parameter.numel() for parameter in model.parameters()) > TWICE:
        return "the model is too large to be loaded twice"
    try:
        return _canaries(replace(spec, attention="auto"), path, model.device)  # flash attention knows no float32
    except RankerError as error:  # what cannot be compared is no reason not to run
        return one_line(error)
    finally:
        gc.collect()  # the libraries tie a model to itself: it would go at some later time, or never
        if model.device.type == "cuda":
            torch.cuda.empty_cache()


def _canaries(spec: RankerSpec, path: str, device: torch.device) -> canary.Canaries:
    backend, limit = _backend(spec, _load(spec, path, device, torch.float32))
    return canary.score(f"ranker.checkpoint {spec.checkpoint}", backend, limit)


def _backend(spec: RankerSpec, model: Any) -> tuple[Backend[Any], int]:
    """A loaded model, checked, and the longest input that it takes, in tokens."""
    limit = preflight.check_model(spec, model)
    model.max_seq_length = limit  # the library's own default can lie beyond what a RoBERTa can take
    overhead = OVERHEAD if model.device.type == "cuda" else CPU_CUT.overhead
    cut = Cut(budget=spec.batch_tokens or CPU_CUT.budget, overhead=overhead)
    backend: Backend[Any]
    if spec.kind == "cross-encoder":
        label = preflight.score_label(spec, model)
        backend = CrossEncoderBackend(model, spec, limit=limit, score_label=label, cut=cut)
    else:
        backend = BiEncoderBackend(model, spec, limit=limit, cut=cut)
    return backend, limit


def _load(spec: RankerSpec, path: str, device: torch.device, dtype: torch.dtype) -> Any:
    """The library's model object, with every weight from the checkpoint and inputs that are always padded."""
    if spec.attention == "flash_attention_2":
        _check_flash(device, dtype)
    options: dict[str, Any] = {
        "device": str(device),
        "local_files_only": True,
        "trust_remote_code": spec.trust_remote_code,
        "model_kwargs": {"dtype": dtype},  # unless told, transformers 5 takes the precision it was saved in
    }
    if spec.attention != "auto":
        options["model_kwargs"]["attn_implementation"] = spec.attention
    where = f"ranker.checkpoint {spec.checkpoint}"
    try:
        with preflight.complete_weights(spec):
            if spec.kind == "cross-encoder":
                model = sentence_transformers.CrossEncoder(path, max_length=spec.max_length, **options)
            else:
                if spec.max_length is not None:
                    options["processor_kwargs"] = {"model_max_length": spec.max_length}
                model = sentence_transformers.SentenceTransformer(path, **options)
    except RankerError:
        raise
    except Exception as error:  # a checkpoint can be broken in as many ways as there are libraries below
        check_device(error)
        if verdict(error) is Verdict.MEMORY:
            raise NodeUnfit(f"{where} does not fit into the memory of {device}: {one_line(error)}") from error
        if spec.attention != "auto" and "attention" in str(error).lower():
            raise RankerError(
                f"ranker.attention is {spec.attention}, but {spec.checkpoint} cannot be loaded with it: "
                f"{one_line(error).split('. ')[0]}; use auto"
            ) from error
        raise RankerError(f"{where} cannot be loaded: {type(error).__name__}: {one_line(error)}") from error
    if spec.attention not in ("auto", _attention(model)):
        raise RankerError(
            f"ranker.attention is {spec.attention}, but {spec.checkpoint} was loaded with "
            f"{_attention(model) or 'none'}: use auto"
        )
    for module in model.modules():
        if hasattr(module, "unpad_inputs"):
            module.unpad_inputs = False  # flattened inputs have no mask to cut batches by
    return model


def _check_flash(device: torch.device, dtype: torch.dtype) -> None:
    """Refuse flash attention where it cannot work; transformers' own words for it differ from case to case.

    Raises:
        RankerError: no GPU, float32, or the package is not installed.
    """
    what = "ranker.attention is flash_attention_2"
    if device.type != "cuda":
        raise NodeUnfit(f"{what}, which needs a GPU; this worker is on {device}: use auto or sdpa")
    if dtype not in (torch.bfloat16, torch.float16):
        raise RankerError(f"{what}, which needs ranker.dtype bfloat16 or float16, not float32")
    if not is_flash_attn_2_available():
        raise NodeUnfit(
            f"{what}, but the package flash-attn is not installed here or does not fit: install it, or use sdpa"
        )


def _attention(model: Any) -> str:
    """The implementation that transformers has settled on; empty where the model has none."""
    config = getattr(model.transformers_model, "config", None)
    return str(getattr(config, "_attn_implementation", None) or "")


def _device(name: str) -> torch.device:
    """The device called `name`.

    Raises:
        RankerError: no such device here.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise RankerError(f"device {name!r} is unknown: use auto, cpu or cuda") from error
    if device.type == "cuda" and not torch.cuda.is_available():
        raise NodeUnfit(f"device {name}: torch {torch.__version__} sees no CUDA device here")
    return device


def _quiet() -> None:
    """No progress bars and load tables from a thousand workers; what matters becomes an error of our own."""
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    for name in ("sentence_transformers", "transformers", "huggingface_hub"):
        logging.getLogger(name).setLevel(logging.ERROR)
