"""The class of a module that runs fused, in place of the class that it had.

An instance gets a class of its own, derived from its class: no other instance changes,
``isinstance`` and names stay, compilers see an ordinary method, and nothing refers to the module,
which would delay its freeing.
"""

from __future__ import annotations

import copyreg
from collections.abc import Iterator
from typing import Any, TypeVar

import torch
from torch import nn
from torch.compiler import is_dynamo_compiling
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext

from ..autograd import whole_functions
from .forward_reads import Read, described, has_changed, is_traced, reads_of


class Code:
    """The code that the forward of a module ran, and the names it read, when it was verified.

    Attributes:
        functions: the methods that it ran; None in a pickled copy.
        reads: the names that these methods read; empty in a pickled copy.
        is_traced: True if Dynamo can compare and guard the values of all names.
        names: a description of functions and reads, equal in every process.
    """

    def __init__(
        self, functions: tuple[Any, ...] | None, reads: tuple[Read, ...] = (), names: Any = None
    ) -> None:
        self.functions, self.reads = functions, reads
        self.is_traced = all(map(is_traced, reads))
        self.names = names or [
            *(
                (getattr(x, "__module__", ""), getattr(x, "__qualname__", ""))
                for x in functions or ()
            ),
            *sorted(map(described, reads), key=repr),  # names of code come in no order
        ]

    def __deepcopy__(self, memo: Any) -> Code:
        """Let the copy look at what was copied before it: the modules and settings of the copy."""
        reads = [Read(memo.get(id(x), x), name, memo.get(id(y), y)) for x, name, y in self.reads]
        return Code(self.functions, tuple(reads), self.names)

    def __reduce__(self) -> Any:
        return Code, (None, (), self.names)


class Fused(nn.Module):
    """Comes before the class that an instance had; see :func:`set_parts`.

    A derived class has a ``forward`` that runs :meth:`parts_to_run`.
    """

    _fused_parts: Any = None
    _fused_code: Code | None = None
    _class_before: type[nn.Module]

    def parts_to_run(self) -> Any:
        """Return the parts of :func:`set_parts`; None if the module's own forward has to run.

        It has to run if the code that was verified, or what that reads, has changed since, and
        under a TorchFunctionMode, which may change what ops do.
        """
        code = self._fused_code
        if code is None or code.functions is None or _function_modes():
            return None
        for was, now in zip(code.functions, _functions(self), strict=False):
            if was is not now:
                return None
        if is_dynamo_compiling() and not code.is_traced:
            return None
        for read in code.reads:
            if has_changed(read):
                return None
        return self._fused_parts

    def __setstate__(self, state: Any) -> None:
        super().__setstate__(state)
        if self._fused_parts is not None:
            was, now = self._fused_code, _code(self)
            if was is None or (was.functions is None and was.names == now.names):
                self.__dict__["_fused_code"] = now

    def __reduce_ex__(self, protocol: Any) -> Any:
        made = super().__reduce_ex__(protocol)
        is_ours = type(self).__dict__.get("_class_before") is not None
        if not is_ours or not isinstance(made, tuple) or made[0] is not copyreg.__newobj__:  # type: ignore[attr-defined]
            return made
        kind = type(self).__mro__[1]
        return rebuild, (self._class_before, kind), *made[2:]  # no module holds the class by name


FusedModule = TypeVar("FusedModule", bound=Fused)


def set_parts(module: nn.Module, kind: type[Fused], parts: Any) -> None:
    """Let ``module`` run as ``kind`` does, with ``parts``, from now on."""
    if not isinstance(module, kind):
        module.__class__ = _fused(type(module), kind)
    module.__dict__["_fused_parts"] = parts
    module.__dict__["_fused_code"] = _code(module)


def remove_parts(module: nn.Module) -> None:
    """Undo :func:`set_parts`, if that was done."""
    for name in ("_fused_parts", "_fused_code"):
        module.__dict__.pop(name, None)
    before: Any = type(module).__dict__.get("_class_before")
    if before is not None:  # else its class has another derived from it since, by fully_shard
        module.__class__ = before


def fused_modules(model: nn.Module, kind: type[FusedModule]) -> Iterator[tuple[str, FusedModule]]:
    """The modules of ``model`` that run as ``kind`` does, with their names."""
    for name, module in model.named_modules():
        if isinstance(module, kind) and module._fused_parts is not None:
            yield name, module


def own_forward(module: nn.Module) -> Any:
    """The forward of ``module`` as it is without :func:`set_parts`."""
    if isinstance(module, Fused):
        return super(Fused, module).forward
    return module.forward


def _code(module: Any) -> Code:
    return Code(_functions(module), reads_of(module, module._class_before.forward))


def _functions(module: Any) -> tuple[Any, ...]:
    """Return the module's own forward, and the methods by which it calls the modules in it."""
    inner = [type(child) for child in module._modules.values()]
    calls = [getattr(kind, name, None) for kind in inner for name in ("forward", "__call__")]
    return (module._class_before.forward, *calls)


def _function_modes() -> bool:
    """Return True under a mode that sees torch functions, except ``with torch.device(...)``."""
    if not torch._C._len_torch_function_stack():
        return False
    return any(type(mode) is not DeviceContext for mode in _get_current_function_mode_stack())


_FUSED: dict[tuple[Any, type[Fused]], type[Fused]] = {}


def _fused(before: type[nn.Module], kind: type[Fused]) -> type[Fused]:
    found = _FUSED.get((before, kind))
    if found is not None:
        return found
    names = {name: getattr(before, name) for name in ("__module__", "__qualname__", "__doc__")}

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        # a wrapper may hold this, bound to a module that has left the class since
        return (kind if isinstance(self, kind) else before).forward(self, *args, **kwargs)

    own = {**names, "forward": forward, "_class_before": before}
    made = type(before.__name__, (kind, before), own)
    return _FUSED.setdefault((before, kind), made)


def rebuild(before: type[nn.Module], kind: type[Fused]) -> nn.Module:
    """An empty instance for ``pickle`` and ``copy`` to fill; ``before``: its class as written."""
    whole_functions.announce()
    made: nn.Module = before.__new__(before)
    made.__class__ = _fused(before, kind)
    return made
