"""Weight gradients that are added to ``weight.main_grad`` instead of being returned."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from . import split_backward


def check_main_grad(tracing: bool) -> None:
    """Raise where a weight's ``main_grad`` would be ignored or stay unreduced.

    Raises:
        NotImplementedError: a compiler traces, or DDP, which reduces ``.grad`` alone, runs forward.
    """
    split_backward.watch()
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
        return main_grad if split_backward.is_running() else None
