"""Tokens that travel to their experts in FP8: e4m3 rows and their scales, and gradients back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, get_args

import torch
import torch.distributed as dist
from torch import Tensor
from torch.compiler import is_compiling
from torch.distributed._functional_collectives import all_to_all_single, wait_tensor

from ..ops import checks
from ..ops.cast.ops import dequantize, quantize_rowwise
from ..ops.formats import BlockFormat, Quantized
from ..ops.scale_layouts import laid_out
from ..recipe import DEFAULT_RECIPE, Recipe
from ..tensor.fp8_tensor import BlockwiseFP8Tensor
from .ranks import agree

Gradient = Literal["high_precision", "fp8"]

_compared: set[tuple[str, str]] = set()
"""Groups, and descriptions of tokens that their ranks were found to send alike."""


def all_to_all_fp8(
    x: Tensor,
    output_split_sizes: Sequence[int] | None,
    input_split_sizes: Sequence[int] | None,
    group: dist.ProcessGroup,
    *,
    recipe: Recipe = DEFAULT_RECIPE,
    gradient: Gradient = "high_precision",
) -> BlockwiseFP8Tensor:
    """Send rows to the ranks of ``group`` in e4m3, with a scale for every 128 values.

    It takes the place of ``all_to_all_single_autograd`` of torch's functional collectives in the
    dispatch of tokens to experts, at 0.52 of its bytes in bf16. The rows that arrive hold the bits
    that a cast after a dispatch in high precision would make. They can be indexed by row and are
    the input of grouped linears, which do not cast them again for the output. The gradient of a
    weight reads them in other blocks, of which they are cast from what arrived: these values are
    rounded twice.

    Differentiable: the gradient passes straight through the cast and travels the way back.

    Args:
        x: ``[T, K]`` bf16, fp16 or fp32, sorted by the rank that each row goes to; or a tensor in
            1x128 blocks that holds its rowwise form alone, which is sent as it is.
        output_split_sizes: how many rows come from each rank; None with ``input_split_sizes`` for
            equal parts.
        input_split_sizes: how many rows go to each rank.
        group: of the ranks that exchange rows; all of them call this.
        recipe: of the cast; that of the weights that the rows will meet, at least in ``scale``.
        gradient: ``"high_precision"`` sends the gradient in its own dtype. ``"fp8"`` sends it as
            the rows are sent; it is rounded there once more than in one process.

    Returns:
        ``[sum(output_split_sizes), K]``, of the dtype of ``x``, rowwise alone.

    Raises:
        TypeError, ValueError: dtypes, shapes, sizes or recipes that do not fit.
        RuntimeError: the ranks do not send alike. They are compared at the first call of a kind.
    """
    if gradient not in get_args(Gradient):
        known = ", ".join(map(repr, get_args(Gradient)))
        raise ValueError(f"gradient={gradient!r}: expected one of {known}")
    checks.high_precision(x, "the tokens to send")
    checks.rank(x, (2,), "the tokens to send", "flatten tokens to [T, K]")
    _check_cast(x, recipe)
    received, sent = _splits(x.shape[0], output_split_sizes, input_split_sizes, group)
    format = recipe.activation_format
    if not is_compiling():
        line = f"{x.shape[1]} columns of {x.dtype} in {format.name} blocks, gradient={gradient!r}"
        if (group.group_name, line) not in _compared:
            remedy = "pass x of one width and dtype, one recipe and one gradient on every rank"
            agree("tokens that travel in FP8", [line], group, remedy)
            _compared.add((group.group_name, line))
    in_fp8 = gradient == "fp8"
    arrived, data, scale = _AllToAll.apply(x, received, sent, group, format, in_fp8)
    made: BlockwiseFP8Tensor = _AsFP8.apply(arrived, data, scale, recipe)
    return made


def _check_cast(x: Tensor, recipe: Recipe) -> None:
    if not isinstance(x, BlockwiseFP8Tensor):
        return
    if x.columnwise_data is not None or x.source is not None:
        raise ValueError(
            f"the tokens to send are {x!r}: expected the rowwise form alone, since blocks of "
            f"several rows cannot be cut between ranks; pass the tokens in high precision"
        )
    if x.rowwise_format != recipe.activation_format:
        raise ValueError(
            f"the tokens to send are in {x.rowwise_format.name} blocks, and the recipe says "
            f"{recipe.activation_format.name}: pass recipe=x.recipe"
        )


def _splits(
    rows: int,
    received: Sequence[int] | None,
    sent: Sequence[int] | None,
    group: dist.ProcessGroup,
) -> tuple[list[int], list[int]]:
    """Return how many rows come from each rank and go to each rank."""
    world, me = group.size(), group.rank()
    if received is None and sent is None:
        if rows % world:
            raise ValueError(f"{rows} rows in equal parts for {world} ranks: pass the split sizes")
        return [rows // world] * world, [rows // world] * world
    if received is None or sent is None:
        raise ValueError("output_split_sizes and input_split_sizes: expected both, or None twice")
    received, sent = list(map(int, received)), list(map(int, sent))
    what = f"output_split_sizes {received} and input_split_sizes {sent} of {rows} rows"
    if (len(received), len(sent), sum(sent)) != (world, world, rows):
        raise ValueError(
            f"{what}: expected {world} sizes each, one for every rank of the group, and the latter "
            f"to add up to the rows"
        )
    if min(received + sent) < 0 or received[me] != sent[me]:
        raise ValueError(
            f"{what}: expected no size below 0, and one size for what rank {me} of the group sends "
            f"itself; output_split_sizes[r] is what rank r has in input_split_sizes[{me}]"
        )
    return received, sent


class _AllToAll(torch.autograd.Function):
    """Return data and scales that arrive, and a tensor without memory, of their shape, for dx.

    A compiler traces the backward of a Function with gradients of the types of its outputs, so that
    this one, which computes with the gradient, has plain outputs. They are no views, which torch
    2.11's compiler refuses.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        received: list[int],
        sent: list[int],
        group: dist.ProcessGroup,
        format: BlockFormat,
        in_fp8: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:
        ctx.way_back, ctx.format = (sent, received, group), format if in_fp8 else None
        row = x.rowwise() if isinstance(x, BlockwiseFP8Tensor) else quantize_rowwise(x, format)
        data, scale = _exchange(row, received, sent, group)
        ctx.mark_non_differentiable(data, scale)
        arrived = torch.empty_strided(data.shape, (0, 0), dtype=x.dtype, device=x.device)
        return arrived, data, scale

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        grad = grads[0].contiguous()
        if ctx.format is None:
            dx = wait_tensor(all_to_all_single(grad, *ctx.way_back))
        else:
            data, scale = _exchange(quantize_rowwise(grad, ctx.format), *ctx.way_back)
            form = laid_out(data.view(ctx.format.dtype), scale, ctx.format)
            dx = dequantize(form, grad.dtype)
        return dx, None, None, None, None, None


class _AsFP8(torch.autograd.Function):
    """Make one tensor of what arrived; its gradient goes to the first argument."""

    @staticmethod
    def forward(
        ctx: Any, arrived: Tensor, data: Tensor, scale: Tensor, recipe: Recipe
    ) -> BlockwiseFP8Tensor:
        format = recipe.activation_format
        form = laid_out(data.view(format.dtype), scale, format)
        return BlockwiseFP8Tensor(form, None, shape=data.shape, dtype=arrived.dtype, recipe=recipe)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return grads[0], None, None, None


def _exchange(
    row: Quantized, received: list[int], sent: list[int], group: dist.ProcessGroup
) -> tuple[Tensor, Tensor]:
    """Return the bytes of rows of a rowwise cast, from all ranks, and their scales, row by row."""
    # as bytes, which gloo can send; the scales of a row side by side
    parts = row.data.view(torch.uint8), row.scale.contiguous()
    data, scale = [all_to_all_single(part, received, sent, group) for part in parts]
    return wait_tensor(data), wait_tensor(scale)
