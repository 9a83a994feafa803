"""Repeat linear layers whose plans are known: ``Matmul`` of ``player.cpp``.

Python runs the first call of a kind. Later calls find its plan by everything that a plan depends
on, call the recorded sequences of both directions, and get a node in the autograd graph that is
made in C++. A call that is not known, or not usual, goes to Python again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from ..ops.formats import Quantized
from ..ops.runtime import build_player, check_recordings
from ..ops.runtime.launch import this_thread as of_launches
from ..ops.runtime.specialize import MAX_KEYS, Sequence
from ..tensor.fp8_tensor import BlockwiseFP8Tensor
from ..tensor.weight import BlockwiseFP8Weight
from . import shared_cast
from .plan import Plan
from .saved_weight import hold_cast, read_weight

Operands = tuple[Any, ...]
"""x, w, the bias, ``offs`` and the recipe."""


class RepeatedLinear:
    """The calls of linear layers that are known.

    Args:
        gradients: given a plan, the weight that forward has read, the saved tensors, a list of the
            gradient of y, and which inputs need a gradient, returns their gradients.

    Attributes:
        table: the ``Matmul`` of ``player.cpp``; None before the first call that may be repeated.
    """

    __slots__ = ("_gradients", "table")

    def __init__(self, gradients: Callable[..., Any]) -> None:
        self._gradients = gradients
        self.table: Any = None

    def matmul(self, operands: Operands) -> Tensor | None:
        """Return y, with its node in the graph; None if Python must compute it."""
        if self.table is None:
            return None
        if check_recordings.ENABLED:
            plan, (x, w, bias, offs, recipe) = self.table.plan(operands), operands
            if plan is not None:
                check_recordings.check_plan(plan, Plan(x, w, bias, recipe, offs))
        y = self.table(*operands)
        return None if y is NotImplemented else y

    def remember(self, operands: Operands, plan: Plan, fprop: Sequence, backward: Sequence) -> None:
        """Repeat calls with operands of this kind from now on; without a compiler, do nothing."""
        player = build_player.player()
        if player is None:
            return
        if self.table is None:
            self.table = player.Matmul(
                BlockwiseFP8Weight,
                BlockwiseFP8Tensor,
                Quantized,
                hold_cast,
                read_weight,
                self._gradients,
                of_launches,
                shared_cast.this_thread,
                MAX_KEYS,
            )
        of_backward = backward.table.table_of(player) if plan.records_backward else None
        self.table.put(operands, plan, fprop.table.table_of(player), of_backward)
