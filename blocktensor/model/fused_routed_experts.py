"""Experts of transformers, which route rows themselves, that run as one ``gated_experts``."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from .. import functional
from ..autograd.plan import autocast_dtype
from .fused_class import Fused
from .fused_experts import ExpertsParts, why_other_stacks

IMPLEMENTATION = "grouped_mm"
"""The implementation of transformers whose order of sums this is, which is its default."""


def routes_rows(module: nn.Module) -> bool:
    """Whether a module's forward takes tokens, and the experts and weights chosen for each.

    ``@use_experts_implementation`` of transformers makes such modules.
    """
    attributes = vars(module)
    flags = "has_gate", "has_bias", "is_transposed"
    return "config" in attributes and all(isinstance(attributes.get(x), bool) for x in flags)


def why_other_routing(module: Any, stack: str) -> str | None:
    """Why the forward of a module that routes rows is another one; None if it is not.

    Checked in every forward: these attributes may change. ``stack``: the name of one of its stacks.
    """
    chosen = getattr(module.config, "_experts_implementation", None)
    if chosen != IMPLEMENTATION:
        return f"its experts_implementation is {chosen!r}: expected {IMPLEMENTATION!r}"
    if not module.has_gate or module.has_bias or module.is_transposed:
        return "its stacks have biases, are transposed or have no gate"
    if getattr(module, "has_post_expert_norm", False):
        return "a norm follows each expert"
    if getattr(module, "_is_expert_parallel", False):
        return "its experts are spread over ranks"
    if getattr(module, "num_experts", None) != len(module._parameters[stack]):
        return "its num_experts is not the length of its stacks"
    return None


def why_other_autocast(x: Tensor) -> str | None:
    """Why autocast would give the product of down other values of h; None if it would not.

    The module's own forward converts h, of autocast's dtype, to that of the stacks and so of x.
    """
    dtype = autocast_dtype(x)
    if dtype is None or x.dtype in (dtype, torch.float32):
        return None
    return f"h is rounded to {x.dtype} under an autocast to {dtype}"


class FusedRoutedExperts(Fused):
    """Experts that route rows themselves and run as one function."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's own forward wherever that might compute anything else."""
        parts = self.parts_to_run()
        if parts is None or len(args) != 3 or kwargs or why_apart(self, parts, *args) is not None:
            return super().forward(*args, **kwargs)
        return run_parts(self, parts, *args)


def run_parts(
    module: nn.Module, parts: ExpertsParts, x: Tensor, index: Tensor, weights: Tensor
) -> Tensor:
    """What ``module(x, index, weights)`` computes, with all experts as one function.

    Args:
        module: the experts.
        parts: what they compute.
        x: tokens ``[T, K]``.
        index: the experts of each token, ``[T, experts per token]``.
        weights: of their outputs, alike.
    """
    stacks: list[Any] = [module._parameters[name] for name in parts.linears]
    experts, chosen = stacks[0].shape[0], index.shape[-1]
    by_expert, order = torch.sort(index.reshape(-1))  # [T * chosen]
    # histc, as it needs no synchronisation; of integers on CUDA alone
    numbers = by_expert.int() if x.is_cuda else by_expert.float()
    sizes = torch.histc(numbers, bins=experts, min=0, max=experts - 1)
    y = functional.gated_experts(
        x[order // chosen],
        *parts.by_role(stacks),
        sizes.cumsum(0, dtype=torch.int32),
        activation=parts.activation,
        recompute=parts.recompute,
        store_fp8=parts.store_fp8,
    )
    y = y * weights.reshape(-1)[order].unsqueeze(-1)
    back = torch.empty_like(order)
    back[order] = torch.arange(len(order), device=order.device)
    return y[back].view(len(x), chosen, y.shape[1]).sum(1).to(x.dtype)


def why_apart(
    module: nn.Module, parts: ExpertsParts, x: Any, index: Any, weights: Any
) -> str | None:
    """Why these arguments have to be given to the module's own forward; None if they need not be.

    Checked in every forward.
    """
    if not isinstance(x, Tensor) or x.ndim != 2:
        return "its tokens are no matrix"
    if not all(isinstance(t, Tensor) and t.ndim == 2 for t in (index, weights)):
        return "experts and weights of tokens are no matrices"
    return (
        why_other_routing(module, parts.gate)
        or why_other_stacks(module, parts, x.dtype)
        or why_other_autocast(x)
    )
