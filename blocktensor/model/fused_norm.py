"""A norm whose result is cast as it is computed, for the linears that read it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.compiler import is_dynamo_compiling

from ..autograd import whole_functions
from ..autograd.check_operands import autocast_dtype
from ..ops.runtime.specialize import PLAIN
from ..recipe import Recipe
from ..tensor.norm_call import AnyNormKind
from .fused_class import Fused


@dataclass(frozen=True)
class NormParts:
    """What a norm computes, and for which linears.

    Attributes:
        kind: of :func:`blocktensor.functional.rms_norm`, or a norm of torch.
        eps_name: the attribute of the norm that holds its epsilon.
        eps: what that held.
        linears: those that read the norm's result.
        recipe: of their weights.
        recompute: whether backward makes the cast that weight gradients read.
    """

    kind: AnyNormKind
    eps_name: str
    eps: float | None
    linears: tuple[nn.Module, ...]
    recipe: Recipe
    recompute: bool = False


class FusedNorm(Fused):
    """An RMS norm that returns its result in FP8, with its values for other readers."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's own forward wherever that might compute anything else."""
        parts = self._fused_parts
        is_one = len(args) == 1 and not kwargs and isinstance(args[0], Tensor)
        if parts is None or not is_one or not serves(self, parts, args[0]):
            return super().forward(*args, **kwargs)
        return run_parts(self, parts, args[0])


def serves(norm: nn.Module, parts: NormParts, x: Tensor) -> bool:
    """Whether the fused norm of ``x`` has the bits of the norm, and linears that read FP8.

    Checked in every forward: linears, dtypes and epsilons may change after the fusion.
    """
    weight: Any = norm._parameters.get("weight")
    if weight is None or x.dtype != weight.dtype or x.shape[-1:] != weight.shape:
        return False
    if x.dtype == torch.float32 and parts.kind != "torch":
        return False  # no cast gathers the gradients of x: others come between them
    if autocast_dtype(x) is not None or getattr(norm, parts.eps_name) != parts.eps:
        return False
    if not is_dynamo_compiling():
        if type(x) not in PLAIN or type(weight) is not nn.Parameter or not parts.linears:
            return False
        if torch._C._are_functorch_transforms_active():
            return False
    for linear in parts.linears:
        # tensor parallel styles replace the forward, or cut the weight into a DTensor
        held = linear._parameters.get("weight")
        if "forward" in linear.__dict__ or getattr(held, "recipe", None) != parts.recipe:
            return False
    return True


def run_parts(norm: nn.Module, parts: NormParts, x: Tensor) -> Tensor:
    """What ``norm(x)`` computes, with the casts that its linears need."""
    trained = any(linear._parameters["weight"].requires_grad for linear in parts.linears)  # type: ignore[union-attr]
    return cast(norm, parts, x, columnwise=trained and torch.is_grad_enabled())


def cast(norm: nn.Module, parts: NormParts, x: Tensor, columnwise: bool) -> Tensor:
    """``norm(x)`` with its casts; ``columnwise``: with the one that weight gradients read."""
    weight: Any = norm._parameters["weight"]
    return whole_functions.normed(
        x, weight, parts.eps, parts.kind, parts.recipe, columnwise, parts.recompute
    )
