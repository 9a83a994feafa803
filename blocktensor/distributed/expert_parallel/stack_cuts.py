"""Which cuts of a stack of experts leave every rank with the 128x128 blocks of one process."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ...ops.formats import BlockFormat, ceil_div


def check_cuts(
    shape: Sequence[int], mesh: Any, placements: Sequence[Any], format: BlockFormat, what: str
) -> None:
    """Check that no rank would get a part of a block, whose scale several ranks would share.

    Args:
        shape: of the whole stack, ``[E, N, K]`` or ``[E, K, N]``.
        mesh, placements: of the DTensor.
        format: of the weight's casts.
        what: names the stack in the error message.

    Raises:
        NotImplementedError: a cut inside a block, or a placement that neither cuts nor copies.
    """
    sizes = list(shape)
    for index, placement in enumerate(placements):
        ranks = mesh.size(index)
        if placement.is_replicate() or ranks == 1:
            continue
        if not hasattr(placement, "dim"):
            raise NotImplementedError(
                f"{what} {list(shape)} with the placement {placement}: expected Shard(dim) or "
                f"Replicate(), or leave the stack unconverted (skip=[...])"
            )
        dim = placement.dim % len(sizes)
        pieces = getattr(placement, "split_factor", 1)  # of which a rank gets one part each
        part = ceil_div(ceil_div(sizes[dim], pieces), ranks)
        block = 1 if dim == 0 else format.block_shape[dim - 1]
        if part % block and part < sizes[dim]:
            raise NotImplementedError(
                f"{what} {list(shape)} is cut along dimension {dim} into parts of {part}, inside "
                f"blocks of {block} that two ranks would share: cut between experts (Shard(0)) or "
                f"over fewer ranks, or leave the stack unconverted (skip=[...])"
            )
        sizes[dim] = part * pieces
