"""FP8Shard: what a rank holds of a trainable FP8 weight that FSDP2 has sharded.

It is the high-precision rows, for optimizers, clipping and checkpoints, and the way they travel:
FSDP asks it for what to gather, and makes the unsharded weight of what came, through two methods.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..ops import checks
from ..ops.layouts import SQUARE_BLOCK, ceil_div
from ..ops.part import quantize_part
from ..recipe import Recipe
from ..tensor import BlockwiseFP8Tensor, FP8Type
from ..weight import WEIGHT_OPS, BlockwiseFP8Weight, MasterType, on_master
from .agreement import agree
from .amax import AmaxTable, Member, Part
from .members import Sharded, sharded_with

aten = torch.ops.aten


class Identity:
    """Stands for one sharded weight, whatever tensor object is its local part at the moment."""

    __slots__ = ("__weakref__", "place")

    def __init__(self) -> None:
        self.place: tuple[AmaxTable, int] | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        return Identity, ()  # a copy is another weight


class GatheredInFP8(FP8Type):
    """What is the same for every kind of shard: its rows, and what FSDP makes of gathered bytes."""

    recipe: Recipe

    @property
    def rows(self) -> Tensor:
        """What this rank holds of the weight, plain."""
        raise NotImplementedError

    def untyped_storage(self) -> torch.UntypedStorage:
        """Of the rows: FSDP tells by it whether they are still where it put them."""
        return self.rows.untyped_storage()

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return (
            f"{type(self).__name__}(shape={list(self.shape)}, dtype={self.dtype}, "
            f"scale={self.recipe.scale!r}, device={str(self.device)!r})"
        )

    def fsdp_post_all_gather(
        self,
        all_gather_outputs: tuple[Tensor, ...],
        metadata: Any,
        param_dtype: torch.dtype,
        *,
        out: Tensor | None = None,
    ) -> tuple[Tensor, tuple[Tensor, ...]] | None:
        """The weight that views the gathered bytes; or ``out``, made so before, with them."""
        (gathered,), (shape, scale, recipe) = all_gather_outputs, metadata
        data = gathered.view(-1)[: shape.numel()].view(shape).view(torch.float8_e4m3fn)
        if out is None:
            made = BlockwiseFP8Tensor(
                (data, scale),
                None,
                shape=shape,
                dtype=param_dtype,
                block_shape=SQUARE_BLOCK,
                # what is kept longer than a use would have to be gathered and freed by FSDP
                recipe=Recipe(scale=recipe.scale),
            )
            return made, ()
        weight: Any = getattr(out, "_local_tensor", out)
        weight.rowwise_data, weight.rowwise_scale = data, scale
        return None


class FP8Shard(GatheredInFP8, MasterType):
    """Rows of the master of a :class:`~blocktensor.BlockwiseFP8Weight`, to be gathered in FP8.

    A tensor like any other for all that changes or reads values, but for products, which need the
    whole weight.

    Attributes:
        master: the rows, a plain high-precision tensor.
        recipe: the :class:`~blocktensor.Recipe` of the weight's casts.
    """

    identity: Identity

    @staticmethod
    def __new__(cls, master: Tensor, recipe: Recipe, identity: Identity | None = None) -> FP8Shard:
        """Wrap ``master``; its storage is shared. Views share an ``identity``.

        Raises:
            TypeError, ValueError: another dtype or rank than a weight's.
        """
        checks.high_precision(master, "the shard of a weight")
        checks.rank(master, (2, 3), "the shard of a weight", "FP8 weights are [N, K] or [E, N, K]")
        self: FP8Shard = cls.wrapper_of(master, master.dtype)
        self.master, self.recipe = master, recipe
        self.identity = Identity() if identity is None else identity
        return self

    @property
    def rows(self) -> Tensor:
        """The master."""
        return self.master

    def __get_tensor_shard__(self, index: Any) -> Tensor:
        """What ``torch.distributed.checkpoint`` writes and reads: plain rows."""
        return self.master

    def __tensor_flatten__(self) -> tuple[list[str], tuple[Any, ...]]:
        return ["master"], (self.recipe,)

    @staticmethod
    def __tensor_unflatten__(
        inner: dict[str, Tensor],
        context: tuple[Any, ...],
        outer_size: Sequence[int],
        outer_stride: Sequence[int],
    ) -> FP8Shard:
        return FP8Shard(inner["master"], *context)

    @classmethod
    def __torch_function__(
        cls,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func in _PRODUCTS:
            _refuse_product(func)
        return super().__torch_function__(func, types, args, kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func in _PRODUCTS:
            _refuse_product(func)
        return _on_rows(func, args, kwargs or {})

    @property
    def fsdp_pre_all_gather(self) -> Callable[..., tuple[tuple[Tensor, ...], Any]]:
        """What FSDP calls for what to gather.

        It also looks for it when the root's first forward begins, before anything is gathered: the
        time to compare what the ranks have, when none waits for the others yet.
        """
        _place(self)
        return self._cast_rows

    def _cast_rows(
        self,
        mesh: Any,
        outer_size: torch.Size,
        outer_stride: tuple[int, ...],
        module: nn.Module,
        mp_policy: Any,
    ) -> tuple[tuple[Tensor, ...], Any]:
        """The e4m3 bytes of these rows, cast as those of the whole weight.

        One tensor of 1 byte an element; scales need no gather, see ``amax.py``.
        """
        place = self.identity.place
        if place is None:
            raise RuntimeError(
                f"the shard of an FP8 weight of {type(module).__name__} is gathered, but not by "
                f"torch.distributed.fsdp.fully_shard: shard the converted model with that"
            )
        table, index = place
        table.ensure(index)
        member = table.members[index]
        power_of_two = self.recipe.power_of_two
        if self.numel():
            amax = member.part.blocks(table.amax(index), self.master)
            data = quantize_part(self.master, amax, power_of_two, *member.part.offsets)
        else:
            data = torch.empty(self.shape, dtype=torch.float8_e4m3fn, device=self.device)
        sent = padded(data, member.part.dim, outer_size, mesh)
        return (sent,), (outer_size, table.scale(index), self.recipe)


def padded(data: Tensor, dim: int, whole: torch.Size, mesh: Any) -> Tensor:
    """A rank's e4m3 rows as FSDP gathers them: of the size that most ranks have."""
    as_bytes = data.view(torch.uint8)  # gloo knows no e4m3
    missing = ceil_div(whole[dim], mesh.size()) - data.shape[dim]
    if missing <= 0:
        return as_bytes
    # only along rows: FSDP shards other dimensions evenly
    return F.pad(as_bytes, [0, 0] * (data.ndim - 1 - dim) + [0, missing])


def shard_of(x: Any) -> FP8Shard | None:
    """The local part of a DTensor, if that is an :class:`FP8Shard`."""
    local = getattr(x, "_local_tensor", None)
    return local if isinstance(local, FP8Shard) else None


def is_converted(weight: Any) -> bool:
    """True for the FP8 types, and for what FSDP2 has made of a trainable one."""
    return isinstance(weight, FP8Type) or shard_of(weight) is not None


def with_local(x: Any, local: Tensor) -> Any:
    """The DTensor ``x`` with another local part of the same shape."""
    from torch.distributed.tensor import DTensor

    # from_local would take a view of the local part, which is no shard
    return DTensor(local, x._spec, requires_grad=False)


def _place(shard: FP8Shard) -> tuple[AmaxTable, int] | None:
    """The table that a shard is in, and where; made now if FSDP can say who belongs together."""
    place = shard.identity.place
    if place is None or place[0].alone:
        together, are_all = sharded_with(lambda x: _identity(x) is shard.identity)
        if together and (are_all or place is None):
            groups: dict[str, list[Sharded]] = {}
            for sharded in together:
                if shard_of(sharded.parameter()) is not None:
                    groups.setdefault(sharded.group.group_name, []).append(sharded)
            for members in groups.values():
                _build(members, alone=not are_all)
            place = shard.identity.place
    return place


def _identity(x: Any) -> Identity | None:
    return x.identity if isinstance(x, FP8Shard) else None


def _build(together: Sequence[Sharded], alone: bool) -> None:
    """Tables of these weights, which share a group, agreed upon with the other ranks.

    One for all weights that every rank holds some of, and one for each of the others.
    """
    everywhere: list[tuple[Member, Identity]] = []
    tables = [everywhere]
    lines = []
    for sharded in together:
        shard = shard_of(sharded.parameter())
        assert shard is not None
        size, world = sharded.shape[sharded.dim], sharded.ranks
        each = ceil_div(size, world)
        member = Member(
            sharded.name,
            Part(sharded.shape, sharded.dim, min(sharded.rank * each, size)),
            shard.recipe,
            _master_of(sharded.parameter),
            _version_of(sharded.parameter),
            everywhere=each * (world - 1) < size,
        )
        lines.append(str(member))
        if member.everywhere:
            everywhere.append((member, shard.identity))
        else:
            tables.append([(member, shard.identity)])
    group, device = together[0].group, together[0].device
    agree("sharded FP8 weights", lines, group)
    for entries in filter(None, tables):
        table = AmaxTable([member for member, _ in entries], group, device, alone)
        for index, (_, identity) in enumerate(entries):
            identity.place = table, index


def _master_of(parameter: Callable[[], Tensor | None]) -> Callable[[], Tensor | None]:
    def master() -> Tensor | None:
        shard = shard_of(parameter())
        return None if shard is None else shard.master

    return master


def _version_of(parameter: Callable[[], Tensor | None]) -> Callable[[], object]:
    def version() -> object:
        whole = parameter()
        shard = shard_of(whole)
        if whole is None or shard is None:
            return None
        # a view counts writes with what it was taken of: the parameter, its to_local(), the
        # master that state_dict() gives out
        counters = tuple(tensor._version for tensor in (whole, shard, shard.master))
        return counters, shard.master.data_ptr(), shard.device

    return version


def precompute_block_amax(model: nn.Module) -> int:
    """Reduce the block amaxes of a sharded model's FP8 weights now, not at the next forward.

    Forward does it by itself, once a step. Called right after ``optimizer.step()``, the all-reduce
    may overlap with what comes before the next forward. All ranks must call it.

    Returns:
        How many weights it concerned: 0 before the first forward.
    """
    shards = (shard for p in model.parameters() if (shard := shard_of(p)) is not None)
    places = [place for shard in shards if (place := shard.identity.place) is not None]
    for table in dict.fromkeys(table for table, _ in places):
        table.refresh_if_changed()
    return len(places)


# Below autograd: everything acts on the rows; moves and copies of them stay shards

_PRODUCTS = {
    *(F.linear, torch.mm, torch.matmul, torch.addmm),
    *(Tensor.mm, Tensor.matmul, Tensor.__matmul__, Tensor.__rmatmul__, Tensor.addmm),
    *(aten.mm.default, aten.addmm.default, aten.bmm.default, aten.baddbmm.default),
    *(aten.mv.default, aten.linear.default, aten._grouped_mm.default),
}


def _refuse_product(func: Any) -> NoReturn:
    raise NotImplementedError(
        f"{func} reached the shard of an FP8 weight: a product needs the whole weight, which FSDP "
        f"gathers while the forward of its module runs"
    )


_ALIAS = {aten.detach.default, aten.alias.default}
"""What gives the same weight, as another object."""

_SAME = {aten._to_copy.default, aten._pin_memory.default}
"""What gives the same weight, in another place."""

_NEW = {
    *(aten.new_zeros.default, aten.slice.Tensor),  # how FSDP makes a padded one, and the rows in it
    *(aten.empty_like.default, aten.new_empty.default, aten.clone.default),  # how copies are made
}
"""What gives a shard of its own."""


def _on_rows(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if func in _ALIAS:
        # the same master, not an alias made below autograd: that would count writes by itself
        return FP8Shard(args[0].master, args[0].recipe, args[0].identity)
    out = on_master(func, args, kwargs)
    first = args[0] if args else None
    if isinstance(first, FP8Shard) and func in _SAME | _NEW:
        fits = isinstance(out, Tensor) and out.ndim == first.ndim
        if fits and out.dtype in checks.HIGH_PRECISION:
            return FP8Shard(out, first.recipe, first.identity if func in _SAME else None)
    return out


def _new_zeros(func: Any, w: BlockwiseFP8Weight, size: Sequence[int], **kwargs: Any) -> Tensor:
    """How FSDP begins a shard; for anyone else, zeros that behave as a plain tensor does."""
    zeros: Tensor = func(w.master, size, **kwargs)
    is_part = zeros.ndim == w.ndim and zeros.dtype == w.dtype and zeros.device == w.device
    return FP8Shard(zeros, w.recipe) if is_part else zeros


WEIGHT_OPS[aten.new_zeros.default] = _new_zeros
