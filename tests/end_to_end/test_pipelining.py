"""The schedules of torch.distributed.pipelining give the bits of one process."""

from __future__ import annotations

import copy
import functools
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import get_schedule_class
from torch.distributed.tensor import DTensor

from blocktensor import convert, functional, fuse, share_inputs
from tests.support.linear_ways import WAYS, run_linears
from tests.support.mlps import MLP, K
from tests.support.models import Trace
from tests.support.moe_models import TitanMoE
from tests.support.ranks import on_ranks, shared_mesh
from tests.support.steps import assert_bits

HIDDEN, VOCABULARY = 264, 300
MICROBATCHES = 4  # as many as stages: DualPipeV takes no fewer
OF_ONE_STAGE = ("GPipe", "1F1B")
OF_A_V = ("ZBVZeroBubble", "DualPipeV")
_NEEDS_LATER_TORCH = pytest.mark.skipif(
    torch.__version__ < (2, 13), reason="hangs over gloo before 2.13, with plain models too"
)
SCHEDULES = [
    "GPipe",
    "1F1B",
    "Interleaved1F1B",
    "LoopedBFS",
    "InterleavedZeroBubble",
    *(pytest.param(name, marks=_NEEDS_LATER_TORCH) for name in OF_A_V),
]
SPLIT = "InterleavedZeroBubble"

Results = tuple[list[Tensor], dict[str, Tensor | None]]
"""The loss of each microbatch, and the gradient of each parameter."""


class Begin(nn.Module):
    """An embedding, and linears with and without a bias: an FP8 product is the stage's output."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, K)
        self.up, self.down = nn.Linear(K, HIDDEN), nn.Linear(HIDDEN, K, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        y: Tensor = self.down(F.gelu(self.up(self.embedding(tokens))))
        return y


class Residual(nn.Module):
    def __init__(self, mlp: nn.Module) -> None:
        super().__init__()
        self.norm, self.mlp = nn.LayerNorm(K), mlp

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mlp(self.norm(x).flatten(0, 1)).view_as(x)


class End(nn.Module):
    """Two linears of one input, and the head that the loss multiplies with."""

    def __init__(self) -> None:
        super().__init__()
        self.mix, self.other = nn.Linear(K, K), nn.Linear(K, K, bias=False)
        self.lm_head = nn.Linear(K, VOCABULARY, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.mix(x)) + self.other(x)

    def loss(self, x: Tensor, target: Tensor) -> Tensor:
        head = self.lm_head.weight
        return functional.linear_cross_entropy(x.flatten(0, 1), head, target.flatten())


def plain() -> Any:
    torch.manual_seed(0)
    return nn.Sequential(Begin(), Residual(MLP()), Residual(TitanMoE(3, K, HIDDEN)), End())


@functools.cache
def _converted(dtype: torch.dtype, is_fused: bool = True) -> nn.Sequential:
    model = plain().to(dtype)
    assert len(convert(model, skip=["*.gate"], skip_small=False, convert_head=True).converted) == 11
    assert not is_fused or len(fuse(model).fused) == 2
    return model


def build(dtype: torch.dtype = torch.bfloat16) -> Any:
    """Return four blocks."""
    model = copy.deepcopy(_converted(dtype))
    assert any("mix" in group.linears for group in share_inputs(model).groups)
    return model


def batch(tokens: int) -> Tensor:
    """Tokens and targets, a row for each microbatch."""
    generator = torch.Generator().manual_seed(0)
    return torch.randint(VOCABULARY, (2, MICROBATCHES, tokens), generator=generator)


def results(model: nn.Module, losses: list[Tensor]) -> Results:
    grads = {name: p.grad for name, p in model.named_parameters()}
    found = {k: g.full_tensor() if isinstance(g, DTensor) else g for k, g in grads.items()}
    return [loss.detach() for loss in losses], found


@functools.cache
def _wanted(dtype: torch.dtype, tokens: int, last_first: bool) -> Results:
    model, losses = build(dtype), []
    order = slice(None, None, -1 if last_first else 1)
    for x, target in [*zip(*(t.split(1) for t in batch(tokens)), strict=True)][order]:
        losses.append(model[-1].loss(model(x), target))
        losses[-1].backward()
    return results(model, losses[order])


def wanted(name: str, tokens: int, dtype: torch.dtype = torch.bfloat16) -> Results:
    """The results of one process that adds gradients in the order of the schedule."""
    return _wanted(dtype, tokens, name == "LoopedBFS")


class Pipeline:
    """A schedule, and the stages of ``model`` that this rank runs.

    ``mesh``: dimensions ``"pipe"`` and ``"data"``, over which FSDP2 shards stages and blocks.
    """

    def __init__(
        self, name: str, model: Any, mesh: DeviceMesh | None = None, **options: Any
    ) -> None:
        self.model = model
        rank = dist.get_rank() if mesh is None else mesh["pipe"].get_local_rank()
        if name in OF_ONE_STAGE:
            stages = {rank: [2 * rank, 2 * rank + 1]}
        else:
            second = 3 - rank if name in OF_A_V else rank + 2
            stages = {rank: [rank], second: [second]}
        count = 2 * len(stages)
        self.prefixes = tuple(f"{block}." for blocks in stages.values() for block in blocks)
        self.is_first, self.is_last = 0 in stages, count - 1 in stages
        modules = [nn.Sequential(*(model[i] for i in blocks)) for blocks in stages.values()]
        if mesh is not None:
            # else zero-bubble schedules of torch lose the gradients of a block
            options_of_fsdp: Any = {"mesh": mesh["data"], "reshard_after_forward": False}
            for module in modules:
                for block in module:
                    if isinstance(block, Residual):
                        fully_shard(block, **options_of_fsdp)
                fully_shard(module, **options_of_fsdp)
        group = None if mesh is None else mesh.get_group("pipe")
        made = [
            PipelineStage(module, i, count, torch.device("cpu"), group=group)
            for i, module in zip(stages, modules, strict=True)
        ]
        given: Any = made[0] if name in OF_ONE_STAGE else made
        of_name: Any = get_schedule_class(name)
        self.schedule = of_name(given, MICROBATCHES, loss_fn=model[-1].loss, **options)

    def step(self, tokens: int) -> Results:
        x, target = batch(tokens)
        losses: list[Tensor] = []
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            self.schedule.step(
                *((x,) if self.is_first else ()),
                target=target if self.is_last else None,
                losses=losses if self.is_last else None,
            )
        return results(self.model, losses)

    def assert_same(self, found: Results, wanted: Results) -> None:
        """The same losses and gradients of the stages of this rank, bit for bit."""
        if self.is_last:
            assert_bits(found[0], wanted[0])
            assert len(found[0]) == MICROBATCHES
        names = [name for name in wanted[1] if name.startswith(self.prefixes)]
        assert_bits([found[1][name] for name in names], [wanted[1][name] for name in names])


@pytest.mark.parametrize("name", SCHEDULES)
@on_ranks(2, gpus=())
def test_a_step(world: int, device: str, name: str) -> None:
    sizes = [(torch.bfloat16, 129), (torch.float32, 129)]
    if name == SPLIT:  # no schedule knows how many tokens there are
        sizes += [(torch.bfloat16, n) for n in (1, 127, 256)]
    for dtype, tokens in sizes:
        pipeline = Pipeline(name, build(dtype), scale_grads=False)
        pipeline.assert_same(pipeline.step(tokens), wanted(name, tokens, dtype))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", ["1F1B", SPLIT])
@on_ranks(2, gpus=())
def test_gradients_above_and_below_the_size_that_is_freed_early(
    world: int, device: str, name: str, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = wanted(name, 129)
    run_linears(way, monkeypatch)
    pipeline = Pipeline(name, build(), scale_grads=False)
    pipeline.assert_same(pipeline.step(129), expected)


@pytest.mark.parametrize("name", SCHEDULES)
@on_ranks(4, gpus=())
def test_stages_that_fsdp2_shards(world: int, device: str, name: str) -> None:
    """Two ranks hold a stage and get the same tokens, so that their mean gradient is exact."""
    mesh = shared_mesh(device, 2, 2, names=("pipe", "data"))
    pipeline = Pipeline(name, build(), mesh, scale_grads=False)
    for _ in range(2):  # the first step of torch 2.13 begins with another forward
        pipeline.assert_same(pipeline.step(65), wanted(name, 65))
        pipeline.model.zero_grad()


def matmuls(run: Any, *args: Any) -> int:
    """How many matmuls run, in FP8 or in high precision, of ranks together."""
    with Trace() as trace:
        run(*args)
    names = [op.split()[0].removeprefix("aten.").removesuffix(".default") for op in trace.ops]
    return sum("gemm" in name or name in ("mm", "addmm", "_grouped_mm") for name in names)


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("is_fused", [False, True])
@on_ranks(2, gpus=())
def test_as_many_matmuls_as_without_fp8(world: int, device: str, name: str, is_fused: bool) -> None:
    model = copy.deepcopy(_converted(torch.bfloat16, is_fused))
    sharing = share_inputs(model)
    pipeline = Pipeline(name, model)
    pipeline.step(33)  # the first step of torch 2.13 begins with another forward
    found = torch.tensor(matmuls(pipeline.step, 33))
    dist.all_reduce(found)
    wanted = 3 * 12 * MICROBATCHES  # forward and two of backward, of twelve weights
    # torch 2.11 gives the half for weights a copy of the gradient: that of h is computed again
    again = 2 * MICROBATCHES if is_fused and name == SPLIT and torch.__version__ < (2, 12) else 0
    assert found == wanted + again
    assert sharing.saved >= MICROBATCHES or not pipeline.is_last
