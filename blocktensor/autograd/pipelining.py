"""Watch ``torch.distributed.pipelining``, whose zero-bubble schedules split a backward.

Before torch 2.13 the half that computes input gradients frees the graph that the half for weight
gradients runs, if an ``autograd.Function`` made it (pytorch#166577): the second half raises.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..patches import PIPELINE_HALVES

LOSES_GRAPHS = torch.__version__ < "2.13"  # versions, not texts, are compared


_input_halves: list[object] = []
"""The calls that compute the input half of a backward now; threads of autograd read this list."""


def watch_halves() -> None:
    """Wrap the function that computes input halves, if pipelining was imported, once."""
    PIPELINE_HALVES.apply()


def is_input_half() -> bool:
    """Return True in a backward whose half for weight gradients follows, with the same gradient."""
    return bool(_input_halves)


@PIPELINE_HALVES.around
def _stage_backward_input(theirs: Any, outputs: Sequence[Tensor], *args: Any, **kwargs: Any) -> Any:
    # nodes of views own the nodes of the outputs, which detach_() releases
    above = [y.view_as(y).grad_fn for y in outputs if y.requires_grad and LOSES_GRAPHS]
    _input_halves.append(theirs)
    try:
        gradients, groups = theirs(outputs, *args, **kwargs)
    finally:
        _input_halves.pop()
    if above:
        for group in groups:
            group["graph"] = above
    return gradients, groups
