"""Keep Dynamo from compiling a function by itself, where it may inline it in a caller, or at all.

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
    return _skipped(function, _frames._FrameAction.DEFAULT)


def never_compiled(function: _Function) -> _Function:
    """Let a function and all that it calls run eagerly, unless a caller that is compiled calls it.

    ``torch.compiler.disable`` does that with eight calls for each call.
    """
    return _skipped(function, _frames._FrameAction.SKIP)


def _skipped(function: _Function, action_of_callees: Any) -> _Function:
    strategy = _frames._FrameExecStrategy(_frames._FrameAction.SKIP, action_of_callees)
    _frames.set_code_exec_strategy(function.__code__, strategy)
    return function


def is_in_graph(x: object) -> bool:
    """Return True for a tensor of a graph that AOTAutograd traces, after Dynamo."""
    return isinstance(x, FunctionalTensor)


def is_in_joint_graph(x: object) -> bool:
    """Return True for a tensor of a forward that AOTAutograd traces together with its backward."""
    return torch.is_grad_enabled() and is_in_graph(x)
