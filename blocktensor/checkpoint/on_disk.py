"""Define the layout of an FP8 checkpoint on disk: names, config and index, and their checks.

A checkpoint is a folder of safetensors files, an index of the file of each tensor, and a
``config.json``. The weight ``a.weight`` is e4m3 ``[N, K]``. Its scales, one for each 128x128 block,
are multiplied by its elements: ``a.weight_scale_inv``, as in DeepSeek-V3 and transformers' "fp8".
We write them in fp32. A stack of experts ``a.gate_up_proj`` is e4m3 ``[E, N, K]`` with
``a.gate_up_proj_scale_inv``, or one or two matrices for each expert (``names.py``), each with its
scales.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from torch import Tensor

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
CONFIG = "config.json"
SCALE_SUFFIX = "_scale_inv"
"""Suffix that names a weight's scales."""


class CheckpointError(ValueError):
    """A checkpoint cannot be read or does not fit; the message names file, tensor and problem."""


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


def write_shard(file: Path, tensors: dict[str, Tensor]) -> None:
    """Write a file of tensors to the disk.

    Raises:
        OSError: it cannot be written.
        TypeError: a dtype that the format does not have.
    """
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    file.touch()
    mode = file.stat().st_mode  # permissions by the umask: safetensors 0.8 lets only the owner read
    try:
        save_file(tensors, file, metadata={"format": "pt"})
    except SafetensorError as error:
        raise OSError(str(error)) from None
    except KeyError as missing:
        (dtype,) = missing.args
        name = next(name for name, x in tensors.items() if x.dtype == dtype)
        raise TypeError(
            f"{name} has dtype {dtype}, which safetensors files do not have: convert it, or "
            f"register the buffer with persistent=False"
        ) from None
    file.chmod(mode)
    flush(file)


def flush(path: Path) -> None:
    """Flush a file, or the entries of a folder, to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
