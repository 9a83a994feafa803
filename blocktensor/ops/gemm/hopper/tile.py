"""Define the tile of a GEMM and its division among warpgroups, as a constant of the kernel."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ...formats import BLOCK

WARPGROUP_ROWS = 64
"""Rows of one tensor core product of a warpgroup."""


@dataclass(frozen=True)
class Tile:
    """The shape of an output tile, and how one program computes it.

    Consumer warpgroups divide the tile along ``split``. Each covers its part with ``rows`` x
    ``cols`` products of 64 x ``width`` elements over 128 of K, promoted one by one into its
    accumulators. ``depth`` raw accumulators allow as many products under way.

    Attributes:
        name: unique among tiles.
        b_block: rows of B that share a scale: 1 (wgrad) or 128 (fprop, dgrad).
        width: columns of a product: 64 or 128.
        warpgroups: consumer warpgroups.
        stages: k blocks that shared memory holds.
        buffers: output buffers of a warpgroup, 64 x 32 numbers of 16 bits; for fp32, half as many.
        group: m tiles that share a sweep over n, for reuse in L2.
        registers: registers of a consumer thread.
        programs: programs that run on an SM at a time.
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

    @property
    def m(self) -> int:
        """Rows of the tile."""
        return WARPGROUP_ROWS * self.rows * (self.warpgroups if self.split == "m" else 1)

    @property
    def n(self) -> int:
        """Columns of the tile."""
        return self.width * self.cols * (self.warpgroups if self.split == "n" else 1)

    @property
    def products(self) -> int:
        """Tensor core products of a warpgroup for one k block."""
        return self.rows * self.cols

    @property
    def pieces(self) -> int:
        """Tensors of 64 columns that hold an accumulator of 64 x ``width``."""
        return self.width // 64

    @property
    def a_rows(self) -> int:
        """Rows of A that one TMA copy loads."""
        return self.m if self.m & (self.m - 1) == 0 else WARPGROUP_ROWS

    @property
    def a_copies(self) -> int:
        """Copies of A that a stage holds."""
        return self.m // self.a_rows

    @property
    def a_scales(self) -> int:
        """Row scales that one copy loads: a power of two, at least the rows of the tile."""
        return max(BLOCK, 1 << (self.m - 1).bit_length())

    @property
    def b_scales(self) -> int:
        """Scales of B that one copy loads."""
        return 32 if self.b_block == BLOCK else self.n  # of 128 bytes, one number is used

    @property
    def b_scale_copies(self) -> int:
        """Copies that load the scales of B: of 128x128 blocks, one for each 128 columns."""
        return self.n // BLOCK if self.b_block == BLOCK else 1

    @property
    def options(self) -> dict[str, Any]:
        """Compiler options of a kernel with this tile."""
        options = {"num_warps": 4, "enable_fp_fusion": True}
        return options if self.programs == 1 else options | {"maxnreg": 128}

    def out_buffers(self, bits: int) -> int:
        """Return output buffers of a warpgroup for numbers of ``bits``."""
        return self.buffers * 16 // bits
