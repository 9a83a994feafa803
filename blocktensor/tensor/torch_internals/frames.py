"""Keep Dynamo from compiling a function by itself, where it may inline the function in a caller.

Where a graph breaks, Dynamo compiles the functions that the uncompiled code calls. What they return
is an output of a graph.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch._subclasses.functional_tensor import FunctionalTensor

_frames: Any = torch._C._dynamo.eval_frame

_Function = TypeVar("_Function", bound=Callable[..., Any])


def only_inlined(function: _Function) -> _Function:
    """Let a function run eagerly, unless a caller that is compiled calls it."""
    action, frames = _frames._FrameAction, _frames._FrameExecStrategy
    strategy = frames(action.SKIP, action.DEFAULT)  # this frame alone
    _frames.set_code_exec_strategy(function.__code__, strategy)
    return function


def is_in_joint_graph(x: object) -> bool:
    """Return True for a tensor of a forward that AOTAutograd traces together with its backward."""
    return torch.is_grad_enabled() and isinstance(x, FunctionalTensor)
