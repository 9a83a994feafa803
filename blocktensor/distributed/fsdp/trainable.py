"""FP8Shard: one rank's rows of a trainable FP8 weight that FSDP2 has sharded."""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...ops import checks
from ...ops.cast.shard_ops import quantize_shard
from ...ops.scale_layouts import empty_scale
from ...recipe import Recipe
from ...tensor.base import is_composite, on_master
from ...tensor.fp8_tensor import Generation
from ..dtensor import local_of
from .amax_table import AmaxTable
from .gathered import GatheredInFP8, gathered_of, padded
from .places import RowsInTable, place_of

aten = torch.ops.aten


class FP8Shard(GatheredInFP8, RowsInTable):
    """Rows of the master of a :class:`~blocktensor.BlockwiseFP8Weight`, to be gathered in FP8.

    Optimizers, clipping, checkpoints and other ops act on the high-precision rows; FSDP gathers
    e4m3 bytes. Products raise, since they need the whole weight.

    Attributes:
        master: the rows, a plain high-precision tensor.
    """

    @staticmethod
    def __new__(cls, master: Tensor, recipe: Recipe) -> FP8Shard:
        """Wrap ``master``, whose storage is shared.

        Its dtype is checked where it is cast: ``model.double()`` gives it one that cannot be.

        Raises:
            ValueError: another rank than a weight's.
        """
        checks.rank(master, (2, 3), "the shard of a weight", "FP8 weights are [N, K] or [E, N, K]")
        self: FP8Shard = cls.wrapper_of(master, master.dtype)
        self.master, self.recipe = master, recipe
        return self

    @property
    def rows(self) -> Tensor:
        """The master."""
        return self.master

    def __get_tensor_shard__(self, index: Any) -> Tensor:
        """The plain rows, for ``torch.distributed.checkpoint`` to write and read."""
        return self.master

    def __tensor_flatten__(self) -> tuple[list[str], tuple[Any, ...]]:
        return ["master"], (self.recipe,)

    @staticmethod
    def __tensor_unflatten__(
        inner: dict[str, Tensor], context: Any, size: Sequence[int], stride: Sequence[int]
    ) -> FP8Shard:
        return FP8Shard(inner["master"], *context)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _PRODUCTS:
            _refuse_product(func)
        return super().__torch_function__(func, types, args, kwargs)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        if func in _PRODUCTS:
            _refuse_product(func)
        return _on_rows(func, args, kwargs or {})

    @property
    def fsdp_pre_all_gather(self) -> Callable[..., tuple[tuple[Tensor, ...], Any]]:
        """The method that FSDP calls for the tensors to gather.

        FSDP also looks it up when the root's first forward begins, before anything is gathered. The
        ranks compare their weights then, while none of them waits in a collective.
        """
        place_of(self)
        return self._cast_rows

    def _cast_rows(
        self, mesh: Any, outer_size: torch.Size, stride: Any, module: nn.Module, mp_policy: Any
    ) -> tuple[tuple[Tensor, ...], Any]:
        """These rows as e4m3 bytes, cast by the scales of the whole weight (``amax_table.py``)."""
        place = place_of(self, module)
        if place is None:
            raise RuntimeError(
                f"the shard of an FP8 weight of {type(module).__name__} is gathered, but not by "
                f"torch.distributed.fsdp.fully_shard: shard the converted model with that"
            )
        table, index = place
        weight, kept = table.weights[index], table.kept[index]
        checks.high_precision(self.master, f"the sharded FP8 weight {weight.name!r}")
        is_stale = table.prepare_gather(index)
        reused = table.reused(index)
        sent = None if reused is None else kept.find(*reused)
        if sent is None:
            sent = padded(self._cast(table, index), weight.slice.dim, outer_size, mesh)
            if reused is not None:
                kept.keep(sent, *reused)
        return (sent,), (outer_size, table.scale(index), self.recipe, weight.changes(), is_stale)

    def _cast(self, table: AmaxTable, index: int) -> Tensor:
        rows, format = self.master, self.recipe.weight_format
        if not rows.numel():
            return torch.empty(rows.shape, dtype=format.dtype, device=rows.device)
        offsets = table.weights[index].slice.offsets
        return quantize_shard(rows, table.amax_of_rows(index, rows), format, *offsets)

    def fsdp_post_all_gather(
        self,
        all_gather_outputs: tuple[Tensor, ...],
        metadata: Any,
        param_dtype: torch.dtype,
        *,
        out: Tensor | None = None,
    ) -> tuple[Tensor, tuple[Tensor, ...]] | None:
        """As of the base class; the weight has scales of its own, which change with its bytes.

        Graphs save both. FSDP gathers the bytes again into the same memory, uncounted; so are the
        scales written. A backward compares the generation with that of its forward.
        """
        shape, scale, recipe, changes, is_stale = metadata
        weight = None if out is None else gathered_of(out)
        own = None if weight is None else weight.rowwise_scale
        if own is None:
            own = empty_scale(shape, recipe.weight_format, scale.device)
        own.data.copy_(scale)
        metadata = shape, own, recipe
        made = super().fsdp_post_all_gather(all_gather_outputs, metadata, param_dtype, out=out)
        if made is not None:
            weight = gathered_of(made[0])
            weight.generation = Generation()
        assert weight is not None and weight.generation is not None
        weight.generation.of, weight.generation.is_stale = changes, is_stale
        return made


# FSDP inspects the signature at every gather of every weight; this is found without work
FP8Shard._cast_rows.__signature__ = inspect.signature(FP8Shard._cast_rows)  # type: ignore[attr-defined]


def shard_of(x: Any) -> FP8Shard | None:
    """The local part of a DTensor, if that is an :class:`FP8Shard`."""
    local = local_of(x)
    return local if isinstance(local, FP8Shard) else None


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
"""Ops whose result is the same rows, as another object."""

_SHARDS = {
    *(aten.new_zeros.default, aten.slice.Tensor),  # for FSDP's padded shard and its rows
    *(aten.empty_like.default, aten.new_empty.default, aten.clone.default),  # for copies
    *(aten._to_copy.default, aten._pin_memory.default),  # for moves
}
"""Ops whose result is a shard with other rows."""

_VIEWS = {aten.view.default, aten.t.default, aten.transpose.int, aten.select.int, aten.split.Tensor}
"""Ops whose results are parts of a shard, with which products raise too."""


def _on_rows(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if func in _ALIAS:
        # the same master: an alias made below autograd would have a version counter of its own
        return FP8Shard(args[0].master, args[0].recipe)
    if is_composite(func):
        return func.decompose(*args, **kwargs)
    out = on_master(func, args, kwargs)
    first = args[0] if args else None
    if isinstance(first, FP8Shard) and func in _SHARDS:
        fits = isinstance(out, Tensor) and out.ndim == first.ndim
        if fits and (out.is_floating_point() or out.is_complex()):
            shard = FP8Shard(out, first.recipe)
            if out.device != first.device:
                shard.original = weakref.ref(first)
            return shard
    if isinstance(first, FP8Shard) and func in _VIEWS:
        return torch.utils._pytree.tree_map(lambda view: _part(view, first.recipe), out)
    return out


def _part(view: Tensor, recipe: Recipe) -> Tensor:
    return FP8Shard(view, recipe) if view.ndim in (2, 3) else view
