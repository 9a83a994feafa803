"""The weight of a linear between forward and backward.

Inner tensors are saved, not wrappers, so that saved-tensor hooks (offloading, activation
checkpointing) see plain e4m3 and fp32 tensors. The exception is a trainable weight: it is
saved itself, and the graph holds the FP8 form of its forward (``ForwardCast``).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..ops.cast.ops import quantize_rowwise
from ..ops.formats import BlockFormat, Quantized
from ..ops.gemm.dgrad_ops import dgrad_of_master, dgrad_of_rowwise
from ..ops.gemm.ops import gemm
from ..ops.grouped_gemm.dgrad_ops import grouped_dgrad_of_master, grouped_dgrad_of_rowwise
from ..ops.grouped_gemm.ops import grouped_gemm
from ..tensor.fp8_tensor import BlockwiseFP8Tensor, Generation
from ..tensor.operand import Operand, operand_of
from ..tensor.weight import BlockwiseFP8Weight
from ..tensor.weight_cache import ForwardCast

Names = tuple[str, ...]
"""Names of the inner tensors that were saved; none if the weight itself was."""


ROWWISE: Names = ("rowwise_data", "rowwise_scale")
"""Names of the cast of a plain weight."""

COLUMNWISE: Names = ("columnwise_data", "columnwise_scale")
"""Names of what dgrad reads of a cast, where a compiled forward has made it."""


def inner_tensors(w: BlockwiseFP8Tensor) -> tuple[Sequence[Tensor], Names]:
    """The inner tensors of a frozen weight, and their names."""
    if w.recipe.columnwise == "keep":
        w.columnwise()  # made once, kept by the weight, found by every backward
    names = w.__tensor_flatten__()[0]
    return [getattr(w, name) for name in names], tuple(names)


def _operand(saved: Sequence[Tensor], names: Names, format: BlockFormat) -> Operand:
    if names:
        return operand_of(dict(zip(names, saved, strict=True)), format, format)
    (w,) = saved
    return operand_of_weight(w, format)


def operand_of_weight(w: Tensor, format: BlockFormat) -> Operand:
    """The FP8 forms of a weight as it is now; a plain one is cast in ``format``."""
    if isinstance(w, (BlockwiseFP8Weight, BlockwiseFP8Tensor)):
        return w.operand
    return Operand(quantize_rowwise(w, format), None)


class GatheredCast(NamedTuple):
    """The generation of a gathered weight in one forward."""

    generation: Generation
    of: object


def gathered_cast(generation: Generation) -> GatheredCast:
    """What backward compares of a gathered weight that this forward reads.

    Raises:
        RuntimeError: a backward that raised has left it gathered with the scales of other values.
    """
    if generation.is_stale:
        raise RuntimeError(
            "an FP8 weight that FSDP2 gathers was changed between a forward and a backward, which "
            "raised and left it gathered: call reset_iter_state() (torch 2.13) and reshard() of "
            "the FSDP modules before the next forward"
        )
    return GatheredCast(generation, generation.of)


def read_in_backward(ctx: Any, saved: Sequence[Tensor], needed: bool) -> Quantized | None:
    """The columnwise form of a saved weight, if dgrad needs it and is not one op of a compiler.

    ``ctx`` has what the forward read of the weight. The graph holds no form of it any more: the
    caller alone holds the result, and frees it after dgrad.

    Raises:
        RuntimeError: as :func:`columnwise`.
    """
    w_col = None
    if needed and not ctx.plan.tracing:
        w_col = columnwise(saved, ctx.names, ctx.plan.weight_format, ctx.cast)
    release(ctx.cast)
    if ctx.cache is not None:
        ctx.cache.after_backward()
    return w_col


def columnwise(
    saved: Sequence[Tensor],
    names: Names,
    format: BlockFormat,
    cast: ForwardCast | GatheredCast | None,
) -> Quantized:
    """The columnwise form of a saved weight, which dgrad reads; ``cast``: of its forward.

    Raises:
        RuntimeError: a trainable weight was written to since its forward.
    """
    if isinstance(cast, GatheredCast):
        if cast.generation.of != cast.of:
            raise RuntimeError(
                "an FP8 weight that FSDP2 gathers was changed or moved on this rank between a "
                "forward and its backward, which gathers it again: run backward before, or "
                "forward again after"
            )
        cast = None
    if not names and isinstance(saved[0], BlockwiseFP8Weight):
        return saved[0].columnwise(cast)
    if not names and isinstance(saved[0], BlockwiseFP8Tensor):
        return saved[0].columnwise()
    # saved-tensor hooks that offload return a plain weight
    return _operand(saved, names, format).need_columnwise()


def release(cast: ForwardCast | GatheredCast | None) -> None:
    """Free the FP8 form of a forward; what another backward compares stays."""
    if isinstance(cast, ForwardCast):
        cast.waiting = None


def dgrad_as_one_op(
    g: Quantized,
    saved: Sequence[Tensor],
    names: Names,
    format: BlockFormat,
    out_dtype: torch.dtype,
    offs: Tensor | None = None,
) -> Tensor:
    """The data gradient for a compiler, so that it saves no form of the weight (dgrad_ops.py).

    ``offs``: of a grouped linear, whose weight is a stack.
    """
    if not names and isinstance(saved[0], BlockwiseFP8Weight):
        w = saved[0]
        if offs is None:
            return dgrad_of_master(g, w.cast_from, w.format, out_dtype)
        return grouped_dgrad_of_master(g, w.cast_from, w.format, offs, out_dtype)
    operand = _operand(saved, names, format)
    if operand.columnwise is not None:
        if offs is None:
            return gemm(g, operand.columnwise, None, out_dtype)
        return grouped_gemm(g, operand.columnwise, offs, None, out_dtype)
    if offs is None:
        return dgrad_of_rowwise(g, operand.need_rowwise(), out_dtype)
    return grouped_dgrad_of_rowwise(g, operand.need_rowwise(), offs, out_dtype)
