"""Read boxes of the tensors of a checkpoint, from its files or as they are computed."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .contents import Entry
from .on_disk import CheckpointError
from .parts import Box, all_of

Read = Callable[[Entry, Box], Tensor]
"""A function that returns a box of a stored tensor, mapped from its file."""

Computed = dict[Entry, Callable[[Read, Box], Tensor]]
"""Functions that compute boxes of tensors which no file holds, from boxes of stored ones."""

_OPEN = 2
"""Maximum number of mapped files: pages that were read count as memory of this process."""


class Files:
    """A reader of the tensors of a checkpoint, file by file.

    ``computed``: functions that compute those which no file holds; default: there are none.
    """

    def __init__(
        self, computed: Mapping[Entry, Callable[[Read, Box], Tensor]] | None = None
    ) -> None:
        self._computed = computed or {}
        self._opened = functools.lru_cache(_OPEN)(_opened)

    def read(self, entry: Entry, box: Box) -> Tensor:
        """Return a box of a stored tensor, mapped from its file, or of one that is computed.

        Raises:
            CheckpointError: a file cannot be read.
        """
        if entry in self._computed:
            return self._computed[entry](self.read, box)
        return _box(entry, box, self._opened)

    def whole(self, entry: Entry) -> Tensor:
        """Return all of a stored tensor, mapped from its file; errors as :meth:`read`."""
        return self.read(entry, all_of(entry.shape))


def _opened(file: Path) -> Any:
    from safetensors import safe_open

    return safe_open(file, framework="pt")


def _box(entry: Entry, box: Box, opened: Callable[[Path], Any]) -> Tensor:
    """Return a box of a tensor mapped from its file: copying it reads the file."""
    from safetensors import SafetensorError

    try:
        with torch.device("cpu"):  # slices would be read onto torch's default device
            value: Tensor = opened(entry.file).get_slice(entry.name)[box]
    except (SafetensorError, OSError, RuntimeError) as error:  # RuntimeError: it cannot be mapped
        raise CheckpointError(f"{entry} cannot be read ({error})") from None
    return value
