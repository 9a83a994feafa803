"""An input that is cast and gathered once for several parallel linears (q, k, v; gate, up).

The result is a BlockwiseFP8Tensor of all tokens that holds their rowwise form. Its gradient is this
rank's share of a sum: the linears that read it add up their partial sums, and one reduction of that
makes the gradient of this rank's tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch.distributed as dist
from torch import Tensor
from torch.compiler import is_compiling

from ...autograd.backward import FP8Function, Gradients, run_backward
from ...autograd.plan import autocast_dtype
from ...autograd.products import Saved
from ...autograd.quantize import cast_activation
from ...ops.cast.ops import quantize_forms
from ...ops.runtime.specialize import PLAIN
from ...recipe import Recipe
from ...tensor.fp8_tensor import BlockwiseFP8Tensor
from ...tensor.prepared import Parts
from .collectives import Reduction
from .products import SharedGather, is_gathered_in_fp8
from .token_shards import TokenShards


@dataclass(frozen=True, eq=False)
class SharedInput:
    """What linears find on a prepared input.

    Attributes:
        tokens: how tokens are cut; None if every rank has all of them.
        saved: of this rank's tokens, for the gradients of weights.
        gather: of that in backward, for all linears.
        runs: ``[0, tokens.outer, tokens.inner]``, without elements; None until a compiler asks.
    """

    tokens: TokenShards | None
    saved: Saved
    gather: SharedGather = field(default_factory=SharedGather)
    runs: Tensor | None = None

    @property
    def parts(self) -> Parts:
        """See :class:`~blocktensor.tensor.prepared.Prepared`."""
        if self.tokens is None:
            return *self.saved, None
        data, scale = self.saved
        assert data is not None
        return data, scale, runs_of(data, self.tokens) if self.runs is None else self.runs

    @property
    def context(self) -> SharedInputContext:
        """See :class:`~blocktensor.tensor.prepared.Prepared`."""
        if self.tokens is None:
            return SharedInputContext(None, 0)
        return SharedInputContext(self.tokens.group.group_name, self.tokens.dim)


class SharedInputContext(NamedTuple):
    """How tokens are cut; without a group, every rank has all of them."""

    group_name: str | None
    dim: int

    def of(self, data: Tensor | None, scale: Tensor | None, runs: Tensor | None) -> SharedInput:
        """The note of an input that a graph gets or returns."""
        if self.group_name is None:
            return SharedInput(None, (data, scale))
        assert runs is not None
        _, outer, inner = runs.shape
        group = dist.distributed_c10d._resolve_process_group(self.group_name)  # type: ignore[attr-defined, arg-type]
        return SharedInput(TokenShards(group, self.dim, outer, inner), (data, scale), runs=runs)


def runs_of(x: Tensor, tokens: TokenShards) -> Tensor:
    """The sizes of ``tokens`` as those of a tensor: they may change from batch to batch."""
    return x.new_empty((0, tokens.outer, tokens.inner))


def prepare(
    x: Tensor, recipe: Recipe, tokens: TokenShards | None, reduction: Reduction
) -> BlockwiseFP8Tensor:
    """Cast this rank's tokens ``x[..., K]`` and gather them in FP8.

    Args:
        x: bf16, fp16 or fp32.
        recipe: of the weights that it meets.
        tokens: how tokens are cut; None if ``x`` has all of them.
        reduction: how the sums of the linears' data gradients are added over ranks.
    """
    dtype = autocast_dtype(x)
    made: BlockwiseFP8Tensor = _Prepare.apply(
        x if dtype is None else x.to(dtype), recipe, tokens, reduction
    )
    return made


class _Prepare(FP8Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, recipe: Recipe, tokens: TokenShards | None, reduction: Reduction
    ) -> BlockwiseFP8Tensor:
        ctx.tokens, ctx.reduction = tokens, reduction
        ctx.shape, ctx.dtype = x.shape, x.dtype
        ctx.set_materialize_grads(False)
        if tokens is None:
            made = cast_activation(x, recipe)
            saved: Saved = made.source, None
            if made.source is None:
                saved = made.columnwise_data, made.columnwise_scale
            made.prepared = SharedInput(None, saved)
            return made
        format, other = recipe.activation_format, recipe.wgrad_input_format
        in_fp8 = is_gathered_in_fp8(other, tokens)
        row, col = quantize_forms(x, format, other if in_fp8 else None)
        assert row is not None
        pending = tokens.gather_rowwise(row)
        source = x.detach()
        made = BlockwiseFP8Tensor(
            pending.wait(),
            None,
            shape=tokens.whole_shape(x.shape),
            dtype=x.dtype,
            recipe=recipe,
            formats=(format, other or format),
            source=source if other is None else None,
        )
        # functional tensors outlive the mode in which others can be made of them
        runs = runs_of(x, tokens) if is_compiling() or type(x) not in PLAIN else None
        own: Saved = (source, None) if col is None else col[:2]
        made.prepared = SharedInput(tokens, own, runs=runs)
        return made

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Gradients:
        return run_backward(ctx, grads, _gradients, ())


def _gradients(ctx: Any, saved: object, grads: list[Any], asked: list[bool]) -> Gradients:
    grad: Tensor | None = grads.pop()
    if grad is None:
        return (None,) * 4
    reduction: Reduction = ctx.reduction
    partial = grad.to(reduction.wire(ctx.dtype)).reshape(-1, grad.shape[-1])
    if ctx.tokens is None:
        dx = reduction.all_reduce(partial.contiguous()).wait()
    else:
        dx = ctx.tokens.reduce_scatter(partial, reduction).wait()
    return dx.to(ctx.dtype).view(ctx.shape), None, None, None
