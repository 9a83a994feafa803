"""Files of safetensors that are laid out first and then written in any order, by several ranks.

safetensors itself writes a file from one dictionary, with all tensors of the file in memory at
once, in one process.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

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
