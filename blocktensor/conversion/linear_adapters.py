"""Let peft's LoRA adapters of linear layers in FP8 run as thin matmuls.

peft's ``Linear`` calls the base layer, converts the input to the dtype of the adapter (fp32 by
default), multiplies it by A and by B, scales the product, and adds it: each of these steps writes a
tensor of the size of the input or output, and the converted input is saved for backward. With an
FP8 weight, our wrapper of its forward calls ``autograd.linear.with_terms``, which computes the
product in the dtype of the output. Whatever is no plain LoRA keeps peft's forward. The method is
wrapped when a weight becomes FP8, if peft is imported by then, or by
``import blocktensor.integrations.peft``.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.compiler import is_compiling

from ..autograd.linear import linear, with_terms
from ..autograd.low_rank import plus_low_rank
from ..model.running_module import HOOKS
from ..ops.runtime.specialize import PLAIN
from ..patches import LINEAR_ADAPTERS
from ..tensor.adapted import LowRank
from ..tensor.fp8_tensor import BlockwiseFP8Tensor
from ..tensor.torch_internals.frames import only_inlined
from ..tensor.weight import BlockwiseFP8Weight


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
        adapters = _adapters(self) if is_plain else None
        if not adapters:
            made: Tensor = theirs(self, x, *args, **kwargs)
            return made
        weight, bias = base._parameters["weight"], base._parameters["bias"]
        if all(adapter.dropout is None for adapter in adapters):
            return with_terms(x, weight, [adapter.term for adapter in adapters], bias=bias)
        y = linear(x, weight, bias)
        for term, dropout in adapters:
            y = plus_low_rank(y, x if dropout is None else dropout(x), term, None)
        return y

    return forward


def _is_plain(wrapper: Any, base: Any, x: Tensor) -> bool:
    """Return True if the base is a linear layer in FP8 that nothing watches, with adapters on."""
    if wrapper._disable_adapters or wrapper.merged_adapters:
        return False
    if type(base).forward is not nn.Linear.forward or "forward" in base.__dict__:
        return False
    weight = base._parameters.get("weight")
    if not isinstance(weight, (BlockwiseFP8Tensor, BlockwiseFP8Weight)):
        return False
    return not _is_watched(base) and (type(x) in PLAIN or is_compiling())


def _is_watched(module: nn.Module) -> bool:
    return any(module.__dict__[kind] for kind in HOOKS)


def _adapters(wrapper: Any) -> list[_Adapter] | None:
    """Return the active adapters of a layer; None if one of them is no plain LoRA."""
    found = []
    for name in wrapper.active_adapters:
        if name not in wrapper.lora_A:
            continue
        a, b, dropout = wrapper.lora_A[name], wrapper.lora_B[name], wrapper.lora_dropout[name]
        is_plain = (
            name not in wrapper.lora_variant
            and type(a) is type(b) is nn.Linear
            and a.bias is b.bias is None
            and not (_is_watched(a) or _is_watched(b))
            and (is_compiling() or (type(a.weight) in PLAIN and type(b.weight) in PLAIN))
        )
        if not is_plain:
            return None
        is_off = isinstance(dropout, nn.Identity) or not dropout.training
        term = LowRank(b.weight, a.weight, wrapper.scaling[name])
        found.append(_Adapter(term, None if is_off else dropout))
    return found
