"""Ranks that compare their weights: they name what differs and who stays away."""

from __future__ import annotations

import datetime
import re
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

if not dist.is_available():
    pytest.skip("torch was built without distributed", allow_module_level=True)

from blocktensor import Recipe, convert
from blocktensor.sharding import compare_ranks
from tests.support import ranks
from tests.support.ranks import on_ranks
from tests.support.sharded import RECIPES, batch, build, mesh_of, reductions, shard

RANKS = 4
DISAGREE = "^ranks disagree on sharded FP8 weights: rank "


@pytest.mark.parametrize("what", ["recipe", "conversion"])
@on_ranks(2, gpus=())
def test_what_differs_is_named_on_every_rank(world: int, device: str, what: str) -> None:
    if what == "recipe":
        model = build(RECIPES[dist.get_rank()])
    else:
        model = build()
        convert(model, skip=["mid"][: dist.get_rank()], skip_small=False)
    shard(model, mesh_of(world, device))
    with pytest.raises(RuntimeError, match=DISAGREE):
        model(batch(0, device))


def _only_rank_0_runs_forward(rank: int, world: int) -> None:
    compare_ranks.TIMEOUT = datetime.timedelta(seconds=3)
    if rank:
        return
    model = build(Recipe())
    shard(model, mesh_of(world, "cpu"))
    message = "rank 0 waited 3 s for rank 1 to compare sharded FP8"
    with pytest.raises(RuntimeError, match=f"^{re.escape(message)}"):
        model(batch(0, "cpu"))


def test_who_does_not_come_is_named() -> None:
    ranks.run(_only_rank_0_runs_forward, 2)


class _SlowStore:
    """The store of a rank that reads a second late."""

    def __init__(self, store: Any) -> None:
        self._store = store

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def get(self, key: str) -> bytes:
        time.sleep(1)
        return bytes(self._store.get(key))


def _rank_1_reads_late(rank: int, world: int) -> float:
    c10d = dist.distributed_c10d
    if rank:
        store = _SlowStore(c10d._get_default_store())
        c10d._get_default_store = lambda: store  # type: ignore[assignment]
    begun = time.monotonic()
    with pytest.raises(RuntimeError, match=f"^ranks disagree on things: rank {rank} has {rank}, "):
        compare_ranks.agree("things", [str(rank)], dist.group.WORLD)  # type: ignore[arg-type]
    return time.monotonic() - begun


def test_who_disagrees_stays_until_all_have_read() -> None:
    """The process of rank 0 serves the store in most jobs, and ends by the error."""
    first, _ = ranks.run(_rank_1_reads_late, 2)
    assert first > 0.9


@pytest.fixture
def pretended() -> Iterator[None]:
    dist.init_process_group("fake", rank=1, world_size=RANKS)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("pretended")
def test_a_fake_group_runs_dry() -> None:
    model = build(Recipe())
    whole = sum(p.numel() for p in model.parameters())
    shard(model, mesh_of(RANKS, "cpu"))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(2):
        y = model(batch(step, "cpu"))
        y.float().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    held = sum(p.to_local().numel() for p in model.parameters())
    assert whole / RANKS <= held < 1.5 * whole / RANKS  # some rows are few, or uneven
    assert reductions(model) >= 2  # one of each step, were there anybody
