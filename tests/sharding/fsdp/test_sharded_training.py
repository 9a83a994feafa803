"""However a model is sharded and run, it trains as in one process, bit for bit."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard
from torch.torch_version import TorchVersion
from torch.utils.checkpoint import checkpoint

from blocktensor import Recipe, Scales, convert, share_inputs, to_blockwise_fp8_weights
from blocktensor.ops import reference
from blocktensor.ops.formats import BLOCKS_128X128
from blocktensor.sharding.fsdp.shards import FP8Shard
from tests.support.compiling import Traced
from tests.support.models import HeadGroups, randn
from tests.support.ranks import on_ranks, shared_mesh
from tests.support.sharded import (
    RECIPES,
    K,
    assert_equal,
    assert_same_cast,
    assert_trains_as,
    batch,
    deep,
    gradients,
    loss_of,
    places_of,
    reductions,
    scale,
    shard,
    shard_of,
    twins,
)


def prefetching(model: nn.Module, mesh: DeviceMesh) -> None:
    shard(model, mesh)
    model.set_modules_to_forward_prefetch([model.up, model.down])
    model.down.set_modules_to_backward_prefetch([model.up])


def gathered_early(model: nn.Module, mesh: DeviceMesh) -> None:
    """Gather each weight before the first forward knows the others; they join one table later."""
    shard(model, mesh)
    for part in (model.up, model.down, model):
        part.unshard()
        part.reshard()
    assert reductions(model) == 3


def compiled(model: nn.Module, mesh: DeviceMesh, before: bool) -> None:
    torch.use_deterministic_algorithms(False)
    backend = "aot_eager" if mesh.device_type == "cpu" else "inductor"
    # From torch 2.14 on, FSDP2's own hooks break the graph of a module that is compiled in place.
    fullgraph = TorchVersion(torch.__version__) < (2, 14)
    for module in (model.up, model.down):
        module.__class__ = Traced
    for name in ("up", "down") if before else ():
        setattr(model, name, torch.compile(getattr(model, name), fullgraph=True, backend=backend))
    shard(model, mesh)
    for module in () if before else (model.up, model.down):
        module.compile(fullgraph=fullgraph, backend=backend)


def evaluated(m: nn.Module, x: Tensor) -> Tensor:
    with torch.no_grad():
        before = loss_of(m, x)
    loss = loss_of(m, x)
    assert torch.equal(before, loss.detach())
    return loss


def recomputed(m: nn.Module, x: Tensor) -> Tensor:
    return checkpoint(loss_of, m, x, use_reentrant=False)


def on_columns(p: Tensor) -> Shard | None:
    return Shard(1) if p.ndim == 2 and p.shape[1] % 2 == 0 else None


class Way(NamedTuple):
    """How a model of ``options`` is sharded, what is passed to ``assert_trains_as``."""

    recipe: Recipe = Recipe()
    options: dict[str, Any] | None = None
    shard: Callable[[nn.Module, DeviceMesh], Any] = shard
    steps: dict[str, Any] | None = None
    reductions: int | None = None


ROUNDED = {"exact_gradients": False}
WAYS = {
    "fused AdamW": Way(steps={"fused": True}),
    "AdamW over lists": Way(steps={"foreach": True, "steps": 6}, reductions=6),
    "powers of two": Way(Recipe(scale="power_of_two")),
    "weights in powers of two": Way(Recipe(scale=Scales(weights="power_of_two"))),
    "wgrad from 1x128": Way(Recipe.deepseek()),
    "wgrad from high precision": Way(Recipe(wgrad_input="high_precision")),
    "tied weights": Way(options={"tied": True}, steps=ROUNDED),
    "gathered until backward": Way(shard=partial(shard, reshard_after_forward=False)),
    "all weights in one group": Way(shard=partial(shard, by_layer=False)),
    "by columns": Way(shard=partial(shard, shard_placement_fn=on_columns)),
    "replicated": Way(shard=lambda model, mesh: replicate(model, mesh=mesh)),
    "gathered before the first forward": Way(shard=gathered_early, reductions=3),
    "microbatches": Way(steps={"microbatches": 3, **ROUNDED}, reductions=9),
    "prefetching": Way(shard=prefetching),
    "evaluation between steps": Way(steps={"run": evaluated}, reductions=6),
    "activation checkpointing": Way(steps={"run": recomputed}),
    "compiled, then sharded": Way(shard=partial(compiled, before=True)),
    "sharded, then compiled": Way(shard=partial(compiled, before=False)),
}


@pytest.mark.parametrize("way", WAYS)
@on_ranks(2)
def test_a_way_to_shard_and_run(mesh: DeviceMesh, device: str, way: str) -> None:
    recipe, options, sharded, steps, wanted = WAYS[way]
    model, single = twins(device, recipe, **(options or {}))
    sharded(model, mesh)
    assert_trains_as(single, model, device, **(steps or {}))
    (table,) = {place.table for place in places_of(model)}
    before = table.reductions
    assert wanted in (None, before)
    assert torch.equal(*[loss_of(m, batch(9, device)).detach() for m in (model, single)])
    assert table.reductions == before + 1


@on_ranks(4)
def test_four_ranks(mesh: DeviceMesh, device: str) -> None:
    for over in (mesh, shared_mesh(device, 2, 2, names=("replicate", "shard"))):
        model, single = twins(device)
        shard(model, over)
        assert_trains_as(single, model, device, steps=6, foreach=True)
        assert reductions(model) == 6


@on_ranks(2)
def test_weights_of_different_recipes(mesh: DeviceMesh, device: str) -> None:
    """Their scales lie in one table, by recipe, and not in the order of layers."""
    model = deep(4).to(device)
    for layer, module in enumerate(model):
        to_blockwise_fp8_weights(module, RECIPES[layer % 2])
    single = copy.deepcopy(model)
    for part in (*model, model):
        fully_shard(part, mesh=mesh)
    x = randn(4, 512, device=device)
    for m in (model, single):
        m(x).float().square().mean().backward()
    assert torch.equal(model(x), single(x))
    assert_equal(gradients(model), gradients(single))
    assert reductions(model) == 2


@on_ranks(2)
def test_shards_that_rest_on_the_cpu(mesh: DeviceMesh, device: str) -> None:
    model, single = twins(device)
    shard(model, mesh, offload_policy=CPUOffloadPolicy(pin_memory=False))
    if device == "cpu":
        assert_trains_as(single, model, device)
    else:
        for number in range(2):
            assert torch.equal(*[loss_of(m, batch(number, device)) for m in (model, single)])


@on_ranks(2)
def test_masters_in_fp32_are_cast_as_under_autocast(mesh: DeviceMesh, device: str) -> None:
    model, single = twins(device, dtype=torch.float32)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    shard(model, mesh, mp_policy=policy)
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
    assert all(grad.dtype == torch.float32 for grad in gradients(model))


@pytest.mark.usefixtures("group")
def test_mixed_precision_rounds_biases() -> None:
    """As FSDP2 rounds all parameters that are not FP8: autocast adds them in fp32."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(128, 128))
    convert(model, skip_small=False)
    single, rounded = copy.deepcopy(model), copy.deepcopy(model)
    rounded[0].bias.data = model[0].bias.data.bfloat16().float()
    fully_shard(model, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    x = randn(20, 128, dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        exact, want = single(x), rounded(x)
    assert torch.equal(model(x), want) and not torch.equal(exact, want)


@on_ranks(2, gpus=())
def test_a_model_that_was_in_float64(mesh: DeviceMesh, device: str) -> None:
    """Its shards stay shards: the weights are in FP8 again when it is back."""
    model, single = twins(device, dtype=torch.float32)
    shard(model, mesh)
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
    assert all(p.dtype == torch.float32 for p in model.parameters())
    assert_equal(gradients(model), gradients(single))


class Two(nn.Module):
    """Two linears under one root, side by side or one after the other; a forward may run one."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.maker = nn.Linear(K, K, bias=False)
        self.critic = nn.Linear(K, K, bias=False)

    def forward(self, x: Tensor, which: str = "both") -> Tensor:
        if which == "product":
            return self.maker(x) * self.critic(x)
        if which != "critic":
            x = self.maker(x)
        return x if which == "maker" else self.critic(x)


def two(device: str) -> tuple[Two, Two]:
    model = Two().to(device, torch.bfloat16)
    convert(model, skip_small=False)
    return model, copy.deepcopy(model)


@on_ranks(2)
def test_linears_that_share_their_input(mesh: DeviceMesh, device: str) -> None:
    def run(m: nn.Module, x: Tensor) -> Tensor:
        return m(x, "product").float().square().mean()

    model, single = two(device)
    fully_shard(model, mesh=mesh)
    report = share_inputs(model)
    assert_trains_as(single, model, device, run=run)
    assert (report.casts, report.saved) == (3, 3)


@on_ranks(2)
def test_parts_that_are_run_and_trained_in_turns(mesh: DeviceMesh, device: str) -> None:
    """One part steps while the graph of the other waits for its backward."""
    model, single = two(device)
    for part in (model.maker, model.critic, model):
        fully_shard(part, mesh=mesh)
    results: list[list[Tensor]] = []
    for m in (single, model):
        results.append([])
        steps = [torch.optim.SGD(part.parameters(), lr=8.0) for part in (m.maker, m.critic)]
        m(batch(0, device))  # of the root, as FSDP2 asks
        for number in range(3):
            leaf = batch(number, device).requires_grad_()  # so that backward reads the weight
            waiting = m(leaf, "critic").float().square().mean()
            made = m(batch(number, device), "maker").float().square().mean()
            made.backward()
            steps[0].step()
            again = m(batch(number, device), "maker")
            waiting.backward()
            steps[1].step()
            alone = m.maker(batch(number, device))  # without the root
            results[-1] += [waiting, made, again, alone, leaf.grad]
            for optimizer in steps:
                optimizer.zero_grad()
    assert_equal(*results)


class Rows(nn.Linear):
    """Reads some rows of its weight."""

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight[:128])


@on_ranks(2, gpus=())
def test_a_change_behind_a_part_of_a_weight(mesh: DeviceMesh) -> None:
    for last in (HeadGroups(2, 128, K), Rows(2 * K, 256, bias=False)):
        model = nn.Sequential(nn.Linear(K, 2 * K), last).bfloat16()
        convert(model, skip_small=False)
        for module in (*model, model):
            fully_shard(module, mesh=mesh)
        loss = loss_of(model, batch(0, "cpu"))
        scale(2, last.weight)
        with pytest.raises(RuntimeError, match="FSDP2 gathers was changed or moved on this rank"):
            loss.backward()


@on_ranks(2)
@pytest.mark.parametrize("frozen", [False, True])
def test_a_weight_viewed_as_a_stack(frozen: bool, mesh: DeviceMesh, device: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(K, 2 * K), HeadGroups(2, 128, K)).bfloat16().to(device)
    model[1].requires_grad_(not frozen)
    convert(model, skip_small=False)
    single = copy.deepcopy(model)
    for module in (*model, model):
        fully_shard(module, mesh=mesh)
    assert_trains_as(single, model, device)
