"""Loads a transformer checkpoint through sentence-transformers, and refuses what would score silently wrong."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import sentence_transformers
import torch
import transformers

from ranker import hub, preflight
from ranker.bi_encoder import BiEncoderBackend
from ranker.cross_encoder import CrossEncoderBackend
from ranker.errors import DeviceBroken, RankerError
from ranker.fingerprint import resolve_dtype
from ranker.score import Backend, ShardRanker
from ranker.types import Ranker, RankerSpec
from ranker.verdict import Verdict, one_line, verdict

CPU_BATCH_TOKENS = 2_048
"""MiniLM-L6 on one thread, 1,200 docstrings of 55 tokens, median pairs a second: 1,024: 59, 2,048: 60, 4,096: 57,
8,192: 51. A core gains nothing from larger batches; smaller ones report progress more often."""
CUDA_BATCH_TOKENS = 65_536
"""Not measured yet. Running out of memory with it costs one pass: the budget is halved and kept."""


def load_transformer(spec: RankerSpec, *, threads: int, device: str) -> Ranker:
    """Build a cross-encoder or bi-encoder; see `ranker.load.load`."""
    _quiet()
    torch.set_num_threads(threads)
    path, commit = hub.resolve(spec.checkpoint, spec.revision)
    on = _device(device)
    dtype = resolve_dtype(spec.dtype, on.type)
    preflight.check_directory(spec, Path(path))
    model = _load(spec, path, on, getattr(torch, dtype))
    limit = preflight.check_model(spec, model)
    model.max_seq_length = limit  # the library's own default can lie beyond what a RoBERTa can take
    budget = spec.batch_tokens or (CUDA_BATCH_TOKENS if on.type == "cuda" else CPU_BATCH_TOKENS)
    backend: Backend[Any]
    if spec.kind == "cross-encoder":
        label = preflight.score_label(spec, model)
        backend = CrossEncoderBackend(model, spec, limit=limit, score_label=label, budget=budget)
    else:
        backend = BiEncoderBackend(model, spec, limit=limit, budget=budget)
    preflight.probe(spec, backend, exact=dtype == "float32")
    info = {
        "kind": spec.kind,
        "checkpoint": str(spec.checkpoint),
        "commit": commit or "",
        "device": str(model.device),
        "dtype": dtype,
        "threads": str(threads),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "sentence-transformers": sentence_transformers.__version__,
    }
    return ShardRanker[Any](backend, info, max_document_bytes=spec.max_document_bytes)


def _load(spec: RankerSpec, path: str, device: torch.device, dtype: torch.dtype) -> Any:
    """The library's model object, with every weight from the checkpoint and inputs that are always padded."""
    options: dict[str, Any] = {
        "device": str(device),
        "local_files_only": True,
        "trust_remote_code": spec.trust_remote_code,
        "model_kwargs": {"dtype": dtype},  # unless told, transformers 5 takes the precision it was saved in
    }
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
        match verdict(error):
            case Verdict.DEVICE:
                raise DeviceBroken(one_line(error)) from error
            case Verdict.MEMORY:
                raise RankerError(f"{where} does not fit into the memory of {device}: {one_line(error)}") from error
        raise RankerError(f"{where} cannot be loaded: {type(error).__name__}: {one_line(error)}") from error
    for module in model.modules():
        if hasattr(module, "unpad_inputs"):
            module.unpad_inputs = False  # flattened inputs have no mask to cut batches by
    return model


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
        raise RankerError(f"device {name}: torch {torch.__version__} sees no CUDA device here")
    return device


def _quiet() -> None:
    """No progress bars and load tables from a thousand workers; what matters becomes an error of our own."""
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    for name in ("sentence_transformers", "transformers", "huggingface_hub"):
        logging.getLogger(name).setLevel(logging.ERROR)
