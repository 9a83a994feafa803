"""Registered ops that change none of their arguments: what compiled graphs call.

``torch.library.custom_op`` would do. But its ops pass three layers of Python at every call, 8 us of
host time against 2, and a compiled Llama layer calls 30 of them. These ops are known to the
dispatcher by their schema, one function for all devices and one for fake tensors. None is
differentiable: autograd Functions call them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._ops import OpOverload

_NAMESPACE = "blocktensor"
_LIBRARY = torch.library.Library(_NAMESPACE, "FRAGMENT")


def functional_op(
    name: str, *, schema: str | None = None
) -> Callable[[Callable[..., Any]], OpOverload]:
    """Make ``torch.ops.blocktensor.<name>`` of a function.

    Args:
        name: of the op, without its namespace.
        schema: of arguments and results; by default that of the function's annotations.
    """

    def register(function: Callable[..., Any]) -> OpOverload:
        signature = schema or torch.library.infer_schema(function, mutates_args=())
        _LIBRARY.define(name + signature, tags=(torch.Tag.pt2_compliant_tag,))
        _LIBRARY.impl(name, function, "CompositeExplicitAutograd")
        op: OpOverload = getattr(getattr(torch.ops, _NAMESPACE), name).default
        return op

    return register


def fake_of(*ops: OpOverload) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Run a function in place of these ops on fake tensors, which have no memory."""

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        for op in ops:
            torch.library.register_fake(op, function, lib=_LIBRARY)
        return function

    return register
