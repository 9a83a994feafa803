"""FP8 tensors have no storage to write to a file: the error names save_fp8.

safetensors asks for the storage of every tensor that it writes. Without this it fails with "invalid
python storage".
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

from torch import Tensor


def _no_storage(x: Tensor) -> NoReturn:
    raise RuntimeError(
        f"this {type(x).__name__} {list(x.shape)} has no storage of its own, so that safetensors "
        f"cannot write it: blocktensor.save_fp8(model, path) writes the model in FP8; in high "
        f"precision write .dequantize() of a frozen weight, and state_dict() of trainable ones, "
        f"which holds plain tensors"
    )


STORAGE_READERS: dict[Any, Callable[..., Any]] = {Tensor.storage: _no_storage}
"""Torch functions of all FP8 types."""
