"""Sharded and wrapped models are converted before they are, or refused."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

from blocktensor import convert, freeze, unfreeze
from tests.support.conversions import everything, refused
from tests.support.models import DIM, POWER_OF_TWO, plain

if dist.is_available():
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Shard, distribute_tensor

    from tests.support.ranks import on_ranks
    from tests.support.sharded import batch, build, mesh_of, shard

    @on_ranks(2, gpus=())
    def test_sharded_and_wrapped_models(world: int, device: str) -> None:
        for reshard, by_layer in ((True, True), (False, True), (False, False)):
            model = build()
            shard(model, mesh_of(world, device), by_layer, reshard_after_forward=reshard)
            model(batch(0, device))
            text = refused(model, NotImplementedError)
            if reshard:
                assert "'up' is a DTensor [300, 192] that FSDP2 has gathered" in text
            assert "convert the model before" in text
            model(batch(0, device)).sum().backward()

        text = refused(nn.parallel.DistributedDataParallel(build()), RuntimeError)
        assert "a wrapper such as DDP uses it" in text

        model = build()
        model.down.requires_grad_(False)
        shard(model, mesh_of(world, device))
        text = refused(model, NotImplementedError)
        assert text.startswith("the weight of 'down' is a frozen DTensor [130, 300]")
        report = convert(model, skip=["down"], skip_small=False)
        assert [e.name for e in report.converted] == ["up", "mid"]

    @pytest.mark.usefixtures("group")
    @pytest.mark.parametrize("requires_grad", [True, False])
    def test_sharded_on_the_meta_device(requires_grad: bool) -> None:
        """It has no values that could be lost: what it holds is loaded later."""
        with torch.device("meta"):
            model = build().requires_grad_(requires_grad)
        shard(model, mesh_of(1, "cpu"))
        assert len(everything(model).converted) == 3
        assert {p.requires_grad for p in model.parameters()} == {requires_grad}

    @on_ranks(2, gpus=())
    def test_a_sharded_weight_stays_as_it_is(world: int, device: str) -> None:
        for requires_grad in (True, False):
            model = build()
            model.requires_grad_(requires_grad)
            everything(model)
            shard(model, mesh_of(world, device), reshard_after_forward=False)
            kinds = [type(p) for p in model.parameters()]
            for run in (freeze, unfreeze):
                text = refused(model, NotImplementedError, run)
                assert "the weight of 'up' is sharded by FSDP2" in text
                assert "before fully_shard" in text
            refused(model, ValueError, recipe=POWER_OF_TWO)
            assert {e.reason for e in everything(model).converted} == {"already converted"}
            assert [type(p) for p in model.parameters()] == kinds
            model(batch(0, device))
            for run in (freeze, unfreeze) if requires_grad else ():
                refused(model, NotImplementedError, run)

    @on_ranks(2, gpus=())
    def test_tensor_parallel_weights(world: int, device: str) -> None:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor.parallel import parallelize_module

        from blocktensor.distributed import RowwiseParallel

        model = nn.Sequential(nn.Linear(DIM, DIM, bias=False), nn.Linear(DIM, DIM, bias=False))
        mesh = init_device_mesh(device, (1, world), mesh_dim_names=("data", "tensor"))
        for layer in model:
            whole = plain(layer.weight)
            layer.weight = nn.Parameter(distribute_tensor(whole, mesh["tensor"], [Shard(0)]))
        remedy = "ColwiseParallel or RowwiseParallel of blocktensor"
        assert remedy in refused(model, NotImplementedError)
        fully_shard(model, mesh=mesh["data"])
        assert remedy in refused(model, NotImplementedError)

        model = nn.Sequential(nn.Linear(256, 256))
        parallelize_module(model, mesh["tensor"], {"0": RowwiseParallel()})
        convert(model, skip_small=False, dry_run=True)
        fully_shard(model, mesh=mesh["data"])
        text = refused(model, NotImplementedError)
        assert "a tensor parallel DTensor [256, 256] that FSDP2 shards besides" in text
