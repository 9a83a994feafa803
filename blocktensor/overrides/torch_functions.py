"""Collect the torch functions that the FP8 types override, above autograd.

``matmul_functions.py`` has the functions that multiply. Functions without an override reach
``tensor/aten/``, below autograd. ``torch.autograd.grad`` and ``backward`` with FP8 inputs are
overridden because torch would switch off all overrides while such a call runs, but activation
checkpointing needs them to run forwards again.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.graph import get_gradient_edge
from torch.compiler import is_dynamo_compiling
from torch.utils._pytree import tree_leaves, tree_map

from ..autograd.any_linear import linear
from ..ops import checks
from ..tensor.base import FP8Base, MasterBase
from ..tensor.compat.swap_in import swap_in
from ..tensor.fp8_tensor import BlockwiseFP8Tensor
from ..tensor.refusals import UNFREEZE, with_remedy
from ..tensor.weight import BlockwiseFP8Weight
from .by_caller import BY_CALLER, caller_of_override
from .matmul_functions import MATMULS


def _linear_cross_entropy(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    *,
    linear_bias: Tensor | None = None,
    ignore_index: int | None = None,
    options: Any = None,
    **how: Any,
) -> Tensor:
    if options is not None:  # the chunks of torch's own function would run in high precision
        raise NotImplementedError(
            "F.linear_cross_entropy of an FP8 weight in chunks (options=): pass options=None, or "
            "call blocktensor.functional.linear_cross_entropy(x, w, target, bias)"
        )
    ignored = -100 if ignore_index is None else ignore_index
    logits = linear(input, linear_weight, linear_bias)
    return F.cross_entropy(logits, target, ignore_index=ignored, **how)


def _get_data(tensor: Tensor) -> Tensor:
    # detach() shares the version counter, unlike .data: writes through it are noticed
    return tensor.detach()


_PREPARES = "peft.utils.other", "prepare_model_for_kbit_training"


def _set_data(tensor: Tensor, new: Tensor) -> None:
    shape, dtype = tuple(tensor.shape), new.dtype
    if not isinstance(tensor, BlockwiseFP8Weight) or shape != tuple(new.shape):
        kind: Callable[[str], NotImplementedError] = NotImplementedError
        remedy = "use .copy_(), or torch.utils.swap_tensors to change the type"
        if shape != tuple(new.shape):
            remedy = (
                "assign a new nn.Parameter to the module, and call blocktensor.convert(model) again"
            )
        if caller_of_override().place == _PREPARES:
            remedy = (
                "a frozen base in FP8 needs no preparation: leave prepare_model_for_kbit_training "
                "out, and call model.gradient_checkpointing_enable() and "
                "model.enable_input_require_grads() yourself if you want checkpoints"
            )
        elif isinstance(tensor, BlockwiseFP8Tensor) and shape == tuple(new.shape):
            kind = with_remedy
            remedy = f"to write to a frozen weight (merge an adapter into it, say), {UNFREEZE}"
        raise kind(
            f"cannot set .data of {tensor!r} to a tensor of shape {list(new.shape)}, {dtype} "
            f"on {new.device}: {remedy}"
        )
    if isinstance(new, BlockwiseFP8Tensor):
        raise TypeError(
            f"the new .data of an FP8 weight is {new!r}, which holds no high-precision values: "
            f"call .dequantize() first, or blocktensor.freeze(model) to drop the masters"
        )
    checks.high_precision(new, "the new .data of an FP8 weight")
    master = new.master if isinstance(new, BlockwiseFP8Weight) else new.detach()
    layout = dtype, new.device, new.stride(), new.storage_offset()
    if (tensor.dtype, tensor.device, tensor.stride(), tensor.storage_offset()) == layout:
        tensor._replace_master(master)
    else:
        swap_in(tensor, BlockwiseFP8Weight(master, tensor.recipe))


def _inner_tensors(tensor: BlockwiseFP8Tensor | BlockwiseFP8Weight) -> list[Tensor]:
    return [getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]]


# torch's own functions would read the storage of the wrapper, which has none


def _share_memory(tensor: BlockwiseFP8Tensor | BlockwiseFP8Weight) -> Tensor:
    with torch._C.DisableTorchFunctionSubclass():
        for inner in _inner_tensors(tensor):
            inner.share_memory_()
    return tensor


def _is_shared(tensor: BlockwiseFP8Tensor | BlockwiseFP8Weight) -> bool:
    with torch._C.DisableTorchFunctionSubclass():
        return all(inner.is_shared() for inner in _inner_tensors(tensor))


def _of_values(name: str) -> Callable[..., Any]:
    """Call ``Tensor.name`` on the master; torch itself would read the wrapper's memory."""

    def run(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        if isinstance(tensor, BlockwiseFP8Weight):
            return getattr(tensor.high_precision(), name)(*args, **kwargs)
        if isinstance(tensor, MasterBase):  # the rows of a rank
            return getattr(tensor.master, name)(*args, **kwargs)
        raise NotImplementedError(
            f"a {type(tensor).__name__} has no {name}(), since it holds no high-precision values: "
            f"call .dequantize() first, or take .rowwise_data and .rowwise_scale"
        )

    return run


def _grad(outputs: Any, inputs: Any, *, materialize_grads: bool = False, **how: Any) -> Any:
    made = _on_edges(torch.autograd.grad, outputs, inputs, **how)
    if not materialize_grads:  # torch cannot create zeros for edges, which have no shape
        return made
    zeros = functools.partial(torch.zeros_like, requires_grad=how["create_graph"])
    return tuple(zeros(x) if grad is None else grad for x, grad in zip(inputs, made, strict=True))


def _edge(x: Any) -> Any:
    """Return the graph edge of an FP8 tensor; return anything else unchanged."""
    if not isinstance(x, FP8Base) or not x.requires_grad or is_dynamo_compiling():
        return x
    with torch._C.DisableTorchFunctionSubclass():
        return get_gradient_edge(x)


def _on_edges(run: Callable[..., Any], outputs: Any, inputs: Any = None, **how: Any) -> Any:
    """Call ``run`` with graph edges in place of FP8 tensors, so that torch keeps overrides on."""
    outputs, inputs = tree_map(_edge, (outputs, inputs))
    # An FP8 tensor without a gradient stays, which torch refuses; so do all while a compiler traces
    left = any(isinstance(x, FP8Base) for x in tree_leaves((outputs, inputs)))
    with torch._C.DisableTorchFunctionSubclass() if left else nullcontext():
        return run(outputs, inputs=inputs, **how)


OVERRIDES: dict[Any, Callable[..., Any]] = {
    **MATMULS,
    Tensor.data.__get__: _get_data,  # type: ignore[attr-defined]
    Tensor.data.__set__: _set_data,  # type: ignore[attr-defined]
    Tensor.share_memory_: _share_memory,
    Tensor.is_shared: _is_shared,
    **{
        getattr(Tensor, name): _of_values(name)
        for name in ("__dlpack__", "__dlpack_device__", "numpy", "__array__", "tolist")
    },
    **BY_CALLER,
    torch.autograd.grad: _grad,
    torch.autograd.backward: functools.partial(_on_edges, torch.autograd.backward),
    Tensor.backward: lambda x, gradient, **how: torch.autograd.backward(x, gradient, **how),
}
"""The overridden torch functions, for all FP8 types."""

if hasattr(F, "linear_cross_entropy"):  # from torch 2.13 on
    OVERRIDES[F.linear_cross_entropy] = _linear_cross_entropy
