"""Captured by hand on a GPU: ``make_graphed_callables`` of modules, and whole training steps."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from blocktensor import Recipe, convert, freeze, fuse
from tests.support import fused_experts
from tests.support.groups import ends
from tests.support.mlps import K
from tests.support.models import POWER_OF_TWO, randn
from tests.support.norms import blocks
from tests.support.steps import assert_bits, step

pytestmark = [
    pytest.mark.gpu,
    # make_graphed_callables keeps the autograd graph of its warm-up, of any module
    pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream does not match"),
]

ROWS = 260
WARM_UPS = 3


def dense(recipe: Recipe = POWER_OF_TWO, fused: bool = False) -> nn.Module:
    """Two blocks of norms, attention's linear layers and an MLP."""
    model = blocks(recipe=recipe).cuda()
    if fused:
        fuse(model)
    return model


def adapted() -> nn.Module:
    """A frozen FP8 layer after one that trains."""
    layers = [nn.Linear(K, 2 * K), nn.Linear(2 * K, K)]
    model = nn.Sequential(*layers).to("cuda", torch.bfloat16)
    convert(model, skip_small=False)
    freeze(model[1])
    return model


MODELS: dict[str, Callable[[], nn.Module]] = {
    "blocks": dense,
    "fused blocks": lambda: dense(fused=True),
    "weights cast twice": lambda: dense(Recipe(cache_weight=False)),
    "wgrad in high precision": lambda: dense(Recipe(wgrad_input="high_precision")),
    "a frozen layer": adapted,
}
each_model = pytest.mark.parametrize("name", MODELS)


def twins(name: str) -> tuple[nn.Module, nn.Module]:
    model = MODELS[name]()
    return model, copy.deepcopy(model)


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    trained = [p for p in model.parameters() if p.requires_grad]
    return torch.optim.AdamW(trained, lr=1e-2, fused=True, capturable=True)


def inputs(seed: int) -> Tensor:
    return randn(ROWS, K, seed=seed, device="cuda")


@each_model
def test_graphed_callables_train_as_eager(name: str) -> None:
    model, twin = twins(name)
    both = optimizer_of(model), optimizer_of(twin)
    torch.cuda.make_graphed_callables(model, (inputs(0).requires_grad_(),))
    for seed in range(4):
        assert_bits(step(model, inputs(seed)), step(twin, inputs(seed)))
        for optimizer in both:
            optimizer.step()
    for each in (model, twin):
        each.eval()  # its own forward, with the weights that training has written
    assert torch.equal(model(inputs(9)), twin(inputs(9)))


def test_each_block_is_graphed() -> None:
    model, twin = twins("fused blocks")
    layers: Any = model.layers
    samples = tuple((inputs(i).requires_grad_(),) for i, _ in enumerate(layers))
    torch.cuda.make_graphed_callables(tuple(layers), samples)
    for seed in range(3):
        assert_bits(step(model, inputs(seed)), step(twin, inputs(seed)))


class Step:
    """A training step: the loss of the same tensors, whose values change."""

    def __init__(self, model: nn.Module, *given: Tensor) -> None:
        self._model, self._given, self._optimizer = model, given, optimizer_of(model)
        self.loss = torch.zeros(())

    def run(self) -> None:
        self._optimizer.zero_grad(set_to_none=True)
        loss = self._model(*self._given).float().square().mean()
        loss.backward()
        self._optimizer.step()
        self.loss = loss.detach()

    def with_values(self, *values: Tensor) -> None:
        for x, new in zip(self._given, values, strict=True):
            x.copy_(new)


def assert_a_captured_step_trains_as_eager(
    model: nn.Module, values_of: Callable[[int], tuple[Tensor, ...]]
) -> None:
    twin = copy.deepcopy(model)
    captured, eager = (Step(each, *values_of(0)) for each in (model, twin))
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(WARM_UPS):
            captured.run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        captured.run()
    for _ in range(WARM_UPS):
        eager.run()
    for seed in range(1, 5):
        for each in (captured, eager):
            each.with_values(*values_of(seed))
        graph.replay()
        eager.run()
        assert torch.equal(captured.loss, eager.loss)
    with torch.no_grad():
        assert torch.equal(model(*values_of(9)), twin(*values_of(9)))


@each_model
def test_a_captured_step(name: str) -> None:
    assert_a_captured_step_trains_as_eager(MODELS[name](), lambda seed: (inputs(seed),))


SIZES = [(100, 0, 30, 130), (0, 0, ROWS, 0), (1, 1, 1, 1), (65, 65, 65, 65), (0, 129, 127, 4)]


@pytest.mark.parametrize("fused", [False, True])
def test_a_captured_step_of_experts_takes_other_groups(fused: bool) -> None:
    module = fused_experts.converted(fused_experts.Ends(experts=4, hidden=256, k=K).cuda())
    if fused:
        assert fuse(module).left_alone == ()

    def values(seed: int) -> tuple[Tensor, Tensor]:
        return inputs(seed), ends(*SIZES[seed % len(SIZES)], device="cuda")

    assert_a_captured_step_trains_as_eager(module, values)
