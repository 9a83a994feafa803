"""Reading FP8 checkpoints: check everything, read tensor by tensor, then assign all of them."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..ops import checks
from ..recipe import DEFAULT_RECIPE, Recipe
from ..tensor.fp8_tensor import BlockwiseFP8Tensor
from ..tensor.weight import BlockwiseFP8Weight
from .contents import Entry, entries_of, scales_of
from .digests import Check, checking
from .load_report import LoadReport
from .on_disk import CheckpointError, bad_scale, refuse_sharded, require_safetensors


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
    recipe: Recipe | None = None,
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
        recipe: of the FP8 weights: how what is multiplied with them is cast; default: that of the
            model's weight if it is converted, else ``Recipe()``. ``scale="power_of_two"`` needs a
            checkpoint whose scales are powers of two.

    Raises:
        ImportError: safetensors or NumPy is not installed.
        CheckpointError: a file that is missing, truncated or malformed; a tensor that is not the
            one that :func:`save_fp8` wrote, by its SHA-256; a tensor whose shape or dtype does not
            fit the model; a scale that is not finite and above 0, or does not fit the recipe; names
            that are missing or unexpected, if ``strict``.
        NotImplementedError: weights scaled in other blocks than 128x128; a sharded model.
    """
    require_safetensors()
    folder = Path(path)
    entries = entries_of(folder)
    scales = scales_of(entries)
    names_of_scales = set(scales.values())
    targets = _targets(model)
    for name, target in targets.items():
        refuse_sharded(name, target.current)
    stored = [name for name in entries if name not in names_of_scales]
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
    with checking() as check:
        made = _read(wanted, entries, scales, targets, home, recipe, check)
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


def _check(name: str, entries: Mapping[str, Entry], scale: str | None, target: _Target) -> None:
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
    if not isinstance(current, nn.Parameter) or current.dtype not in checks.HIGH_PRECISION:
        raise CheckpointError(
            f"{entry.file}: tensor {name!r} is an FP8 weight, the model's is a buffer or "
            f"{current.dtype}: expected a parameter in one of {checks.HIGH_PRECISION}"
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
    entries: Mapping[str, Entry],
    scales: Mapping[str, str],
    targets: Mapping[str, _Target],
    device: torch.device,
    recipe: Recipe | None,
    check: Check,
) -> dict[str, Tensor]:
    """The new tensors of the model, read file by file, to be kept only if all checks pass."""
    made: dict[str, Tensor] = {}
    files: dict[Path, Any] = {}  # open files: a header is parsed once, not per tensor
    for name in sorted(names, key=lambda name: entries[name].file):
        current = targets[name].current
        home = device if current.is_meta else current.device
        value = _tensor(name, entries[name], files, check)
        # What safetensors gives lies in the file. What the model keeps must not: whoever wrote to
        # the file would change the model.
        if name in scales:
            chosen = recipe or _recipe_of(current)
            scale = _tensor(scales[name], entries[scales[name]], files, check).float()
            problem = bad_scale(scale, chosen.weight_format)
            if problem is not None:
                file = entries[scales[name]].file
                raise CheckpointError(f"{file}: tensor {scales[name]!r}: {problem}")
            value = BlockwiseFP8Tensor.from_data(
                value.to(home, copy=True),
                scale.to(home, copy=True),
                block_shape=chosen.weight_format.block_shape,
                dtype=current.dtype,
                recipe=chosen,
            )
        elif current.is_meta:
            value = value.to(home, current.dtype, copy=True)
            if isinstance(current, BlockwiseFP8Weight):
                value = BlockwiseFP8Weight(value, current.recipe)
        made[name] = value
    return made


def _recipe_of(current: Tensor) -> Recipe:
    if isinstance(current, (BlockwiseFP8Tensor, BlockwiseFP8Weight)):
        return current.recipe
    return DEFAULT_RECIPE


def _tensor(name: str, entry: Entry, files: dict[Path, Any], check: Check) -> Tensor:
    from safetensors import SafetensorError, safe_open

    try:
        if entry.file not in files:
            files[entry.file] = safe_open(entry.file, framework="pt")
        value: Tensor = files[entry.file].get_tensor(name)
    except (SafetensorError, OSError, RuntimeError) as error:  # RuntimeError: it cannot be mapped
        raise CheckpointError(f"{entry.file}: tensor {name!r} cannot be read ({error})") from None
    if entry.digest is not None:
        check(name, entry.file, entry.digest, value)
    return value


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
