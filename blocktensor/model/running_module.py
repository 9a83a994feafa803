"""Find the module that an op belongs to, in the forward and in the backward.

Hooks tell which module's forward runs. A node of the autograd graph is created just before the op
that it records runs, and gets the next number of a sequence. So, at each op of a forward, the
tracker stores the running module under the latest number. In a backward, it looks up the number of
the running node. This is the only file that reads the sequence numbers and the running node, which
are private to torch (2.11 to 2.13).
"""

from __future__ import annotations

import re
import threading
from contextlib import ExitStack
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.autograd import set_multithreading_enabled

MODEL = "(model)"
"""The place of ops outside of any submodule."""

_HOOKS = "_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"
"""Attributes of modules that hold what watches their calls."""

# prefixes of torch.compile and of checkpoint_wrapper
_WRAPPERS = re.compile(r"\b(_orig_mod|_checkpoint_wrapped_module)(\.|$)")

_engine: Any = torch._C
_saved_tensor_hooks: Any = torch._C._autograd._top_saved_tensors_default_hooks


def without_wrappers(text: str) -> str:
    """Remove the prefixes of wrappers from names of modules or parameters, or from a text."""
    return _WRAPPERS.sub("", text)


class Place(NamedTuple):
    """The place where an op runs.

    Attributes:
        module: the name of its module.
        node: the number of the autograd node that records it or, in the backward, runs it.
        in_backward: True if the op computes gradients.
        recomputed: True if the op is part of a forward that checkpointing runs again.
    """

    module: str
    node: int
    in_backward: bool
    recomputed: bool


class _Eagerly:
    """Run compiled regions in eager mode while any thread is inside, in any order of exits.

    Torch has one stance for all threads, and each ``with`` restores the one that it found.
    """

    def __init__(self) -> None:
        self._lock, self._inside, self._stance = threading.Lock(), 0, ExitStack()

    def __enter__(self) -> None:
        with self._lock:
            if not self._inside:
                self._stance.enter_context(torch.compiler.set_stance("force_eager"))
            self._inside += 1

    def __exit__(self, *_: Any) -> None:
        with self._lock:
            self._inside -= 1
            if not self._inside:
                self._stance.close()


_EAGERLY = _Eagerly()


class ModuleTracker:
    """Follow which module every op belongs to, by hooks on the modules of a model.

    A module with several names is known by the first. Compiled regions run in eager mode. Backwards
    run in the calling thread, which has the sequence numbers of the forwards. Ops of other threads
    are not followed.
    """

    def __init__(self, model: nn.Module) -> None:
        self._modules = {
            module: without_wrappers(name).rstrip(".") for name, module in model.named_modules()
        }
        self._named = {name or MODEL: module for module, name in self._modules.items()}
        self._running: list[tuple[str, int]] = []  # each with the backward pass that runs it, or -1
        self._module_of: dict[int, str] = {}  # module names by the number of a node
        self._undo = ExitStack()
        self._thread = threading.get_ident()

    def __enter__(self) -> ModuleTracker:
        with ExitStack() as undo:
            undo.enter_context(_EAGERLY)
            undo.enter_context(set_multithreading_enabled(False))
            for module in self._modules:
                undo.callback(module.register_forward_pre_hook(self._begin, prepend=True).remove)
                undo.callback(module.register_forward_hook(self._end, always_call=True).remove)
            self._undo = undo.pop_all()
        return self

    def __exit__(self, *_: Any) -> None:
        self._undo.close()

    def __reduce__(self) -> Any:
        return ModuleTracker, (nn.Identity(),)  # a copy of the model has hooks that follow nothing

    def name_of(self, module: nn.Module) -> str:
        """Return the name of a module, without prefixes of wrappers."""
        return self._modules.get(module) or MODEL

    def module_of(self, name: str) -> nn.Module | None:
        """Return the module of a name that :meth:`place` has given."""
        return self._named.get(name)

    def _begin(self, module: nn.Module, args: Any) -> None:
        if threading.get_ident() == self._thread:
            self._running.append((self.name_of(module), _engine._current_graph_task_id()))

    def _end(self, module: nn.Module, args: Any, result: Any) -> None:
        if threading.get_ident() == self._thread:
            self._running.pop()

    def place(self) -> Place:
        """The place of the op that is dispatched now."""
        latest = _engine._autograd._get_sequence_nr() - 1
        running, backward = (self._running or [(MODEL, -1)])[-1]
        now = _engine._current_graph_task_id()
        node = None if now == -1 else _engine._current_autograd_node()
        in_forward = node is None or backward == now or self._checkpoints(node)
        if node is not None and backward != now:
            running = self._module_of.get(node._sequence_nr(), MODEL)
        # the first op after a node was created is the one that it records
        self._module_of.setdefault(latest, running)
        if node is None or in_forward:
            return Place(running, latest, node is None and now != -1, node is not None)
        return Place(running, node._sequence_nr(), True, False)

    def _checkpoints(self, node: Any) -> bool:
        """Return True if checkpointing runs a forward again, of any function."""
        if node.name() == "CheckpointFunctionBackward":
            return True
        pack, _ = _saved_tensor_hooks(True) or (None, None)
        return getattr(pack, "__module__", None) == "torch.utils.checkpoint"


def is_watched(module: nn.Module) -> bool:
    """Return True if a module has hooks of a user, not of an audit."""
    for kind in _HOOKS:  # compilers trace this
        for hook in module.__dict__[kind].values():
            if _is_of_users(hook):
                return True
    return False


def _is_of_users(hook: Any) -> bool:
    owner = getattr(getattr(hook, "func", hook), "__self__", None)
    return not isinstance(owner, ModuleTracker)
