"""Replace the class of a module by one that runs fused.

A fused module gets its own class, derived from its class: no other instance changes, ``isinstance``
and names stay, compilers see an ordinary method, and no new reference delays the freeing of the
module. It runs fused as long as nothing that its forward reads has changed since the verification
(``forward_reads.py``).
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
    """The first base class of a fused module's class; see :func:`set_pattern`."""

    _fused_pattern: Any = None
    _fused_reads: Reads | None = None
    _class_before: type[nn.Module]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the pattern, or the module's own forward where that might compute something else."""
        pattern = self._pattern_to_run()
        if pattern is None or kwargs or len(args) != pattern.inputs or pattern.why_not(self, *args):
            return super().forward(*args, **kwargs)
        return pattern.run(self, *args)

    def _pattern_to_run(self) -> Any:
        """Return the pattern; None if the module's own forward must run.

        It must run if what was verified has changed since, while ops are watched, and under a
        TorchFunctionMode, which may change what ops do. Unlike a mode, a watch also covers the
        backward of ``Tensor.backward``, where checkpointing runs forwards again.
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
        return rebuild, (self._class_before,), *made[2:]  # no Python module holds the class by name


def set_pattern(module: nn.Module, pattern: Any) -> None:
    """Make ``module`` run ``pattern`` from now on."""
    if not isinstance(module, Fused):
        module.__class__ = _fused(type(module))
    module.__dict__["_fused_pattern"] = pattern
    module.__dict__["_fused_reads"] = reads_now(module, pattern)


def remove_pattern(module: nn.Module) -> None:
    """Undo :func:`set_pattern`, if that was done."""
    for name in ("_fused_pattern", "_fused_reads"):
        module.__dict__.pop(name, None)
    before: Any = type(module).__dict__.get("_class_before")
    if before is not None:  # else fully_shard has derived another class from it since
        module.__class__ = before


def fused_modules(model: nn.Module, kind: type = object) -> Iterator[tuple[str, Any]]:
    """Yield the modules of ``model`` that run as a pattern of this kind, with their names."""
    for name, module in model.named_modules():
        pattern = module._fused_pattern if isinstance(module, Fused) else None
        if pattern is not None and isinstance(pattern, kind):
            yield name, module


def own_forward(module: nn.Module) -> Any:
    """Return the forward of ``module`` before :func:`set_pattern`."""
    return super(Fused, module).forward if isinstance(module, Fused) else module.forward


def reads_now(module: Any, pattern: Any) -> Reads:
    """Return all that the module's own forward may read now.

    Raises:
        CannotWatch: the forward reads or changes something that cannot be watched.
    """
    return Reads(reads_of(module, pattern.code_of(module)))


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
        # a wrapper may hold this method, bound to a module that has another class since
        return (Fused if isinstance(self, Fused) else before).forward(self, *args, **kwargs)

    own = {**names, "forward": forward, "_class_before": before}
    return _FUSED.setdefault(before, type(before.__name__, (Fused, before), own))


def rebuild(before: type[nn.Module]) -> nn.Module:
    """Create an empty fused instance of a class, for ``pickle`` and ``copy`` to fill."""
    dynamo.announce()
    made: nn.Module = before.__new__(before)
    made.__class__ = _fused(before)
    return made
