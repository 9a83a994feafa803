"""Run an RMS norm as one kernel if it lies before FP8 linear layers, or is of queries or keys."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import NoneType
from typing import Any, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ..autograd.norm import normed
from ..autograd.plan import autocast_dtype
from ..ops.norm.reference import NormKind
from ..ops.runtime.specialize import PLAIN
from ..sharding.dtensor import fp8_part
from .layer_names import AFTER, ATTENTION, GATED_MLPS, READERS, SIBLINGS
from .pattern import Drawn, Found, Pattern, Sample, held_by, why_different

_LINEARS = (*ATTENTION, *(tuple(dict.fromkeys(names[:2])) for names in GATED_MLPS))
"""Names of the linear layers of a module that read its input."""

_EPS = ("variance_epsilon", "eps", "epsilon", "norm_eps")


@dataclass(frozen=True)
class Norm(Pattern):
    """An RMS norm.

    Attributes:
        kind: the argument of :func:`blocktensor.autograd.norm.normed`.
        eps_name: the attribute of the norm that holds its epsilon.
        eps: the value of that attribute.
    """

    kind: NormKind
    eps_name: str
    eps: float

    in_graphs = False  # compilers fuse the ops of a norm themselves

    @classmethod
    def find(cls, model: nn.Module) -> Iterator[Found]:
        """Yield norms of the known names."""
        modules = dict(model.named_modules())
        for name, norm in modules.items():
            above, _, own = name.rpartition(".")
            owner = modules[above]
            linears, writers = linears_of(own, owner), _written_by(own, owner)
            if linears or writers:
                readers = tuple(owner.get_submodule(x) for x in linears)
                eps = _eps_name(norm)
                patterns = [cls(kind, eps, getattr(norm, eps, 0.0)) for kind in get_args(NormKind)]
                of = readers or tuple(owner._modules[x] for x in writers)
                reason = _why_unlike(norm, of) or cls.why_unwatched(norm)
                computes = _computes(linears) if linears else f"norm of {', '.join(writers)}"
                yield Found(name, norm, computes, patterns, reason, readers)

    def verify(self, module: nn.Module, drawn: Drawn) -> tuple[Pattern | None, str]:
        """Verify the norm, if torch has no kernel of its own for it."""
        with _Calls() as calls:
            why = why_different(self, module, drawn)
        if calls.fused:
            return None, "torch computes it in one kernel"
        return (self, "") if why is None else (None, why)

    def why_not(self, module: Any, *args: Any) -> str | None:
        """Return why the norm's own forward must run, if it must."""
        x, weight = args[0], module._parameters.get("weight")
        if not isinstance(x, Tensor) or weight is None:
            return "it has no weight, or its input is no tensor"
        if x.dtype != weight.dtype or x.shape[-1:] != weight.shape:
            return "its input and its weight have other dtypes or sizes"
        if x.dtype == torch.float32:
            return "no cast gathers the gradients of x: others come between them"
        if autocast_dtype(x) is not None or getattr(module, self.eps_name) != self.eps:
            return "autocast is on, or its epsilon has changed"
        is_plain = type(x) in PLAIN and type(weight) is nn.Parameter
        if not is_plain or torch._C._are_functorch_transforms_active():
            return "its input or its weight is no plain tensor"
        return None

    def run(self, module: Any, *args: Any) -> Tensor:
        """Compute the norm in one kernel."""
        return normed(args[0], module._parameters["weight"], self.eps, self.kind)

    def parameters(self, module: Any) -> list[tuple[nn.Module, str, str]]:
        """List the weight."""
        return [(module, "weight", "its weight")]

    def drawn_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Return bf16 instead of fp32: norms in fp32 do not run fused."""
        return torch.bfloat16 if dtype == torch.float32 else dtype

    def sample(self, parameters: Mapping[str, Tensor], drawn: Drawn) -> Sample:
        """Return an input."""
        return drawn.rows(parameters["its weight"]), lambda x: (x,)


def _computes(linears: Sequence[str]) -> str:
    """Describe the modules that read the norm."""
    owner = linears[0].rpartition(".")[0]
    own = ", ".join(name.rpartition(".")[2] for name in linears)
    return f"norm for {own} of {owner}" if owner else f"norm for {own}"


def linears_of(norm: str, owner: nn.Module) -> Sequence[str]:
    """Return the linear layers that read the norm of this name in ``owner``, by their names."""
    siblings = SIBLINGS.get(norm, ())
    if siblings and all(x in owner._modules for x in siblings):
        return siblings
    if norm == "post_attention_layernorm" and (
        "input_layernorm" not in owner._modules or "pre_feedforward_layernorm" in owner._modules
    ):
        return ()  # this one normalises the output of attention
    for name in READERS.get(norm, ()):
        reader = owner._modules.get(name)
        for linears in _LINEARS if reader is not None else ():
            if all(isinstance(reader._modules.get(x), nn.Module) for x in linears):  # type: ignore[union-attr]
                return tuple(f"{name}.{x}" for x in linears)
    return ()


def _written_by(norm: str, owner: nn.Module) -> Sequence[str]:
    """Return the name of the linear layer in ``owner`` whose result the norm reads, if any."""
    return [x for x in AFTER.get(norm, ()) if isinstance(owner._modules.get(x), nn.Module)][:1]


def _eps_name(norm: nn.Module) -> str:
    """Return the attribute that holds the epsilon, or None to use the dtype's; empty if none."""
    return next((x for x in _EPS if isinstance(getattr(norm, x, 0), (float, NoneType))), "")


def _why_unlike(norm: nn.Module, linears: Sequence[Any]) -> str:
    """Return why a norm cannot be fused, from its attributes; empty if it may be."""
    weight: Any = norm._parameters.get("weight")
    if weight is None or weight.ndim != 1:
        return "it has no weight [K]"
    if others := held_by(norm, {"weight"}):
        return f"has more than a weight: {', '.join(others)}"
    if not _eps_name(norm):
        return f"has no epsilon (an attribute {', '.join(_EPS)})"
    if all(fp8_part(getattr(linear, "weight", None)) is None for linear in linears):
        return "none of its linear layers is in FP8"
    return ""


class _Calls(TorchFunctionMode):
    """A mode that notices calls of torch's own RMS norm."""

    fused = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.fused = self.fused or func in (torch.rms_norm, F.rms_norm)
        return func(*args, **(kwargs or {}))
