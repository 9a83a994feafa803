"""FP8 weights stay FP8 weights, whatever dtype or data they are given."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from blocktensor import BlockwiseFP8Tensor, BlockwiseFP8Weight, Recipe, convert, functional
from tests.support.models import DIM, FP32_SCALES, POWER_OF_TWO, linear, plain, randn


def test_new_data_of_another_dtype_leaves_the_gradient_as_plain_pytorch_does() -> None:
    for module in (linear(DIM, DIM, dtype=torch.float32), nn.Linear(DIM, DIM)):
        module.weight.grad = grad = torch.ones(DIM, DIM)
        module.weight.data = module.weight.data.half()
        assert module.weight.grad is grad


@pytest.mark.parametrize("recipe", [FP32_SCALES, POWER_OF_TWO], ids=lambda r: r.scale)
def test_new_data_of_another_dtype_as_accelerate_sets_it(recipe: Recipe) -> None:
    module, x = linear(DIM, DIM, recipe=recipe), randn(3, DIM, dtype=torch.float32)
    optimizer = torch.optim.AdamW(module.parameters())
    values = plain(module.weight).float()
    for parameter in module.parameters():
        parameter.data = parameter.data.to(torch.float32)
    weight = module.weight
    assert optimizer.param_groups[0]["params"][0] is weight
    assert (weight.dtype, weight.recipe) == (torch.float32, recipe)
    assert torch.equal(weight.master, values)
    assert torch.equal(module(x), functional.linear(x, values, recipe=recipe))


def test_new_data_without_high_precision_values_is_refused() -> None:
    module, frozen = linear(DIM, DIM), linear(DIM, DIM, frozen=True)
    x, master = randn(3, DIM), module.weight.master
    wanted = module(x)
    for new, message in (
        (frozen.weight, r"is .*\.dequantize\(\)"),
        (frozen.weight.detach().to(torch.float32), r"is .*\.dequantize\(\)"),
        (torch.ones(DIM, DIM, dtype=torch.int64), r"has dtype torch\.int64"),
    ):
        with pytest.raises(TypeError, match=rf"new \.data of an FP8 weight {message}"):
            module.weight.data = new
    with pytest.raises(NotImplementedError, match=r"cannot set \.data of .* shape \[3, 4\]"):
        module.weight.data = randn(3, 4)
    for new in (frozen.weight, module.weight):
        with pytest.raises(TypeError, match="master of a BlockwiseFP8Weight must be plain"):
            BlockwiseFP8Weight(new)
    assert module.weight.master is master
    assert torch.equal(module(x), wanted)
    module.weight.data = frozen.weight.dequantize().t().contiguous().t()
    assert torch.equal(module(x), frozen(x)) and module.weight.stride() == (1, DIM)
    module.weight.data = master.to("meta")
    assert module.weight.device == module.weight.master.device == torch.device("meta")


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
@pytest.mark.parametrize("dtype", [torch.float64, torch.complex64, torch.float8_e4m3fn])
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
