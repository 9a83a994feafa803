"""Treat ``main_grad`` buffers as torch's pipelining treats ``.grad`` after a backward.

The zero-bubble schedules split a backward. In the half that computes weight gradients, torch
captures these and adds them to ``.grad`` itself. Those of a weight with a ``main_grad`` go to that
buffer: while torch's code runs, backward adds to it and returns :class:`Nothing`, which ``.grad``
does not keep. Gradients that reach the weight in other ways are added to ``.grad``.

After its microbatches a schedule divides ``.grad`` by their number, unless ``scale_grads=False``.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from ..distributed.dtensor import local_of
from ..tensor.weight import BlockwiseFP8Weight

_aten = torch.ops.aten
_running: list[object] = []


def is_running() -> bool:
    """Return True while any thread computes the weight half of a backward.

    On CUDA autograd runs backward in threads of its own.
    """
    return bool(_running)


def watch() -> None:
    """Wrap pipelining's functions, if it was imported, so that they know of the buffers."""
    stage: Any = sys.modules.get("torch.distributed.pipelining.stage")
    for module in (stage, sys.modules.get("torch.distributed.pipelining._backward")):
        _wrap(module, "stage_backward_weight", _noticed)
    _wrap(getattr(stage, "_PipelineStageBase", None), "scale_grads", _of_buffers_too)


def _wrap(owner: Any, name: str, wrapper: Callable[..., Any]) -> None:
    original = getattr(owner, name, None)
    if original is not None and not hasattr(original, "__wrapped__"):
        setattr(owner, name, wrapper(original))


def _noticed(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def stage_backward_weight(weights: Iterable[Tensor], *args: Any, **kwargs: Any) -> Any:
        given = list(weights)
        _running.append(original)
        try:
            return original(iter(given), *args, **kwargs)
        finally:
            _running.pop()
            for weight in given:
                if type(_local(weight.grad)) is Nothing:
                    weight.grad = None

    return stage_backward_weight


def _of_buffers_too(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def scale_grads(stage: Any, grad_scale_factor: int) -> None:
        original(stage, grad_scale_factor)
        for weight in stage.submod.parameters():
            local = _local(weight)
            if isinstance(local, BlockwiseFP8Weight) and local.main_grad is not None:
                local.main_grad.div_(grad_scale_factor)

    return scale_grads


def _local(x: Any) -> Any:
    local = local_of(x)
    return x if local is None else local


def in_place_of_added(main_grad: Tensor, dtype: torch.dtype) -> Tensor | None:
    """Return what torch is to sum in a split backward, else None: the gradient was added."""
    return Nothing(main_grad.shape, dtype, main_grad.device) if _running else None


class Nothing(Tensor):
    """Zeros without memory, in place of a gradient that was added to a buffer.

    Sums leave it out. On the way to the weight, autograd may transpose and copy it.
    """

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Any:
        return Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=device)

    def __init__(self, *_: Any) -> None:
        super().__init__()

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        kwargs, x = kwargs or {}, args[0]
        if func in (_aten.add.Tensor, _aten.add_.Tensor) and type(args[1]) is cls:
            return x
        if func in (_aten.transpose.int, _aten.view.default):
            made = func(torch.empty(x.shape, device="meta"), *args[1:])
            return cls(made.shape, x.dtype, x.device)
        if func is _aten._to_copy.default:
            return cls(x.shape, kwargs.get("dtype") or x.dtype, kwargs.get("device") or x.device)
        args, kwargs = tree_map_only(cls, _zeros, (args, kwargs))
        return func(*args, **kwargs)


def _zeros(x: Nothing) -> Tensor:
    return torch.zeros(x.shape, dtype=x.dtype, device=x.device)
