"""torch.compile on a GPU: inductor and CUDA graphs give eager's bits, and compile seldom."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from blocktensor import (
    BlockwiseFP8Tensor,
    BlockwiseFP8Weight,
    Recipe,
    convert,
    freeze,
    memory_report,
    share_inputs,
)
from tests.support.compiling import afresh, assert_as_eager, graphs
from tests.support.models import randn
from tests.support.steps import assert_bits, step

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore:.*should not be instantiated. Methods on autograd"),
    pytest.mark.filterwarnings("ignore:.*TensorFloat32.*:UserWarning"),
    # how inductor itself begins a pool of CUDA graphs
    pytest.mark.filterwarnings("ignore:The CUDA Graph is empty:UserWarning"),
]

__all__ = ["afresh"]

K = 1024


def model(recipe: Recipe | None = None) -> nn.Sequential:
    """ReLU, whose derivative no fusion rounds otherwise."""
    torch.manual_seed(0)
    layers = nn.Linear(K, 1536, bias=False), nn.ReLU(), nn.Linear(1536, K)
    made = nn.Sequential(*layers).to("cuda", torch.bfloat16)
    convert(made, recipe or Recipe(), skip_small=False)
    return made


def stored(parameter: Tensor) -> Tensor:
    return parameter.rowwise().data if isinstance(parameter, BlockwiseFP8Tensor) else parameter


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
@pytest.mark.parametrize(
    ("frozen", "recipe"),
    [
        (False, Recipe()),
        (True, Recipe()),
        (False, Recipe(wgrad_input="128x128")),
        (False, Recipe(wgrad_input="high_precision")),
    ],
    ids=str,
)
def test_training_has_eagers_bits_in_one_graph(mode: str, frozen: bool, recipe: Recipe) -> None:
    eager = model(recipe)
    if frozen:
        freeze(eager)
    twin = copy.deepcopy(eager)
    compiled = torch.compile(twin, fullgraph=True, mode=mode)
    optimizers = []
    for owner in (eager, twin):
        trained = [p for p in owner.parameters() if p.requires_grad]
        optimizers.append(torch.optim.AdamW(trained, lr=1e-2, fused=True))
    for seed in range(10):
        x = randn(512, K, seed=seed, device="cuda")
        assert_bits(step(compiled, x), step(eager, x))
        for optimizer in optimizers:
            optimizer.step()
    assert graphs() == 1
    for a, b in zip(eager.parameters(), twin.parameters(), strict=True):
        assert torch.equal(stored(a), stored(b))


def test_five_batch_sizes_take_two_compilations() -> None:
    eager = model()
    batches = (512, 640, 129, 1000, 2050)
    inputs = [randn(batch, K, seed=batch, device="cuda") for batch in batches]
    assert_as_eager(eager, *inputs, backend="inductor")
    assert graphs() <= 2


def test_no_fp8_weight_lives_from_forward_to_backward() -> None:
    torch.manual_seed(0)
    layers = [nn.Linear(4096, 4096, bias=False) for _ in range(4)]
    made = nn.Sequential(*layers).to("cuda", torch.bfloat16)
    convert(made)
    compiled = torch.compile(made, fullgraph=True)
    x = randn(128, 4096, device="cuda", grad=True)
    compiled(x).sum().backward()
    made.zero_grad()
    before = torch.cuda.memory_allocated()
    y = compiled(x)
    held = torch.cuda.memory_allocated() - before
    assert held < 4096 * 4096  # one weight in FP8 would be more than all activations
    y.sum().backward()
    assert memory_report(made).trainable.fp8 == 0


def test_sharing_is_left_to_the_compiler() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate, self.up = (nn.Linear(K, 1536, bias=False) for _ in range(2))

        def forward(self, x: Tensor) -> Tensor:
            made: Tensor = self.gate(x) * self.up(x)
            return made

    torch.manual_seed(0)
    two = Two().to("cuda", torch.bfloat16)
    convert(two, skip_small=False)
    assert isinstance(two.up.weight, BlockwiseFP8Weight)
    share_inputs(two)
    saved: list[Tensor] = []

    def pack(t: Tensor) -> Tensor:
        saved.append(t)
        return t

    compiled = torch.compile(two, fullgraph=True)
    x = randn(256, K, device="cuda", grad=True)
    compiled(x).sum().backward()
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        compiled(x)
    casts = {t.data_ptr() for t in saved if t.shape == (K, 256) and t.itemsize == 1}
    assert len(casts) == 1
