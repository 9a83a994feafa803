"""Stateless FP8: its accuracy, its agreement with a converted model, and what it refuses."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from expecttest import assert_expected_inline
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import blocktensor
from blocktensor import BlockwiseFP8Tensor, BlockwiseFP8Weight, Recipe, functional
from tests.models import (
    FP32_SCALES,
    POWER_OF_TWO,
    RECIPES,
    complaint,
    composed,
    linear,
    plain,
    randn,
    with_outliers,
)

# Accuracy

SMALL_KN = [(256, 384), (192, 576), (130, 70)]
LARGE_KN = [(2048, 1100), (7168, 2112), (2048, 10944)]
TOKENS = [1, 3, 127, 128, 300]


def accuracy_cases() -> list[Any]:
    cpu = [pytest.param("cpu", kn, m) for kn in SMALL_KN for m in TOKENS]
    gpu = [
        pytest.param("cuda", kn, m, marks=pytest.mark.gpu)
        for kn in SMALL_KN + LARGE_KN
        for m in [*TOKENS, 4096]
    ]
    return cpu + gpu


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda r: r.scale)
@pytest.mark.parametrize("outliers", [False, True])
@pytest.mark.parametrize(("where", "kn", "m"), accuracy_cases())
def test_signal_to_quantization_noise(
    where: str, kn: tuple[int, int], m: int, outliers: bool, recipe: Recipe
) -> None:
    """Energies are pooled over draws: one row holds too few outliers for a stable ratio."""
    k, n = kn
    draw = functools.partial(with_outliers if outliers else randn, device=where)
    w = draw(n, k, seed=0).requires_grad_()
    energies = torch.zeros(3, 2, dtype=torch.float64)  # of y, dx, dw: signal and noise
    for seed in range(max(1, min(300 // m, 32))):
        x, grad = (draw(m, c, seed=c + seed) for c in (k, n))
        x, w.grad = x.requires_grad_(), None
        y = functional.linear(x, w, recipe=recipe)
        y.backward(grad)
        x64, w64, g64 = (t.detach().double() for t in (x, w, grad))
        exact = x64 @ w64.t(), g64 @ w64, g64.t() @ x64
        for i, (got, want) in enumerate(zip((y.detach(), x.grad, w.grad), exact, strict=True)):
            energies[i, 0] += want.square().sum().cpu()
            energies[i, 1] += (got - want).square().sum().cpu()
    decibels = 10 * torch.log10(energies[:, 0] / energies[:, 1])
    assert (decibels >= (25 if outliers else 27)).all(), decibels


# One result, however it is asked for


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda r: r.scale)
@pytest.mark.parametrize("bias", [False, True])
def test_equals_a_converted_module(bias: bool, recipe: Recipe, device: torch.device) -> None:
    module = linear(256, 384, bias=bias, recipe=recipe, device=device)
    parameters = [plain(p).requires_grad_() for p in module.parameters()]
    x, grad = randn(2, 5, 384, device=device), randn(2, 5, 256, seed=3, device=device)
    a, b = x.clone().requires_grad_(), x.clone().requires_grad_()
    y, z = module(a), functional.linear(b, *parameters, recipe=recipe)
    y.backward(grad), z.backward(grad)
    assert torch.equal(y, z)
    assert torch.equal(a.grad, b.grad)
    for converted, stateless in zip(module.parameters(), parameters, strict=True):
        assert torch.equal(converted.grad, stateless.grad)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    lead=st.lists(st.integers(0, 5), max_size=3),
    n=st.integers(1, 300),
    k=st.integers(1, 300),
    view=st.sampled_from(["contiguous", "transposed", "stepped", "offset", "expanded"]),
    grad_view=st.sampled_from(["contiguous", "transposed", "stepped", "offset", "expanded"]),
    recipe=st.sampled_from(RECIPES),
)
def test_any_shape_and_view(
    lead: list[int], n: int, k: int, view: str, grad_view: str, recipe: Recipe
) -> None:
    x, w = viewed(view, (*lead, k)).requires_grad_(), randn(n, k, seed=1, grad=True)
    grad = viewed(grad_view, (*lead, n))
    y = functional.linear(x, w, recipe=recipe)
    y.backward(grad)
    rows = math.prod(lead)
    wanted = composed(x.detach().reshape(rows, k), w.detach(), grad.reshape(rows, n), recipe)
    assert torch.equal(y, wanted[0].view(*lead, n))
    assert torch.equal(x.grad, wanted[1].view(*lead, k))
    assert torch.equal(w.grad, wanted[2])


def viewed(view: str, shape: tuple[int, ...]) -> Tensor:
    """A tensor of ``shape`` that lies in memory as ``view`` says."""
    if view == "transposed":
        return randn(*reversed(shape)).permute(*reversed(range(len(shape))))
    if view == "stepped":
        return randn(*(2 * s for s in shape))[(slice(None, None, 2),) * len(shape)]
    if view == "offset":
        return randn(*(s + 3 for s in shape))[(slice(3, None),) * len(shape)]
    if view == "expanded":
        return randn(*(1 for _ in shape)).expand(shape)
    return randn(*shape)


@pytest.mark.parametrize(
    "weight",
    [
        lambda w: BlockwiseFP8Weight(w, POWER_OF_TWO),
        lambda w: BlockwiseFP8Tensor.quantize(w, (128, 128), POWER_OF_TWO),
    ],
)
def test_the_recipe_comes_with_the_weight(weight: Callable[[Tensor], Tensor]) -> None:
    x, w = randn(5, 384), randn(256, 384, seed=1)
    wanted = functional.linear(x, w, recipe=POWER_OF_TWO)
    assert torch.equal(functional.linear(x, weight(w)), wanted)
    assert torch.equal(F.linear(x, weight(w)), wanted)
    assert not torch.equal(functional.linear(x, w), wanted)  # the recipes do differ here


def test_the_recipe_comes_with_the_input() -> None:
    x, w = randn(5, 384), randn(256, 384, seed=1)
    y = functional.linear(blocktensor.quantize(x, POWER_OF_TWO), w)
    assert torch.equal(y, functional.linear(x, w, recipe=POWER_OF_TWO))


# quantize


def test_a_shared_activation_gives_the_same_bits_and_sums_gradients(device: torch.device) -> None:
    gate, up = linear(256, 384, device=device), linear(128, 384, bias=True, device=device)
    x = randn(2, 5, 384, device=device)
    grads = randn(2, 5, 256, seed=3, device=device), randn(2, 5, 128, seed=4, device=device)

    def run(share: bool) -> list[Tensor]:
        gate.zero_grad(), up.zero_grad()
        leaf = x.clone().requires_grad_()
        inside = blocktensor.quantize(leaf) if share else leaf
        outputs = gate(inside), up(inside)
        torch.autograd.backward(outputs, grads)
        return [*outputs, leaf.grad, gate.weight.grad, up.weight.grad, up.bias.grad]

    for shared, apart in zip(run(share=True), run(share=False), strict=True):
        assert torch.equal(shared, apart)


def test_a_shared_activation_is_cast_and_saved_once() -> None:
    gate, up = linear(256, 384), linear(128, 384)
    x, saved = randn(5, 384, grad=True), []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        shared = blocktensor.quantize(x)
        gate(shared), up(shared)
    data = [t for t in saved if t.dtype == torch.float8_e4m3fn]
    assert len(data) == 2
    assert data[0].data_ptr() == data[1].data_ptr() == shared.columnwise_data.data_ptr()


@pytest.mark.parametrize("shape", [(7,), (3, 200), (2, 3, 200), (0, 200)])
def test_quantize_is_straight_through(shape: tuple[int, ...]) -> None:
    x, w = randn(*shape, grad=True), randn(130, shape[-1], seed=1)
    shared = blocktensor.quantize(x)
    assert type(shared) is BlockwiseFP8Tensor
    assert (shared.shape, shared.dtype, shared.requires_grad) == (x.shape, x.dtype, True)
    y = functional.linear(shared, w)
    grad = randn(*y.shape, seed=3)
    (direct,) = torch.autograd.grad(functional.linear(x, w), x, grad)
    y.backward(grad)
    assert torch.equal(x.grad, direct)
    assert blocktensor.quantize(shared) is shared


def test_quantize_of_what_needs_no_grad() -> None:
    assert not blocktensor.quantize(randn(5, 200)).requires_grad
    with torch.no_grad():
        assert not blocktensor.quantize(randn(5, 200, grad=True)).requires_grad


# Bad input: what came, what was expected, the remedy

W = randn(256, 384, seed=1)
X = randn(5, 384)


def square(x: Tensor = W, recipe: Recipe = FP32_SCALES) -> BlockwiseFP8Tensor:
    return BlockwiseFP8Tensor.quantize(x, (128, 128), recipe)


def test_wrong_dtypes() -> None:
    long, double = X.long(), X.double()
    assert_expected_inline(
        complaint(TypeError, lambda: functional.linear(long, W)),
        """\
the input of an FP8 linear has dtype torch.int64: blocktensor casts torch.bfloat16,
torch.float16 and torch.float32 to FP8; convert it first, e.g. .to(torch.bfloat16)""",
    )
    assert_expected_inline(
        complaint(TypeError, lambda: functional.linear(X, W.double())),
        """\
the weight of an FP8 linear has dtype torch.float64: blocktensor casts
torch.bfloat16, torch.float16 and torch.float32 to FP8; convert it first, e.g.
.to(torch.bfloat16)""",
    )
    assert_expected_inline(
        complaint(TypeError, lambda: functional.linear(X, W.half())),
        """\
the input is torch.bfloat16 and the weight torch.float16: convert one of them, or
run under torch.autocast""",
    )
    assert_expected_inline(
        complaint(TypeError, lambda: functional.linear(X, W, W[:, 0].float())),
        """\
the input is torch.bfloat16 and the bias torch.float32: convert one of them, or run
under torch.autocast""",
    )
    assert_expected_inline(
        complaint(TypeError, lambda: blocktensor.quantize(double)),
        """\
the tensor to quantize has dtype torch.float64: blocktensor casts torch.bfloat16,
torch.float16 and torch.float32 to FP8; convert it first, e.g. .to(torch.bfloat16)""",
    )
    assert_expected_inline(
        complaint(TypeError, lambda: BlockwiseFP8Weight(W.double())),
        """\
the weight has dtype torch.float64: blocktensor casts torch.bfloat16, torch.float16
and torch.float32 to FP8; convert it first, e.g. .to(torch.bfloat16)""",
    )
    assert_expected_inline(
        complaint(TypeError, lambda: functional.linear(X.to(torch.float8_e4m3fn), W)),
        """\
the input of an FP8 linear has dtype torch.float8_e4m3fn: blocktensor casts
torch.bfloat16, torch.float16 and torch.float32 to FP8; convert it first, e.g.
.to(torch.bfloat16)""",
    )


def test_wrong_ranks() -> None:
    stack = W.expand(2, 256, 384)
    assert_expected_inline(
        complaint(ValueError, lambda: functional.linear(X, stack)),
        """\
the weight of an FP8 linear has 3 dimensions, shape [2, 256, 384]: expected 2;
stacks of experts need grouped_mm""",
    )
    assert_expected_inline(
        complaint(ValueError, lambda: functional.linear(X, W[0])),
        """\
the weight of an FP8 linear has 1 dimensions, shape [384]: expected 2; stacks of
experts need grouped_mm""",
    )
    assert_expected_inline(
        complaint(ValueError, lambda: functional.linear(X[0, 0], W)),
        """the input of an FP8 linear is a scalar: expected shape [..., K]""",
    )
    assert_expected_inline(
        complaint(ValueError, lambda: blocktensor.quantize(X[0, 0])),
        """cannot quantize a scalar in 1x128 blocks: expected shape [..., K]""",
    )
    assert_expected_inline(
        complaint(ValueError, lambda: BlockwiseFP8Weight(W[0])),
        """\
the weight has 1 dimensions, shape [384]: expected 2 or 3; FP8 weights are [N, K] or
[E, N, K]""",
    )


def test_shapes_that_do_not_fit() -> None:
    assert_expected_inline(
        complaint(ValueError, lambda: functional.linear(X[:, 1:], W)),
        """\
cannot contract input [5, 383] with weight [256, 384]: K is 383 in one and 384 in
the other""",
    )
    assert_expected_inline(
        complaint(ValueError, lambda: functional.linear(X, W, W[:3, 0])),
        """the bias has shape [3]: expected [256]""",
    )
    assert_expected_inline(
        complaint(ValueError, lambda: functional.linear(X, W, W)),
        """the bias has shape [256, 384]: expected [256]""",
    )


def test_mixed_recipes() -> None:
    module, other = linear(256, 384, recipe=POWER_OF_TWO), square(recipe=POWER_OF_TWO)
    shared = blocktensor.quantize(X)
    for run in (
        lambda: functional.linear(shared, other),
        lambda: functional.linear(X, other, recipe=FP32_SCALES),
        lambda: functional.linear(shared, W, recipe=POWER_OF_TWO),
        lambda: module(shared),
        lambda: torch.mm(shared, module.weight.t()),
    ):
        text = complaint(ValueError, run)
        assert text.startswith("mixed recipes")
    assert_expected_inline(
        text,
        """\
mixed recipes: one operand was cast with Recipe(scale='power_of_two'), the other
with Recipe(scale='fp32'); cast both with one recipe, e.g. blocktensor.quantize(x,
recipe=weight.recipe)""",
    )


def test_mixed_recipes_that_cannot_be_seen_in_the_operands() -> None:
    shared, keep = blocktensor.quantize(X), square(recipe=Recipe(columnwise="keep"))
    assert torch.equal(functional.linear(shared, keep), functional.linear(X, W))


def test_mixed_devices() -> None:
    meta = W.to("meta")
    assert_expected_inline(
        complaint(ValueError, lambda: functional.linear(X, meta)),
        """the input is on cpu and the weight on meta: move them to one device""",
    )
    assert_expected_inline(
        complaint(ValueError, lambda: functional.linear(X, W, meta[:, 0])),
        """the input is on cpu and the bias on meta: move them to one device""",
    )


def test_wrong_blocks() -> None:
    wide = BlockwiseFP8Tensor.quantize(X, (128, 128))
    rows = BlockwiseFP8Tensor.quantize(W)
    assert_expected_inline(
        complaint(ValueError, lambda: functional.linear(wide, W)),
        """\
the input of an FP8 linear has blocks of (128, 128): expected (1, 128);
blocktensor.quantize(x) makes them""",
    )
    assert_expected_inline(
        complaint(ValueError, lambda: BlockwiseFP8Tensor.quantize(X, (64, 64))),
        """\
block_shape (64, 64): expected (1, 128) (activations, gradients) or (128, 128)
(weights)""",
    )
    lone = BlockwiseFP8Tensor.quantize(X, columnwise=False)
    leaf = W.clone().requires_grad_()
    assert_expected_inline(
        complaint(ValueError, lambda: functional.linear(lone, leaf)),
        """\
this BlockwiseFP8Tensor [5, 384] was cast in 1x128 blocks without its columnwise
form, which needs other scales: quantize the high-precision tensor with
columnwise=True""",
    )
    assert torch.isfinite(functional.linear(X, rows)).all()  # 1x128 weights are allowed


@pytest.mark.parametrize("name", ["scale", "columnwise", "cache_weight"])
def test_bad_recipes_name_the_field(name: str) -> None:
    with pytest.raises(ValueError, match=rf"Recipe\({name}='no'\): expected"):
        Recipe(**{name: "no"})


def test_a_module_says_what_is_wrong_with_its_input() -> None:
    module = nn.Sequential(linear(256, 384, bias=True))
    assert_expected_inline(
        complaint(TypeError, lambda: module(X.float())),
        """\
the input is torch.float32 and the weight torch.bfloat16: convert one of them, or
run under torch.autocast""",
    )
    assert_expected_inline(
        complaint(ValueError, lambda: module(X[:, :5])),
        """\
cannot contract input [5, 5] with weight [256, 384]: K is 5 in one and 384 in the
other""",
    )
    assert_expected_inline(
        complaint(ValueError, lambda: module(X.to("meta"))),
        """the input is on meta and the weight on cpu: move them to one device""",
    )
