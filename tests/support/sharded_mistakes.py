"""What users may get wrong under FSDP2, and what every rank says then."""

from __future__ import annotations

import datetime
from collections.abc import Callable

import torch

from blocktensor import Recipe, convert
from blocktensor.distributed import agreement
from tests.distributed.nets import (
    RECIPES,
    batch,
    build,
    mesh_of,
    shard,
)


def _message(attempt: Callable[[], object]) -> str:
    try:
        attempt()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def other_recipe(rank: int, world: int) -> str:
    model = build(RECIPES[rank % 2])
    shard(model, mesh_of(world, "cpu"))
    return _message(lambda: model(batch(0, "cpu")))


def other_conversion(rank: int, world: int) -> str:
    model = build()
    skip = ["mid"] if rank else []
    convert(model, skip=skip, auto_filter_small_kn=False)
    shard(model, mesh_of(world, "cpu"))
    return _message(lambda: model(batch(0, "cpu")))


def one_rank_forgets(rank: int, world: int) -> str:
    agreement.TIMEOUT = datetime.timedelta(seconds=3)
    if rank:
        return "stayed away"
    model = build(Recipe())
    shard(model, mesh_of(world, "cpu"))
    return _message(lambda: model(batch(0, "cpu")))


def under_fsdp1(rank: int, world: int) -> str:
    from torch.distributed.fsdp import FullyShardedDataParallel

    model = build(Recipe())
    return _message(lambda: FullyShardedDataParallel(model, device_id=torch.device("cpu")))


def resharded_to_fewer(rank: int, world: int) -> str:
    model = build(Recipe())
    shard(model, mesh_of(world, "cpu"), reshard_after_forward=2)

    def step() -> None:
        model(batch(0, "cpu")).sum().backward()

    return _message(step)
