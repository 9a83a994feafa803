"""The class of an MLP that runs as one gated MLP, in place of the class that it had.

An instance gets a class of its own, derived from its class, whose ``forward`` calls
``functional.gated_mlp``: no other instance changes, ``isinstance`` and names stay, compilers see an
ordinary method, and nothing refers to the module, which would delay its freeing.
"""

from __future__ import annotations

import copyreg
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .. import functional
from ..autograd import whole_functions
from ..ops.producers.ops import ActivationName
from ..tensor.fp8_tensor import BlockwiseFP8Tensor
from ..tensor.weight import BlockwiseFP8Weight
from .audit_modules import ModuleTracker
from .input_group import InputGroup

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


@dataclass(frozen=True)
class GatedParts:
    """What a module computes: ``down(activation(gate(x)) * up(x))``.

    Attributes:
        gate, up, down: names of its linears.
        activation: of ``functional.gated_mlp``.
        act: name of the attribute that holds the activation; None where its code calls a function.
        act_value: what that attribute held.
        recompute: of ``functional.gated_mlp``.
    """

    gate: str
    up: str
    down: str
    activation: ActivationName
    act: str | None = None
    act_value: Any = None
    recompute: bool = False

    @property
    def linears(self) -> tuple[str, str, str]:
        """The names of its linears."""
        return self.gate, self.up, self.down


class FusedMLP(nn.Module):
    """Comes before the class that an instance had; see :func:`set_parts`."""

    _gated_parts: GatedParts | None = None
    _class_before: type[nn.Module]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's own forward wherever that might compute anything else."""
        parts = self._gated_parts
        is_one = len(args) == 1 and not kwargs and isinstance(args[0], Tensor)
        if parts is None or not is_one or why_apart(self, parts) is not None:
            return super().forward(*args, **kwargs)
        return run_parts(self, parts, args[0])

    def __reduce_ex__(self, protocol: Any) -> Any:
        made = super().__reduce_ex__(protocol)
        is_ours = type(self).__dict__.get("_class_before") is not None
        if not is_ours or not isinstance(made, tuple) or made[0] is not copyreg.__newobj__:  # type: ignore[attr-defined]
            return made
        return rebuild, (self._class_before,), *made[2:]  # no module holds the class by its name


def run_parts(module: nn.Module, parts: GatedParts, x: Tensor) -> Tensor:
    """What ``module(x)`` computes, as one function."""
    gate, up, down = (module._modules[name] for name in parts.linears)
    weights: list[Any] = [linear.weight for linear in (gate, up, down)]  # type: ignore[union-attr]
    biases: list[Any] = [linear.bias for linear in (gate, up, down)]  # type: ignore[union-attr]
    return functional.gated_mlp(
        x, *weights, *biases, activation=parts.activation, recompute=parts.recompute
    )


def why_apart(module: nn.Module, parts: GatedParts, sharded: bool = False) -> str | None:
    """Why the linears of a module have to be called one by one; None if they need not be.

    Checked in every forward: hooks, adapters and activations may come after :func:`set_parts`.
    ``sharded``: whether FSDP2 may hold the weights.
    """
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
    if parts.act is not None:
        act = getattr(module, parts.act, None)
        if act is not parts.act_value:
            return f"{parts.act} was replaced"
        if isinstance(act, nn.Module):
            for kind in _HOOKS:
                if any(map(_is_of_users, act.__dict__[kind].values())):
                    return f"{parts.act} has hooks"
    if torch.nn.modules.module._has_any_global_hook():
        return "there are hooks for all modules"
    return None


def _is_of_users(hook: Any) -> bool:
    """Whether a hook is none of those that our own shared casts and audits register."""
    owner = getattr(getattr(hook, "func", hook), "__self__", None)
    return not isinstance(owner, (InputGroup, ModuleTracker))


def set_parts(module: nn.Module, parts: GatedParts) -> None:
    """Let ``module`` run as one gated MLP from now on."""
    if not isinstance(module, FusedMLP):
        module.__class__ = _fused(type(module))
    module.__dict__["_gated_parts"] = parts


def remove_parts(module: FusedMLP) -> None:
    """Undo :func:`set_parts`."""
    module.__dict__.pop("_gated_parts", None)
    before = type(module).__dict__.get("_class_before")
    if before is not None:  # else its class has another derived from it since, by fully_shard
        module.__class__ = before


def fused_modules(model: nn.Module) -> Iterator[tuple[str, FusedMLP]]:
    """The modules of ``model`` that run as one gated MLP, with their names."""
    for name, module in model.named_modules():
        if isinstance(module, FusedMLP) and module._gated_parts is not None:
            yield name, module


def own_forward(module: nn.Module) -> Any:
    """The forward of ``module`` as it is without :func:`set_parts`."""
    if isinstance(module, FusedMLP):
        return super(FusedMLP, module).forward
    return module.forward


_FUSED: dict[Any, type[FusedMLP]] = {}


def _fused(before: type[nn.Module]) -> type[FusedMLP]:
    found = _FUSED.get(before)
    if found is not None:
        return found
    names = {name: getattr(before, name) for name in ("__module__", "__qualname__", "__doc__")}
    made = type(before.__name__, (FusedMLP, before), {**names, "_class_before": before})
    return _FUSED.setdefault(before, made)


def rebuild(before: type[nn.Module]) -> nn.Module:
    """An empty instance for ``pickle`` and ``copy`` to fill; ``before``: its class as written."""
    whole_functions.announce()
    made: nn.Module = before.__new__(before)
    made.__class__ = _fused(before)
    return made
