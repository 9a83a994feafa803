"""Send frozen FP8 weights through torch.distributed, as bytes and scales.

``_broadcast_coalesced``, by which DDP sends a model, views tensors as vectors, concatenates and
broadcasts those in buckets, and copies the parts back. ``distribute_tensor`` broadcasts a stack of
experts, or pads and scatters its parts.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ...ops.formats import Quantized
from ..base import FP8Base, implements, wrapper
from ..fp8_tensor import ATEN_OPS, BlockwiseFP8Tensor
from ..operand import Operand
from ..refusals import refuse

aten = torch.ops.aten

_BUCKET_OPS: dict[Any, Callable[..., Any]] = {}


class Bucket(FP8Base):
    """Tensors laid end to end, as one vector that shares their memory. It can be cut between them.

    Attributes:
        parts: FP8 weights, each with one form, and plain vectors.
    """

    parts: Sequence[Tensor]
    _ops = _BUCKET_OPS

    @staticmethod
    def __new__(cls, parts: Sequence[Tensor]) -> Bucket:
        """Lay ``parts`` end to end, which have one dtype and device."""
        first, size = parts[0], sum(part.numel() for part in parts)
        self: Bucket = wrapper(cls, (size,), dtype=first.dtype, device=first.device)
        self.parts = parts
        return self

    @staticmethod
    def of(x: BlockwiseFP8Tensor) -> Bucket:
        """Return ``x.view(-1)`` with one form of ``x``; ``copy_`` back makes the other form."""
        row, col = x.operand
        one = Operand(row, None if row is not None else col)
        return Bucket([x.like(one, x.shape, x.stride())])

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"Bucket({self.parts!r})"


@implements(_BUCKET_OPS, aten.detach.default, aten.alias.default)
def _alias(func: Any, x: Bucket) -> Bucket:
    return Bucket(x.parts)


@implements(_BUCKET_OPS, aten.cat.default)
def _cat(func: Any, tensors: Sequence[Tensor], dim: int = 0) -> Bucket:
    parts = [x.parts if isinstance(x, Bucket) else [x] for x in tensors]
    return Bucket([*itertools.chain.from_iterable(parts)])


@implements(_BUCKET_OPS, aten.slice.Tensor)
def _slice(
    func: Any,
    x: Bucket,
    dim: int = 0,
    start: int | None = None,
    end: int | None = None,
    step: int = 1,
) -> Tensor:
    begins = [0, *itertools.accumulate(part.numel() for part in x.parts)]
    first, last, _ = slice(start, end).indices(x.shape[0])
    if step != 1 or first not in begins or last not in begins:
        refuse(func)
    parts = x.parts[begins.index(first) : begins.index(last)]
    is_plain = len(parts) == 1 and not isinstance(parts[0], BlockwiseFP8Tensor)
    return parts[0].detach() if is_plain else Bucket(parts)


@implements(_BUCKET_OPS, aten.view.default)
def _view(func: Any, x: Bucket, size: Sequence[int]) -> Tensor:
    if list(size) in ([-1], [x.shape[0]]):
        return Bucket(x.parts)
    if len(x.parts) > 1 or tuple(size) != tuple(x.parts[0].shape):
        refuse(func)
    return x.parts[0].detach()


# Collectives of torch.distributed


def _plain_parts(func: Any, x: Tensor) -> list[Tensor]:
    """Return data and scale of each form; data as bytes, which gloo can send."""
    if not (isinstance(x, BlockwiseFP8Tensor) and x.format.transposes):
        refuse(func)
    forms = [form for form in x.operand if form is not None]
    return [part for form in forms for part in (form.data.view(torch.uint8), form.scale)]


def _broadcast(func: Any, tensors: Sequence[Tensor], *args: Any) -> Any:
    result = None
    held = [part for x in tensors for part in (x.parts if isinstance(x, Bucket) else [x])]
    plain = [_plain_parts(func, x) if isinstance(x, FP8Base) else [x] for x in held]
    for part in itertools.chain(*plain):
        sent = part.contiguous()
        _, result = func([sent], *_begun(args))
        result.wait()
        part.copy_(sent)
    return tensors, result


def _begun(args: Sequence[Any]) -> list[Any]:
    """Make a collective asynchronous: NCCL returns no work to wait for from a synchronous one."""
    return [True if isinstance(x, bool) else x for x in args]


def _scatter(
    func: Any, outputs: Sequence[Tensor], inputs: Sequence[Sequence[Tensor]], *args: Any
) -> Any:
    (output,) = outputs
    result = None
    sent = [[_plain_parts(func, x) for x in each] for each in inputs]
    for index, target in enumerate(_plain_parts(func, output)):
        received = torch.empty(target.shape, dtype=target.dtype, device=target.device)
        parts = [[x[index].contiguous() for x in each] for each in sent]
        _, result = func([received], parts, *_begun(args))
        result.wait()
        target.copy_(received)
    return outputs, result


if torch.distributed.is_available():
    c10d = torch.ops.c10d
    implements(_BUCKET_OPS, c10d.broadcast_.default)(_broadcast)
    implements(ATEN_OPS, c10d.broadcast_.default)(_broadcast)
    implements(ATEN_OPS, c10d.scatter_.default)(_scatter)


@implements(ATEN_OPS, aten.constant_pad_nd.default)
def _pad(func: Any, x: BlockwiseFP8Tensor, pad: Sequence[int], value: Any = 0) -> Tensor:
    """Append matrices of zeros to a stack, for ranks that get fewer."""
    *inside, before, after = pad
    if any(inside) or before or value or len(pad) != 6 or not x.format.transposes:
        refuse(func)

    def padded(form: Quantized) -> Quantized:
        data = F.pad(form.data.view(torch.uint8), pad).view(form.data.dtype)
        return form._replace(data=data, scale=F.pad(form.scale, pad, value=1.0))

    forms = (form and padded(form) for form in x.operand)
    return x.like(Operand(*forms), (x.shape[0] + after, *x.shape[1:]), x.stride())
