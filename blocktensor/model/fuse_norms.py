"""The norms of a model whose results FP8 linears read, found by names and verified."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ..ops.norm.reference import NormKind
from .fuse_verify import (
    Drawn,
    kept_random_numbers,
    mode_named,
    results,
    why_unequal,
)
from .fused_class import own_forward
from .fused_norm import NormParts, run_parts
from .kept_state import kept_state
from .module_names import matching
from .product_weights import fp8_part, kind_of

_READERS = {
    "input_layernorm": ("self_attn", "attention"),
    "post_attention_layernorm": ("mlp",),
    "pre_feedforward_layernorm": ("mlp",),
    "attention_norm": ("attention",),
    "ffn_norm": ("feed_forward",),
    "mlp_norm": ("mlp",),
}
"""Norms and the modules that read them: transformers', torchtitan's, the examples'."""

_LINEARS = (
    ("q_proj", "k_proj", "v_proj"),
    ("qkv_proj",),
    ("q_a_proj", "kv_a_proj_with_mqa"),
    ("q_proj", "kv_a_proj_with_mqa"),
    ("wq", "wk", "wv"),
    ("wqkv",),
    ("gate_proj", "up_proj"),
    ("gate_up_proj",),
    ("w1", "w3"),
    ("gate", "up"),
)
"""The linears of such a module that read its input."""

_BESIDE = {
    "q_a_layernorm": ("q_b_proj",),
    "kv_a_layernorm": ("kv_b_proj",),
    "attention_norm": ("q", "k", "v"),
}
"""Norms and the linears beside them that read them: DeepSeek's, the examples'."""

_EPS = ("variance_epsilon", "eps", "epsilon", "norm_eps")

NormNames = Mapping[str, Sequence[str]]


class FoundNorm(NamedTuple):
    """A norm whose result linears read.

    Attributes:
        name: of the norm.
        linears: names of those, relative to the parent of the norm.
        readers: the linears.
    """

    name: str
    module: nn.Module
    linears: tuple[str, ...]
    readers: tuple[nn.Module, ...]

    @property
    def computes(self) -> str:
        """What it is taken for."""
        owners = {name.rpartition(".")[0] for name in self.linears}
        if len(owners) > 1 or owners == {""}:
            return f"norm for {', '.join(self.linears)}"
        own = ", ".join(name.rpartition(".")[2] for name in self.linears)
        return f"norm for {own} of {owners.pop()}"


def candidates(model: nn.Module, named: NormNames) -> Iterator[FoundNorm]:
    """The norms by the names of this file, and those that ``named`` names.

    Raises:
        ValueError: a pattern that matches no module, or a norm without the linears it says.
    """
    modules = dict(model.named_modules())
    by_name = _named_by_hand(model, named)
    for name, module in modules.items():
        if name in by_name:
            yield by_name[name]
            continue
        owner, _, own = name.rpartition(".")
        if linears := _linears_of(own, modules[owner]):
            readers = tuple(modules[owner].get_submodule(x) for x in linears)
            yield FoundNorm(name, module, linears, readers)


def _named_by_hand(model: nn.Module, named: NormNames) -> dict[str, FoundNorm]:
    modules, found = dict(model.named_modules()), {}
    for pattern, linears in named.items():
        if isinstance(linears, str) or not linears:
            raise ValueError(
                f"norm={{{pattern!r}: {linears!r}}}: expected the names of linears relative to the "
                f"norm's parent, e.g. ('attention.wq', 'attention.wk', 'attention.wv')"
            )
        for name in matching(model, pattern, "norm", "*.attention_norm"):
            owner = modules[name.rpartition(".")[0]]
            try:
                readers = tuple(owner.get_submodule(x) for x in linears)
            except AttributeError as error:
                raise ValueError(
                    f"norm pattern {pattern!r} names {name!r}, whose parent, a {kind_of(owner)}, "
                    f"lacks a linear: {error}"
                ) from None
            found[name] = FoundNorm(name, modules[name], tuple(linears), readers)
    return found


def _linears_of(norm: str, owner: nn.Module) -> tuple[str, ...]:
    """The linears that read the norm of this name in ``owner``, by their names."""
    beside = _BESIDE.get(norm, ())
    if beside and all(x in owner._modules for x in beside):
        return beside
    if norm == "post_attention_layernorm" and (
        "input_layernorm" not in owner._modules or "pre_feedforward_layernorm" in owner._modules
    ):
        return ()  # it normalises the output of attention
    for name in _READERS.get(norm, ()):
        reader = owner._modules.get(name)
        for linears in _LINEARS if reader is not None else ():
            if all(isinstance(reader._modules.get(x), nn.Module) for x in linears):  # type: ignore[union-attr]
                return tuple(f"{name}.{x}" for x in linears)
    return ()


def parts_of(found: FoundNorm, drawn: Drawn) -> tuple[NormParts | None, str]:
    """Return what the norm computes, if it could be told, and why it is left alone, if it is."""
    if reason := _why_unlike(found):
        return None, reason
    norm = found.module
    if _calls_torch(norm, drawn):
        return None, "torch computes it in one kernel"
    eps_name, first = _eps_name(norm), ""
    for kind in get_args(NormKind):
        parts = NormParts(kind, eps_name, getattr(norm, eps_name))
        different = why_different(norm, parts, drawn)
        if different is None:
            return parts, ""
        first = first or different
    return None, first


def _eps_name(norm: nn.Module) -> str:
    """The attribute that holds the epsilon; empty if none is known."""
    if isinstance(norm, nn.RMSNorm):
        return "eps"  # None: the dtype's
    return next((x for x in _EPS if isinstance(getattr(norm, x, None), float)), "")


def _why_unlike(found: FoundNorm) -> str:
    """Why a norm cannot be fused, by its looks; empty if it may be."""
    norm = found.module
    if "forward" in norm.__dict__:
        return "its forward was replaced on the instance"
    weight: Any = norm._parameters.get("weight")
    if weight is None or weight.ndim != 1:
        return "it has no weight [K]"
    others = [name for name, child in norm._modules.items() if child is not None]
    others += [name for name, x in norm._parameters.items() if x is not None and name != "weight"]
    others += [name for name, x in norm._buffers.items() if x is not None]
    if others:
        return f"has more than a weight: {', '.join(others)}"
    if not _eps_name(norm):
        return f"has no epsilon (an attribute {', '.join(_EPS)})"
    weights = (getattr(linear, "weight", None) for linear in found.readers)
    if all(fp8_part(weight) is None for weight in weights):
        return "none of its linears is in FP8"
    return ""


def _calls_torch(norm: nn.Module, drawn: Drawn) -> bool:
    """Whether the norm is torch's own."""
    with (
        _stand_in(norm, drawn) as (x, _),
        kept_random_numbers(x),
        torch.no_grad(),
        _Calls() as calls,
        suppress(Exception),  # which verification will tell
    ):
        own_forward(norm)(x)
    return calls.fused


def why_different(norm: nn.Module, parts: NormParts, drawn: Drawn) -> str | None:
    """Return what differs between ``norm`` and its fused form on a drawn weight, if anything."""
    with (
        _stand_in(norm, drawn) as (x, weight),
        kept_random_numbers(x),
        kept_state(norm) as changed,
    ):
        for training in (True, False):
            norm.train(training)
            why = why_unequal(
                own_forward(norm),
                lambda x: run_parts(norm, parts, x),
                lambda run: results(run, x, {"its weight": weight}, drawn),
                mode_named(training),
            )
            if name := changed():
                return f"its forward changes {name}"
            if why is not None:
                return why
    return None


class _Calls(TorchFunctionMode):
    """Notices torch's own RMS norm."""

    fused = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.fused = self.fused or func in (torch.rms_norm, F.rms_norm)
        return func(*args, **(kwargs or {}))


@contextmanager
def _stand_in(norm: nn.Module, drawn: Drawn) -> Iterator[tuple[Tensor, Tensor]]:
    """An input, and a drawn weight in place of that of the norm until the end.

    Both in bf16 in place of fp32, in which no norm runs fused.
    """
    weight: Any = norm._parameters["weight"]
    dtype = torch.bfloat16 if weight.dtype == torch.float32 else weight.dtype
    like = torch.empty(0, dtype=dtype, device=weight.device)
    values = drawn.of("the weight of a norm", tuple(weight.shape), like)
    try:
        norm._parameters["weight"] = nn.Parameter(values)
        yield drawn.rows(weight.shape[0], like), norm._parameters["weight"]  # type: ignore[misc]
    finally:
        norm._parameters["weight"] = weight
