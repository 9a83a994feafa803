"""The modules that hold stacks of experts, and the orientation of each stack.

Experts are found by what says that a parameter is one: transformers' flags, the classes of other
libraries by name, and what the caller of ``convert`` names. No parameter is taken for a stack
because it has three dimensions.
"""

from __future__ import annotations

import difflib
import fnmatch
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

Experts = Mapping[str, Sequence[str]]
"""Names of parameters that are stacks, by shell-style patterns of module names."""

Named = Mapping[nn.Module, tuple[str, ...]]
"""The stacks that a caller has named, by module."""

_FLAGS = ("is_transposed", "has_bias", "has_gate")
"""What ``@use_experts_implementation`` of transformers sets on a module of experts."""

_OF_FLAGS = ("gate_up_proj", "gate_proj", "up_proj", "down_proj")
"""The stacks of such modules, under their usual names."""


@dataclass(frozen=True)
class _Kind:
    """What is known of a class of experts: the names of its stacks, and their orientation."""

    names: tuple[str, ...]
    is_transposed: bool


_TORCHTITAN = _Kind(
    (
        *("w1_EFD", "w2_EDF", "w3_EFD", "w1", "w2", "w3"),
        *("mlp1_weight_EGD", "mlp2_weight_EDF", "mlp1_weight", "mlp2_weight"),
    ),
    is_transposed=False,
)

_CLASSES = {
    "GroupedExperts": _TORCHTITAN,
    "GptOssGroupedExperts": _TORCHTITAN,
    "Llama4TextExperts": _Kind(("gate_up_proj", "down_proj"), is_transposed=True),
}
"""Classes of experts by their names: of torchtitan, and of transformers without flags."""


def kind_of_experts(module: nn.Module) -> _Kind | None:
    """What is known of a module of experts; None of other modules."""
    attributes = vars(module)
    if all(isinstance(attributes.get(flag), bool) for flag in _FLAGS):
        return _Kind(_OF_FLAGS, attributes["is_transposed"])
    names = (kind.__name__ for kind in type(module).__mro__)
    return next((_CLASSES[name] for name in names if name in _CLASSES), None)


def stacks_of(module: nn.Module, named: Named | None = None) -> tuple[str, ...]:
    """The names of a module's parameters that are stacks of experts.

    Args:
        module: any module.
        named: stacks that a caller has named.
    """
    kind = kind_of_experts(module)
    known = () if kind is None else kind.names
    asked = () if named is None else named.get(module, ())
    names = dict.fromkeys((*known, *asked))
    return tuple(name for name in names if module._parameters.get(name) is not None)


def is_transposed_stack(module: nn.Module, key: str) -> bool:
    """Whether a stack is known to be ``[E, K, N]``; others are ``[E, N, K]``."""
    kind = kind_of_experts(module)
    return kind is not None and kind.is_transposed and key in kind.names


def experts_per_token(module: nn.Module) -> int:
    """How many experts of a module get each token, as its config says; 1 if nothing says it."""
    names = ("num_experts_per_tok", "top_k", "num_experts_per_token", "moe_topk")
    holders = (getattr(module, "config", None), module)
    found = (getattr(holder, name, None) for holder in holders for name in names)
    return next((x for x in found if isinstance(x, int) and x > 0), 1)


def why_not_a_stack(parameter: Tensor) -> str | None:
    """Why a parameter with the name of a stack cannot be converted; None if it can."""
    if is_lazy(parameter):
        return "experts without a shape yet"
    if parameter.ndim == 3:
        return None
    if parameter.ndim == 4:
        return "experts with 4 dimensions, which several fused projections share"
    return f"experts with {parameter.ndim} dimensions: expected 3"


def named_experts(model: nn.Module, experts: Experts) -> Named:
    """The modules that the patterns of ``experts`` match, each with the stacks named there.

    Raises:
        TypeError: ``experts`` is no mapping of patterns to sequences of names.
        ValueError: a pattern matches no module, or a module lacks a parameter of that name or has
            one that is not ``[E, N, K]`` or ``[E, K, N]``.
    """
    given: Any = experts
    if not isinstance(given, Mapping):
        raise TypeError(
            f"experts={experts!r} is a {type(experts).__name__}: expected patterns of module names "
            f"with the names of their stacks, e.g. {{'*.experts': ['w1', 'w2']}}"
        )
    modules = dict(model.named_modules(remove_duplicate=False))
    found: dict[nn.Module, tuple[str, ...]] = {}
    for pattern, names in experts.items():
        _check_names(pattern, names)
        matches = fnmatch.filter(modules, pattern)
        if not matches:
            near = difflib.get_close_matches(pattern, modules, n=3)
            hint = f"; near it: {', '.join(map(repr, near))}" if near else ""
            raise ValueError(
                f"experts pattern {pattern!r} matches no module of this {type(model).__name__}: "
                f"expected a pattern of the names of modules that hold stacks{hint}"
            )
        for module_name in matches:
            module = modules[module_name]
            for name in names:
                _check_stack(module_name, module, name)
            found[module] = tuple(dict.fromkeys((*found.get(module, ()), *names)))
    return found


def _check_names(pattern: Any, names: Any) -> None:
    is_list = isinstance(names, Sequence) and not isinstance(names, str)
    if not (isinstance(pattern, str) and is_list and all(isinstance(x, str) for x in names)):
        raise TypeError(
            f"experts has {pattern!r}: {names!r}: expected a pattern with a list of the names of "
            f"stacks, e.g. {{'*.experts': ['w1', 'w2']}}"
        )


def _check_stack(module_name: str, module: nn.Module, name: str) -> None:
    parameter = module._parameters.get(name)
    what = f"experts names {name!r} of {module_name!r}"
    if parameter is None:
        has = ", ".join(key for key, x in module._parameters.items() if x is not None) or "none"
        raise ValueError(f"{what}, which has no such parameter: its parameters are {has}")
    reason = why_not_a_stack(parameter)
    if reason is not None:
        raise ValueError(f"{what}, {reason}: expected a parameter [E, N, K] or [E, K, N]")
