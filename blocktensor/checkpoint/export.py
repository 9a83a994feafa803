"""Export a model in FP8, tensor by tensor: names and bytes as checkpoints have them."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..model.names import is_module
from ..ops.cast.ops import quantize_rowwise
from ..ops.checks import bad_scale
from ..ops.formats import BlockFormat, Quantized
from ..sharding.dtensor import fp8_part, local_of
from ..sharding.whole import form_of, format_of, whole_tensors
from ..tensor.base import MasterBase
from .names import Names, names_to_write, possible_names
from .on_disk import SCALE_SUFFIX


class Exported(NamedTuple):
    """All that is exported of a model, in its order, without values.

    Attributes:
        tensors: of the model, by its names, each once.
        names: the names of exported tensors, by the model's.
        units: the parts of the export.
    """

    tensors: Mapping[str, Tensor]
    names: Mapping[str, Names]
    units: list[Unit]


class Unit(NamedTuple):
    """The smallest part of an export: a tensor of the model, or an expert of a stack.

    Attributes:
        x: the tensor or the stack, perhaps a DTensor.
        expert: which one of a stack; None for all of ``x``.
        names: of the matrices that it is exported as, one below the other.
        label: how messages call it.
    """

    x: Tensor
    expert: int | None
    names: tuple[str, ...]
    label: str

    @property
    def nbytes(self) -> int:
        """The bytes of all that it is exported as."""
        shape = self.x.shape if self.expert is None else self.x.shape[1:]
        fp8 = fp8_part(self.x)
        return shape.numel() * self.x.itemsize if fp8 is None else format_of(fp8).nbytes(shape)


def iter_fp8(
    model: nn.Module,
    *,
    separate_experts: bool = False,
    rank: int | None = None,
) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of a converted model in FP8, for an inference engine to load.

    Names, dtypes and bytes are those of :func:`save_fp8`: e4m3 weights beside their fp32 scales
    (``weight_scale_inv``), which the next forward would multiply by, and the other tensors in their
    dtypes, on the device of the model::

        state = dict(blocktensor.iter_fp8(model))

    The model may be sharded, by ``fully_shard``, tensor parallel, expert parallel (as DTensors) or
    several of them. What travels between ranks is FP8, in batches of about a Transformer layer, of
    which two are in memory at a time. All ranks of the model's meshes must then exhaust the
    iterator, with the same arguments; the tensors are the same on all. Scales are made before the
    first tensor: do not change the weights until the iterator is exhausted.

    Args:
        model: any module, converted, on one device or sharded.
        separate_experts: as in :func:`save_fp8`.
        rank: the only rank (of the default group) that gets tensors; the others take part, and
            their iterators are empty. Default: all ranks.

    Yields:
        Name and tensor. Those of a trainable weight are new; others may be the model's own memory.

    Raises:
        TypeError, ValueError: as :func:`save_fp8`, before the first tensor; for an FP8 weight that
            holds NaN or Inf, before the first tensor if it is sharded, or when its turn comes.
    """
    units = exported(model, "iter_fp8", separate_experts).units
    yields = rank is None or rank == (dist.get_rank() if dist.is_initialized() else 0)
    return (pair for _, stored in stored_in_turn(units) if yields for pair in stored.items())


def exported(model: nn.Module, caller: str, separate_experts: bool) -> Exported:
    """Check all but the values of a model, and return what is exported of it.

    Raises:
        TypeError, ValueError: see :func:`save_fp8`.
    """
    is_module(model, caller)
    tensors = _unique_tensors(model)
    if all(fp8_part(x) is None for x in tensors.values()):
        raise ValueError("the model has no FP8 weight: convert it first (blocktensor.convert)")
    for name, x in tensors.items():
        if x.is_meta:
            raise ValueError(f"{name} is on the meta device, it has no values: initialise it first")
    names = names_to_write(tensors, possible_names(model), separate_experts)
    return Exported(tensors, names, list(_units(tensors, names)))


def _unique_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return parameters and persistent buffers by their names in ``state_dict``, each once."""
    unique: dict[object, tuple[str, Tensor]] = {}
    for name, x in model.state_dict(keep_vars=True).items():
        if isinstance(x, Tensor):  # safetensors holds no other extra state
            is_plain = fp8_part(x) is None and local_of(x) is None
            has_memory = is_plain and not x.is_meta and x.numel() > 0
            memory = (x.data_ptr(), x.shape, x.stride(), x.dtype) if has_memory else id(x)
            own = name.rpartition(".")[2] == "_extra_state"  # each module is given its own
            unique.setdefault(name if own else memory, (name, x))
    return dict(unique.values())


def _units(tensors: Mapping[str, Tensor], names: Mapping[str, Names]) -> Iterator[Unit]:
    for name, x in tensors.items():
        way = names[name]
        if way.experts is None:
            yield Unit(x, None, way.templates, name)
        else:
            for expert in range(way.experts):
                yield Unit(x, expert, way.of_expert(expert), f"{name}[{expert}]")


def stored_in_turn(units: Sequence[Unit]) -> Iterator[tuple[Unit, dict[str, Tensor]]]:
    """Yield each unit with its tensors, by name, contiguous, on the device of the model.

    A sharded tensor is gathered once, for all of its units; all ranks get all.

    Raises:
        ValueError: a weight that FP8 cannot hold.
    """
    groups = [list(same) for _, same in itertools.groupby(units, key=lambda unit: id(unit.x))]

    def check(index: int, scale: Tensor, format: BlockFormat) -> None:
        _check_scales(groups[index][0].label, scale, format)

    gathering = whole_tensors([same[0].x for same in groups], check)
    for same in groups:
        with torch.no_grad():
            whole = next(gathering)
        for unit in same:
            with torch.no_grad():
                stored = _stored(unit, whole)
            yield unit, stored


def _check_scales(label: str, scale: Tensor, format: BlockFormat) -> None:
    problem = bad_scale(scale, format)
    if problem is not None:
        raise ValueError(
            f"{label} has a block that FP8 cannot hold, {problem}; a NaN or Inf in the weight "
            f"makes such a scale: find it with torch.isfinite, or save the masters (state_dict)"
        )


def _stored(unit: Unit, whole: Any) -> dict[str, Tensor]:
    """Return the tensors of a unit; ``whole``: all of a sharded tensor, or its form."""
    x, expert = unit.x, unit.expert
    fp8 = fp8_part(x)
    if fp8 is None:
        plain = x.detach() if whole is None else whole
        return _named(unit.names, plain if expert is None else plain[expert])
    form: Quantized
    if whole is not None:
        form = whole if expert is None else _expert_of(whole, expert)
    elif isinstance(fp8, MasterBase) and expert is not None:  # cast one expert at a time
        form = quantize_rowwise(fp8.master.detach()[expert], format_of(fp8))
    else:
        form = form_of(fp8)
        form = form if expert is None else _expert_of(form, expert)
    if whole is None:
        _check_scales(unit.label, form.scale.cpu(), form.format)
    scales = [name + SCALE_SUFFIX for name in unit.names]
    return _named(unit.names, form.data) | _named(scales, form.scale)


def _expert_of(stack: Quantized, expert: int) -> Quantized:
    return Quantized(stack.data[expert], stack.scale[expert], stack.format)


def _named(names: Sequence[str], x: Tensor) -> dict[str, Tensor]:
    """Name a tensor, or with several names its rows, in as many equal parts."""
    parts = [x] if len(names) == 1 else x.chunk(len(names))
    return {name: part.contiguous() for name, part in zip(names, parts, strict=True)}
