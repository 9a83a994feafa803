"""BlockwiseFP8Tensor: a matrix in blockwise FP8, with up to two forms of its bytes.

A matrix ``x[M, K]`` has a *rowwise* form (data ``[M, K]`` contiguous, blocks along K) and a
*columnwise* form (data ``[K, M]`` contiguous, blocks along M): FP8 tensor cores read operands
contiguous along the contraction only. ``x.t()`` swaps the labels and moves no data, so that one
rule serves every product::

    scaled_mm(a, b) = gemm(a.rowwise, b.columnwise)

128x128 blocks transpose exactly, so either form is derived from the other on demand. 1x128 blocks
do not: their two forms are two casts of the high-precision tensor, made together or not at all.
"""

from __future__ import annotations

import functools
import importlib.metadata
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor

from .forms import Forms
from .ops import checks, library
from .ops.layouts import ROWWISE_BLOCK, SQUARE_BLOCK, Form
from .ops.pinned import Ops
from .recipe import DEFAULT_RECIPE, Recipe

TORCH_FUNCTIONS: dict[Any, Callable[..., Any]] = {}
"""Overrides above autograd for both FP8 types; filled by ``overrides.py``."""

ATEN_OPS: dict[Any, Callable[..., Any]] = {}
"""What BlockwiseFP8Tensor does below autograd; filled by ``dispatch.py``."""

_INNER = ("rowwise_data", "rowwise_scale", "columnwise_data", "columnwise_scale")

_GRAD: Any = Tensor.grad  # the descriptor


@functools.cache
def _version() -> str:
    """Of this package: what its products compile to may change with it."""
    try:
        return importlib.metadata.version("blocktensor")
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


class FP8Type(Tensor):
    """What the two FP8 types share: overrides above autograd, and no base-class constructor."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__()

    @classmethod
    def wrapper_of(cls, inner: Tensor, dtype: torch.dtype) -> Any:
        """A tensor of this class that is laid out as ``inner`` and shows ``dtype``."""
        return torch.Tensor._make_wrapper_subclass(
            cls,
            inner.shape,
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
            dtype=dtype,
            device=inner.device,
        )

    # Optimizers read and reset it for every weight in every step: here it takes a quarter of the
    # time that the way through __torch_function__ does.
    @property
    def grad(self) -> Tensor | None:
        """The gradient, as any tensor's."""
        with torch._C.DisableTorchFunctionSubclass():
            grad: Tensor | None = _GRAD.__get__(self)
            return grad

    @grad.setter
    def grad(self, grad: Tensor | None) -> None:
        with torch._C.DisableTorchFunctionSubclass():
            _GRAD.__set__(self, grad)

    @grad.deleter
    def grad(self) -> None:
        self.grad = None

    def _stable_hash_for_caching(self) -> str:
        """What torch's compile cache must know of it: what it is made of, never values."""
        names, context = self.__tensor_flatten__()  # type: ignore[attr-defined]
        inner = [getattr(self, name) for name in names]
        layouts = [(x.shape, x.stride(), x.dtype, x.device) for x in inner]
        known = (type(self).__name__, self.dtype, self.requires_grad, names, layouts, context)
        return repr((known, _version()))

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        override = TORCH_FUNCTIONS.get(func)
        if override is not None:
            return override(*args, **kwargs) if kwargs else override(*args)
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


class BlockwiseFP8Tensor(Forms, FP8Type):
    """A matrix (or a stack of weight matrices) held in blockwise FP8. Immutable but for ``copy_``.

    To autograd it looks like a tensor of ``dtype`` (bf16, fp16 or fp32); its bytes are e4m3.
    Products keep it in FP8; anything it cannot do in FP8 raises and says ``.dequantize()``.

    Attributes:
        rowwise_data, rowwise_scale: ``[M, K]`` e4m3 and fp32 scales, or None.
        columnwise_data, columnwise_scale: ``[K, M]`` e4m3 and fp32 scales, or None.
        block_shape: ``(1, 128)`` (activations, gradients) or ``(128, 128)`` (weights).
        recipe: the :class:`~blocktensor.Recipe` it was cast with.

    A 1x128 tensor with leading dimensions ``[..., K]`` holds its bytes flattened to ``[M, K]``; a
    128x128 tensor may be a stack ``[E, N, K]``.
    """

    @staticmethod
    def __new__(
        cls,
        rowwise: Form | None,
        columnwise: Form | None,
        *,
        shape: Sequence[int],
        dtype: torch.dtype,
        block_shape: tuple[int, int],
        recipe: Recipe = DEFAULT_RECIPE,
        strides: Sequence[int] | None = None,
    ) -> BlockwiseFP8Tensor:
        """Wrap finished casts; most callers want :meth:`quantize`.

        Args:
            rowwise, columnwise: (data, scale) of each form that exists; at least one.
            shape: logical shape; for 1x128 blocks any ``[..., K]`` over the rows of the data.
            dtype: the high-precision dtype to show to autograd and to produce.
            block_shape: ``(1, 128)`` or ``(128, 128)``.
            recipe: how the casts were made.
            strides: logical strides; contiguous by default.

        Raises:
            ValueError, TypeError: data, scales and shape that do not fit each other.
        """
        present = rowwise or columnwise
        if present is None:
            raise ValueError(
                "BlockwiseFP8Tensor needs a rowwise or a columnwise form, got neither; "
                "BlockwiseFP8Tensor.quantize(x) makes them"
            )
        self = torch.Tensor._make_wrapper_subclass(
            cls,
            shape,
            strides=strides,  # None: contiguous
            dtype=dtype,
            device=present[0].device,
        )
        self.rowwise_data, self.rowwise_scale = rowwise or (None, None)
        self.columnwise_data, self.columnwise_scale = columnwise or (None, None)
        self.block_shape = block_shape
        self.recipe = recipe
        return self

    @classmethod
    def from_data(
        cls,
        rowwise_data: Tensor,
        rowwise_scale: Tensor,
        *,
        block_shape: tuple[int, int],
        dtype: torch.dtype = torch.bfloat16,
        recipe: Recipe = DEFAULT_RECIPE,
    ) -> BlockwiseFP8Tensor:
        """A tensor from existing FP8 bytes and scales (value = data * scale), e.g. a checkpoint's.

        Args:
            rowwise_data: e4m3 ``[M, K]``, or ``[E, N, K]`` with 128x128 blocks.
            rowwise_scale: fp32 ``[M, K/128]`` or ``[..., N/128, K/128]`` (rounded up).
            block_shape: ``(1, 128)`` or ``(128, 128)``.
            dtype: the high-precision dtype it stands for.

        Raises:
            TypeError, ValueError: wrong dtypes, ranks, devices, or a scale of another shape.
        """
        checks.block_shape(block_shape)
        checks.cast_data(rowwise_data, rowwise_scale, block_shape)
        checks.gemm_output(dtype)
        form = (
            rowwise_data.contiguous(),
            checks.laid_out(rowwise_scale, rowwise_data, block_shape),
        )
        return cls(
            form,
            None,
            shape=rowwise_data.shape,
            dtype=dtype,
            block_shape=block_shape,
            recipe=recipe,
        )

    @classmethod
    def quantize(
        cls,
        x: Tensor,
        block_shape: tuple[int, int] = ROWWISE_BLOCK,
        recipe: Recipe = DEFAULT_RECIPE,
        *,
        rowwise: bool = True,
        columnwise: bool = True,
    ) -> BlockwiseFP8Tensor:
        """Cast a high-precision tensor; not differentiable (:func:`blocktensor.quantize` is).

        Args:
            x: bf16, fp16 or fp32: ``[..., K]`` for 1x128 blocks, ``[N, K]`` or ``[E, N, K]`` for
                128x128 blocks; any strides.
            rowwise, columnwise: which forms of 1x128 blocks to make (128x128: always rowwise).

        Raises:
            TypeError, ValueError: another dtype, rank or block shape.
        """
        checks.block_shape(block_shape)
        shape: dict[str, Any] = {
            "shape": x.shape,
            "dtype": x.dtype,
            "block_shape": block_shape,
            "recipe": recipe,
        }
        if block_shape == SQUARE_BLOCK:
            return cls(library.quantize_square(x, recipe.power_of_two), None, **shape)
        if not (rowwise or columnwise):
            raise ValueError("quantize(rowwise=False, columnwise=False) makes nothing: pick a form")
        return cls(*rowwise_block_forms(x, recipe, rowwise, columnwise), **shape)

    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:
        """``data * scale`` as a plain tensor of the logical shape, in ``dtype`` or ``self.dtype``.

        Read from the rowwise form, or the columnwise one where that is all there is.
        """
        if self.rowwise_data is not None and self.rowwise_scale is not None:
            value = library.dequantize(self.rowwise_data, self.rowwise_scale, dtype or self.dtype)
        else:
            data, scale = self.columnwise()
            value = library.dequantize(data, scale, dtype or self.dtype).transpose(-1, -2)
        return value.reshape(self.shape)

    def relabel(
        self,
        *,
        shape: Sequence[int] | None = None,
        strides: Sequence[int] | None = None,
        transpose: bool = False,
    ) -> BlockwiseFP8Tensor:
        """The same bytes under another shape (by default contiguous) or orientation."""
        rowwise, columnwise = self.forms()
        return BlockwiseFP8Tensor(
            columnwise if transpose else rowwise,
            rowwise if transpose else columnwise,
            shape=self.shape if shape is None else shape,
            strides=self.stride() if shape is None else strides,
            dtype=self.dtype,
            block_shape=self.block_shape,
            recipe=self.recipe,
        )

    def __tensor_flatten__(self) -> tuple[list[str], tuple[Any, ...]]:
        names = [name for name in _INNER if getattr(self, name) is not None]
        return names, (self.dtype, self.block_shape, self.recipe)

    @staticmethod
    def __tensor_unflatten__(
        inner: dict[str, Tensor],
        context: tuple[Any, ...],
        outer_size: Sequence[int],
        outer_stride: Sequence[int],
    ) -> BlockwiseFP8Tensor:
        dtype, block_shape, recipe = context
        forms = [
            (inner[f"{side}_data"], inner[f"{side}_scale"]) if f"{side}_data" in inner else None
            for side in ("rowwise", "columnwise")
        ]
        return BlockwiseFP8Tensor(
            forms[0],
            forms[1],
            shape=outer_size,
            strides=outer_stride,
            dtype=dtype,
            block_shape=block_shape,
            recipe=recipe,
        )

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        forms = "+".join(
            side
            for side in ("rowwise", "columnwise")
            if getattr(self, f"{side}_data", None) is not None
        )
        grad = ", requires_grad=True" if self.requires_grad else ""
        return (
            f"BlockwiseFP8Tensor(shape={list(self.shape)}, dtype={self.dtype}, "
            f"block_shape={self.block_shape}, scale={self.recipe.scale!r}, forms={forms}, "
            f"device={str(self.device)!r}{grad})"
        )

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        implementation = ATEN_OPS.get(func)
        if implementation is None:
            refuse(func)
        return implementation(func, *args, **(kwargs or {}))


def refuse(func: Any) -> NoReturn:
    """Raise for an op that FP8 bytes cannot serve: never a silent dequantize."""
    writes = (
        "; to write to a frozen weight (merge an adapter into it, say), call "
        "blocktensor.unfreeze(model) first and blocktensor.freeze(model) after"
    )
    raise NotImplementedError(
        f"{func} is not implemented for BlockwiseFP8Tensor, which keeps its values in FP8: call "
        f".dequantize() first to work on a plain tensor{writes if func._schema.is_mutable else ''}"
    )


def as_matrix(x: Tensor) -> Tensor:
    """``x[..., K]`` with its leading dimensions flattened.

    Raises:
        ValueError: a scalar.
    """
    if x.ndim == 2:
        return x
    if x.ndim == 0:
        raise ValueError("cannot quantize a scalar in 1x128 blocks: expected shape [..., K]")
    return x.flatten(0, -2) if x.ndim > 2 else x.unsqueeze(0)


def rowwise_block_forms(
    x: Tensor, recipe: Recipe, rowwise: bool, columnwise: bool, ops: Ops = library
) -> tuple[Form | None, Form | None]:
    """The forms asked for of ``x[..., K]`` in 1x128 blocks, leading dimensions flattened."""
    x = as_matrix(x)
    if rowwise and columnwise:
        made = ops.quantize_both(x, recipe.power_of_two)
        return made[:2], made[2:]
    if rowwise:
        return ops.quantize_rowwise(x, recipe.power_of_two), None
    return None, ops.quantize_columnwise(x, recipe.power_of_two) if columnwise else None


def check_recipes(a: Recipe, b: Recipe) -> None:
    """Two operands round their scales alike, else ValueError."""
    if a.scale != b.scale:
        raise ValueError(
            f"mixed recipes: one operand was cast with Recipe(scale={a.scale!r}), the other with "
            f"Recipe(scale={b.scale!r}); cast both with one recipe, e.g. "
            f"blocktensor.quantize(x, recipe=weight.recipe)"
        )


def scaled_mm(
    a: BlockwiseFP8Tensor,
    b: BlockwiseFP8Tensor,
    *,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """``a[M, K] b[K, N] (+ bias[N])`` in FP8: the gemm of a's rowwise and b's columnwise form.

    Raises:
        ValueError: shapes, devices or scale rounding that do not fit, or a form that is missing.
    """
    for operand, what in ((a, "the left operand"), (b, "the right operand")):
        checks.rank(operand, (2,), what, "FP8 products take matrices")
    if a.shape[1] != b.shape[0]:
        raise ValueError(
            f"cannot multiply {list(a.shape)} by {list(b.shape)}: the inner sizes "
            f"{a.shape[1]} and {b.shape[0]} differ"
        )
    check_recipes(a.recipe, b.recipe)
    return library.gemm(*a.rowwise(), *b.columnwise(), bias=bias, out_dtype=out_dtype or a.dtype)
