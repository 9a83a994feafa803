"""Describe the order in which torch's CUDA kernels add the numbers of a row.

The order of a sum decides its last bits. A fused norm adds in the order of torch's ``mean`` and
``sum``, so that its results have the bits of the norm that it replaces. ``setReduceConfig`` in
torch's ATen/native/cuda/Reduce.cuh gives the order, for contiguous rows in fp32: a row is dealt to
threads, four numbers at a time; each thread adds every fourth of its numbers; then its four sums,
in order; then the upper half of a group of threads adds to the lower half until one sum is left;
and so do the groups, if a row has several.
"""

from __future__ import annotations

from typing import NamedTuple

from ..formats import ceil_div

VECTOR = 4
"""Numbers that a thread reads at once."""

_THREADS = 512
_WARP = 32
_MOST_PER_THREAD = 256


class Threads(NamedTuple):
    """The threads that add a row: powers of two.

    Attributes:
        groups: of threads; each group first adds its own sums.
        width: the threads of a group.
    """

    groups: int
    width: int


def threads_of(rows: int, cols: int) -> Threads | None:
    """Return the threads that add a row of ``[rows, cols]``.

    None if torch adds such rows in another way: short ones, rows that do not consist of whole
    vectors, and rows so long that several thread blocks share them.
    """
    if cols < _WARP * VECTOR or cols % VECTOR:
        return None
    most = _power_of_two(cols // VECTOR)
    height = min(_power_of_two(max(rows, 1)), _THREADS // min(most, _WARP))
    width = min(most, _THREADS // height)
    if ceil_div(cols, width) < min(16 * height, _MOST_PER_THREAD):
        return Threads(1, width)
    if ceil_div(cols, width * height) >= _MOST_PER_THREAD:
        return None
    return Threads(height, width)


def _power_of_two(number: int) -> int:
    """Return the largest power of two that is at most ``number``, and at most a block's threads."""
    return min(1 << (number.bit_length() - 1), _THREADS)
