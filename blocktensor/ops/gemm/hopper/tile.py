"""The shape of a GEMM tile and how a program works on it: one frozen value, a kernel's constant."""

from __future__ import annotations

from dataclasses import dataclass

from ...formats import BLOCK

WARPGROUP_ROWS = 64
"""Rows of one tensor core product of a warpgroup."""


@dataclass(frozen=True)
class Tile:
    """How one program computes an output tile.

    Consumer warpgroups divide the tile along ``split``. Each covers its part with ``rows`` x
    ``cols`` products of 64 x ``width`` elements over 128 of K, promoted one by one into its
    accumulators. ``depth`` raw accumulators let as many products be under way.

    Attributes:
        name: unique among tiles.
        b_block: rows of B that share a scale: 1 (wgrad) or 128 (fprop, dgrad).
        width: columns of a product: 64, 96 or 128.
        warpgroups: consumer warpgroups.
        stages: k blocks that shared memory holds.
        buffers: output buffers of a warpgroup, 4 KiB each: 64 x 32 numbers of 16 bits, or half.
        group: m tiles that share a sweep over n, for reuse in L2.
        registers: of a consumer thread.
        programs: programs an SM holds.
        turned: the product is made as its transpose, and turned on its way to memory.
    """

    name: str
    b_block: int
    rows: int
    cols: int
    width: int
    depth: int
    split: str = "m"
    warpgroups: int = 2
    stages: int = 4
    buffers: int = 3
    group: int = 8
    registers: int = 240
    programs: int = 1
    turned: bool = False

    @property
    def m(self) -> int:
        """Rows of the tile, as it is made: turned ones are columns of the output."""
        return WARPGROUP_ROWS * self.rows * (self.warpgroups if self.split == "m" else 1)

    @property
    def n(self) -> int:
        """Columns of the tile, as it is made."""
        return self.width * self.cols * (self.warpgroups if self.split == "n" else 1)

    @property
    def size(self) -> tuple[int, int]:
        """Rows and columns of the output that a tile covers."""
        return (self.n, self.m) if self.turned else (self.m, self.n)

    @property
    def products(self) -> int:
        """Tensor core products a warpgroup makes of one k block."""
        return self.rows * self.cols

    @property
    def raw_width(self) -> int:
        """Columns of a raw accumulator: Gluon's shapes are powers of two."""
        return 128 if self.width == 96 else self.width

    @property
    def pieces(self) -> int:
        """Tensors that an accumulator of 64 x ``width`` is kept in, each at most 64 columns."""
        return -(-self.width // 64)

    @property
    def a_rows(self) -> int:
        """Rows of A that one TMA copy brings."""
        return self.m if self.m & (self.m - 1) == 0 else WARPGROUP_ROWS

    @property
    def b_rows(self) -> int:
        """Rows of B that one TMA copy brings."""
        return self.n if self.n & (self.n - 1) == 0 else WARPGROUP_ROWS

    @property
    def b_rows_apart(self) -> int:
        """Rows of B between places in shared memory where an operand may begin."""
        return 32 if self.width == 96 else self.b_rows

    @property
    def a_scales(self) -> int:
        """Row scales that one copy brings: a power of two, rows of the tile and perhaps more."""
        return max(BLOCK, 1 << (self.m - 1).bit_length())

    @property
    def b_scales(self) -> int:
        """Scales of B that one copy brings."""
        if self.b_block == BLOCK:
            return 32  # 128 bytes, of which one number is used
        return BLOCK if self.width == 96 else self.n

    @property
    def b_scale_copies(self) -> int:
        """Copies that bring the scales of B."""
        return 2 if self.width == 96 else 1

    def out_buffers(self, bits: int) -> int:
        """Output buffers of a warpgroup for numbers of ``bits``."""
        return self.buffers * 16 // bits
