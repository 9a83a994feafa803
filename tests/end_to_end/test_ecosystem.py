"""What users do around a model: data parallelism, loss scaling, sharing, checkpoint policies."""

from __future__ import annotations

import copy
import functools
from collections import Counter
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from blocktensor import convert, freeze
from blocktensor.ops import reference
from tests.support.models import randn
from tests.support.ranks import forking, on_ranks
from tests.support.reference_ops import replace_op

K = 192


def mlp(dtype: torch.dtype = torch.bfloat16) -> nn.Sequential:
    torch.manual_seed(0)
    made = nn.Sequential(nn.Linear(K, 256, bias=False), nn.GELU(), nn.Linear(256, K)).to(dtype)
    convert(made, skip_small=False)
    return made


def values(model: nn.Module) -> list[Tensor]:
    return [x.clone() for x in model.state_dict().values()]


# Data parallelism


def batch(rank: int, step: int) -> Tensor:
    return randn(6, K, seed=100 * rank + step, dtype=torch.float32)


@on_ranks(2, gpus=())
def test_ddp_trains_as_one_process_with_the_mean_gradient(world: int, device: str) -> None:
    model = nn.parallel.DistributedDataParallel(mlp(torch.float32))
    alone = mlp(torch.float32)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.05) for m in (model, alone)]
    for step in range(3):
        model(batch(dist.get_rank(), step)).square().mean().backward()
        for rank in range(world):
            (alone(batch(rank, step)).square().mean() / world).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for ours, wanted in zip(values(model.module), values(alone), strict=True):
        first = ours.clone()
        dist.broadcast(first, 0)
        assert torch.equal(ours, first)
        torch.testing.assert_close(ours, wanted, rtol=1e-4, atol=1e-6)  # gradients summed elsewhere


# Loss scaling


def test_loss_scaling_skips_what_overflows() -> None:
    model = mlp(torch.float32)
    twin = copy.deepcopy(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, twin)]
    x = randn(5, K, dtype=torch.float32)
    scaler.scale(model(x).square().mean()).backward()
    scaler.step(optimizers[0])
    scaler.update()
    twin(x).square().mean().backward()
    optimizers[1].step()
    for a, b in zip(values(model), values(twin), strict=True):
        torch.testing.assert_close(a, b)
    before = values(model)
    optimizers[0].zero_grad()
    scaler.scale(model(x * torch.inf).sum()).backward()
    scaler.step(optimizers[0])
    scaler.update()
    assert all(torch.equal(a, b) for a, b in zip(values(model), before, strict=True))
    assert scaler.get_scale() == 2.0**9


# Other processes


def run_shared(rank: int, model: nn.Module, x: Tensor, out: Tensor) -> None:
    torch.set_num_threads(1)
    with torch.no_grad():
        out.copy_(model(x))
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.mul_(2)


@pytest.mark.parametrize("frozen", [False, True])
def test_a_model_in_shared_memory(frozen: bool) -> None:
    model = mlp()
    if frozen:
        freeze(model)
    x, out = randn(5, K), torch.zeros(5, K, dtype=torch.bfloat16).share_memory_()
    want, before = model(x).detach(), values(model)
    model.share_memory()
    forking()  # with torch imported
    mp.start_processes(run_shared, (model, x, out), nprocs=1, start_method="forkserver")
    assert torch.equal(out, want)
    bias = [name for name in model.state_dict()].index("2.bias")
    assert torch.equal(values(model)[bias], 2 * before[bias])
    if not frozen:  # written by another process, which no counter here can tell
        model[0].weight.invalidate()
        model[2].weight.invalidate()
        assert torch.equal(model(x), mlp_of(values(model))(x))


def mlp_of(state: list[Tensor]) -> nn.Sequential:
    made = mlp()
    made.load_state_dict(dict(zip(made.state_dict(), state, strict=True)))
    return made


# Checkpointing by policy


@pytest.mark.parametrize("saved", ["gemm", "quantize_both", "nothing"])
def test_selective_checkpointing_names_our_ops(saved: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, x, grad = mlp(), randn(8, K), randn(8, K, seed=3)
    kept = {getattr(torch.ops.blocktensor, saved).default} if saved != "nothing" else set()

    def policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_SAVE if op in kept else CheckpointPolicy.PREFER_RECOMPUTE

    calls = Counter[str]()

    def counted(name: str, op: Any, *args: Any) -> Any:
        calls[name] += 1
        return op(*args)

    for name in ("gemm", "quantize_both"):
        op = getattr(reference, name)
        replace_op(monkeypatch, name, functools.partial(counted, name, op))
    contexts = functools.partial(create_selective_checkpoint_contexts, policy)
    results = []
    for selective in (False, True):
        model.zero_grad()
        leaf = x.clone().requires_grad_()
        if selective:
            y = checkpoint(model, leaf, use_reentrant=False, context_fn=contexts)
        else:
            y = model(leaf)
        calls.clear()
        y.backward(grad)
        results.append([y.detach(), leaf.grad, *[p.grad.clone() for p in model.parameters()]])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    # dgrad and wgrad of two layers, two casts of gradients; the rest is made again
    again = {name: calls[name] - expected for name, expected in (("gemm", 4), ("quantize_both", 2))}
    assert again["gemm"] == (0 if saved == "gemm" else 2)
    assert again["quantize_both"] == (0 if saved == "quantize_both" else 2)
