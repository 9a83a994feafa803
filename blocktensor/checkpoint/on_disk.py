"""The layout of an FP8 checkpoint on disk: names, config and index, and their checks.

A checkpoint is a folder of safetensors files, an index of the file of each tensor, and a
``config.json``. The weight ``a.weight`` is e4m3 ``[N, K]``. Its scales, one for each 128x128 block,
are multiplied with it: ``a.weight_scale_inv``, as in DeepSeek-V3 and transformers' "fp8". We write
them in fp32. A stack of experts ``a.gate_up_proj`` is e4m3 ``[E, N, K]`` beside
``a.gate_up_proj_scale_inv``, or a matrix or two for each expert (``names.py``), each beside its
scales.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
CONFIG = "config.json"
HEADERS = "header_sha256"
"""Entry of the index's metadata: the digest of each file's header, its length included."""

TENSORS = "tensor_sha256"
"""Entry of the index's metadata: the digest of each tensor, scales included."""

SCALE_SUFFIX = "_scale_inv"
"""Suffix that names a weight's scales."""

HASHING_THREADS = min(8, os.cpu_count() or 1)
"""Eight threads hash faster than most disks read."""

MAX_HEADER = 100 << 20
"""The limit of safetensors itself, in bytes; an index of 300,000 tensors is shorter."""


class CheckpointError(ValueError):
    """A checkpoint that cannot be read, or does not fit; names file, tensor and problem."""


def require_safetensors() -> None:
    """Raise ImportError if safetensors, or NumPy for its digests, is not installed."""
    try:
        import numpy  # noqa: F401
        import safetensors  # noqa: F401
    except ImportError as error:
        raise ImportError(f"FP8 checkpoints need {error.name}: pip install {error.name}") from None


def read_json(file: Path) -> dict[str, Any]:
    """Read the object in a JSON file; CheckpointError if the file or the object is missing."""
    try:
        found = file.stat()
        if not stat.S_ISREG(found.st_mode):  # a pipe or a device would be read for ever
            raise CheckpointError(f"{file}: not readable as JSON (it is no file)")
        if found.st_size > MAX_HEADER:
            raise CheckpointError(f"{file}: larger than {MAX_HEADER} bytes")
        content = json.loads(file.read_bytes())
    except FileNotFoundError:
        raise CheckpointError(f"{file}: no such file") from None
    except CheckpointError:
        raise
    except (OSError, ValueError, RecursionError) as error:  # ValueError: also of too long numbers
        raise CheckpointError(f"{file}: not readable as JSON ({error})") from None
    if not isinstance(content, dict):
        raise CheckpointError(f"{file}: expected a JSON object, got {type(content).__name__}")
    return content


def header_digest(file: Path) -> str:
    """Hash a file's header (length, names, dtypes, places); CheckpointError if it is truncated."""
    with file.open("rb") as opened:
        length = opened.read(8)
        size = int.from_bytes(length, "little")
        fits = len(length) == 8 and size <= min(MAX_HEADER, file.stat().st_size - 8)
        header = opened.read(size) if fits else b""
    if not fits or len(header) < size:
        raise CheckpointError(f"{file}: truncated: it ends before its header does")
    return hashlib.sha256(length + header).hexdigest()


def tensor_digest(x: Tensor) -> str:
    """Hash dtype, shape and bytes of a contiguous tensor on the CPU, which is not copied.

    The dtype and the shape come first, as in ``"torch.bfloat16 [200, 300]"``: the same bytes have
    other values in another dtype.
    """
    digest = hashlib.sha256(f"{x.dtype} {list(x.shape)}".encode())
    digest.update(x.view(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


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
