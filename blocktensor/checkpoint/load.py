"""Reading FP8 checkpoints: check everything, read tensor by tensor, then assign all of them."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..ops.formats import BLOCKS_128X128
from ..recipe import DEFAULT_RECIPE, Recipe
from ..tensor.fp8_tensor import BlockwiseFP8Tensor
from ..tensor.weight import BlockwiseFP8Weight
from .on_disk import (
    CONFIG,
    HEADERS,
    INDEX,
    SCALE_SUFFIXES,
    SINGLE,
    CheckpointError,
    check_blocks,
    header_digest,
    read_json,
    refuse_sharded,
    require_safetensors,
)

_E4M3 = "F8_E4M3"

_SCALES = ("F32", "BF16", "F16", "F8_E8M0")
"""Dtypes of stored scales: fp32 holds every value of each."""


@dataclass(frozen=True)
class LoadReport:
    """The tensors of a checkpoint and of the model, by name.

    Attributes:
        fp8: weights that are now FP8, frozen.
        plain: parameters and buffers that are not FP8.
        missing: in the model but not in the checkpoint; unchanged.
        unexpected: in the checkpoint but not in the model; not read.
    """

    fp8: tuple[str, ...]
    plain: tuple[str, ...]
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]


class _Entry(NamedTuple):
    """A stored tensor, as the file's header describes it."""

    file: Path
    dtype: str
    shape: tuple[int, ...]


class _Target(NamedTuple):
    """The place of a tensor in the model."""

    module: nn.Module
    attribute: str
    current: Tensor


def load_fp8(
    model: nn.Module,
    path: str | os.PathLike[str],
    *,
    strict: bool = True,
    device: torch.device | str | None = None,
    recipe: Recipe = DEFAULT_RECIPE,
) -> LoadReport:
    """Load an FP8 checkpoint into a model whose linears are plain, converted or on meta.

    Reads checkpoints of :func:`save_fp8`, DeepSeek-V3 and transformers' "fp8"
    (``weight_scale_inv``), and of compressed-tensors with 128x128 blocks (``weight_scale``). Scales
    in another floating-point dtype, e8m0 included, become the same values in fp32. A weight stored
    in FP8 becomes a frozen :class:`BlockwiseFP8Tensor` with the stored bytes; other tensors are
    loaded as by ``load_state_dict``, in the model's dtype. Only tensors of the model are read, one
    at a time. The model does not change unless all of them can be loaded.

    Args:
        model: any module. Tensors on meta are made on ``device``.
        path: the folder.
        strict: raise for missing and unexpected names.
        device: for tensors that are on meta in the model; default: the CPU.
        recipe: of the FP8 weights: how gradients multiplied with them are cast.

    Raises:
        ImportError: safetensors is not installed.
        CheckpointError: a file that is missing, truncated or corrupted; a tensor whose shape or
            dtype does not fit the model; names that are missing or unexpected, if ``strict``.
        NotImplementedError: weights scaled in other blocks than 128x128; a sharded model.
    """
    require_safetensors()
    folder = Path(path)
    entries = _entries(folder)
    scales = _scales(entries)
    targets = _targets(model)
    for name, target in targets.items():
        refuse_sharded(name, target.current)
    stored = [name for name in entries if name not in scales.values()]
    missing = _missing(targets, stored)
    unexpected = tuple(name for name in stored if name not in targets)
    if strict and (missing or unexpected):
        raise CheckpointError(
            f"{folder}: does not fit the model: {_some('missing', missing)}, "
            f"{_some('unexpected', unexpected)}; strict=False loads what fits"
        )
    wanted = [name for name in stored if name in targets]
    for name in wanted:
        _check(name, entries, scales.get(name), targets[name])

    home = torch.device("cpu" if device is None else device)
    made = _read(wanted, entries, scales, targets, home, recipe)
    tied: dict[int, nn.Parameter] = {}
    for name, value in made.items():
        _put(targets[name], value, tied)
    # a tied parameter is stored under its first name only
    for target in targets.values():
        replaced = tied.get(id(target.current))
        if replaced is not None:
            setattr(target.module, target.attribute, replaced)
    in_fp8 = tuple(name for name in wanted if name in scales)
    plain = tuple(name for name in wanted if name not in scales)
    return LoadReport(in_fp8, plain, missing, unexpected)


def _entries(folder: Path) -> dict[str, _Entry]:
    """Every tensor of a checkpoint, by name, from checked headers."""
    if (folder / CONFIG).exists():
        check_blocks(read_json(folder / CONFIG), folder / CONFIG)
    if (folder / INDEX).exists():
        index = read_json(folder / INDEX)
        places, digests = _index(index, folder / INDEX)
    elif (folder / SINGLE).exists():
        places, digests = None, {}
    else:
        raise CheckpointError(f"{folder}: no checkpoint: neither {INDEX} nor {SINGLE} is there")
    files = [SINGLE] if places is None else sorted(set(places.values()))
    entries: dict[str, _Entry] = {}
    for file in files:
        found = _header(folder / file, digests.get(file))
        for name in found:
            if places is not None and places.get(name) != file:
                raise CheckpointError(f"{folder / file}: tensor {name!r} is not in {INDEX}")
        entries |= found
    for name, file in (places or {}).items():
        if name not in entries:
            raise CheckpointError(f"{folder / file}: tensor {name!r} is missing, {INDEX} names it")
    return entries


def _index(index: dict[str, Any], file: Path) -> tuple[dict[str, str], dict[str, str]]:
    """The file of each tensor, and the digest of each file's header if ``save_fp8`` wrote it."""
    places = index.get("weight_map")
    metadata = index.get("metadata") or {}
    digests = metadata.get(HEADERS, {}) if isinstance(metadata, dict) else {}
    for what, found in (("weight_map", places), (HEADERS, digests)):
        fits = isinstance(found, dict) and all(isinstance(value, str) for value in found.values())
        if not fits:
            raise CheckpointError(f"{file}: {what} is no object of strings")
    assert isinstance(places, dict)
    for name in places.values():
        if Path(name).name != name:
            raise CheckpointError(f"{file}: {name!r} is no file of its folder")
    return places, digests


def _header(file: Path, digest: str | None) -> dict[str, _Entry]:
    from safetensors import SafetensorError, safe_open

    if not file.is_file():
        raise CheckpointError(f"{file}: no such file, but the index names it")
    if digest is not None and header_digest(file) != digest:
        raise CheckpointError(
            f"{file}: corrupted: its header is not the one that was written (SHA-256 in {INDEX})"
        )
    try:
        with safe_open(file, framework="pt") as opened:
            entries, names = {}, opened.keys()
            for name in names:
                tensor = opened.get_slice(name)
                entries[name] = _Entry(file, tensor.get_dtype(), tuple(tensor.get_shape()))
            return entries
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{file}: truncated or corrupted ({error})") from None


def _scales(entries: Mapping[str, _Entry]) -> dict[str, str]:
    """The name of the scales of each FP8 weight."""
    scales = {}
    for name, entry in entries.items():
        if entry.dtype != _E4M3:
            continue
        found = [name + suffix for suffix in SCALE_SUFFIXES.values() if name + suffix in entries]
        if len(found) != 1:
            expected = " or ".join(name + suffix for suffix in SCALE_SUFFIXES.values())
            raise CheckpointError(
                f"{entry.file}: tensor {name!r} is FP8 and has {len(found)} scales: expected one "
                f"of {expected}"
            )
        scale = entries[found[0]]
        shape = (
            BLOCKS_128X128.scale_shape(entry.shape)
            if len(entry.shape) in BLOCKS_128X128.ranks
            else None
        )
        if scale.dtype not in _SCALES or scale.shape != shape:
            raise CheckpointError(
                f"{scale.file}: tensor {found[0]!r} is {scale.dtype} {list(scale.shape)}: expected "
                f"{' or '.join(_SCALES)}, {None if shape is None else list(shape)}: a scale for "
                f"each 128x128 block of {list(entry.shape)}"
            )
        scales[name] = found[0]
    return scales


def _targets(model: nn.Module) -> dict[str, _Target]:
    """Parameters and persistent buffers by their names in ``state_dict``."""
    targets = {}
    names = model.state_dict(keep_vars=True)
    for prefix, module in model.named_modules(remove_duplicate=False):
        for attribute, x in (*module._parameters.items(), *module._buffers.items()):
            name = f"{prefix}.{attribute}" if prefix else attribute
            if x is not None and name in names:
                targets[name] = _Target(module, attribute, x)
    return targets


def _missing(targets: Mapping[str, _Target], stored: Iterable[str]) -> tuple[str, ...]:
    known = {id(targets[name].current) for name in stored if name in targets}
    return tuple(name for name, target in targets.items() if id(target.current) not in known)


def _some(what: str, names: tuple[str, ...]) -> str:
    shown = ", ".join(names[:5]) + (", …" if len(names) > 5 else "")
    return f"{len(names)} {what}" + (f" ({shown})" if names else "")


def _check(name: str, entries: Mapping[str, _Entry], scale: str | None, target: _Target) -> None:
    """Raise CheckpointError if a stored tensor does not fit its place in the model."""
    entry, current = entries[name], target.current
    if entry.shape != tuple(current.shape):
        raise CheckpointError(
            f"{entry.file}: tensor {name!r} has shape {list(entry.shape)}, the model's has "
            f"{list(current.shape)}"
        )
    if scale is None:
        stored = _TORCH.get(entry.dtype)
        if stored is None:
            raise CheckpointError(f"{entry.file}: tensor {name!r} has dtype {entry.dtype}")
        if isinstance(current, BlockwiseFP8Tensor):
            raise CheckpointError(
                f"{entry.file}: tensor {name!r} is stored in {stored}, the model's is frozen in "
                f"FP8: load into an unconverted model, then convert it"
            )
        if stored.is_floating_point != current.is_floating_point() or stored.is_complex:
            raise CheckpointError(
                f"{entry.file}: tensor {name!r} is {stored}, the model's is {current.dtype}"
            )
        return
    if isinstance(current, BlockwiseFP8Weight) and not current.is_meta:
        raise CheckpointError(
            f"{entry.file}: tensor {name!r} is stored in FP8, the model's is trainable and would "
            f"lose its high-precision values: load into a model that is not converted yet"
        )
    if not isinstance(current, nn.Parameter) or not current.dtype.is_floating_point:
        raise CheckpointError(
            f"{entry.file}: tensor {name!r} is an FP8 weight, the model's is a buffer or "
            f"{current.dtype}"
        )


_TORCH = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


def _read(
    names: Iterable[str],
    entries: Mapping[str, _Entry],
    scales: Mapping[str, str],
    targets: Mapping[str, _Target],
    device: torch.device,
    recipe: Recipe,
) -> dict[str, Tensor]:
    """The new tensors of the model, read file by file."""
    made: dict[str, Tensor] = {}
    files: dict[Path, Any] = {}  # open files: a header is parsed once, not per tensor
    for name in sorted(names, key=lambda name: entries[name].file):
        current = targets[name].current
        home = device if current.is_meta else current.device
        value = _tensor(name, entries[name], files).to(home)
        if name in scales:
            scale = _tensor(scales[name], entries[scales[name]], files).float().to(home)
            dtype = current.dtype
            value = BlockwiseFP8Tensor.from_data(
                value,
                scale,
                block_shape=recipe.weight_format.block_shape,
                dtype=dtype,
                recipe=recipe,
            )
        elif current.is_meta:
            value = value.to(current.dtype)
            if isinstance(current, BlockwiseFP8Weight):
                value = BlockwiseFP8Weight(value, current.recipe)
        made[name] = value
    return made


def _tensor(name: str, entry: _Entry, files: dict[Path, Any]) -> Tensor:
    from safetensors import SafetensorError, safe_open

    try:
        if entry.file not in files:
            files[entry.file] = safe_open(entry.file, framework="pt")
        value: Tensor = files[entry.file].get_tensor(name)
        return value
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{entry.file}: tensor {name!r} cannot be read ({error})") from None


def _put(target: _Target, value: Tensor, replaced: dict[int, nn.Parameter]) -> None:
    """Assign a tensor to the model; parameters that are replaced are recorded for their ties."""
    module, attribute, current = target
    if not isinstance(value, BlockwiseFP8Tensor) and not current.is_meta:
        with torch.no_grad():
            current.copy_(value)
    elif isinstance(current, nn.Parameter):
        trains = current.requires_grad and not isinstance(value, BlockwiseFP8Tensor)
        new = nn.Parameter(value, requires_grad=trains)
        replaced[id(current)] = new
        setattr(module, attribute, new)
    else:
        module._buffers[attribute] = value
