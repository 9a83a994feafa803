"""What a checkpoint holds: every tensor with its file, dtype and shape, from index and headers.

No data is read here, and nothing is allocated by a size that a file claims.
"""

from __future__ import annotations

import os
import reprlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from ..ops.formats import BLOCKS_128X128
from .digests import header_digest
from .on_disk import (
    CONFIG,
    HEADERS,
    INDEX,
    SCALE_SUFFIXES,
    SINGLE,
    TENSORS,
    CheckpointError,
    check_blocks,
    read_json,
)

_E4M3 = "F8_E4M3"

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
        return self.dtype == _E4M3


def entries_of(folder: Path) -> dict[str, Entry]:
    """Every tensor of a checkpoint, by name, from checked headers.

    Raises:
        CheckpointError: a file is missing or malformed, or index and headers disagree.
        NotImplementedError: the config describes other blocks than 128x128.
    """
    if os.path.lexists(folder / CONFIG):
        check_blocks(read_json(folder / CONFIG), folder / CONFIG)
    if os.path.lexists(folder / INDEX):
        index = read_json(folder / INDEX)
        places, headers, digests = _index(index, folder / INDEX)
    elif os.path.lexists(folder / SINGLE):
        places, headers, digests = None, {}, None
    else:
        raise CheckpointError(f"{folder}: no checkpoint: neither {INDEX} nor {SINGLE} is there")
    files = [SINGLE] if places is None else sorted(set(places.values()))
    entries: dict[str, Entry] = {}
    for file in files:
        found = _header(folder / file, headers.get(file))
        for name in found:
            if places is not None and places.get(name) != file:
                place = places.get(name)
                said = "does not name it" if place is None else f"says that it is in {place}"
                raise CheckpointError(f"{folder / file}: has tensor {name!r}: {INDEX} {said}")
        entries |= found
    for name, file in (places or {}).items():
        if name not in entries:
            raise CheckpointError(f"{folder / file}: tensor {name!r} is missing, {INDEX} names it")
    if digests is None:
        return entries
    for name in entries:
        if name not in digests:
            raise CheckpointError(
                f"{folder / INDEX}: tensor {name!r} has no digest in {TENSORS}, which has one for "
                f"each tensor: copy the index again from where it is intact; without {TENSORS} all "
                f"tensors load unchecked"
            )
    return {name: entry._replace(digest=digests[name]) for name, entry in entries.items()}


def scales_of(entries: Mapping[str, Entry]) -> dict[str, str]:
    """The name of the scales of each FP8 weight that has its own.

    Raises:
        CheckpointError: a weight with two of them, or whose scales have a wrong shape or dtype.
    """
    scales = {}
    for name, entry in entries.items():
        if not entry.is_fp8:
            continue
        found = [name + suffix for suffix in SCALE_SUFFIXES.values() if name + suffix in entries]
        if len(found) > 1:
            raise CheckpointError(
                f"{entry.file}: tensor {name!r} is FP8 and has {len(found)} scales: expected one "
                f"of {' or '.join(found)}"
            )
        for scale in found:
            check_scales(scale, entries[scale], entry.shape)
            scales[name] = scale
    return scales


def check_scales(name: str, scales: Entry, shape: tuple[int, ...]) -> None:
    """Raise CheckpointError unless a tensor has a scale for each block of a weight of ``shape``."""
    expected = BLOCKS_128X128.scale_shape(shape) if len(shape) in BLOCKS_128X128.ranks else None
    # transformers 5.17 writes those of experts without their dimensions of one block
    squeezed = expected and tuple(size for size in expected if size != 1)
    if scales.dtype not in _SCALES or scales.shape not in (expected, squeezed):
        raise CheckpointError(
            f"{scales.file}: tensor {name!r} is {scales.dtype} {list(scales.shape)}: expected "
            f"{' or '.join(_SCALES)}, {None if expected is None else list(expected)}: a scale for "
            f"each 128x128 block of {list(shape)}"
        )


def _index(
    index: dict[str, Any], file: Path
) -> tuple[dict[str, str], dict[str, str], dict[str, str] | None]:
    """The file of each tensor, and the digests of headers and tensors if ``save_fp8`` wrote it."""
    places = index.get("weight_map")
    metadata = index.get("metadata")
    if not isinstance(metadata, dict):
        metadata = {}
    headers, digests = metadata.get(HEADERS, {}), metadata.get(TENSORS, {})
    for what, found in (("weight_map", places), (HEADERS, headers), (TENSORS, digests)):
        fits = isinstance(found, dict) and all(isinstance(value, str) for value in found.values())
        if not fits:
            raise CheckpointError(f"{file}: {what} is no object of strings")
    assert isinstance(places, dict)
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
            entries, names = {}, opened.keys()
            for name in names:
                tensor = opened.get_slice(name)
                entries[name] = Entry(file, tensor.get_dtype(), tuple(tensor.get_shape()), name)
            return entries
    except (SafetensorError, OSError, RuntimeError) as error:  # RuntimeError: it cannot be mapped
        raise CheckpointError(f"{file}: truncated or corrupted ({error})") from None
