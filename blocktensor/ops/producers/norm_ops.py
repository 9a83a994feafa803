"""Normalised rows, cast: the function to call, and its registered op."""

from __future__ import annotations

from collections.abc import Callable
from typing import get_args

import torch
from torch import Tensor

from .. import checks
from ..cast.producer import Forms
from ..formats import BlockFormat
from ..norm.reference import NormKind
from ..runtime.specialize import Specialized, recorded
from .choose_backend import producer_kernels
from .op_forms import check_formats, empty_forms, format_named, forms_of, name_of, tensors_of


def normalized(
    x: Tensor,
    rstd: Tensor,
    weight: Tensor,
    kind: NormKind,
    rowwise: BlockFormat | None,
    columnwise: BlockFormat | None,
) -> Forms:
    """The forms of an RMS norm of ``x``, from one read of it.

    Bytes are those of eager mode: see :func:`~..norm.reference.normalize`.

    Args:
        x: ``[T, K]`` bf16, fp16 or fp32, with any strides.
        rstd: fp32 ``[T, 1]``, ``rsqrt(mean(x²) + eps)`` of each row.
        weight: ``[K]``, dtype of x.
        kind: "llama" or "gemma".
        rowwise: format of the rowwise form, of blocks of one row; None for no such form.
        columnwise: format of the columnwise form; None for no such form.

    Returns:
        The rowwise form, data ``[T, K]``, and the columnwise form, data ``[K, T]`` as
        :func:`~blocktensor.ops.cast.ops.quantize_columnwise` writes it; None for one without a
        format.

    Raises:
        TypeError, ValueError: shapes, dtypes or devices that do not fit; an unknown kind; no
            format, or a rowwise one of square blocks.
    """
    rstd, weight = rstd.contiguous(), weight.contiguous()  # as kernels read them
    return _normalized(x, rstd, weight, kind, rowwise, columnwise)


def _check(
    x: Tensor,
    rstd: Tensor,
    weight: Tensor,
    kind: str,
    rowwise: BlockFormat | None,
    columnwise: BlockFormat | None,
) -> None:
    if kind not in get_args(NormKind):
        raise ValueError(f"kind {kind!r}: expected one of {', '.join(get_args(NormKind))}")
    check_formats(rowwise, columnwise)
    checks.high_precision(x, "x")
    checks.rank(x, (2,), "x", "flatten tokens to [T, K]")
    for tensor, what, shape, dtype in (
        (rstd, "rstd", (x.shape[0], 1), torch.float32),
        (weight, "the weight", (x.shape[1],), x.dtype),
    ):
        checks.same_device(tensor, x, what, "x")
        if tensor.shape != shape:
            raise ValueError(f"{what} has shape {list(tensor.shape)}: expected {list(shape)}")
        if tensor.dtype != dtype:
            raise TypeError(f"{what} has dtype {tensor.dtype}: expected {dtype}")


def _decide(
    x: Tensor,
    rstd: Tensor,
    weight: Tensor,
    kind: str,
    rowwise: BlockFormat | None,
    columnwise: BlockFormat | None,
) -> Callable[..., Forms]:
    _check(x, rstd, weight, kind, rowwise, columnwise)
    kernels = producer_kernels((x, weight.expand(x.shape)), rowwise, columnwise)
    return recorded(kernels.normalized, kernels.launches)


def _dispatch(
    x: Tensor,
    rstd: Tensor,
    weight: Tensor,
    kind: str,
    rowwise: BlockFormat | None,
    columnwise: BlockFormat | None,
) -> Forms:
    _check(x, rstd, weight, kind, rowwise, columnwise)
    made = _normalized_op(x, rstd, weight, kind, name_of(rowwise), name_of(columnwise))
    return forms_of(made, rowwise, columnwise)


_normalized = Specialized(_decide, _dispatch)


@torch.library.custom_op("blocktensor::normalized", mutates_args=())
def _normalized_op(
    x: Tensor, rstd: Tensor, weight: Tensor, kind: str, rowwise: str | None, columnwise: str | None
) -> list[Tensor]:
    formats = format_named(rowwise), format_named(columnwise)
    return tensors_of(_normalized.run(x, rstd, weight, kind, *formats))


@_normalized_op.register_fake
def _(
    x: Tensor, rstd: Tensor, weight: Tensor, kind: str, rowwise: str | None, columnwise: str | None
) -> list[Tensor]:
    return tensors_of(empty_forms(x, None, format_named(rowwise), format_named(columnwise)))
