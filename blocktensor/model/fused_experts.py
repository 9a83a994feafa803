"""Experts that run as one ``functional.gated_experts``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .. import functional
from ..distributed.dtensor import local_of
from ..tensor.base import FP8Base
from .fused_class import Fused
from .fused_mlp import GatedParts, why_mixed, why_other_activation

Dtypes = tuple[torch.dtype, torch.dtype]
"""Of rows and of stacks."""


@dataclass(frozen=True)
class ExpertsParts(GatedParts):
    """What a module of experts computes from rows sorted by expert, and their groups.

    Attributes:
        gate, up, down: names of its stacks, ``[E, out, in]``; gate and up may be one.
        dtypes: those with which this was verified.
        ends: whether it is given the ends of groups, ``offs``, and not their sizes.
        to_local: whether it takes the local parts of stacks that are DTensors.
    """

    dtypes: tuple[Dtypes, ...] = ()
    ends: bool = False
    to_local: bool = False


class FusedExperts(Fused):
    """Experts that run as one function."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's own forward wherever that might compute anything else."""
        parts = self.parts_to_run()
        if parts is None or len(args) != 2 or kwargs or why_apart(self, parts, *args) is not None:
            return super().forward(*args, **kwargs)
        return run_parts(self, parts, *args)


def run_parts(module: nn.Module, parts: ExpertsParts, x: Tensor, groups: Tensor) -> Tensor:
    """What ``module(x, groups)`` computes, as one function."""
    stacks = [_stack_of(module, parts, name, x.dtype) for name in parts.linears]
    offs = groups if parts.ends else groups.cumsum(0, dtype=torch.int32)
    return functional.gated_experts(
        x,
        *parts.by_role(stacks),
        offs,
        activation=parts.activation,
        recompute=parts.recompute,
        store_fp8=parts.store_fp8,
    )


def _stack_of(module: nn.Module, parts: ExpertsParts, name: str, dtype: torch.dtype) -> Any:
    """One of its stacks, as the products of its own forward read it for rows of this dtype."""
    stack: Any = module._parameters.get(name)
    if parts.to_local and local_of(stack) is not None:
        stack = stack.to_local()
    return stack if stack.dtype == dtype else stack.to(dtype)


def why_apart(module: nn.Module, parts: ExpertsParts, x: Any, groups: Any) -> str | None:
    """Why these arguments have to be given to the module's own forward; None if they need not be.

    Checked in every forward.
    """
    if not isinstance(x, Tensor) or x.ndim != 2:
        return "its rows are no matrix"
    if not isinstance(groups, Tensor) or groups.ndim != 1:
        return "its groups are no vector"
    if parts.ends and groups.dtype != torch.int32:
        return "the ends of its groups are not int32"
    return why_other_stacks(module, parts, x.dtype)


def why_other_stacks(module: nn.Module, parts: ExpertsParts, rows: torch.dtype) -> str | None:
    """Why one function cannot serve the stacks and the activation as they are; None if it can.

    ``rows``: the dtype of the rows.
    """
    recipes = []
    for name in parts.linears:
        stack: Any = module._parameters.get(name)
        local = local_of(stack) if parts.to_local else None
        held: Any = stack if local is None else local
        if not isinstance(held, FP8Base):
            return f"{name} is not in FP8"
        recipes.append(held.recipe)  # type: ignore[attr-defined]
        if (rows, stack.dtype) not in parts.dtypes:
            return f"its rows are {rows} and {name} is {stack.dtype}"
    return why_mixed(recipes, "stacks") or why_other_activation(module, parts)
