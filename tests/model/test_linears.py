"""Which modules are linears: subclasses of nn.Linear and transformers' Conv1D."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from blocktensor import (
    BlockwiseFP8Tensor,
    BlockwiseFP8Weight,
    Recipe,
    SmallKN,
    convert,
    explain,
    freeze,
    to_blockwise_fp8_weights,
    unfreeze,
)
from blocktensor.model.linears import is_conv1d, is_linear
from tests.support.conv1d import Conv1D
from tests.support.models import (
    DIM,
    POWER_OF_TWO,
    RECIPES,
    Trace,
    converted_names,
    plain,
    randn,
    reasons,
)

N, K = 200, 300


def twins(recipe: Recipe, dtype: torch.dtype, frozen: bool) -> tuple[nn.Module, nn.Linear]:
    """A Conv1D and an nn.Linear of the same values, converted."""
    conv, linear = Conv1D(N, K).to(dtype), nn.Linear(K, N, dtype=dtype)
    with torch.no_grad():
        conv.bias.copy_(randn(N, seed=3))
        linear.weight.copy_(conv.weight.t())
        linear.bias.copy_(conv.bias)
    for module in (conv, linear):
        module.weight.requires_grad_(not frozen)
        to_blockwise_fp8_weights(module, recipe)
    return conv, linear


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("recipe", RECIPES, ids=lambda r: r.scale)
def test_a_conv1d_computes_the_bits_of_the_transposed_linear(
    recipe: Recipe, frozen: bool, dtype: torch.dtype
) -> None:
    results, products = [], []
    for module in twins(recipe, dtype, frozen):
        x = randn(2, 5, K, dtype=dtype, grad=True)
        with Trace() as trace:
            y = module(x)
            y.backward(randn(2, 5, N, seed=1, dtype=dtype))
        grad = module.weight.grad
        if grad is not None and isinstance(module, Conv1D):
            grad = grad.t()
        results.append((y, x.grad, grad, module.bias.grad))
        products.append([op for op in trace.ops if "mm" in op])
    for mine, wanted in zip(*results, strict=True):
        assert (mine is wanted is None) or torch.equal(mine, wanted)
    assert (results[0][2] is None) == frozen
    assert products[0] == products[1]
    assert len(products[0]) == 2 + (not frozen)
    assert all(op.startswith("blocktensor.gemm 1x128") for op in products[0])


def test_a_frozen_conv1d_is_not_transposed_for_its_forward() -> None:
    conv, linear = twins(RECIPES[0], torch.bfloat16, frozen=True)
    weight = conv.weight
    assert type(weight) is BlockwiseFP8Tensor
    assert (weight.shape, weight.stride()) == ((K, N), (N, 1))
    with Trace() as trace, torch.no_grad():
        conv(randn(5, K))
    assert trace.count("transpose") == 0
    assert torch.equal(weight.dequantize(), linear.weight.dequantize().t())


def test_a_conv1d_is_frozen_and_trained_again() -> None:
    conv, _ = twins(POWER_OF_TWO, torch.bfloat16, frozen=False)
    x = randn(5, K)
    y = conv(x).detach()
    assert freeze(conv) == [""]
    assert torch.equal(conv(x), y)
    values = conv.weight.dequantize()
    assert unfreeze(conv) == [""]
    assert isinstance(conv.weight, BlockwiseFP8Weight)
    assert conv.weight.master.is_contiguous()
    assert torch.equal(plain(conv.weight), values)
    assert type(conv.state_dict()["weight"]) is Tensor


def test_a_conv1d_is_small_and_explained_by_the_sizes_of_its_linear() -> None:
    for thresholds, wanted in (
        (SmallKN(n=N, k=K, size=0), "trainable (Conv1D)"),
        (SmallKN(n=N + 1, k=0, size=0), "small: N=200 < 201 (auto_filter_small_kn)"),
        (SmallKN(n=0, k=K + 1, size=0), "small: K=300 < 301 (auto_filter_small_kn)"),
    ):
        model = nn.ModuleDict({"conv": Conv1D(N, K), "linear": nn.Linear(400, 400)})
        report = convert(model, auto_filter_small_kn=thresholds)
        assert report.entries[0].reason == wanted
    sizes = [
        (p.m, p.n, p.k) for p in explain(twins(POWER_OF_TWO, torch.bfloat16, False)[0]).products
    ]
    assert sizes == [(4096, N, K), (4096, K, N), (N, K, 4096)]


def test_the_conv1d_of_transformers() -> None:
    real = pytest.importorskip("transformers.pytorch_utils").Conv1D
    mine, theirs = Conv1D(N, K), real(N, K)
    with torch.no_grad():
        theirs.weight.copy_(mine.weight)
    assert is_conv1d(theirs)
    for module in (mine, theirs):
        to_blockwise_fp8_weights(module)
    x = randn(5, K, dtype=torch.float32)
    assert torch.equal(mine(x), theirs(x))
    assert isinstance(theirs.weight, BlockwiseFP8Weight)


def test_what_else_is_called_conv1d_is_left_alone() -> None:
    class Sub(Conv1D):
        pass

    other = type("Conv1D", (nn.Module,), {"nf": 3})()
    without = Conv1D(3, 4)
    del without.nf
    assert is_linear(Sub(3, 4)) and is_conv1d(Sub(3, 4))
    assert not is_linear(other)
    assert not is_linear(without)
    assert not is_linear(nn.Conv1d(3, 4, 1))


def test_subclasses_of_linear_are_named() -> None:
    class Scaled(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return 2 * nn.functional.linear(x, self.weight)

    model = nn.Sequential(Scaled(DIM, DIM), nn.Linear(DIM, DIM))
    report = convert(model, auto_filter_small_kn=False)
    assert [e.reason for e in report.entries] == ["trainable (subclass Scaled)", "trainable"]
    with Trace() as trace:
        model[0](randn(3, DIM, dtype=torch.float32))
    assert trace.count("blocktensor.gemm") == 1


def test_weights_of_other_libraries_are_left_alone() -> None:
    class Theirs(nn.Parameter):
        pass

    model = nn.Sequential(nn.Linear(DIM, DIM), nn.Linear(DIM, DIM), nn.Linear(DIM, DIM))
    model[0].weight = Theirs(randn(DIM, DIM, dtype=torch.float32))
    model[1].weight = nn.Parameter(torch.zeros(DIM * DIM // 2, 1, 1))
    report = convert(model, auto_filter_small_kn=False)
    assert converted_names(model) == ["2"]
    assert reasons(report) == {
        "0": "its weight is a Theirs, a type of another library",
        "1": "its weight has 3 dimensions",
    }
