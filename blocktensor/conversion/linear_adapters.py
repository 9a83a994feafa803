"""Let peft's LoRA adapters of linear layers in FP8 run as thin matmuls.

peft's ``Linear`` calls the base layer, converts the input to the dtype of the adapter (fp32 by
default), multiplies it by A and by B, scales the product, and adds it: each of these steps writes a
tensor of the size of the input or output, and the converted input is saved for backward. With an
FP8 weight, our wrapper of its forward calls ``autograd.any_linear.with_terms``, which computes the
product in the dtype of the output. Whatever is no plain LoRA, or is watched by hooks, keeps peft's
forward. The method is wrapped when the first weight becomes FP8 or a model is converted or loaded,
if peft is imported by then, or by ``import blocktensor.integrations.peft``.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling

from ..autograd.any_linear import linear, with_terms
from ..autograd.low_rank import plus_low_rank
from ..autograd.plan import autocast_dtype
from ..model.running_module import is_watched
from ..ops.runtime.specialize import PLAIN
from ..patches import LINEAR_ADAPTERS
from ..tensor.adapted import LowRank
from ..tensor.refusals import name_module
from ..tensor.torch_internals.frames import only_inlined
from ..tensor.weight import FP8_TYPES


class _Adapter(NamedTuple):
    """One adapter of a linear layer.

    Attributes:
        term: the product that it adds.
        dropout: of its input; None if there is none now.
    """

    term: LowRank
    dropout: nn.Module | None


@LINEAR_ADAPTERS.made_by
def _adapting(theirs: Any) -> Any:
    @functools.wraps(theirs)
    @only_inlined
    def forward(self: Any, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        base = self.base_layer
        is_plain = not (args or kwargs) and _is_plain(self, base, x)
        adapters = _adapters(self, base) if is_plain else None
        if not adapters:
            made: Tensor = theirs(self, x, *args, **kwargs)
            return made
        try:
            return _with_adapters(x, base.weight, base.bias, adapters)
        except (NotImplementedError, TypeError, ValueError) as error:
            if not is_compiling():
                name_module(error, (x, base.weight, base.bias))
            raise

    return forward


def _with_adapters(
    x: Tensor, weight: Tensor, bias: Tensor | None, adapters: Sequence[_Adapter]
) -> Tensor:
    if all(adapter.dropout is None for adapter in adapters):
        return with_terms(x, weight, [adapter.term for adapter in adapters], bias=bias)
    y = linear(x, weight, bias)
    for term, dropout in adapters:
        y = plus_low_rank(y, x if dropout is None else dropout(x), term, None)
    return y


def _is_plain(wrapper: Any, base: Any, x: Tensor) -> bool:
    """Return True if the base is a linear layer in FP8 that nothing watches, with adapters on.

    In fp16 small gradients of adapters become zeros. Under autocast to fp16 peft computes so, too;
    without it, peft's own forward computes in the dtype of the adapter.
    """
    if wrapper._disable_adapters or wrapper.merged_adapters:
        return False
    weight = base._parameters.get("weight")
    if not isinstance(weight, FP8_TYPES):
        return False
    if nn.modules.module._has_any_global_hook() or not _is_own(base, nn.Linear.forward):
        return False
    if x.dtype == torch.float16 and autocast_dtype(x) is None:
        return False
    return type(x) in PLAIN or is_compiling()


def _is_own(module: nn.Module, forward: Any) -> bool:
    """Return True if a call of the module would run ``forward`` and nothing else."""
    is_replaced = "forward" in module.__dict__ or type(module).forward is not forward
    return not (is_replaced or is_watched(module))


def _adapters(wrapper: Any, base: nn.Linear) -> list[_Adapter] | None:
    """Return the active adapters of a layer; None if one of them is no plain LoRA."""
    found = []
    for name in wrapper.active_adapters:
        if name not in wrapper.lora_A:
            continue
        a, b, dropout = wrapper.lora_A[name], wrapper.lora_B[name], wrapper.lora_dropout[name]
        scaling = wrapper.scaling[name]
        is_plain = (
            name not in wrapper.lora_variant
            and type(a) is type(b) is nn.Linear
            and a.bias is b.bias is None
            and _is_own(a, nn.Linear.forward)
            and _is_own(b, nn.Linear.forward)
            and (is_compiling() or (type(a.weight) in PLAIN and type(b.weight) in PLAIN))
            and isinstance(scaling, (int, float))  # as a tensor it may have a gradient
        )
        if not is_plain or not _fits(base.weight, a.weight, b.weight):
            return None
        is_off = _is_own(dropout, nn.Identity.forward) or (
            not dropout.training and _is_own(dropout, nn.Dropout.forward)
        )
        term = LowRank(b.weight, a.weight, scaling)
        found.append(_Adapter(term, None if is_off else dropout))
    return found


def _fits(w: Tensor, a: Tensor, b: Tensor) -> bool:
    """Return True if ``b a`` is a matrix like ``w``; peft says what is wrong otherwise."""
    shapes = (*b.shape[:1], *a.shape[1:]) == tuple(w.shape) and b.shape[1:] == a.shape[:1]
    return shapes and a.device == b.device == w.device
