"""What tests of casts share: the casts there are, and the functions of each backend."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from blocktensor.ops.cast.choose_backend import CAST_BACKENDS, CastKernels, CastProblem
from blocktensor.ops.formats import (
    BLOCKS_1X128,
    BLOCKS_1X128_POW2,
    BLOCKS_128X128,
    BLOCKS_128X128_POW2,
    BlockFormat,
    Quantized,
)


@dataclass(frozen=True)
class Way:
    """A way to cast: a function of a backend, and its format with either rounding of scales."""

    function: str
    fp32: BlockFormat
    power_of_two: BlockFormat

    def __call__(self, backend: Any, x: Tensor, power_of_two: bool) -> tuple[Quantized, ...]:
        """The forms that ``backend`` (its functions, or a module that has them) casts ``x`` to."""
        made = getattr(backend, self.function)(x, self.format(power_of_two))
        return (made,) if isinstance(made, Quantized) else made

    def format(self, power_of_two: bool) -> BlockFormat:
        return self.power_of_two if power_of_two else self.fp32

    def __str__(self) -> str:
        return f"{self.function} {self.fp32.name}"


SQUARE = Way("quantize_rowwise", BLOCKS_128X128, BLOCKS_128X128_POW2)
GLUON_WAYS = (
    Way("quantize_columnwise", BLOCKS_1X128, BLOCKS_1X128_POW2),
    Way("quantize_both", BLOCKS_1X128, BLOCKS_1X128_POW2),
    SQUARE,
)
"""The ways that have a Gluon kernel."""

WAYS = (Way("quantize_rowwise", BLOCKS_1X128, BLOCKS_1X128_POW2), *GLUON_WAYS)


def kernels(name: str) -> CastKernels:
    """The functions of a backend."""
    return next(backend for backend in CAST_BACKENDS if backend.name == name).load()


def gluon_takes(x: Tensor, format: BlockFormat) -> bool:
    """True if the Gluon kernels can read ``x``, whatever the device."""
    gluon = next(backend for backend in CAST_BACKENDS if backend.name == "gluon")
    return gluon.declines(CastProblem(x, format)) is None
