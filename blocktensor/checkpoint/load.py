"""Reading FP8 checkpoints: check everything, read tensor by tensor, then assign all of them."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..model.module_names import is_module
from ..model.pretrained_models import follow_pretrained_models
from ..model.state_dict import register_state_hooks
from ..ops import checks
from ..ops.formats import BLOCKS_128X128, BlockFormat
from ..recipe import DEFAULT_RECIPE, Recipe
from ..tensor.base import FP8Base
from ..tensor.fp8_tensor import BlockwiseFP8Tensor
from ..tensor.weight import BlockwiseFP8Weight
from .contents import Entry, entries_of, scales_of
from .digests import Check, checking
from .load_report import LoadReport
from .match import matched, names_of
from .names import Spelling, aligned, spellings
from .on_disk import CheckpointError, bad_scale, refuse_sharded, require_safetensors
from .pretrained_names import Pieces
from .stack_scales import StackScales, check_stack_scales, scales_of_stacks


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

    A tensor of a transformers model may have the name that ``save_pretrained`` gives it. A stack
    of experts may be stored whole or as matrices of each expert: ``experts.3.gate_proj.weight``,
    ``up_proj``, ``down_proj``, or ``w1``, ``w3``, ``w2`` as in Mixtral. Such matrices have scales
    of their own, or all together those of the stack, ``experts.gate_up_proj_scale_inv``, as
    transformers 5.23 saves them.

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
            fit the model; a scale that is not finite and above 0, or does not fit the recipe; a
            stack of which some experts are missing or not in FP8, or whose gate and up would share
            blocks; names that are missing or unexpected, if ``strict``.
        NotImplementedError: weights scaled in other blocks than 128x128; a sharded model.
    """
    require_safetensors()
    is_module(model, "load_fp8")
    folder = Path(path)
    entries = entries_of(folder)
    return load_entries(model, folder, entries, strict=strict, device=device, recipe=recipe)


def load_entries(
    model: nn.Module,
    folder: Path,
    entries: Mapping[str, Entry],
    *,
    strict: bool,
    device: torch.device | str | None,
    recipe: Recipe | None,
) -> LoadReport:
    """:func:`load_fp8`, of ``entries`` of a checkpoint; their keys are matched with the model.

    A key may differ from the name in the file, where somebody renames tensors as they are loaded.
    """
    scales = scales_of(entries)
    targets = _targets(model)
    for name, target in targets.items():
        refuse_sharded(name, target.current)
    names_of_scales = set(scales.values())
    stored = [name for name in entries if name not in names_of_scales]
    known = {name: ways for name, ways in spellings(model).items() if name in targets}
    found = matched(folder, known, set(stored))
    stacked = scales_of_stacks(found, known, entries, scales)
    missing = _missing(targets, found)
    taken = {name for way in found.values() for name in names_of(way)}
    taken |= {of_stack.name for of_stack in stacked.values()}
    unexpected = tuple(name for name in stored if name not in taken)
    if strict and (missing or unexpected):
        raise CheckpointError(
            f"{folder}: does not fit the model: {_some('missing', missing)}, "
            f"{_some('unexpected', unexpected)}; strict=False loads what fits"
        )
    for name, way in found.items():
        _check(name, way, entries, stacked.get(name), targets[name].current)

    home = torch.device("cpu" if device is None else device)
    with checking() as check:
        made = _read(found, entries, scales, stacked, targets, home, recipe, check)
    tied: dict[int, nn.Parameter] = {}
    for name, value in made.items():
        _put(targets[name], value, tied)
    # a tied parameter is stored under its first name only
    for target in targets.values():
        replaced = tied.get(id(target.current))
        if replaced is not None:
            setattr(target.module, target.attribute, replaced)
        if isinstance(getattr(target.module, target.attribute), FP8Base):
            register_state_hooks(target.module)
            follow_pretrained_models()
    in_fp8 = {name: entries[names_of(way)[0]].is_fp8 for name, way in found.items()}
    fp8 = tuple(name for name in found if in_fp8[name])
    plain = tuple(name for name in found if not in_fp8[name])
    return LoadReport(fp8, plain, missing, unexpected)


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


def _missing(targets: Mapping[str, _Target], found: Iterable[str]) -> tuple[str, ...]:
    known = {id(targets[name].current) for name in found}
    return tuple(name for name, target in targets.items() if id(target.current) not in known)


def _some(what: str, names: tuple[str, ...]) -> str:
    shown = ", ".join(names[:5]) + (", …" if len(names) > 5 else "")
    return f"{len(names)} {what}" + (f" ({shown})" if names else "")


def _check(
    name: str,
    way: Spelling,
    entries: Mapping[str, Entry],
    stacked: StackScales | None,
    current: Tensor,
) -> None:
    """Raise CheckpointError if what is stored does not fit its place in the model."""
    shape, first, parts = tuple(current.shape), names_of(way)[0], 1
    if isinstance(way, Pieces):
        parts = len(way.templates)
        shape = (shape[1] // parts, shape[2])
    for stored in names_of(way):
        entry = entries[stored]
        if entry.shape != shape:
            of = "" if isinstance(way, str) else f" for an expert of {name!r} {list(current.shape)}"
            raise CheckpointError(
                f"{entry.file}: tensor {entry.name!r} has shape {list(entry.shape)}, the model's "
                f"has {list(shape)}{of}"
            )
        if entry.is_fp8 != entries[first].is_fp8:
            raise CheckpointError(
                f"{entry.file}: tensor {entry.name!r} is {entry.dtype}, {first!r} of the same "
                f"stack is {entries[first].dtype}: expected all in FP8 or none"
            )
        _check_dtype(entry, current)
    if stacked is not None:
        check_stack_scales(name, current.shape, first, stacked, entries)
    elif entries[first].is_fp8 and not aligned(shape[0], parts):
        raise CheckpointError(
            f"{entries[first].file}: tensor {first!r} has {shape[0]} rows, no multiple of "
            f"{BLOCKS_128X128.rows}: its blocks are not those of the model's {name!r}, in which "
            f"the rows of {parts} such matrices follow each other; dequantize them with the "
            f"library that wrote them, then convert"
        )


def _check_dtype(entry: Entry, current: Tensor) -> None:
    """Raise CheckpointError if the dtype of a stored tensor does not fit the model's."""
    if not entry.is_fp8:
        stored = _TORCH.get(entry.dtype)
        if stored is None:
            raise CheckpointError(f"{entry.file}: tensor {entry.name!r} has dtype {entry.dtype}")
        if isinstance(current, BlockwiseFP8Tensor):
            raise CheckpointError(
                f"{entry.file}: tensor {entry.name!r} is stored in {stored}, the model's is frozen "
                f"in FP8: load into an unconverted model, then convert it"
            )
        if stored.is_floating_point != current.is_floating_point() or stored.is_complex:
            raise CheckpointError(
                f"{entry.file}: tensor {entry.name!r} is {stored}, the model's is {current.dtype}"
            )
        return
    if isinstance(current, BlockwiseFP8Weight) and not current.is_meta:
        raise CheckpointError(
            f"{entry.file}: tensor {entry.name!r} is stored in FP8, the model's is trainable and "
            f"would lose its high-precision values: load into a model that is not converted yet"
        )
    if not isinstance(current, nn.Parameter) or current.dtype not in checks.HIGH_PRECISION:
        raise CheckpointError(
            f"{entry.file}: tensor {entry.name!r} is an FP8 weight, the model's is a buffer or "
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
    found: Mapping[str, Spelling],
    entries: Mapping[str, Entry],
    scales: Mapping[str, str],
    stacked: Mapping[str, StackScales],
    targets: Mapping[str, _Target],
    device: torch.device,
    recipe: Recipe | None,
    check: Check,
) -> dict[str, Tensor | _Rows]:
    """The new tensors of the model, read file by file, to be kept only if all checks pass."""
    made: dict[str, Tensor | _Rows] = {}
    files: dict[Path, Any] = {}  # open files: a header is parsed once, not per tensor

    def read(name: str) -> Tensor:
        return _tensor(entries[name], files, check)

    def read_scale(name: str, weight: tuple[int, ...], format: BlockFormat) -> Tensor:
        scale = read(name).float()
        problem = bad_scale(scale, format)
        if problem is not None:
            entry = entries[name]
            raise CheckpointError(f"{entry.file}: tensor {entry.name!r}: {problem}")
        return scale.view(format.scale_shape(weight))

    for name in sorted(found, key=lambda name: entries[names_of(found[name])[0]].file):
        current, way = targets[name].current, found[name]
        home = device if current.is_meta else current.device
        # What safetensors gives lies in the file. What the model keeps must not: whoever wrote to
        # the file would change the model.
        if entries[names_of(way)[0]].is_fp8:
            chosen = recipe or _recipe_of(current)
            format = chosen.weight_format
            shape = tuple(current.shape)
            if isinstance(way, str):
                data = read(way).to(home, copy=True)
                scale = read_scale(scales[way], shape, format).to(home, copy=True)
            else:
                data = torch.empty(shape, dtype=format.dtype, device=home)
                scale = torch.empty(format.scale_shape(shape), device=home)
                for piece, of_data in zip(names_of(way), _rows(data, way), strict=True):
                    of_data.copy_(read(piece))
                of_stack = stacked.get(name)
                if of_stack is not None:
                    whole = read_scale(of_stack.name, of_stack.scaled(shape), format)
                    scale.copy_(of_stack.rows(whole))
                else:
                    for piece, of_scale in zip(names_of(way), _rows(scale, way), strict=True):
                        of_scale.copy_(read_scale(scales[piece], entries[piece].shape, format))
            made[name] = BlockwiseFP8Tensor.from_data(
                data, scale, block_shape=format.block_shape, dtype=current.dtype, recipe=chosen
            )
            continue
        if isinstance(way, Pieces):
            rows = _Rows(way, [read(piece) for piece in names_of(way)])
            if not current.is_meta:
                made[name] = rows
                continue
            value = torch.empty(current.shape, dtype=current.dtype, device=home)
            rows.copy_to(value)
        else:
            value = read(way)
            if current.is_meta:
                value = value.to(home, current.dtype, copy=True)
        if current.is_meta and isinstance(current, BlockwiseFP8Weight):
            value = BlockwiseFP8Weight(value, current.recipe)
        made[name] = value
    return made


class _Rows(NamedTuple):
    """The matrices of a stack as they lie in files, to be copied into the stack."""

    pieces: Pieces
    values: list[Tensor]

    def copy_to(self, stack: Tensor) -> None:
        """Write them into ``stack``, which is plain."""
        for rows, value in zip(_rows(stack, self.pieces), self.values, strict=True):
            rows.copy_(value)


def _rows(stack: Tensor, pieces: Pieces) -> list[Tensor]:
    """The views of a plain stack, or of its scales, that belong to the names of its pieces."""
    parts = len(pieces.templates)
    return [rows for expert in stack for rows in expert.chunk(parts)]


def _recipe_of(current: Tensor) -> Recipe:
    if isinstance(current, (BlockwiseFP8Tensor, BlockwiseFP8Weight)):
        return current.recipe
    return DEFAULT_RECIPE


def _tensor(entry: Entry, files: dict[Path, Any], check: Check) -> Tensor:
    from safetensors import SafetensorError, safe_open

    try:
        if entry.file not in files:
            files[entry.file] = safe_open(entry.file, framework="pt")
        value: Tensor = files[entry.file].get_tensor(entry.name)
    except (SafetensorError, OSError, RuntimeError) as error:  # RuntimeError: it cannot be mapped
        raise CheckpointError(
            f"{entry.file}: tensor {entry.name!r} cannot be read ({error})"
        ) from None
    if entry.digest is not None:
        check(entry.name, entry.file, entry.digest, value)
    return value


def _put(target: _Target, value: Tensor | _Rows, replaced: dict[int, nn.Parameter]) -> None:
    """Assign a tensor to the model; parameters that are replaced are recorded for their ties."""
    module, attribute, current = target
    if isinstance(value, _Rows):
        with torch.no_grad():
            if isinstance(current, BlockwiseFP8Weight):
                current.before_write()
                value.copy_to(current.master)
            else:
                value.copy_to(current)
    elif not isinstance(value, BlockwiseFP8Tensor) and not current.is_meta:
        with torch.no_grad():
            current.copy_(value)
    elif isinstance(current, nn.Parameter):
        trains = current.requires_grad and not isinstance(value, BlockwiseFP8Tensor)
        new = nn.Parameter(value, requires_grad=trains)
        replaced[id(current)] = new
        setattr(module, attribute, new)
    else:
        module._buffers[attribute] = value
