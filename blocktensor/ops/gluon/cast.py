"""Casts of tensors whose rows are whole words, by the kernels of this package.

Rowwise casts alone are Triton's: there is nothing to gain on them.
"""

from __future__ import annotations

from torch import Tensor

from ..layouts import Form, empty_square_form
from ..triton.cast import both_by, columnwise_by, quantize_rowwise
from ..triton.replay import replayed
from .columnwise import plan_columnwise
from .square import plan_128x128

__all__ = [
    "quantize_both",
    "quantize_columnwise",
    "quantize_rowwise",
    "quantize_square",
    "takes",
]


def takes(x: Tensor) -> bool:
    """Whether ``x[..., M, K]`` is cast here: rows of whole words, by fours of rows.

    Any M could be, but a columnwise cast would store single bytes, and a warp's would lie in many
    lines: 18% of copy bandwidth, against Triton's 28% (4095x7168).
    """
    per_word = 4 // x.element_size()
    return (
        x.stride(-1) == 1
        and x.shape[-1] % per_word == 0
        and x.shape[-2] % 4 == 0
        and x.data_ptr() % 4 == 0
        and all(stride % per_word == 0 for stride in x.stride()[:-1])
        and max(x.stride(-2), *x.shape[-2:]) < 2**24  # 32-bit offsets inside a tile
    )


@replayed
def quantize_columnwise(x: Tensor, power_of_two: bool) -> Form:
    """See :func:`blocktensor.ops.reference.quantize_columnwise`."""
    return columnwise_by(plan_columnwise, x, power_of_two)


@replayed
def quantize_both(x: Tensor, power_of_two: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """See :func:`blocktensor.ops.reference.quantize_both`; reads ``x`` once."""
    return both_by(plan_columnwise, x, power_of_two)


@replayed
def quantize_square(x: Tensor, power_of_two: bool) -> Form:
    """See :func:`blocktensor.ops.reference.quantize_square`."""
    form = empty_square_form(x.shape, x.device)
    plan_128x128(x, *form, power_of_two)()
    return form
