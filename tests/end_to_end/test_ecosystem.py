"""What users do around a model: data parallelism, loss scaling, sharing, checkpoint policies."""

from __future__ import annotations

import copy
import functools
from collections import Counter
from pathlib import Path
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
from tests.support.reference_ops import replace_op

K = 192
WORLD = 2
STEPS = 3


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


def train_with_ddp(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    rendezvous = f"file://{folder}/rendezvous"
    dist.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=WORLD)
    model = nn.parallel.DistributedDataParallel(mlp(torch.float32))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for step in range(STEPS):
        optimizer.zero_grad()
        model(batch(rank, step)).square().mean().backward()
        optimizer.step()
    torch.save(values(model.module), Path(folder, f"{rank}.pt"))
    dist.destroy_process_group()


def test_ddp_trains_as_one_process_with_the_mean_gradient(tmp_path: Path) -> None:
    mp.spawn(train_with_ddp, (str(tmp_path),), nprocs=WORLD)
    model = mlp(torch.float32)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for step in range(STEPS):
        optimizer.zero_grad()
        for rank in range(WORLD):
            (model(batch(rank, step)).square().mean() / WORLD).backward()
        optimizer.step()
    trained = [torch.load(tmp_path / f"{rank}.pt") for rank in range(WORLD)]
    for ours, theirs, alone in zip(*trained, values(model), strict=True):
        assert torch.equal(ours, theirs)
        torch.testing.assert_close(ours, alone, rtol=1e-4, atol=1e-6)  # gradients summed elsewhere


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
    mp.spawn(run_shared, (model, x, out), nprocs=1)
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
