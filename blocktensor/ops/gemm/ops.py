"""The product of two FP8 operands, checked and decided once for each kind of call, and its ops."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from .. import checks
from ..formats import ACTIVATION_FORMATS, KERNEL_FORMATS, BlockFormat, Quantized, named
from ..registry import loaded
from ..runtime.specialize import Specialized, recorded
from ..scale_layouts import in_vectors
from .choose_backend import GemmKernels, GemmProblem, choose_gemm


def gemm(
    a: Quantized, b: Quantized, bias: Tensor | None = None, out_dtype: torch.dtype = torch.bfloat16
) -> Tensor:
    """``out[M, N] = A[M, K] B[N, K]^T (+ bias[N])``; see :func:`blocktensor.ops.reference.gemm`.

    Raises:
        TypeError, ValueError: dtypes, shapes, layouts or devices that do not fit together.
    """
    return _gemm(a, b, bias, out_dtype)


def gemm_add_(out: Tensor, a: Quantized, b: Quantized) -> Tensor:
    """``out[M, N] += A B^T`` in fp32, in place; returns ``out``.

    Raises:
        TypeError, ValueError: as :func:`gemm`, and unless ``out`` is fp32 ``[M, N]`` with unit
            column stride.
    """
    _gemm_add_(out, a, b)
    return out


def _check(a: Quantized, b: Quantized, bias: Tensor | None, out_dtype: torch.dtype) -> None:
    checks.gemm_operand(a, "operand a")
    checks.gemm_operand(b, "operand b")
    checks.same_contraction(a.data, b.data)
    checks.same_device(a.data, b.data, "operand a", "operand b")
    checks.gemm_output(out_dtype)
    if bias is not None:
        n = b.data.shape[0]
        checks.same_device(a.data, bias, "operand a", "the bias")
        if tuple(bias.shape) != (n,):
            raise ValueError(
                f"the bias has shape {list(bias.shape)}: expected [{n}], one entry for each output "
                f"column"
            )


def _check_sum(out: Tensor, a: Quantized, b: Quantized) -> None:
    _check(a, b, None, torch.float32)
    checks.same_device(a.data, out, "operand a", "the output")
    if out.dtype != torch.float32:
        raise TypeError(f"gemm_add_ adds into torch.float32, got an output of {out.dtype}")
    expected = (a.data.shape[0], b.data.shape[0])
    if tuple(out.shape) != expected or (out.stride(-1) != 1 and expected[1] > 1):
        raise ValueError(
            f"gemm_add_ needs an output {list(expected)} with rows contiguous, got "
            f"{list(out.shape)} with strides {out.stride()}"
        )


def _decide_gemm(
    a: Quantized, b: Quantized, bias: Tensor | None, out_dtype: torch.dtype
) -> Callable[..., Tensor]:
    _check(a, b, bias, out_dtype)
    m, n = a.data.shape[0], b.data.shape[0]
    if 0 in (m, n):
        return lambda a, b, bias, out_dtype: a.data.new_empty((m, n), dtype=out_dtype)
    kernels = _kernels_for(a, b, bias, out_dtype)
    run = recorded(kernels.gemm, kernels.launches)
    ready = _is_dense(a) and _is_dense(b) and (bias is None or bias.is_contiguous())
    if ready or not kernels.reads_vectors:
        return run
    return lambda a, b, bias, out_dtype: run(_dense(a), _dense(b), _contiguous(bias), out_dtype)


def _decide_sum(out: Tensor, a: Quantized, b: Quantized) -> Callable[..., None]:
    _check_sum(out, a, b)
    if 0 in (*out.shape, a.data.shape[1]):
        return lambda out, a, b: None
    kernels = _kernels_for(a, b, None, out.dtype, accumulate=True)
    assert kernels.gemm_add_ is not None
    run = recorded(kernels.gemm_add_, kernels.launches)
    if (_is_dense(a) and _is_dense(b)) or not kernels.reads_vectors:
        return run
    return lambda out, a, b: run(out, _dense(a), _dense(b))


def _kernels_for(
    a: Quantized,
    b: Quantized,
    bias: Tensor | None,
    out_dtype: torch.dtype,
    accumulate: bool = False,
) -> GemmKernels:
    problem = GemmProblem(
        a.data.shape[0],
        b.data.shape[0],
        a.data.shape[1],
        _kernel_format(a),
        _kernel_format(b),
        out_dtype,
        a.data.device,
        None if bias is None else bias.dtype,
        accumulate,
    )
    return loaded(choose_gemm(problem).backend)


def _kernel_format(x: Quantized) -> BlockFormat:
    """The format that kernels read ``x`` in: a single row has the scales of 1x128 blocks."""
    if x.data.shape[0] == 1 and x.format in KERNEL_FORMATS:
        return ACTIVATION_FORMATS[x.format.scale_rounding]
    return x.format


def _dense(x: Quantized) -> Quantized:
    """``x`` as kernels read it, in rows of whole vectors; copied where needed."""
    return Quantized(in_vectors(x.data), x.scale, _kernel_format(x))


def _is_dense(x: Quantized) -> bool:
    dense = _dense(x)
    return dense.data is x.data and dense.format is x.format


def _contiguous(bias: Tensor | None) -> Tensor | None:
    return None if bias is None else bias.contiguous()


def arguments_of(a: Quantized, b: Quantized) -> tuple[Any, ...]:
    """The operands as a registered op takes them; see :func:`operands_of`."""
    return a.data, a.scale, a.format.name, b.data, b.scale, b.format.name


def _dispatch_gemm(
    a: Quantized, b: Quantized, bias: Tensor | None, out_dtype: torch.dtype
) -> Tensor:
    _check(a, b, bias, out_dtype)
    return _gemm_op(*arguments_of(a, b), bias, out_dtype)


def _dispatch_sum(out: Tensor, a: Quantized, b: Quantized) -> None:
    _check_sum(out, a, b)
    _gemm_add_op(out, *arguments_of(a, b))


_gemm = Specialized(_decide_gemm, _dispatch_gemm)
_gemm_add_ = Specialized(_decide_sum, _dispatch_sum)


OPERANDS = "Tensor a, Tensor a_scale, str a_format, Tensor b, Tensor b_scale, str b_format"
"""Parameters of a registered op that takes two operands; see :func:`operands_of`."""


def operands_of(
    a: Tensor, a_scale: Tensor, a_format: str, b: Tensor, b_scale: Tensor, b_format: str
) -> tuple[Quantized, Quantized]:
    """The operands of a registered op, which takes tensors and the names of formats."""
    return Quantized(a, a_scale, named(a_format)), Quantized(b, b_scale, named(b_format))


def _gemm_body(*args: Any) -> Tensor:
    *operands, bias, out_dtype = args
    return _gemm.run(*operands_of(*operands), bias, out_dtype)


def _gemm_add_body(out: Tensor, *operands: Any) -> None:
    _gemm_add_.run(out, *operands_of(*operands))


_gemm_op = torch.library.custom_op(
    "blocktensor::gemm",
    _gemm_body,
    mutates_args=(),
    schema=f"({OPERANDS}, Tensor? bias, ScalarType out_dtype) -> Tensor",
)
_gemm_add_op = torch.library.custom_op(
    "blocktensor::gemm_add_",
    _gemm_add_body,
    mutates_args=("out",),
    schema=f"(Tensor(a!) out, {OPERANDS}) -> ()",
)


@_gemm_op.register_fake
def _(*args: Any) -> Tensor:
    *operands, _, out_dtype = args
    a, b = operands_of(*operands)
    shape = a.data.shape[0], b.data.shape[0]
    return torch.empty(shape, dtype=out_dtype, device=a.data.device)


@_gemm_add_op.register_fake
def _(out: Tensor, *operands: Any) -> None:
    return None


@register_flop_formula(torch.ops.blocktensor.gemm)
def _gemm_flops(a_shape: Any, a_scale: Any, _: str, b_shape: Any, *__: Any, **___: Any) -> int:
    return 2 * a_shape[0] * b_shape[0] * a_shape[1]


@register_flop_formula(torch.ops.blocktensor.gemm_add_)
def _gemm_add_flops(out: Any, *operands: Any, **_: Any) -> int:
    return _gemm_flops(*operands)
