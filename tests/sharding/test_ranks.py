"""Ranks that compare their weights: they name what differs and who stays away."""

from __future__ import annotations

import datetime
import time
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist

if not dist.is_available():
    pytest.skip("torch was built without distributed", allow_module_level=True)

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, distribute_tensor

from blocktensor import Recipe, convert
from blocktensor.sharding import ranks
from tests.support.ranks import on_ranks
from tests.support.sharded import RECIPES, batch, build, mesh_of, reductions, shard

RANKS = 4


@pytest.mark.parametrize("what", ["scales", "backward", "conversion"])
@on_ranks(2, gpus=())
def test_what_differs_is_named_on_every_rank(mesh: DeviceMesh, what: str) -> None:
    rank = mesh.get_local_rank()
    if what == "scales":
        model = build(RECIPES[rank])
    elif what == "backward":
        model = build(Recipe(backward="dequantized") if rank else Recipe())
    else:
        model = build()
        convert(model, skip=["mid"][:rank], skip_small=False)
    shard(model, mesh)
    with pytest.raises(RuntimeError, match=r"^ranks disagree on sharded FP8 weights: rank "):
        model(batch(0, "cpu"))


@on_ranks(2, gpus=())
def test_a_rank_that_has_more_says_what(mesh: DeviceMesh) -> None:
    """Each rank in turn, by one weight or two, which are the last ones."""
    rank = mesh.get_local_rank()
    for longer in (0, 1):
        for further in (["last"], ["next", "last"]):
            lines = ["alike", *further * (rank == longer)]
            has = [further[0] if each == longer else "nothing" for each in (rank, 1 - rank)]
            said = f"rank {rank} has {has[0]}, rank {1 - rank} has {has[1]}; "
            with pytest.raises(RuntimeError, match=f"^ranks disagree on things: {said}"):
                ranks.agree("things", lines, mesh.get_group())


@on_ranks(2, gpus=())
def test_who_does_not_come_is_named(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    group = dist.new_group()  # for comparisons of its own, of which one is not answered
    if dist.get_rank():
        return
    monkeypatch.setattr(ranks, "TIMEOUT", datetime.timedelta(seconds=1))
    model = build(Recipe())
    shard(model, DeviceMesh.from_group(group, device))
    with pytest.raises(RuntimeError, match=r"^rank 0 waited 1 s for rank 1 to compare sharded FP8"):
        model(batch(0, device))
    with pytest.raises(RuntimeError, match="to compare things, of which it has one: convert"):
        ranks.agree("things", ["one"], group)


@on_ranks(2, gpus=())
def test_who_disagrees_stays_until_all_have_read(
    mesh: DeviceMesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process of rank 0 serves the store in most jobs, and ends by the error."""
    rank = mesh.get_local_rank()
    if rank:
        store = dist.distributed_c10d._get_default_store()
        slow = Mock(wraps=store, get=lambda key: time.sleep(0.5) or store.get(key))
        monkeypatch.setattr(dist.distributed_c10d, "_get_default_store", lambda: slow)
    dist.barrier()
    begun = time.monotonic()
    with pytest.raises(RuntimeError, match=f"^ranks disagree on things: rank {rank} has {rank}, "):
        ranks.agree("things", ["alike", str(rank)], mesh.get_group())
    assert time.monotonic() - begun > 0.6  # rank 1 has read twice


class OfTwo(Exception):
    """Pickles, and cannot be made again."""

    def __init__(self, why: str, _: int) -> None:
        super().__init__(why)


@on_ranks(2, gpus=())
def test_an_exception_that_cannot_be_sent_keeps_its_name(mesh: DeviceMesh) -> None:
    for error in (type("Local", (Exception,), {})("why"), OfTwo("why", 2)):

        def fail(error: Exception = error) -> None:
            if mesh.get_local_rank():
                raise error

        with pytest.raises(RuntimeError, match=rf"^{type(error).__name__}: why$"):
            ranks.Ranks(mesh).each(fail)


@on_ranks(4, gpus=())
def test_values_of_a_mesh_come_in_the_order_of_its_ranks(device: str) -> None:
    for places in ([0, 1, 2, 3], [1, 3]):
        mesh = DeviceMesh(device, torch.tensor(places).view(-1, 2))
        if dist.get_rank() in places:
            of_mesh = ranks.Ranks(mesh)
            assert of_mesh.gathered(dist.get_rank()) == places
            assert of_mesh.gathered(of_mesh.index) == [*range(len(places))]


@on_ranks(4, gpus=())
def test_the_ranks_of_tensors_are_those_of_the_largest_mesh(device: str) -> None:
    whole = init_device_mesh(device, (2, 2), mesh_dim_names=("outer", "inner"))
    part = distribute_tensor(torch.ones(4), whole["inner"], [Replicate()])
    large = distribute_tensor(torch.ones(4), whole, [Replicate(), Replicate()])
    for tensors in ([part, large], [large, part], [torch.ones(4), part, large]):
        assert ranks.Ranks.of(tensors).size == 4
    assert ranks.Ranks.of([part]).size == 2
    assert ranks.Ranks.of([torch.ones(4)]).size == 1


def test_a_fake_group_runs_dry(request: pytest.FixtureRequest) -> None:
    dist.init_process_group("fake", rank=1, world_size=RANKS)
    request.addfinalizer(dist.destroy_process_group)
    model = build(Recipe())
    whole = sum(p.numel() for p in model.parameters())
    shard(model, mesh_of(RANKS, "cpu"))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(2):
        model(batch(step, "cpu")).float().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    held = sum(p.to_local().numel() for p in model.parameters())
    assert whole / RANKS <= held < 1.5 * whole / RANKS  # some rows are few, or uneven
    assert reductions(model) >= 2  # one of each step, were there anybody
