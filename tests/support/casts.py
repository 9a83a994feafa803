"""The casts and producers there are, the functions of each backend, and inputs for them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Generator, Tensor

from blocktensor.ops import formats
from blocktensor.ops.cast.choose_backend import CAST_BACKENDS, CastProblem
from blocktensor.ops.formats import (
    BLOCKS_1X128,
    BLOCKS_1X128_POW2,
    BLOCKS_128X128,
    BLOCKS_128X128_POW2,
    BlockFormat,
    Quantized,
)
from blocktensor.ops.registry import Backend
from tests.support.numeric import values


@dataclass(frozen=True)
class Way:
    """A way to cast: a function of a backend, and its formats with either rounding of scales."""

    function: str
    fp32: tuple[BlockFormat, ...]
    power_of_two: tuple[BlockFormat, ...]

    def __call__(self, backend: Any, x: Tensor, power_of_two: bool) -> tuple[Quantized, ...]:
        """The forms that ``backend`` (its functions, or a module that has them) casts ``x`` to."""
        made = getattr(backend, self.function)(x, *self.formats(power_of_two))
        return (made,) if isinstance(made, Quantized) else made

    def formats(self, power_of_two: bool) -> tuple[BlockFormat, ...]:
        return self.power_of_two if power_of_two else self.fp32

    def __str__(self) -> str:
        return " ".join([self.function, *(format.name for format in self.fp32)])


ROWS = (BLOCKS_1X128,), (BLOCKS_1X128_POW2,)
SQUARES = (BLOCKS_128X128,), (BLOCKS_128X128_POW2,)
MIXED = (BLOCKS_1X128, BLOCKS_128X128), (BLOCKS_1X128_POW2, BLOCKS_128X128_POW2)
ROWWISE, SQUARE = (Way("quantize_rowwise", *blocks) for blocks in (ROWS, SQUARES))
BOTH = Way("quantize_both", *ROWS)
GLUON_WAYS = (
    Way("quantize_columnwise", *ROWS),
    BOTH,
    SQUARE,
    Way("quantize_columnwise", *SQUARES),
    Way("quantize_both", *MIXED),
)
"""The ways that have a Gluon kernel."""

WAYS = (ROWWISE, *GLUON_WAYS)


class Functions:
    """The functions of a backend, as attributes."""

    def __init__(self, backend: Backend[Any]) -> None:
        self.backend = backend

    def __getattr__(self, name: str) -> Callable[..., Any]:
        function = self.backend.function(name)
        assert function is not None, f"{self.backend.name} has no {name}"
        return function


def kernels(name: str, backends: Iterable[Backend[Any]] = CAST_BACKENDS) -> Functions:
    """The functions of the backend of this name."""
    return Functions(next(backend for backend in backends if backend.name == name))


def gluon_takes(x: Tensor, *formats: BlockFormat) -> bool:
    """True if the Gluon kernels can read ``x``, whatever the device."""
    return kernels("gluon").backend.declines(CastProblem(x, *formats)) is None


Formats = tuple[BlockFormat | None, BlockFormat | None]
FORMATS: tuple[Formats, ...] = (
    (BLOCKS_1X128, BLOCKS_1X128),
    (BLOCKS_1X128, BLOCKS_128X128),
    (None, BLOCKS_1X128),
    (None, BLOCKS_128X128),
    (BLOCKS_1X128, None),
    (BLOCKS_1X128_POW2, BLOCKS_1X128_POW2),
    (BLOCKS_1X128_POW2, formats.BLOCKS_128X128_POW2),
)
SIZES = (0, 1, 127, 128, 129, 130, 136, 256, 300, 512, 576, 1096, 10944)


def three(
    rows: int,
    cols: int,
    dtype: torch.dtype = torch.bfloat16,
    kinds: tuple[str, str, str] = ("normal", "normal", "normal"),
    seed: int = 0,
    device: torch.device | str = "cpu",
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradient of h, gate and up; which of them has values of the first kind, seeds decide."""
    rng, turn = Generator().manual_seed(seed), seed % 3
    made = [values(kind, rows, cols, dtype, rng).to(device) for kind in kinds]
    grad, gate, up = made[turn:] + made[:turn]
    return grad, gate, up
