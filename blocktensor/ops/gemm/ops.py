"""The product of two FP8 operands, with its registered ops.

Checks and the choice of a backend are made once for each kind of call
(``ops/runtime/specialize.py``).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from .. import checks
from ..formats import Quantized, named
from ..runtime.specialize import Specialized, must_dispatch, recorded
from ..scale_layouts import in_vectors
from .choose_backend import GemmKernels, GemmProblem, choose_gemm, gemm_kernels


def gemm(
    a: Quantized,
    b: Quantized,
    bias: Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
) -> Tensor:
    """``out[M, N] = A[M, K] B[N, K]^T (+ bias[N])``.

    See :func:`blocktensor.ops.reference.gemm` for the arithmetic.

    Raises:
        TypeError, ValueError: dtypes, shapes, layouts or devices that do not fit together.
    """
    if must_dispatch(a.data):
        _check(a, b, bias, out_dtype)
        operands = a.data, a.scale, a.format.name, b.data, b.scale, b.format.name
        return _gemm_op(*operands, bias, out_dtype)
    return _gemm.find(a, b, bias, out_dtype)(a, b, bias, out_dtype)


def gemm_add_(out: Tensor, a: Quantized, b: Quantized) -> Tensor:
    """``out[M, N] += A B^T`` in fp32, in place; returns ``out``.

    Raises:
        TypeError, ValueError: as :func:`gemm`, and unless ``out`` is fp32 ``[M, N]`` with unit
            column stride.
    """
    if must_dispatch(a.data):
        _check_sum(out, a, b)
        _gemm_add_op(out, a.data, a.scale, a.format.name, b.data, b.scale, b.format.name)
    else:
        _gemm_add_.find(out, a, b)(out, a, b)
    return out


def _check(a: Quantized, b: Quantized, bias: Tensor | None, out_dtype: torch.dtype) -> None:
    checks.gemm_operand(a, "operand a")
    checks.gemm_operand(b, "operand b")
    checks.same_k(a.data, b.data, "operand a", "operand b")
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


# Decisions


def _operand_key(x: Quantized) -> Hashable:
    data, scale, format = x
    layout = data.shape, data.stride(), scale.shape, scale.stride()
    return layout, data.dtype, scale.dtype, data.device, scale.device, format


def _key(a: Quantized, b: Quantized, bias: Tensor | None, out_dtype: torch.dtype) -> Hashable:
    at = a[0].data_ptr(), a[1].data_ptr(), b[0].data_ptr(), b[1].data_ptr()
    return (
        _operand_key(a),
        _operand_key(b),
        (at[0] | at[1] | at[2] | at[3]) & 15 and tuple(address & 15 for address in at),
        None if bias is None else _bias_key(bias),
        out_dtype,
    )


def _bias_key(bias: Tensor) -> Hashable:
    return bias.shape, bias.stride(), bias.dtype, bias.data_ptr() & 15, bias.device


def _sum_key(out: Tensor, a: Quantized, b: Quantized) -> Hashable:
    return _key(a, b, None, out.dtype), out.shape, out.stride(), out.data_ptr() & 15, out.device


def _decide_gemm(
    a: Quantized, b: Quantized, bias: Tensor | None, out_dtype: torch.dtype
) -> Callable[..., Tensor]:
    _check(a, b, bias, out_dtype)
    m, n = a.data.shape[0], b.data.shape[0]
    if 0 in (m, n):
        return lambda a, b, bias, out_dtype: a.data.new_empty((m, n), dtype=out_dtype)
    kernels = _kernels_for(a, b, bias, out_dtype)
    run = recorded(kernels.gemm, kernels.launches)
    if not kernels.reads_vectors or _are_dense(a, b, bias):
        return run
    return lambda a, b, bias, out_dtype: run(_dense(a), _dense(b), _contiguous(bias), out_dtype)


def _decide_sum(out: Tensor, a: Quantized, b: Quantized) -> Callable[..., None]:
    _check_sum(out, a, b)
    if 0 in (*out.shape, a.data.shape[1]):
        return lambda out, a, b: None
    kernels = _kernels_for(a, b, None, out.dtype, accumulate=True)
    assert kernels.gemm_add_ is not None
    run = recorded(kernels.gemm_add_, kernels.launches)
    if not kernels.reads_vectors or _are_dense(a, b, None):
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
        a.format,
        b.format,
        out_dtype,
        a.data.device,
        None if bias is None else bias.dtype,
        accumulate,
    )
    return gemm_kernels(choose_gemm(problem).backend)


def _dense(x: Quantized) -> Quantized:
    """``x`` as kernels read it, in rows of whole vectors; copied where needed."""
    return x._replace(data=in_vectors(x.data))


def _contiguous(bias: Tensor | None) -> Tensor | None:
    return None if bias is None else bias.contiguous()


def _are_dense(a: Quantized, b: Quantized, bias: Tensor | None) -> bool:
    same = in_vectors(a.data) is a.data and in_vectors(b.data) is b.data
    return same and (bias is None or bias.is_contiguous())


_gemm = Specialized(_decide_gemm, _key)
_gemm_add_ = Specialized(_decide_sum, _sum_key)


# Registered ops, whose operands are tensors and a format's name


def _gemm_body(
    a: Tensor,
    a_scale: Tensor,
    a_format: str,
    b: Tensor,
    b_scale: Tensor,
    b_format: str,
    bias: Tensor | None,
    out_dtype: torch.dtype,
) -> Tensor:
    left, right = Quantized(a, a_scale, named(a_format)), Quantized(b, b_scale, named(b_format))
    return _gemm.find(left, right, bias, out_dtype)(left, right, bias, out_dtype)


def _gemm_add_body(
    out: Tensor,
    a: Tensor,
    a_scale: Tensor,
    a_format: str,
    b: Tensor,
    b_scale: Tensor,
    b_format: str,
) -> None:
    left, right = Quantized(a, a_scale, named(a_format)), Quantized(b, b_scale, named(b_format))
    _gemm_add_.find(out, left, right)(out, left, right)


_OPERANDS = "Tensor a, Tensor a_scale, str a_format, Tensor b, Tensor b_scale, str b_format"
_gemm_op = torch.library.custom_op(
    "blocktensor::gemm",
    _gemm_body,
    mutates_args=(),
    schema=f"({_OPERANDS}, Tensor? bias, ScalarType out_dtype) -> Tensor",
)
_gemm_add_op = torch.library.custom_op(
    "blocktensor::gemm_add_",
    _gemm_add_body,
    mutates_args=("out",),
    schema=f"(Tensor(a!) out, {_OPERANDS}) -> ()",
)


@_gemm_op.register_fake
def _(
    a: Tensor,
    a_scale: Tensor,
    a_format: str,
    b: Tensor,
    b_scale: Tensor,
    b_format: str,
    bias: Tensor | None,
    out_dtype: torch.dtype,
) -> Tensor:
    return torch.empty((a.shape[0], b.shape[0]), dtype=out_dtype, device=a.device)


@_gemm_add_op.register_fake
def _(out: Tensor, *operands: Any) -> None:
    return None


@register_flop_formula(torch.ops.blocktensor.gemm)
def _gemm_flops(a_shape: Any, a_scale: Any, _: str, b_shape: Any, *__: Any, **___: Any) -> int:
    return 2 * a_shape[0] * b_shape[0] * a_shape[1]


@register_flop_formula(torch.ops.blocktensor.gemm_add_)
def _gemm_add_flops(out: Any, *operands: Any, **_: Any) -> int:
    return _gemm_flops(*operands)
