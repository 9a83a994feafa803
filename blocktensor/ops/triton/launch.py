"""A kernel launch as a value: planned from tensors, then run, or only compiled (tests do)."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

_COMPILED: dict[tuple[Any, ...], Any] = {}
"""Compiled kernels by everything that Triton specialises on."""


class Launch(NamedTuple):
    """One launch of a Triton or Gluon kernel.

    Planning needs shapes, strides and dtypes only, so that a launch planned from meta tensors can
    be compiled for a GPU this machine does not have.
    """

    kernel: Any
    grid: tuple[int]
    args: tuple[Tensor | int, ...]
    constants: dict[str, Any]
    options: dict[str, int]

    def __call__(self) -> None:
        """Launch on the current stream of the arguments' device; an empty grid launches nothing."""
        if self.grid[0] == 0:
            return
        device = self.args[0].device.index  # type: ignore[union-attr]
        if device == torch.cuda.current_device():
            self._launch(device)
        else:  # Triton launches on the current device, whatever its arguments
            with torch.cuda.device(device):
                self._launch(device)

    @property
    def compiler_options(self) -> dict[str, Any]:
        """``options``, and what Triton's versions default differently."""
        return {"enable_fp_fusion": True, **self.options}

    def _launch(self, device: int) -> None:
        # Triton's own launch binds and specialises every argument anew, 45 us of host time; a
        # compiled kernel launched directly takes about a third. The key tells arguments apart at
        # least as finely as Triton does.
        key = (
            self.kernel,
            device,
            *self.constants.values(),
            *self.options.values(),
            *map(_specialization, self.args),
        )
        compiled = _COMPILED.get(key)
        if compiled is None:
            compiled = self.kernel[self.grid](*self.args, **self.constants, **self.compiler_options)
            if compiled is not None:
                _COMPILED[key] = compiled
            return
        grid = (self.grid[0], 1, 1)
        stream = torch._C._cuda_getCurrentRawStream(device)
        compiled[grid](*self.args, *self.constants.values(), stream=stream)


def _specialization(arg: Tensor | int) -> Any:
    if isinstance(arg, int):
        return "1" if arg == 1 else (arg % 16 == 0, -(2**31) <= arg < 2**31)
    return arg.dtype, arg.data_ptr() % 16 == 0
