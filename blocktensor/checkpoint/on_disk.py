"""The layout of an FP8 checkpoint on disk: names, config and index, and their checks.

A checkpoint is a folder of safetensors files, an index of the file of each tensor, and a
``config.json``. The weight ``a.weight`` is e4m3 ``[N, K]``. Its scales, one for each 128x128 block,
are multiplied with it: ``a.weight_scale_inv``, as in DeepSeek-V3 and transformers' "fp8". We write
them in fp32. A stack of experts ``a.gate_up_proj`` is e4m3 ``[E, N, K]`` beside
``a.gate_up_proj_scale_inv``, or a matrix or two for each expert (``names.py``), each beside its
scales.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
CONFIG = "config.json"
SCALE_SUFFIX = "_scale_inv"
"""Suffix that names a weight's scales."""


class CheckpointError(ValueError):
    """A checkpoint that cannot be read, or does not fit; names file, tensor and problem."""


def require_safetensors() -> None:
    """Raise ImportError if safetensors is not installed."""
    try:
        import safetensors  # noqa: F401
    except ImportError:
        raise ImportError("FP8 checkpoints need safetensors: pip install safetensors") from None


def read_json(file: Path) -> dict[str, Any]:
    """Read the object in a JSON file; CheckpointError if the file or the object is missing."""
    try:
        content = json.loads(file.read_bytes())
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{file}: not readable as JSON ({error})") from None
    if not isinstance(content, dict):
        raise CheckpointError(f"{file}: expected a JSON object, got {type(content).__name__}")
    return content


# Files that are laid out first and then written in any order, by several ranks. safetensors itself
# writes a file from one dictionary, with all tensors of the file in memory, in one process.

Layout = tuple[torch.dtype, tuple[int, ...]]
"""Dtype and shape of a tensor."""

_DTYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2", torch.float8_e8m0fnu: "F8_E8M0",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8",
    torch.uint64: "U64", torch.uint32: "U32", torch.uint16: "U16", torch.uint8: "U8",
    torch.bool: "BOOL", torch.complex64: "C64",
}  # fmt: skip
"""The names of dtypes in the format."""


class ShardFile:
    """One file: 8 bytes with the length of a JSON header, the header, the bytes of all tensors.

    Attributes:
        path: where it is.
        names: of the tensors in it.
        nbytes: of all of them.
    """

    def __init__(self, path: Path, tensors: Mapping[str, Layout]) -> None:
        """Lay out a file for ``tensors``, by name.

        Raises:
            TypeError: a dtype that the format does not have.
        """
        self.path = path
        header: dict[str, object] = {"__metadata__": {"format": "pt"}}
        self._places: dict[str, int] = {}
        end = 0
        # larger elements first, so that all are aligned
        for name, (dtype, shape) in sorted(
            tensors.items(), key=lambda x: (-x[1][0].itemsize, x[0])
        ):
            if dtype not in _DTYPES:
                raise TypeError(
                    f"{name} has dtype {dtype}, which safetensors files do not have: convert it, "
                    f"or register the buffer with persistent=False"
                )
            begin, end = end, end + math.prod(shape) * dtype.itemsize
            offsets = [begin, end]
            header[name] = {"dtype": _DTYPES[dtype], "shape": shape, "data_offsets": offsets}
            self._places[name] = begin
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        self._head = len(text).to_bytes(8, "little") + text
        self.names, self.nbytes = tuple(self._places), end

    def create(self) -> None:
        """Make the file, with zeros for all tensors."""
        with self.path.open("wb") as file:
            file.write(self._head)
            file.truncate(len(self._head) + self.nbytes)

    def write(self, name: str, x: Tensor) -> None:
        """Write the values of a tensor, contiguous and on the CPU."""
        with self.path.open("r+b") as file:
            file.seek(len(self._head) + self._places[name])
            file.write(x.view(-1).view(torch.uint8).numpy().data)
