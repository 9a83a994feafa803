"""An RMS norm whose values are computed by one kernel after its sums."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.compiler import is_dynamo_compiling

from ..autograd.plan import autocast_dtype
from ..autograd.quantize import normed
from ..ops.norm.reference import NormKind
from ..ops.runtime.specialize import PLAIN
from .fused_class import Fused


@dataclass(frozen=True)
class NormParts:
    """What a norm computes.

    Attributes:
        kind: of :func:`blocktensor.functional.rms_norm`.
        eps_name: the attribute of the norm that holds its epsilon.
        eps: the value of that attribute.
    """

    kind: NormKind
    eps_name: str
    eps: float


class FusedNorm(Fused):
    """An RMS norm with the bits of the module's own forward, in fewer passes."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's own forward wherever that might compute anything else.

        Compilers are shown that one too: they fuse its ops themselves.
        """
        parts = None if is_dynamo_compiling() else self.parts_to_run()
        is_one = len(args) == 1 and not kwargs and isinstance(args[0], Tensor)
        if parts is None or not is_one or not _serves(self, parts, args[0]):
            return super().forward(*args, **kwargs)
        return run_parts(self, parts, args[0])


def _serves(norm: nn.Module, parts: NormParts, x: Tensor) -> bool:
    """Return True if the fused norm of ``x`` has the bits of the norm.

    Checked in every forward: dtypes and epsilons may change after the fusion.
    """
    weight: Any = norm._parameters.get("weight")
    if weight is None or x.dtype != weight.dtype or x.shape[-1:] != weight.shape:
        return False
    if x.dtype == torch.float32:
        return False  # no cast gathers the gradients of x: others come between them
    if autocast_dtype(x) is not None or getattr(norm, parts.eps_name) != parts.eps:
        return False
    is_plain = type(x) in PLAIN and type(weight) is nn.Parameter
    return is_plain and not torch._C._are_functorch_transforms_active()


def run_parts(norm: nn.Module, parts: NormParts, x: Tensor) -> Tensor:
    """Return what ``norm(x)`` computes."""
    weight: Any = norm._parameters["weight"]
    return normed(x, weight, parts.eps, parts.kind)
