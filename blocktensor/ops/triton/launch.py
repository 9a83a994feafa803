"""A kernel launch as a value: planned from tensors, then run, or only compiled (tests do)."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch


class Launch(NamedTuple):
    """One launch of a Triton or Gluon kernel.

    Planning needs shapes, strides and dtypes only, so that a launch planned from meta tensors can
    be compiled for a GPU this machine does not have.
    """

    kernel: Any
    grid: tuple[int, ...]
    args: tuple[Any, ...]
    constants: dict[str, Any]
    options: dict[str, int]

    def __call__(self) -> None:
        """Launch on the current stream; an empty grid launches nothing."""
        if 0 in self.grid:
            return
        device = self.args[0].device  # Triton launches on the current device, whatever its args
        if device.index == torch.cuda.current_device():
            self.kernel[self.grid](*self.args, **self.constants, **self.options)
        else:
            with torch.cuda.device(device):
                self.kernel[self.grid](*self.args, **self.constants, **self.options)
