"""What a tokenizer call returned for a block of texts, and how a batch is taken out of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from ranker.batching import IntArray
from ranker.errors import RankerError

CUDA_AHEAD = 4
"""Passes enqueued on a GPU before the first of them is waited for, so that it never waits for Python."""


def ahead(device: torch.device) -> int:
    """How many passes may be on their way at once on `device`."""
    return CUDA_AHEAD if device.type == "cuda" else 1


@dataclass(slots=True, kw_only=True)
class Features:
    """n texts (or pairs), tokenised and padded to one width L."""

    tensors: Mapping[str, Any]
    """As `preprocess` returned it: tensors of [n, L], and whatever else the model's forward wants."""
    mask: torch.Tensor
    """[n, L] 1 for a token, 0 for padding, on either side."""
    lengths: npt.NDArray[np.int32]
    """[n] tokens after truncation, special tokens included."""
    truncated: npt.NDArray[np.bool_]
    """[n]"""

    @property
    def n_tokens(self) -> npt.NDArray[np.int32]:
        return self.lengths

    def batch(self, rows: IntArray, device: torch.device) -> dict[str, Any]:
        """A fresh dict for one forward pass (which writes into it), as narrow as its longest row.

        Columns are those in which some row has a token. Cutting at `[:, :width]` instead is right only for
        padding on the right: decoder models pad on the left, and there it would silently cut off the text.
        """
        index = torch.from_numpy(rows)
        columns = self.mask[index].any(0)  # [L]
        return {
            name: _moved(value[index][:, columns] if self._per_token(value) else value, device)
            for name, value in self.tensors.items()
        }

    def _per_token(self, value: Any) -> bool:
        return isinstance(value, torch.Tensor) and value.shape[:2] == self.mask.shape


def features(output: Mapping[str, Any]) -> Features:
    """Wrap what `preprocess` returned.

    Raises:
        RankerError: the model takes flattened inputs without a mask, which cannot be cut into batches.
    """
    mask = output.get("attention_mask")
    if not isinstance(mask, torch.Tensor) or mask.ndim != 2:
        raise RankerError("this model's inputs have no attention mask (say, static embeddings): not supported")
    return Features(
        tensors=dict(output.items()),
        mask=mask,
        lengths=mask.sum(1).numpy().astype(np.int32),
        truncated=_truncated(output),
    )


def untruncated_ids(model: Any, inputs: Sequence[Any], **kwargs: Any) -> list[list[int]]:
    """Token ids of each input as the model would see it if nothing were ever cut off."""
    output = model.preprocess(
        inputs,
        processing_kwargs={"common": {"return_tensors": None}, "text": {"truncation": False, "padding": False}},
        **kwargs,
    )
    return [list(ids) for ids in output["input_ids"]]


def _truncated(output: Mapping[str, Any]) -> npt.NDArray[np.bool_]:
    """[n] whether the tokenizer cut something off. Never `length == max`: a text may fit exactly."""
    encodings = getattr(output, "encodings", None)
    if encodings is None:
        raise RankerError("this model's tokenizer is not a fast one: its truncation cannot be seen; not supported")
    return np.array([bool(encoding.overflowing) for encoding in encodings], dtype=np.bool_)


def _moved(value: Any, device: torch.device) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    if device.type == "cuda":  # from pinned memory the copy runs beside the passes that are enqueued already
        return value.pin_memory().to(device, non_blocking=True)
    return value.to(device)


def answer(values: torch.Tensor) -> Callable[[], npt.NDArray[np.float32]]:
    """Take `values` off the device: on CUDA by a copy that is enqueued now and waited for when it is asked for."""
    if values.device.type != "cuda":
        array: npt.NDArray[np.float32] = values.numpy()
        return lambda: array
    host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
    host.copy_(values, non_blocking=True)
    copied = torch.cuda.current_stream(values.device).record_event()

    def wait() -> npt.NDArray[np.float32]:
        copied.synchronize()
        return host.numpy()

    return wait
