"""Fuse gated MLPs, experts and norms: their values are cast by the kernel that computes them."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from ..model.names import check_module
from ..model.progress import check_progress, progress_bar
from ..model.weights import kind_of
from ..ops import checks
from ..overrides import dynamo
from ..sharding.dtensor import fp8_part
from ..text_table import Report, Table, collapse
from .experts import Experts
from .fused_class import fused_modules, remove_pattern, set_pattern
from .mlp import MLP
from .norm import Norm
from .pattern import Drawn, Found, Pattern
from .share_inputs import not_converted, share_for_norms, stop_sharing

PATTERNS: tuple[type[Pattern], ...] = (MLP, Experts, Norm)
"""All patterns, in the order of the report."""


@dataclass(frozen=True)
class FusionEntry:
    """One module that looks like a gated MLP, like experts, or like a norm that linear layers read.

    Attributes:
        name: of the module; empty for the model itself.
        kind: its class.
        computes: what it seems to compute.
        reason: why it was left alone; empty if it was fused.
    """

    name: str
    kind: str
    computes: str
    reason: str = ""


@dataclass(frozen=True)
class FusionReport(Report):
    """The result of :func:`blocktensor.fuse`; ``print(report)`` shows it as a table.

    Attributes:
        entries: all modules that look like gated MLPs, then experts, then norms that linear layers
            read, and norms of queries and keys.
    """

    entries: tuple[FusionEntry, ...]

    @property
    def fused(self) -> tuple[FusionEntry, ...]:
        """The modules that run fused."""
        return tuple(entry for entry in self.entries if not entry.reason)

    @property
    def left_alone(self) -> tuple[FusionEntry, ...]:
        """The modules that run as before, with the reasons."""
        return tuple(entry for entry in self.entries if entry.reason)

    def _parts(self) -> list[Table | str]:
        if not self.entries:
            return [
                "no gated MLP of known names was found, and no norm that linear layers read: call",
                "functional.gated_mlp, functional.gated_experts or quantize in your own forward",
            ]
        rows = collapse((e.name, e.kind, e.computes, e.reason or "fused") for e in self.entries)
        summary = f"{len(self.fused)} fused, {len(self.left_alone)} left alone"
        return [Table(("module", "class", "computes", "result"), rows), summary]


def fuse(
    model: nn.Module,
    *,
    recompute: bool = False,
    progress: bool | None = None,
) -> FusionReport:
    """Fuse casts into the kernels of gated MLPs, experts and norms of a converted model.

    An MLP ``down(activation(gate(x)) * up(x))`` then runs as
    :func:`blocktensor.functional.gated_mlp`: ``activation(gate) * up``, and the gradients of gate
    and up, are cast by the kernel that computes them and are never stored in high precision.
    Experts that compute this by groups of rows run as :func:`blocktensor.functional.gated_experts`.
    An RMS norm that linear layers read is computed in one kernel, and its result is cast once for
    all of them, as :func:`~blocktensor.share_inputs` casts it; norms of queries and keys are
    computed in one kernel too. Outputs and gradients keep their bits.

    MLPs are found by the names of their linear layers, such as ``gate_proj``, ``up_proj`` and
    ``down_proj``; experts by the names of stacks ``[E, out, in]``; norms by their names and the
    names of the linear layers that read them, such as ``input_layernorm`` and
    ``self_attn.q_proj``, or that they read: ``q_norm`` and ``q_proj``. docs/guides/fusing.md lists
    the names, of models of transformers and torchtitan. Each module is verified with random
    weights, forward and backward, in training and evaluation mode; MLPs and experts under autocast,
    too. A module that computes anything else is left alone, with the reason in the report. So are
    MLPs with hooks, adapters (LoRA) or high precision in an inner linear layer, and norms with such
    linear layers. A fused module that gets such things later, and a norm under autocast, runs as it
    was written.

    The ``state_dict``, names and ``isinstance`` of modules stay; copies and pickles are fused too.
    Where an MLP is fused, :func:`~blocktensor.share_inputs` has nothing left to do. Call it before
    or after ``fully_shard``, and before ``torch.compile``. :func:`unfuse` undoes it.

    Args:
        model: a converted model.
        recompute: compute and cast ``activation(gate) * up`` again in backward, instead of saving
            the casts.
        progress: show a bar on stderr, on rank 0 (needs tqdm): True, False or, by default, if
            stderr is a terminal and the call takes two seconds. ``BLOCKTENSOR_PROGRESS=0`` or ``1``
            sets the default.

    Returns:
        The report; ``print`` it.

    Raises:
        TypeError: ``recompute`` is no bool; ``model`` is no module.
        ValueError: no linear layer of the model is in FP8.

    Examples:
        >>> from transformers import LlamaConfig
        >>> from transformers.models.llama.modeling_llama import LlamaMLP
        >>> config = LlamaConfig(hidden_size=256, intermediate_size=512)
        >>> model = nn.Sequential(LlamaMLP(config)).bfloat16()
        >>> _ = blocktensor.convert(model, skip_small=False)
        >>> print(blocktensor.fuse(model))
        module  class     computes                                    result
        ------  --------  ------------------------------------------  ------
        0       LlamaMLP  down_proj(silu(gate_proj(x)) * up_proj(x))  fused
        1 fused, 0 left alone
    """
    check_module(model, "fuse")
    checks.flag(recompute, "recompute")
    check_progress(progress)
    if all(fp8_part(p) is None for p in model.parameters()):
        raise not_converted(model, "fuse")
    matches = [x for kind in PATTERNS for x in kind.find(model)]
    drawn, entries = Drawn(), list[FusionEntry]()
    chosen: list[tuple[nn.Module, Pattern]] = []
    with progress_bar("fuse", len(matches), progress, unit="modules") as done:
        for each in matches:
            pattern, reason = _verified(each, recompute, drawn)
            if pattern is not None:
                chosen.append((each.module, pattern))
            computes = (pattern and pattern.computes) or each.computes
            entries.append(FusionEntry(each.name, kind_of(each.module), computes, reason))
            done(1)
    in_mlps = {linear for module, _ in chosen for linear in module.children()}
    share_for_norms(model, (x for each in matches for x in each.readers if x not in in_mlps))
    if chosen:
        dynamo.announce()
    for module, pattern in chosen:
        set_pattern(module, pattern)
    report, modules = FusionReport(tuple(entries)), dict(model.named_modules())
    for entry in report.left_alone:
        remove_pattern(modules[entry.name])  # the pattern of an earlier call
    return report


def unfuse(model: nn.Module) -> list[str]:
    """Undo :func:`fuse`: every module of ``model`` runs as it was written.

    Args:
        model: any module, or one fused module of a model.

    Returns:
        The names of the modules that were fused; none if none was.

    Examples:
        >>> from transformers import LlamaConfig
        >>> from transformers.models.llama.modeling_llama import LlamaMLP
        >>> config = LlamaConfig(hidden_size=256, intermediate_size=512)
        >>> model = nn.Sequential(LlamaMLP(config)).bfloat16()
        >>> _ = blocktensor.convert(model, skip_small=False)
        >>> _ = blocktensor.fuse(model)
        >>> blocktensor.unfuse(model)
        ['0']
    """
    check_module(model, "unfuse")
    fused = list(fused_modules(model))
    for _, module in fused:
        remove_pattern(module)
    stop_sharing(model)
    return [name for name, _ in fused]


def _verified(found: Found, recompute: bool, drawn: Drawn) -> tuple[Pattern | None, str]:
    """Return the verified pattern of a module, or None and why it is left alone."""
    reason = found.reason
    for pattern in found.patterns if not reason else ():
        made, why = pattern.with_recompute(recompute).verify(found.module, drawn)
        if made is not None:
            return made, ""
        reason = reason or why
    return None, reason
