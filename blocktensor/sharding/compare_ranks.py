"""Comparison of ranks: a disagreement raises on every rank instead of hanging a collective."""

from __future__ import annotations

import contextlib
import datetime
import itertools
from collections.abc import Sequence

import torch.distributed as dist

TIMEOUT = datetime.timedelta(seconds=30)
"""Time to wait for each other rank."""

_asked: dict[str, int] = {}


def agree(
    what: str,
    mine: Sequence[str],
    group: dist.ProcessGroup,
    remedy: str = "convert and shard the same model on every rank, and run forward on all of them",
) -> None:
    """Check that all ranks of ``group`` call this with the same lines, which describe ``what``.

    The lines pass through the store of the default group: a collective could be matched with
    another one that a disagreeing rank is running.

    Raises:
        RuntimeError: on every rank, with the first line that differs, or the rank that is late.
    """
    ranks = dist.get_process_group_ranks(group)
    # backend "fake" is for dry runs and has no other ranks
    if len(ranks) == 1 or dist.get_backend(group) == "fake":
        return
    store = dist.distributed_c10d._get_default_store()
    turn = _asked[group.group_name] = _asked.get(group.group_name, 0) + 1
    key = f"blocktensor/{group.group_name}/{turn}"
    me, found = dist.get_rank(), {}
    store.set(f"{key}/{me}", "\n".join(mine))
    for rank in ranks:
        try:
            store.wait([f"{key}/{rank}"], TIMEOUT)
            found[rank] = store.get(f"{key}/{rank}").decode().split("\n")
        except RuntimeError as error:
            known = f", of which it has {mine[0]}" if len(mine) == 1 else ""
            raise RuntimeError(
                f"rank {me} waited {TIMEOUT.seconds} s for rank {rank} to compare {what}{known}: "
                f"{remedy}"
            ) from error
    other = next((rank for rank in ranks if found[rank] != list(mine)), None)
    # every rank comes to the same verdict, since it has the same lines
    if other is None:
        return
    store.set(f"{key}/{me}/has read", "")
    with contextlib.suppress(RuntimeError):  # the process of one of the ranks serves the store
        store.wait([f"{key}/{rank}/has read" for rank in ranks], TIMEOUT)
    pairs = itertools.zip_longest(mine, found[other], fillvalue="nothing")
    ours, theirs = next((a, b) for a, b in pairs if a != b)
    raise RuntimeError(
        f"ranks disagree on {what}: rank {me} has {ours}, rank {other} has {theirs}; {remedy}"
    )
