"""Say which low-rank products a grouped GEMM can add to its sums: their dtype and ranks."""

from __future__ import annotations

import torch

LOW_RANK_DTYPE = torch.bfloat16
"""The dtype of the operands of a low-rank product."""

LARGEST_RANK = 64
"""One k block of FP8, 128 bytes of each row, holds as many numbers of 16 bits."""

RANK_STEP = 8
"""Ranks are multiples of this number: their rows are then whole vectors of 16 bytes."""


def is_fused(dtype: torch.dtype, rank: int) -> bool:
    """Return True if grouped GEMMs add low-rank products of this dtype and rank, once padded."""
    return dtype == LOW_RANK_DTYPE and 0 < rank <= LARGEST_RANK


def padded_rank(rank: int) -> int:
    """Return the columns of shared memory for ``rank``: 16, 32 or 64, as tensor cores read them."""
    return next(width for width in (16, 32, LARGEST_RANK) if rank <= width)
