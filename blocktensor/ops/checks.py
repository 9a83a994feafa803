"""What every op demands of its tensors, told in the words of the caller."""

from __future__ import annotations

from torch import Tensor, dtype, float8_e4m3fn, float16, float32
from torch import bfloat16 as bf16

from .layouts import (
    BLOCK,
    ROWWISE_BLOCK,
    SQUARE_BLOCK,
    empty_rowwise_scale,
    empty_square_scale,
    num_blocks,
)

HIGH_PRECISION = (bf16, float16, float32)


def high_precision(x: Tensor, what: str) -> None:
    """``x`` is bf16, fp16 or fp32, else TypeError."""
    if x.dtype not in HIGH_PRECISION:
        raise TypeError(
            f"{what} has dtype {x.dtype}: blocktensor casts torch.bfloat16, torch.float16 and "
            f"torch.float32 to FP8; convert it first, e.g. .to(torch.bfloat16)"
        )


def rank(x: Tensor, ranks: tuple[int, ...], what: str, remedy: str) -> None:
    """``x.ndim`` is one of ``ranks``, else ValueError ending in ``remedy``."""
    if x.ndim not in ranks:
        expected = " or ".join(str(r) for r in ranks)
        raise ValueError(
            f"{what} has {x.ndim} dimensions, shape {list(x.shape)}: expected {expected}; {remedy}"
        )


def gemm_operand(data: Tensor, scale: Tensor, what: str) -> None:
    """``data`` is e4m3 ``[R, K]`` contiguous, ``scale`` fp32 1x128 or 128x128 for it."""
    if data.dtype != float8_e4m3fn:
        raise TypeError(f"{what} has dtype {data.dtype}: expected torch.float8_e4m3fn")
    if scale.dtype != float32:
        raise TypeError(f"the scale of {what} has dtype {scale.dtype}: expected torch.float32")
    rank(data, (2,), what, "stacks of matrices are not supported here")
    if not data.is_contiguous():
        raise ValueError(
            f"{what} {list(data.shape)} has strides {data.stride()}: FP8 GEMMs read operands "
            f"contiguous along K; use .contiguous(), or the columnwise form of a transpose"
        )
    rows, k = data.shape
    fitting = ((rows, num_blocks(k)), (num_blocks(rows), num_blocks(k)))
    if tuple(scale.shape) not in fitting:
        raise ValueError(
            f"the scale of {what} has shape {list(scale.shape)} for data {list(data.shape)}: "
            f"expected {list(fitting[0])} (1x{BLOCK} blocks) or {list(fitting[1])} "
            f"({BLOCK}x{BLOCK} blocks)"
        )
    same_device(data, scale, what, f"the scale of {what}")


def same_device(a: Tensor, b: Tensor, what_a: str, what_b: str) -> None:
    """Both tensors live on one device, else ValueError."""
    if a.device != b.device:
        raise ValueError(
            f"{what_a} is on {a.device} and {what_b} on {b.device}: move them to one device"
        )


def gemm_output(out_dtype: dtype) -> None:
    """The output dtype is bf16, fp16 or fp32, else TypeError."""
    if out_dtype not in HIGH_PRECISION:
        raise TypeError(
            f"output dtype {out_dtype}: expected torch.bfloat16, torch.float16 or torch.float32"
        )


def same_k(a: Tensor, b: Tensor, what_a: str, what_b: str) -> None:
    """Both operands have the same contraction size, else ValueError."""
    if a.shape[-1] != b.shape[-1]:
        raise ValueError(
            f"cannot contract {what_a} {list(a.shape)} with {what_b} {list(b.shape)}: "
            f"K is {a.shape[-1]} in one and {b.shape[-1]} in the other"
        )


def block_shape(shape: tuple[int, int]) -> None:
    """``shape`` is (1, 128) or (128, 128), else ValueError."""
    if tuple(shape) not in (ROWWISE_BLOCK, SQUARE_BLOCK):
        raise ValueError(
            f"block_shape {tuple(shape)}: expected {ROWWISE_BLOCK} (activations, gradients) or "
            f"{SQUARE_BLOCK} (weights)"
        )


def cast_data(data: Tensor, scale: Tensor, shape: tuple[int, int]) -> None:
    """``data`` e4m3 and ``scale`` fp32 form one cast in blocks of ``shape``."""
    if data.dtype != float8_e4m3fn:
        raise TypeError(f"FP8 data has dtype {data.dtype}: expected torch.float8_e4m3fn")
    if scale.dtype != float32:
        raise TypeError(f"scales have dtype {scale.dtype}: expected torch.float32")
    ranks = (2,) if tuple(shape) == ROWWISE_BLOCK else (2, 3)
    rank(data, ranks, "FP8 data", "1x128 data is [M, K], 128x128 data [N, K] or [E, N, K]")
    rows, cols = data.shape[-2:]
    row_blocks = rows if tuple(shape) == ROWWISE_BLOCK else num_blocks(rows)
    expected = (*data.shape[:-2], row_blocks, num_blocks(cols))
    if tuple(scale.shape) != expected:
        raise ValueError(
            f"scales have shape {list(scale.shape)} for data {list(data.shape)} in blocks of "
            f"{tuple(shape)}: expected {list(expected)}"
        )
    same_device(data, scale, "FP8 data", "its scales")


def laid_out(scale: Tensor, data: Tensor, shape: tuple[int, int]) -> Tensor:
    """``scale`` in the layout that ops expect (``ops/layouts.py``); copied where it differs."""
    if tuple(shape) == ROWWISE_BLOCK:
        wanted = empty_rowwise_scale(data.shape[0], data.shape[1], scale.device)
    else:
        wanted = empty_square_scale(data.shape, scale.device)
    return scale if scale.stride() == wanted.stride() else wanted.copy_(scale)


def main_grad(buffer: Tensor, weight: Tensor) -> None:
    """Refuse a buffer that gradients of ``weight`` cannot be added to in fp32."""
    if buffer.dtype != float32:
        raise TypeError(f"main_grad is {buffer.dtype}: expected torch.float32")
    if weight.ndim != 2:
        raise ValueError(f"main_grad of a weight {list(weight.shape)}: only matrices have one")
    if buffer.shape != weight.shape or buffer.device != weight.device:
        raise ValueError(
            f"main_grad is {list(buffer.shape)} on {buffer.device}: expected the weight's "
            f"{list(weight.shape)} on {weight.device}"
        )
    if buffer.shape[1] > 1 and buffer.stride(1) != 1:
        raise ValueError(f"main_grad has strides {buffer.stride()}: expected contiguous rows")
