"""What an exception from a forward pass says about its batch. Pure, and without torch: it judges by name."""

from __future__ import annotations

import traceback
from enum import StrEnum
from typing import Literal

from ranker.errors import DeviceBroken, RankerError
from ranker.types import PairFailure

TRACEBACK_CHARS = 8_000
"""The end of a traceback is what names the cause; a part's footer should not carry more."""


class Verdict(StrEnum):
    """Who is to blame, and so what comes next."""

    MEMORY = "memory"
    """The batch was too large: a smaller budget, then the same rows again."""
    DEVICE = "device"
    """The accelerator's context is not to be trusted: nothing may be scored in this process any more."""
    BATCH = "batch"
    """The ranker broke its promise: all rows of the batch fail, and no narrowing down could clear one."""
    PAIR = "pair"
    """Some pair of the batch: found by halving."""


class PromiseError(RankerError):
    """A ranker returned something else than one number a pair."""


_DEVICE_WORDS = (
    "CUDA error",
    "CUDA driver error",
    "CUDNN_STATUS",
    "CUBLAS_STATUS",
    "HIP error",
    "device-side assert",
)
_MEMORY_WORDS = ("out of memory", "can't allocate memory", "not enough memory")


def verdict(error: BaseException) -> Verdict:
    """Judge what a forward pass raised.

    By names and texts, not by class: the classes are torch's, and this module must be importable without it
    (torch.AcceleratorError does not even exist in the oldest torch we support).
    """
    names = {cls.__name__ for cls in type(error).__mro__}
    text = str(error)
    if "OutOfMemoryError" in names or isinstance(error, MemoryError):
        return Verdict.MEMORY
    # Only a RuntimeError is judged by its text: that of a ValueError may quote a document about CUDA errors.
    native = isinstance(error, RuntimeError)
    if native and any(word in text for word in _MEMORY_WORDS):
        return Verdict.MEMORY
    if "AcceleratorError" in names or (native and any(word in text for word in _DEVICE_WORDS)):
        return Verdict.DEVICE
    return Verdict.BATCH if isinstance(error, PromiseError) else Verdict.PAIR


def is_document_error(error: BaseException) -> bool:
    """Whether `error` may become a record. A Rust panic in a tokenizer is a BaseException, and still only that."""
    return isinstance(error, Exception) or type(error).__name__ == "PanicException"


def check_device(error: BaseException) -> None:
    """Raise DeviceBroken if `error` says that nothing may be computed here any more."""
    if verdict(error) is Verdict.DEVICE:
        raise DeviceBroken(one_line(error)) from error


def let_go(error: BaseException) -> BaseException:
    """Empty the frames that the error's traceback holds, and return it: they keep the tensors of the failed pass
    alive, and the next try would run beside them. Lines and names, which is what is reported, stay."""
    seen: BaseException | None = error
    while seen is not None:
        traceback.clear_frames(seen.__traceback__)
        seen = seen.__cause__ or seen.__context__
    return error


def failure(index: int, stage: Literal["tokenize", "score"], error: BaseException) -> PairFailure:
    """The record of `error` for pair `index`."""
    text = "".join(traceback.format_exception(error))
    return PairFailure(
        index=index,
        stage=stage,
        error_type=type(error).__name__,
        message=one_line(error),
        traceback=text[-TRACEBACK_CHARS:],
    )


def one_line(error: BaseException) -> str:
    """The first line of an exception that says something, for messages that must be one line."""
    lines = (line.strip() for line in str(error).splitlines())
    return next((line for line in lines if line), type(error).__name__)[:500]
