"""FP8Shard and FrozenShard: a rank's rows of an FP8 weight, and the ops that FSDP2 runs on them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch
import torch.nn.functional as F
from torch import Tensor

from ...ops import checks
from ...ops.formats import Quantized
from ...recipe import Recipe
from ...tensor.base import count_write, implements, on_master
from ...tensor.fp8_tensor import ATEN_OPS, BlockwiseFP8Tensor
from ...tensor.refusals import refuse, refuse_one_tensor
from ...tensor.weight import WEIGHT_OPS, BlockwiseFP8Weight
from .fsdp_internals import remember_copy
from .gather import GatheredFrozen, GatheredTrainable

aten = torch.ops.aten

_SHARD_OPS: dict[Any, Callable[..., Any]] = {}
"""The ops of FP8Shard below autograd; all other ops act on the rows."""

_MATMULS = {
    F.linear,
    torch.mm,
    torch.matmul,
    torch.addmm,
    Tensor.mm,
    Tensor.matmul,
    Tensor.__matmul__,
    Tensor.__rmatmul__,
    Tensor.addmm,
}

_ALIASES = {aten.detach.default, aten.alias.default}
"""Ops whose results have the same rows as their argument."""

_COPIES = {
    aten.new_zeros.default,
    aten.slice.Tensor,  # for FSDP's padded shard and its rows
    aten.empty_like.default,
    aten.new_empty.default,
    aten.clone.default,  # for copies
    aten._to_copy.default,
    aten._pin_memory.default,  # for moves
}
"""Ops whose results are shards with other rows."""

_VIEWS = {aten.view.default, aten.t.default, aten.transpose.int, aten.select.int, aten.split.Tensor}
"""Ops whose results are parts of a shard; matmuls with these also raise."""


class FP8Shard(GatheredTrainable):
    """Rows of the master of a :class:`~blocktensor.BlockwiseFP8Weight`, to be gathered in FP8.

    Optimizers, clipping, checkpoints and other ops act on the high-precision rows; FSDP gathers
    e4m3 bytes. Matmuls raise, since they need the whole weight.

    Attributes:
        master: the rows, a plain high-precision tensor.
    """

    _ops = _SHARD_OPS

    @staticmethod
    def __new__(cls, master: Tensor, recipe: Recipe) -> FP8Shard:
        """Wrap ``master``, whose storage is shared.

        Casts check the dtype, since ``model.double()`` may create shards that cannot be cast.

        Raises:
            ValueError: another rank than a weight's.
        """
        checks.rank(master, (2, 3), "the shard of a weight", "FP8 weights are [N, K] or [E, N, K]")
        self: FP8Shard = cls._wrapper_of(master, master.dtype)
        self.master, self.recipe = master, recipe
        return self

    def __get_tensor_shard__(self, index: Any) -> Tensor:
        """Return the plain rows, for ``torch.distributed.checkpoint`` to write and read."""
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
        if func in _MATMULS:
            _refuse_matmul(func)
        return super().__torch_function__(func, types, args, kwargs)

    @classmethod
    def _other_op(cls, func: Any, args: Any, kwargs: Any) -> Any:
        out = on_master(func, args, kwargs)
        first = args[0]
        if not isinstance(first, FP8Shard) or not (func in _COPIES or func in _VIEWS):
            return out
        ranks = (2, 3) if func in _VIEWS else (first.ndim,)
        return torch.utils._pytree.tree_map(lambda x: first._with_rows(x, ranks), out)

    def _with_rows(self, rows: Tensor, ranks: tuple[int, ...]) -> Tensor:
        """Return a shard with other rows, or ``rows`` if these cannot be rows of a shard."""
        if rows.ndim not in ranks or not (rows.is_floating_point() or rows.is_complex()):
            return rows
        shard = FP8Shard(rows, self.recipe)
        if shard.device != self.device:
            remember_copy(shard, self)
        return shard


@implements(_SHARD_OPS, *_ALIASES)
def _alias(func: Any, shard: FP8Shard) -> FP8Shard:
    # the same master: an alias made below autograd would have its own version counter
    return FP8Shard(shard.master, shard.recipe)


@implements(
    _SHARD_OPS,
    aten.mm.default,
    aten.addmm.default,
    aten.bmm.default,
    aten.baddbmm.default,
    aten.mv.default,
    aten.linear.default,
    aten._grouped_mm.default,
)
def _refuse_matmul(func: Any, *args: Any, **kwargs: Any) -> NoReturn:
    raise NotImplementedError(
        f"{func} reached the shard of an FP8 weight: a matmul needs the whole weight, which FSDP "
        f"gathers while the forward of its module runs"
    )


_ON_BYTES = {
    aten.new_zeros.default,
    aten.slice.Tensor,
    aten.view.default,
    aten._to_copy.default,
    aten._pin_memory.default,
    aten.empty_like.default,
    aten.clone.default,
    aten.is_pinned.default,
    aten.new_empty.default,  # the part of ranks that get no rows or experts
    *_ALIASES,
}
"""Ops that run on e4m3 rows as on any tensor."""


class FrozenShard(GatheredFrozen):
    """Rows of the e4m3 bytes of a frozen 128x128 :class:`~blocktensor.BlockwiseFP8Tensor`.

    The weight (of a model under low-rank adapters) takes 1 byte a parameter over all ranks. The
    scales are small: every rank keeps all of them.

    Attributes:
        data_rows: the rows, plain e4m3.
        scale: the scales of the whole weight.
    """

    __create_write_items__ = __create_chunk_list__ = refuse_one_tensor

    @staticmethod
    def __new__(
        cls, data: Tensor, scale: Tensor, recipe: Recipe, dtype: torch.dtype
    ) -> FrozenShard:
        """Wrap rows; ``dtype`` is the weight's dtype for autograd."""
        self: FrozenShard = cls._wrapper_of(data, dtype)
        self.data_rows, self.scale, self.recipe = data, scale, recipe
        return self

    def __tensor_flatten__(self) -> tuple[list[str], tuple[Any, ...]]:
        return ["data_rows", "scale"], (self.recipe, self.dtype)

    @staticmethod
    def __tensor_unflatten__(
        inner: dict[str, Tensor], context: Any, size: Sequence[int], stride: Sequence[int]
    ) -> FrozenShard:
        return FrozenShard(inner["data_rows"], inner["scale"], *context)

    @classmethod
    def _other_op(cls, func: Any, args: Any, kwargs: Any) -> Any:
        first, *others = args
        kwargs = {**kwargs}
        dtype = kwargs.pop("dtype", None)  # the rows stay e4m3
        if func is aten.copy_.default and all(isinstance(x, FrozenShard) for x in args[:2]):
            first.data_rows.copy_(others[0].data_rows)
            first.scale.copy_(others[0].scale)
            count_write(first.data_rows, first.scale)
            return first
        if func not in _ON_BYTES:  # these take one tensor, as first argument
            _refuse_values(str(func))
        rows = first.data_rows if func in _ALIASES else func(first.data_rows, *others, **kwargs)
        if not isinstance(rows, Tensor) or rows.ndim != first.ndim:
            return rows
        # model.to_empty(device=...) for a model on meta
        is_new = first.scale.is_meta and not rows.is_meta
        move = torch.empty_like if is_new else Tensor.to
        scale = move(first.scale, device=rows.device)
        return FrozenShard(rows, scale, first.recipe, dtype or first.dtype)


def _refuse_values(what: str) -> NoReturn:
    raise NotImplementedError(
        f"{what} needs the values of a frozen FP8 weight, of which a rank has some rows in e4m3: "
        f"get_model_state_dict without full_state_dict returns these, and with "
        f"ignore_frozen_params=True what trains; blocktensor.save_fp8 and iter_fp8 gather in FP8"
    )


# fully_shard cuts whole weights and pads the parts


def chunks(weight: BlockwiseFP8Tensor, *args: Any, **kwargs: Any) -> list[FrozenShard]:
    """Chunk a frozen weight in 128x128 blocks; a chunk may begin inside a block."""
    data, scale, _ = _squares(weight)
    parts = torch.chunk(data, *args, **kwargs)
    return [FrozenShard(part, scale, weight.recipe, weight.dtype) for part in parts]


def _squares(weight: BlockwiseFP8Tensor) -> Quantized:
    if not weight.format.transposes:
        raise NotImplementedError(
            f"FSDP2 can shard FP8 weights in 128x128 blocks, got blocks of {weight.block_shape}"
        )
    return weight.rowwise()


@implements(ATEN_OPS, aten.new_zeros.default)
def _frozen_zeros(func: Any, x: BlockwiseFP8Tensor, size: Sequence[int], **options: Any) -> Tensor:
    same = options.get("dtype") in (None, x.dtype) and options.get("device") in (None, x.device)
    if len(size) != x.ndim or not same:
        refuse(func)
    data, scale, _ = _squares(x)
    zeros = torch.zeros(tuple(size), dtype=torch.uint8, device=data.device).view(data.dtype)
    return FrozenShard(zeros, scale, x.recipe, x.dtype)


@implements(WEIGHT_OPS, aten.new_zeros.default)
def _trainable_zeros(
    func: Any, w: BlockwiseFP8Weight, size: Sequence[int], **kwargs: Any
) -> Tensor:
    """Return zeros: a shard if FSDP asks for one; plain for other ranks, dtypes or devices."""
    zeros: Tensor = func(w.master, size, **kwargs)
    is_part = zeros.ndim == w.ndim and zeros.dtype == w.dtype and zeros.device == w.device
    return FP8Shard(zeros, w.recipe) if is_part else zeros
