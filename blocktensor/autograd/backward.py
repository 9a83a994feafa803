"""Share what all FP8 autograd functions do with their results and incoming gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

Gradients = tuple[Tensor | None, ...]


class FP8Function(torch.autograd.Function):
    """Base class of functions whose backward is :func:`run_backward`.

    From torch 2.13 on, autograd gives up its own references to the incoming gradients of a function
    whose ``boxed_grads_call`` is True. The function can then free each gradient once it is cast.
    """

    boxed_grads_call = True

    @staticmethod
    def _compiled_autograd_key(ctx: Any) -> Any:
        """Switch boxed gradients off: compiled autograd calls this first, and refuses them."""
        FP8Function.boxed_grads_call = False
        return torch.autograd.Function._compiled_autograd_key(ctx)


def given_out(y: Tensor, shape: Sequence[int]) -> Tensor:
    """Return the output of a function in another shape, as a view with its own autograd node.

    A backward in two halves (zero bubble) begins the second half at the node whose inputs are the
    weights. Hooks on that node run in both halves, and change the gradients of weights twice. So
    callers get the node of this view. torch's linear layers also return views, for inputs of more
    than two dimensions. It is no view to autograd: callers may modify it in place.
    """
    made: Tensor = torch.ops.aten._unsafe_view(y, shape)
    return made


def run_backward(
    ctx: Any,
    grads: tuple[Any, ...],
    gradients: Callable[[Any, list[Any], list[Any], list[bool]], Gradients],
    is_tensor: Sequence[bool],
) -> Gradients:
    """Return ``gradients(ctx, saved, grads, asked)``, computed without overrides of FP8 types.

    Args:
        ctx: the context of the function.
        grads: the arguments of its backward: gradients, or one list of them (torch 2.13).
        gradients: given lists of the saved tensors and of the incoming gradients, which it may
            remove tensors from, to free them; and which inputs need a gradient.
        is_tensor: whether each input of the forward is a tensor, up to the last differentiable one.

    Raises:
        NotImplementedError: second derivatives or a batch of gradients are wanted.
    """
    incoming = grads[0] if isinstance(grads[0], list) else [*grads]
    del grads
    saved = list(ctx.saved_tensors)  # may run a checkpointed forward, with all its overrides
    if not is_dynamo_compiling():
        refuse_gradients(incoming)
        ctx.maybe_clear_saved_tensors()  # unless the graph is retained
    with torch._C.DisableTorchFunctionSubclass():
        return gradients(ctx, saved, incoming, _asked_for(ctx, is_tensor))


def refuse_gradients(incoming: Sequence[Tensor | None]) -> None:
    """Refuse a backward for second derivatives, and a batch of gradients.

    Raises:
        NotImplementedError: one of them is wanted.
    """
    if torch.is_grad_enabled():  # every second derivative begins with such a backward
        raise NotImplementedError(
            "a backward with create_graph=True through a blockwise FP8 function, whose second "
            "derivative is not implemented: call it without create_graph, or compute that part "
            "of the model in high precision (convert(..., skip=[...]))"
        )
    if any(grad is not None and _is_batched(grad) for grad in incoming):
        raise NotImplementedError(
            "torch.autograd.grad(..., is_grads_batched=True) through an FP8 linear layer, "
            "whose casts take one gradient: call it once for each gradient, with "
            "retain_graph=True"
        )


def _asked_for(ctx: Any, is_tensor: Sequence[bool]) -> list[bool]:
    """Return for which inputs this run of autograd wants gradients.

    ``ctx.needs_input_grad`` says which gradients might be wanted. ``autograd.grad(y, [x])``,
    ``backward(inputs=[x])`` and each half of a split backward want some of them.
    """
    if is_dynamo_compiling():
        return [*ctx.needs_input_grad[: len(is_tensor)]]
    nodes = iter(ctx.next_functions)  # edges of inputs that are tensors
    asked = []
    for each in is_tensor:
        node = next(nodes)[0] if each else None
        if node is None:  # not a tensor, or one without a gradient
            asked.append(False)
            continue
        try:
            asked.append(_will_execute(node))
        except RuntimeError:  # a leaf whose gradient is returned to the caller, or no engine runs
            asked.append(True)
    return asked


_will_execute = torch._C._will_engine_execute_node
_is_batched = torch._C._functorch.is_legacy_batchedtensor
