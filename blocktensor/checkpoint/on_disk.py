"""The layout of an FP8 checkpoint on disk: names, config and index, and their checks.

A checkpoint is a folder of safetensors files, an index of the file of each tensor, and a
``config.json``. The weight ``a.weight`` is e4m3 ``[N, K]``. Its scales, one for each 128x128 block,
are multiplied with it: ``a.weight_scale_inv`` (DeepSeek-V3, transformers' "fp8") or
``a.weight_scale`` (compressed-tensors). We write them in fp32. A stack of experts
``a.gate_up_proj`` is e4m3 ``[E, N, K]`` beside ``a.gate_up_proj_scale_inv``, or a matrix or two for
each expert (``names.py``), beside scales of each or of all (``stack_scales.py``).
"""

from __future__ import annotations

import json
import reprlib
import stat
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..distributed.dtensor import local_of
from ..ops.formats import BLOCKS_128X128, BlockFormat

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
CONFIG = "config.json"
HEADERS = "header_sha256"
"""Entry of the index's metadata: the digest of each file's header, its length included."""

TENSORS = "tensor_sha256"
"""Entry of the index's metadata: the digest of each tensor, scales included."""

SCALE_SUFFIXES = {"deepseek": "_scale_inv", "compressed-tensors": "_scale"}
"""Suffix that names a weight's scales, by spelling."""

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
        raise ImportError(
            f"FP8 checkpoints need {error.name}: pip install 'blocktensor[checkpoint]'"
        ) from None


def refuse_sharded(name: str, x: Tensor) -> None:
    """Raise NotImplementedError if ``x`` is a DTensor, of a model that lies on several ranks."""
    if local_of(x) is not None:
        raise NotImplementedError(
            f"{name} is a DTensor, its model sharded: FP8 checkpoints are of whole models. Use "
            f"torch.distributed.checkpoint for sharded ones, or gather the state first "
            f"(get_model_state_dict with full_state_dict=True) into an unsharded model"
        )


def shard_name(number: int, count: int) -> str:
    """The file name of one of ``count`` shards, counted from 1."""
    return f"model-{number:05}-of-{count:05}.safetensors"


def quantization_config(
    spelling: str, unconverted: Iterable[str], formats: Iterable[BlockFormat]
) -> dict[str, Any]:
    """The description of FP8 weights in ``config.json``, by which other libraries load them.

    ``unconverted``: names of linear modules that are not in FP8. ``formats``: of all FP8 weights.
    """
    left = sorted(unconverted)
    block = list(BLOCKS_128X128.block_shape)
    if spelling == "deepseek":
        config: dict[str, Any] = {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": block,
            "modules_to_not_convert": left,
        }
        # As in DeepSeek-V3.1: transformers then keeps the fp32 scales as e8m0, without loss.
        powers = all(format.power_of_two for format in formats)
        return config | ({"scale_fmt": "ue8m0"} if powers else {})
    numbers = {"num_bits": 8, "type": "float", "symmetric": True}
    return {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "quantization_status": "compressed",
        "ignore": left,
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": {
                    **numbers,
                    "strategy": "block",
                    "block_structure": block,
                    "dynamic": False,
                },
                "input_activations": {
                    **numbers,
                    "strategy": "group",
                    "group_size": BLOCKS_128X128.cols,
                    "dynamic": True,
                },
            }
        },
    }


def check_blocks(config: Mapping[str, Any], file: Path) -> None:
    """Raise NotImplementedError if a config describes weights in blocks other than 128x128.

    Raises:
        CheckpointError: its description of FP8 weights is malformed.
    """
    found = _object(config, "quantization_config", file)
    sizes = [found.get("weight_block_size")]
    groups = _object(found, "config_groups", file)
    for name in groups:
        weights = _object(_object(groups, name, file), "weights", file)
        sizes.append(weights.get("block_structure"))
    expected = list(BLOCKS_128X128.block_shape)
    for size in sizes:
        if size is None or size == "x".join(map(str, expected)):  # compressed-tensors' other way
            continue
        numbers = isinstance(size, list) and all(type(n) is int and n > 0 for n in size)
        if not numbers or len(size) != len(expected):
            raise CheckpointError(
                f"{file}: weights are scaled in blocks of {reprlib.repr(size)}: expected {expected}"
            )
        if size != expected:
            raise NotImplementedError(
                f"{file}: weights are scaled in blocks of {size}, expected {expected}: "
                f"dequantize them with the library that wrote them, then convert"
            )


def _object(parent: Mapping[str, Any], name: str, file: Path) -> dict[str, Any]:
    """An object inside a JSON object; empty if it is absent or null."""
    found = parent.get(name)
    if found is not None and not isinstance(found, dict):
        raise CheckpointError(
            f"{file}: {reprlib.repr(name)} is {reprlib.repr(found)}: expected a JSON object"
        )
    return found or {}


def bad_scale(scale: Tensor, format: BlockFormat) -> str | None:
    """What is wrong with stored fp32 scales on the CPU, which must be finite and above 0."""
    fits = scale.isfinite() & (scale > 0)
    expected = "a finite number above 0"
    if format.power_of_two and fits.all():
        fits = torch.frexp(scale).mantissa == 0.5
        expected = "a power of two, as Recipe(scale='power_of_two') has them"
    if fits.all():
        return None
    block = (~fits).nonzero()[0].tolist()
    return f"the scale of block {block} is {scale[tuple(block)].item()}: expected {expected}"


def read_json(file: Path) -> dict[str, Any]:
    """The object in a JSON file; CheckpointError if the file or the object is missing."""
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
