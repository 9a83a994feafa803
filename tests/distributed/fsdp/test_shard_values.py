"""What optimizers, clipping, reports and files see of a sharded model."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict

from blocktensor import memory_report, save_fp8
from blocktensor.distributed.fsdp.shards import shard_of
from tests.support.ranks import on_ranks
from tests.support.sharded import batch, loss_of, mesh_of, shard, twins


@on_ranks(2)
def test_clipping_and_whole_values(world: int, device: str) -> None:
    model, single = twins(device)
    shard(model, mesh_of(world, device))
    for m in (model, single):
        loss_of(m, batch(0, device)).backward()
    norms = [nn.utils.clip_grad_norm_(m.parameters(), 0.01) for m in (model, single)]
    assert torch.allclose(norms[0].full_tensor(), norms[1], rtol=1e-2)
    full = model.up.weight.full_tensor()
    assert type(full) is Tensor
    assert torch.equal(full, single.up.weight.master)
    for name, value in get_model_state_dict(model).items():
        assert type(value._local_tensor) is Tensor, name


@on_ranks(2)
def test_a_product_with_a_shard_is_refused(world: int, device: str) -> None:
    model, _ = twins(device)
    shard(model, mesh_of(world, device))
    local = shard_of(model.up.weight)
    assert local is not None
    with pytest.raises(NotImplementedError, match="a product needs the whole weight"):
        torch.mm(torch.ones(1, local.shape[0], dtype=local.dtype, device=device), local)


@on_ranks(2)
def test_memory_is_that_of_the_rows_held(world: int, device: str) -> None:
    model, single = twins(device)
    shard(model, mesh_of(world, device))
    for one in (model, single):
        assert memory_report(one).trainable.high_precision > 0
    rows = sum(p._local_tensor.nbytes for p in model.parameters() if shard_of(p) is not None)
    assert memory_report(model).trainable.high_precision == rows
    assert memory_report(model).trainable.fp8 == 0


@on_ranks(2)
def test_save_fp8_names_the_sharded_weight(world: int, device: str) -> None:
    model, _ = twins(device)
    shard(model, mesh_of(world, device))
    with pytest.raises(NotImplementedError, match=r"up\.weight is a DTensor, its model sharded"):
        save_fp8(model, "nowhere")
