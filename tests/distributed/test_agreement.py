"""Whom ranks compare themselves with: nobody, where the others are pretended."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

if not dist.is_available():
    pytest.skip("torch was built without distributed", allow_module_level=True)

from blocktensor import Recipe
from tests.distributed.nets import batch, build, mesh_of, reductions, shard

RANKS = 4


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
