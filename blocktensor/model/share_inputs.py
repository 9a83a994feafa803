"""One cast of an input for all linears that get it (q, k, v; gate, up), without model changes."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from torch import nn

from ..text_table import collapse, text_table
from .input_group import InputGroup
from .linears import fp8_part, is_linear
from .product_weights import fp8_weights


@dataclass(frozen=True)
class SharingReport:
    """The groups that :func:`share_inputs` made; ``print(report)`` shows them with their counts.

    Attributes:
        groups: the modules whose linears share inputs.
        experts: the modules of FP8 experts. They call no linear, so that nothing is shared there:
            :func:`blocktensor.functional.grouped_linear` with several weights casts once for all.
    """

    groups: tuple[InputGroup, ...]
    experts: tuple[str, ...] = ()

    @property
    def casts(self) -> int:
        """Inputs cast for linears of all groups so far."""
        return sum(group.casts for group in self.groups)

    @property
    def saved(self) -> int:
        """Casts that sharing made unnecessary so far."""
        return sum(group.saved for group in self.groups)

    def remove(self) -> None:
        """End the sharing: every linear casts its own input again."""
        for group in self.groups:
            group.remove()

    def __str__(self) -> str:
        rows = collapse(
            (
                group.name or "(model)",
                ", ".join(group.linears),
                ", ".join("+".join(linears) for linears in group.together) or "not run yet",
                str(group.casts),
                str(group.saved),
            )
            for group in self.groups
        )
        header = ("module", "linears", "given one input", "casts", "saved")
        summary = f"{len(self.groups)} groups; {self.casts} casts made, {self.saved} saved"
        if self.experts:
            summary += f"; {len(self.experts)} modules of experts cast inputs by themselves"
        return text_table(header, rows) + "\n" + summary


def share_inputs(model: nn.Module) -> SharingReport:
    """Cast an input once for all FP8 linears of a module that get the same tensor object.

    The effect is that of ``blocktensor.quantize`` in model code. The first run finds the linears
    that get one input. While the module's forward runs, the cast of the latest input is kept until
    the last of these linears has used it. Nothing is shared outside of that forward, under
    ``torch.compile``, functorch, ``torch.inference_mode`` and dispatch modes, or if an input was
    changed in place. Results and gradients keep their bits. Hooks on the linears see the shared
    input as a :class:`BlockwiseFP8Tensor`.

    Args:
        model: a converted model. Its ``state_dict`` does not change; its copies and pickles share
            too. A second call adds linears that were converted since the first.

    Stacks of experts are left alone; the report names their modules.

    Returns:
        The report; ``print`` it after a run. Its ``.remove()`` ends the sharing.

    Raises:
        ValueError: no linear of the model is converted.
    """
    modules = dict(model.named_modules())
    experts = tuple(n for n, m in modules.items() if not is_linear(m) and fp8_weights(m))
    owned: dict[str, list[str]] = defaultdict(list)
    for name, module in modules.items():
        if is_linear(module) and fp8_part(module._parameters.get("weight")) is not None:
            owner = name.rpartition(".")[0]
            while owner and isinstance(modules[owner], (nn.ModuleList, nn.ModuleDict)):
                owner = owner.rpartition(".")[0]  # containers have no forward of their own
            owned[owner].append(name.removeprefix(f"{owner}."))
    if not owned and experts:
        return SharingReport((), experts)
    if not owned:
        raise ValueError(
            f"no linear of this {type(model).__name__} is in FP8, so there is no cast to share: "
            f"convert it first with blocktensor.convert(model)"
        )
    groups = []
    for name, linears in owned.items():
        group = _group_of(modules[name])
        if group is not None and group.linears != tuple(linears):
            group.remove()
            group = None
        if group is None and len(linears) > 1:
            group = InputGroup(name, tuple(linears))
            group.attach(modules[name])
        if group is not None:
            groups.append(group)
    return SharingReport(tuple(groups), experts)


def _group_of(module: nn.Module) -> InputGroup | None:
    """The group whose hooks ``module`` has."""
    owners = (getattr(hook, "__self__", None) for hook in module._forward_hooks.values())
    return next((owner for owner in owners if isinstance(owner, InputGroup)), None)
