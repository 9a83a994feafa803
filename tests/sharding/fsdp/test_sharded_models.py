"""Models that ``fully_shard`` shards: how they come to be, what users and checkpoints see."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import distribute_tensor

from blocktensor import BlockwiseFP8Weight, Recipe, convert
from tests.support.ranks import on_ranks
from tests.support.sharded import (
    K,
    assert_trains_as,
    batch,
    build,
    loss_of,
    shard,
    shard_of,
    twins,
    whole,
)


@on_ranks(2)
def test_converted_after_it_was_sharded(mesh: DeviceMesh, device: str) -> None:
    model, single = build().to(device), build(Recipe()).to(device)
    shard(model, mesh)
    report = convert(model, skip_small=False)
    assert [entry.reason for entry in report.converted] == 3 * ["trainable, gathered in FP8"]
    assert_trains_as(single, model, device)


@on_ranks(2)
def test_sharded_on_the_meta_device_and_filled_and_loaded(mesh: DeviceMesh, device: str) -> None:
    single = build(Recipe()).to(device)
    with torch.device("meta"):
        model = build(Recipe())
    shard(model, mesh)
    model.to_empty(device=device)
    for p, q in zip(model.parameters(), single.parameters(), strict=True):
        with torch.no_grad():
            p.copy_(distribute_tensor(whole(q), mesh))
    assert_trains_as(single, model, device)
    other = build(Recipe()).to(device)
    model.load_state_dict({k: distribute_tensor(v, mesh) for k, v in other.state_dict().items()})
    assert_trains_as(other, model, device)


@on_ranks(2, gpus=())
def test_fsdp1_is_refused_on_every_rank() -> None:
    with pytest.raises(NotImplementedError, match=r"^FullyShardedDataParallel"):
        FullyShardedDataParallel(build(Recipe()), device_id=torch.device("cpu"))


@on_ranks(2)
def test_what_others_see_of_a_sharded_model(mesh: DeviceMesh, device: str) -> None:
    model, single = twins(device)
    shard(model, mesh)
    shards = [s for p in model.parameters() if (s := shard_of(p)) is not None]
    weights = [w for w in single.parameters() if isinstance(w, BlockwiseFP8Weight)]
    rows = sum(shard.master.nbytes for shard in shards)
    assert 0 < rows < sum(w.master.nbytes for w in weights)
    for m in (model, single):
        loss_of(m, batch(0, device)).backward()
    norms = [nn.utils.clip_grad_norm_(m.parameters(), 0.01) for m in (model, single)]
    assert torch.allclose(norms[0].full_tensor(), norms[1], rtol=1e-2)
    for name, value in get_model_state_dict(model).items():
        assert type(value._local_tensor) is Tensor, name
    state = model.state_dict(keep_vars=True)
    assert all(state[name] is parameter for name, parameter in model.named_parameters())
    weight = model.up.weight
    for full in (weight.full_tensor(), weight.detach().full_tensor()):
        assert type(full) is Tensor
        assert torch.equal(full, single.up.weight.master)
    local = weight.detach().to_local()
    assert torch.equal(torch.tensor(local.tolist(), device=device), local.master.float())

    x = torch.ones(1, local.shape[0], dtype=local.dtype, device=device)
    needs = pytest.raises(NotImplementedError, match="shard of an FP8 weight: a matmul needs")
    for rows in (local, weight.to_local(), local[:5]):
        with needs:
            nn.functional.linear(x.new_ones(3, K), rows)
    with needs:
        torch.mm(x, local)


@on_ranks(1, gpus=())
def test_a_full_tensor_of_one_rank_is_plain(mesh: DeviceMesh, device: str) -> None:
    model, _ = twins(device)
    shard(model, mesh)
    for weight in (model.up.weight, model.up.weight.detach()):
        assert type(weight.full_tensor()) is Tensor


@on_ranks(4, gpus=())
def test_gathering_over_fewer_ranks_for_backward_is_refused(mesh: DeviceMesh, device: str) -> None:
    model = build(Recipe())
    shard(model, mesh, reshard_after_forward=2)
    with pytest.raises(NotImplementedError, match=r"^reshard_after_forward=2 with FP8 weights"):
        model(batch(0, device)).sum().backward()
