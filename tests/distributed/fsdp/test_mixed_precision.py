"""Masters in another precision than the one that is computed in."""

from __future__ import annotations

import torch
from torch.distributed.fsdp import MixedPrecisionPolicy

from blocktensor.ops import reference
from blocktensor.ops.formats import BLOCKS_128X128
from tests.support.ranks import on_ranks
from tests.support.sharded import assert_same_cast, batch, loss_of, mesh_of, shard, twins


@on_ranks(2)
def test_masters_in_fp32_are_cast_as_under_autocast(world: int, device: str) -> None:
    """The cast is of them, as under autocast in one process."""
    model, single = twins(device, dtype=torch.float32)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    shard(model, mesh_of(world, device), mp_policy=policy)

    model.unshard()
    model.up.unshard()
    for name in ("up", "mid"):
        weight = model.get_submodule(name).weight
        assert weight.dtype == torch.bfloat16
        master = single.get_submodule(name).weight.master
        assert_same_cast(weight.rowwise(), reference.quantize_rowwise(master, BLOCKS_128X128))

    model.up.reshard()
    model.reshard()
    loss_of(model, batch(0, device)).backward()
    assert all(p.grad.dtype == torch.float32 for p in model.parameters())
