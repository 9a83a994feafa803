"""BlockwiseFP8Tensor: its values, its forms, and how it is wrapped."""

from __future__ import annotations

import math
import textwrap
from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from torch import Tensor, nn

import blocktensor
from blocktensor import BlockwiseFP8Tensor, Recipe, functional
from blocktensor.ops import reference
from tests.support.models import (
    POWER_OF_TWO,
    RECIPES,
    ROW,
    SQUARE,
    assert_same,
    assert_same_bytes,
    inner,
    pointers,
    quantized,
    randn,
)
from tests.support.refusals import Call, refused
from tests.support.wgrad_inputs import HIGH, SQUARES

# Casting


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("recipe", RECIPES, ids=lambda r: r.scale)
@pytest.mark.parametrize("shape", [(7,), (5, 200), (300, 130), (2, 3, 200), (0, 200), (5, 0)])
def test_quantize_1x128_makes_both_forms(
    shape: tuple[int, ...], recipe: Recipe, dtype: torch.dtype, device: torch.device
) -> None:
    x = randn(*shape, dtype=dtype, device=device)
    fp8 = BlockwiseFP8Tensor.from_values(x, ROW, recipe)
    matrix = x.reshape(math.prod(shape[:-1]), shape[-1])
    for form, cast in (
        (fp8.rowwise(), reference.quantize_rowwise),
        (fp8.columnwise(), reference.quantize_columnwise),
    ):
        wanted = cast(matrix, recipe.activation_format)
        assert_same_bytes(form.data, wanted.data)
        assert_same_bytes(form.scale, wanted.scale)
        assert form.format is wanted.format is fp8.format
        assert form.data.is_contiguous()
    assert (fp8.shape, fp8.dtype, fp8.device) == (x.shape, dtype, x.device)
    assert (fp8.block_shape, fp8.recipe, fp8.is_contiguous()) == (ROW, recipe, True)


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda r: r.scale)
@pytest.mark.parametrize("shape", [(200, 300), (128, 128), (3, 200, 130), (0, 200), (2, 0, 5)])
def test_quantize_128x128_makes_rowwise_only(
    shape: tuple[int, ...], recipe: Recipe, device: torch.device
) -> None:
    x = randn(*shape, device=device)
    fp8 = BlockwiseFP8Tensor.from_values(x, SQUARE, recipe)
    data, scale, format = reference.quantize_rowwise(x, recipe.weight_format)
    assert fp8.format is format
    assert_same_bytes(fp8.rowwise_data, data)
    assert_same_bytes(fp8.rowwise_scale, scale)
    assert fp8.rowwise_scale.shape == (*shape[:-2], -(-shape[-2] // 128), -(-shape[-1] // 128))
    assert fp8.columnwise_data is fp8.columnwise_scale is None


@pytest.mark.parametrize(("rowwise", "columnwise"), [(True, False), (False, True)])
def test_forms_are_made_as_asked(rowwise: bool, columnwise: bool) -> None:
    both = quantized(5, 200)
    one = quantized(5, 200, rowwise=rowwise, columnwise=columnwise)
    side = "rowwise" if rowwise else "columnwise"
    wanted = {f"{side}_data", f"{side}_scale"}
    assert inner(one).keys() == wanted
    for name, tensor in inner(one).items():
        assert_same_bytes(tensor, getattr(both, name))
    missing = "columnwise" if rowwise else "rowwise"
    with pytest.raises(ValueError, match=f"without its {missing} form.*{missing}=True$"):
        getattr(one, missing)()


def test_the_wrong_forms_are_refused() -> None:
    assert_expected_inline(
        refused(
            lambda: quantized(5, 200, rowwise=False, columnwise=False),
            quantized(5, 200, columnwise=False).columnwise,
            lambda: BlockwiseFP8Tensor(None, None, shape=(5, 200)),
        ),
        """\
ValueError: from_values(rowwise=False, columnwise=False) makes nothing: pick a form
ValueError: this BlockwiseFP8Tensor [5, 200] was cast in 1x128 blocks without its columnwise
  form, which needs other scales: quantize the high-precision tensor with columnwise=True
ValueError: BlockwiseFP8Tensor needs a rowwise or a columnwise form, got neither;
  BlockwiseFP8Tensor.from_values(x) makes them""",
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("shape", [(5, 200), (2, 3, 200), (300, 130)])
@pytest.mark.parametrize("form", ["rowwise", "columnwise", "square", "stack"])
def test_dequantize_is_close_and_is_data_times_scale(
    form: str, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> None:
    x = randn(*shape, dtype=dtype, device=device)
    if form in ("square", "stack"):
        x = x.reshape(
            (3, -1, shape[-1]) if form == "stack" and len(shape) == 3 else (-1, shape[-1])
        )
        fp8 = BlockwiseFP8Tensor.from_values(x, SQUARE)
        data, scale, _ = fp8.rowwise()
        grown = scale.repeat_interleave(128, -1)[..., : data.shape[-1]]
        grown = grown.repeat_interleave(128, -2)[..., : data.shape[-2], :]
        product = data.float() * grown
    else:
        fp8 = BlockwiseFP8Tensor.from_values(x, ROW, **{form: True}, **{
            "columnwise" if form == "rowwise" else "rowwise": False
        })  # fmt: skip
        data, scale, _ = getattr(fp8, form)()
        grown = scale.repeat_interleave(128, -1)[:, : data.shape[1]]
        product = data.float() * grown
        if form == "columnwise":  # in whole vectors of tokens
            tokens = x.numel() // shape[-1]
            product, grown = product.t()[:tokens], grown.t()[:tokens]
    product, grown = product.reshape(x.shape), grown.reshape(x.shape)
    assert torch.equal(fp8.dequantize(torch.float32), product)
    assert torch.equal(fp8.dequantize(), product.to(dtype))
    assert type(fp8.dequantize()) is Tensor
    # e4m3 has 3 significand bits, and steps of 2^-9 below its smallest normal number
    assert ((product - x.float()).abs() <= torch.maximum(x.float().abs() / 16, grown / 1024)).all()


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("block", [ROW, SQUARE])
def test_nan_and_inf_spoil_their_block_and_nothing_else(
    block: tuple[int, int], bad: float, device: torch.device
) -> None:
    x = randn(300, 400, device=device)
    x[140, 130] = bad
    spoiled = torch.isnan(BlockwiseFP8Tensor.from_values(x, block).dequantize()).cpu()
    wanted = torch.zeros(300, 400, dtype=torch.bool)
    wanted[140 if block == ROW else slice(128, 256), 128:256] = True
    assert torch.equal(spoiled, wanted)


# Wrapping and unwrapping


@pytest.mark.parametrize(
    "x",
    [
        quantized(5, 200),
        quantized(2, 3, 200, columnwise=False),
        quantized(200, 300, block=SQUARE, recipe=POWER_OF_TWO),
        quantized(200, 300, block=SQUARE).t(),
        quantized(3, 200, 130, block=SQUARE),
    ],
    ids=["both", "rowwise only", "square", "transposed", "stack"],
)
def test_flatten_and_unflatten(x: BlockwiseFP8Tensor) -> None:
    names, context = x.__tensor_flatten__()
    assert names == list(inner(x))
    hash(context)  # torch.compile compares contexts
    again = BlockwiseFP8Tensor.__tensor_unflatten__(inner(x), context, x.shape, x.stride())
    assert_same(again, x)
    assert pointers(again) == pointers(x)
    assert torch.utils._python_dispatch.is_traceable_wrapper_subclass(x)


def test_repr() -> None:
    shown = [
        quantized(5, 200),
        quantized(2, 3, 200, columnwise=False).requires_grad_(),
        quantized(200, 300, block=SQUARE, recipe=POWER_OF_TWO).t(),
        nn.Parameter(quantized(3, 200, 130, block=SQUARE)),
        *(blocktensor.quantize(randn(3, 200), recipe) for recipe in (SQUARES, HIGH)),
    ]
    assert_expected_inline(
        "\n".join(textwrap.fill(repr(x), 84) for x in shown),
        """\
BlockwiseFP8Tensor(shape=[5, 200], dtype=torch.bfloat16, block_shape=(1, 128),
scale='fp32', forms=rowwise+columnwise, device='cpu')
BlockwiseFP8Tensor(shape=[2, 3, 200], dtype=torch.bfloat16, block_shape=(1, 128),
scale='fp32', forms=rowwise, device='cpu', requires_grad=True)
BlockwiseFP8Tensor(shape=[300, 200], dtype=torch.bfloat16, block_shape=(128, 128),
scale='power_of_two', forms=columnwise, device='cpu')
BlockwiseFP8Tensor(shape=[3, 200, 130], dtype=torch.bfloat16, block_shape=(128,
128), scale='fp32', forms=rowwise, device='cpu', requires_grad=True)
BlockwiseFP8Tensor(shape=[3, 200], dtype=torch.bfloat16, block_shape=(1, 128),
scale='fp32', forms=rowwise 1x128+columnwise 128x128, device='cpu')
BlockwiseFP8Tensor(shape=[3, 200], dtype=torch.bfloat16, block_shape=(1, 128),
scale='fp32', forms=rowwise+source, device='cpu')""",
    )


@pytest.mark.parametrize("shape", [(5, 200), (0, 200), (200, 300), (3, 200, 130)])
def test_from_data(shape: tuple[int, ...], device: torch.device) -> None:
    block = ROW if shape[0] < 100 and len(shape) == 2 else SQUARE
    made = quantized(*shape, block=block, device=device)
    data, scale, _ = made.rowwise()
    lying_otherwise = scale.contiguous() if block == ROW else scale.mT.contiguous().mT
    got = BlockwiseFP8Tensor.from_data(data, lying_otherwise, block_shape=block)
    assert got.columnwise_data is None
    assert_same_bytes(got.rowwise_data, data)
    assert_same_bytes(got.rowwise_scale, scale)
    assert got.rowwise_scale.stride() == scale.stride()
    lying = data.mT.contiguous().mT
    again = BlockwiseFP8Tensor.from_data(lying, scale, block_shape=block)
    assert again.rowwise_data.is_contiguous()
    assert_same(again, got)
    assert torch.equal(got.dequantize(), made.dequantize())
    half = BlockwiseFP8Tensor.from_data(data, scale, block_shape=block, dtype=torch.float16)
    assert half.dequantize().dtype == torch.float16
    if block == SQUARE and len(shape) == 2:  # it multiplies like the cast that it came from
        x = randn(5, shape[1], device=device)
        wanted = functional.linear(x, made)
        assert torch.equal(functional.linear(x, got), wanted)
        assert torch.equal(x @ got.t(), wanted)


def test_from_data_that_does_not_fit() -> None:
    data, scale, _ = quantized(200, 300).rowwise()

    def of(data: Tensor, scale: Tensor, **options: Any) -> Call:
        options = {"block_shape": ROW, **options}
        return lambda: BlockwiseFP8Tensor.from_data(data, scale, **options)

    assert_expected_inline(
        refused(
            of(scale, scale),
            of(data, scale.half()),
            of(data, scale, block_shape=SQUARE),
            of(data, scale[:, :2]),
            of(data[None], scale[None]),
            of(data, scale, block_shape=(1, 64)),
            of(data, scale.to("meta")),
            of(data, scale, dtype=torch.float64),
        ),
        """\
TypeError: FP8 data has dtype torch.float32: expected torch.float8_e4m3fn
TypeError: scales have dtype torch.float16: expected torch.float32
ValueError: scales have shape [200, 3] for data [200, 300] in blocks of (128, 128): expected [2,
  3]
ValueError: scales have shape [200, 2] for data [200, 300] in blocks of (1, 128): expected [200,
  3]
ValueError: FP8 data has 3 dimensions, shape [1, 200, 300]: expected 2; 1x128 data is [M, K],
  128x128 data [N, K] or [E, N, K]
ValueError: block_shape (1, 64): expected (1, 128) (activations, gradients) or (128, 128)
  (weights)
ValueError: FP8 data is on cpu and its scales on meta: move them to one device
TypeError: output dtype torch.float64: expected torch.bfloat16, torch.float16 or torch.float32""",
    )


def test_quantize_accepts_any_strides() -> None:
    x = randn(400, 600)
    for view in (x.t(), x[::2, ::3], x[3:, 5:], x[:1].expand(7, 600), x.view(4, 100, 600)[:, 1]):
        for block in (ROW, SQUARE):
            assert_same(
                BlockwiseFP8Tensor.from_values(view, block),
                BlockwiseFP8Tensor.from_values(view.contiguous(), block),
            )


# Forms in two formats, and sources that are kept for weight gradients


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
    w = BlockwiseFP8Tensor.from_values(randn(300, 200), SQUARE)
    with pytest.raises(ValueError, match="copy_ between"):
        x.copy_(w)
    with pytest.raises(ValueError, match="copy_ between"):
        x.copy_(blocktensor.quantize(randn(300, 200)))


@pytest.mark.parametrize("tokens", [1, 127, 128, 129, 300])
def test_squares_of_any_number_of_tokens_end_in_zeros(tokens: int) -> None:
    """In whole vectors, as rows do; a weight's transpose, of the same values, does not."""
    values = randn(tokens, 200)
    x, weight = (
        blocktensor.quantize(values, SQUARES),
        BlockwiseFP8Tensor.from_values(values, SQUARE),
    )
    (data, scale, _), wanted = x.columnwise(), weight.columnwise()
    width = -(-tokens // 16) * 16
    assert (data.shape, wanted.data.shape) == ((200, width), (200, tokens))
    assert_same_bytes(data[:, :tokens], wanted.data)
    assert (data[:, tokens:].view(torch.uint8) == 0).all()
    assert_same_bytes(scale, wanted.scale)

    g = BlockwiseFP8Tensor.from_values(randn(tokens, 40, seed=1), ROW)
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
                assert_same_bytes(got.data, form.data)
                assert_same_bytes(got.scale, form.scale)
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
        assert_same_bytes(columns[:, :128].columnwise().data, fp8.columnwise().data[:128])
        with pytest.raises(ValueError, match="cuts through a block"):
            columns[:, :100]
        with pytest.raises(ValueError, match="ends inside a block"):
            torch.cat([columns, columns], dim=1)
