"""The ops: checked, registered with torch.library, and callable without its overhead.

A registered op costs tens of microseconds a call in eager mode, so each public function calls the
body directly unless somebody needs to see the op: a compiler, a dispatch mode (tracing, FLOP
counting), a fake or meta tensor. Both ways run the same body.
"""

from __future__ import annotations

from collections.abc import Hashable
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling
from torch.utils.flop_counter import register_flop_formula

from . import backends, checks
from .layouts import Form, empty_rowwise_form, empty_square_form, rows_per_scale, vectorisable
from .prepared import Prepared, Run, prepare

PLAIN = (Tensor, nn.Parameter)
"""Types of tensors that are real: no tracer's stand-ins, no wrappers."""

_dispatch_modes = torch._C._len_torch_dispatch_stack


def is_real(x: Tensor) -> bool:
    """Whether ``x`` is no tracer's stand-in."""
    return type(x) in PLAIN


def must_be_seen(x: Tensor) -> bool:
    """Whether an op on ``x`` must go through the dispatcher: somebody watches, or x has no data."""
    return is_compiling() or type(x) not in PLAIN or x.is_meta or _dispatch_modes() > 0


def _register(run: Prepared, name: str, schema: str, mutates: tuple[str, ...] = ()) -> Any:
    def body(*args: Any) -> Any:
        return run(*args)

    return torch.library.custom_op(
        f"blocktensor::{name}", body, mutates_args=mutates, schema=schema
    )


# Casts


def _kind_of_cast(x: Tensor, power_of_two: bool) -> Hashable:
    return x.shape, x.stride(), x.dtype, x.data_ptr() & 15, x.device, power_of_two


def _kind_of_form(data: Tensor, scale: Tensor, dtype: torch.dtype | None = None) -> Hashable:
    aligned = data.data_ptr() & 15, scale.data_ptr() & 15
    layout = data.shape, data.stride(), scale.shape, scale.stride()
    return layout, data.dtype, scale.dtype, aligned, data.device, dtype


def _matrix_cast(name: str) -> Prepared:
    def prepare_cast(x: Tensor, power_of_two: bool) -> Run:
        _check_matrix(x)
        return prepare(backends.cast_module(x), name, x, power_of_two)

    return Prepared(_kind_of_cast, prepare_cast)


def _prepare_square(x: Tensor, power_of_two: bool) -> Run:
    _check_stack(x)
    return prepare(backends.cast_module(x), "quantize_square", x, power_of_two)


def _prepare_transpose(data: Tensor, scale: Tensor) -> Run:
    return prepare(backends.transpose_module(data), "transpose_square", data, scale)


def _prepare_dequantize(data: Tensor, scale: Tensor, dtype: torch.dtype) -> Run:
    return prepare(backends.transpose_module(data), "dequantize", data, scale, dtype)


_rowwise = _matrix_cast("quantize_rowwise")
_columnwise = _matrix_cast("quantize_columnwise")
_both = _matrix_cast("quantize_both")
_square = Prepared(_kind_of_cast, _prepare_square)
_transpose = Prepared(_kind_of_form, _prepare_transpose)
_dequantize = Prepared(_kind_of_form, _prepare_dequantize)

_PAIR = "(Tensor x, bool power_of_two) -> (Tensor, Tensor)"
_FOUR = "(Tensor x, bool power_of_two) -> (Tensor, Tensor, Tensor, Tensor)"
_rowwise_op = _register(_rowwise, "quantize_rowwise", _PAIR)
_columnwise_op = _register(_columnwise, "quantize_columnwise", _PAIR)
_both_op = _register(_both, "quantize_both", _FOUR)
_square_op = _register(_square, "quantize_square", _PAIR)
_transpose_op = _register(
    _transpose, "transpose_square", "(Tensor data, Tensor scale) -> (Tensor, Tensor)"
)
_dequantize_op = _register(
    _dequantize, "dequantize", "(Tensor data, Tensor scale, ScalarType dtype) -> Tensor"
)


@_rowwise_op.register_fake
def _(x: Tensor, power_of_two: bool) -> Form:
    return empty_rowwise_form(x.shape[0], x.shape[1], x.device)


@_columnwise_op.register_fake
def _(x: Tensor, power_of_two: bool) -> Form:
    return empty_rowwise_form(x.shape[1], x.shape[0], x.device)


@_both_op.register_fake
def _(x: Tensor, power_of_two: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    m, k = x.shape
    return *empty_rowwise_form(m, k, x.device), *empty_rowwise_form(k, m, x.device)


@_square_op.register_fake
def _(x: Tensor, power_of_two: bool) -> Form:
    return empty_square_form(x.shape, x.device)


@_transpose_op.register_fake
def _(data: Tensor, scale: Tensor) -> Form:
    *lead, n, k = data.shape
    return empty_square_form((*lead, k, n), data.device)


@_dequantize_op.register_fake
def _(data: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.empty(data.shape, dtype=dtype, device=data.device)


def quantize_rowwise(x: Tensor, power_of_two: bool) -> Form:
    """Cast ``x[M, K]`` in 1x128 blocks; see :func:`blocktensor.ops.reference.quantize_rowwise`.

    Raises:
        TypeError, ValueError: ``x`` is not bf16/fp16/fp32, or not a matrix. (So do all casts.)
    """
    if must_be_seen(x):
        _check_matrix(x)
        return _rowwise_op(x, power_of_two)
    return _rowwise(x, power_of_two)


def quantize_columnwise(x: Tensor, power_of_two: bool) -> Form:
    """Cast ``x[M, K]`` in 128x1 blocks, data written ``[K, M]``."""
    if must_be_seen(x):
        _check_matrix(x)
        return _columnwise_op(x, power_of_two)
    return _columnwise(x, power_of_two)


def quantize_both(x: Tensor, power_of_two: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Both casts of ``x[M, K]`` from one read: rowwise data, scale, columnwise data, scale."""
    if must_be_seen(x):
        _check_matrix(x)
        return _both_op(x, power_of_two)
    return _both(x, power_of_two)


def quantize_square(x: Tensor, power_of_two: bool) -> Form:
    """Cast ``x[N, K]`` or ``x[E, N, K]`` in 128x128 blocks."""
    if must_be_seen(x):
        _check_stack(x)
        return _square_op(x, power_of_two)
    return _square(x, power_of_two)


def transpose_square(data: Tensor, scale: Tensor) -> Form:
    """Exact transpose of 128x128 ``data[..., N, K]`` and its scales."""
    return (_transpose_op if must_be_seen(data) else _transpose)(data, scale)


def dequantize(data: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """``data * scale`` in ``dtype``; see :func:`blocktensor.ops.reference.dequantize`."""
    return (_dequantize_op if must_be_seen(data) else _dequantize)(data, scale, dtype)


def _check_matrix(x: Tensor) -> None:
    checks.high_precision(x, "the tensor to quantize")
    checks.rank(
        x, (2,), "the tensor to quantize", "flatten leading dimensions with .flatten(0, -2)"
    )


def _check_stack(x: Tensor) -> None:
    checks.high_precision(x, "the tensor to quantize")
    checks.rank(x, (2, 3), "the tensor to quantize", "128x128 blocks need [N, K] or [E, N, K]")


# GEMM


def _kind_of_gemm(
    a: Tensor,
    a_scale: Tensor,
    b: Tensor,
    b_scale: Tensor,
    bias: Tensor | None,
    out_dtype: torch.dtype,
) -> Hashable:
    # data is e4m3 and contiguous, scales are fp32: the callers' duty
    at = a.data_ptr(), a_scale.data_ptr(), b.data_ptr(), b_scale.data_ptr()
    return (
        a.shape,
        a_scale.shape,
        a_scale.stride(),
        b.shape,
        b_scale.shape,
        b_scale.stride(),
        (at[0] | at[1] | at[2] | at[3]) & 15 and tuple(address & 15 for address in at),
        None if bias is None else (bias.stride(), bias.dtype, bias.data_ptr() & 15),
        out_dtype,
        a.device,
        backends.forced(),
    )


def _prepare_gemm(
    a: Tensor,
    a_scale: Tensor,
    b: Tensor,
    b_scale: Tensor,
    bias: Tensor | None,
    out_dtype: torch.dtype,
) -> Run:
    m, n = a.shape[0], b.shape[0]
    if 0 in (m, n):
        return lambda a, *_: a.new_empty((m, n), dtype=out_dtype)
    module, ready = chosen(a, a_scale, b, b_scale, bias, out_dtype)
    run = prepare(module, "gemm", *ready, out_dtype)
    if _same((a, a_scale, b, b_scale, bias), ready):
        return run
    return lambda a, a_scale, b, b_scale, bias, out_dtype: run(
        *_dense(a, a_scale, b, b_scale, bias), out_dtype
    )


def chosen(
    a: Tensor,
    a_scale: Tensor,
    b: Tensor,
    b_scale: Tensor,
    bias: Tensor | None,
    out_dtype: torch.dtype,
    accumulate: bool = False,
) -> tuple[ModuleType, tuple[Tensor | None, ...]]:
    """The module that runs a product, and the operands and bias as it reads them."""
    given = a, a_scale, b, b_scale, bias
    m, n, bias_dtype = a.shape[0], b.shape[0], None if bias is None else bias.dtype
    blocks = rows_per_scale(m, a_scale), rows_per_scale(n, b_scale)
    problem = backends.GemmProblem(
        m, n, a.shape[1], *blocks, out_dtype, a.device, bias_dtype, accumulate
    )
    name = backends.choose_gemm(problem).name
    return backends.gemm_module(name), given if name == "reference" else _dense(*given)


def _dense(
    a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, bias: Tensor | None
) -> tuple[Tensor | None, ...]:
    """Operands as kernels read them: rows of whole vectors, the bias dense; copies where needed."""
    bias = None if bias is None else bias.contiguous()
    return vectorisable(a), a_scale, vectorisable(b), b_scale, bias


def _same(a: tuple[Tensor | None, ...], b: tuple[Tensor | None, ...]) -> bool:
    return all(x is y for x, y in zip(a, b, strict=True))


def _kind_of_gemm_add_(
    out: Tensor, a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor
) -> Hashable:
    product = _kind_of_gemm(a, a_scale, b, b_scale, None, out.dtype)
    return product, out.stride(), out.data_ptr() & 15


def _prepare_gemm_add_(out: Tensor, a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor) -> Run:
    if 0 in (*out.shape, a.shape[1]):
        return lambda *_: None
    module, ready = chosen(a, a_scale, b, b_scale, None, out.dtype, accumulate=True)
    run = prepare(module, "gemm_add_", out, *ready[:4])
    if _same((a, a_scale, b, b_scale, None), ready):
        return run
    return lambda out, a, a_scale, b, b_scale: run(out, *_dense(a, a_scale, b, b_scale, None)[:4])


_gemm = Prepared(_kind_of_gemm, _prepare_gemm)
_gemm_add_ = Prepared(_kind_of_gemm_add_, _prepare_gemm_add_)
_gemm_op = _register(
    _gemm,
    "gemm",
    "(Tensor a, Tensor a_scale, Tensor b, Tensor b_scale, Tensor? bias, ScalarType out_dtype)"
    " -> Tensor",
)
_gemm_add_op = _register(
    _gemm_add_,
    "gemm_add_",
    "(Tensor(a!) out, Tensor a, Tensor a_scale, Tensor b, Tensor b_scale) -> ()",
    ("out",),
)


@_gemm_op.register_fake
def _(
    a: Tensor,
    a_scale: Tensor,
    b: Tensor,
    b_scale: Tensor,
    bias: Tensor | None,
    out_dtype: torch.dtype,
) -> Tensor:
    return torch.empty((a.shape[0], b.shape[0]), dtype=out_dtype, device=a.device)


@_gemm_add_op.register_fake
def _(out: Tensor, a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor) -> None:
    return None


@register_flop_formula(torch.ops.blocktensor.gemm)
def _gemm_flops(a_shape: Any, a_scale: Any, b_shape: Any, *_: Any, **__: Any) -> int:
    return 2 * a_shape[0] * b_shape[0] * a_shape[1]


@register_flop_formula(torch.ops.blocktensor.gemm_add_)
def _gemm_add_flops(sum: Any, a: Any, a_scale: Any, b: Any, *_: Any, **__: Any) -> int:
    return _gemm_flops(a, a_scale, b)


def gemm(
    a: Tensor,
    a_scale: Tensor,
    b: Tensor,
    b_scale: Tensor,
    *,
    bias: Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
) -> Tensor:
    """``out[M, N] = A[M, K] B[N, K]^T (+ bias[N])`` of e4m3 data with 1x128 or 128x128 scales.

    See :func:`blocktensor.ops.reference.gemm` for the arithmetic.

    Raises:
        TypeError, ValueError: dtypes, shapes, layouts or devices that do not fit together.
    """
    checks.gemm_operand(a, a_scale, "operand a")
    checks.gemm_operand(b, b_scale, "operand b")
    checks.same_k(a, b, "operand a", "operand b")
    checks.same_device(a, b, "operand a", "operand b")
    checks.gemm_output(out_dtype)
    if bias is not None:
        checks.same_device(a, bias, "operand a", "the bias")
        if tuple(bias.shape) != (b.shape[0],):
            raise ValueError(
                f"the bias has shape {list(bias.shape)}: expected [{b.shape[0]}], one entry for "
                f"each output column"
            )
    return gemm_forms((a, a_scale), (b, b_scale), bias, out_dtype)


def gemm_forms(a: Form, b: Form, bias: Tensor | None, out_dtype: torch.dtype) -> Tensor:
    """:func:`gemm` of operands known to fit: made by this package, shapes checked by the caller."""
    return product(*a, *b, bias, out_dtype)


def product(*args: Any) -> Tensor:
    """:func:`gemm_forms` of ``a, a_scale, b, b_scale, bias, out_dtype``."""
    return (_gemm_op if must_be_seen(args[0]) else _gemm)(*args)


def gemm_add_(out: Tensor, a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor) -> Tensor:
    """``out[M, N] += A B^T`` in fp32, in place; returns ``out``.

    Raises:
        TypeError, ValueError: as :func:`gemm`, and unless ``out`` is fp32 ``[M, N]`` with unit
            column stride.
    """
    checks.gemm_operand(a, a_scale, "operand a")
    checks.gemm_operand(b, b_scale, "operand b")
    checks.same_k(a, b, "operand a", "operand b")
    checks.same_device(a, b, "operand a", "operand b")
    checks.same_device(a, out, "operand a", "the output")
    if out.dtype != torch.float32:
        raise TypeError(f"gemm_add_ adds into torch.float32, got an output of {out.dtype}")
    expected = (a.shape[0], b.shape[0])
    if tuple(out.shape) != expected or (out.stride(-1) != 1 and expected[1] > 1):
        raise ValueError(
            f"gemm_add_ needs an output {list(expected)} with rows contiguous, got "
            f"{list(out.shape)} with strides {out.stride()}"
        )
    (_gemm_add_op if must_be_seen(a) else _gemm_add_)(out, a, a_scale, b, b_scale)
    return out
