"""Weight gradients that are added to ``weight.main_grad`` instead of being returned."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def where_to_add(ctx: Any, main_grad: Tensor) -> tuple[Tensor | None, bool]:
    """The buffer that this backward adds to, and whether the weight's gradient is needed.

    ``needs_input_grad`` says which gradients could be needed. Adding is a side effect: it must not
    happen for ``autograd.grad(y, [x])``; for ``autograd.grad(y, [w])`` the gradient is returned.
    """
    (node, _) = ctx.next_functions[1]
    if not hasattr(node, "variable"):  # a view of the weight, whose gradient autograd passes on
        return None, True
    try:
        executed = torch._C._will_engine_execute_node(node)
    except RuntimeError:  # its gradient is captured for the caller
        return None, True
    return (main_grad, True) if executed else (None, False)
