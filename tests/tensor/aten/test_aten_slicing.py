"""Parts of BlockwiseFP8Tensors and wholes of parts: values, bytes, aliasing, refusals."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from blocktensor import BlockwiseFP8Tensor, Recipe
from blocktensor.ops import reference
from blocktensor.ops.formats import BLOCKS_1X128, Quantized
from blocktensor.ops.scale_layouts import empty_scale
from tests.support.models import ROW, SQUARE, assert_same, inner, quantized, randn

BOTH, ROWWISE, COLUMNWISE = (True, True), (True, False), (False, True)


def made(
    *shape: int, block: tuple[int, int], forms: tuple[bool, bool] = BOTH
) -> BlockwiseFP8Tensor:
    x = randn(*shape)
    if block == ROW:
        return BlockwiseFP8Tensor.from_values(x, ROW, rowwise=forms[0], columnwise=forms[1])
    square = BlockwiseFP8Tensor.from_values(x, SQUARE)
    if forms == ROWWISE:
        return square
    columnwise = square.columnwise()
    rowwise = square.rowwise() if forms == BOTH else None
    return BlockwiseFP8Tensor(
        rowwise, columnwise, shape=x.shape, dtype=x.dtype, recipe=square.recipe
    )


def assert_consistent(x: BlockwiseFP8Tensor) -> None:
    """Both forms hold the same kind of tensor that a cast of this shape would have."""
    like = quantized(*x.shape, block=x.block_shape)
    for name, part in inner(x).items():
        wanted = getattr(like, name)
        if wanted is not None:
            assert part.shape == wanted.shape, name
    for data in (x.rowwise_data, x.columnwise_data):
        assert data is None or data.is_contiguous()


def storage(x: BlockwiseFP8Tensor) -> set[int]:
    return {part.untyped_storage().data_ptr() for part in inner(x).values()}


CUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "first rows": lambda x: x[:128],
    "last rows": lambda x: x[256:],
    "middle rows": lambda x: x[128:256],
    "from the end": lambda x: x[-44:],
    "no rows": lambda x: x[128:128],
    "first columns": lambda x: x[:, :256],
    "last columns": lambda x: x[:, 128:],
    "rows and columns": lambda x: x[128:, :128],
    "narrow": lambda x: x.narrow(0, 128, 128),
    "all": lambda x: x[:],
    "split": lambda x: x.split(128)[1],
    "split in sizes": lambda x: x.split([256, 44])[1],
    "split columns": lambda x: torch.split(x, 128, dim=1)[2],
    "chunk": lambda x: x[:256].chunk(2)[1],
    "of the transpose": lambda x: x.t()[128:256].t(),
}


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("forms", [BOTH, ROWWISE, COLUMNWISE], ids=["both", "row", "column"])
@pytest.mark.parametrize("block", [ROW, SQUARE], ids=str)
def test_a_part_has_the_values_of_the_whole(
    block: tuple[int, int], forms: tuple[bool, bool], cut: str
) -> None:
    x = made(300, 320, block=block, forms=forms)
    part = CUTS[cut](x)
    assert isinstance(part, BlockwiseFP8Tensor)
    want = CUTS[cut](x.dequantize())
    assert part.shape == want.shape
    assert torch.equal(part.dequantize(), want)
    assert_consistent(part)
    if block == ROW:  # two casts, both of which go on
        assert [form is not None for form in part.operand] == list(forms)
        columnwise, whole = part.operand.columnwise, x.operand.columnwise
        if columnwise is not None and whole is not None:
            values = reference.dequantize(whole, torch.float32).t()[:300]
            got = reference.dequantize(columnwise, torch.float32).t()
            assert torch.equal(got[: len(want)], CUTS[cut](values))
            assert (got[len(want) :] == 0).all()


def test_rows_are_views_and_columns_copies() -> None:
    for block in (ROW, SQUARE):
        x = made(300, 320, block=block, forms=ROWWISE)
        rows, columns = x[128:256], x[:, 128:256]
        assert storage(rows) == storage(x)
        assert rows.rowwise_data.data_ptr() == x.rowwise_data.data_ptr() + 128 * 320
        assert columns.rowwise_data.untyped_storage().data_ptr() not in storage(x)
        assert storage(x[:]) == storage(x)
    square = made(300, 320, block=SQUARE)
    assert storage(square[:, 128:]) <= storage(square)  # the rows of its columnwise form
    x = made(300, 320, block=SQUARE, forms=ROWWISE)
    x[128:256].copy_(BlockwiseFP8Tensor.from_values(torch.ones(128, 320).bfloat16(), SQUARE))
    assert (x.dequantize()[128:256] == 1).all()
    clone = x[128:256].clone()
    assert not storage(clone) & storage(x)


def test_any_rows_of_1x128_blocks_that_hold_no_columnwise_form() -> None:
    x = made(300, 320, block=ROW, forms=ROWWISE)
    for start, stop in ((1, 300), (7, 133), (299, 300)):
        part = x[start:stop]
        assert torch.equal(part.dequantize(), x.dequantize()[start:stop])
        w = quantized(64, 320, block=SQUARE)
        assert torch.equal(F.linear(part, w), F.linear(x, w)[start:stop])


def test_parts_multiply_like_what_they_are() -> None:
    x, w = randn(5, 320), made(300, 320, block=SQUARE, forms=ROWWISE)
    whole = F.linear(x, w)
    for start, stop in ((0, 128), (128, 300)):
        assert torch.equal(F.linear(x, w[start:stop]), whole[:, start:stop])
    data, scale, format = w.rowwise()
    rows = BLOCKS_1X128
    columns = Quantized(data[:, 128:].contiguous(), scale[:, 1:].contiguous(), format)
    left = reference.quantize_rowwise(x[:, 128:], rows)
    wanted = reference.gemm(left, columns, None, x.dtype)
    assert torch.equal(F.linear(x[:, 128:], w[:, 128:]), wanted)
    leaf, grad = x.clone().requires_grad_(), randn(5, 172, seed=3)
    F.linear(leaf, w[128:]).backward(grad)
    below = Quantized(data[128:].t().contiguous(), scale[1:].t().contiguous(), format)
    wanted = reference.gemm(reference.quantize_rowwise(grad, rows), below, None, x.dtype)
    assert torch.equal(leaf.grad, wanted)


@pytest.mark.parametrize("block", [ROW, SQUARE], ids=str)
def test_copies_have_scales_laid_out_as_a_casts_are(block: tuple[int, int]) -> None:
    """Kernels are told their strides; views of rows keep those of the whole."""
    whole = made(300, 1000, block=block, forms=BOTH if block == ROW else ROWWISE)
    columns = whole[:, 512:]
    copies = [(columns, "rowwise"), (torch.cat([whole[:128], whole[128:]]), "rowwise")]
    if block == ROW:
        copies += [(whole[128:], "columnwise"), (torch.cat(whole.split(512, 1), 1), "columnwise")]
    for copy, side in copies:
        data, scale = getattr(copy, f"{side}_data"), getattr(copy, f"{side}_scale")
        wanted = empty_scale(data.shape, copy.format, data.device)
        assert (scale.shape, scale.stride()) == (wanted.shape, wanted.stride())


def test_stacks_and_leading_dimensions() -> None:
    stack = made(3, 200, 130, block=SQUARE, forms=ROWWISE)
    values = stack.dequantize()
    for part, want in (
        (stack[1], values[1]),
        (stack[-1], values[-1]),
        (stack[1:], values[1:]),
        (stack[:, 128:], values[:, 128:]),
        (stack[:, :, :128], values[:, :, :128]),
        (stack.unbind()[2], values[2]),
        (stack.split([1, 2])[1], values[1:]),
    ):
        assert torch.equal(part.dequantize(), want)
        assert storage(part) == storage(stack) or part.shape[-1] == 128
    x = made(4, 64, 200, block=ROW)
    values = x.dequantize()
    for part, want in ((x[2:], values[2:]), (x[:2], values[:2]), (x[..., 128:], values[..., 128:])):
        assert torch.equal(part.dequantize(), want)
    rowwise = made(4, 64, 200, block=ROW, forms=ROWWISE)
    assert torch.equal(rowwise[3].dequantize(), rowwise.dequantize()[3])
    with pytest.raises(ValueError, match="nearest boundaries are 0 and 2"):
        x[1:]


@pytest.mark.parametrize("forms", [BOTH, ROWWISE, COLUMNWISE], ids=["both", "row", "column"])
@pytest.mark.parametrize("block", [ROW, SQUARE], ids=str)
def test_cat_undoes_split(block: tuple[int, int], forms: tuple[bool, bool]) -> None:
    x = made(300, 320, block=block, forms=forms)
    for dim in (0, 1, -1):
        parts = x.split(128, dim)
        whole = torch.cat(parts, dim)
        assert torch.equal(whole.dequantize(), x.dequantize())
        assert_consistent(whole)
        if block == ROW:
            assert_same(whole, x)
        assert not storage(whole) & storage(x)
    turned = torch.cat(x.t().split(128), 0)
    assert torch.equal(turned.dequantize(), x.t().dequantize())
    stack = made(2, 200, 130, block=SQUARE, forms=ROWWISE)
    assert_same(torch.cat([stack[:1], stack[1:]]), stack)


@pytest.mark.parametrize(
    ("cut", "error", "message"),
    [
        (lambda x: x[:100], ValueError, r"a slice of .* \[300, 320\] at index 100 of dimension 0"),
        (lambda x: x[:100], ValueError, "nearest boundaries are 0 and 128"),
        (lambda x: x[:290], ValueError, "nearest boundaries are 256 and 300"),
        (lambda x: x[:, 5:], ValueError, "at index 5 of dimension 1 cuts through a block of 128"),
        (lambda x: x.split(100), ValueError, "split of a BlockwiseFP8Tensor"),
        (lambda x: x.chunk(2), ValueError, "index 150 .* boundaries are 128 and 256"),
        (lambda x: x.split([300, 20]), (ValueError, RuntimeError), "300"),
        (lambda x: x[::2], NotImplementedError, "step 2"),
        (lambda x: x[3], NotImplementedError, r"select\(0, 3\)"),
        (lambda x: torch.cat([x, x]), ValueError, "ends inside a block of 128"),
        (lambda x: torch.cat([x[:128], x[:128, :128]]), ValueError, "cat along 0 of shapes"),
        (lambda x: torch.cat([x, x.dequantize()]), TypeError, "a torch.bfloat16 tensor: expected"),
        (lambda x: torch.cat([x, quantized(300, 320, block=ROW)]), TypeError, "block_shape"),
    ],
)
@pytest.mark.parametrize("forms", [BOTH, ROWWISE, COLUMNWISE], ids=["both", "row", "column"])
def test_cuts_through_blocks_name_the_boundary(
    forms: tuple[bool, bool],
    cut: Callable[[Tensor], Tensor],
    error: type[Exception],
    message: str,
) -> None:
    with pytest.raises(error, match=message):
        cut(made(300, 320, block=SQUARE, forms=forms))


def test_only_parts_of_one_kind_are_joined() -> None:
    x = quantized(256, 256, block=SQUARE)
    others = {
        "dtype": BlockwiseFP8Tensor.from_values(randn(256, 256, dtype=torch.float32), SQUARE),
        "scale rounding": quantized(256, 256, block=SQUARE, recipe=Recipe(scale="power_of_two")),
        "dimensions": quantized(1, 256, 256, block=SQUARE),
        "orientation": x.t(),
    }
    for other in others.values():
        for pair in ([x, other], [other, x]):
            with pytest.raises(TypeError, match="expected BlockwiseFP8Tensors of one block_shape"):
                torch.cat(pair)
    rowwise, both = (made(100, 320, block=ROW, forms=forms) for forms in (ROWWISE, BOTH))
    assert torch.cat([rowwise, rowwise]).shape == (200, 320)
    with pytest.raises(ValueError, match="ends inside a block of 128"):
        torch.cat([both, both])


def test_rows_of_a_transpose_are_joined_with_others() -> None:
    """Whose columns have no zeros after them."""
    turned = BlockwiseFP8Tensor.from_values(randn(129, 1), ROW, rowwise=False).t()
    other = BlockwiseFP8Tensor.from_values(randn(2, 129, seed=5), ROW, columnwise=False)
    assert turned.rowwise_data.shape[1] != other.rowwise_data.shape[1]
    joined = torch.cat([turned, other])
    assert torch.equal(joined.dequantize(), torch.cat([turned.dequantize(), other.dequantize()]))
    assert joined.rowwise_data.shape == (3, 129)


def test_no_rows_after_the_last_one_have_no_columnwise_data() -> None:
    """Not even the zeros after it."""
    nothing = made(300, 320, block=ROW)[300:]
    assert nothing.columnwise_data.shape == (320, 0)
    assert nothing.dequantize().shape == (0, 320)
