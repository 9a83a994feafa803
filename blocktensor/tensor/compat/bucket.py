"""Buckets in which torch broadcasts a model that DDP wraps, with frozen FP8 weights in them.

``torch.distributed._broadcast_coalesced`` views tensors as vectors, concatenates and broadcasts
those, and copies the parts back. Frozen weights travel as bytes and scales.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..base import FP8Base, implements, wrapper
from ..fp8_tensor import BlockwiseFP8Tensor
from ..operand import Operand
from ..refusals import refuse

aten = torch.ops.aten

_OPS: dict[Any, Callable[..., Any]] = {}


class Bucket(FP8Base):
    """Tensors laid end to end, as one vector that shares their memory. It can be cut between them.

    Attributes:
        parts: FP8 weights, each with one form, and plain vectors.
    """

    parts: Sequence[Tensor]
    _ops = _OPS

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


@implements(_OPS, aten.detach.default, aten.alias.default)
def _alias(func: Any, x: Bucket) -> Bucket:
    return Bucket(x.parts)


@implements(_OPS, aten.cat.default)
def _cat(func: Any, tensors: Sequence[Tensor], dim: int = 0) -> Bucket:
    parts = [x.parts if isinstance(x, Bucket) else [x] for x in tensors]
    return Bucket([*itertools.chain.from_iterable(parts)])


@implements(_OPS, aten.slice.Tensor)
def _slice(
    func: Any, x: Bucket, dim: int = 0, start: int | None = None, end: int | None = None,
    step: int = 1,
) -> Tensor:  # fmt: skip
    begins = [0, *itertools.accumulate(part.numel() for part in x.parts)]
    first, last = start or 0, x.shape[0] if end is None else min(end, x.shape[0])
    if step != 1 or first not in begins or last not in begins:
        refuse(func)
    parts = x.parts[begins.index(first) : begins.index(last)]
    is_plain = len(parts) == 1 and not isinstance(parts[0], BlockwiseFP8Tensor)
    return parts[0].detach() if is_plain else Bucket(parts)


@implements(_OPS, aten.view.default)
def _view(func: Any, x: Bucket, size: Sequence[int]) -> Tensor:
    if list(size) in ([-1], [x.shape[0]]):
        return Bucket(x.parts)
    if len(x.parts) > 1 or tuple(size) != tuple(x.parts[0].shape):
        refuse(func)
    return x.parts[0].detach()


def plain_parts(x: BlockwiseFP8Tensor) -> list[Tensor]:
    """Return data and scale of each form; data as bytes, which gloo can send."""
    forms = [form for form in x.operand if form is not None]
    return [part for form in forms for part in (form.data.view(torch.uint8), form.scale)]


def broadcast(func: Any, parts: Iterable[Tensor], *args: Any) -> Any:
    """Broadcast plain tensors in place, one by one, and return the last result."""
    result = None
    for part in parts:
        sent = part.contiguous()
        _, result = func([sent], *args)
        result.wait()
        part.copy_(sent)
    return result


def _broadcast(func: Any, tensors: Sequence[Bucket], *args: Any) -> Any:
    held = [part for x in tensors for part in x.parts]
    plain = [plain_parts(x) if isinstance(x, BlockwiseFP8Tensor) else [x] for x in held]
    return tensors, broadcast(func, itertools.chain(*plain), *args)


if torch.distributed.is_available():
    implements(_OPS, torch.ops.c10d.broadcast_.default)(_broadcast)
