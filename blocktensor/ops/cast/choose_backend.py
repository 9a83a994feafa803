"""The registry of cast backends: casts, transposes, dequantize and casts of parts.

Gluon kernels take tensors in rows of whole 32-bit words, on Hopper and later; Triton kernels take
all others on a GPU with FP8; the reference takes the rest.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ..devices import HOPPER, capability, lacks_gluon, lacks_triton
from ..formats import KERNEL_FORMATS, BlockFormat, Quantized
from ..registry import Backend, first_choice, loaded


@dataclass(frozen=True)
class CastKernels:
    """The functions of a backend, each with the signature of its namesake in ``reference.py``.

    Attributes:
        quantize_with_transpose: for rows in whole vectors; None if the backend takes two passes.
        launches: True if they only allocate and launch kernels, so that calls can be recorded.
    """

    quantize_rowwise: Callable[..., Quantized]
    quantize_columnwise: Callable[..., Quantized]
    quantize_both: Callable[..., tuple[Quantized, Quantized]]
    quantize_with_transpose: Callable[..., tuple[Quantized, Quantized]] | None
    transpose: Callable[..., Quantized]
    dequantize: Callable[..., Tensor]
    quantize_grouped: Callable[..., tuple[Quantized, Quantized]]
    quantize_grouped_columnwise: Callable[..., Quantized]
    shard_amax: Callable[..., Tensor]
    quantize_shard: Callable[..., Tensor]
    launches: bool


@dataclass(frozen=True)
class CastProblem:
    """The tensor that is read, and the format that is written or read.

    Attributes:
        columnwise_format: of the columnwise form, where both are written; else None.
    """

    x: Tensor
    format: BlockFormat
    columnwise_format: BlockFormat | None = None


def _kernels(casts: Any, transposes: Any, groups: Any, parts: Any, launches: bool) -> CastKernels:
    return CastKernels(
        casts.quantize_rowwise,
        casts.quantize_columnwise,
        casts.quantize_both,
        None,
        transposes.transpose,
        transposes.dequantize,
        groups.quantize_grouped,
        groups.quantize_grouped_columnwise,
        parts.shard_amax,
        parts.quantize_shard,
        launches,
    )


def _load_reference() -> CastKernels:
    from .. import reference

    kernels = _kernels(reference, reference, reference, reference, launches=False)
    return replace(kernels, quantize_with_transpose=reference.quantize_with_transpose)


def _load_triton() -> CastKernels:
    from . import triton_128x128, triton_cast, triton_transpose

    return _kernels(triton_cast, triton_transpose, triton_cast, triton_128x128, launches=True)


def _load_gluon() -> CastKernels:
    from . import gluon_128x128, gluon_columnwise, gluon_transpose, gluon_with_transpose

    # Rowwise casts in 1x128 blocks, dequantize and casts of parts gain nothing in Gluon.
    return replace(
        _load_triton(),
        quantize_rowwise=gluon_128x128.quantize_rowwise,
        quantize_columnwise=gluon_columnwise.quantize_columnwise,
        quantize_both=gluon_columnwise.quantize_both,
        quantize_with_transpose=gluon_with_transpose.quantize_with_transpose,
        quantize_grouped=gluon_columnwise.quantize_grouped,
        quantize_grouped_columnwise=gluon_columnwise.quantize_grouped_columnwise,
        transpose=gluon_transpose.transpose,
    )


def _gluon_unusable(device: torch.device) -> str | None:
    if reason := lacks_gluon(device):
        return reason
    if capability(device) < HOPPER:
        return "written for sm_90 and later"
    from . import trial  # needs Triton

    return trial.casts_fail(device)


def _triton_declines(problem: CastProblem) -> str | None:
    row, col = problem.format, problem.columnwise_format or problem.format
    for format in (row, col):
        if format not in KERNEL_FORMATS:
            return f"no kernels for format {format.name}"
    if row.scale_rounding != col.scale_rounding:
        return f"no kernels that round scales as both {row.name} and {col.name}"
    return None


def _gluon_declines(problem: CastProblem) -> str | None:
    if reason := _triton_declines(problem):
        return reason
    x = problem.x
    per_word = 4 // x.element_size()
    in_words = (
        x.stride(-1) == 1
        and x.shape[-1] % per_word == 0
        and x.data_ptr() % 4 == 0
        and all(stride % per_word == 0 for stride in x.stride()[:-1])
    )
    if not in_words:
        return "reads rows of whole 32-bit words"
    if x.element_size() == 1 and x.shape[-2] % 4:
        return "transposes bytes of four rows at a time"
    fits = max(x.stride(-2), *x.shape[-2:]) < 2**24
    return None if fits else "uses 32-bit offsets inside a block"


CAST_BACKENDS: tuple[Backend[CastProblem, CastKernels], ...] = (
    Backend("gluon", _load_gluon, _gluon_unusable, _gluon_declines),
    Backend("triton", _load_triton, lacks_triton, _triton_declines),
    Backend("reference", _load_reference),
)
"""In order of preference; the reference takes every problem."""


def cast_backend(
    x: Tensor, format: BlockFormat, columnwise_format: BlockFormat | None = None
) -> Backend[CastProblem, CastKernels]:
    """The backend that reads ``x`` to cast it, or to transpose or dequantize a cast."""
    problem = CastProblem(x, format, columnwise_format)
    return first_choice(CAST_BACKENDS, problem, x.device).backend


def cast_kernels(
    x: Tensor, format: BlockFormat, columnwise_format: BlockFormat | None = None
) -> CastKernels:
    """The functions of :func:`cast_backend`."""
    return loaded(cast_backend(x, format, columnwise_format))
