"""A format that the package does not know: one registration and the reference run it everywhere."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from blocktensor import BlockwiseFP8Tensor, BlockwiseFP8Weight, Recipe, functional, quantize
from blocktensor.ops import formats
from blocktensor.ops.cast.ops import dequantize, quantize_both, quantize_rowwise, transpose
from blocktensor.ops.formats import BLOCKS_128X128, BlockFormat, Quantized
from blocktensor.ops.gemm.choose_backend import GEMM_BACKENDS, GemmProblem
from blocktensor.ops.gemm.ops import gemm
from tests.support.numeric import E4M3, cast_by_blocks, expand

TOY_ROWS = BlockFormat("toy 1x64", (1, 64))
TOY_SQUARES = BlockFormat("toy 64x64", (64, 64))


class ToyRecipe(Recipe):
    """Activations in 1x64 blocks, weights in the blocks of the class attribute."""

    weights = BLOCKS_128X128

    @property
    def activation_format(self) -> BlockFormat:
        return TOY_ROWS

    @property
    def gradient_format(self) -> BlockFormat:
        return TOY_ROWS

    @property
    def weight_format(self) -> BlockFormat:
        return self.weights


class ToySquaresRecipe(ToyRecipe):
    weights = TOY_SQUARES


RECIPES = (ToyRecipe(), ToySquaresRecipe())


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(formats, "_FORMATS", dict(formats._FORMATS))
    for toy in (TOY_ROWS, TOY_SQUARES):
        formats.register(toy)


def randn(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    # neighbouring blocks of 64 differ in size, so that a scale of the wrong block shows
    size = torch.exp2(torch.arange(shape[-1]) // 64 % 5 * 3.0)
    return torch.randn(shape, generator=generator) * size


def by_hand(x: Tensor, format: BlockFormat) -> Tensor:
    """Values after a cast, block by block."""
    data, scale = map(torch.from_numpy, cast_by_blocks(x, format.block_shape, "fp32"))
    return expand(Quantized(data.view(E4M3), scale, format)).float()


def values(q: Quantized) -> Tensor:
    return dequantize(q, torch.float32)


@pytest.mark.parametrize("shape", [(1, 1), (3, 64), (65, 130), (64, 200)])
@pytest.mark.parametrize("format", [TOY_ROWS, TOY_SQUARES], ids=lambda f: f.name)
def test_cast_and_dequantize(shape: tuple[int, int], format: BlockFormat) -> None:
    x = randn(*shape)
    q = quantize_rowwise(x, format)
    assert q.scale.shape == format.scale_shape(shape)
    assert torch.equal(values(q), by_hand(x, format))


def test_both_forms_and_the_transpose() -> None:
    x = randn(70, 130)
    row, col = quantize_both(x, TOY_ROWS)
    assert torch.equal(values(row), by_hand(x, TOY_ROWS))
    assert torch.equal(values(col)[:, :70], by_hand(x.t().contiguous(), TOY_ROWS))
    assert col.data.shape == (130, 128)
    assert (values(col)[:, 70:] == 0).all()
    square = transpose(quantize_rowwise(x, TOY_SQUARES))
    assert torch.equal(values(square), by_hand(x, TOY_SQUARES).t())


@pytest.mark.parametrize("b_format", [TOY_ROWS, TOY_SQUARES, BLOCKS_128X128], ids=lambda f: f.name)
def test_gemm(b_format: BlockFormat) -> None:
    a, b = quantize_rowwise(randn(20, 200), TOY_ROWS), quantize_rowwise(randn(70, 200), b_format)
    want = values(a).double() @ values(b).double().t()
    torch.testing.assert_close(gemm(a, b, None, torch.float32).double(), want, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("backend", GEMM_BACKENDS[:-1], ids=lambda backend: backend.name)
def test_kernels_decline_it(backend: Any) -> None:
    gpu = torch.device("cuda", 0)
    problem = GemmProblem(8, 8, 8, TOY_ROWS, BLOCKS_128X128, torch.bfloat16, gpu)
    assert backend.declines(problem) == "no kernels for format toy 1x64"


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.weight_format.name)
@pytest.mark.parametrize("tokens", [1, 65, 200])
def test_linear_forward_and_backward(recipe: Recipe, tokens: int) -> None:
    x, w, grad = randn(tokens, 150), randn(90, 150, seed=1), randn(tokens, 90, seed=2)
    x.requires_grad_(), w.requires_grad_()
    y = functional.linear(x, w, recipe=recipe)
    y.backward(grad)

    x_row, x_col = (
        values(q).double() for q in quantize_both(x.detach(), TOY_ROWS, recipe.wgrad_input_format)
    )
    g_row, g_col = (values(q).double() for q in quantize_both(grad, TOY_ROWS))
    w_fp8 = values(quantize_rowwise(w.detach(), recipe.weight_format)).double()
    wanted = x_row @ w_fp8.t(), g_row @ w_fp8, g_col @ x_col.t()
    for got, want in zip((y, x.grad, w.grad), wanted, strict=True):
        assert got is not None
        torch.testing.assert_close(got.double(), want, rtol=1e-4, atol=2e-4 * want.abs().max())


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.weight_format.name)
def test_tensors_and_weights_hold_it(recipe: Recipe) -> None:
    """A model's weight and a shared activation compute the bits of the stateless linear."""
    layer = nn.Linear(150, 90, bias=False)
    w, x = layer.weight.detach().clone(), randn(20, 150)
    layer.weight = nn.Parameter(BlockwiseFP8Weight(layer.weight.detach(), recipe))
    shared = quantize(x, recipe)
    assert isinstance(shared, BlockwiseFP8Tensor)
    assert (shared.format, shared.block_shape) == (TOY_ROWS, (1, 64))
    want = functional.linear(x, w, recipe=recipe)
    assert torch.equal(layer(x), want)
    assert torch.equal(layer(shared), want)
