"""Experts of a model that compute a gated MLP by groups of rows, and their verification."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any, NamedTuple, get_args

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..distributed.dtensor import as_if_cut, local_of
from ..distributed.fsdp.gather import GatheredInFP8
from ..ops.producers.ops import ActivationName
from .fuse_verify import Compared, Drawn, why_different, why_not_one_function
from .fused_class import Fused, own_forward
from .fused_experts import Dtypes, ExpertsParts, FusedExperts, run_parts
from .fused_mlp import act_of, check_names, formula
from .fused_routed_experts import (
    FusedRoutedExperts,
    routes_rows,
    why_other_autocast,
    why_other_routing,
)
from .fused_routed_experts import run_parts as run_routed
from .module_names import matching
from .product_weights import fp8_part, kind_of

_STACKS = (
    ("w1_EFD", "w3_EFD", "w2_EDF"),
    ("w1", "w3", "w2"),
    ("gate_proj", "up_proj", "down_proj"),
    ("gate_up_proj", "gate_up_proj", "down_proj"),
)
"""Names of the stacks gate, up and down: torchtitan's, the examples', those of linears;
transformers', whose gate and up are one."""

ExpertsNames = Mapping[str, tuple[str, str, str, str | None]]

_ComparedBy = Callable[[nn.Module, ExpertsParts, Drawn, Dtypes], Compared]


class FoundExperts(NamedTuple):
    """A module that has the stacks of gated experts.

    Attributes:
        stacks: names of its parameters gate, up and down; gate and up may be one.
        activation: what it is, if somebody said so.
    """

    name: str
    module: nn.Module
    stacks: tuple[str, str, str]
    activation: str | None = None

    def computes(self, activation: str | None) -> str:
        """What it is taken for, with this activation."""
        return f"{formula(self.stacks, activation or self.activation or '?')} by expert"


def candidates(model: nn.Module, named: ExpertsNames) -> Iterator[FoundExperts]:
    """The modules of experts by the names of this file, and those that ``named`` names.

    Raises:
        ValueError: names that are not four, a pattern that matches no module, or a module without
            the stacks it says.
    """
    modules = dict(model.named_modules())
    by_name = _named_by_hand(model, named)
    for name, module in modules.items():
        if name in by_name:
            yield by_name[name]
            continue
        for stacks in _STACKS:
            if all(_is_stack(module, x) for x in stacks):
                yield FoundExperts(name, module, stacks)
                break


def _is_stack(module: nn.Module, name: str) -> bool:
    """Whether a parameter of this name is a stack in FP8."""
    stack = module._parameters.get(name)
    return stack is not None and stack.ndim == 3 and fp8_part(stack) is not None


def _named_by_hand(model: nn.Module, named: ExpertsNames) -> dict[str, FoundExperts]:
    modules, found = dict(model.named_modules()), {}
    for pattern, names in named.items():
        if len(names) != 4:
            raise ValueError(
                f"experts={{{pattern!r}: {names!r}}}: expected (gate, up, down, activation), e.g. "
                f"('w1', 'w3', 'w2', 'silu')"
            )
        gate, up, down, activation = names
        stacks = gate, up, down
        check_names(stacks, f"experts pattern {pattern!r}")
        if activation is not None and activation not in get_args(ActivationName):
            raise ValueError(
                f"experts pattern {pattern!r}: no activation is called {activation!r}: expected "
                f"one of {', '.join(get_args(ActivationName))}, or None to try all"
            )
        for name in matching(model, pattern, "experts", "*.experts"):
            module = modules[name]
            missing = [x for x in stacks if getattr(module._parameters.get(x), "ndim", 0) != 3]
            if missing:
                held = ", ".join(map(repr, module._parameters)) or "no parameters"
                raise ValueError(
                    f"experts pattern {pattern!r} names {name!r}, a {kind_of(module)} without a "
                    f"stack {missing[0]!r}; it has {held}"
                )
            found[name] = FoundExperts(name, module, stacks, activation)
    return found


def parts_of(found: FoundExperts, recompute: bool, drawn: Drawn) -> tuple[ExpertsParts | None, str]:
    """What the experts compute, if it could be told, and why they are left alone, if they are."""
    if reason := _why_unlike(found):
        return None, reason
    module, first = found.module, ""
    routed = routes_rows(module)
    if routed and (other := why_other_routing(module, found.stacks[0])):
        return None, other
    act = act_of(module)
    activations = (found.activation,) if found.activation else get_args(ActivationName)
    given = (False,) if routed else (False, True)
    compared = _compared_routed if routed else _compared
    pairs = _dtypes(fp8_part(module._parameters[found.stacks[0]]).dtype)
    for ends, activation in itertools.product(given, activations):
        parts = ExpertsParts(
            *found.stacks,
            activation,
            act,
            None if act is None else getattr(module, act),
            recompute,
            ends=ends,
        )
        verified = []
        for dtypes in pairs:
            why = why_different(compared(module, parts, drawn, dtypes), drawn)
            first = first or why or ""
            if why is None:
                verified.append(dtypes)
        if verified:
            parts = replace(parts, dtypes=tuple(verified))
            return _with_local_parts(found, parts, compared, drawn)
    return None, first


def _with_local_parts(
    found: FoundExperts, parts: ExpertsParts, compared: _ComparedBy, drawn: Drawn
) -> tuple[ExpertsParts | None, str]:
    """Verify ``parts`` on stacks that ranks have cut; return them and a reason against them.

    The module's forward may take the local parts, as torchtitan's does, or do anything else with a
    DTensor.
    """
    if not (dist.is_available() and dist.is_initialized()):
        return parts, ""
    cut = replace(parts, to_local=True)
    why = why_different(compared(found.module, cut, drawn, parts.dtypes[0]), drawn)
    if why is None:
        return cut, ""
    if any(_stays_cut(found.module._parameters[name]) for name in parts.linears):
        return None, f"with stacks that are DTensors it {why}"
    return parts, ""


def _stays_cut(stack: Any) -> bool:
    """Return True for a stack that is a DTensor in forward too, where FSDP2 has gathered it."""
    local = local_of(stack)
    if local is None:
        return False
    cuts = sum(not placement.is_replicate() for placement in stack.placements)
    return cuts > isinstance(local, GatheredInFP8)


def _dtypes(stacks: torch.dtype) -> list[Dtypes]:
    """Of rows and of stacks, that a forward may have: all that a module converts, or FSDP2."""
    if stacks != torch.float32:
        return [(stacks, stacks)]
    return [(torch.bfloat16, stacks), (stacks, stacks), (torch.bfloat16, torch.bfloat16)]


def kind_for(module: nn.Module) -> type[Fused]:
    """How a module of experts runs when it is fused."""
    return FusedRoutedExperts if routes_rows(module) else FusedExperts


def _why_unlike(found: FoundExperts) -> str:
    """Why experts can be no gated MLP of their stacks, by their looks; empty if they may be one."""
    module = found.module
    if "forward" in module.__dict__:
        return "its forward was replaced on the instance"
    recipes = []
    for name in found.stacks:
        held = fp8_part(module._parameters[name])
        if held is None:
            return f"{name} is not in FP8"
        recipes.append(held.recipe)
    if reason := why_not_one_function(recipes, "stacks"):
        return reason
    act = act_of(module)
    others = [name for name, x in module._modules.items() if x is not None and name != act]
    others += [name for name, x in module._parameters.items()
               if x is not None and name not in found.stacks]  # fmt: skip
    others += [name for name, x in module._buffers.items() if x is not None]
    return f"has more than stacks and an activation: {', '.join(others)}" if others else ""


def _compared(module: nn.Module, parts: ExpertsParts, drawn: Drawn, dtypes: Dtypes) -> Compared:
    """The experts as written and fused, on rows of some experts, of none and of no group."""
    given: dict[str, Tensor] = {}

    def rows_for(parameters: dict[str, Tensor]) -> Tensor:
        stack = parameters[parts.gate]
        x = drawn.rows(stack.shape[2], stack).flatten(0, 1).to(dtypes[0])
        sizes = torch.zeros(len(stack), dtype=torch.int32, device=x.device)
        sizes[0] += len(x) // 2
        sizes[-1] += len(x) // 3
        given["groups"] = sizes.cumsum(0, dtype=torch.int32) if parts.ends else sizes
        return x

    return Compared(
        module,
        [(module, name, name) for name in parts.linears],
        lambda x: own_forward(module)(x, given["groups"]),
        lambda x: run_parts(module, parts, x, given["groups"]),
        rows_for,
        dtypes[1],
        as_if_cut if parts.to_local else None,
    )


def _compared_routed(
    module: nn.Module, parts: ExpertsParts, drawn: Drawn, dtypes: Dtypes
) -> Compared:
    """Experts that route rows, on two experts a token and none for one of the experts."""
    routing: dict[str, Any] = {}

    def rows_for(parameters: dict[str, Tensor]) -> Tensor:
        stack = parameters[parts.gate]
        x = drawn.rows(stack.shape[2], stack).flatten(0, 1).to(dtypes[0])
        tokens = torch.arange(len(x), device=x.device)
        used = max(1, len(stack) - 1)
        routing["index"] = torch.stack([tokens * 5 % used, (tokens * 3 + 1) % used], 1)
        routing["experts"] = len(stack)
        return x

    def routed(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        weights = x[:, :2].float().clamp(-1, 1).softmax(-1)  # so that their gradients show in x's
        return x, routing["index"], weights.to(x.dtype)

    def as_written(x: Tensor) -> Any:
        experts = module.num_experts
        module.num_experts = routing["experts"]  # of the drawn stacks
        try:
            return own_forward(module)(*routed(x))
        finally:
            module.num_experts = experts

    def fused(x: Tensor) -> Any:
        return as_written(x) if why_other_autocast(x) else run_routed(module, parts, *routed(x))

    return Compared(
        module,
        [(module, name, name) for name in parts.linears],
        as_written,
        fused,
        rows_for,
        dtypes[1],
        as_if_cut if parts.to_local else None,
    )
