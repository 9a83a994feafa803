"""Bytes, collectives and memory of a training step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint

from blocktensor import BlockwiseFP8Tensor, convert
from tests.support.models import randn
from tests.support.ranks import on_ranks
from tests.support.sharded import Wire, deep, nbytes, step
from tests.support.sharded_layers import batch, body, evaluate, twins


def third_step(model: nn.Module, run: Callable[[nn.Module], Any]) -> Wire:
    """What it sends."""
    for _ in range(3):
        with Wire() as wire:
            run(model)
            for p in model.parameters():
                assert p.grad is not None
                with torch.no_grad():
                    p.sub_(p.grad)
                p.grad = None
    return wire


def train(model: Any) -> None:
    model(batch(0)).sum().backward()


def microbatches(model: Any) -> None:
    for number in range(3):
        model.set_requires_gradient_sync(number == 2)
        model(batch(number)).sum().backward()


def recomputed(model: Any) -> None:
    checkpoint(model, batch(0), use_reentrant=False).sum().backward()


def evaluated(model: Any) -> None:
    evaluate(model)
    train(model)


def early(model: Any) -> None:
    model.unshard(async_op=True)
    train(model)


def prefetching(model: Any) -> None:
    model.set_modules_to_forward_prefetch([model[0], model[1]])
    model[1].set_modules_to_backward_prefetch([model[0]])
    train(model)


@pytest.mark.parametrize(
    ("run", "options", "more"),
    [
        (train, {}, 1),
        (train, {"reshard_after_forward": False}, 1),
        (prefetching, {}, 1),
        (microbatches, {}, 3),
        (evaluated, {}, 2),
        (early, {}, 2),
        (recomputed, {}, 2),
    ],
)
@on_ranks(2, gpus=())
def test_what_a_step_sends(
    mesh: DeviceMesh, run: Callable[..., Any], options: dict[str, Any], more: int
) -> None:
    """As many collectives as a plain model, and the reductions of amaxes."""
    model, _ = twins(mesh, **options)
    plain = body()
    for layer in plain[:2]:
        fully_shard(layer, mesh=mesh, **options)
    fully_shard(plain, mesh=mesh)
    found, was = third_step(model, run), third_step(plain, run)
    assert len(found.gathered) == len(was.gathered)
    assert len(found.scattered) == len(was.scattered)
    assert len(found.reduced) == len(was.reduced) + more


@on_ranks(2, gpus=())
def test_half_the_bytes_and_one_small_reduction_a_step(mesh: DeviceMesh) -> None:
    plain, fp8 = deep(3), deep(3)
    convert(fp8, skip_small=False)
    steps: list[Wire] = []
    for model in (plain, fp8):
        for module in (*model, model):
            fully_shard(module, mesh=mesh)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for number in range(3):
            with Wire() as wire:
                model(randn(4, 512, seed=number)).float().sum().backward()
                step(optimizer)
            steps.append(wire)
    for was, found in zip(steps[:3], steps[3:], strict=True):
        assert {x.dtype for x in was.gathered} == {torch.bfloat16} and not was.reduced
        assert [x.dtype for x in found.gathered] == [torch.uint8] * len(was.gathered)
        assert [x.nbytes for x in found.reduced] == [3 * 16 * 4]  # 3 weights of 4 x 4 blocks
        assert nbytes(found.gathered) == nbytes(was.gathered) / 2


@on_ranks(2)
def test_a_byte_a_parameter_is_held_and_memory_does_not_grow(mesh: DeviceMesh, device: str) -> None:
    model = deep(4).to(device)
    convert(model, skip_small=False)
    for module in model:
        fully_shard(module, mesh=mesh, reshard_after_forward=False)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    held = []
    for number in range(200 if device == "cuda" else 5):
        loss = model(randn(64, 512, seed=number, device=device)).float().square().mean()
        for module in model:  # in forward, and here until backward is done with it
            weight = module.weight
            assert isinstance(weight, BlockwiseFP8Tensor) and weight.columnwise_data is None
            data, scale, _ = weight.rowwise()
            assert data.nbytes + scale.nbytes <= 1.01 * weight.numel()
        loss.backward()
        step(optimizer)
        held.append(torch.cuda.memory_allocated() if device == "cuda" else 0)
    assert max(held[3:]) == held[3]
