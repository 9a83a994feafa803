"""Stacks of experts under FSDP2: gathered in FP8, and FP8 in DTensors of other meshes."""

from __future__ import annotations

import copy

import torch
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard

from blocktensor import BlockwiseFP8Tensor, BlockwiseFP8Weight, convert
from blocktensor.distributed import FP8Shard
from tests.support.models import SQUARE, randn
from tests.support.moe_models import TitanMoE
from tests.support.ranks import on_ranks
from tests.support.sharded import mesh_of


@on_ranks(2)
def test_sharded_experts_have_the_bits_of_one_process(world: int, device: str) -> None:
    model = TitanMoE(e=3).to(device)  # a rank has two experts, the other one
    convert(model, auto_filter_small_kn=False, skip=["gate"])
    single = copy.deepcopy(model)
    fully_shard(model.experts, mesh=mesh_of(world, device))
    fully_shard(model, mesh=mesh_of(world, device))
    assert isinstance(model.experts.w1_EFD.to_local(), FP8Shard)
    seen: list[type] = []
    model.experts.register_forward_pre_hook(lambda m, _: seen.append(type(m.w1_EFD.data)))
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, single)]
    for step in range(2):
        x = randn(30, 128, seed=step, dtype=torch.float32, device=device)
        outputs = [m(x) for m in (model, single)]
        assert torch.equal(*outputs)
        for y, optimizer in zip(outputs, optimizers, strict=True):
            y.square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert seen == [BlockwiseFP8Tensor] * 2
    for name, w in single.experts.named_parameters():
        whole = model.experts.get_parameter(name).full_tensor()
        assert torch.equal(whole, w.master)


@on_ranks(2)
def test_the_local_part_of_a_stack_on_another_mesh_is_fp8(world: int, device: str) -> None:
    values = randn(2, 128, 192, device=device)
    frozen = BlockwiseFP8Tensor.quantize(values, SQUARE)
    for stack in (BlockwiseFP8Weight(values), frozen):
        sharded = DTensor.from_local(stack, mesh_of(world, device), [Shard(0)], run_check=False)
        assert sharded.shape == (2 * world, 128, 192)
        local = sharded.to_local()
        assert type(local) is type(local[1]) is type(local.float()) is type(stack)
        assert type(local.transpose(-2, -1)) is type(stack)
