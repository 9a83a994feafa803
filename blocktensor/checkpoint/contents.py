"""Read the index and headers of a checkpoint: every tensor with its file, dtype and shape."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ..ops.formats import BLOCKS_128X128
from .on_disk import CONFIG, INDEX, SCALE_SUFFIX, SINGLE, CheckpointError, read_json

_SCALES = ("F32", "BF16", "F16", "F8_E8M0")
"""Dtypes of stored scales, all of which convert to fp32 exactly."""

_NO_FOLDER = (
    ": expected the path of a folder; huggingface_hub.snapshot_download(name) returns the folder "
    "of a model on the hub"
)


class Entry(NamedTuple):
    """A stored tensor as the header of its file describes it."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    name: str

    @property
    def is_fp8(self) -> bool:
        """Return True if it is an FP8 weight."""
        return self.dtype == "F8_E4M3"

    def __str__(self) -> str:
        return f"{self.file}: tensor {self.name!r}"


def entries_of(folder: Path) -> dict[str, Entry]:
    """Return every tensor of a checkpoint, by name, from checked headers.

    Raises:
        CheckpointError: a file is missing or malformed, or index and headers disagree.
        NotImplementedError: the config describes other blocks than 128x128.
    """
    if os.path.lexists(folder / CONFIG):
        check_blocks(read_json(folder / CONFIG), folder / CONFIG)
    if not os.path.lexists(folder / INDEX):
        if not os.path.lexists(folder / SINGLE):
            hint = "" if os.path.isdir(folder) else _NO_FOLDER
            raise CheckpointError(
                f"{folder}: no checkpoint: neither {INDEX} nor {SINGLE} is there{hint}"
            )
        return _header(folder / SINGLE)
    places = _index(folder / INDEX)
    entries: dict[str, Entry] = {}
    for file in sorted(set(places.values())):
        header = _header(folder / file)
        for name in header:
            place = places.get(name)
            if place != file:
                said = "does not name it" if place is None else f"says that it is in {place}"
                raise CheckpointError(f"{folder / file}: has tensor {name!r}: {INDEX} {said}")
        entries |= header
    for name, file in places.items():
        if name not in entries:
            raise CheckpointError(f"{folder / file}: tensor {name!r} is missing, {INDEX} names it")
    return entries


def scales_of(entries: Mapping[str, Entry]) -> dict[str, str]:
    """Return the name of the scales of each FP8 weight that has its own.

    Raises:
        CheckpointError: a weight whose scales have a wrong shape or dtype.
    """
    scales = {}
    for name, entry in entries.items():
        found = next((x for x in names_of_scales(name) if x in entries), None)
        if entry.is_fp8 and found is not None:
            scales[name] = found
            check_scales(entries[found], entry.shape)
    return scales


def names_of_scales(weight: str) -> list[str]:
    """Return the names that the scales of a weight may have.

    DeepSeek-V3 writes ``weight_scale_inv``, compressed-tensors and ModelOpt ``weight_scale``,
    DeepSeek-V4 ``scale`` and Mistral ``qscale_weight``.
    """
    names = [f"{weight}{SCALE_SUFFIX}", f"{weight}_scale"]
    module, _, last = weight.rpartition(".")
    return names + [f"{module}.{x}" for x in ("scale", "qscale_weight") if last == "weight"]


def check_scales(scales: Entry, shape: tuple[int, ...]) -> None:
    """Raise CheckpointError unless a tensor has a scale for each block of a weight of ``shape``."""
    expected = BLOCKS_128X128.scale_shape(shape) if len(shape) in BLOCKS_128X128.ranks else None
    # transformers 5.17 drops dimensions of one block in scales of experts, ModelOpt adds some
    fits = expected is not None and _without_ones(scales.shape) == _without_ones(expected)
    if scales.dtype not in _SCALES or not fits:
        raise CheckpointError(
            f"{scales} is {scales.dtype} {list(scales.shape)}{_granularity(scales.shape, shape)}: "
            f"expected {' or '.join(_SCALES)}, {expected and list(expected)}: a scale for each "
            f"128x128 block of {list(shape)}; dequantize the weights with the library that wrote "
            f"them, then convert"
        )


def _without_ones(shape: Sequence[int]) -> tuple[int, ...]:
    return tuple(size for size in shape if size != 1)


def _granularity(scales: Sequence[int], shape: Sequence[int]) -> str:
    """Describe the blocks that scales of another shape belong to."""
    if not _without_ones(scales):
        return ", one for the whole tensor"
    if _without_ones(scales) == _without_ones(shape[:-1]):
        return ", one for each row"
    return ""


def _index(file: Path) -> dict[str, str]:
    """Return the file of each tensor, from the index or the only file."""
    places = read_json(file).get("weight_map")
    if not isinstance(places, dict) or not all(isinstance(x, str) for x in places.values()):
        raise CheckpointError(f"{file}: weight_map is no object of strings")
    for name in places.values():
        if os.path.basename(name) != name:
            raise CheckpointError(f"{file}: {name!r} is no file of its folder")
    return places


def _header(file: Path) -> dict[str, Entry]:
    from safetensors import SafetensorError, safe_open

    if not os.path.isfile(file):  # also False for names that no file can have
        raise CheckpointError(f"{file.parent}: {file.name!r} is no file, but {INDEX} names it")
    try:
        with safe_open(file, framework="pt") as opened:
            entries = {}
            for name in opened.keys():  # noqa: SIM118
                tensor = opened.get_slice(name)
                entries[name] = Entry(file, tensor.get_dtype(), tuple(tensor.get_shape()), name)
            return entries
    except (SafetensorError, OSError, RuntimeError) as error:  # RuntimeError: it cannot be mapped
        raise CheckpointError(f"{file}: truncated or corrupted ({error})") from None


def check_blocks(config: Mapping[str, Any], file: Path) -> None:
    """Raise NotImplementedError if a config describes weights in blocks other than 128x128."""
    described = config.get("quantization_config")
    size = described.get("weight_block_size") if isinstance(described, dict) else None
    expected = list(BLOCKS_128X128.block_shape)
    if size is not None and size != expected:
        raise NotImplementedError(
            f"{file}: weights are scaled in blocks of {size}, expected {expected}: "
            f"dequantize them with the library that wrote them, then convert"
        )
