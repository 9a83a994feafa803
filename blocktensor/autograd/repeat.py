"""Repeat layers whose plans are known: ``Layer`` of ``player.cpp``.

Python runs the first call of a kind. Later calls find its plan by everything that a plan depends
on, run the recorded sequences of both directions, and get a node in the autograd graph that is made
in C++. A call that is not known, or not usual, goes to Python again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from ..ops.formats import Quantized
from ..ops.runtime import build_player, check_recordings
from ..ops.runtime.launch import this_thread as of_launches
from ..ops.runtime.specialize import MAX_KEYS, Sequence, bits_of
from ..tensor.fp8_tensor import BlockwiseFP8Tensor
from ..tensor.weight import BlockwiseFP8Weight
from . import shared_cast
from .saved_weight import hold_cast, read_weight

Operands = tuple[Any, ...]
"""The input, weights, and all else that a layer gets."""


class Repeated:
    """The calls of one kind of layer that are known.

    Args:
        name: of the nodes in the autograd graph.
        plan: makes a plan of the operands.
        gradients: given a plan, the state of its forward, a list of the saved tensors, a list of
            the gradient of y, and which operands need a gradient, returns their gradients.
        forward: given a plan and the operands, returns y, the tensors to save and a state. Without
            it, the layer is a linear layer: its operands are x, w, the bias, ``offs`` and the
            recipe, its sequences are given to :meth:`remember`, and its state is how forward has
            read the weight.
        with_rows: the places of operands that have the number of rows of a call.
        shared_forms: of linear layers: given a run of a module that shares casts, x, ``offs`` and a
            plan, returns the rowwise and the columnwise form of x, or None.

    Attributes:
        table: the ``Layer`` of ``player.cpp``; None before the first call that may be repeated.
    """

    __slots__ = ("_forward", "_gradients", "_name", "_plan", "_shared_forms", "_with_rows", "table")

    def __init__(
        self,
        name: str,
        plan: Callable[..., Any],
        gradients: Callable[..., Any],
        forward: Callable[..., Any] | None = None,
        shared_forms: Callable[..., Any] | None = None,
        with_rows: tuple[int, ...] = (),
    ) -> None:
        self._name, self._plan, self._with_rows = name, plan, with_rows
        self._gradients, self._forward = gradients, forward
        self._shared_forms = shared_forms
        self.table: Any = None
        REPEATED.append(self)

    def run(self, operands: Operands) -> Tensor | None:
        """Return y, with its node in the graph; None if Python must compute it."""
        if self.table is None:
            return None
        if check_recordings.ENABLED and (plan := self.table.plan(operands)) is not None:
            check_recordings.check_plan(plan, self._plan(*operands))
        y = self.table(*operands)
        return None if y is NotImplemented else y

    def remember(
        self,
        operands: Operands,
        plan: Any,
        fprop: Sequence | None = None,
        backward: Sequence | None = None,
    ) -> Tensor | None:
        """Repeat calls with operands of this kind from now on, and run this one.

        Args:
            operands, plan: of the call.
            fprop, backward: the sequences of a linear layer, if its plan has them recorded.

        Returns:
            As :meth:`run`; None without a compiler.
        """
        player = build_player.player()
        if player is None:
            return None
        if self.table is None:
            self.table = player.Layer(
                self._name,
                MAX_KEYS,
                BlockwiseFP8Weight,
                BlockwiseFP8Tensor,
                self._forward,
                self._gradients,
                of_launches,
                shared_cast.this_thread,
                Quantized,
                hold_cast,
                read_weight,
                self._shared_forms,
                bits_of(self._with_rows),
            )
        tables = [x and x.table.table_of(player) for x in (fprop, backward)]
        self.table.put(operands, plan, *tables)
        return self.run(operands)


REPEATED: list[Repeated] = []
"""All kinds of layers that are repeated."""
