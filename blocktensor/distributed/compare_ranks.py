"""Comparison of ranks: a disagreement raises on every rank instead of hanging a collective."""

from __future__ import annotations

import datetime
from collections.abc import Sequence

import torch.distributed as dist

TIMEOUT = datetime.timedelta(seconds=30)
"""Time to wait for each other rank."""

_asked: dict[str, int] = {}


def agree(what: str, mine: Sequence[str], group: dist.ProcessGroup) -> None:
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
    keys = {rank: f"blocktensor/{group.group_name}/{turn}/{rank}" for rank in ranks}
    me = dist.get_rank()
    store.set(keys[me], "\n".join(mine))
    for rank in ranks:
        try:
            store.wait([keys[rank]], TIMEOUT)
        except RuntimeError as error:
            raise RuntimeError(
                f"rank {me} waited {TIMEOUT.seconds} s for rank {rank} to compare {what}: did it "
                f"convert and shard the same model, and run forward?"
            ) from error
        theirs = store.get(keys[rank]).decode().split("\n")
        if theirs == list(mine):
            continue
        longest = max(len(theirs), len(mine))
        ours, others = ([*lines] + ["nothing"] * (longest - len(lines)) for lines in (mine, theirs))
        place = next(i for i, (a, b) in enumerate(zip(ours, others, strict=True)) if a != b)
        raise RuntimeError(
            f"ranks disagree on {what}: rank {me} has {ours[place]}, rank {rank} has "
            f"{others[place]}; convert and shard the same model on every rank"
        )
