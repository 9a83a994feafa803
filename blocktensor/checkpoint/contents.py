"""Reading index and headers of a checkpoint: every tensor with its file, dtype and shape.

No data is read here, and nothing is allocated by a size that a file claims.
"""

from __future__ import annotations

import os
import reprlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from ..ops.formats import BLOCKS_128X128
from .on_disk import (
    CONFIG,
    HEADERS,
    INDEX,
    SCALE_SUFFIX,
    SINGLE,
    TENSORS,
    CheckpointError,
    header_digest,
    read_json,
)

_SCALES = ("F32", "BF16", "F16", "F8_E8M0")
"""Dtypes of stored scales: fp32 holds every value of each."""

_LONGEST_NAME = 255


class Entry(NamedTuple):
    """A stored tensor, as the file's header describes it: its name, dtype and shape there.

    ``digest``: what ``tensor_digest`` gave when it was written; None if the writer kept none.
    """

    file: Path
    dtype: str
    shape: tuple[int, ...]
    name: str
    digest: str | None = None

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
            raise CheckpointError(f"{folder}: no checkpoint: neither {INDEX} nor {SINGLE} is there")
        return _header(folder / SINGLE, None)
    places, headers, digests = _index(folder / INDEX)
    entries: dict[str, Entry] = {}
    for file in sorted(set(places.values())):
        found = _header(folder / file, headers.get(file))
        for name in found:
            place = places.get(name)
            if place != file:
                said = "does not name it" if place is None else f"says that it is in {place}"
                raise CheckpointError(f"{folder / file}: has tensor {name!r}: {INDEX} {said}")
        entries |= found
    for name, file in places.items():
        if name not in entries:
            raise CheckpointError(f"{folder / file}: tensor {name!r} is missing, {INDEX} names it")
        if digests is not None:
            if name not in digests:
                raise CheckpointError(
                    f"{folder / INDEX}: tensor {name!r} has no digest in {TENSORS}, which has one "
                    f"for each tensor: copy the index again from where it is intact; without "
                    f"{TENSORS} all tensors load unchecked"
                )
            entries[name] = entries[name]._replace(digest=digests[name])
    return entries


def scales_of(entries: Mapping[str, Entry]) -> dict[str, str]:
    """Return the name of the scales of each FP8 weight that has its own.

    Raises:
        CheckpointError: a weight whose scales have a wrong shape or dtype.
    """
    scales = {}
    for name, entry in entries.items():
        if entry.is_fp8 and name + SCALE_SUFFIX in entries:
            scales[name] = name + SCALE_SUFFIX
            check_scales(entries[name + SCALE_SUFFIX], entry.shape)
    return scales


def check_scales(scales: Entry, shape: tuple[int, ...]) -> None:
    """Raise CheckpointError unless a tensor has a scale for each block of a weight of ``shape``."""
    expected = BLOCKS_128X128.scale_shape(shape) if len(shape) in BLOCKS_128X128.ranks else None
    # transformers 5.17 writes those of experts without their dimensions of one block
    squeezed = expected and tuple(size for size in expected if size != 1)
    if scales.dtype not in _SCALES or scales.shape not in (expected, squeezed):
        raise CheckpointError(
            f"{scales} is {scales.dtype} {list(scales.shape)}: expected {' or '.join(_SCALES)}, "
            f"{expected and list(expected)}: a scale for each 128x128 block of {list(shape)}"
        )


def _index(file: Path) -> tuple[dict[str, str], dict[str, str], dict[str, str] | None]:
    """Read the file of each tensor, and the digests of headers and tensors if there are any."""
    index = read_json(file)
    metadata = index.get("metadata")
    if not isinstance(metadata, dict):
        metadata = {}
    found = {
        "weight_map": index.get("weight_map"),
        HEADERS: metadata.get(HEADERS, {}),
        TENSORS: metadata.get(TENSORS, {}),
    }
    for what, strings in found.items():
        fits = isinstance(strings, dict) and all(isinstance(x, str) for x in strings.values())
        if not fits:
            raise CheckpointError(f"{file}: {what} is no object of strings")
    places, headers, digests = found.values()
    for name in places.values():
        if os.path.basename(name) != name or not 0 < len(name) <= _LONGEST_NAME or name == ".":
            raise CheckpointError(f"{file}: {reprlib.repr(name)} is no file of its folder")
    return places, headers, digests if TENSORS in metadata else None


def _header(file: Path, digest: str | None) -> dict[str, Entry]:
    from safetensors import SafetensorError, safe_open

    if not os.path.isfile(file):  # False too for names that no file can have
        raise CheckpointError(f"{file.parent}: {file.name!r} is no file, but {INDEX} names it")
    try:
        if digest is not None and header_digest(file) != digest:
            raise CheckpointError(
                f"{file}: corrupted: its header is not the one that was written (SHA-256 in "
                f"{INDEX})"
            )
        with safe_open(file, framework="pt") as opened:
            entries = {}
            for name in opened.keys():  # noqa: SIM118
                tensor = opened.get_slice(name)
                entries[name] = Entry(file, tensor.get_dtype(), tuple(tensor.get_shape()), name)
            return entries
    except (SafetensorError, OSError, RuntimeError) as error:  # RuntimeError: it cannot be mapped
        raise CheckpointError(f"{file}: truncated or corrupted ({error})") from None


def check_blocks(config: Mapping[str, Any], file: Path) -> None:
    """Raise NotImplementedError if a config describes weights in blocks other than 128x128.

    Raises:
        CheckpointError: its description of FP8 weights is malformed.
    """
    described = _object(config, "quantization_config", file)
    size, expected = described.get("weight_block_size"), list(BLOCKS_128X128.block_shape)
    if size is None:
        return
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
    """Return an object inside a JSON object; empty if it is absent or null."""
    found = parent.get(name)
    if found is not None and not isinstance(found, dict):
        raise CheckpointError(
            f"{file}: {reprlib.repr(name)} is {reprlib.repr(found)}: expected a JSON object"
        )
    return found or {}
