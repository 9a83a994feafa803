"""Run experts that compute a gated MLP by groups of rows as ``functional.gated_experts``."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .. import functional
from ..autograd.plan import autocast_dtype
from ..model.weights import has_flags_of_experts
from ..sharding.dtensor import as_if_cut, fp8_part, local_of
from ..sharding.fsdp.gather import GatheredInFP8
from ..tensor.base import FP8Base
from .layer_names import GATED_EXPERTS
from .mlp import Gated
from .pattern import Drawn, Pattern, Sample, why_different

_Dtypes = tuple[torch.dtype, torch.dtype]
"""Dtypes of rows and of stacks."""

IMPLEMENTATION = "grouped_mm"
"""The implementation of transformers, its default, whose order of sums this file uses."""


@dataclass(frozen=True)
class Experts(Gated):
    """Experts whose forward gets rows sorted by expert, and their groups.

    Attributes:
        gate, up, down: names of the stacks ``[E, out, in]``; gate and up may be one.
        dtypes: the pairs of dtypes with which this was verified.
        ends: True if the module gets the ends of groups, ``offs``; False if it gets their sizes.
        to_local: True if it takes the local parts of stacks that are DTensors.
    """

    dtypes: tuple[_Dtypes, ...] = ()
    ends: bool = False
    to_local: bool = False

    inputs = 2
    noun = "stacks"
    known = GATED_EXPERTS

    @staticmethod
    def _formula(names: tuple[str, str, str], activation: str) -> str:
        return f"{Gated._formula(names, activation)} by expert"

    @classmethod
    def _parts(cls, module: nn.Module) -> dict[str, Any]:
        stacks = {x: p for x, p in module._parameters.items() if getattr(p, "ndim", 0) == 3}
        return {x: p for x, p in stacks.items() if fp8_part(p) is not None}

    @classmethod
    def _weight(cls, module: nn.Module, name: str) -> Any:
        return module._parameters.get(name)

    @classmethod
    def _why_unlike(cls, module: nn.Module, linears: tuple[str, str, str], act: str | None) -> str:
        reason = super()._why_unlike(module, linears, act)
        if not reason and _routes_rows(module):
            return why_other_routing(module, linears[0]) or ""
        return reason

    @classmethod
    def code_of(cls, module: nn.Module) -> list[Any]:
        """Return the forward, or the implementation of it that :meth:`why_not` compares."""
        return [_grouped_mm()] if _routes_rows(module) else super().code_of(module)

    @classmethod
    def _patterns(
        cls, module: nn.Module, linears: tuple[str, str, str], activations: Sequence[Any]
    ) -> Sequence[Pattern]:
        if _routes_rows(module):
            return [RoutedExperts(*linears, x) for x in activations]
        both = itertools.product((False, True), activations)
        return [Experts(*linears, x, ends=ends) for ends, x in both]

    def verify(self, module: nn.Module, drawn: Drawn) -> tuple[Pattern | None, str]:
        """Verify the experts with each pair of dtypes that may occur, and on cut stacks.

        The module's forward may take the local parts of stacks that ranks have cut, as
        torchtitan's does, or do anything else with a DTensor.
        """
        reasons: dict[_Dtypes, str | None] = {
            dtypes: why_different(replace(self, dtypes=(dtypes,)), module, drawn)
            for dtypes in _dtypes(fp8_part(self._weight(module, self.gate)).dtype)
        }
        verified = tuple(dtypes for dtypes, why in reasons.items() if why is None)
        if not verified:
            return None, str(next(iter(reasons.values())))
        pattern = replace(self, dtypes=verified)
        if not (dist.is_available() and dist.is_initialized()):
            return pattern, ""
        why = why_different(replace(pattern, dtypes=verified[:1], to_local=True), module, drawn)
        if why is None:
            return replace(pattern, to_local=True), ""
        if any(_stays_cut(self._weight(module, name)) for name in self.linears):
            return None, f"with stacks that are DTensors it {why}"
        return pattern, ""

    def why_not(self, module: Any, *args: Any) -> str | None:
        """Return why the module's own forward must run on these arguments, if it must."""
        x, groups = args
        if not isinstance(x, Tensor) or x.ndim != 2:
            return "its rows are no matrix"
        if not isinstance(groups, Tensor) or groups.ndim != 1:
            return "its groups are no vector"
        if self.ends and groups.dtype != torch.int32:
            return "the ends of its groups are not int32"
        dtype = autocast_dtype(x)
        if dtype not in (None, torch.bfloat16):  # it may convert to its own dtype
            return f"it was not verified under an autocast to {dtype}"
        return self._why_other_stacks(module, x.dtype)

    def _why_other_stacks(self, module: nn.Module, rows: torch.dtype) -> str | None:
        """Return why one function cannot compute with these stacks and rows of a dtype, if so."""
        held: dict[str, Any] = {}
        for name in self.linears:
            stack: Any = module._parameters.get(name)
            local = local_of(stack) if self.to_local else None
            part = stack if local is None else local
            held[name] = part if isinstance(part, FP8Base) else None
            if held[name] is not None and (rows, stack.dtype) not in self.dtypes:
                return f"its rows are {rows} and {name} is {stack.dtype}"
        return self._why_no_recipe(held) or self.why_watched(module)

    def run(self, module: Any, *args: Any) -> Tensor:
        """Compute the experts as one function of rows and groups."""
        x, groups = args
        stacks = [self._stack_of(module, name, x.dtype) for name in self.linears]
        return self._gated(x, stacks, groups if self.ends else groups.cumsum(0, dtype=torch.int32))

    def _gated(self, x: Tensor, stacks: Sequence[Any], offs: Tensor) -> Tensor:
        return functional.gated_experts(
            x,
            *self.by_role(stacks),
            offs,
            activation=self.activation,
            recompute=self.recompute,
        )

    def _stack_of(self, module: nn.Module, name: str, dtype: torch.dtype) -> Any:
        """Return a stack as the matmuls of the module's own forward read it for these rows."""
        stack: Any = module._parameters.get(name)
        if self.to_local and local_of(stack) is not None:
            stack = stack.to_local()
        return stack if stack.dtype == dtype else stack.to(dtype)

    def parameters(self, module: Any) -> list[tuple[nn.Module, str, str]]:
        """List the stacks."""
        return [(module, name, name) for name in self.linears]

    def drawn_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Return the dtype of drawn stacks."""
        return self.dtypes[0][1]

    def held_as(self, parameter: nn.Parameter) -> Any:
        """Return a drawn stack, cut as by ranks if cut stacks are verified."""
        return as_if_cut(parameter) if self.to_local else parameter

    def _rows(self, stack: Tensor, drawn: Drawn) -> Tensor:
        return drawn.rows(stack).flatten(0, 1).to(self.dtypes[0][0])

    def sample(self, parameters: Mapping[str, Tensor], drawn: Drawn) -> Sample:
        """Return rows for some experts, no rows for others, and rows of no group."""
        stack = parameters[self.gate]
        x = self._rows(stack, drawn)
        sizes = torch.zeros(len(stack), dtype=torch.int32, device=x.device)
        sizes[0] += len(x) // 2
        sizes[-1] += len(x) // 3
        groups = sizes.cumsum(0, dtype=torch.int32) if self.ends else sizes
        return x, lambda x: (x, groups)


class RoutedExperts(Experts):
    """Experts of transformers, whose forward gets tokens and the experts and weights of each."""

    inputs = 3

    def why_not(self, module: Any, *args: Any) -> str | None:
        """Return why the module's own forward must run on these arguments, if it must."""
        x, index, weights = args
        if not isinstance(x, Tensor) or x.ndim != 2:
            return "its tokens are no matrix"
        if not all(isinstance(t, Tensor) and t.ndim == 2 for t in (index, weights)):
            return "experts and weights of tokens are no matrices"
        other = why_other_routing(module, self.gate) or self._why_other_stacks(module, x.dtype)
        if other is not None:
            return other
        dtype = autocast_dtype(x)
        if dtype is None or x.dtype in (dtype, torch.float32):
            return None
        # the module's own forward converts h from autocast's dtype to the dtype of the stacks
        return f"h is rounded to {x.dtype} under an autocast to {dtype}"

    def run(self, module: Any, *args: Any) -> Tensor:
        """Compute all experts as one function of tokens ``[T, K]``, and sum the results by token.

        The experts of each token, and the weights of their outputs, are ``[T, chosen]``.
        """
        x, index, weights = args
        stacks: list[Any] = [module._parameters[name] for name in self.linears]
        experts, chosen = stacks[0].shape[0], index.shape[-1]
        by_expert, order = torch.sort(index.reshape(-1))  # [T * chosen]
        # histc needs no synchronisation; integers only on CUDA
        numbers = by_expert.int() if x.is_cuda else by_expert.float()
        sizes = torch.histc(numbers, bins=experts, min=0, max=experts - 1)
        y = self._gated(x[order // chosen], stacks, sizes.cumsum(0, dtype=torch.int32))
        y = y * weights.reshape(-1)[order].unsqueeze(-1)
        back = torch.empty_like(order)
        back[order] = torch.arange(len(order), device=order.device)
        return y[back].view(len(x), chosen, y.shape[1]).sum(1).to(x.dtype)

    def settings(self, parameters: Mapping[str, Tensor]) -> dict[str, Any]:
        """Return the number of drawn experts."""
        return {"num_experts": len(parameters[self.gate])}

    def sample(self, parameters: Mapping[str, Tensor], drawn: Drawn) -> Sample:
        """Return tokens with two experts each, so that one expert gets no tokens."""
        stack = parameters[self.gate]
        rows = self._rows(stack, drawn)
        tokens, used = torch.arange(len(rows), device=rows.device), max(1, len(stack) - 1)
        index = torch.stack([tokens * 5 % used, (tokens * 3 + 1) % used], 1)

        def routed(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            weights = x[:, :2].float().clamp(-1, 1).softmax(-1)  # their gradients reach x
            return x, index, weights.to(x.dtype)

        return rows, routed


def _grouped_mm() -> Any:
    """Return transformers' own implementation of experts."""
    from transformers.integrations.moe import grouped_mm_experts_forward

    return grouped_mm_experts_forward


def _registered() -> Any:
    """Return the implementation that transformers runs."""
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    return ALL_EXPERTS_FUNCTIONS.get(IMPLEMENTATION)


def _routes_rows(module: nn.Module) -> bool:
    """Return True for experts of transformers, which route tokens as their config says."""
    return "config" in vars(module) and has_flags_of_experts(module)


def why_other_routing(module: Any, stack: str) -> str | None:
    """Return why a module routes rows in another way than the verified one, if it does.

    It is called in every forward, since these attributes may change. ``stack``: the name of a
    stack.
    """
    chosen = getattr(module.config, "_experts_implementation", None)
    if chosen != IMPLEMENTATION:
        return f"its experts_implementation is {chosen!r}: expected {IMPLEMENTATION!r}"
    if _registered() is not _grouped_mm():
        return f"its experts_implementation {IMPLEMENTATION!r} is another than transformers' own"
    if not module.has_gate or module.has_bias or module.is_transposed:
        return "its stacks have biases, are transposed or have no gate"
    if getattr(module, "has_post_expert_norm", False):
        return "a norm follows each expert"
    if getattr(module, "_is_expert_parallel", False):
        return "its experts are spread over ranks"
    if getattr(module, "num_experts", None) != len(module._parameters[stack]):
        return "its num_experts is not the length of its stacks"
    return None


def _stays_cut(stack: Any) -> bool:
    """Return True for a stack that is still a DTensor in forward, after a gather by FSDP2."""
    local = local_of(stack)
    if local is None:
        return False
    cuts = sum(not placement.is_replicate() for placement in stack.placements)
    return cuts > isinstance(local, GatheredInFP8)


def _dtypes(stacks: torch.dtype) -> list[_Dtypes]:
    """List the dtypes that may occur in a forward: all, if a module or FSDP2 converts them."""
    if stacks != torch.float32:
        return [(stacks, stacks)]
    return [(torch.bfloat16, stacks), (stacks, stacks), (torch.bfloat16, torch.bfloat16)]
