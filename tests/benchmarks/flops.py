"""How much a model multiplies, and how fast the machine multiplies matrices of the model's shapes."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch

_TOKENS = (1024, 2048, 4096)
_SECONDS = 0.5


def model_flops(checkpoint: str, lengths: Sequence[int]) -> float:
    """Floating-point operations of scoring documents of `lengths` true tokens, padding left out.

    Two a weight of the encoder's linear layers and token, and for attention two matrix products of
    [length, hidden] × [hidden, length] a layer. Pooler and head see one token a document and are left out.
    """
    config = _config(checkpoint)
    hidden, inner, layers = config.hidden_size, config.intermediate_size, config.num_hidden_layers
    weights = layers * (4 * hidden * hidden + 2 * hidden * inner)
    return float(sum(2 * weights * n + layers * 4 * n * n * hidden for n in lengths))


def matmul_peak(checkpoint: str, dtype: str) -> float:
    """The most floating-point operations per second that a linear layer of one of the model's shapes reaches, at
    1,024, 2,048 or 4,096 tokens, with the threads that torch has."""
    config = _config(checkpoint)
    hidden, inner = config.hidden_size, config.intermediate_size
    shapes = [
        (n, rows, columns)
        for n in _TOKENS
        for rows, columns in ((hidden, inner), (inner, hidden), (hidden, hidden))
    ]
    return max(_speed(*shape, dtype, "cpu") for shape in shapes)


def square_peak(dtype: str, device: str, size: int) -> float:
    """Floating-point operations per second of one large square matrix multiplication."""
    return _speed(size, size, size, dtype, device)


def _speed(tokens: int, rows: int, columns: int, dtype: str, device: str) -> float:
    options: Any = {"dtype": getattr(torch, dtype), "device": device}
    left, weight = torch.randn(tokens, rows, **options), torch.randn(columns, rows, **options)
    with torch.inference_mode():
        for _ in range(3):
            torch.nn.functional.linear(left, weight)
        _wait(device)
        done, start = 0, time.perf_counter()
        while time.perf_counter() - start < _SECONDS:
            for _ in range(10):
                torch.nn.functional.linear(left, weight)
            _wait(device)
            done += 10
        return 2 * tokens * rows * columns * done / (time.perf_counter() - start)


def _wait(device: str) -> None:
    if device != "cpu":
        torch.cuda.synchronize()


def _config(checkpoint: str) -> Any:
    from transformers import AutoConfig

    return AutoConfig.from_pretrained(checkpoint)
