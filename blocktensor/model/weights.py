"""Find the parameters that matmuls read: weights of linear layers, stacks of experts.

Linear layers are ``nn.Linear`` and transformers' ``Conv1D``. Stacks of experts are known by
transformers' flags, by the names of other libraries' classes, or because the caller of ``convert``
names them. Three dimensions alone do not make a parameter a stack.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear
from torch.nn.parameter import is_lazy

from ..sharding.dtensor import fp8_part, local_of

# Modules


def is_conv1d(module: nn.Module) -> bool:
    """Return True for transformers' ``Conv1D`` (GPT-2): a linear layer whose weight is ``[K, N]``.

    The class is compared by name, so that transformers need not be installed.
    """
    return hasattr(module, "nf") and any(
        kind.__name__ == "Conv1D" and kind.__module__.partition(".")[0] == "transformers"
        for kind in type(module).__mro__
    )


def is_linear(module: nn.Module) -> bool:
    """Return True for modules whose forward is a linear layer of their ``weight``."""
    return isinstance(module, nn.Linear) or is_conv1d(module)


def is_fully_sharded(kind: type) -> bool:
    """Return True for a class that ``fully_shard`` has created."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    return fsdp is not None and issubclass(kind, fsdp.FSDPModule)


def unsharded_class(module: nn.Module) -> type[nn.Module]:
    """Return a module's class, or its class before ``fully_shard``."""
    return next(kind for kind in type(module).__mro__ if not is_fully_sharded(kind))


def kind_of(module: nn.Module) -> str:
    """Return the name of a module's class, or of its class before ``fully_shard``."""
    return unsharded_class(module).__name__


def full_name(module: str, key: str) -> str:
    """Return the name of a parameter or module, given its own and the name of what holds it."""
    return f"{module}.{key}" if module else key


# Experts

Named = Mapping[nn.Module, tuple[str, ...]]
"""The stacks that the caller of ``convert`` has named, by module."""


class _Kind(NamedTuple):
    """A class of experts: the names of its stacks, and whether they are ``[E, K, N]``."""

    names: tuple[str, ...]
    is_transposed: bool


_FLAGS = ("is_transposed", "has_bias", "has_gate")
"""Attributes that ``@use_experts_implementation`` of transformers sets on experts."""

_OF_FLAGS = ("gate_up_proj", "gate_proj", "up_proj", "down_proj")
"""The usual names of stacks in modules that have these flags."""

_TORCHTITAN = _Kind(
    (
        "w1_EFD",
        "w2_EDF",
        "w3_EFD",
        "w1",
        "w2",
        "w3",
        "mlp1_weight_EGD",
        "mlp2_weight_EDF",
        "mlp1_weight",
        "mlp2_weight",
    ),
    is_transposed=False,
)

_CLASSES = {
    "GroupedExperts": _TORCHTITAN,
    "GptOssGroupedExperts": _TORCHTITAN,
    "Llama4TextExperts": _Kind(("gate_up_proj", "down_proj"), is_transposed=True),
}
"""Classes of experts by their names: of torchtitan, and of transformers without flags."""


def has_flags_of_experts(module: nn.Module) -> bool:
    """Return True for experts with transformers' ``@use_experts_implementation``."""
    attributes = vars(module)
    return all(isinstance(attributes.get(flag), bool) for flag in _FLAGS)


def _kind_of_experts(module: nn.Module) -> _Kind | None:
    if has_flags_of_experts(module):
        return _Kind(_OF_FLAGS, vars(module)["is_transposed"])
    names = (kind.__name__ for kind in type(module).__mro__)
    return next((_CLASSES[name] for name in names if name in _CLASSES), None)


def is_experts(module: nn.Module) -> bool:
    """Return True if transformers' flags, or the class of a module, show that it holds experts."""
    return _kind_of_experts(module) is not None


def experts_per_token(module: nn.Module) -> int:
    """Return the number of experts for each token, from the module's config; 1 if unknown."""
    names = ("num_experts_per_tok", "top_k", "num_experts_per_token", "moe_topk")
    holders = (getattr(module, "config", None), module)
    found = (getattr(holder, name, None) for holder in holders for name in names)
    return next((x for x in found if isinstance(x, int) and x > 0), 1)


# Their weights


def weights_of(module: nn.Module, named: Named | None = None) -> tuple[str, ...]:
    """Return the names of the parameters of a module that ``convert`` may convert.

    Args:
        module: any module.
        named: stacks that the caller of ``convert`` has named.
    """
    if is_linear(module):
        return ("weight",)
    return stacks_of(module, named)


def stacks_of(module: nn.Module, named: Named | None = None) -> tuple[str, ...]:
    """Return the names of a module's parameters that are stacks of experts."""
    kind = _kind_of_experts(module)
    known = () if kind is None else kind.names
    asked = () if named is None else named.get(module, ())
    names = dict.fromkeys((*known, *asked))
    return tuple(name for name in names if module._parameters.get(name) is not None)


_CAST_THEMSELVES = {"torchao", "transformer_engine"}
"""Libraries whose linear layers compute with casts of their own."""


def casts_itself(module: nn.Module) -> str | None:
    """Describe a module of another library that computes with its own casts; None for others.

    Such libraries may replace the class of a linear layer that holds an FP8 weight.
    """
    for kind in type(module).__mro__:
        if kind.__module__.partition(".")[0] in _CAST_THEMSELVES:
            return f"a {kind.__name__} of {kind.__module__}, which casts its weight itself"
    return None


def why_unconvertible(module: nn.Module, key: str) -> str | None:
    """Return why a parameter in :func:`weights_of` cannot be converted; None if it can."""
    if isinstance(module, NonDynamicallyQuantizableLinear):
        return "nn.MultiheadAttention multiplies by it without calling it"
    if (other := casts_itself(module)) is not None:
        return other
    weight: Any = module._parameters.get(key)
    if weight is None:
        return "its weight is computed (parametrized), not a parameter"
    known = type(weight) is nn.Parameter or local_of(weight) is not None
    if not (known or is_lazy(weight) or fp8_part(weight) is not None):
        what = "its weight is" if is_linear(module) else "experts in"
        return f"{what} a {type(weight).__name__}, a type of another library"
    if not is_linear(module):
        return why_not_a_stack(weight)
    if not is_lazy(weight) and weight.ndim != 2:
        return f"its weight has {weight.ndim} dimensions"
    return None


def why_not_a_stack(parameter: Tensor) -> str | None:
    """Return why a parameter with the name of a stack cannot be converted; None if it can."""
    if is_lazy(parameter):
        return "experts without a shape yet"
    if parameter.ndim == 4:
        return "experts with 4 dimensions, which several fused projections share"
    return None if parameter.ndim == 3 else f"experts with {parameter.ndim} dimensions: expected 3"


def is_transposed(module: nn.Module, key: str) -> bool:
    """Return True for a weight that is known to be ``[..., K, N]``; others are ``[..., N, K]``."""
    kind = _kind_of_experts(module)
    in_stack = kind is not None and kind.is_transposed and key in kind.names
    return in_stack or is_conv1d(module)
