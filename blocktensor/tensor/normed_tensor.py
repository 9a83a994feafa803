"""The result of an RMS norm in FP8, whose values other ops than FP8 products may read too."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..ops.cast.producer import Forms
from ..ops.runtime.specialize import must_dispatch
from ..recipe import Recipe
from .base import FP8Base
from .fp8_tensor import BlockwiseFP8Tensor
from .norm_call import NormCall
from .operand import operand_of
from .remade import Remade

aten = torch.ops.aten

_PRODUCTS = {
    *(F.linear, torch.matmul, Tensor.matmul, Tensor.__matmul__, Tensor.__rmatmul__),
    *(torch.mm, Tensor.mm, torch.addmm, Tensor.addmm),
}
"""Torch functions that read the forms, if another operand is an FP8 matrix."""

_ATEN_PRODUCTS = {
    *(aten.mm.default, aten.addmm.default, aten.linear.default, aten.matmul.default),
}
_OPERANDS = "norm_x", "norm_weight", "norm_rstd"
_LEADING = {aten.view.default, aten._unsafe_view.default, aten.reshape.default}
_ALIASES = {aten.detach.default, aten.alias.default}


class NormedTensor(BlockwiseFP8Tensor):
    """The cast of an RMS norm for FP8 weights; the norm itself for all other ops.

    A product with an FP8 weight reads the forms that were made with the norm. Any other op reads
    the values, which are computed when the first one asks for them; autograd sees one tensor in
    either case, so that gradients are summed as those of the norm's result are.

    Attributes:
        norm_call: the call of the norm, of detached tensors.
        remade: of a result whose columnwise form backwards make; else None.
    """

    norm_call: NormCall
    remade: Remade | None
    _versions_then: tuple[int, int] | None = None
    _read: Tensor | None = None

    @classmethod
    def of(cls, forms: Forms, norm: NormCall, recipe: Recipe, remakes: bool) -> NormedTensor:
        """The result of a norm with its finished casts.

        ``remakes``: backwards make the columnwise form, which is not among them.
        """
        x, format = norm.x, recipe.activation_format
        formats = format, recipe.wgrad_input_format or format
        made: Any = cls(*forms, shape=x.shape, dtype=x.dtype, recipe=recipe, formats=formats)
        made.norm_call = norm._replace(
            x=x.detach(),
            # backward may run while FSDP2 has freed the norm's own
            weight=norm.weight.detach().clone() if remakes else norm.weight.detach(),
            rstd=None if norm.rstd is None else norm.rstd.detach(),
        )
        made.remade = Remade() if remakes else None
        if not (must_dispatch(x) or x.is_inference()):
            made._versions_then = made._versions()
        return made

    @property
    def serves_wgrad(self) -> bool:
        """True if it holds, or backward makes, what the gradient of a weight reads."""
        return self.columnwise_data is not None or self.remade is not None

    def values(self) -> Tensor:
        """The norm in high precision, a plain tensor without a gradient.

        Raises:
            RuntimeError: as :meth:`unchanged_norm`.
        """
        if self._read is None:
            self._read = self.unchanged_norm().values().reshape(self.shape)
        return self._read

    def unchanged_norm(self) -> NormCall:
        """The call of the norm, for its values.

        Raises:
            RuntimeError: the input or the weight of the norm was changed in place since.
        """
        if self._versions_then not in (None, self._versions()):
            raise RuntimeError(
                f"the input {list(self.norm_call.x.shape)} of a fused norm, or its weight, was "
                f"changed in place before the values of the norm were read: read them first, or "
                f"call blocktensor.unfuse(norm)"
            )
        return self.norm_call

    def _versions(self) -> tuple[int, int]:
        return self.norm_call.x._version, self.norm_call.weight._version

    def relabel(
        self,
        *,
        shape: Sequence[int] | None = None,
        strides: Sequence[int] | None = None,
        transpose: bool = False,
        dtype: torch.dtype | None = None,
    ) -> BlockwiseFP8Tensor:
        """As of any FP8 tensor; another orientation or dtype has the forms alone."""
        if transpose or dtype not in (None, self.dtype):
            return super().relabel(shape=shape, strides=strides, transpose=transpose, dtype=dtype)
        made: Any = NormedTensor(
            *self.operand,
            shape=self.shape if shape is None else shape,
            strides=self.stride() if shape is None else strides,
            dtype=self.dtype,
            recipe=self.recipe,
            formats=self.formats,
        )
        made.norm_call, made.remade = self.norm_call, self.remade
        made._versions_then = self._versions_then
        return made

    def __tensor_flatten__(self) -> tuple[list[str], tuple[Any, ...]]:
        names, context = super().__tensor_flatten__()
        own = [name for name in _OPERANDS if getattr(self, name) is not None]
        call = self.norm_call
        return [*names, *own], (*context, call.kind, call.eps, self.remade is not None)

    norm_x = property(lambda self: self.norm_call.x, doc="Of the call, for __tensor_flatten__.")
    norm_weight = property(lambda self: self.norm_call.weight, doc="Of the call.")
    norm_rstd = property(lambda self: self.norm_call.rstd, doc="Of the call.")

    @staticmethod
    def __tensor_unflatten__(
        inner: dict[str, Tensor], context: Any, size: Sequence[int], stride: Sequence[int]
    ) -> BlockwiseFP8Tensor:
        dtype, formats, recipe, _, kind, eps, remakes = context
        made: Any = NormedTensor(
            *operand_of(inner, *formats),
            shape=size,
            strides=stride,
            dtype=dtype,
            recipe=recipe,
            formats=formats,
        )
        made.norm_call = NormCall(
            inner["norm_x"], inner["norm_weight"], inner.get("norm_rstd"), kind, eps
        )
        made.remade = Remade() if remakes else None
        return made

    # Copies and files of it are those of its values.

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        if not self.is_leaf:
            raise RuntimeError(
                "only tensors that have no graph can be copied deeply: .detach() this one first"
            )
        made: Tensor = memo.setdefault(id(self), self.values().clone())
        return made

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.values().__reduce_ex__(protocol)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return super().__repr__().replace("BlockwiseFP8Tensor", "NormedTensor", 1)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if _meets_fp8(types):
            if func not in _PRODUCTS or _has_stack(args):
                args, kwargs = _map(torch.clone, (args, kwargs or {}))
            return super().__torch_function__(func, types, args, kwargs)
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        if (_meets_fp8(types) and func in _ATEN_PRODUCTS) or _keeps_rows(func, args):
            return super().__torch_dispatch__(func, types, args, kwargs)
        if func._schema.is_mutable and isinstance(args[0], NormedTensor):
            raise NotImplementedError(
                f"{func} writes to the result of a fused norm, which is computed from the norm's "
                f"input: write to a copy, or call blocktensor.unfuse(norm)"
            )
        plain_args, plain_kwargs = _map(NormedTensor.values, (args, kwargs or {}))
        return func(*plain_args, **plain_kwargs)


def readable(x: Tensor) -> Tensor:
    """``x``; of a result of a norm its values, with their gradient, for a function of ours."""
    return x.clone() if isinstance(x, NormedTensor) else x


def _map(function: Callable[[NormedTensor], Tensor], arguments: Any) -> Any:
    """The arguments of an op with ``function`` of every result of a norm."""
    return torch.utils._pytree.tree_map_only(NormedTensor, function, arguments)


def _has_stack(args: Any) -> bool:
    """Whether an operand is a stack of experts, whose products cast rows by groups."""
    return any(isinstance(x, FP8Base) and x.ndim > 2 and not isinstance(x, NormedTensor)
               for x in args)  # fmt: skip


def _meets_fp8(types: Sequence[type]) -> bool:
    """Whether an op has operands of the FP8 types beside results of norms."""
    return any(issubclass(x, FP8Base) and not issubclass(x, NormedTensor) for x in types)


def _keeps_rows(func: Any, args: Any) -> bool:
    """Whether an op returns the same rows, with other leading dimensions at most."""
    if func in _ALIASES:
        return True
    x = args[0] if args else None
    return func in _LEADING and isinstance(x, NormedTensor) and args[1][-1:] == [x.shape[-1]]
