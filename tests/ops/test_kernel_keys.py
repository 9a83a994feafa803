"""Everything that a kernel reads is a part of its key in Triton's cache."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterator
from typing import Any

import pytest

import blocktensor.ops

pytest.importorskip("triton")


def functions() -> Iterator[tuple[str, Any]]:
    """All functions of kernels, and functions that run while a kernel is compiled."""
    from triton.runtime.jit import JITCallable

    for module in pkgutil.walk_packages(blocktensor.ops.__path__, "blocktensor.ops."):
        for name, value in vars(importlib.import_module(module.name)).items():
            if isinstance(value, JITCallable):
                yield f"{module.name}.{name}", value


def test_globals_of_kernels_are_constants() -> None:
    """Triton hashes the globals that are ``tl.constexpr``, and no others of compile-time functions.

    After a change of another one, an old kernel would be read from the cache.
    """
    from triton.language.core import constexpr

    found = dict(functions())
    assert len(found) > 50
    others = {}
    for name, function in found.items():
        assert function.cache_key  # finds them
        values = {key: value for (key, _), (value, _) in function.used_global_vals.items()}
        others[name] = [key for key, value in values.items() if not isinstance(value, constexpr)]
    wrong = {name: keys for name, keys in others.items() if keys}
    assert wrong == {}, "make each a tl.constexpr, or an argument"
