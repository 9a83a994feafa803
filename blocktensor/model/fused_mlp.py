"""An MLP that runs as one ``functional.gated_mlp``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .. import functional
from ..ops.producers.ops import ActivationName
from ..recipe import Recipe
from ..tensor.fp8_tensor import BlockwiseFP8Tensor
from ..tensor.weight import BlockwiseFP8Weight
from .audit_modules import ModuleTracker
from .fused_class import Fused
from .input_group import InputGroup

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


@dataclass(frozen=True)
class GatedParts:
    """What a module computes: ``down(activation(gate(x)) * up(x))``.

    Attributes:
        gate, up, down: names of its linears; gate and up may be one, which makes gate, then up.
        activation: of ``functional.gated_mlp``.
        act: name of the attribute that holds the activation; None where its code calls a function.
        act_value: what that attribute held.
        recompute, store_fp8: of ``functional.gated_mlp``.
    """

    gate: str
    up: str
    down: str
    activation: ActivationName
    act: str | None = None
    act_value: Any = None
    recompute: bool = False
    store_fp8: bool = False

    @property
    def linears(self) -> tuple[str, ...]:
        """The names of its linears, each once."""
        return tuple(dict.fromkeys((self.gate, self.up, self.down)))

    def by_role(self, of_linears: Sequence[Any]) -> tuple[Any, Any, Any]:
        """Values for ``linears`` as those of gate, up and down; None for an up that gate makes."""
        gate, *up, down = of_linears
        return gate, up[0] if up else None, down


def formula(names: tuple[str, str, str], activation: str) -> str:
    """What a gated MLP with these names computes, for a report."""
    gate, up, down = names
    if gate == up:
        return f"{down}({activation}(gate) * up), both of {gate}(x)"
    return f"{down}({activation}({gate}(x)) * {up}(x))"


def check_names(names: tuple[str, str, str], pattern: str) -> None:
    """Raise ValueError for names of which down is gate or up: they are those of no gated MLP."""
    gate, up, down = names
    if down in (gate, up):
        raise ValueError(
            f"{pattern}: down is {down!r}, as {'gate' if down == gate else 'up'} is: expected "
            f"another; gate and up alone may be one"
        )


_ACTS = ("act_fn", "act", "activation_fn", "activation", "hidden_act")
"""Names of attributes that hold an activation."""


def act_of(module: nn.Module) -> str | None:
    """The attribute that holds a module's activation, if any does; methods are its code."""
    for name in _ACTS:  # a merged dictionary would break torch 2.11's Dynamo
        if callable(module.__dict__.get(name)) or callable(module._modules.get(name)):
            return name
    return None


class FusedMLP(Fused):
    """A gated MLP that runs as one function."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's own forward wherever that might compute anything else."""
        parts = self.parts_to_run()
        is_one = len(args) == 1 and not kwargs and isinstance(args[0], Tensor)
        if parts is None or not is_one or why_apart(self, parts) is not None:
            return super().forward(*args, **kwargs)
        return run_parts(self, parts, args[0])


def run_parts(module: nn.Module, parts: GatedParts, x: Tensor) -> Tensor:
    """What ``module(x)`` computes, as one function."""
    linears: list[Any] = [module._modules[name] for name in parts.linears]
    weights = parts.by_role([linear.weight for linear in linears])
    biases = parts.by_role([linear.bias for linear in linears])
    return functional.gated_mlp(
        x,
        *weights,
        *biases,
        activation=parts.activation,
        recompute=parts.recompute,
        store_fp8=parts.store_fp8,
    )


def why_apart(module: nn.Module, parts: GatedParts, sharded: bool = False) -> str | None:
    """Why the linears of a module have to be called one by one; None if they need not be.

    Checked in every forward: hooks, adapters and activations may come after the fusion.
    ``sharded``: whether FSDP2 may hold the weights.
    """
    recipes: list[Recipe] = []
    for name in parts.linears:
        linear: Any = module._modules.get(name)
        if not isinstance(linear, nn.Linear) or type(linear).forward is not nn.Linear.forward:
            return f"{name} is a {type(linear).__name__}, not an nn.Linear"
        if "forward" in linear.__dict__:
            return f"{name} has a forward of its own"
        weight = linear._parameters.get("weight")
        if not (sharded or isinstance(weight, (BlockwiseFP8Weight, BlockwiseFP8Tensor))):
            return f"{name} is not in FP8"
        for kind in _HOOKS:
            if any(map(_is_of_users, linear.__dict__[kind].values())):
                return f"{name} has hooks"
        if isinstance(weight, (BlockwiseFP8Weight, BlockwiseFP8Tensor)) and not sharded:
            recipes.append(weight.recipe)
    return why_mixed(recipes, "linears") or why_other_activation(module, parts)


def why_mixed(recipes: Sequence[Recipe], weights: str) -> str | None:
    """Return the reason why one function cannot serve weights of these recipes, if any."""
    for setting in ("scale", "wgrad_input"):
        values = dict.fromkeys([getattr(recipe, setting) for recipe in recipes])
        if len(values) > 1:
            return f"its {weights} have {setting}={' and '.join(map(repr, values))}"
    return None


def why_other_activation(module: nn.Module, parts: GatedParts) -> str | None:
    """What may see or change the activation of a module since its fusion; None if nothing does."""
    name = parts.act or act_of(module)
    if name is not None:
        act = getattr(module, name, None)
        if act is not parts.act_value:
            return f"{name} was replaced"
        if isinstance(act, nn.Module):
            if "forward" in act.__dict__:
                return f"{name} has a forward of its own"
            for kind in _HOOKS:
                if any(map(_is_of_users, act.__dict__[kind].values())):
                    return f"{name} has hooks"
    if torch.nn.modules.module._has_any_global_hook():
        return "there are hooks for all modules"
    return None


def _is_of_users(hook: Any) -> bool:
    """Whether a hook is none of those that our own shared casts and audits register."""
    owner = getattr(getattr(hook, "func", hook), "__self__", None)
    return not isinstance(owner, (InputGroup, ModuleTracker))
