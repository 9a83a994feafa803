"""DDP over a model with frozen FP8 weights, which it broadcasts and then leaves alone."""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from blocktensor import BlockwiseFP8Tensor, Recipe, convert, functional
from blocktensor.tensor.operand import Operand
from tests.support.groups import ends
from tests.support.models import RECIPES, SQUARE, complaint, quantized, randn
from tests.support.numeric import assert_same, relative_error
from tests.support.ranks import on_ranks

K, HIDDEN = 192, 300


class Adapted(nn.Module):
    def __init__(self, k: int, n: int) -> None:
        super().__init__()
        self.base = nn.Linear(k, n).requires_grad_(False)
        self.a, self.b = nn.Linear(k, 8, bias=False), nn.Linear(8, n, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.b(self.a(x))


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w1 = nn.Parameter(torch.randn(2, K, HIDDEN) / 16, requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return functional.grouped_linear(x, self.w1, ends(len(x) // 2, len(x) // 2))


def build(seed: int, recipe: Recipe) -> nn.Sequential:
    torch.manual_seed(seed)
    model = nn.Sequential(Adapted(K, HIDDEN), nn.LayerNorm(HIDDEN), Experts())
    convert(model, recipe, skip=["*.a", "*.b"], stacks={"2": ["w1"]}, skip_small=False)
    return model


def held(model: nn.Module) -> list[Tensor]:
    made = []
    for p in model.parameters():
        frozen = isinstance(p, BlockwiseFP8Tensor)
        made += [p.rowwise_data, p.rowwise_scale, p.columnwise().data] if frozen else [p.detach()]
    return made


@on_ranks(2, gpus=())
def test_a_frozen_base_with_adapters(world: int, device: str) -> None:
    """All ranks begin with the weights of the first, and train as one process does."""
    for recipe in RECIPES:
        assert_trains_as_one_process(world, recipe)


def assert_trains_as_one_process(world: int, recipe: Recipe) -> None:
    rank = dist.get_rank()
    single, model = build(0, recipe), build(rank, recipe)
    wrapped = DistributedDataParallel(model)
    for got, want in zip(held(model), held(single), strict=True):
        assert_same(got, want)
    optimizers = [
        torch.optim.SGD([p for p in m.parameters() if p.requires_grad], lr=0.1)
        for m in (wrapped, single)
    ]
    for step in range(3):
        x = randn(32 * world, K, seed=step, dtype=torch.float32)
        mine = torch.cat([x[16 * rank :][:16], x[16 * (world + rank) :][:16]])  # of both experts
        for each, given in ((wrapped, mine), (single, x)):
            each(given).square().mean().backward()
        for name, p in single.named_parameters():
            got = model.get_parameter(name).grad
            assert (got is None) == (p.grad is None)
            assert p.grad is None or relative_error(got, p.grad) < 1e-5, name
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


def test_what_a_bucket_is_cut_into() -> None:
    x, stack = quantized(200, 130, block=SQUARE), quantized(2, 130, 40, block=SQUARE)
    plain, at = randn(7), 7 + x.numel()
    bucket: Any = torch.cat([plain, x.view(-1), stack.view(-1), x.t().reshape(-1)])
    assert (bucket.shape, bucket.dtype) == ((7 + 2 * x.numel() + stack.numel(),), torch.bfloat16)
    assert torch.equal(bucket[:7], plain)
    assert bucket[:at].shape == (at,)
    assert_same(bucket[7:at].view(200, 130).dequantize(), x.dequantize())
    middle = bucket.narrow(0, at, stack.numel())
    assert_same(middle.view(-1).view_as(stack).dequantize(), stack.dequantize())
    assert_same(bucket[at + stack.numel() :].view(130, 200).dequantize(), x.t().dequantize())


def test_a_bucket_sends_one_form_of_a_weight() -> None:
    x = quantized(200, 130, block=SQUARE)
    row, col = x.rowwise(), x.columnwise()
    for operand in (Operand(row, None), Operand(None, col), Operand(row, col)):
        held = x.like(operand, x.shape, x.stride())
        (part,) = held.view(-1).parts
        (form,) = (form for form in part.operand if form is not None)
        assert form.data.data_ptr() == (operand.rowwise or operand.columnwise).data.data_ptr()
        assert_same(held.view(-1).view(200, 130).dequantize(), x.dequantize())


def test_what_a_bucket_does_not_do() -> None:
    x = quantized(128, 256, block=SQUARE)
    for run in (
        lambda: x.view(-1) + 1,
        lambda: x.view(-1)[1:],
        lambda: x.view(-1)[:5],
        lambda: x.view(-1)[::2],
        lambda: x.view(-1).view(256, 128),
        lambda: x.flatten().sum(),
        lambda: torch.cat([x.view(-1), x.view(-1)]).view(256, 256),
    ):
        assert ".dequantize()" in complaint(NotImplementedError, run)


def test_a_stack_is_padded_with_matrices_alone() -> None:
    stack = quantized(2, 130, 40, block=SQUARE)
    longer = F.pad(stack, (0, 0, 0, 0, 0, 1))
    assert longer.shape == (3, 130, 40)
    assert_same(longer.dequantize(), F.pad(stack.dequantize(), (0, 0, 0, 0, 0, 1)))
    assert (longer.rowwise().scale[2] == 1).all()  # as of every block of zeros
    pads = (0, 1, 0, 0, 0, 1), (0, 0, 1, 0, 0, 1), (0, 0, 0, 0, 1, 0), (0, 1)
    calls = [*((stack, pad, 0.0) for pad in pads), (stack, (0, 0, 0, 0, 0, 1), 1.0)]
    for call in (*calls, (quantized(2, 130, 40), (0, 0, 0, 0, 0, 1), 0.0)):
        text = complaint(NotImplementedError, functools.partial(F.pad, *call[:2], value=call[2]))
        assert "constant_pad_nd" in text
