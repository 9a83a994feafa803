"""However a model is sharded and run, it trains as in one process, bit for bit."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from torch.distributed.tensor import Shard
from torch.torch_version import TorchVersion
from torch.utils.checkpoint import checkpoint

from blocktensor import Recipe, convert, share_inputs, to_blockwise_fp8_weights
from blocktensor.distributed import FP8Shard
from blocktensor.distributed.fsdp.amax_table import known_place
from blocktensor.distributed.fsdp.fsdp_internals import owner_of
from blocktensor.distributed.fsdp.shards import shard_of
from tests.support.ranks import on_ranks, shared_mesh
from tests.support.sharded import (
    RECIPES,
    K,
    assert_trains_as,
    batch,
    deep,
    loss_of,
    mesh_of,
    reductions,
    shard,
    twins,
)

# Optimizers and weights


@on_ranks(2, 4)
def test_twenty_steps(world: int, device: str) -> None:
    model, single = twins(device)
    shard(model, mesh_of(world, device))
    assert_trains_as(single, model, device, steps=20, foreach=True)
    assert reductions(model) == 20


@on_ranks(2)
def test_fused_adamw(world: int, device: str) -> None:
    model, single = twins(device)
    shard(model, mesh_of(world, device))
    assert_trains_as(single, model, device, fused=True)


@on_ranks(2)
def test_scales_of_powers_of_two_and_a_kept_columnwise_form(world: int, device: str) -> None:
    model, single = twins(device, Recipe(scale="power_of_two", columnwise="keep"))
    shard(model, mesh_of(world, device))
    assert_trains_as(single, model, device)


@on_ranks(2)
@pytest.mark.parametrize("wgrad_input", ["128x128", "high_precision"])
def test_what_weight_gradients_read(world: int, device: str, wgrad_input: Any) -> None:
    model, single = twins(device, Recipe(wgrad_input=wgrad_input))
    shard(model, mesh_of(world, device))
    usual, _ = twins(device)
    assert_trains_as(single, model, device)
    gradients = []
    for m in (twins(device, Recipe(wgrad_input=wgrad_input))[1], usual):
        loss_of(m, batch(0, device)).backward()
        gradients.append(m.mid.weight.grad)
    assert not torch.equal(*gradients)


@on_ranks(2)
def test_weights_of_different_recipes(world: int, device: str) -> None:
    """Their scales lie in one table, by recipe, and not in the order of layers."""
    model = deep(4).to(device)
    for layer, module in enumerate(model):
        to_blockwise_fp8_weights(module, RECIPES[layer % 2])
    single = copy.deepcopy(model)
    for part in (*model, model):
        fully_shard(part, mesh=mesh_of(world, device))
    x = torch.randn(4, 512, generator=torch.Generator().manual_seed(0)).to(device, torch.bfloat16)
    for m in (model, single):
        m(x).float().square().mean().backward()
    assert torch.equal(*[m(x).detach() for m in (model, single)])
    for p, q in zip(model.parameters(), single.parameters(), strict=True):
        assert torch.equal(p.grad.full_tensor(), q.grad)
    assert reductions(model) == 2


@on_ranks(2)
def test_tied_weights(world: int, device: str) -> None:
    model, single = twins(device, tied=True)
    shard(model, mesh_of(world, device))
    assert_trains_as(single, model, device, exact_gradients=False)


# How it is sharded


@on_ranks(2)
def test_weights_that_stay_gathered_until_backward(world: int, device: str) -> None:
    model, single = twins(device)
    shard(model, mesh_of(world, device), reshard_after_forward=False)
    assert_trains_as(single, model, device)


@on_ranks(2)
def test_all_weights_in_one_group(world: int, device: str) -> None:
    model, single = twins(device)
    shard(model, mesh_of(world, device), by_layer=False)
    assert_trains_as(single, model, device)


@on_ranks(2)
def test_shards_that_rest_on_the_cpu(world: int, device: str) -> None:
    model, single = twins(device)
    policy = CPUOffloadPolicy(pin_memory=False)
    shard(model, mesh_of(world, device), offload_policy=policy)
    if device == "cpu":
        assert_trains_as(single, model, device)
    else:
        for step in range(2):
            assert torch.equal(*[loss_of(m, batch(step, device)).detach() for m in (model, single)])


@on_ranks(2)
def test_sharded_by_columns(world: int, device: str) -> None:
    def place(p: Tensor) -> Shard | None:
        return Shard(1) if p.ndim == 2 and p.shape[1] % world == 0 else None

    model, single = twins(device)
    shard(model, mesh_of(world, device), shard_placement_fn=place)
    assert_trains_as(single, model, device)


@on_ranks(4)
def test_sharded_over_half_the_ranks_and_replicated(world: int, device: str) -> None:
    model, single = twins(device)
    mesh = shared_mesh(device, 2, world // 2, names=("replicate", "shard"))
    shard(model, mesh)
    assert_trains_as(single, model, device)


@on_ranks(2)
def test_replicated_and_not_sharded(world: int, device: str) -> None:
    model, single = twins(device)
    replicate(model, mesh=mesh_of(world, device))
    assert_trains_as(single, model, device)


# How it is run


@on_ranks(2)
def test_microbatches(world: int, device: str) -> None:
    model, single = twins(device)
    shard(model, mesh_of(world, device))
    assert_trains_as(single, model, device, microbatches=3, exact_gradients=False)
    assert reductions(model) == 9


@on_ranks(2)
def test_microbatches_that_reuse_the_amaxes(world: int, device: str) -> None:
    model, single = twins(device, Recipe(cache_weight="step"))
    shard(model, mesh_of(world, device))
    assert_trains_as(single, model, device, microbatches=3, exact_gradients=False)
    assert reductions(model) == 3


@on_ranks(2)
def test_prefetching(world: int, device: str) -> None:
    model, single = twins(device)
    shard(model, mesh_of(world, device))
    model.set_modules_to_forward_prefetch([model.up, model.down])
    model.down.set_modules_to_backward_prefetch([model.up])
    assert_trains_as(single, model, device)


@on_ranks(2)
def test_evaluation_between_steps(world: int, device: str) -> None:
    def run(m: nn.Module, x: Tensor) -> Tensor:
        with torch.no_grad():
            before = loss_of(m, x)
        loss = loss_of(m, x)
        assert torch.equal(before, loss.detach())
        return loss

    model, single = twins(device)
    shard(model, mesh_of(world, device))
    assert_trains_as(single, model, device, run=run)
    assert reductions(model) == 6


@on_ranks(2)
def test_activation_checkpointing(world: int, device: str) -> None:
    def run(m: nn.Module, x: Tensor) -> Tensor:
        made: Tensor = checkpoint(loss_of, m, x, use_reentrant=False)
        return made

    model, single = twins(device)
    shard(model, mesh_of(world, device))
    assert_trains_as(single, model, device, run=run)


class Siblings(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.gate, self.up = (nn.Linear(K, 130, bias=False) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.gate(x) * self.up(x)
        return made


@on_ranks(2)
def test_linears_that_share_their_input(world: int, device: str) -> None:
    model = Siblings().to(device, torch.bfloat16)
    convert(model, auto_filter_small_kn=False)
    single = copy.deepcopy(model)
    fully_shard(model, mesh=mesh_of(world, device))
    report = share_inputs(model)
    assert_trains_as(single, model, device)
    assert (report.casts, report.saved) == (3, 3)


@on_ranks(2)
def test_blocks_that_are_compiled_before_they_are_sharded(world: int, device: str) -> None:
    torch.use_deterministic_algorithms(False)
    model, single = twins(device)
    backend = "aot_eager" if device == "cpu" else "inductor"
    for name in ("up", "down"):
        module = torch.compile(getattr(model, name), fullgraph=True, backend=backend)
        setattr(model, name, module)
    shard(model, mesh_of(world, device))
    assert_trains_as(single, model, device)


@on_ranks(2)
def test_blocks_that_are_compiled_after_they_are_sharded(world: int, device: str) -> None:
    torch.use_deterministic_algorithms(False)
    model, single = twins(device)
    shard(model, mesh_of(world, device))
    # From torch 2.14 on, FSDP2's own hooks break the graph of a module that is compiled in place.
    whole = TorchVersion(torch.__version__) < (2, 14)
    for module in (model.up, model.down):
        module.compile(fullgraph=whole, backend="aot_eager" if device == "cpu" else "inductor")
    assert_trains_as(single, model, device)


class Adversaries(nn.Module):
    """Two linears under one root, of which a forward runs one or both."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.maker = nn.Linear(K, K, bias=False)
        self.critic = nn.Linear(K, 130, bias=False)

    def forward(self, x: Tensor, which: str = "both") -> Tensor:
        if which != "critic":
            x = self.maker(x)
        made: Tensor = x if which == "maker" else self.critic(x)
        return made


@on_ranks(2)
def test_parts_that_are_run_and_trained_in_turns(world: int, device: str) -> None:
    """One part steps while the graph of the other waits for its backward."""
    model = Adversaries().to(device, torch.bfloat16)
    convert(model, auto_filter_small_kn=False)
    single = copy.deepcopy(model)
    for part in (model.maker, model.critic, model):
        fully_shard(part, mesh=mesh_of(world, device))
    results = []
    for m in (single, model):
        results.append([])
        steps = [torch.optim.SGD(part.parameters(), lr=8.0) for part in (m.maker, m.critic)]
        m(batch(0, device))  # of the root, as FSDP2 asks
        for step in range(3):
            leaf = batch(step, device).requires_grad_()  # so that backward reads the weight
            waiting = m(leaf, "critic").float().square().mean()
            made = m(batch(step, device), "maker").float().square().mean()
            made.backward()
            steps[0].step()
            again = m(batch(step, device), "maker")
            waiting.backward()
            steps[1].step()
            alone = m.maker(batch(step, device))  # without the root
            outputs = [waiting, made, again, alone]
            results[-1] += [*(output.detach() for output in outputs), leaf.grad]
            for optimizer in steps:
                optimizer.zero_grad()
    for ours, theirs in zip(*results, strict=True):
        assert torch.equal(ours, theirs)


@on_ranks(2, gpus=())
def test_weights_gathered_before_the_first_forward_join_the_others(world: int, device: str) -> None:
    model, single = twins(device)
    shard(model, mesh_of(world, device))
    for part in (model.up, model.down, model):
        part.unshard()
        part.reshard()
    before = reductions(model)
    assert_trains_as(single, model, device)
    places = [known_place(owner_of(shard_of(m.weight))) for m in (model.up, model.mid, model.down)]
    assert len({id(place.table) for place in places}) == 1
    assert (before, reductions(model)) == (3, 3)  # one each, and one a step of them all


@on_ranks(2, gpus=())
def test_a_model_that_was_in_float64(world: int, device: str) -> None:
    """Its shards stay shards: the weights are in FP8 again when it is back."""
    model, single = twins(device, dtype=torch.float32)
    shard(model, mesh_of(world, device))
    x = batch(0, device, torch.float32)
    for each in (model, single):
        loss_of(each, x).backward()
    model.double()
    with pytest.raises(TypeError, match=r"FP8 weight 'mid\.weight' has dtype torch\.float64"):
        model(x.double())
    model.float()
    assert isinstance(shard_of(model.up.weight), FP8Shard)
    for each in (model, single):
        loss_of(each, x).backward()
    for name, weight in single.named_parameters():
        got = model.get_parameter(name)
        assert got.dtype == torch.float32
        assert torch.equal(got.grad.full_tensor(), weight.grad), name


def test_which_tensors_are_shards_with_the_same_rows() -> None:
    master = torch.ones(3, 192)
    rows = FP8Shard(master, Recipe())
    for same in (rows.detach(), torch.ops.aten.alias(rows)):
        assert type(same) is FP8Shard
        assert same.master is master
    copies = (rows.clone(), torch.empty_like(rows), rows.new_zeros(3, 192), rows.bfloat16())
    for other in (*copies, rows[:2]):
        assert type(other) is FP8Shard
        assert other.master is not master
