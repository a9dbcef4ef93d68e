"""From a spec to a ranker in this process. torch is imported only where the kind needs it."""

from __future__ import annotations

import ctypes
import os

from ranker.custom import CustomBackend
from ranker.errors import RankerError
from ranker.score import ShardRanker
from ranker.types import Ranker, RankerSpec

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # malloc.h


def load(spec: RankerSpec, *, threads: int, device: str = "auto") -> Ranker:
    """Build the ranker in this process.

    Args:
        spec: what to load.
        threads: CPU threads for torch and the tokenizer (Ray sets OMP_NUM_THREADS=1 in its workers).
        device: "auto" (cuda if there is one, else cpu), "cpu", "cuda" or "cuda:N".

    Raises:
        RankerError: the ranker cannot be used as configured; one line that says what, where and what to do.
        DeviceBroken: the accelerator fails at the first touch.
    """
    set_environment(threads)
    keep_memory()
    match spec.kind:
        case "custom":
            info = {"kind": "custom", "threads": str(threads)}
            return ShardRanker(CustomBackend(spec), info, max_document_bytes=spec.max_document_bytes)
        case "cross-encoder" | "bi-encoder":
            from ranker.checkpoint import load_transformer

            return load_transformer(spec, threads=threads, device=device)
    raise RankerError(f"ranker.kind is {spec.kind!r}: use cross-encoder, bi-encoder or custom")


def keep_memory() -> None:
    """Let glibc keep what a forward pass frees for the next one, instead of giving it back to the kernel.

    MiniLM-L6 on one core, 300 docstrings: in bfloat16 0.01–0.05 instead of 0.08–0.18 s of 3 s go into page
    faults, in float32 none either way. Nothing happens where the allocator is another one.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return
    mallopt(_M_MMAP_THRESHOLD, 32 << 20)  # the largest it takes: buffers of 2,048 tokens are below it
    mallopt(_M_TRIM_THRESHOLD, 512 << 20)


def set_environment(threads: int) -> None:
    """What native libraries read once, when they are first used: so before torch and tokenizers are imported."""
    os.environ["OMP_NUM_THREADS"] = str(threads)
    os.environ["RAYON_NUM_THREADS"] = str(threads)
    os.environ["TOKENIZERS_PARALLELISM"] = "true" if threads > 1 else "false"
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
