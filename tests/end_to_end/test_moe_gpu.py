"""Experts on a GPU: no synchronisation, CUDA graphs, torch.compile, tokens of no group."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from blocktensor import audit, convert, fuse, share_inputs
from tests.support.compiling import afresh, assert_as_eager, graphs
from tests.support.groups import ends
from tests.support.models import randn
from tests.support.moe_models import transformers_moe
from tests.support.steps import assert_bits, losses_of, step
from tests.support.synchronization import no_synchronization

__all__ = ["afresh"]
pytestmark = pytest.mark.gpu

E, K, N = 8, 256, 512
SIZES = (300, 0, 129, 1, 127, 128, 0, 339)
T = sum(SIZES)


class Experts(nn.Module):
    """SwiGLU experts in bf16, given the ends of their groups."""

    def __init__(self) -> None:
        super().__init__()
        shapes = {"w1": (E, N, K), "w2": (E, K, N), "w3": (E, N, K)}
        for seed, (name, shape) in enumerate(shapes.items()):
            values = randn(*shape, seed=seed).cuda() / math.sqrt(shape[2])
            self.register_parameter(name, nn.Parameter(values))

    def forward(self, x: Tensor, offs: Tensor) -> Tensor:
        def by(x: Tensor, w: Any) -> Tensor:
            y: Tensor = torch._grouped_mm(x, w.transpose(-2, -1), offs=offs)
            return y

        return by(F.silu(by(x, self.w1)) * by(x, self.w3), self.w2)


def experts(fused: bool = False) -> Experts:
    module = Experts()
    convert(module, skip_small=False, stacks={"": ["w1", "w2", "w3"]})
    if fused:
        assert fuse(module).left_alone == ()
    return module


either_way = pytest.mark.parametrize("fused", [False, True])


def tokens(count: int = T, seed: int = 7) -> Tensor:
    return randn(count, K, seed=seed).cuda().requires_grad_()


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
def test_rows_of_no_group_reach_nothing(fused: bool) -> None:
    module, offs = experts(fused), ends(*SIZES, device="cuda")
    clean = step(module, tokens(), offs)
    poisoned = torch.full((T + 200, K), float("nan"), device="cuda", dtype=torch.bfloat16)
    with torch.no_grad():
        poisoned[:T] = tokens()
    poisoned.requires_grad_()
    for p in module.parameters():
        p.grad = None
    y = module(poisoned, offs)
    g = torch.full_like(y, float("nan"))
    g[:T] = randn(T, K, seed=7)  # that of step
    y.backward(g)
    assert_bits([y[:T], poisoned.grad[:T], *(p.grad for p in module.parameters())], clean)
    assert not y[T:].any()
    assert not poisoned.grad[T:].any()


# The manager of torch's CUDA graph trees captures an empty graph, to own a memory pool.
@pytest.mark.filterwarnings(
    "ignore:The CUDA Graph is empty. This usually means that the graph was attempted to be "
    "captured on wrong device or stream:UserWarning"
)
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


def test_compiled_products_have_eager_s_bits() -> None:
    module = experts()

    def product(x: Tensor, offs: Tensor) -> Tensor:
        y: Tensor = torch._grouped_mm(x, module.w1.transpose(-2, -1), offs=offs)
        return y

    groups = (SIZES, (5, 0, 0, 0, 0, 0, 0, 9), (64,) * E)
    batches = [(tokens(sum(sizes)), ends(*sizes, device="cuda")) for sizes in groups]
    assert_as_eager(product, *batches, of=[module])
    assert graphs() <= 2


def test_an_audit_finds_no_product_in_high_precision() -> None:
    report = audit(experts(), tokens(), ends(*SIZES, device="cuda"))
    assert report.marked == ()
    assert "FP8: 100" in str(report)


@pytest.mark.parametrize("kind", ["qwen3", "gpt_oss"])
def test_transformers_experts(kind: str) -> None:
    model = transformers_moe(kind).cuda().bfloat16()
    convert(model, skip_small=False)
    ids = (torch.arange(512, device="cuda") * 7 % 64).view(4, 128)[:, :64]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    losses = losses_of(lambda: model(input_ids=ids, labels=ids).loss, optimizer, steps=8)
    assert losses[-1] < losses[0]
