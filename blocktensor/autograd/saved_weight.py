"""Save the weight of a linear layer in forward, and read it in backward.

Inner tensors are saved, not wrappers, so that saved-tensor hooks (offloading, activation
checkpointing) see plain e4m3 and fp32 tensors. The exception is a trainable weight: it is
saved itself, and the graph holds the FP8 form of its forward (``ForwardCast``).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

from torch import Tensor

from ..ops.cast.ops import dequantize, quantize_rowwise, quantize_transpose
from ..ops.formats import BlockFormat, Quantized
from ..tensor.fp8_tensor import BlockwiseFP8Tensor, Generation
from ..tensor.operand import Operand, operand_of
from ..tensor.torch_internals.aot_autograd import kept_in_backward
from ..tensor.weight import FP8_TYPES, BlockwiseFP8Weight
from ..tensor.weight_cache import ForwardCast, FP8Cache
from .plan import Plan

ROWWISE = ("rowwise_data", "rowwise_scale")


class GatheredCast(NamedTuple):
    """The version of a gathered weight that one forward has read."""

    generation: Generation
    version: int


class SavedWeight:
    """The form of a weight that one forward saves for its backward.

    Attributes:
        plan: of the linear layer.
        cache: of a trainable weight.
        cast: the FP8 form of the forward, which the graph holds, or the generation of a gather.
        names: of the inner tensors that were saved; none if the weight itself was.
    """

    __slots__ = ("cache", "cast", "names", "plan")

    def __init__(
        self, plan: Plan, names: tuple[str, ...] = (), cache: FP8Cache | None = None
    ) -> None:
        self.plan, self.names, self.cache = plan, names, cache
        self.cast: ForwardCast | GatheredCast | None = None

    def columnwise(self, saved: Sequence[Tensor], needed: bool) -> Quantized | None:
        """Return the columnwise form of the weight, if dgrad needs it.

        Afterwards the graph holds no form of it. The caller holds the only reference to the result,
        and frees it after dgrad. While a compiler traces, the form is made by ops that stay in the
        backward, so that the forward saves no form, which takes a byte a parameter.

        Args:
            saved: the tensors that forward saved of the weight.
            needed: False where this backward computes no dgrad.

        Raises:
            RuntimeError: the weight was written to, or gathered with other values, since its
                forward.
        """
        form = None
        if needed and self.plan.tracing:
            with kept_in_backward():
                form = self._columnwise(saved)
        elif needed:
            form = self._columnwise(saved)
        if isinstance(self.cast, ForwardCast):
            self.cast.waiting = None
        return form

    def values(self, saved: Sequence[Tensor], needed: bool) -> Tensor | None:
        """Return the plain weight ``[..., N, K]`` for a dgrad in high precision, if it is needed.

        It is the weight itself if the plan says so, or else the values of its columnwise form. A
        frozen FP8 weight has these values alone. Arguments and errors: see :meth:`columnwise`.
        """
        if needed and self.plan.reads_master and not self.names:
            (w,) = saved
            if isinstance(w, BlockwiseFP8Weight):
                return self._master(w)
            if not isinstance(w, BlockwiseFP8Tensor):
                return w
        form = self.columnwise(saved, needed)
        return None if form is None else dequantize(form, self.plan.out_dtype).mT

    def _master(self, w: BlockwiseFP8Weight) -> Tensor:
        if self.plan.tracing or not isinstance(self.cast, ForwardCast):
            return w._cast_from
        master = w.cache.master_in_backward(self.cast)
        return master.mT if w.transposed else master

    def traced_master(self, saved: Sequence[Tensor]) -> Tensor | None:
        """Return the weight in high precision, if a compiler traces a backward that casts it."""
        if not self.plan.tracing or not isinstance(saved[0], BlockwiseFP8Weight):
            return None
        return saved[0]._cast_from

    def _columnwise(self, saved: Sequence[Tensor]) -> Quantized:
        cast, (w, *_), format = self.cast, saved, self.plan.weight_format
        if isinstance(cast, GatheredCast):
            cast.generation.read(since=cast.version)
            cast = None
        if self.names:
            named = dict(zip(self.names, saved, strict=True))
            return operand_of(named, format.stored, format.stored).need_columnwise()
        if isinstance(w, BlockwiseFP8Weight):
            if self.plan.tracing:
                return quantize_transpose(w._cast_from, format)
            row, col = w.cache.get_in_backward(w, cast)
            if w.transposed:
                row, col = col, row
            return col or Operand(row, col).need_columnwise()
        # saved-tensor hooks that offload tensors return a plain weight
        return operand_of_weight(w, format).need_columnwise()


WeightRead: TypeAlias = tuple[Quantized | Tensor, Sequence[Tensor], SavedWeight]
"""The input of fprop from a weight, the tensors to save for dgrad, and the reader for backward.

fprop gets the rowwise form. While a compiler traces, it may get the weight in high precision, which
the op that multiplies then casts.
"""


def read_weight(w: Tensor, plan: Plan) -> WeightRead:
    """Read a weight in a forward."""
    needs_dx = plan.needs[0]
    w_row: Quantized | Tensor
    if isinstance(w, BlockwiseFP8Weight):
        read = SavedWeight(plan, cache=w.cache)
        if needs_dx and plan.reads_master and not plan.tracing:
            w_row = w.rowwise()
            read.cast = ForwardCast(w.cache, w.cache.version(), None)
        elif needs_dx and not plan.tracing:
            (row, col), read.cast = w.cache.get_for_backward(w)
            w_row = (col if w.transposed else row) or Operand(col, row).need_rowwise()
        elif plan.tracing and not w.transposed:
            w.cache.casts += 1
            w_row = w._cast_from
        else:
            w_row = w.rowwise()
        return w_row, (w,) if needs_dx else (), read
    read = SavedWeight(plan)
    if isinstance(w, BlockwiseFP8Tensor):
        # Dynamo may take a method of a tensor for an op, which returns tensors alone
        w_row = w.operand.need_rowwise() if plan.tracing else w.rowwise()
        if w.generation is not None and not plan.tracing:
            read.cast = GatheredCast(w.generation, w.generation.read())
        if not needs_dx:
            return w_row, (), read
        if plan.tracing:
            return w_row, (w,), read
        read.names = tuple(w.__tensor_flatten__()[0])
        return w_row, [getattr(w, name) for name in read.names], read
    w_row = quantize_rowwise(w, plan.weight_format)
    if plan.reads_master:
        return w_row, (w,) if needs_dx else (), read
    read.names = ROWWISE
    return w_row, w_row[:2] if needs_dx else (), read


def hold_cast(
    w: BlockwiseFP8Weight, plan: Plan, columnwise: Quantized
) -> tuple[Sequence[Tensor], SavedWeight]:
    """Hold the columnwise form of the weight, which the recorded forward has cast.

    Returns:
        The tensors to save for dgrad, and how backward reads them, as :func:`read_weight`.
    """
    cache = w.cache
    read = SavedWeight(plan, cache=cache)
    cache.casts += 1
    read.cast, waiting = cache.begin_cast()
    waiting.operand = Operand(None, columnwise)
    return (w,), read


def operand_of_weight(w: Tensor, format: BlockFormat) -> Operand:
    """Return the FP8 forms of the values of a weight; a plain one is cast in ``format``."""
    if isinstance(w, FP8_TYPES):
        return w.operand
    return Operand(quantize_rowwise(w, format), None)
