"""A rank's e4m3 rows, kept for all gathers of a step: ``Recipe(cache_weight="step")``."""

from __future__ import annotations

import weakref

import torch
from torch import Tensor


class KeptCast:
    """The bytes of one cast, the rows that were cast, and a value that says how these were then.

    The rows are known as an object: memory that they gave up may be given out again. When they are
    freed, the bytes are as well. Bytes are read on the stream that made them alone: no other one is
    known to have waited for it.
    """

    __slots__ = ("_bytes", "_made_of", "_rows", "_stream")

    def __init__(self) -> None:
        self._bytes: Tensor | None = None
        self._rows: weakref.ref[Tensor] | None = None
        self._made_of: object = None
        self._stream: object = None

    def keep(self, cast: Tensor, rows: Tensor, made_of: object) -> None:
        """Hold ``cast`` in place of an earlier one, for as long as ``rows`` are there."""
        self._rows = weakref.ref(rows, self._forget)
        self._bytes, self._made_of, self._stream = cast, made_of, _stream_of(cast)

    def find(self, rows: Tensor, made_of: object) -> Tensor | None:
        """The bytes of these rows as ``made_of`` says, if this stream may read them."""
        cast = self._bytes
        if cast is None or self._rows is None or self._rows() is not rows:
            return None
        return cast if self._made_of == made_of and self._stream == _stream_of(cast) else None

    def _forget(self, rows: weakref.ref[Tensor]) -> None:
        if rows is self._rows:
            self._bytes = self._rows = self._made_of = self._stream = None


def _stream_of(cast: Tensor) -> object:
    return torch.cuda.current_stream(cast.device) if cast.is_cuda else None
