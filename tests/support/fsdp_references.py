"""What one process computes with the weights that FSDP2 has gathered."""

from __future__ import annotations

import copy
import functools
from collections import defaultdict
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from blocktensor import BlockwiseFP8Weight
from tests.support.fsdp_bodies import Body


class Uses:
    """What modules of the control had gathered when they ran in one graph.

    Attributes:
        values: of the parameters of each module, in the order in which it ran.
        is_changed: True if a weight was written since, or has other values in backward.
        is_plain_changed: True if a parameter that is not converted has other values in backward.
        is_unseen: True if a weight was written since it was gathered, and PyTorch did not count it.
    """

    def __init__(self) -> None:
        self.values: dict[str, list[dict[str, Tensor]]] = defaultdict(list)
        self.is_changed = self.is_plain_changed = self.is_unseen = False


class Reference:
    """A model of one process, which runs with the values that the control has gathered."""

    def __init__(self, model: Body, uses: Uses) -> None:
        self.model = copy.deepcopy(model)
        self.given = copy.deepcopy(uses.values)
        for name, module in self.model.named_modules():
            module.register_forward_pre_hook(functools.partial(self._take, name))

    @torch.no_grad()
    def _take(self, name: str, module: nn.Module, args: Any) -> None:
        if not self.given[name]:
            return
        for key, value in self.given[name].pop(0).items():
            p = module._parameters[key]
            own = p.master if isinstance(p, BlockwiseFP8Weight) else p
            if not torch.equal(own, value):
                own.copy_(value)


class Graph(NamedTuple):
    """A forward that waits for its backward.

    Attributes:
        losses, inputs: of the converted model, the control, and their two references.
        references: of one process.
        uses: of the control.
    """

    losses: list[Tensor]
    inputs: list[Tensor]
    references: list[Reference]
    uses: Uses


class Expected:
    """The gradients of a model of one process, added up as FSDP2 adds them."""

    def __init__(self) -> None:
        self.reduced: dict[str, Tensor] = {}
        self.waiting: dict[str, Tensor] = {}

    def add(self, model: nn.Module, syncs: bool) -> None:
        """Take the gradients of a backward; FSDP2 reduces them if it ``syncs``."""
        for name, p in model.named_parameters():
            if p.grad is not None:
                _add(self.waiting, name, getattr(p.grad, "master", p.grad).detach())
                p.grad = None
        if syncs:
            for name, grad in self.waiting.items():
                _add(self.reduced, name, grad)
            self.waiting = {}

    def difference(self, found: dict[str, Any]) -> str | None:
        """Return the name of a sharded gradient that is another."""
        for name, wanted in self.reduced.items():
            got = found.get(name)
            got = None if got is None else got.full_tensor()
            if got is None or not torch.equal(getattr(got, "master", got), wanted):
                return name
        return None


def _add(sums: dict[str, Tensor], name: str, grad: Tensor) -> None:
    sums[name] = sums[name] + grad if name in sums else grad
