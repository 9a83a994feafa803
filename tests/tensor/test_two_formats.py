"""Activations whose forms have two formats, or whose source is kept for weight gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline

import blocktensor
from blocktensor import BlockwiseFP8Tensor, Recipe, functional
from tests.support.models import ROW, SQUARE, linear, randn
from tests.support.numeric import assert_same
from tests.support.wgrad_inputs import HIGH, SQUARES


def test_a_cast_in_two_formats_and_its_transpose() -> None:
    x = blocktensor.quantize(randn(300, 200), SQUARES)
    rows, squares = SQUARES.activation_format, SQUARES.weight_format
    for t, formats in (
        (x, (rows, squares)),
        (x.t(), (squares, rows)),
        (x.t().t(), (rows, squares)),
    ):
        assert t.formats == formats
        assert (t.rowwise().format, t.columnwise().format) == formats
        assert (t.format, t.block_shape) == (rows, (1, 128))
    with pytest.raises(ValueError, match=r"blocks of \(128, 128\): expected \(1, 128\)"):
        functional.linear(x.t(), randn(130, 300))
    w = BlockwiseFP8Tensor.quantize(randn(300, 200), SQUARE)
    with pytest.raises(ValueError, match="copy_ between"):
        x.copy_(w)
    with pytest.raises(ValueError, match="copy_ between"):
        x.copy_(blocktensor.quantize(randn(300, 200)))


@pytest.mark.parametrize("tokens", [1, 127, 128, 129, 300])
def test_squares_of_any_number_of_tokens_end_in_zeros(tokens: int) -> None:
    """In whole vectors, as rows do; a weight's transpose, of the same values, does not."""
    values = randn(tokens, 200)
    x, weight = blocktensor.quantize(values, SQUARES), BlockwiseFP8Tensor.quantize(values, SQUARE)
    (data, scale, _), wanted = x.columnwise(), weight.columnwise()
    width = -(-tokens // 16) * 16
    assert (data.shape, wanted.data.shape) == ((200, width), (200, tokens))
    assert_same(data[:, :tokens], wanted.data)
    assert (data[:, tokens:].view(torch.uint8) == 0).all()
    assert_same(scale, wanted.scale)

    g = BlockwiseFP8Tensor.quantize(randn(tokens, 40, seed=1), ROW)
    assert torch.equal(torch.mm(g.t(), x), torch.mm(g.t(), weight))
    assert torch.equal(x.t().dequantize(), weight.t().dequantize())
    for source in (x, x.t()):
        copy = torch.empty_like(source).copy_(source)
        assert torch.equal(copy.t().dequantize(), source.t().dequantize())


def test_a_square_form_alone_gives_no_rowwise_form_of_an_activation() -> None:
    """That would be a product in other blocks than the recipe's."""
    x = blocktensor.quantize(randn(300, 200), SQUARES)
    alone = BlockwiseFP8Tensor(
        None, x.columnwise(), shape=x.shape, dtype=x.dtype, recipe=x.recipe, formats=x.formats
    )
    for form in (alone.rowwise, alone.t().columnwise):
        with pytest.raises(ValueError, match="without its"):
            form()
    torch.testing.assert_close(alone.dequantize(), randn(300, 200), rtol=0.1, atol=0.02)


@pytest.mark.parametrize("recipe", [SQUARES, HIGH], ids=lambda recipe: recipe.wgrad_input)
def test_parts_and_wholes(recipe: Recipe) -> None:
    x = randn(300, 300)
    fp8 = blocktensor.quantize(x, recipe)
    parts = fp8[:128], fp8[128:]
    for part, want in zip(parts, (x[:128], x[128:]), strict=True):
        cast = blocktensor.quantize(want, recipe)
        assert part.formats == cast.formats
        for got, form in zip(part.operand, cast.operand, strict=True):
            assert (got is None) == (form is None)
            if got is not None:
                assert_same(got.data, form.data)
                assert_same(got.scale, form.scale)
    whole = torch.cat(parts)
    assert whole.formats == fp8.formats
    for got, form in zip(whole.operand, fp8.operand, strict=True):
        assert form is None or torch.equal(got.data.view(torch.uint8), form.data.view(torch.uint8))
    if recipe is SQUARES:
        with pytest.raises(ValueError, match="cuts through a block"):
            fp8[:100]
        columns = BlockwiseFP8Tensor(
            None, fp8.columnwise(), shape=(300, 300), dtype=fp8.dtype, formats=fp8.formats
        )
        assert_same(columns[:, :128].columnwise().data, fp8.columnwise().data[:128])
        with pytest.raises(ValueError, match="cuts through a block"):
            columns[:, :100]
        with pytest.raises(ValueError, match="ends inside a block"):
            torch.cat([columns, columns], dim=1)


@pytest.mark.parametrize("recipe", [SQUARES, HIGH], ids=lambda recipe: recipe.wgrad_input)
@pytest.mark.parametrize("weights_only", [False, True])
def test_files(recipe: Recipe, weights_only: bool, tmp_path: Any) -> None:
    fp8 = blocktensor.quantize(randn(300, 200), recipe)
    torch.save(fp8, tmp_path / "x.pt")
    loaded = torch.load(tmp_path / "x.pt", weights_only=weights_only)
    assert (loaded.formats, loaded.recipe) == (fp8.formats, recipe)
    module, grad = linear(130, 200, recipe=recipe), randn(300, 130, seed=3)
    module(fp8).backward(grad)
    want = module.weight.grad.clone()
    module.zero_grad()
    module(loaded).backward(grad)
    assert torch.equal(module.weight.grad, want)
    if recipe is HIGH:
        vars(fp8)["source"] = fp8.source[:5]
        torch.save(fp8, tmp_path / "x.pt")
        with pytest.raises(ValueError, match="has a source that is no"):
            torch.load(tmp_path / "x.pt", weights_only=weights_only)


def test_how_it_prints() -> None:
    x = randn(3, 200)
    assert_expected_inline(
        "\n".join(repr(blocktensor.quantize(x, r)) for r in (SQUARES, HIGH)),
        """\
BlockwiseFP8Tensor(shape=[3, 200], dtype=torch.bfloat16, block_shape=(1, 128), scale='fp32', forms=rowwise 1x128+columnwise 128x128, device='cpu')
BlockwiseFP8Tensor(shape=[3, 200], dtype=torch.bfloat16, block_shape=(1, 128), scale='fp32', forms=rowwise+source, device='cpu')""",  # noqa: E501
    )
