"""Replace the content of a parameter, which keeps its identity; check that it can be replaced."""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from ...patches import SWAP_TENSORS
from ..base import FP8Base
from ..fp8_tensor import BlockwiseFP8Tensor
from ..torch_internals.callers import APPLY, PARAMETRIZE, caller
from ..torch_internals.frames import never_compiled
from ..weight import FP8_TYPES

_DATA: Any = Tensor.data  # the descriptor

_FP8_ATTRIBUTES = {"_is_param"}.union(
    *(getattr(kind, "__annotations__", ()) for fp8 in FP8_TYPES for kind in fp8.__mro__)
)
"""Attributes of the FP8 types, which a parameter that leaves such a type must not keep."""


def check_swappable(parameter: Tensor, what: str, action: str = "convert") -> None:
    """Raise RuntimeError unless :func:`swap_in` can exchange the content of ``parameter``.

    These are the conditions of ``torch.utils.swap_tensors``, for checks before anything changes.
    Weak references to a tensor that is in FP8 already are allowed: only its ``.data`` is set.

    Args:
        parameter: of a module.
        what, action: the names of the parameter and of the change, for the error message.
    """
    cannot = f"cannot {action} {what} {list(parameter.shape)} in place"
    if not isinstance(parameter, FP8Base) and weakref.getweakrefs(parameter):
        raise RuntimeError(
            f"{cannot}: there are weak references to it (weakref.ref), which would point to other "
            f"content; drop them first, or {action} copy.deepcopy(model): torch.export and "
            f"compiled optimizers keep theirs"
        )
    if _is_in_use(parameter):
        raise RuntimeError(
            f"{cannot}: an autograd graph or a wrapper such as DDP uses it; {action} the model "
            f"before wrapping it in DDP or FSDP, and not between a forward and its backward: run "
            f"the backward, or drop what the forward returned (del loss)"
        )


def _is_in_use(parameter: Tensor) -> bool:
    uses: int = parameter._use_count()  # type: ignore[attr-defined]
    if uses < 2 or not (parameter.is_leaf and parameter.requires_grad):
        return uses > 1
    # The second reference may be its AccumulateGrad node, which is allowed: swap_tensors makes it
    # raise if a backward reaches it. If it is another one, asking for the node adds a third.
    with torch.inference_mode(False):  # there a parameter has no node
        edge = torch.autograd.graph.get_gradient_edge(parameter)
    in_use: bool = parameter._use_count() > 2  # type: ignore[attr-defined]
    del edge
    return in_use


def swap_in(parameter: Tensor, converted: Tensor) -> None:
    """Give ``parameter`` the content of ``converted``; ties and optimizers keep the same object.

    Hooks and attributes that other code has set stay. Graphs that wait for their backward are kept
    if both are FP8; else their backward raises.

    Raises:
        RuntimeError: an autograd graph or a wrapper such as DDP uses the parameter.
    """
    if take_content(parameter, converted):
        return
    new = nn.Parameter(converted, requires_grad=parameter.requires_grad)
    del converted
    carry_over(parameter, new)
    new.grad = parameter.grad
    try:
        with _clear_error_in_backward(parameter):
            torch.utils.swap_tensors(parameter, new)
    except RuntimeError as error:
        raise RuntimeError(
            f"cannot convert a parameter of shape {list(parameter.shape)} in place ({error}): "
            f"convert the model before wrapping it in DDP or FSDP, and not between a forward and "
            f"its backward"
        ) from error


def take_content(parameter: Tensor, converted: Tensor) -> bool:
    """Give an FP8 ``parameter`` the content of an FP8 tensor, as ``parameter.data = ...`` does.

    The nodes of autograd keep the parameter, so that a backward that waits adds to its gradient, as
    in plain PyTorch. After ``torch.utils.swap_tensors`` it would raise.

    Returns:
        False, and nothing changes, where ``.data`` cannot be set: one of them is plain, or a meta
        tensor and the other is not.
    """
    if not (isinstance(parameter, FP8_TYPES) and isinstance(converted, FP8_TYPES)):
        return False
    if not torch._has_compatible_shallow_copy_type(parameter, converted):
        return False
    kept = {n: x for n, x in parameter.__dict__.items() if n not in _FP8_ATTRIBUTES - {"_is_param"}}
    with torch._C.DisableTorchFunctionSubclass():
        _DATA.__set__(parameter, converted)
    parameter.__class__ = type(converted)
    parameter.__dict__ = {**converted.__dict__, **kept}
    return True


@SWAP_TENSORS.made_by
def _around(original: Any) -> Any:
    """Return a function that swaps two tensors as torch does, except for FP8 parameters.

    - A swap with itself changes nothing. torch refuses one of a tensor with weak references, which
      EMA helpers and ``torch.export`` hold.
    - ``nn.Module._apply`` moves a parameter: it takes the content of the new one.
    - ``register_parametrization`` gives a parameter the content of ``right_inverse(weight)``, which
      is plain where that computes new values: it is refused.
    - ``remove_parametrizations`` gives it the values that the parametrization computes.
    """

    @functools.wraps(original)
    @never_compiled
    def swap_tensors(t1: Any, t2: Any) -> None:
        if isinstance(t1, FP8_TYPES):
            who = caller()
            place = who.place
            if t1 is t2 or (place == APPLY and take_content(t1, t2)):
                return
            if place == PARAMETRIZE and not isinstance(t2, FP8Base):
                if who.back is not None and who.back.function == "remove_parametrizations":
                    _check_writable(t1)
                    t1.data = t2.detach()
                    return
                raise NotImplementedError(
                    f"this parametrization would make an FP8 weight {list(t1.shape)} plain, so "
                    f"that its linear ran in high precision: register it before converting, which "
                    f"then leaves the linear alone, or convert with skip=[...]"
                )
        original(t1, t2)

    return swap_tensors


def _check_writable(weight: Tensor) -> None:
    """Raise TypeError for a frozen weight; torch replaces the text of any RuntimeError."""
    if isinstance(weight, BlockwiseFP8Tensor):
        raise TypeError(
            f"remove_parametrizations would write computed values to a frozen FP8 weight "
            f"{list(weight.shape)}: pass leave_parametrized=False, which keeps the values before "
            f"the parametrization; for computed ones, call blocktensor.unfreeze(model) then, "
            f"register and remove the parametrization again, and call blocktensor.freeze(model)"
        )


def carry_over(old: Tensor, new: Tensor) -> None:
    """Give ``new``, which is to be swapped in for ``old``, its hooks and attributes."""
    for name, value in old.__dict__.items():
        if name not in _FP8_ATTRIBUTES:
            new.__dict__.setdefault(name, value)
    for hooks in ("_backward_hooks", "_post_accumulate_grad_hooks"):
        if getattr(old, hooks) is not None:  # an empty dictionary takes hooks later
            setattr(new, hooks, getattr(old, hooks))


@contextlib.contextmanager
def _clear_error_in_backward(parameter: Tensor) -> Iterator[None]:
    """Make a backward that waits for ``parameter`` raise a clear error, around ``swap_tensors``.

    ``swap_tensors`` makes the parameter's AccumulateGrad node raise, since its gradient would go to
    the old content. Nothing tells from here whether a graph that holds the node will run backward:
    the graph of a loss which is kept for its value will not.
    """
    node = None
    if parameter.requires_grad and parameter._use_count() > 1:  # type: ignore[attr-defined]
        node = torch.autograd.graph.get_gradient_edge(parameter).node
    if node is None:
        yield
        return
    shape = list(parameter.shape)

    def refuse(grad_outputs: Any) -> None:
        raise RuntimeError(
            f"a parameter {shape} was converted between a forward and its backward, whose gradient "
            f"would reach what the parameter was before: run backward before converting, or "
            f"forward again after"
        )

    handle = node.register_prehook(refuse)  # hooks run in their order: before torch's
    try:
        yield
    except BaseException:
        handle.remove()
        raise
