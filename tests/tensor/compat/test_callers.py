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
    x, grad = randn(5, 192, dtype=torch.float32, grad=True), randn(5, 128, dtype=torch.float32)
    for each in (model, other):
        each(x).backward(grad)
    model.double()
    model.float()
    assert types(model) == types(other)
    for each in (model, other):  # adds to the first gradients, which moved along
        each(x).backward(grad)
    assert torch.equal(model(x), other(x))
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        assert (p.grad is None) == (not p.requires_grad)
        assert p.grad is None or torch.equal(p.grad, q.grad)


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


def test_a_swap_is_refused_as_in_plain_pytorch() -> None:
    one, other = nn.Parameter(torch.ones(2)), nn.Parameter(torch.zeros(2))
    reference = weakref.ref(one)
    with pytest.raises(RuntimeError, match="weakref"):
        torch.utils.swap_tensors(one, other)
    assert reference() is one and one.all()
    for module in (linear(DIM, DIM), nn.Linear(DIM, DIM).bfloat16()):
        waiting = module(randn(3, DIM, grad=True)).sum()  # a graph holds the weight
        other = nn.Parameter(torch.ones(DIM, DIM, dtype=torch.bfloat16))
        with pytest.raises(RuntimeError, match="use_count"):
            torch.utils.swap_tensors(module.weight, other)
        waiting.backward()
        assert module.weight.grad is not None
