"""Export a model in FP8, tensor by tensor, with the names and bytes of a checkpoint."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..model.names import check_module
from ..ops.cast.ops import dequantize, quantize_rowwise
from ..ops.checks import bad_scale
from ..ops.formats import BLOCKS_128X128, BlockFormat, Quantized
from ..sharding.dtensor import fp8_part, local_of
from ..sharding.whole import form_of, whole_tensors
from ..tensor.base import MasterBase
from .on_disk import SCALE_SUFFIX
from .parts import Part, all_of
from .pretrained import pretrained_models, saved, skeleton
from .stored import Group, Stored, groups_of, members_of, separated, shapes_of, stored_as


class Exported(NamedTuple):
    """The tensors of a model to export, in its order, without values.

    Attributes:
        model: the model.
        tensors: the tensors of the model by name, each once.
        fp8: the names of those that are exported in FP8.
        known: the tensors that ``save_pretrained`` would write; see :func:`.stored.groups_of`.
        groups: groups of exported tensors; tied tensors have one under each of their names.
        separate_experts: as in :func:`save_fp8`.
    """

    model: nn.Module
    tensors: Mapping[str, Tensor]
    fp8: Collection[str]
    known: list[Group]
    groups: list[Group]
    separate_experts: bool

    def with_fp8(self, fp8: Collection[str], own: Collection[str]) -> Exported:
        """Return the export with other tensors in FP8; names in ``own`` stay the model's."""
        groups = stored_as(self.known, shapes_of(self.model), fp8, own)
        if self.separate_experts:
            groups = separated(self.model, groups, fp8)
        return self._replace(fp8=fp8, groups=groups)

    @property
    def written(self) -> list[Group]:
        """The groups to write, in the order of the model; tied tensors have one only."""
        order = {name: number for number, name in enumerate(self.tensors)}
        found = []
        for group in self.groups:
            places = [order[name] for name in members_of(group) if name in order]
            if places:
                found.append((min(places), group))
        return [group for _, group in sorted(found, key=lambda pair: pair[0])]

    @property
    def modules(self) -> dict[str, str]:
        """The names of the modules in the checkpoint, by the names of the model's tensors."""
        return {name: x.module for group in self.groups for x in group for name in x.of}


class Unit(NamedTuple):
    """The smallest part of an export: tensors that are computed together and lie in one file.

    Attributes:
        stored: the tensors.
        group: all tensors that are computed from the same tensors of the model.
        nbytes: of the tensors and their scales.
    """

    stored: tuple[Stored, ...]
    group: Group
    nbytes: int


def iter_fp8(
    model: nn.Module,
    *,
    separate_experts: bool = False,
    rank: int | None = None,
) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of a converted model in FP8, for an inference engine to load.

    Names, dtypes and bytes are the same as from :func:`save_fp8` with ``all_in_fp8=True``: e4m3
    weights and their fp32 scales (``weight_scale_inv``), as the next forward would read them, and
    the other tensors in their dtypes, on the device of the model::

        state = dict(blocktensor.iter_fp8(model))

    The model may be sharded, by ``fully_shard``, tensor parallel, expert parallel (as DTensors) or
    several of them. Ranks exchange FP8 bytes, in batches of about one Transformer layer; two
    batches are in memory at a time. All ranks of the model's meshes must then exhaust the iterator,
    with the same arguments; the tensors are the same on all. Scales are made before the first
    tensor: do not change the weights until the iterator is exhausted.

    Args:
        model: any module, converted, on one device or sharded.
        separate_experts: as in :func:`save_fp8`.
        rank: the only rank (of the default group) that gets tensors; the others take part, and
            their iterators are empty. Default: all ranks.

    Yields:
        Name and tensor. The tensors of a trainable weight are new; others may share the model's
        memory.

    Raises:
        TypeError, ValueError: as :func:`save_fp8`, before the first tensor; for an FP8 weight that
            holds NaN or Inf, before the first tensor if it is sharded, or when its turn comes.

    Examples:
        >>> model = nn.Sequential(nn.Linear(256, 512), nn.ReLU()).bfloat16()
        >>> _ = blocktensor.convert(model, skip_small=False)
        >>> for name, tensor in blocktensor.iter_fp8(model):
        ...     print(name, list(tensor.shape), tensor.dtype)
        0.weight [512, 256] torch.float8_e4m3fn
        0.weight_scale_inv [4, 2] torch.float32
        0.bias [512] torch.bfloat16
    """
    return pairs(exported(model, "iter_fp8", separate_experts), rank)


Encode = Callable[[Mapping[str, Tensor]], Mapping[str, Tensor]]
"""A function that returns what is stored of the tensors of a unit in FP8."""


def pairs(found: Exported, rank: int | None, encode: Encode = dict) -> Iterator[tuple[str, Tensor]]:
    """Yield name and tensor of all that is stored of an export, on ``rank``; on all if None."""
    yields = rank is None or rank == (dist.get_rank() if dist.is_initialized() else 0)
    return (
        pair
        for stored in stored_in_turn(found, units_of(found))
        if yields
        for pair in encode(stored).items()
    )


def exported(model: nn.Module, caller: str, separate_experts: bool) -> Exported:
    """Check a model, except for its values, and return what is exported of it.

    Raises:
        TypeError, ValueError: see :func:`save_fp8`.
    """
    check_module(model, caller)
    tensors = _unique_tensors(model)
    fp8 = {name for name, x in tensors.items() if fp8_part(x) is not None}
    if not fp8:
        raise ValueError("the model has no FP8 weight: convert it first (blocktensor.convert)")
    for name, x in tensors.items():
        if x.is_meta:
            raise ValueError(f"{name} is on the meta device, it has no values: initialise it first")
    found = Exported(model, tensors, fp8, groups_of(model), [], separate_experts)
    return found.with_fp8(fp8, ())


def _unique_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return parameters and persistent buffers by their names in ``state_dict``, each once."""
    unique: dict[object, tuple[str, Tensor]] = {}
    for name, x in model.state_dict(keep_vars=True).items():
        if isinstance(x, Tensor):  # safetensors holds no other extra state
            is_plain = fp8_part(x) is None and local_of(x) is None
            has_memory = is_plain and not x.is_meta and x.numel() > 0
            memory = (x.data_ptr(), x.shape, x.stride(), x.dtype) if has_memory else id(x)
            own = name.rpartition(".")[2] == "_extra_state"  # each module gets its own extra state
            unique.setdefault(name if own else memory, (name, x))
    return dict(unique.values())


def units_of(found: Exported) -> list[Unit]:
    """Divide an export into units."""
    return [unit for group in found.written for unit in _units(group, found)]


def _units(group: Group, found: Exported) -> Iterator[Unit]:
    """Divide a group into units: a stack into its experts, others into their tensors."""

    def key(numbered: tuple[int, Stored]) -> object:
        number, stored = numbered
        if stored.parts is None:
            return None  # transformers computes all at once
        return number if stored.expert is None else (stored.of, stored.expert)

    for _, same in itertools.groupby(enumerate(_in_order(group)), key):
        tensors = tuple(stored for _, stored in same)
        yield Unit(tensors, group, sum(nbytes_of(stored, found) for stored in tensors))


def _in_order(group: Group) -> Group:
    """Sort the tensors of a group by the places of their parts in the model's tensors."""

    def place(stored: Stored) -> list[Any]:
        return [(part.name, [run.start for run in part.there]) for part in (stored.parts or ())[:1]]

    return sorted(group, key=place)


def nbytes_of(stored: Stored, found: Exported) -> int:
    """Return the bytes of an exported tensor, in FP8 with its scales."""
    first = found.tensors.get(stored.of[0])
    fp8 = fp8_part(first)
    if stored.of[0] in found.fp8 and fp8 is not None:
        return fp8.format.nbytes(stored.shape)
    itemsize = 4 if first is None else first.itemsize
    return torch.Size(stored.shape).numel() * itemsize


def stored_in_turn(found: Exported, units: Sequence[Unit]) -> Iterator[dict[str, Tensor]]:
    """Yield the tensors of each unit by name, contiguous and on the device of the model.

    A sharded tensor is gathered once, for all of its units; all ranks get all.

    Raises:
        ValueError: a weight that FP8 cannot hold.
    """
    groups = [list(same) for _, same in itertools.groupby(units, key=lambda unit: id(unit.group))]
    state = found.model.state_dict(keep_vars=True)
    names = [members_of(same[0].group) for same in groups]
    flat = [name for members in names for name in members]

    def check(index: int, scale: Tensor, format: BlockFormat) -> None:
        _check_scales(flat[index], scale, format)

    gathering = whole_tensors([state[name] for name in flat], check)
    for same, members in zip(groups, names, strict=True):
        with torch.no_grad():
            held = {name: _Held(name, state[name], next(gathering)) for name in members}
        for unit in same:
            with torch.no_grad():
                stored = _made(unit, held, found)
            yield stored


class _Held(NamedTuple):
    """A tensor of the model.

    Attributes:
        name, x: in the model.
        whole: the whole values or FP8 form of a sharded tensor; None if it is not sharded.
    """

    name: str
    x: Any
    whole: Quantized | Tensor | None

    def form(self, expert: int | None) -> Quantized:
        """Return the bytes and scales; with ``expert``, of this expert alone, as a stack of one."""
        fp8 = fp8_part(self.x)
        chosen = slice(None) if expert is None else slice(expert, expert + 1)
        if isinstance(self.whole, Quantized):
            cast_here = self.whole
        elif expert is not None and isinstance(fp8, MasterBase):  # cast one expert at a time
            cast = quantize_rowwise(fp8.master.detach()[expert], fp8.format)
            cast_here, chosen = (
                cast._replace(data=cast.data[None], scale=cast.scale[None]),
                slice(None),
            )
        else:
            cast_here = form_of(fp8)
        if expert is not None:
            cast_here = Quantized(cast_here.data[chosen], cast_here.scale[chosen], cast_here.format)
        if self.whole is None:
            label = self.name if expert is None else f"{self.name}[{expert}]"
            scale = cast_here.scale if expert is None else cast_here.scale[0]
            _check_scales(label, scale.cpu(), cast_here.format)
        return cast_here

    def values(self, expert: int | None) -> Tensor:
        """Return the values in high precision; of an FP8 weight, the values that forward reads."""
        if fp8_part(self.x) is not None:
            return dequantize(self.form(expert), self.x.dtype)
        plain: Any = self.x.detach() if self.whole is None else self.whole
        made: Tensor = plain if expert is None else plain[expert : expert + 1]
        return made


def _check_scales(label: str, scale: Tensor, format: BlockFormat) -> None:
    problem = bad_scale(scale, format)
    if problem is not None:
        raise ValueError(
            f"{label} has a block that FP8 cannot hold, {problem}; a NaN or Inf in the weight "
            f"makes such a scale: find it with torch.isfinite, or save the masters (state_dict)"
        )


def _made(unit: Unit, held: Mapping[str, _Held], found: Exported) -> dict[str, Tensor]:
    """Return the stored tensors of a unit, with their values."""
    first = unit.stored[0]
    if first.parts is None:
        return _computed(found.model, {name: x.values(None) for name, x in held.items()})
    names = {part.name for stored in unit.stored for part in stored.parts or ()}
    in_fp8 = not names.isdisjoint(found.fp8)
    forms = {name: held[name].form(first.expert) for name in names} if in_fp8 else {}
    scales = {name: form.scale for name, form in forms.items()}
    values = {name: form.data for name, form in forms.items()}
    values = values or {name: held[name].values(first.expert) for name in names}
    tensors = {}
    for stored in unit.stored:
        parts = [_of_one(part, first.expert) for part in stored.parts or ()]
        tensors[stored.name] = _joined(stored.shape, parts, values)
        if in_fp8:
            blocks = [part.in_blocks(stored.shape) for part in parts]
            shape = BLOCKS_128X128.scale_shape(stored.shape)
            known = [block for block in blocks if block is not None]
            assert len(known) == len(blocks)
            tensors[stored.name + SCALE_SUFFIX] = _joined(shape, known, scales)
    return tensors


def _of_one(part: Part, expert: int | None) -> Part:
    """Return a part that lies in one expert, with indices in a stack of only this expert."""
    return part if expert is None else part._replace(there=(slice(0, 1), *part.there[1:]))


def _joined(shape: Sequence[int], parts: Sequence[Part], sources: Mapping[str, Tensor]) -> Tensor:
    """Concatenate parts of tensors into the stored tensor."""
    if len(parts) == 1 and parts[0].here == all_of(shape):
        x = parts[0].take(sources[parts[0].name]).contiguous()
        # dimensions of size 1 may have any stride, with which bytes cannot be viewed in another
        # dtype
        strides = torch.empty(x.shape, device="meta").stride()
        return x if x.stride() == strides else x.as_strided(x.shape, strides)
    first = sources[parts[0].name]
    made = torch.empty(tuple(shape), dtype=first.dtype, device=first.device)
    for part in parts:
        made[part.here].copy_(part.take(sources[part.name]))
    return made


def _computed(model: nn.Module, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors that transformers computes when it saves a model."""
    prefix, inner = next(
        (prefix, inner)
        for prefix, inner in pretrained_models(model)
        if all(name.startswith(prefix) for name in values)
    )
    given = {name.removeprefix(prefix): x for name, x in values.items()}
    return {prefix + name: x.contiguous() for name, x in saved(skeleton(inner), given).items()}
