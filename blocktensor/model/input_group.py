"""The hooks by which the linears and stacks of one module share the casts of their inputs."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from ..autograd.shared_cast import SharedCasts


class InputGroup:
    """The FP8 weights of one module, whose products with one input share its cast.

    Attributes:
        name: of the module, relative to the model; empty for the model itself.
        linears: names of its linears, or of its stacks, relative to the module.
        together: the linears that got one input, as found by running; a tuple for each input.
        of_fuse: whether ``fuse`` made the group, and ``unfuse`` removes it.
    """

    def __init__(self, name: str, linears: tuple[str, ...], of_fuse: bool = False) -> None:
        self.name, self.linears, self.of_fuse = name, linears, of_fuse
        self.together: tuple[tuple[str, ...], ...] = ()
        self._shared = SharedCasts()
        self._handles: list[RemovableHandle] = []

    @property
    def casts(self) -> int:
        """Inputs cast for these weights so far, by all threads."""
        return self._shared.casts

    @property
    def saved(self) -> int:
        """Casts avoided by sharing."""
        return self._shared.saved

    def attach(self, module: nn.Module) -> None:
        """Register the hooks on the module of this group."""
        # The hooks hold no reference to the module, which would delay the freeing of a model.
        self._handles = [
            module.register_forward_pre_hook(self._begin),
            module.register_forward_hook(self._end, always_call=True),
        ]

    def remove(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()

    def _begin(self, module: nn.Module, args: Any) -> None:
        if not torch.compiler.is_compiling():
            self._shared.begin()

    def _end(self, module: nn.Module, args: Any, result: Any) -> None:
        if not torch.compiler.is_compiling():
            met = self._shared.end(whole=result is not None)
            if met:
                names = self._names(module)
                self.together = tuple(
                    dict.fromkeys(
                        tuple(names[x] for x in each)
                        if names.keys() >= set(each)
                        else (f"{len(each)} products",)  # of transposes, copies, adapters
                        for each in met
                        if len(each) > 1 or each[0] in names
                    )
                )

    def _names(self, module: nn.Module) -> dict[int, str]:
        """The names of the weights by their ids."""
        held: dict[int, str] = {}
        for name in self.linears:
            owner, _, own = name.rpartition(".")
            found = module.get_submodule(owner)
            weight = found._parameters.get(own)
            if weight is None:  # of a linear
                weight = module.get_submodule(name)._parameters.get("weight")
            held[id(weight)] = name
        return held
