"""FrozenShard: one rank's bytes of a frozen FP8 weight that FSDP2 has sharded."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from ...recipe import Recipe
from ...tensor.base import is_composite
from .gathered import GatheredInFP8, padded

aten = torch.ops.aten


class FrozenShard(GatheredInFP8):
    """Rows of the e4m3 bytes of a frozen 128x128 :class:`~blocktensor.BlockwiseFP8Tensor`.

    The weight (of a model under low-rank adapters) takes 1 byte a parameter over all ranks. The
    scales are small: every rank keeps all of them.

    Attributes:
        data_rows: the rows, plain e4m3.
        scale: the scales of the whole weight.
    """

    data_rows: Tensor
    scale: Tensor

    @staticmethod
    def __new__(
        cls, data: Tensor, scale: Tensor, recipe: Recipe, dtype: torch.dtype
    ) -> FrozenShard:
        """Wrap rows; ``dtype`` is the weight's dtype for autograd."""
        self: FrozenShard = cls.wrapper_of(data, dtype)
        self.data_rows, self.scale, self.recipe = data, scale, recipe
        return self

    @property
    def rows(self) -> Tensor:
        """The e4m3 rows."""
        return self.data_rows

    def with_rows(self, rows: Tensor, dtype: torch.dtype | None = None) -> FrozenShard:
        """A shard of the same weight with other rows, or with these on another device.

        ``dtype``: that it shows, if another.
        """
        scale = self.scale.to(rows.device)
        return FrozenShard(rows, scale, self.recipe, dtype or self.dtype)

    def __tensor_flatten__(self) -> tuple[list[str], tuple[Any, ...]]:
        return ["data_rows", "scale"], (self.recipe, self.dtype)

    @staticmethod
    def __tensor_unflatten__(
        inner: dict[str, Tensor], context: Any, size: Sequence[int], stride: Sequence[int]
    ) -> FrozenShard:
        return FrozenShard(inner["data_rows"], inner["scale"], *context)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        if is_composite(func):
            return func.decompose(*args, **(kwargs or {}))
        first, *others = args
        kwargs = dict(kwargs or {})
        dtype = kwargs.pop("dtype", None)  # the rows stay e4m3
        if func is aten.copy_.default and all(isinstance(x, FrozenShard) for x in args[:2]):
            first.data_rows.copy_(others[0].data_rows)
            return first
        if func in _ALIAS:
            return first.with_rows(first.data_rows)
        if not isinstance(first, FrozenShard) or func not in _ROWS:
            _refuse_values(str(func))
        rows = func(first.data_rows, *others, **kwargs)
        return first.with_rows(rows, dtype) if rows.ndim == first.ndim else rows

    def __get_tensor_shard__(self, index: Any) -> Tensor:
        """Raise: ``torch.distributed.checkpoint`` would take e4m3 bytes for high precision."""
        _refuse_values("torch.distributed.checkpoint")

    def fsdp_pre_all_gather(
        self, mesh: Any, outer_size: torch.Size, stride: Any, module: nn.Module, mp_policy: Any
    ) -> tuple[tuple[Tensor, ...], Any]:
        """The bytes of these rows, for FSDP to gather."""
        sizes = zip(self.shape, outer_size, strict=True)
        dim = next((d for d, (mine, whole) in enumerate(sizes) if mine != whole), 0)
        sent = padded(self.data_rows, dim, outer_size, mesh)
        return (sent,), (outer_size, self.scale, self.recipe)


def _refuse_values(what: str) -> NoReturn:
    raise NotImplementedError(
        f"{what} needs the values of a frozen FP8 weight, of which a rank has some rows in e4m3: "
        f"save what trains (get_model_state_dict with ignore_frozen_params=True), and load the "
        f"base anew with blocktensor.load_fp8, before fully_shard"
    )


_ALIAS = {aten.detach.default, aten.alias.default}
_ROWS = {
    *(aten.new_zeros.default, aten.slice.Tensor, aten.view.default, aten._to_copy.default),
    *(aten._pin_memory.default, aten.empty_like.default, aten.clone.default),
    *(aten.is_pinned.default,),
    aten.new_empty.default,  # what ranks hold if a weight has fewer rows, or experts, than ranks
}
"""Ops that act on the rows as on any tensor."""
