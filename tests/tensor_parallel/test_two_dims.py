"""FSDP2 over tensor parallel: the bits of tensor parallel alone, and checkpoints between shapes."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from blocktensor.sharding.fsdp.shards import FP8Shard
from tests.support.asserts import assert_no_marked_product
from tests.support.numeric import assert_same, relative_error
from tests.support.parallel_linears import batch, block, parallel_block, tokens_of
from tests.support.ranks import on_ranks, shared_mesh
from tests.support.sharded import Wire, scale, step
from tests.support.sharded_checkpoints import assert_same_tensors, load, save, weights_of

# torch warns of every redistribution over two dimensions
logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)

ALIGNED = {"kv": 256, "hidden": 512}


def meshes(device: str, data: int = 2, tensor: int = 2) -> DeviceMesh:
    return shared_mesh(device, data, tensor, names=("data", "tensor"))


def model_on(mesh: DeviceMesh, sharded: bool = True, **options: Any) -> nn.Module:
    model = nn.Sequential(parallel_block(mesh["tensor"], **{**ALIGNED, **options}))
    for part in (*model, model) if sharded else ():
        fully_shard(part, mesh=mesh["data"])
    return model


def inputs(mesh: DeviceMesh, seed: int = 1) -> Tensor:
    return tokens_of(mesh["tensor"], batch(seed).to(mesh.device_type))


def train(
    model: nn.Module, mesh: DeviceMesh, steps: int, **options: Any
) -> tuple[list[float], torch.optim.Optimizer]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, **options)
    losses = []
    for number in range(steps):
        x = inputs(mesh, number % 2)
        loss = (model(x) - x).float().square().mean()
        loss.backward()
        step(optimizer)
        losses.append(loss.item())
    return losses, optimizer


@on_ranks(4)
def test_steps_are_those_of_tensor_parallel_alone_and_fp8_travels(device: str) -> None:
    mesh = meshes(device)
    alone, both = model_on(mesh, False), model_on(mesh)
    assert isinstance(both[0].mlp.gate.weight._local_tensor, FP8Shard)
    start = weights_of(both)
    assert_same_tensors(start, weights_of(alone))
    want, _ = train(alone, mesh, 3, foreach=True)
    got, _ = train(both, mesh, 3, foreach=True)
    assert got == want
    assert got[-1] < got[0]
    end = weights_of(both)
    assert_same_tensors(end, weights_of(alone))
    assert all((end[name] != start[name]).any() for name in end if end[name].ndim == 2)
    assert_no_marked_product(both, inputs(mesh))
    with Wire() as wire, torch.no_grad():
        both(inputs(mesh))
    sent = {t.dtype for t in wire.gathered if t.numel() > 4096}
    assert sent <= {torch.uint8, torch.float8_e4m3fn}


@on_ranks(4)
def test_gradients_are_clipped(device: str) -> None:
    mesh = meshes(device)
    norms = []
    for sharded in (False, True):
        model = model_on(mesh, sharded)
        model(inputs(mesh)).float().square().sum().backward()
        # by foreach, torch 2.11 leaves gradients as they are that wait for a sum over ranks: those
        # of norms under torch's SequenceParallel alone
        foreach = None if sharded or torch.__version__ >= (2, 13) else False
        norm: Any = nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=foreach)
        norms.append(norm.full_tensor())
        after: Any = nn.utils.get_total_norm([p.grad for p in model.parameters()])
        assert abs(float(after.full_tensor()) - 1) < 0.02
    assert relative_error(norms[1], norms[0]) < 1e-2


@on_ranks(4)
def test_mixed_precision(device: str) -> None:
    mesh = meshes(device)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model = model_on(mesh, False, dtype=torch.float32)
    for part in model:
        fully_shard(part, mesh=mesh["data"], mp_policy=policy)
    losses, _ = train(model, mesh, 3, fused=True)
    assert losses[-1] < losses[0]


@on_ranks(4)
def test_checkpoints_between_shapes(device: str, tmp_path: Path) -> None:
    mesh = meshes(device)
    model = model_on(mesh)
    save(model, train(model, mesh, 2)[1], tmp_path)
    saved = weights_of(model)
    want = model(inputs(mesh, 7))

    def loaded(mesh: DeviceMesh, sharded: bool = True) -> nn.Module:
        other = model_on(mesh, sharded)
        scale(0, *other.parameters())
        group = mesh["tensor"] if mesh.size() < 4 else None
        load(other, torch.optim.AdamW(other.parameters(), lr=1e-2), tmp_path, group)
        return other

    assert_same_tensors(weights_of(loaded(meshes(device, 4, 1))), saved)
    assert_same(loaded(mesh)(inputs(mesh, 7)), want)
    whole = nn.Sequential(block(**ALIGNED)).to(device)
    state = whole.state_dict()
    dcp.load({"model": state}, checkpoint_id=tmp_path, no_dist=True)
    whole.load_state_dict(state)
    assert_same_tensors(weights_of(whole), saved)
    small = DeviceMesh(device, [[0, 1]], mesh_dim_names=("data", "tensor"))
    if dist.get_rank() < 2:
        two = loaded(small, False)
        assert_same_tensors(weights_of(two), saved)
        assert_same(two(inputs(small, 7)), want)
    dist.barrier()


@on_ranks(4)
def test_parts_off_the_grid_are_refused(device: str) -> None:
    mesh = meshes(device)
    with pytest.raises(NotImplementedError, match=r"a tensor parallel FP8 weight .* 64 outputs"):
        model_on(mesh, kv=128)(inputs(mesh))
