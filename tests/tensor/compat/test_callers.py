"""``model.double()`` and the like: weights stay FP8 weights, whatever dtype they are given."""

from __future__ import annotations

import weakref

import pytest
import torch
from torch import nn

from blocktensor import BlockwiseFP8Tensor, BlockwiseFP8Weight, convert, freeze, unfreeze
from tests.support.models import DIM, linear, randn

DTYPES = (torch.float64, torch.complex64, torch.float8_e4m3fn)
"""Those that a module takes and products cannot cast."""


def build(frozen: bool) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(nn.LayerNorm(192), nn.Linear(192, 256), nn.Linear(256, 128, bias=False))
    model[1].weight.requires_grad_(not frozen)
    convert(model, skip_small=False)
    return model


def types(model: nn.Module) -> list[type]:
    return [type(p) for p in model.parameters()]


@pytest.mark.filterwarnings("ignore:Complex modules are a new feature")
@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_dtype_that_products_cannot_cast(dtype: torch.dtype, frozen: bool) -> None:
    model = build(frozen)
    before = types(model)
    assert (BlockwiseFP8Tensor if frozen else BlockwiseFP8Weight) in before
    model.to(dtype)
    assert types(model) == before
    assert {p.dtype for p in model.parameters()} == {dtype}
    for module in model[1:]:
        with pytest.raises(TypeError, match=str(dtype)):
            module(randn(3, module.in_features, dtype=torch.float32).to(dtype))
        with pytest.raises(TypeError, match=f"the weight .* has dtype {dtype}"):
            module(randn(3, module.in_features, dtype=torch.float32))


@pytest.mark.parametrize("frozen", [False, True])
def test_there_and_back(frozen: bool) -> None:
    model, other = build(frozen), build(frozen)
    x, grad = randn(5, 192, dtype=torch.float32), randn(5, 128, dtype=torch.float32)
    for each in (model, other):
        each(x).backward(grad)
    model.double()
    model.float()
    assert types(model) == types(other)
    made = []
    for each in (model, other):
        leaf = x.clone().requires_grad_()
        y = each(leaf)
        y.backward(grad)  # adds to the first, which moved along
        made.append(
            [y.detach(), leaf.grad, *(p.grad for p in each.parameters() if p.requires_grad)]
        )
    for got, want in zip(*made, strict=True):
        assert torch.equal(got, want)


def test_weights_with_weak_references_are_frozen_and_unfrozen() -> None:
    module = linear(DIM, DIM, dtype=torch.float32)
    reference, x = weakref.ref(module.weight), randn(3, DIM, dtype=torch.float32)
    wanted = module(x).detach()
    for change, kind in ((freeze, BlockwiseFP8Tensor), (unfreeze, BlockwiseFP8Weight)):
        change(module)
        assert module.weight is reference()
        assert isinstance(module.weight, kind)
        with torch.no_grad():
            assert torch.equal(module(x), wanted)


def test_plain_weights_with_weak_references_are_not_swapped() -> None:
    one, other = nn.Parameter(torch.ones(2)), nn.Parameter(torch.zeros(2))
    reference = weakref.ref(one)
    with pytest.raises(RuntimeError, match="weakref"):
        torch.utils.swap_tensors(one, other)
    assert reference() is one and one.all()


def test_a_swap_of_a_weight_that_a_graph_holds_is_refused_as_in_plain_pytorch() -> None:
    for module in (linear(DIM, DIM), nn.Linear(DIM, DIM).bfloat16()):
        waiting = module(randn(3, DIM, grad=True)).sum()
        other = nn.Parameter(torch.ones(DIM, DIM, dtype=torch.bfloat16))
        with pytest.raises(RuntimeError, match="use_count"):
            torch.utils.swap_tensors(module.weight, other)
        waiting.backward()
        assert module.weight.grad is not None
