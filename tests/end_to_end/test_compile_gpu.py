"""On a GPU: inductor and CUDA graphs give eager's bits, and experts do not synchronise."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from blocktensor import BlockwiseFP8Tensor, Recipe, convert, freeze, fuse, share_inputs
from tests.support import fused_experts
from tests.support.asserts import no_synchronization
from tests.support.compiling import afresh, assert_as_eager, graphs
from tests.support.groups import ends
from tests.support.models import randn
from tests.support.moe_models import transformers_moe
from tests.support.steps import assert_bits, losses_of, step

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore:.*should not be instantiated. Methods on autograd"),
    pytest.mark.filterwarnings("ignore:.*TensorFloat32.*:UserWarning"),
    # how inductor itself begins a pool of CUDA graphs
    pytest.mark.filterwarnings("ignore:The CUDA Graph is empty:UserWarning"),
]

__all__ = ["afresh"]

DIM = 1024


def model(recipe: Recipe | None = None) -> nn.Sequential:
    """ReLU, whose derivative no fusion rounds otherwise."""
    torch.manual_seed(0)
    layers = nn.Linear(DIM, 1536, bias=False), nn.ReLU(), nn.Linear(1536, DIM)
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
        (False, Recipe.deepseek()),
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
        x = randn(512, DIM, seed=seed, device="cuda")
        assert_bits(step(compiled, x), step(eager, x))
        for optimizer in optimizers:
            optimizer.step()
    assert graphs() == 1
    for a, b in zip(eager.parameters(), twin.parameters(), strict=True):
        assert torch.equal(stored(a), stored(b))


def test_five_batch_sizes_take_two_compilations() -> None:
    eager = model()
    inputs = [randn(batch, DIM, seed=batch, device="cuda") for batch in (512, 640, 129, 1000, 2050)]
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
    assert all(layer.weight.cache.nbytes() == 0 for layer in layers)


E, K, N = 8, 256, 512
SIZES = (300, 0, 129, 1, 127, 128, 0, 339)
T = sum(SIZES)


def experts(fused: bool = False) -> fused_experts.Ends:
    module = fused_experts.converted(fused_experts.Ends(experts=E, hidden=N, k=K).cuda())
    if fused:
        assert fuse(module).left_alone == ()
    return module


either_way = pytest.mark.parametrize("fused", [False, True])


def tokens(count: int = T, seed: int = 7) -> Tensor:
    return randn(count, K, seed=seed).cuda().requires_grad_()


@pytest.mark.unchecked
@either_way
@pytest.mark.parametrize("shares", [False, True])
def test_a_training_step_does_not_synchronise(shares: bool, fused: bool) -> None:
    module, offs = experts(fused), ends(*SIZES, device="cuda")
    if shares:
        share_inputs(module)
    optimizer = torch.optim.AdamW(module.parameters(), fused=True)
    inputs = [tokens(seed=seed) for seed in range(4)]
    step(module, inputs[0], offs)
    optimizer.step()
    with no_synchronization():
        for x in inputs[1:]:
            module(x, offs).sum().backward()
            optimizer.step()
            optimizer.zero_grad()


@either_way
def test_one_graph_of_a_step_serves_other_groups(fused: bool) -> None:
    module, x, offs = experts(fused), tokens(), ends(*SIZES, device="cuda")
    g = randn(T, K, seed=3).cuda()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            module(x, offs).backward(g)
    torch.cuda.synchronize()
    x.grad = None
    for p in module.parameters():
        p.grad = None
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        y = module(x, offs)
        y.backward(g)
    for sizes in (SIZES, (0, 0, T, 0, 0, 0, 0, 0), (1,) * E, (128,) * E):
        new = ends(*sizes, device="cuda")
        offs.copy_(new)
        for gradient in (x.grad, *(p.grad for p in module.parameters())):
            gradient.zero_()
        graph.replay()
        eager, wanted = experts(), tokens()
        expected = eager(wanted, new)
        expected.backward(g)
        assert torch.equal(y, expected)
        assert torch.equal(x.grad, wanted.grad)
        for p, q in zip(module.parameters(), eager.parameters(), strict=True):
            assert torch.equal(p.grad, q.grad)


@either_way
@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_compiled_experts_are_close_to_eager(mode: str, fused: bool) -> None:
    module = experts(fused)
    compiled = torch.compile(module, fullgraph=True, dynamic=True, mode=mode)
    for sizes in (SIZES, (5, 0, 0, 0, 0, 0, 0, 9), (1024,) * E):
        offs, count = ends(*sizes, device="cuda"), sum(sizes)
        wanted = step(module, tokens(count), offs)
        made = step(compiled, tokens(count), offs)
        for a, b in zip(made[:2], wanted[:2], strict=True):
            if fused:
                assert torch.equal(a, b)
            # inductor keeps the product of gate and up in fp32, which other bytes of FP8 follow
            assert (a - b).norm() <= 5e-2 * b.norm()


@pytest.mark.parametrize("kind", ["qwen3", "gpt_oss"])
def test_transformers_experts(kind: str) -> None:
    model = transformers_moe(kind).cuda().bfloat16()
    convert(model, skip_small=False)
    ids = (torch.arange(512, device="cuda") * 7 % 64).view(4, 128)[:, :64]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    losses = losses_of(lambda: model(input_ids=ids, labels=ids).loss, optimizer, steps=8)
    assert losses[-1] < losses[0]
