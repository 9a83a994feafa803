"""Define BlockwiseFP8Weight: a trainable parameter that matmuls read in FP8.

It wraps a high-precision ``master``. Optimizers, clipping, initialisation, ``state_dict`` and all
other ops act on the master; ``F.linear``, ``mm``, ``matmul`` and ``addmm`` act on its FP8 form,
which every forward casts and every view of the weight shares.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..ops import checks
from ..ops.formats import BlockFormat, Quantized
from ..ops.runtime.specialize import PLAIN
from ..recipe import DEFAULT_RECIPE, Recipe, check_recipe
from .base import FP8Base, MasterBase, StraightThrough, on_master
from .fp8_tensor import BlockwiseFP8Tensor
from .late_copy import LateCopy
from .operand import Operand
from .refusals import refuse_rebuilding
from .torch_internals.callers import function_runs_forward
from .weight_cache import ForwardCast, FP8Cache

WEIGHT_OPS: dict[Any, Callable[..., Any]] = {}
"""Ops that do not simply run on the master (``tensor/aten``); other libraries' ops by name."""

_aten = torch.ops.aten

NOT_COMPUTED = {
    # rows that an index selects, as in an embedding: activations, maybe with a weight's shape
    _aten.embedding,
    _aten.index,
    _aten.index_select,
    _aten.gather,
    _aten.take,
    _aten.zeros_like,
    _aten.ones_like,
    _aten.full_like,
    _aten.rand_like,
    _aten.randn_like,
    _aten.new_empty,
    _aten.new_ones,
    _aten.new_full,
    _aten.new_empty_strided,
}
"""Ops whose results are plain tensors, whatever their shape."""


class _CacheOfLateCopy:
    """The casts that matmuls of a late copy read; other weights hold their cache."""

    def __get__(self, w: BlockwiseFP8Weight, owner: Any = None) -> FP8Cache:
        assert w._late is not None
        return w._late.read() if isinstance(w._late, LateCopy) else w._late


class BlockwiseFP8Weight(MasterBase):
    """A high-precision parameter whose matmuls run in blockwise FP8 (128x128 blocks).

    Attributes:
        master: the high-precision values, ``[N, K]`` or ``[E, N, K]``, a plain tensor. The master
            of ``weight.to(dtype)`` is created when it is first read (``late_copy.py``).
        recipe: the :class:`~blocktensor.Recipe` of its casts.

    Examples:
        >>> w = nn.Parameter(blocktensor.BlockwiseFP8Weight(torch.randn(256, 512)))
        >>> y = torch.nn.functional.linear(torch.randn(8, 512), w)  # in FP8
        >>> y.sum().backward()
        >>> w.grad.shape, w.grad.dtype
        (torch.Size([256, 512]), torch.float32)
    """

    _ops = WEIGHT_OPS
    cache: FP8Cache = _CacheOfLateCopy()  # type: ignore[assignment]
    _late: LateCopy | FP8Cache | None = None
    """A late copy, instead of a cache; after a copy or pickle, the cache of its values."""
    transposed: bool
    _traced: Tensor | None = None
    """The master of a transposed late copy that a compiler traces: the compiler reads it after the
    trace, when no view can be taken."""

    @staticmethod
    def __new__(
        cls,
        master: Tensor,
        recipe: Recipe | None = None,
        *,
        cache: FP8Cache | None = None,
        transposed: bool = False,
        requires_grad: bool | None = None,
    ) -> BlockwiseFP8Weight:
        """Wrap ``master``; its storage is shared, not copied.

        Args:
            master: bf16, fp16 or fp32, ``[N, K]`` or ``[E, N, K]``; any strides.
            recipe: how it is cast; default ``Recipe()``.
            cache, transposed: for views of a weight: the weight's cache, and whether this view
                is its transpose.
            requires_grad: passed only by frameworks that rebuild a parameter from an FP8 weight.

        Raises:
            TypeError, ValueError: another dtype or rank, or another FP8 type.
            NotImplementedError: a framework rebuilds the weight from plain values.
        """
        if requires_grad is not None:
            # a weight moved to meta would later be rebuilt from plain values
            if not isinstance(master, BlockwiseFP8Weight) or master.is_meta:
                refuse_rebuilding(cls)
            alias = cls(master.master, cache=master.cache, transposed=master.transposed)
            alias.requires_grad_(requires_grad)
            return alias
        if isinstance(master, FP8Base):
            raise TypeError(f"the master of a {cls.__name__} must be plain, got {master!r}")
        if cache is None:
            check_recipe(recipe)
            checks.tensor(master, "the master")
            checks.high_precision(master, "the weight")
            checks.rank(master, (2, 3), "the weight", "FP8 weights are [N, K] or [E, N, K]")
        self = cls._wrapper_of(master, master.dtype)
        self.master = master
        self.cache = FP8Cache(master, recipe or DEFAULT_RECIPE) if cache is None else cache
        self.transposed = transposed
        return self

    @classmethod
    def _of_late_copy(cls, like: Tensor, copy: LateCopy, transposed: bool) -> BlockwiseFP8Weight:
        """Return a weight with the layout of ``like``, which creates its master when first read."""
        self: BlockwiseFP8Weight = cls._wrapper_of(like, copy.dtype, copy.offset)
        self._late, self.transposed = copy, transposed
        return self

    @functools.cached_property
    def master(self) -> Tensor:  # type: ignore[override]
        """The high-precision values, ``[N, K]`` or ``[E, N, K]``, as a plain tensor."""
        # late copies alone compute it here: other weights store it as an attribute
        cache = self._late.own() if isinstance(self._late, LateCopy) else self.cache
        return self._oriented(cache.master) if self._traced is None else self._traced

    @property
    def _readable(self) -> Tensor:
        """The master, for ops that only read it."""
        if "master" in self.__dict__ or not isinstance(self._late, LateCopy):
            return self.master
        return self._oriented(self._late.values())

    @property
    def _cast_from(self) -> Tensor:
        """The tensor from which the weight is cast, in the orientation of the weight."""
        return self._oriented(self.cache.master)

    def _oriented(self, master: Tensor) -> Tensor:
        """Transpose a master of the cache if this view of the weight is transposed."""
        return master.transpose(-1, -2) if self.transposed else master

    def _before_write(self) -> None:
        """Prepare for a write to the master."""
        self.cache._before_write()

    @property
    def recipe(self) -> Recipe:
        """The recipe of its casts."""
        return self.cache.recipe

    @property
    def _counted(self) -> Tensor:
        """The cache's tensor: views of the master that caches make have their own counters."""
        return self.cache.counted

    @property
    def format(self) -> BlockFormat:
        """The format of its casts."""
        return self.cache.format

    @property
    def kind(self) -> object | None:
        """The part of a plan's key for this weight, without its layouts.

        It is the same object for all weights that linear layers read in the same way. None for
        late copies and for masters without memory: then each call makes its own plan.
        """
        if self._late is not None or type(self.master) not in PLAIN:
            return None
        return self.cache.kinds[self.transposed]

    @property
    def operand(self) -> Operand:
        """The FP8 forms of the current weight, cast now."""
        operand = self.cache.cast()
        return operand.transposed() if self.transposed else operand

    def rowwise(self) -> Quantized:
        """Cast the current weight and return the rowwise FP8 form.

        Its data is e4m3 ``[N, K]``, its scale fp32 ``[N/128, K/128]`` (rounded up); a stack has a
        dimension E before them.
        """
        operand = self.cache.cast()
        form = operand.need_columnwise() if self.transposed else operand.rowwise
        assert form is not None  # the cast has this form
        return form

    def _both_forms(self) -> tuple[Quantized, Quantized]:
        """Cast the current weight and return both FP8 forms."""
        operand = self.cache.cast(columnwise=True)
        operand = operand.transposed() if self.transposed else operand
        return operand.need_rowwise(), operand.need_columnwise()

    def columnwise(self, cast: ForwardCast | None = None) -> Quantized:
        """Return the columnwise FP8 form of a forward's cast, or of the current weight.

        Its data is e4m3 ``[K, N]``, its scale fp32 ``[K/128, N/128]`` (rounded up).

        Args:
            cast: of a forward; default: the current weight is cast.

        Raises:
            RuntimeError: the weight was written to since its forward.
        """
        operand = self.cache.get_in_backward(self, cast)
        if self.transposed:
            return operand.rowwise or operand.need_rowwise()
        return operand.columnwise or operand.need_columnwise()

    def high_precision(self) -> Tensor:
        """Return the values as a plain tensor, for intended matmuls in high precision.

        It shares the master's memory. Unlike with ``.master``, its gradient reaches the weight.
        """
        made: Tensor = StraightThrough.apply(self, None, True)
        return made

    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:
        """Return the values of the FP8 form as a plain tensor, in ``dtype`` or ``self.dtype``.

        Differentiable: the gradient passes straight through to the weight.
        """
        made: Tensor = StraightThrough.apply(self, dtype, False)
        return made

    def _values_in(self, dtype: torch.dtype | None) -> Tensor:
        """Return what :meth:`dequantize` returns, without a gradient."""
        return self._quantized()._values_in(dtype)

    def _quantized(self) -> BlockwiseFP8Tensor:
        """Cast the current weight and return it as a BlockwiseFP8Tensor."""
        return BlockwiseFP8Tensor(
            *self.operand,
            shape=self.shape,
            strides=self.stride() if self.transposed else None,
            dtype=self.dtype,
            recipe=self.recipe,
        )

    def _replace_master(self, master: Tensor) -> None:
        """Replace the master by one of the same shape, dtype and device (``weight.data = …``)."""
        self.master = master
        self.cache, self._late = FP8Cache(self._oriented(master), self.recipe), None

    def __tensor_flatten__(self) -> tuple[list[str], tuple[Any, ...]]:
        return ["master"], (self.cache.recipe, self.transposed)

    @staticmethod
    def __tensor_unflatten__(
        inner: dict[str, Tensor], context: Any, size: Sequence[int], stride: Sequence[int]
    ) -> BlockwiseFP8Weight:
        recipe, transposed = context
        master = inner["master"]
        cache = FP8Cache(master.transpose(-1, -2) if transposed else master, recipe)
        return BlockwiseFP8Weight(master, cache=cache, transposed=transposed)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        grad = ", requires_grad=True" if self.requires_grad else ""
        return (
            f"BlockwiseFP8Weight(shape={list(self.shape)}, dtype={self.dtype}, "
            f"scale={self.format.scale_rounding!r}, {self._grid}device={str(self.device)!r}{grad})"
        )

    @property
    def _grid(self) -> str:
        grid = self.recipe.weight_grid
        return "" if grid is None else f"weight_grid={grid!r}, "

    @classmethod
    def _other_op(cls, func: Any, args: Any, kwargs: Any) -> Any:
        out = on_master(func, args, kwargs)
        # results of linalg: decompositions and inverses, whose derivatives multiply by them
        if func.overloadpacket in NOT_COMPUTED or "linalg" in func.__name__:
            return out
        return computed_weights(out, args)


FP8_TYPES = (BlockwiseFP8Weight, BlockwiseFP8Tensor)
"""The types that matmuls read in FP8, trainable and frozen."""


def computed_weights(out: Any, args: Sequence[Any]) -> Any:
    """Make results of autograd ops on a weight weights, if they have its shape.

    So matmuls with ``w + b @ a``, ``w * mask`` or a normalised weight also run in FP8, and so do
    those with a weight that an autograd function computes (straight-through rounding).
    """
    is_recorded = torch.is_grad_enabled()
    if not (is_recorded or function_runs_forward()):
        return out
    tensors = [x for x in torch.utils._pytree.tree_leaves(args) if isinstance(x, Tensor)]
    weights = [x for x in tensors if isinstance(x, BlockwiseFP8Weight)]
    if not weights or (is_recorded and not any(x.requires_grad for x in tensors)):
        return out
    # a list: symbolic sizes have no hash
    shapes, recipe = [x.shape for x in weights], weights[0].recipe

    def typed(x: Any) -> Any:
        is_value = isinstance(x, Tensor) and not isinstance(x, FP8Base)
        is_value = is_value and x.layout == torch.strided  # not w.to_sparse(), say
        if is_value and x.shape in shapes and x.dtype in checks.HIGH_PRECISION:
            return BlockwiseFP8Weight(x, recipe)
        return x

    return torch.utils._pytree.tree_map(typed, out)
