"""Weight gradients that are added to ``weight.main_grad`` instead of being returned.

torch's pipelining treats these buffers as ``.grad``. Its zero-bubble schedules split a backward: in
the half that computes weight gradients, torch captures these and adds them to ``.grad`` itself.
While that code runs, backward adds to the buffer and returns :class:`Nothing`, which ``.grad`` does
not keep. Gradients that reach the weight in other ways are added to ``.grad``. After its
microbatches a schedule divides ``.grad`` and the buffers by their number, unless
``scale_grads=False``.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from ..sharding.dtensor import local_of
from ..tensor.weight import BlockwiseFP8Weight
from .pipelining import stage_module, wrap

_aten = torch.ops.aten
_running: list[object] = []
"""Calls that compute the weight half of a backward now; on CUDA in threads of autograd."""


def check_main_grad(tracing: bool) -> None:
    """Raise where a weight's ``main_grad`` would be ignored or stay unreduced.

    Raises:
        NotImplementedError: a compiler traces, or DDP, which reduces ``.grad`` alone, runs forward.
    """
    _watch_pipelining()
    if tracing:
        raise NotImplementedError(
            "weight.main_grad under torch.compile: a compiled backward returns gradients and adds "
            "to no buffer. Set weight.main_grad = None and read weight.grad, or run this module in "
            "eager mode"
        )
    ddp: Any = torch.nn.parallel.DistributedDataParallel._get_active_ddp_module()
    if ddp is not None and ddp.require_backward_grad_sync:
        raise NotImplementedError(
            "weight.main_grad under DistributedDataParallel: DDP reduces .grad, so that each rank "
            "would keep a main_grad of its own. Set weight.main_grad = None; or run forward and "
            "backward under model.no_sync() and all-reduce the buffers before the optimizer's step"
        )


_SAME_VALUES = ("ToCopyBackward0", "_ToTorchTensorBackward")
"""Nodes of ``weight.to(dtype)`` and of ``to_local()``."""


def where_to_add(ctx: Any, main_grad: Tensor, place: int = 1) -> Tensor | None:
    """Return the buffer that this backward adds the weight's gradient to; None to return it.

    Adding is a side effect: for ``autograd.grad(y, [w])`` the gradient is returned.

    A stack of experts may be a transpose of the weight, as grouped products take it: the buffer is
    then transposed alike. ``weight.to(dtype)`` has the buffer of the weight (``late_copy.py``), and
    ``to_local()`` of a DTensor has the buffer of the local part.

    Args:
        ctx: of a function whose backward is asked for the gradient of the weight.
        main_grad: of the weight.
        place: of the weight among the tensors that the forward was given.
    """
    (node, _) = ctx.next_functions[place]
    while True:
        # of the last two dimensions: other views share no buffer
        is_transpose = main_grad.ndim == 3 and node.name() == "TransposeBackward0"
        if not is_transpose and node.name() not in _SAME_VALUES:
            break
        ((node, _),) = node.next_functions
        main_grad = main_grad.transpose(1, 2) if is_transpose else main_grad
    if not hasattr(node, "variable"):  # a view of the weight, whose gradient autograd passes on
        return None
    try:
        return main_grad if torch._C._will_engine_execute_node(node) else None
    except RuntimeError:  # its gradient is captured for the caller
        return main_grad if bool(_running) else None


def _watch_pipelining() -> None:
    """Wrap pipelining's functions, if it was imported, so that they know of the buffers."""
    stage = stage_module()
    for module in (stage, sys.modules.get("torch.distributed.pipelining._backward")):
        wrap(module, "stage_backward_weight", _noticed)
    wrap(getattr(stage, "_PipelineStageBase", None), "scale_grads", _of_buffers_too)


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
