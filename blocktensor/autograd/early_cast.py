"""The cast of a large gradient before its backward begins.

Autograd holds a backward's inputs until it returns. As a pre-hook of the node, the cast replaces
the high-precision gradient by its FP8 forms, so that its memory is free during dgrad and wgrad.
"""

from __future__ import annotations

from collections.abc import Callable
from threading import get_ident

import torch
from torch import Tensor

from ..ops.formats import Quantized
from ..tensor.fp8_tensor import BlockwiseFP8Tensor
from .batched_gradients import is_batched

Forms = tuple[Quantized | None, Quantized | None]
"""The rowwise and the columnwise form."""

EARLY_BYTES = 64 << 20
"""Gradients of this size are cast early. The hook takes a tenth of a small linear's host time, and
the memory of a small gradient counts less."""


class EarlyCast:
    """The pre-hook of one node; its backward reads the cast by :meth:`take`."""

    __slots__ = ("_cast", "_forms")

    def __init__(self, cast: Callable[[Tensor], Forms]) -> None:
        """``cast``: makes the forms of a gradient that dgrad and wgrad will read."""
        self._cast = cast
        # by thread: two may run backward through one graph at once
        self._forms: dict[int, Forms] = {}

    def __call__(self, grads: tuple[Tensor | None, ...]) -> tuple[None] | None:
        """Cast the gradient and return None in its place; a result of None leaves it."""
        (grad,) = grads
        is_fp8 = isinstance(grad, BlockwiseFP8Tensor)
        # create_graph=True needs the original; backward refuses batched ones
        if grad is None or is_fp8 or torch.is_grad_enabled() or is_batched(grad):
            self._forms.pop(get_ident(), None)  # of a backward that failed
            return None
        self._forms[get_ident()] = self._cast(grad)
        return (None,)

    def take(self) -> Forms | None:
        """The forms that this thread's hook made, if it did."""
        return self._forms.pop(get_ident(), None)
