"""The library's ops for a caller that knows its calls to be all of one kind.

A prepared op (``prepared.py``) builds a key and looks for its run at every call. Whoever has
already looked up what implies that key, as a linear has, needs to do neither.
"""

from __future__ import annotations

from typing import Any, TypeAlias

from . import library
from .prepared import Prepared, Run

Ops: TypeAlias = Any
"""Where ops are looked up by name: the module ``library``, or :class:`Pinned`."""

_OPS: dict[str, Prepared] = {
    "quantize_rowwise": library._rowwise,
    "quantize_columnwise": library._columnwise,
    "quantize_both": library._both,
    "transpose_square": library._transpose,
    "product": library._gemm,
}


class Pinned:
    """Ops of ``library``, each for calls of one kind: the first finds the run of all that follow.

    Only for calls that nobody needs to see (``library.must_be_seen``).
    """

    def __getattr__(self, name: str) -> Run:
        """An op's first call; from then on its run is an attribute like any other."""
        if name not in _OPS:
            raise AttributeError(name)

        def first(*args: Any) -> Any:
            result = _OPS[name](*args)
            setattr(self, name, _OPS[name].run_for(*args))
            return result

        return first
