"""The class of a module that runs fused, in place of the class that it had.

An instance gets a class of its own, derived from its class: no other instance changes,
``isinstance`` and names stay, compilers see an ordinary method, and nothing refers to the module,
which would delay its freeing. It runs fused as long as all that its forward reads is as it was when
it was verified (``forward_reads.py``).
"""

from __future__ import annotations

import copyreg
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.compiler import is_dynamo_compiling
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext

from ..ops.runtime.launch import this_thread
from ..overrides import dynamo
from .code_names import CannotWatch
from .forward_reads import Reads, reads_of


class Fused(nn.Module):
    """Comes before the class that an instance had; see :func:`set_pattern`."""

    _fused_pattern: Any = None
    _fused_reads: Reads | None = None
    _class_before: type[nn.Module]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's own forward wherever that might compute anything else."""
        pattern = self._pattern_to_run()
        if pattern is None or kwargs or len(args) != pattern.inputs or pattern.why_not(self, *args):
            return super().forward(*args, **kwargs)
        return pattern.run(self, *args)

    def _pattern_to_run(self) -> Any:
        """Return the pattern; None if the module's own forward has to run.

        It has to run if what was verified has changed since, while ops are watched, and under a
        TorchFunctionMode, which may change what ops do. Unlike a mode, a watch stays on in the
        backward that ``Tensor.backward`` runs, where checkpointing runs forwards again.
        """
        reads, pattern = self._fused_reads, self._fused_pattern
        if reads is None or _function_modes():
            return None
        if is_dynamo_compiling():
            if not (reads.are_traced and pattern.in_graphs):
                return None
        elif this_thread.watch is not None:
            return None
        return None if reads.have_changed(self) else pattern

    def __setstate__(self, state: Any) -> None:
        super().__setstate__(state)
        was = self._fused_reads
        if was is not None and was.found is None:
            try:
                now = reads_now(self, self._fused_pattern)
            except CannotWatch:
                return
            self.__dict__["_fused_reads"] = now if was.names == now.names else was

    def __reduce_ex__(self, protocol: Any) -> Any:
        made = super().__reduce_ex__(protocol)
        is_ours = type(self).__dict__.get("_class_before") is not None
        if not is_ours or made[0] is not copyreg.__newobj__:  # type: ignore[attr-defined]
            return made
        return rebuild, (self._class_before,), *made[2:]  # no module holds the class by name


def set_pattern(module: nn.Module, pattern: Any) -> None:
    """Let ``module`` run as ``pattern`` does, from now on."""
    if not isinstance(module, Fused):
        module.__class__ = _fused(type(module))
    module.__dict__["_fused_pattern"] = pattern
    module.__dict__["_fused_reads"] = reads_now(module, pattern)


def remove_pattern(module: nn.Module) -> None:
    """Undo :func:`set_pattern`, if that was done."""
    for name in ("_fused_pattern", "_fused_reads"):
        module.__dict__.pop(name, None)
    before: Any = type(module).__dict__.get("_class_before")
    if before is not None:  # else its class has another derived from it since, by fully_shard
        module.__class__ = before


def fused_modules(model: nn.Module, kind: type = object) -> Iterator[tuple[str, Any]]:
    """Yield the modules of ``model`` that run as a pattern of this kind, with their names."""
    for name, module in model.named_modules():
        pattern = module._fused_pattern if isinstance(module, Fused) else None
        if pattern is not None and isinstance(pattern, kind):
            yield name, module


def own_forward(module: nn.Module) -> Any:
    """Return the forward of ``module`` as it is without :func:`set_pattern`."""
    return super(Fused, module).forward if isinstance(module, Fused) else module.forward


def reads_now(module: Any, pattern: Any) -> Reads:
    """Return all that the forward of ``module`` as written may read.

    Raises:
        CannotWatch: it reads or changes something that cannot be watched.
    """
    kind = getattr(type(module), "_class_before", type(module))
    return Reads(reads_of(module, pattern.code_of(kind)))


def _function_modes() -> bool:
    """Return True under a mode that sees torch functions, except ``with torch.device(...)``."""
    if not torch._C._len_torch_function_stack():
        return False
    return any(type(mode) is not DeviceContext for mode in _get_current_function_mode_stack())


_FUSED: dict[type[nn.Module], type[Fused]] = {}


def _fused(before: type[nn.Module]) -> type[Fused]:
    if before in _FUSED:
        return _FUSED[before]
    names = {name: getattr(before, name) for name in ("__module__", "__qualname__", "__doc__")}

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        # a wrapper may hold this, bound to a module that has left the class since
        return (Fused if isinstance(self, Fused) else before).forward(self, *args, **kwargs)

    own = {**names, "forward": forward, "_class_before": before}
    return _FUSED.setdefault(before, type(before.__name__, (Fused, before), own))


def rebuild(before: type[nn.Module]) -> nn.Module:
    """Make an empty instance for ``pickle`` and ``copy`` to fill, of a class as written."""
    dynamo.announce()
    made: nn.Module = before.__new__(before)
    made.__class__ = _fused(before)
    return made
