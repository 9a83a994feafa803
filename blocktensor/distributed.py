"""Shard FP8 weights: ranks exchange e4m3 bytes, and compute the bits of a single process.

``fully_shard`` (FSDP2) gathers FP8 weights without further changes. :class:`ColwiseParallel`,
:class:`RowwiseParallel` and :class:`PrepareModuleInput` are styles for ``parallelize_module``.
:func:`all_to_all_fp8` sends tokens to experts on other ranks.

Public: the names below. Their modules, ``sharding`` and ``tensor_parallel``, are internal.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .tensor_parallel.all_to_all import all_to_all_fp8
    from .tensor_parallel.prepare_input import PrepareModuleInput
    from .tensor_parallel.styles import ColwiseParallel, RowwiseParallel

__all__ = [
    "ColwiseParallel",
    "PrepareModuleInput",
    "RowwiseParallel",
    "all_to_all_fp8",
]

_MODULES = {
    "ColwiseParallel": "styles",
    "PrepareModuleInput": "prepare_input",
    "RowwiseParallel": "styles",
    "all_to_all_fp8": "all_to_all",
}


def __dir__() -> list[str]:
    return __all__


def __getattr__(name: str) -> Any:
    """Import at the first use: DTensor would double the time of ``import blocktensor``."""
    if name in _MODULES:
        return getattr(import_module(f".tensor_parallel.{_MODULES[name]}", __package__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
