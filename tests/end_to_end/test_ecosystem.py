"""Common tools around a model: data parallelism, loss scaling, sharing, checkpoints."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.multiprocessing.reductions import reduce_tensor
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from blocktensor import convert, freeze
from blocktensor.ops import reference
from tests.support.backends import replace_op
from tests.support.models import plain, randn
from tests.support.ranks import forking, on_ranks
from tests.support.steps import assert_bits, step

K = 192


def mlp(dtype: torch.dtype = torch.bfloat16) -> nn.Sequential:
    torch.manual_seed(0)
    made = nn.Sequential(nn.Linear(K, 256, bias=False), nn.GELU(), nn.Linear(256, K)).to(dtype)
    convert(made, skip_small=False)
    return made


def values(model: nn.Module) -> list[Tensor]:
    return [x.clone() for x in model.state_dict().values()]


def batch(rank: int, number: int) -> Tensor:
    return randn(6, K, seed=100 * rank + number, dtype=torch.float32)


@on_ranks(2, gpus=())
def test_ddp_trains_as_one_process_with_the_mean_gradient(world: int, device: str) -> None:
    model = nn.parallel.DistributedDataParallel(mlp(torch.float32))
    alone = mlp(torch.float32)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.05) for m in (model, alone)]
    for number in range(3):
        model(batch(dist.get_rank(), number)).square().mean().backward()
        for rank in range(world):
            (alone(batch(rank, number)).square().mean() / world).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for ours, wanted in zip(values(model.module), values(alone), strict=True):
        first = ours.clone()
        dist.broadcast(first, 0)
        assert torch.equal(ours, first)
        torch.testing.assert_close(ours, wanted, rtol=1e-4, atol=1e-6)  # gradients summed elsewhere


def test_loss_scaling_skips_what_overflows() -> None:
    model, twin = mlp(torch.float32), mlp(torch.float32)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    optimizer, of_twin = (torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, twin))
    x = randn(5, K, dtype=torch.float32)

    def scaled_step(loss: Tensor) -> list[Tensor]:
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        return values(model)

    before = scaled_step(model(x).square().mean())
    twin(x).square().mean().backward()
    of_twin.step()
    torch.testing.assert_close(before, values(twin))
    after = scaled_step(model(x * torch.inf).sum())
    assert all(map(torch.equal, after, before))
    assert scaler.get_scale() == 2.0**9


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
    want, bias = model(x).detach(), model[2].bias.detach().clone()
    assert not any(p.is_shared() for p in model.parameters())
    model.share_memory()
    assert all(p.is_shared() for p in model.parameters())
    forking()  # with torch imported
    mp.start_processes(run_shared, (model, x, out), nprocs=1, start_method="forkserver")
    assert torch.equal(out, want)
    assert torch.equal(model[2].bias, 2 * bias)
    if not frozen:  # written by another process, which no counter here can tell
        again = mlp()
        again.load_state_dict(model.state_dict())
        assert torch.equal(model(x), again(x))


@pytest.mark.parametrize("of", [lambda w: w, lambda w: w.data, lambda w: w.detach()[128:].t()])
def test_a_handle_of_a_weight_opens_its_master(of: Callable[[Tensor], Tensor]) -> None:
    """Trainers send weights so to a rollout engine on the same GPU (CUDA IPC)."""
    weight = mlp()[0].weight
    sent = of(weight)
    rebuild, handle = reduce_tensor(sent)
    opened = rebuild(*handle)
    assert type(opened) is Tensor
    assert torch.equal(opened, plain(sent))
    with torch.no_grad():
        weight.mul_(2)
    assert torch.equal(opened, plain(of(weight)))


def test_a_handle_of_a_frozen_weight_is_refused() -> None:
    model = mlp()
    freeze(model)
    with pytest.raises(NotImplementedError, match=r"^reduce_tensor of a .* \.dequantize\(\)$"):
        reduce_tensor(model[0].weight)


@pytest.mark.parametrize("saved", ["gemm", "quantize_both", "nothing"])
def test_selective_checkpointing_names_our_ops(saved: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = mlp(), randn(8, K)
    kept = {getattr(torch.ops.blocktensor, saved).default} if saved != "nothing" else set()

    def policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_SAVE if op in kept else CheckpointPolicy.PREFER_RECOMPUTE

    calls = Counter[str]()

    def counted(name: str, op: Any, *args: Any) -> Any:
        calls[name] += 1
        return op(*args)

    for name in ("gemm", "quantize_both"):
        replace_op(monkeypatch, name, functools.partial(counted, name, getattr(reference, name)))
    contexts = functools.partial(create_selective_checkpoint_contexts, policy)

    def selective(x: Tensor) -> Tensor:
        made: Tensor = checkpoint(model, x, use_reentrant=False, context_fn=contexts)
        return made

    wanted = step(model, x)
    in_plain = Counter(calls)
    calls.clear()
    assert_bits(step(selective, x, of=[model]), wanted)
    again = {name: calls[name] - in_plain[name] for name in in_plain}
    # of two layers; what is not saved is made again
    assert again == {name: 2 * (name != saved) for name in ("gemm", "quantize_both")}
