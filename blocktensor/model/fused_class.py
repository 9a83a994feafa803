"""The class of a module that runs fused, in place of the class that it had.

An instance gets a class of its own, derived from its class: no other instance changes,
``isinstance`` and names stay, compilers see an ordinary method, and nothing refers to the module,
which would delay its freeing.
"""

from __future__ import annotations

import copyreg
from collections.abc import Iterator
from typing import Any, TypeVar

from torch import nn

from ..autograd import whole_functions


class Fused(nn.Module):
    """Comes before the class that an instance had; see :func:`set_parts`.

    A derived class has a ``forward`` that reads ``_fused_parts``.
    """

    _fused_parts: Any = None
    _class_before: type[nn.Module]

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


def remove_parts(module: Fused) -> None:
    """Undo :func:`set_parts`."""
    module.__dict__.pop("_fused_parts", None)
    before = type(module).__dict__.get("_class_before")
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


_FUSED: dict[tuple[Any, type[Fused]], type[Fused]] = {}


def _fused(before: type[nn.Module], kind: type[Fused]) -> type[Fused]:
    found = _FUSED.get((before, kind))
    if found is not None:
        return found
    names = {name: getattr(before, name) for name in ("__module__", "__qualname__", "__doc__")}
    made = type(before.__name__, (kind, before), {**names, "_class_before": before})
    return _FUSED.setdefault((before, kind), made)


def rebuild(before: type[nn.Module], kind: type[Fused]) -> nn.Module:
    """An empty instance for ``pickle`` and ``copy`` to fill; ``before``: its class as written."""
    whole_functions.announce()
    made: nn.Module = before.__new__(before)
    made.__class__ = _fused(before, kind)
    return made
