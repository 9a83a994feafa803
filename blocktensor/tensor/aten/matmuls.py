"""Multiply FP8 tensors below autograd, for callers such as DTensor's local ops."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import Tensor

from ...ops import checks
from ...ops.gemm.ops import gemm
from ..arithmetic import is_arithmetic
from ..base import FP8Base, implements, on_master
from ..fp8_tensor import ATEN_OPS, BlockwiseFP8Tensor
from ..refusals import check_grid, check_scaling, refuse, refuse_matmul, refuse_torch_func
from ..torch_internals.callers import in_torch_func
from ..weight import WEIGHT_OPS, BlockwiseFP8Weight, computed_weights

aten = torch.ops.aten


def _fp8(x: Tensor) -> BlockwiseFP8Tensor | None:
    if isinstance(x, BlockwiseFP8Weight):
        return x._quantized()
    return x if isinstance(x, BlockwiseFP8Tensor) else None


def _multiply(a: Tensor, b: Tensor, bias: Tensor | None = None) -> Tensor:
    """Multiply ``a[M, K] b[K, N] (+ bias[N])``: the gemm of a's rowwise and b's columnwise form.

    At least one operand is FP8; the other is cast as an activation.

    Raises:
        ValueError: shapes, devices or scale rounding that do not fit, or a form that is missing.
    """
    if isinstance(b, BlockwiseFP8Weight):
        check_grid(b, b.recipe, not b.transposed)  # b is the transpose of a layer's weight
    left, right = _fp8(a), _fp8(b)
    known = left if right is None else right
    assert known is not None
    recipe = known.recipe
    if left is None:
        left = BlockwiseFP8Tensor.from_values(a, recipe.activation_format, recipe, columnwise=False)
    if right is None:
        right = BlockwiseFP8Tensor.from_values(b, recipe.activation_format, recipe, rowwise=False)
    for operand, what in ((left, "the left operand"), (right, "the right operand")):
        checks.rank(operand, (2,), what, "FP8 matmuls take matrices")
    if left.shape[1] != right.shape[0]:
        raise ValueError(
            f"cannot multiply {list(left.shape)} by {list(right.shape)}: the inner sizes "
            f"{left.shape[1]} and {right.shape[0]} differ"
        )
    check_scaling(recipe, left.format)
    check_scaling(recipe, right.format)
    checks.same_device(left, right, "the left operand", "the right operand")
    if bias is not None:
        checks.bias_of(bias, right.shape[1:], left, "the left operand")
    return gemm(left.rowwise(), right.columnwise(), bias, a.dtype, recipe.batch_invariant)


def _refuse_untracked(func: Any, *operands: Tensor) -> None:
    """Refuse a weight in an aten matmul under autograd: its gradient would be in high precision.

    So would the gradient of a weight in a DTensor or under functorch, where ``requires_grad`` is
    False here. Under functorch the grad mode is off here, too.
    """
    if not any(isinstance(x, BlockwiseFP8Weight) for x in operands):
        return
    if in_torch_func():
        refuse_torch_func()
    if torch.is_grad_enabled():
        raise NotImplementedError(
            f"{func} reached a BlockwiseFP8Weight below F.linear, torch.mm, torch.matmul and "
            f"torch.addmm, where its gradient would silently be computed in high precision (as "
            f"under DTensor and nested tensors): call one of those on plain "
            f"activations, or leave this module unconverted (skip=[...])"
        )


def _overloads(names: str) -> list[Any]:
    """Return all overloads of these ops that this version of torch has."""
    packets = [getattr(aten, name) for name in names.split() if hasattr(aten, name)]
    return [getattr(packet, name) for packet in packets for name in packet.overloads()]


_OF_LAYERS = _overloads(
    "linear bilinear _trilinear _int_mm _scaled_mm _grouped_mm _scaled_grouped_mm "
    "_addmm_activation mm_backward linear_backward matmul_backward convolution _convolution "
    "conv1d conv2d conv3d conv_tbc conv_transpose1d conv_transpose2d conv_transpose3d lstm gru "
    "rnn_tanh rnn_relu lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell scaled_dot_product_attention"
)
_OF_MATRICES = _overloads(
    "mm addmm addmm_ matmul bmm baddbmm baddbmm_ addbmm addbmm_ mv addmv addmv_ addr addr_ dot "
    "vdot inner ger outer kron einsum tensordot chain_matmul linalg_multi_dot linalg_matmul "
    "linalg_vecdot matrix_power linalg_matrix_power cdist"
)
"""Ops that refuse a BlockwiseFP8Weight, unless they are entered again below or are arithmetic on
its values."""


def _unless_arithmetic(matmul: Callable[..., Any]) -> Callable[..., Any]:
    """Compute on masters if the op is not a layer's matmul (``tensor/arithmetic.py``)."""

    @functools.wraps(matmul)
    def run(func: Any, *args: Any, **kwargs: Any) -> Any:
        # with gradients, a gradient of this weight may be recorded elsewhere (DTensor, torch.func)
        if not torch.is_grad_enabled():
            leaves = torch.utils._pytree.tree_leaves((args, kwargs))
            if is_arithmetic([x for x in leaves if isinstance(x, Tensor)]):
                return on_master(func, args, kwargs)
        return matmul(func, *args, **kwargs)

    return run


# by its name: transformers may be imported later
@implements(WEIGHT_OPS, *_OF_LAYERS, "transformers::grouped_mm_fallback")
def _unsupported_matmul(func: Any, *args: Any, **kwargs: Any) -> NoReturn:
    if in_torch_func():
        refuse_torch_func()
    refuse_matmul(func)


implements(WEIGHT_OPS, *_OF_MATRICES)(_unless_arithmetic(_unsupported_matmul))


def _of_both(*ops: Any) -> Callable[..., Any]:
    """Enter the implementation of a matmul for both types."""
    return lambda matmul: implements(ATEN_OPS, *ops)(implements(WEIGHT_OPS, *ops)(matmul))


@_of_both(aten.mm.default)
@_unless_arithmetic
def _mm(func: Any, a: Tensor, b: Tensor) -> Tensor:
    _refuse_untracked(func, a, b)
    return _multiply(a, b)


@_of_both(aten.matmul.default)  # composite ops arrive whole under inference_mode
@_unless_arithmetic
def _matmul(func: Any, a: Tensor, b: Tensor) -> Tensor:
    if b.ndim != 2:
        _unsupported_matmul(func)
    return _mm(func, a.reshape(-1, a.shape[-1]), b).view(*a.shape[:-1], b.shape[1])


@_of_both(aten.linear.default)
def _linear(func: Any, x: Tensor, w: Tensor, bias: Tensor | None = None) -> Tensor:
    _refuse_untracked(func, x, w)
    if isinstance(bias, FP8Base):
        refuse(func)
    return _multiply(x.reshape(-1, x.shape[-1]), w.t(), bias).view(*x.shape[:-1], w.shape[0])


@_of_both(aten.addmm.default)
@_unless_arithmetic
def _addmm(
    func: Any, bias: Tensor, a: Tensor, b: Tensor, *, beta: Any = 1, alpha: Any = 1
) -> Tensor:
    if isinstance(bias, FP8Base):
        return _added(func, bias, a, b, beta=beta, alpha=alpha)
    _refuse_untracked(func, a, b)
    if bias.ndim == 1 and beta == 1 and alpha == 1:
        return _multiply(a, b, bias)
    return _multiply(a, b).mul_(alpha).add_(bias, alpha=beta)


_SUMS_OF_MATMULS = _overloads("addmm_ baddbmm baddbmm_ addbmm addbmm_ addr addr_")


@_of_both(*_SUMS_OF_MATMULS)
@_unless_arithmetic
def _added(func: Any, *args: Any, **kwargs: Any) -> Any:
    """Add a matmul of plain tensors to a weight, as arithmetic on the weight."""
    if any(isinstance(x, FP8Base) for x in args[1:]):
        _unsupported_matmul(func)
    if isinstance(args[0], BlockwiseFP8Weight):
        return computed_weights(on_master(func, args, kwargs), args)
    return _computed(func, *args, **kwargs)


@implements(ATEN_OPS, aten.add.Tensor, aten.sub.Tensor)
def _computed(func: Any, *args: Any, **kwargs: Any) -> BlockwiseFP8Weight:
    """Return the sum of a frozen weight and plain values, such as an adapter's, as an FP8 weight.

    Also without a gradient, so that matmuls with the sum run in FP8.
    """
    frozen = [x for x in args if isinstance(x, BlockwiseFP8Tensor)]
    if func._schema.is_mutable or len(frozen) != 1 or not frozen[0].format.transposes:
        refuse(func)
    weight = frozen[0]
    values = (x.dequantize() if x is weight else x for x in args)
    out = func(*values, **kwargs)
    if out.shape != weight.shape or out.dtype not in checks.HIGH_PRECISION:
        refuse(func)
    return BlockwiseFP8Weight(out, weight.recipe)
