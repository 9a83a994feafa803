"""The collectives by which ``distribute_tensor`` sends frozen stacks: their bytes and scales."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ...ops.formats import Quantized
from ...tensor.fp8_tensor import BlockwiseFP8Tensor
from ...tensor.operand import Operand
from ...tensor.refusals import refuse

aten = torch.ops.aten


def _inner(x: Tensor, func: Any) -> list[Tensor]:
    """Data and scales of the forms of a frozen stack; data as bytes, which gloo can send."""
    if not (isinstance(x, BlockwiseFP8Tensor) and x.format.transposes):
        refuse(func)
    forms = [form for form in x.operand if form is not None]
    return [part for data, scale, _ in forms for part in (data.view(torch.uint8), scale)]


def _scatter(
    func: Any, outputs: Sequence[Tensor], inputs: Sequence[Sequence[Tensor]], *args: Any
) -> Any:
    (output,) = outputs
    result = None
    parts = [[_inner(x, func) for x in sent] for sent in inputs]
    for index, target in enumerate(_inner(output, func)):
        received = torch.empty(target.shape, dtype=target.dtype, device=target.device)
        sent = [[one[index].contiguous() for one in each] for each in parts]
        _, result = func([received], sent, *args)
        result.wait()
        target.copy_(received)
    return outputs, result


def _broadcast(func: Any, tensors: Sequence[Tensor], *args: Any) -> Any:
    (tensor,) = tensors
    result = None
    for target in _inner(tensor, func):
        sent = target.contiguous()
        _, result = func([sent], *args)
        result.wait()
        target.copy_(sent)
    return tensors, result


def _pad(func: Any, x: BlockwiseFP8Tensor, pad: Sequence[int], value: Any = 0) -> Tensor:
    """Matrices of zeros after the last, as ranks are sent that get fewer."""
    *inside, before, after = pad
    if any(inside) or before or value or x.ndim != 3 or len(pad) != 6 or not x.format.transposes:
        refuse(func)
    made: list[Quantized | None] = []
    for form in x.operand:
        if form is None:
            made.append(None)
            continue
        data = F.pad(form.data.view(torch.uint8), pad).view(form.data.dtype)
        made.append(form._replace(data=data, scale=F.pad(form.scale, pad, value=1.0)))
    shape = x.shape[0] + after, *x.shape[1:]
    return BlockwiseFP8Tensor(
        *Operand(*made), shape=shape, strides=x.stride(), dtype=x.dtype, recipe=x.recipe
    )


FROZEN_CUTS: dict[Any, Callable[..., Any]] = {aten.constant_pad_nd.default: _pad}
"""Ops of BlockwiseFP8Tensor."""

if torch.distributed.is_available():
    FROZEN_CUTS[torch.ops.c10d.scatter_.default] = _scatter
    FROZEN_CUTS[torch.ops.c10d.broadcast_.default] = _broadcast
