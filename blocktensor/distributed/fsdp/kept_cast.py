"""A rank's e4m3 rows, kept for all gathers of a step: ``Recipe(cache_weight="step")``."""

from __future__ import annotations

import torch
from torch import Tensor


class KeptCast:
    """The bytes of one cast, and a value that says what they were made of.

    They are read on the stream that made them alone: no other one is known to have waited for it.
    """

    __slots__ = ("_bytes", "_made_of", "_stream")

    def __init__(self) -> None:
        self._bytes: Tensor | None = None
        self._made_of: object = None
        self._stream: object = None

    def keep(self, cast: Tensor, made_of: object) -> None:
        """Hold ``cast`` in place of an earlier one."""
        self._bytes, self._made_of, self._stream = cast, made_of, _stream_of(cast)

    def release(self) -> None:
        """Hold nothing."""
        self._bytes = self._made_of = self._stream = None

    def find(self, made_of: object, device: torch.device) -> Tensor | None:
        """The bytes on ``device`` that were made of this, if this stream may read them."""
        cast = self._bytes
        if cast is None or cast.device != device or self._made_of != made_of:
            return None
        return cast if self._stream == _stream_of(cast) else None


def _stream_of(cast: Tensor) -> object:
    return torch.cuda.current_stream(cast.device) if cast.is_cuda else None
