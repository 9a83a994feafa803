"""Parts of BlockwiseFP8Tensors and wholes of parts: values, bytes, aliasing, refusals."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from blocktensor import BlockwiseFP8Tensor, Recipe
from blocktensor.ops import reference
from blocktensor.ops.formats import BLOCKS_1X128, Quantized
from blocktensor.ops.scale_layouts import empty_scale
from tests.support.compiling import fresh
from tests.support.groups import ends
from tests.support.models import ROW, SQUARE, assert_same, inner, quantized, randn

FORMS = {"both": (True, True), "rowwise": (True, False), "columnwise": (False, True)}
BOTH, ROWWISE, COLUMNWISE = FORMS.values()
every_form = pytest.mark.parametrize("forms", FORMS.values(), ids=FORMS)
every_block = pytest.mark.parametrize("block", [ROW, SQUARE], ids=str)


def made(
    *shape: int, block: tuple[int, int], forms: tuple[bool, bool] = BOTH
) -> BlockwiseFP8Tensor:
    """Cast these forms; of squares, which have no columnwise cast, derive the columnwise one."""
    if block == ROW:
        return quantized(*shape, rowwise=forms[0], columnwise=forms[1])
    square = quantized(*shape, block=SQUARE)
    if forms == ROWWISE:
        return square
    rowwise = square.rowwise() if forms == BOTH else None
    return BlockwiseFP8Tensor(rowwise, square.columnwise(), shape=shape, dtype=square.dtype)


def assert_consistent(x: BlockwiseFP8Tensor) -> None:
    """Both forms hold the same kind of tensor that a cast of this shape would have."""
    like = inner(quantized(*x.shape, block=x.block_shape))
    for name, part in inner(x).items():
        assert name not in like or part.shape == like[name].shape, name
    for each in (x, x.rowwise_data, x.columnwise_data):
        assert each is None or each.is_contiguous()


def storage(x: BlockwiseFP8Tensor) -> set[int]:
    return {part.untyped_storage().data_ptr() for part in inner(x).values()}


CUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "first rows": lambda x: x[:128],
    "last rows": lambda x: x[256:],
    "middle rows": lambda x: x[128:256],
    "from the end": lambda x: x[-44:],
    "no rows": lambda x: x[256:128],
    "first columns": lambda x: x[:, :256],
    "last columns": lambda x: x[:, 128:],
    "rows and columns": lambda x: x[128:, :128],
    "narrow": lambda x: x.narrow(0, 128, 128),
    "all": lambda x: x[:],
    "split": lambda x: x.split(128)[1],
    "split in sizes": lambda x: x.split([256, 44])[1],
    "split columns": lambda x: torch.split(x, 128, dim=1)[2],
    "chunk": lambda x: x[:256].chunk(2)[1],
    "torch.chunk": lambda x: torch.chunk(x[:256], 2)[1],
    "torch.chunk columns": lambda x: torch.chunk(x[:, :256], 2, dim=1)[0],
    "of the transpose": lambda x: x.t()[128:256].t(),
}


@pytest.mark.parametrize("cut", CUTS)
@every_block
@every_form
def test_a_part_has_the_values_of_the_whole(block: Any, forms: Any, cut: str) -> None:
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
        rows = x[128:256]
        assert storage(rows) == storage(x[:]) == storage(x)
        assert rows.rowwise_data.data_ptr() == x.rowwise_data.data_ptr() + 128 * 320
        assert not {x[:, 128:256].rowwise_data.untyped_storage().data_ptr()} & storage(x)
        assert not storage(rows.clone()) & storage(x)
    square = made(300, 320, block=SQUARE)
    assert storage(square[:, 128:]) <= storage(square)  # the rows of its columnwise form
    x[128:256].copy_(BlockwiseFP8Tensor.from_values(torch.ones(128, 320).bfloat16(), SQUARE))
    assert (x.dequantize()[128:256] == 1).all()


@every_block
def test_copied_columns_keep_their_values(block: tuple[int, int]) -> None:
    """Their scales are copies too: old bytes with new scales would be neither value."""
    x, other = (made(256, 256, block=block, forms=ROWWISE) for _ in range(2))
    part = x[:, :128]
    before = part.dequantize()
    x.copy_(BlockwiseFP8Tensor.from_values(64 * other.dequantize(), block, columnwise=False))
    assert torch.equal(part.dequantize(), before)


def test_copied_columns_are_inputs_of_graphs() -> None:
    part, x = made(256, 256, block=SQUARE, forms=ROWWISE)[:, 128:], randn(3, 128)
    with fresh():
        run = torch.compile(F.linear, backend="aot_eager")
        assert torch.equal(run(x, part), F.linear(x, part))


def test_no_write_to_a_part_leaves_old_bytes_behind() -> None:
    """Columns are copies, or views of one of two forms; so are rows of a tensor in two forms."""
    alone, both = made(256, 256, block=SQUARE, forms=ROWWISE), made(256, 256, block=SQUARE)
    stack = BlockwiseFP8Tensor.from_values(randn(2, 256, 256), SQUARE)
    source = BlockwiseFP8Tensor.from_values(torch.ones(256, 256).bfloat16(), SQUARE)
    parts = [
        (alone, alone[:, :128], source[:, 128:]),
        *((both, both[at], source[at]) for at in [slice(128), (slice(None), slice(128))]),
        (stack, stack[0][:, :128], source[:, :128]),
        (stack, stack[:, :, 128:], stack[:, :, :128]),
    ]
    for x, part, ones in parts:
        before = [form and form.data.clone() for form in x.operand], x.dequantize()
        with pytest.raises(NotImplementedError, match="keep old values; copy into the whole"):
            part.copy_(ones)
        assert torch.equal(x.dequantize(), before[1])
        for form, data in zip(x.operand, before[0], strict=True):
            assert form is None or torch.equal(form.data.view(torch.uint8), data.view(torch.uint8))
    stack[0].copy_(source)
    assert (stack[0].dequantize() == 1).all()


def test_any_rows_of_1x128_blocks_that_hold_no_columnwise_form() -> None:
    x, w = made(300, 320, block=ROW, forms=ROWWISE), quantized(64, 320, block=SQUARE)
    for start, stop in ((1, 300), (7, 133), (299, 300)):
        part = x[start:stop]
        assert torch.equal(part.dequantize(), x.dequantize()[start:stop])
        assert torch.equal(F.linear(part, w), F.linear(x, w)[start:stop])


def test_parts_multiply_like_what_they_are() -> None:
    x, w = randn(5, 320, grad=True), made(300, 320, block=SQUARE, forms=ROWWISE)
    whole = F.linear(x, w)
    for start, stop in ((0, 128), (128, 300)):
        assert torch.equal(F.linear(x, w[start:stop]), whole[:, start:stop])

    def product(left: Tensor, data: Tensor, scale: Tensor) -> Tensor:
        right = Quantized(data.contiguous(), scale.contiguous(), w.format)
        return reference.gemm(reference.quantize_rowwise(left, BLOCKS_1X128), right, None, x.dtype)

    data, scale, _ = w.rowwise()
    wanted = product(x[:, 128:], data[:, 128:], scale[:, 1:])
    assert torch.equal(F.linear(x[:, 128:], w[:, 128:]), wanted)
    grad = randn(5, 172, seed=3)
    F.linear(x, w[128:]).backward(grad)
    assert torch.equal(x.grad, product(grad, data[128:].t(), scale[1:].t()))


@every_block
def test_copies_have_scales_laid_out_as_a_casts_are(block: tuple[int, int]) -> None:
    """Kernels are told their strides; views of rows keep those of the whole."""
    whole = made(300, 1000, block=block, forms=BOTH if block == ROW else ROWWISE)
    copies = [(whole[:, 512:], "rowwise"), (torch.cat([whole[:128], whole[128:]]), "rowwise")]
    if block == ROW:
        copies += [(whole[128:], "columnwise"), (torch.cat(whole.split(512, 1), 1), "columnwise")]
    for copy, side in copies:
        data, scale = getattr(copy, f"{side}_data"), getattr(copy, f"{side}_scale")
        wanted = empty_scale(data.shape, copy.format, data.device)
        assert (scale.shape, scale.stride()) == (wanted.shape, wanted.stride())


def test_stacks_and_leading_dimensions() -> None:
    stack = made(3, 200, 130, block=SQUARE, forms=ROWWISE)
    parts: list[Callable[[Tensor], Tensor]] = [
        lambda x: x[1],
        lambda x: x[-1],
        lambda x: x[1:],
        lambda x: x[:, 128:],
        lambda x: x[:, :, :128],
        lambda x: x.unbind()[2],
        lambda x: x.split([1, 2])[1],
    ]
    for cut in parts:
        part = cut(stack)
        assert torch.equal(part.dequantize(), cut(stack.dequantize()))
        assert storage(part) == storage(stack) or part.shape[-1] == 128
    x = made(4, 64, 200, block=ROW)
    for cut in (lambda x: x[2:], lambda x: x[:2], lambda x: x[..., 128:]):
        assert torch.equal(cut(x).dequantize(), cut(x.dequantize()))
    rowwise = made(4, 64, 200, block=ROW, forms=ROWWISE)
    assert torch.equal(rowwise[3].dequantize(), rowwise.dequantize()[3])
    with pytest.raises(ValueError, match="nearest boundaries are 0 and 2"):
        x[1:]
    for refused, error, message in (
        (lambda: x[:, 1:], NotImplementedError, "a slice along dimension 1 of a BlockwiseFP8Tens"),
        (lambda: stack.select(1, 0), NotImplementedError, r"select\(1, 0\) of a BlockwiseFP8T"),
        (lambda: stack.select(0, 3), IndexError, "index 3 of a dimension of 3"),
    ):
        with pytest.raises(error, match=message):
            refused()


def test_rows_of_every_matrix_of_a_stack_multiply() -> None:
    """Forward and backward: they do not lie one after the other."""
    part, offs = made(3, 200, 144, block=SQUARE, forms=ROWWISE)[:, 128:], ends(10, 0, 20)
    assert not part.rowwise_data.is_contiguous()
    made_of = []
    for w in (part, part.clone()):
        x, grad = randn(30, 144, seed=1).requires_grad_(), randn(30, 72, seed=2)
        y = F.grouped_mm(x, w.transpose(1, 2), offs=offs)
        y.backward(grad)
        made_of.append((y, x.grad, F.grouped_mm(grad, w, offs=offs)))
    for got, wanted in zip(*made_of, strict=True):
        assert torch.equal(got, wanted)


@every_block
@every_form
def test_cat_undoes_split(block: tuple[int, int], forms: tuple[bool, bool]) -> None:
    x = made(300, 320, block=block, forms=forms)
    for dim in (0, 1, -1):
        whole = torch.cat(x.split(128, dim), dim)
        assert torch.equal(whole.dequantize(), x.dequantize())
        assert_consistent(whole)
        if block == ROW:
            assert_same(whole, x)
        assert not storage(whole) & storage(x)
    assert torch.equal(torch.cat(x.t().split(128), 0).dequantize(), x.t().dequantize())
    stack = made(2, 200, 130, block=SQUARE, forms=ROWWISE)
    assert_same(torch.cat([stack[:1], stack[1:]]), stack)


@pytest.mark.parametrize("dim", [0, -3])
def test_matrices_become_a_stack(dim: int) -> None:
    stack = made(2, 200, 130, block=SQUARE, forms=ROWWISE)
    assert_same(torch.stack([*stack], dim), stack)
    turned = torch.stack([matrix.t() for matrix in stack], dim)
    assert torch.equal(turned.dequantize(), stack.mT.dequantize())


@pytest.mark.parametrize(
    ("cut", "error", "message"),
    [
        (lambda x: x[:100], ValueError, r"a slice of .* \[300, 320\] at index 100 of dimension 0"),
        (lambda x: x[:100], ValueError, "nearest boundaries are 0 and 128"),
        (lambda x: x[:290], ValueError, "nearest boundaries are 256 and 300"),
        (lambda x: x[:, 5:], ValueError, "at index 5 of dimension 1 cuts through a block of 128"),
        (lambda x: x.split(100), ValueError, "split of a BlockwiseFP8Tensor"),
        (lambda x: x.chunk(2), ValueError, "index 150 .* boundaries are 128 and 256"),
        (lambda x: x.split([128, 128]), (ValueError, RuntimeError), "300"),
        (lambda x: x[::2], NotImplementedError, "step 2"),
        (lambda x: x[3], NotImplementedError, r"select\(0, 3\)"),
        (lambda x: x.split(0), ValueError, "split into parts of 0: expected at least 1"),
        (lambda x: x.split(128, 2), IndexError, "split: dimension 2 of a tensor with 2"),
        (lambda x: torch.cat([x, x]), ValueError, "ends inside a block of 128"),
        (lambda x: torch.cat([x[:128], x[:128, :128]]), ValueError, "cat along 0 of shapes"),
        (lambda x: torch.cat([x, x.dequantize()]), TypeError, "a torch.bfloat16 tensor: expected"),
        (lambda x: torch.cat([x, quantized(300, 320, block=ROW)]), TypeError, "block_shape"),
    ],
)
@every_form
def test_cuts_through_blocks_name_the_boundary(
    forms: tuple[bool, bool], cut: Callable[[Tensor], Tensor], error: type[Exception], message: str
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


def test_rows_are_joined_at_any_row_where_they_hold_no_columnwise_form() -> None:
    rowwise, both = (made(100, 320, block=ROW, forms=forms) for forms in (ROWWISE, BOTH))
    assert torch.cat([rowwise, rowwise]).shape == (200, 320)
    with pytest.raises(ValueError, match="hold no form in common"):
        torch.cat([rowwise[:0], made(100, 320, block=ROW, forms=COLUMNWISE)])
    for part, dim in ((both, 0), (both, 1), (rowwise, 1)):
        with pytest.raises(ValueError, match="ends inside a block of 128"):
            torch.cat([part, part], dim)
    # Those of a transpose have no zeros after their columns, which others have.
    turned = BlockwiseFP8Tensor.from_values(randn(129, 1), ROW, rowwise=False).t()
    other = BlockwiseFP8Tensor.from_values(randn(2, 129, seed=5), ROW, columnwise=False)
    assert turned.rowwise_data.shape[1] != other.rowwise_data.shape[1]
    joined = torch.cat([turned, other])
    assert torch.equal(joined.dequantize(), torch.cat([turned.dequantize(), other.dequantize()]))
    assert joined.rowwise_data.shape == (3, 129)


def test_no_rows_after_the_last_one_have_no_columnwise_data() -> None:
    nothing = made(300, 320, block=ROW)[300:]
    assert (nothing.columnwise_data.shape, nothing.dequantize().shape) == ((320, 0), (0, 320))
