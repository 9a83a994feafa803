"""Cast an input once for all linear layers that get it (q, k, v; gate, up)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from torch import nn

from ..autograd.around_forward import AroundForward
from ..autograd.shared_cast import SharedCasts
from ..model.matrix import fp8_weights
from ..model.names import check_module
from ..model.weights import full_name, is_linear
from ..sharding.dtensor import fp8_part
from ..text_table import Report, Table, collapse


class InputGroup(SharedCasts, AroundForward):
    """The FP8 weights of one module, whose matmuls with one input share its cast.

    Attributes:
        name: of the module, relative to the model; empty for the model itself.
        linears: names of its linear layers, or of its stacks, relative to the module.
        of_fuse: True if ``fuse`` created the group; ``unfuse`` then removes it.
    """

    def __init__(
        self, module: nn.Module, name: str, linears: tuple[str, ...], of_fuse: bool
    ) -> None:
        SharedCasts.__init__(self)
        AroundForward.__init__(self, module)
        self.name, self.linears, self.of_fuse = name, linears, of_fuse


@dataclass(frozen=True)
class SharingReport(Report):
    """The groups that :func:`share_inputs` made; ``print(report)`` shows them with their counts.

    Attributes:
        groups: the modules whose linear layers share inputs.
    """

    groups: tuple[InputGroup, ...]

    @property
    def casts(self) -> int:
        """The number of inputs cast for all groups so far."""
        return sum(group.casts for group in self.groups)

    @property
    def saved(self) -> int:
        """The number of casts that sharing saved so far."""
        return sum(group.saved for group in self.groups)

    def _parts(self) -> list[Table | str]:
        rows = collapse(
            (
                group.name,
                ", ".join(group.linears),
                str(group.casts),
                str(group.saved),
            )
            for group in self.groups
        )
        header = ("module", "linear layers", "casts", "saved")
        summary = f"{len(self.groups)} groups; {self.casts} casts made, {self.saved} saved"
        return [Table(header, rows), summary]


def share_inputs(model: nn.Module) -> SharingReport:
    """Cast an input once for all FP8 linear layers or stacks of a module that get it.

    The effect is the same as with ``blocktensor.quantize`` in model code. While the module's
    forward runs, the cast of the latest input is kept. Nothing is shared outside of that forward,
    under ``torch.compile``, functorch, ``torch.inference_mode`` and dispatch modes, or if an input
    was changed in place in a way that PyTorch counts. It does not count writes through ``x.data``,
    NumPy or a pointer: call ``torch.autograd.graph.increment_version(x)`` after one. Results and
    gradients keep their bits.

    Args:
        model: a converted model. Its ``state_dict`` does not change; its copies and pickles share
            too. A second call adds linear layers that were converted since the first.

    Returns:
        The report; ``print`` it after a run.

    Raises:
        TypeError: ``model`` is not a module.
        ValueError: no linear layer of the model is converted.

    Examples:
        >>> from transformers import LlamaConfig
        >>> from transformers.models.llama.modeling_llama import LlamaMLP
        >>> config = LlamaConfig(hidden_size=256, intermediate_size=512)
        >>> model = nn.Sequential(LlamaMLP(config)).bfloat16()
        >>> _ = blocktensor.convert(model, skip_small=False)
        >>> report = blocktensor.share_inputs(model)
        >>> _ = model(torch.randn(8, 256, dtype=torch.bfloat16))
        >>> report.saved  # of the casts of gate_proj and up_proj
        1
    """
    check_module(model, "share_inputs")
    owned = _owned(model)
    if not owned:
        raise not_converted(model, "share")
    made = (_group_of(model, name, names) for name, names in owned.items())
    groups = tuple(group for group in made if group is not None)
    for group in groups:
        group.of_fuse = False
    return SharingReport(groups)


def not_converted(model: nn.Module, use: str) -> ValueError:
    """Return the error for a model without FP8 linear layers; ``use``: the purpose of casts."""
    return ValueError(
        f"no linear layer of this {type(model).__name__} is in FP8, so there is no cast to {use}: "
        f"convert it first with blocktensor.convert(model)"
    )


def unshare_inputs(model: nn.Module) -> list[str]:
    """Undo :func:`share_inputs`: every linear layer casts its own input again.

    Args:
        model: any module.

    Returns:
        The names of the modules whose linear layers shared inputs; none if none did.

    Examples:
        >>> from transformers import LlamaConfig
        >>> from transformers.models.llama.modeling_llama import LlamaMLP
        >>> config = LlamaConfig(hidden_size=256, intermediate_size=512)
        >>> model = nn.Sequential(LlamaMLP(config)).bfloat16()
        >>> _ = blocktensor.convert(model, skip_small=False)
        >>> _ = blocktensor.share_inputs(model)
        >>> blocktensor.unshare_inputs(model)
        ['0']
    """
    check_module(model, "unshare_inputs")
    return stop_sharing(model, of_fuse=False)


def share_for_norms(model: nn.Module, readers: Iterable[nn.Module]) -> None:
    """Share the inputs of the modules that own these linear layers, until :func:`stop_sharing`."""
    ids = {id(linear) for linear in readers}
    read = {name for name, module in model.named_modules() if id(module) in ids}
    for name, names in _owned(model).items():
        if any(full_name(name, x) in read for x in names):
            _group_of(model, name, names, of_fuse=True)


def stop_sharing(model: nn.Module, of_fuse: bool = True) -> list[str]:
    """Undo :func:`share_for_norms`, or else :func:`share_inputs`; return the names of modules."""
    found = (_group_on(module) for module in model.modules())
    groups = [group for group in found if group is not None and group.of_fuse == of_fuse]
    for group in groups:
        group.remove()
    return [group.name for group in groups]


def _owned(model: nn.Module) -> dict[str, list[str]]:
    """Return the names of the FP8 linear layers and stacks of each module, by its name."""
    modules = dict(model.named_modules())
    owned: dict[str, list[str]] = defaultdict(list)
    for name, module in modules.items():
        if is_linear(module):
            if fp8_part(module._parameters.get("weight")) is not None:
                owner = name.rpartition(".")[0]
                while owner and isinstance(modules[owner], (nn.ModuleList, nn.ModuleDict)):
                    owner = owner.rpartition(".")[0]  # containers have no forward of their own
                owned[owner].append(name.removeprefix(f"{owner}."))
        else:
            stacks = [matrix.key for matrix in fp8_weights(module)]
            owned[name] += stacks if len(stacks) > 1 else ()
    return {name: names for name, names in owned.items() if names}


def _group_of(
    model: nn.Module, name: str, names: list[str], of_fuse: bool = False
) -> InputGroup | None:
    """Return the group of the module ``name``, created if needed; None for one linear layer."""
    module = model.get_submodule(name)
    group = _group_on(module)
    if group is not None and group.linears != tuple(names):
        group.remove()
        group = None
    if group is None and len(names) > 1:
        group = InputGroup(module, name, tuple(names), of_fuse)
    return group


def _group_on(module: nn.Module) -> InputGroup | None:
    """Return the group whose hooks ``module`` has."""
    owners = (getattr(hook, "__self__", None) for hook in module._forward_hooks.values())
    return next((owner for owner in owners if isinstance(owner, InputGroup)), None)
