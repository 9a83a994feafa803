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
from tests.support.asserts import Call, refused
from tests.support.linear_ways import HIGH
from tests.support.models import (
    FP32_SCALES,
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

ROWS = (7,), (5, 200), (300, 130), (2, 3, 200), (0, 200), (5, 0)
SQUARES_OF = (200, 300), (128, 128), (3, 200, 130), (0, 200), (2, 0, 5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("recipe", RECIPES, ids=lambda r: r.scale)
@pytest.mark.parametrize(
    ("block", "shape"), [*((ROW, s) for s in ROWS), *((SQUARE, s) for s in SQUARES_OF)]
)
def test_a_cast_has_both_forms_of_rows_and_the_rowwise_form_of_squares(
    block: Any, shape: tuple[int, ...], recipe: Recipe, dtype: torch.dtype, device: torch.device
) -> None:
    x = randn(*shape, dtype=dtype, device=device)
    fp8 = BlockwiseFP8Tensor.from_values(x, block, recipe)
    matrix, format, casts = x, recipe.weight_format, {"rowwise": reference.quantize_rowwise}
    if block == ROW:
        matrix, format = x.reshape(math.prod(shape[:-1]), shape[-1]), recipe.activation_format
        casts["columnwise"] = reference.quantize_columnwise
    assert inner(fp8).keys() == {f"{form}_{part}" for form in casts for part in ("data", "scale")}
    for form, cast in casts.items():
        made, wanted = getattr(fp8, form)(), cast(matrix, format)
        assert_same_bytes(made.data, wanted.data)
        assert_same_bytes(made.scale, wanted.scale)
        assert made.format is wanted.format is fp8.format
        assert made.data.is_contiguous()
    assert (fp8.shape, fp8.dtype, fp8.device) == (x.shape, dtype, x.device)
    assert (fp8.block_shape, fp8.recipe, fp8.is_contiguous()) == (block, recipe, True)


@pytest.mark.parametrize("form", ["rowwise", "columnwise"])
def test_a_form_alone_has_the_bytes_of_a_cast_of_both(form: str) -> None:
    both = quantized(5, 200)
    one = quantized(5, 200, rowwise=form == "rowwise", columnwise=form == "columnwise")
    assert inner(one).keys() == {f"{form}_data", f"{form}_scale"}
    for name, tensor in inner(one).items():
        assert_same_bytes(tensor, getattr(both, name))
    missing = "columnwise" if form == "rowwise" else "rowwise"
    with pytest.raises(ValueError, match=f"without its {missing} form.*{missing}=True$"):
        getattr(one, missing)()


@pytest.mark.parametrize("requires_grad", [False, True])
def test_frameworks_rebuild_parameters(requires_grad: bool) -> None:
    """They call ``type(parameter)(parameter, requires_grad=...)``; accelerate does."""
    x = quantized(200, 300, block=SQUARE, recipe=POWER_OF_TWO).requires_grad_(not requires_grad)
    made = BlockwiseFP8Tensor(x, requires_grad=requires_grad)
    assert made.requires_grad == requires_grad
    assert made.is_leaf and made is not x
    assert_same(made.detach(), x.detach())


def test_values_are_bf16_unless_a_dtype_is_given() -> None:
    values = randn(200, 300, dtype=torch.float32)
    form = BlockwiseFP8Tensor.from_values(values, SQUARE).rowwise()
    for options, dtype in (({}, torch.bfloat16), ({"dtype": torch.float16}, torch.float16)):
        made = BlockwiseFP8Tensor(form, shape=(200, 300), **options)
        assert made.dtype == made.dequantize().dtype == dtype


def test_the_wrong_forms_are_refused() -> None:
    assert_expected_inline(
        refused(
            lambda: quantized(5, 200, rowwise=False, columnwise=False),
            quantized(5, 200, columnwise=False).columnwise,
            lambda: BlockwiseFP8Tensor(None, None, shape=(5, 200)),
        ),
        """\
ValueError: from_values(rowwise=False, columnwise=False) makes nothing: pick a form
ValueError: this BlockwiseFP8Tensor was cast in 1x128 blocks to a rowwise form [5, 200], without
  its columnwise form, which needs other scales: quantize the high-precision tensor with
  columnwise=True
ValueError: BlockwiseFP8Tensor needs a rowwise or a columnwise form, got neither;
  BlockwiseFP8Tensor.from_values(x) makes them""",
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("form", ["rowwise", "columnwise", "square"])
@pytest.mark.parametrize("shape", [(5, 200), (2, 3, 200), (300, 130)])
def test_dequantize_gives_the_values_of_either_form(
    shape: tuple[int, ...], form: str, dtype: torch.dtype, device: torch.device
) -> None:
    x = randn(*shape, dtype=dtype, device=device)
    if form == "square":
        fp8 = BlockwiseFP8Tensor.from_values(x, SQUARE)
    else:
        forms = {name: name == form for name in ("rowwise", "columnwise")}
        fp8 = BlockwiseFP8Tensor.from_values(x, ROW, **forms)
    cast = fp8.columnwise() if form == "columnwise" else fp8.rowwise()
    wanted = reference.dequantize(cast, torch.float32)
    if form == "columnwise":  # in whole vectors of tokens
        wanted = wanted.t()[: x.numel() // shape[-1]]
    wanted = wanted.reshape(shape)
    torch.testing.assert_close(wanted, x.float(), rtol=1 / 16, atol=2e-5)  # steps of e4m3
    assert torch.equal(fp8.dequantize(torch.float32), wanted)
    assert torch.equal(fp8.dequantize(), wanted.to(dtype))
    assert type(fp8.dequantize()) is Tensor


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
        *(blocktensor.quantize(randn(3, 200), recipe) for recipe in (FP32_SCALES, HIGH)),
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
    other_scale = scale.contiguous() if block == ROW else scale.mT.contiguous().mT
    got = BlockwiseFP8Tensor.from_data(data, other_scale, block_shape=block)
    again = BlockwiseFP8Tensor.from_data(data.mT.contiguous().mT, scale, block_shape=block)
    assert_same(again, got)
    assert got.columnwise_data is None
    assert again.rowwise_data.is_contiguous()
    assert_same_bytes(got.rowwise_data, data)
    assert_same_bytes(got.rowwise_scale, scale)
    assert got.rowwise_scale.stride() == scale.stride()
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
TypeError: dtype=torch.float64: expected one of torch.bfloat16, torch.float16, torch.float32""",
    )


def test_quantize_accepts_any_strides() -> None:
    x, cast = randn(400, 600), BlockwiseFP8Tensor.from_values
    for view in (x.t(), x[::2, ::3], x[3:, 5:], x[:1].expand(7, 600), x.view(4, 100, 600)[:, 1]):
        for block in (ROW, SQUARE):
            assert_same(cast(view, block), cast(view.contiguous(), block))


def test_a_cast_in_two_formats_and_its_transpose() -> None:
    x = blocktensor.quantize(randn(300, 200), FP32_SCALES)
    formats = rows, squares = FP32_SCALES.activation_format, FP32_SCALES.weight_format
    for t, wanted in ((x, formats), (x.t(), (squares, rows)), (x.t().t(), formats)):
        assert t.formats == (t.rowwise().format, t.columnwise().format) == wanted
        assert (t.format, t.block_shape) == (rows, (1, 128))
    with pytest.raises(ValueError, match=r"blocks of \(128, 128\): expected \(1, 128\)"):
        functional.linear(x.t(), randn(130, 300))
    for other in (quantized(300, 200, block=SQUARE), quantized(300, 200)):
        with pytest.raises(ValueError, match="copy_ between"):
            x.copy_(other)


@pytest.mark.parametrize("tokens", [1, 127, 128, 129, 300])
def test_squares_of_any_number_of_tokens_end_in_zeros(tokens: int) -> None:
    """In whole vectors, as rows do; a weight's transpose, of the same values, does not."""
    x = blocktensor.quantize(randn(tokens, 200), FP32_SCALES)
    weight = quantized(tokens, 200, block=SQUARE)
    (data, scale, _), wanted = x.columnwise(), weight.columnwise()
    assert (data.shape, wanted.data.shape) == ((200, -(-tokens // 64) * 64), (200, tokens))
    assert_same_bytes(data[:, :tokens], wanted.data)
    assert (data[:, tokens:].view(torch.uint8) == 0).all()
    assert_same_bytes(scale, wanted.scale)

    g = quantized(tokens, 40)
    assert torch.equal(torch.mm(g.t(), x), torch.mm(g.t(), weight))
    assert torch.equal(x.t().dequantize(), weight.t().dequantize())
    for source in (x, x.t()):
        copy = torch.empty_like(source).copy_(source)
        assert torch.equal(copy.t().dequantize(), source.t().dequantize())


def test_a_square_form_alone_gives_no_rowwise_form_of_an_activation() -> None:
    """That would be a product in other blocks than the recipe's."""
    x = blocktensor.quantize(randn(300, 200), FP32_SCALES)
    alone = BlockwiseFP8Tensor(
        None, x.columnwise(), shape=x.shape, dtype=x.dtype, recipe=x.recipe, formats=x.formats
    )
    for form in (alone.rowwise, alone.t().columnwise):
        with pytest.raises(ValueError, match="without its"):
            form()
    torch.testing.assert_close(alone.dequantize(), randn(300, 200), rtol=0.1, atol=0.02)


@pytest.mark.parametrize("recipe", [FP32_SCALES, HIGH], ids=lambda recipe: recipe.wgrad_input)
def test_parts_and_wholes(recipe: Recipe) -> None:
    x = randn(300, 300)
    fp8 = blocktensor.quantize(x, recipe)
    parts = fp8[:128], fp8[128:]
    for part, values in zip(parts, (x[:128], x[128:]), strict=True):
        assert_same(part, blocktensor.quantize(values, recipe))
        assert part.formats == fp8.formats
    whole = torch.cat(parts)
    assert whole.formats == fp8.formats
    for got, form in zip(whole.operand, fp8.operand, strict=True):
        assert form is None or torch.equal(got.data.view(torch.uint8), form.data.view(torch.uint8))
    if recipe is FP32_SCALES:
        columns = BlockwiseFP8Tensor(
            None, fp8.columnwise(), shape=(300, 300), dtype=fp8.dtype, formats=fp8.formats
        )
        assert_same_bytes(columns[:, :128].columnwise().data, fp8.columnwise().data[:128])
        for cut, message in (
            (lambda: fp8[:100], "cuts through a block"),
            (lambda: columns[:, :100], "cuts through a block"),
            (lambda: torch.cat([columns, columns], dim=1), "ends inside a block"),
        ):
            with pytest.raises(ValueError, match=message):
                cut()


def test_what_is_no_tensor_is_refused() -> None:
    with pytest.raises(TypeError, match=r"^x is a list: expected a tensor$"):
        BlockwiseFP8Tensor.from_values([1.0])  # type: ignore[arg-type]
