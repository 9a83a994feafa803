"""Define AdaptedWeight: an FP8 weight plus low-rank products, which only matmuls apply.

Adapters (LoRA) replace a weight ``w`` by ``w + s b a`` with thin ``b`` and ``a``. The sum has the
size of the weight in high precision, and a stack of experts is most of a model. A matmul with an
AdaptedWeight computes ``x wᵀ`` in FP8 and adds ``s (x aᵀ) bᵀ`` (``autograd/low_rank.py``). Views
swap or select the matrices; ``dequantize`` computes the sum; all other ops raise.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor
from torch.compiler import is_compiling

from ..ops.runtime.specialize import PLAIN
from .base import FP8Base, wrapper
from .refusals import with_remedy
from .torch_internals.frames import is_in_joint_graph, never_compiled, only_inlined


class LowRank(NamedTuple):
    """The product ``scaling * b a``.

    Attributes:
        b: ``[N, r]``, or ``[E, N, r]`` for a stack; in high precision, any strides.
        a: ``[r, K]``, or ``[E, r, K]``.
        scaling: a number.
    """

    b: Tensor
    a: Tensor
    scaling: float

    def product(self, dtype: torch.dtype) -> Tensor:
        """Return the product in ``dtype``, of the size of the weight."""
        return torch.matmul(self.b.to(dtype), self.a.to(dtype)) * self.scaling


WITH_ADAPTERS: dict[Any, Callable[..., Tensor]] = {}
"""Functions that multiply by weights with adapters, by torch's; ``registration.py`` fills it."""


class _WithinGraphs:
    """A method that weights whose terms are trained have only within a graph that compilers trace.

    As an input or output of a graph, such a weight would be cut off from the gradients of its
    terms. Dynamo takes an input without this method for an object that it cannot trace, and breaks
    the graph. AOTAutograd calls the method of outputs.
    """

    def __init__(self, method: Callable[..., Any]) -> None:
        self.method = method

    @only_inlined
    def __get__(self, weight: AdaptedWeight | None, owner: type) -> Any:
        if weight is None:
            return self.method
        trained = [x for term in weight.terms for x in term[:2] if x.requires_grad]
        if any(type(x) in PLAIN for x in trained):
            raise AttributeError("__tensor_flatten__")
        if any(map(is_in_joint_graph, trained)):
            raise NotImplementedError(
                f"an AdaptedWeight {list(weight.shape)} is a result of a compiled graph, which "
                f"would cut its low-rank matrices off from their gradients: compile its matmuls in "
                f"the same graph, without a graph break between, or make it in a function with "
                f"torch.compiler.disable; if peft was imported after the conversion, import "
                f"blocktensor.integrations.peft"
            )
        return self.method.__get__(weight, owner)


class AdaptedWeight(FP8Base):
    """An FP8 weight ``base`` plus low-rank terms: ``base + sum(s b a)``.

    Gradients reach b and a of the terms directly: the tensor itself is no part of autograd's graph.

    Attributes:
        base: BlockwiseFP8Tensor or BlockwiseFP8Weight, ``[N, K]`` or ``[E, N, K]``.
        scalings: of the terms.
        b0, a0, b1, ...: the matrices of the terms; compilers see each as an inner tensor.
        _transposed_from: the weight whose transpose this is: models transpose a stack, and the
            grouped matmul transposes it back.
    """

    base: Any
    scalings: tuple[float, ...]
    _transposed_from: AdaptedWeight | None = None

    @staticmethod
    @only_inlined
    def __new__(cls, base: Any, terms: Sequence[LowRank]) -> AdaptedWeight:
        """Adapt ``base``; no memory is allocated.

        Raises:
            ValueError: the shapes of a term do not fit the weight, or its matrices are no tensors
                of the weight's device.
        """
        # Every attribute of a subclass would otherwise pass through __torch_function__.
        with torch._C.DisableTorchFunctionSubclass():
            for b, a, _ in terms:
                fits = b.ndim == a.ndim == base.ndim and b.shape[-1] == a.shape[-2]
                if not fits or (*b.shape[:-1], a.shape[-1]) != tuple(base.shape):
                    raise ValueError(
                        f"low-rank matrices {list(b.shape)} and {list(a.shape)} for an FP8 weight "
                        f"{list(base.shape)}: expected [..., N, r] and [..., r, K] for a weight "
                        f"[..., N, K]"
                    )
                if b.device != base.device or a.device != base.device:
                    raise ValueError(
                        f"low-rank matrices on {b.device} and {a.device} for an FP8 weight on "
                        f"{base.device}: move the adapter to {base.device}"
                    )
            layout = {"strides": base.stride(), "dtype": base.dtype, "device": base.device}
            shape = base.shape
        self: AdaptedWeight = wrapper(cls, shape, **layout)
        self.base = base
        self.scalings = tuple(scaling for _, _, scaling in terms)
        for i, (b, a, _) in enumerate(terms):
            setattr(self, f"b{i}", b)
            setattr(self, f"a{i}", a)
        return self

    @property
    @only_inlined
    def terms(self) -> list[LowRank]:
        """The :class:`LowRank` products, in the order in which matmuls add them."""
        made = []
        for i, scaling in enumerate(self.scalings):
            made.append(LowRank(getattr(self, f"b{i}"), getattr(self, f"a{i}"), scaling))
        return made

    @_WithinGraphs
    def __tensor_flatten__(self) -> tuple[list[str], tuple[float, ...]]:
        names = [f"{x}{i}" for i in range(len(self.scalings)) for x in "ba"]
        return ["base", *names], self.scalings

    @staticmethod
    def __tensor_unflatten__(
        inner: dict[str, Tensor], context: Any, size: Sequence[int], stride: Sequence[int]
    ) -> AdaptedWeight:
        terms = [LowRank(inner[f"b{i}"], inner[f"a{i}"], s) for i, s in enumerate(context)]
        return AdaptedWeight(inner["base"], terms)

    @property
    def recipe(self) -> Any:
        """The recipe of the weight's casts."""
        return self.base.recipe

    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:
        """Return the sum as a plain tensor, in ``dtype`` or ``self.dtype``; differentiable."""
        values: Tensor = self.base.dequantize(dtype)
        for term in self.terms:
            values = values + term.product(values.dtype)
        return values

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        ranks = "+".join(str(term.a.shape[-2]) for term in self.terms)
        return f"AdaptedWeight({self.base!r}, ranks={ranks})"

    @classmethod
    @never_compiled
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        view = _VIEWS.get(func)
        if view is not None and isinstance(args[0], AdaptedWeight):
            return view(*args, **(kwargs or {}))
        return super().__torch_function__(func, types, args, kwargs)

    @classmethod
    def _other_op(cls, func: Any, args: Any, kwargs: Any) -> NoReturn:
        raise with_remedy(
            f"{func} is not implemented for an AdaptedWeight, an FP8 weight with an adapter whose "
            f"sum only matmuls apply: multiply by it (torch.nn.functional.linear and grouped_mm, "
            f"torch.matmul, bmm), one matrix of a stack at a time (w[i]) too; call .dequantize() "
            f"to compute the sum in high precision; or merge the adapter after "
            f"blocktensor.unfreeze(model)"
        )


def _transposed(w: AdaptedWeight) -> AdaptedWeight:
    if w._transposed_from is not None:
        return w._transposed_from
    terms = [LowRank(a.transpose(-2, -1), b.transpose(-2, -1), s) for b, a, s in w.terms]
    made = AdaptedWeight(w.base.transpose(-2, -1), terms)
    if not is_compiling():
        made._transposed_from = w
    return made


def _transpose(w: AdaptedWeight, dim0: int, dim1: int) -> AdaptedWeight:
    dims = {dim0 % w.ndim, dim1 % w.ndim}
    if dims == {w.ndim - 2, w.ndim - 1}:
        return _transposed(w)
    w._other_op(f"transpose({dim0}, {dim1})", (), {})


def _permute(w: AdaptedWeight, *dims: Any) -> AdaptedWeight:
    order = dims[0] if len(dims) == 1 else dims
    if [d % w.ndim for d in order] == [*range(w.ndim - 2), w.ndim - 1, w.ndim - 2]:
        return _transposed(w)
    w._other_op(f"permute({order})", (), {})


def _matrix_transposed(w: AdaptedWeight) -> AdaptedWeight:
    return _transpose(w, 0, 1)  # refuses a stack


def _item(w: AdaptedWeight, index: Any) -> AdaptedWeight:
    """Return one matrix of a stack; other indices raise, of the stack without adapters too."""
    base = w.base[index]
    if w.ndim != 3 or base.ndim != 2:
        w._other_op(f"w[{index!r}]", (), {})
    return AdaptedWeight(base, [LowRank(b[index], a[index], s) for b, a, s in w.terms])


def _select(w: AdaptedWeight, dim: int, index: int) -> AdaptedWeight:
    if dim % w.ndim:
        w._other_op(f"select({dim}, {index})", (), {})
    return _item(w, index)


def _converted(convert: Callable[..., Any], w: AdaptedWeight, *args: Any, **how: Any) -> Any:
    """Convert the dtype of the base; matmuls convert the terms to the dtype of their input."""
    base = convert(w.base, *args, **how)
    return w if base is w.base else AdaptedWeight(base, w.terms)


_VIEWS: dict[Any, Callable[..., Any]] = {
    **dict.fromkeys((torch.transpose, Tensor.transpose), _transpose),
    **dict.fromkeys((torch.swapaxes, Tensor.swapaxes), _transpose),
    **dict.fromkeys((torch.permute, Tensor.permute), _permute),
    # Dynamo calls the ops in place of these attributes, from torch 2.14 on
    **dict.fromkeys((Tensor.mT.__get__, torch.ops.aten.mT), _transposed),  # type: ignore[attr-defined]
    **dict.fromkeys((Tensor.T.__get__, torch.ops.aten.numpy_T), _matrix_transposed),  # type: ignore[attr-defined]
    **dict.fromkeys((torch.t, Tensor.t), _matrix_transposed),
    **dict.fromkeys((torch.select, Tensor.select), _select),
    Tensor.__getitem__: _item,
    **{
        convert: functools.partial(_converted, convert)
        for convert in (Tensor.to, Tensor.type_as, Tensor.bfloat16, Tensor.half, Tensor.float)
    },
}
"""Views and conversions, above autograd: below it the terms would lose their gradients."""
