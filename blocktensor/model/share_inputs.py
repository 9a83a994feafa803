"""One cast of an input for all linears that get it (q, k, v; gate, up), without model changes."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import TypeVar

from torch import nn

from ..text_table import collapse, text_table
from .experts_group import ExpertsGroup
from .input_group import InputGroup
from .linears import fp8_part, is_linear
from .product_weights import fp8_weights

Group = TypeVar("Group", InputGroup, ExpertsGroup)


@dataclass(frozen=True)
class SharingReport:
    """The groups that :func:`share_inputs` made; ``print(report)`` shows them with their counts.

    Attributes:
        groups: the modules whose linears share inputs.
    """

    groups: tuple[InputGroup | ExpertsGroup, ...]

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
        return text_table(header, rows) + "\n" + summary


def share_inputs(model: nn.Module) -> SharingReport:
    """Cast an input once for all FP8 linears, or stacks, of a module that get the same tensor.

    The effect is that of ``blocktensor.quantize`` in model code. The first run finds the linears
    that get one input. While the module's forward runs, the cast of the latest input is kept until
    the last of these linears has used it. Nothing is shared outside of that forward, under
    ``torch.compile``, functorch, ``torch.inference_mode`` and dispatch modes, or if an input was
    changed in place. Results and gradients keep their bits. Hooks on the linears see the shared
    input as a :class:`BlockwiseFP8Tensor`.

    Args:
        model: a converted model. Its ``state_dict`` does not change; its copies and pickles share
            too. A second call adds linears that were converted since the first.

    Returns:
        The report; ``print`` it after a run. Its ``.remove()`` ends the sharing.

    Raises:
        ValueError: no linear of the model is converted.
    """
    modules = dict(model.named_modules())
    owned: dict[str, list[str]] = defaultdict(list)
    for name, module in modules.items():
        if is_linear(module) and fp8_part(module._parameters.get("weight")) is not None:
            owner = name.rpartition(".")[0]
            while owner and isinstance(modules[owner], (nn.ModuleList, nn.ModuleDict)):
                owner = owner.rpartition(".")[0]  # containers have no forward of their own
            owned[owner].append(name.removeprefix(f"{owner}."))
    stacks = {
        name: tuple(found)
        for name, module in modules.items()
        if not is_linear(module) and len(found := fp8_weights(module)) > 1
    }
    if not owned and not stacks:
        raise ValueError(
            f"no linear of this {type(model).__name__} is in FP8, so there is no cast to share: "
            f"convert it first with blocktensor.convert(model)"
        )
    groups: list[InputGroup | ExpertsGroup] = []
    for name, linears in owned.items():
        group = _hooked(modules[name], InputGroup)
        if group is not None and group.linears != tuple(linears):
            group.remove()
            group = None
        if group is None and len(linears) > 1:
            group = InputGroup(name, tuple(linears))
            group.attach(modules[name])
        if group is not None:
            groups.append(group)
    for name, names in stacks.items():
        experts = _hooked(modules[name], ExpertsGroup)
        if experts is None:
            experts = ExpertsGroup(name, names)
            experts.attach(modules[name])
        groups.append(experts)
    return SharingReport(tuple(groups))


def _hooked(module: nn.Module, kind: type[Group]) -> Group | None:
    """The group of this kind whose hooks ``module`` has."""
    owners = (getattr(hook, "__self__", None) for hook in module._forward_hooks.values())
    return next((owner for owner in owners if isinstance(owner, kind)), None)
