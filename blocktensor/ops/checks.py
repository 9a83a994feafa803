"""Check tensors for ops and tensor types; ``what`` names the tensor in the error message."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from numbers import Integral
from typing import TypeGuard

from torch import Tensor, dtype, finfo, float16, float32, int32, jagged, strided, where
from torch import bfloat16 as bf16
from torch.compiler import is_compiling

from .formats import ROUNDINGS, BlockFormat, Quantized, padded_rows

HIGH_PRECISION = (bf16, float16, float32)


def has_memory(x: Tensor, what: str) -> None:
    """Raise NotImplementedError if ``x`` is sparse or a DTensor, which our ops do not support.

    Tensor parallel linear layers take local parts earlier.
    """
    if not is_compiling() and x.layout is not strided and x.layout is not jagged:
        raise NotImplementedError(
            f"{what} is sparse, {x.layout} {list(x.shape)}: expected a dense one; call .to_dense()"
        )
    tensors = sys.modules.get("torch.distributed.tensor")
    if tensors is not None and isinstance(x, tensors.DTensor):
        raise NotImplementedError(
            f"{what} is a DTensor {list(x.shape)}, {x.placements}: expected a local tensor. Pass "
            f".full_tensor(), or .to_local() of one with Replicate(); or cut the linear layers "
            f"with ColwiseParallel and RowwiseParallel of blocktensor.distributed, which take "
            f"DTensors"
        )


def high_precision(x: Tensor, what: str) -> None:
    """Check that ``x`` is dense, local, and bf16, fp16 or fp32.

    Raises:
        NotImplementedError, TypeError: it is not.
    """
    has_memory(x, what)
    high_precision_dtype(x, what)


def high_precision_dtype(x: Tensor, what: str) -> None:
    """Check that ``x`` is bf16, fp16 or fp32, else TypeError."""
    if x.dtype not in HIGH_PRECISION:
        raise TypeError(
            f"{what} has dtype {x.dtype}: blocktensor casts torch.bfloat16, torch.float16 and "
            f"torch.float32 to FP8; convert it first, e.g. .to(torch.bfloat16)"
        )


def rank(x: Tensor, ranks: tuple[int, ...], what: str, remedy: str) -> None:
    """Check that ``x.ndim`` is one of ``ranks``, else ValueError ending in ``remedy``."""
    if x.ndim not in ranks:
        expected = " or ".join(str(r) for r in ranks)
        raise ValueError(
            f"{what} has {x.ndim} dimensions, shape {list(x.shape)}: expected {expected}; {remedy}"
        )


def castable(x: Tensor, format: BlockFormat) -> None:
    """Check that dtype and rank of ``x`` can be cast in ``format``; else TypeError, ValueError."""
    high_precision(x, "the tensor to quantize")
    if format.rows == 1:
        remedy = "flatten leading dimensions with .flatten(0, -2)"
    else:
        remedy = f"{format.name} blocks need [N, K] or [E, N, K]"
    rank(x, format.ranks, "the tensor to quantize", remedy)


def group_ends(offs: Tensor, x: Tensor, what: str) -> None:
    """Check that ``offs`` is int32 ``[E]``, E > 0, on the device of ``x``."""
    if offs.dtype != int32:
        raise TypeError(f"offs has dtype {offs.dtype}: expected torch.int32; use .to(torch.int32)")
    if offs.ndim != 1 or len(offs) == 0:
        raise ValueError(
            f"offs has shape {list(offs.shape)}: expected [E], the cumulative end of each of E > 0 "
            f"groups of rows"
        )
    same_device(x, offs, what, "offs")


def quantized(x: Quantized) -> None:
    """Check that data, scales and format belong together, else TypeError or ValueError."""
    data, scale, format = x
    if data.dtype != format.dtype:
        raise TypeError(f"FP8 data has dtype {data.dtype}: expected {format.dtype}")
    if scale.dtype != float32:
        raise TypeError(f"scales have dtype {scale.dtype}: expected torch.float32")
    remedy = "1x128 data is [M, K], 128x128 data [N, K] or [E, N, K]"
    rank(data, format.ranks, "FP8 data", remedy)
    expected = format.scale_shape(data.shape)
    if tuple(scale.shape) != expected:
        raise ValueError(
            f"scales have shape {list(scale.shape)} for data {list(data.shape)} in blocks of "
            f"{format.block_shape}: expected {list(expected)}"
        )
    same_device(data, scale, "FP8 data", "its scales")


def fit(*conditions: bool) -> None:
    """Raise ValueError unless all conditions hold: callers guarantee them, kernels rely on them."""
    if not all(conditions):
        raise ValueError("internal: arguments of an FP8 op do not fit together")


def gemm_operands(a: Quantized, b: Quantized, bias: Tensor | None = None, b_ndim: int = 2) -> None:
    """Check that kernels would read only the memory of operands."""
    device = a.data.device
    for (data, scale, format), ndim in ((a, 2), (b, b_ndim)):
        fit(
            (data.dtype, scale.dtype, data.ndim) == (format.dtype, float32, ndim),
            tuple(scale.shape) == format.scale_shape(data.shape),
            data.is_contiguous() or ndim == 3,  # grouped_gemm copies it
            data.device == scale.device == device,
        )
    # columnwise casts are filled up with zeros
    fit(padded_rows(a.data.shape[-1]) == padded_rows(b.data.shape[-1]))
    fit(bias is None or (bias.shape, bias.device) == (b.data.shape[:-1], device))


def bias_of(bias: Tensor, shape: Sequence[int], x: Tensor, what: str) -> None:
    """Check that ``bias`` has this shape and is on the device of ``x``."""
    same_device(x, bias, what, "the bias")
    if tuple(bias.shape) != tuple(shape):
        raise ValueError(
            f"the bias has shape {list(bias.shape)}: expected {list(shape)}, one entry for each "
            f"output column"
        )


def ends_of_stack(offs: Tensor, stack: Tensor, what: str) -> None:
    """Check that ``offs`` has one end for each matrix of ``stack``."""
    if len(offs) != len(stack):
        raise ValueError(
            f"offs ends {len(offs)} groups, and {what} {list(stack.shape)} is a stack of "
            f"{len(stack)} experts: expected one end for each"
        )


def same_device(a: Tensor, b: Tensor, what_a: str, what_b: str) -> None:
    """Check that both tensors are dense, local and on one device."""
    has_memory(a, what_a)
    has_memory(b, what_b)
    if a.device != b.device:
        raise ValueError(
            f"{what_a} is on {a.device} and {what_b} on {b.device}: move them to one device"
        )


def is_integer(x: object) -> TypeGuard[int]:
    """Return True for integers; a bool is none."""
    return isinstance(x, Integral) and not isinstance(x, bool)


def flag(given: object, name: str) -> None:
    """Check that an argument of this name is True or False, else TypeError."""
    if not isinstance(given, bool):
        raise TypeError(f"{name}={given!r}: expected True or False")


def tensor(x: object, name: str) -> None:
    """Check that ``x`` is a tensor, else TypeError."""
    if not isinstance(x, Tensor):
        raise TypeError(f"{name} is a {type(x).__name__}: expected a tensor")


def given_dtype(given: dtype, name: str) -> None:
    """Check that an argument of this name is bf16, fp16 or fp32, else TypeError."""
    if given not in HIGH_PRECISION:
        expected = ", ".join(map(str, HIGH_PRECISION))
        raise TypeError(f"{name}={given!r}: expected one of {expected}")


def same_k(a: Tensor, b: Tensor, what_a: str, what_b: str) -> None:
    """Check that both operands have the same contraction size, else ValueError."""
    if a.shape[-1] != b.shape[-1]:
        raise ValueError(
            f"cannot contract {what_a} {list(a.shape)} with {what_b} {list(b.shape)}: "
            f"K is {a.shape[-1]} in one and {b.shape[-1]} in the other"
        )


def linear_operands(x: Tensor, w: Tensor, bias: Tensor | None, offs: Tensor | None) -> None:
    """Check dtypes, shapes and devices of a linear layer; with ``offs``, of a grouped linear layer.

    Raises:
        TypeError, ValueError: they do not fit together.
        NotImplementedError: a DTensor, or a sparse tensor.
    """
    name = "an FP8 linear layer" if offs is None else "a grouped FP8 linear layer"
    for operand, what in ((x, "the input"), (w, "the weight")):
        high_precision(operand, f"{what} of {name}")
    if offs is None:
        rank(w, (2,), f"the weight of {name}", "stacks of experts need grouped_mm")
        if x.ndim == 0:
            raise ValueError(
                "the input of an FP8 linear layer is a scalar: expected shape [..., K]"
            )
    else:
        remedy = "stacks of experts are [E, N, K]; a matrix needs functional.linear"
        rank(x, (2,), f"the input of {name}", "flatten tokens to [T, K]")
        rank(w, (3,), f"the weight of {name}", remedy)
    same_k(x, w, "input", "weight")
    same_device(x, w, "the input", "the weight")
    if offs is not None:
        group_ends(offs, x, "the input")
        ends_of_stack(offs, w, "the weight")
    if bias is not None:
        bias_of(bias, w.shape[:-1], x, "the input")


def bad_scale(scale: Tensor, format: BlockFormat, first: Sequence[int] | None = None) -> str | None:
    """Say why stored fp32 scales are bad, or return None.

    They must be finite, above 0, and rounded as the format says.

    Args:
        scale: the scales of all blocks of a weight, or of a box of them.
        format: the format of the weight.
        first: the index of the first block of the box.
    """
    fits = scale.isfinite() & (scale > 0)
    expected = ROUNDINGS["fp32"].noun
    rounding = ROUNDINGS[format.scale_rounding]
    if rounding.round is not None and fits.all():
        normal = where(scale < finfo(float32).tiny, scale * 2.0**64, scale)
        fits = rounding.round(normal) == normal
        recipe = f"Recipe(scale={format.scale_rounding!r})"
        expected = (
            f"{rounding.noun}, as {recipe} has them; with Recipe() any scale is read, and "
            f"unfreeze, convert(model, {recipe}), freeze round again"
        )
    if fits.all():
        return None
    at = (~fits).nonzero()[0].tolist()
    block = at if first is None else [i + start for i, start in zip(at, first, strict=True)]
    return f"the scale of block {block} is {scale[tuple(at)].item()}: expected {expected}"
