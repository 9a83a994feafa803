"""Define the op that multiplies two FP8 operands."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .. import checks
from ..formats import ACTIVATION_FORMATS, KERNEL_FORMATS, BlockFormat, Quantized
from ..op import op, runner
from ..scale_layouts import in_vectors
from .choose_backend import GemmBackend, GemmProblem, choose_gemm


def _decide_gemm(
    a: Quantized,
    b: Quantized,
    bias: Tensor | None,
    out_dtype: torch.dtype,
    batch_invariant: bool,
) -> Callable[..., Tensor]:
    if 0 in (a.data.shape[0], b.data.shape[0]):
        return _empty
    backend = _backend_for(a, b, bias, out_dtype, batch_invariant)
    run = runner(backend, "gemm")
    # a columnwise cast ends in zeros, which the other operand may lack
    k = max(a.data.shape[1], b.data.shape[1])
    if _is_dense(a, k) and _is_dense(b, k) and (bias is None or bias.is_contiguous()):
        return run
    return lambda a, b, bias, *how: run(_dense(a, k), _dense(b, k), _contiguous(bias), *how)


def _empty(a: Quantized, b: Quantized, bias: Any, out_dtype: torch.dtype, *_: bool) -> Tensor:
    return a.data.new_empty((a.data.shape[0], b.data.shape[0]), dtype=out_dtype)


def _backend_for(
    a: Quantized,
    b: Quantized,
    bias: Tensor | None,
    out_dtype: torch.dtype,
    batch_invariant: bool,
) -> GemmBackend:
    problem = GemmProblem(
        a.data.shape[0],
        b.data.shape[0],
        a.data.shape[1],
        _kernel_format(a),
        _kernel_format(b),
        out_dtype,
        a.data.device,
        None if bias is None else bias.dtype,
        batch_invariant,
    )
    return choose_gemm(problem).backend


def _kernel_format(x: Quantized) -> BlockFormat:
    """Return the format in which kernels read ``x``: they read a single row in 1x128 blocks."""
    if x.data.shape[0] == 1 and x.format in KERNEL_FORMATS:
        return ACTIVATION_FORMATS[x.format.scale_rounding]
    return x.format


def _dense(x: Quantized, k: int) -> Quantized:
    """Return ``x`` as kernels read it, in rows of whole vectors for ``k`` numbers; maybe copied."""
    return Quantized(in_vectors(x.data, k), x.scale, _kernel_format(x))


def _is_dense(x: Quantized, k: int) -> bool:
    dense = _dense(x, k)
    return dense.data is x.data and dense.format is x.format


def _contiguous(bias: Tensor | None) -> Tensor | None:
    return None if bias is None else bias.contiguous()


def flops(a: Quantized, b: Quantized) -> int:
    """Return the FLOPs of a GEMM, given the shapes of the operands' data."""
    (m, k), (n, _) = a.data, b.data
    return 2 * int(m) * int(n) * int(k)


@op(
    decide=_decide_gemm,
    check=lambda a, b, bias, *_: checks.gemm_operands(a, b, bias),
    flops=lambda a, b, *_: flops(a, b),
)
def gemm(
    a: Quantized,
    b: Quantized,
    bias: Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
    batch_invariant: bool = False,
) -> Tensor:
    """Multiply: ``out[M, N] = A[M, K] B[N, K]^T (+ bias[N])``.

    See :func:`blocktensor.ops.reference.gemm`. If ``batch_invariant``, the bits of a row do not
    depend on M.
    """
    return _empty(a, b, bias, out_dtype)
