"""Registered ops that change none of their arguments: what compiled graphs call.

``torch.library.custom_op`` would do. But its ops pass three layers of Python at every call, 8 us of
host time against 2, and a compiled Llama layer calls 30 of them. These ops are known to the
dispatcher by their schema, one function for all devices and one for fake tensors. None is
differentiable: autograd Functions call them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch._ops import OpOverload

_NAMESPACE = "blocktensor"


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
        ops = getattr(torch.ops, _NAMESPACE)
        if hasattr(ops, name):  # its module is imported once more
            getattr(ops, name).default.library._destroy()
        library = torch.library.Library(_NAMESPACE, "FRAGMENT")
        library.define(name + signature, tags=(torch.Tag.pt2_compliant_tag,))
        library.impl(name, function, "CompositeExplicitAutograd")
        op: Any = getattr(ops, name).default
        op.library = library  # whose end is that of its ops: it is kept as long as they are
        return cast(OpOverload, op)

    return register


def fake_of(*ops: OpOverload) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Run a function in place of these ops on fake tensors, which have no memory."""

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        for op in ops:
            torch.library.register_fake(op, function, lib=cast(Any, op).library)
        return function

    return register
