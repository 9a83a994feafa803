"""Gated MLPs, experts and norms whose casts are made where values are computed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, get_args

import torch
from torch import Tensor, nn

from ..autograd import whole_functions
from ..ops.checks import HIGH_PRECISION
from ..ops.producers.ops import ActivationName
from ..ops.producers.reference import ACTIVATIONS
from . import fuse_experts, fuse_norms
from .fuse_report import FusionEntry, FusionReport
from .fuse_verify import Compared, Drawn, why_different, why_not_one_function
from .fused_class import Fused, fused_modules, own_forward, remove_parts, set_parts
from .fused_mlp import FusedMLP, GatedParts, act_of, check_names, formula, run_parts, why_apart
from .fused_norm import FusedNorm
from .kept_state import kept_state
from .module_names import is_module, matching
from .product_weights import fp8_part, is_linear, kind_of
from .share_inputs import share_for_norms, stop_sharing

_TRIPLES = (
    ("gate_proj", "up_proj", "down_proj"),
    ("w1", "w3", "w2"),
    ("gate", "up", "down"),
    ("gate_up_proj", "gate_up_proj", "down_proj"),
)
"""Names of gate, up and down: transformers', Llama's and torchtitan's, the examples'; Phi's, whose
gate and up are one."""


_EXAMPLES = {
    "mlp": "{'*.mlp': ('w1', 'w3', 'w2', 'silu')}",
    "norm": "{'*.norm': ('attn.q', 'attn.k', 'attn.v')}",
    "experts": "{'*.experts': ('w1', 'w3', 'w2', 'silu')}",
}


class _Found(NamedTuple):
    """A module that has the linears of a gated MLP.

    Attributes:
        act: the attribute that holds its activation, if any does.
        activation: what that is, if somebody said so.
    """

    name: str
    module: nn.Module
    linears: tuple[str, str, str]
    act: str | None
    activation: str | None = None


def fuse(
    model: nn.Module,
    *,
    mlp: Mapping[str, tuple[str, str, str, str | None]] | None = None,
    norm: fuse_norms.NormNames | None = None,
    experts: Mapping[str, tuple[str, str, str, str | None]] | None = None,
    recompute: bool = False,
    store_fp8: bool = False,
) -> FusionReport:
    """Run gated MLPs, experts and norms of a converted model with casts made as they compute.

    An MLP ``down(activation(gate(x)) * up(x))`` then runs as
    :func:`blocktensor.functional.gated_mlp`: the product of activation and up, and the gradients of
    gate and up, are cast as they are computed and take no memory in high precision. Experts that
    compute this by groups of rows run as :func:`blocktensor.functional.gated_experts`. An RMS norm
    that linears read is computed in fewer passes, and its result is cast once for all of them, as
    :func:`~blocktensor.share_inputs` casts it. Outputs and gradients keep their bits.

    MLPs are found by the names of their linears: ``gate_proj``, ``up_proj``, ``down_proj``
    (transformers' Llama, Mistral, Qwen, DeepSeek, Gemma and others), ``w1``, ``w3``, ``w2``
    (torchtitan), ``gate``, ``up``, ``down``, or ``gate_up_proj`` (gate, then up), ``down_proj``
    (Phi); experts by the names of stacks ``[E, out, in]`` (torchtitan's ``w1_EFD``, ``w3_EFD``,
    ``w2_EDF``, those of linears, transformers' ``gate_up_proj`` and ``down_proj``); norms by their
    names and those of the linears that read them, such as ``input_layernorm`` and
    ``self_attn.q_proj``. Each is verified on drawn weights, forward and backward, in training and
    evaluation mode, MLPs and experts under autocast too: one that computes anything else is left
    alone, with the reason in the report. So are MLPs with hooks, adapters (LoRA) or high precision
    in an inner linear, and norms with such linears. A fused module that gets such things later, and
    a norm under autocast, runs as it was written.

    The ``state_dict``, names and ``isinstance`` of modules stay; copies and pickles are fused too.
    Where an MLP is fused, :func:`~blocktensor.share_inputs` has nothing left to do. Call it before
    or after ``fully_shard``, and before ``torch.compile``. :func:`unfuse` undoes it.

    Args:
        model: a converted model.
        mlp: gated MLPs by other names: ``{pattern: (gate, up, down, activation)}`` with a
            shell-style pattern of module names, the names of the linears in it, and either the
            attribute that holds the activation, or "silu", "gelu", "gelu_tanh" or "relu2"; None
            tries all of them. A linear that makes gate, then up, is named twice.
        norm: norms by other names: ``{pattern: linears}`` with a shell-style pattern of module
            names, and the names of all linears that read the norm, relative to its parent. A
            norm that was found by its name is left out by ``unfuse(norm)``.
        experts: modules of experts by other names: ``{pattern: (gate, up, down, activation)}`` with
            the names of their stacks ``[E, out, in]`` and an activation, or None to try all. Their
            forward takes rows ``[T, K]`` sorted by expert, and int32 sizes or ends of the groups;
            or it is that of transformers' experts. A stack of gate, then up, is named twice.
        recompute: backward makes the casts of ``activation(gate) * up`` again, in place of saving
            them.
        store_fp8: MLPs and experts save gate and up for backward in FP8: their gradients are then
            computed from rounded values, and keep no bits (``functional.gated_mlp``). A module that
            runs as it was written, for hooks or adapters, saves them in high precision.

    Returns:
        The report; ``print`` it.

    Raises:
        TypeError: an option of another type; what is no module.
        ValueError: no linear of the model is in FP8; a pattern that names no module, or one without
            the linears it says.
    """
    is_module(model, "fuse")
    _check_options({"mlp": mlp, "norm": norm, "experts": experts}, recompute, store_fp8)
    if not any(_is_in_fp8(module) for module in model.modules()):
        raise ValueError(
            f"no linear of this {type(model).__name__} is in FP8, so there is no cast to fuse: "
            f"convert it first with blocktensor.convert(model)"
        )
    mlps = list(_candidates(model, mlp or {}))
    norms = list(fuse_norms.candidates(model, norm or {}))
    drawn, stored = Drawn(), ", gate and up stored in FP8" if store_fp8 else ""
    entries: list[FusionEntry] = []
    chosen: list[tuple[nn.Module, type[Fused], Any]] = []
    for found in mlps:
        parts, reason = _parts_of(found, recompute, drawn)
        act = parts.activation if parts is not None else found.activation or found.act or "?"
        computes = formula(found.linears, act) + ("" if reason else stored)
        entries.append(FusionEntry(found.name, kind_of(found.module), computes, reason))
        if parts is not None and not reason:
            chosen.append((found.module, FusedMLP, replace(parts, store_fp8=store_fp8)))
    for group in fuse_experts.candidates(model, experts or {}):
        by_expert, reason = fuse_experts.parts_of(group, recompute, drawn)
        computes = group.computes(None if by_expert is None else by_expert.activation)
        computes += "" if reason else stored
        entries.append(FusionEntry(group.name, kind_of(group.module), computes, reason))
        if by_expert is not None:
            kept = replace(by_expert, store_fp8=store_fp8)
            chosen.append((group.module, fuse_experts.kind_for(group.module), kept))
    cast_by_mlps = {linear for each, _, _ in chosen for linear in each.children()}
    share_for_norms(model, (x for each in norms for x in each.readers if x not in cast_by_mlps))
    for each in norms:
        normed, reason = fuse_norms.parts_of(each, drawn)
        entries.append(FusionEntry(each.name, kind_of(each.module), each.computes, reason))
        if normed is not None:
            chosen.append((each.module, FusedNorm, normed))
    if chosen:
        whole_functions.announce()
    for module, kind, made in chosen:
        set_parts(module, kind, made)
    report, modules = FusionReport(tuple(entries)), dict(model.named_modules())
    for entry in report.left_alone:
        remove_parts(modules[entry.name])  # those of an earlier call
    return report


def unfuse(model: nn.Module) -> tuple[str, ...]:
    """Undo :func:`fuse`: every module of ``model`` runs as it was written.

    Returns:
        The names of the modules that were fused.
    """
    is_module(model, "unfuse")
    found = list(fused_modules(model, Fused))
    for _, module in found:
        remove_parts(module)
    stop_sharing(model)
    return tuple(name for name, _ in found)


def _check_options(named: Mapping[str, Any], recompute: object, store_fp8: object) -> None:
    """Raise TypeError for options of other types."""
    for option, names in named.items():
        patterns = names if isinstance(names, Mapping) else {None: None}
        for pattern, parts in patterns.items() if names is not None else ():
            are_names = isinstance(parts, Sequence) and not isinstance(parts, str)
            if not (isinstance(pattern, str) and are_names and all(map(_is_name, parts or ()))):
                raise TypeError(
                    f"{option}={names!r}: expected patterns of module names, each with names in a "
                    f"tuple, e.g. {_EXAMPLES[option]}"
                )
    for option, value in (("recompute", recompute), ("store_fp8", store_fp8)):
        if not isinstance(value, bool):
            raise TypeError(f"{option}={value!r}: expected True or False")


def _is_name(x: object) -> bool:
    return x is None or isinstance(x, str)


def _is_in_fp8(module: nn.Module) -> bool:
    """Whether a module is a linear in FP8, or holds a stack of experts that is."""
    held = [
        x for x in module._parameters.values() if is_linear(module) or getattr(x, "ndim", 0) == 3
    ]
    return any(fp8_part(x) is not None for x in held)


def _candidates(
    model: nn.Module, named: Mapping[str, tuple[str, str, str, str | None]]
) -> Iterable[_Found]:
    modules = dict(model.named_modules())
    by_name: dict[str, _Found] = {}
    for pattern, names in named.items():
        if len(names) != 4:
            raise ValueError(
                f"mlp={{{pattern!r}: {names!r}}}: expected (gate, up, down, activation), e.g. "
                f"('w1', 'w3', 'w2', 'silu')"
            )
        matches = matching(model, pattern, "mlp", "*.mlp")
        gate, up, down, act = names
        check_names((gate, up, down), f"mlp pattern {pattern!r}")
        for name in matches:
            module = modules[name]
            missing = [x for x in (gate, up, down) if x not in module._modules]
            if missing:
                held = ", ".join(map(repr, module._modules)) or "no modules"
                raise ValueError(
                    f"mlp pattern {pattern!r} names {name!r}, a {kind_of(module)} without "
                    f"{missing[0]!r}; it has {held}"
                )
            if act is not None and act not in ACTIVATIONS and not hasattr(module, act):
                raise ValueError(
                    f"mlp pattern {pattern!r}: {name!r} has no attribute {act!r}, and no "
                    f"activation is called so: expected one of {', '.join(ACTIVATIONS)}"
                )
            activation = act if act in ACTIVATIONS else None
            attribute = act_of(module) if act is None or activation else act
            by_name[name] = _Found(name, module, (gate, up, down), attribute, activation)
    for name, module in modules.items():
        if name in by_name:
            yield by_name[name]
            continue
        for linears in _TRIPLES:
            if all(isinstance(module._modules.get(x), nn.Module) for x in linears):
                yield _Found(name, module, linears, act_of(module))
                break


def _parts_of(found: _Found, recompute: bool, drawn: Drawn) -> tuple[GatedParts | None, str]:
    """What the module computes, if it could be told, and why it is left alone, if it is."""
    module = found.module
    if reason := _why_unlike(found):
        return None, reason
    attribute = found.act
    weight: Any = module._modules[found.linears[0]]._parameters["weight"]  # type: ignore[union-attr]
    activations = [x for x in get_args(ActivationName) if found.activation in (None, x)]
    if attribute is not None and found.activation is None:
        with kept_state(module):
            activations = _activations_like(getattr(module, attribute), weight)
        if not activations:
            kind = getattr(module, attribute)
            label = getattr(kind, "__name__", type(kind).__name__)
            return None, f"its {attribute}, {label}, is none of {', '.join(ACTIVATIONS)}"
    first = ""
    for activation in activations:
        value = getattr(module, attribute) if attribute is not None else None
        parts = GatedParts(*found.linears, activation, attribute, value, recompute)
        if apart := why_apart(module, parts, sharded=True):
            return parts, apart
        different = why_different(_compared(module, parts, drawn), drawn)
        if different is None:
            return parts, ""
        first = first or different
    return GatedParts(*found.linears, activations[0], attribute), first


def _compared(module: nn.Module, parts: GatedParts, drawn: Drawn) -> Compared:
    """The MLP as written and fused, on rows from tiny to huge."""

    def rows_for(parameters: dict[str, Tensor]) -> Tensor:
        weight = parameters[f"{parts.gate}.weight"]
        return drawn.rows(weight.shape[1], weight)

    places = [
        (linear, key, f"{name}.{key}")
        for name in parts.linears
        for linear in [module.get_submodule(name)]
        for key, parameter in linear._parameters.items()
        if parameter is not None
    ]
    return Compared(
        module, places, own_forward(module), lambda x: run_parts(module, parts, x), rows_for
    )


def _why_unlike(found: _Found) -> str:
    """Why a module can be no gated MLP of its linears, by its looks; empty if it may be one."""
    module = found.module
    if "forward" in module.__dict__:
        return "its forward was replaced on the instance"
    recipes = []
    for name in found.linears:
        linear: Any = module._modules[name]
        if not isinstance(linear, nn.Linear):
            return f"{name} is a {kind_of(linear)}, not an nn.Linear"
        held = fp8_part(linear._parameters.get("weight"))
        if held is None:
            return f"{name} is not in FP8"
        recipes.append(held.recipe)
    if reason := why_not_one_function(recipes, "linears"):
        return reason
    known = {*found.linears, found.act}
    others = [
        name
        for name, child in module._modules.items()
        if child is not None and (name not in known or any(True for _ in child.children()))
    ]
    others += [name for name, x in module._parameters.items() if x is not None]
    others += [name for name, x in module._buffers.items() if x is not None]
    act: Any = None if found.act is None else module._modules.get(found.act)
    if act is not None and any(True for _ in (*act.parameters(), *act.buffers())):
        others.append(str(found.act))
    return f"has more than linears and an activation: {', '.join(others)}" if others else ""


def _activations_like(act: Callable[[Tensor], object], like: Tensor) -> list[ActivationName]:
    """The activations with the values of ``act``, bit for bit; the gradients are verified later."""
    device = like.device if like.device.type != "meta" else torch.device("cpu")
    dtype = like.dtype if like.dtype in HIGH_PRECISION else torch.bfloat16
    every = torch.arange(-(2**15), 2**15, device=device).to(torch.int16).view(torch.bfloat16)
    x = every.to(dtype)
    x = x[x.isfinite()]
    found: list[ActivationName] = []
    for name in get_args(ActivationName):
        activation = ACTIVATIONS[name]
        with torch.no_grad():
            try:
                made = act(x.clone())  # which it may write to
            except Exception:
                return []
            same = type(made) is Tensor and torch.equal(made, activation.value(x))
        if same:
            found.append(name)
    return found
