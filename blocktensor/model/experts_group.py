"""The hooks by which the stacks of one module of experts share the casts of their inputs."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from ..autograd.shared_cast import SharedCasts


class ExpertsGroup:
    """The FP8 stacks of one module, whose products with one input share its cast.

    Attributes:
        name: of the module, relative to the model; empty for the model itself.
        linears: names of the stacks, relative to the module.
    """

    def __init__(self, name: str, stacks: tuple[str, ...]) -> None:
        self.name, self.linears = name, stacks
        self._shared = SharedCasts()
        self._handles: list[RemovableHandle] = []

    @property
    def casts(self) -> int:
        """Inputs cast for these stacks so far."""
        return self._shared.casts

    @property
    def saved(self) -> int:
        """Casts avoided by sharing."""
        return self._shared.saved

    @property
    def together(self) -> tuple[tuple[str, ...], ...]:
        """How many products got each input, as found by running."""
        return tuple((f"{count} products",) for count in self._shared.expected if count > 1)

    def attach(self, module: nn.Module) -> None:
        """Register the hooks on the module of this group."""
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
            self._shared.end(whole=result is not None)
