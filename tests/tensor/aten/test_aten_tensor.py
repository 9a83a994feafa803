"""Ops that keep a BlockwiseFP8Tensor in FP8: views of its bytes, copies, rows picked by index."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from torch import Tensor, nn

from blocktensor import BlockwiseFP8Tensor, Recipe, quantize
from blocktensor.ops import reference
from tests.support.models import (
    POWER_OF_TWO,
    RECIPES,
    ROW,
    SQUARE,
    assert_same,
    assert_same_bytes,
    complaint,
    inner,
    pointers,
    quantized,
    randn,
)

# Views


TRANSPOSES: dict[str, Callable[[Tensor], Tensor]] = {
    "t": lambda x: x.t(),
    "T": lambda x: x.T,
    "mT": lambda x: x.mT,
    "transpose": lambda x: x.transpose(0, 1),
    "transpose(-1, -2)": lambda x: x.transpose(-1, -2),
    "permute": lambda x: x.permute(1, 0),
    "adjoint": lambda x: x.adjoint(),
}


@pytest.mark.parametrize("name", TRANSPOSES)
@pytest.mark.parametrize("block", [ROW, SQUARE])
def test_transposing_swaps_the_labels(block: tuple[int, int], name: str) -> None:
    x = quantized(200, 300, block=block)
    flipped = TRANSPOSES[name](x)
    assert (tuple(flipped.shape), flipped.stride()) == ((300, 200), (1, 300))
    swapped = {"rowwise": "columnwise", "columnwise": "rowwise"}
    assert pointers(flipped) == {
        f"{swapped[side]}_{kind}": pointer
        for (side, kind), pointer in ((k.split("_"), p) for k, p in pointers(x).items())
    }
    back = TRANSPOSES[name](flipped)
    assert_same(back, x)
    assert pointers(back) == pointers(x)
    if block == SQUARE:
        assert torch.equal(flipped.dequantize(), x.dequantize().t())


def test_transposing_a_stack() -> None:
    x = quantized(3, 200, 130, block=SQUARE)
    assert tuple(x.mT.shape) == (3, 130, 200)
    assert torch.equal(x.mT.dequantize(), x.dequantize().mT)
    assert_same(x.transpose(1, 2).permute(0, 2, 1), x)
    for bad in (lambda: x.t(), lambda: x.transpose(0, 1), lambda: x.permute(2, 1, 0)):
        with pytest.raises((NotImplementedError, RuntimeError)):
            bad()


@pytest.mark.parametrize("shape", [(2, 3, 200), (6, 200), (3, 2, 1, 200), (-1, 200), (1, -1, 200)])
def test_views_of_leading_dimensions(shape: tuple[int, ...]) -> None:
    x = quantized(6, 200)
    for y in (x.view(shape), x.reshape(shape)):
        assert_same(y, BlockwiseFP8Tensor.from_values(randn(6, 200).view(shape)))
        assert pointers(y) == pointers(x)
    assert_same(x.view(shape).flatten(0, -2), x)


@pytest.mark.parametrize("block", [ROW, SQUARE])
def test_detach_and_alias_share_bytes(block: tuple[int, int]) -> None:
    x = quantized(200, 300, block=block).requires_grad_()
    for y in (x.detach(), x.data, torch.ops.aten.alias(x), x.contiguous(), nn.Parameter(x)):
        assert_same(y.detach(), x.detach())
        assert pointers(y) == pointers(x)
    assert not x.detach().requires_grad
    for y in (x.t().detach(), x.t().data, x.detach().t(), torch.ops.aten.alias(x.t())):
        assert_same(y.detach(), x.detach().t())
        assert not y.is_contiguous()


@pytest.mark.parametrize(
    "run",
    [
        lambda x: x.view(-1),
        lambda x: x.view(2, 512),
        lambda x: x.flatten(),
        lambda x: x.t().view(256, 2, 2),
        lambda x: x.t().view(2, 128, 4),
        lambda x: BlockwiseFP8Tensor.from_values(x.dequantize(), SQUARE).view(2, 2, 256),
        lambda x: x.view(2, 2, 256).transpose(0, 1),
        lambda x: x.view(2, 2, 256).mT,
        lambda x: x.view(2, 2, 256).permute(2, 0, 1),
    ],
)
def test_reshapes_that_move_blocks_are_refused(run: Callable[[Tensor], Any]) -> None:
    assert ".dequantize()" in complaint(
        NotImplementedError, lambda: run(BlockwiseFP8Tensor.from_values(randn(4, 256)))
    )


@pytest.mark.parametrize("tokens", [1, 127, 128, 129])
def test_products_of_a_transpose_contract_any_number_of_tokens(tokens: int) -> None:
    """Its columnwise form, now rowwise, has zeros after them; other operands need not have any."""
    g, x = quantized(tokens, 40), quantized(tokens, 24)
    weight = quantized(tokens, 24, block=SQUARE)
    a = reference.dequantize(g.t().rowwise(), torch.float32)[:, :tokens]
    for other in (x, weight):
        b = reference.dequantize(other.columnwise(), torch.float32)[:, :tokens]
        torch.testing.assert_close(torch.mm(g.t(), other).float(), a @ b.t(), rtol=0.01, atol=0.01)
    assert torch.equal(g.t().dequantize(torch.float32), a)


# Copies


@pytest.mark.parametrize("copier", [torch.clone, copy.deepcopy, lambda x: x.to(x.dtype, copy=True)])
@pytest.mark.parametrize("shape", [(5, 200), (2, 3, 200), (3, 200, 130), (0, 7)])
@pytest.mark.parametrize("block", [ROW, SQUARE])
@pytest.mark.parametrize("transposed", [False, True])
def test_copies_are_equal_and_share_nothing(
    copier: Callable[[Tensor], Tensor],
    shape: tuple[int, ...],
    block: tuple[int, int],
    transposed: bool,
    device: torch.device,
) -> None:
    if block == SQUARE and len(shape) == 3 and shape[0] == 2:
        pytest.skip("the same as [3, 200, 130]")
    x = quantized(*shape, block=block, device=device)
    if transposed and not (block == ROW and len(shape) == 3):
        x = x.mT
    y = copier(x)
    assert_same(y, x)
    for name, tensor in inner(y).items():
        original = getattr(x, name)
        assert tensor.stride() == original.stride()
        if tensor.numel():
            assert tensor.untyped_storage().data_ptr() != original.untyped_storage().data_ptr()


@pytest.mark.parametrize("block", [ROW, SQUARE])
def test_empty_like_has_the_layout_of_its_model(block: tuple[int, int]) -> None:
    x = quantized(201, 301, block=block)
    y = torch.empty_like(x)
    assert inner(y).keys() == inner(x).keys()
    for name, tensor in inner(y).items():
        original = getattr(x, name)
        assert (tensor.shape, tensor.stride()) == (original.shape, original.stride())
        assert tensor.data_ptr() != original.data_ptr()
    y.copy_(x)
    assert_same(y, x)
    meta = torch.empty_like(x, device="meta", dtype=torch.float16)
    assert (meta.device.type, meta.dtype) == ("meta", torch.float16)
    assert {t.device.type for t in inner(meta).values()} == {"meta"}


@pytest.mark.parametrize("block", [ROW, SQUARE])
def test_copy_writes_the_forms_of_the_target(block: tuple[int, int]) -> None:
    target, source = quantized(200, 300, block=block), BlockwiseFP8Tensor.from_values(
        randn(200, 300, seed=7), block
    )  # fmt: skip
    before = pointers(target)
    assert target.copy_(source) is target
    assert_same(target, source)
    assert pointers(target) == before
    if block == SQUARE:  # a target that holds the other form derives it
        flipped = torch.empty_like(source.t())
        flipped.copy_(BlockwiseFP8Tensor.from_values(randn(200, 300, seed=7).t(), block))
        assert_same(flipped, source.t())


def test_copies_between_a_transpose_and_a_cast_of_its_own() -> None:
    """One has zeros after its columns where the other has none."""
    x = randn(129, 300)
    plain, turned = quantized(129, 300), BlockwiseFP8Tensor.from_values(x.t().contiguous(), ROW).t()
    assert plain.rowwise_data.shape != turned.rowwise_data.shape
    for target in (torch.empty_like(plain), torch.empty_like(turned)):  # NaN in tests
        for source in (plain, turned):
            target.copy_(source)
            assert torch.equal(target.dequantize(), source.dequantize())
            flipped = target.t().dequantize()
            assert torch.equal(flipped, source.t().dequantize())
            w = quantized(64, 300, block=SQUARE)
            y = torch.nn.functional.linear(target, w)
            assert torch.equal(y, torch.nn.functional.linear(source, w))
            assert y.isfinite().all()


@pytest.mark.parametrize(
    "source",
    [
        lambda: quantized(200, 301),
        lambda: quantized(200, 300, block=SQUARE),
        lambda: quantized(200, 300, recipe=POWER_OF_TWO),
    ],
)
def test_copy_of_another_kind_is_refused(source: Callable[[], Tensor]) -> None:
    target = quantized(200, 300)
    before = target.dequantize()
    assert "one shape, block_shape and scale rounding" in complaint(
        ValueError, lambda: target.copy_(source())
    ).replace("\n", " ")
    assert torch.equal(target.dequantize(), before)


def test_to_another_dtype_changes_the_label_only(device: torch.device) -> None:
    x = quantized(5, 200, device=device)
    for y, dtype in ((x.half(), torch.float16), (x.to(torch.float32), torch.float32)):
        assert y.dtype == dtype
        assert torch.equal(y.dequantize(), x.dequantize(dtype))
        for name, tensor in inner(y).items():
            assert_same_bytes(tensor, getattr(x, name))
    for bad in (torch.float64, torch.int32, torch.float8_e4m3fn):
        assert "expected torch.bfloat16" in complaint(TypeError, lambda d=bad: x.to(d))


@pytest.mark.gpu
@pytest.mark.parametrize("block", [ROW, SQUARE])
def test_to_and_from_the_gpu(block: tuple[int, int]) -> None:
    x = quantized(201, 301, block=block)
    there = x.cuda()
    assert there.device.type == "cuda"
    assert {t.device.type for t in inner(there).values()} == {"cuda"}
    assert_same(there, quantized(201, 301, block=block, device="cuda"))
    assert_same(there.cpu(), x)
    assert_same(x.to("cuda", torch.float16, non_blocking=True).to("cpu", torch.bfloat16), x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("shape", [(200, 300), (3, 200, 130)])
@pytest.mark.parametrize("transposed", [False, True])
def test_a_plain_tensor_takes_the_values_of_a_weight(
    shape: tuple[int, ...], dtype: torch.dtype, transposed: bool
) -> None:
    """Every value fits fp32; wider than it, and in other dtypes, they are those of the weight."""
    x = quantized(*shape, block=SQUARE)
    x = x.mT if transposed else x
    target = torch.empty(x.shape, dtype=dtype)
    assert target.copy_(x) is target
    assert torch.equal(target, x.dequantize(torch.bfloat16 if dtype.itemsize == 8 else dtype))
    with pytest.raises(RuntimeError, match="size"):
        torch.empty(7, 7).copy_(x)


# Rows by index


T, K = 70, 200
ORDER = torch.randperm(T, generator=torch.Generator().manual_seed(0))
SOME = torch.tensor([3, 3, 0, -1, 69])

PICKS: dict[str, Callable[[Tensor], Tensor]] = {
    "a permutation": lambda x: x[ORDER],
    "and all columns": lambda x: x[ORDER, :],
    "index_select": lambda x: x.index_select(0, ORDER),
    "int32": lambda x: x.index_select(-2, ORDER.int()),
    "repeated, from the end": lambda x: x[SOME],
    "a mask": lambda x: x[torch.arange(T) % 3 == 1],
    "a list": lambda x: x[[0, 2]],
    "none": lambda x: x[ORDER[:0]],
}


@pytest.mark.parametrize("pick", PICKS)
def test_picked_rows_are_the_cast_of_picked_rows(pick: str) -> None:
    for recipe in RECIPES:
        x = randn(T, K)
        got = PICKS[pick](BlockwiseFP8Tensor.from_values(x, recipe=recipe, columnwise=False))
        wanted = BlockwiseFP8Tensor.from_values(PICKS[pick](x), recipe=recipe, columnwise=False)
        assert type(got) is BlockwiseFP8Tensor
        assert (got.shape, got.dtype, got.recipe) == (wanted.shape, wanted.dtype, recipe)
        assert_same_bytes(got.rowwise_data, wanted.rowwise_data)
        assert_same_bytes(got.rowwise_scale, wanted.rowwise_scale)
        assert got.rowwise_scale.stride() == wanted.rowwise_scale.stride()
        assert_same_bytes(got.dequantize(), wanted.dequantize())


def test_gradients_are_those_of_plain_rows() -> None:
    plain, x = (randn(T, K, grad=True) for _ in range(2))
    fp8 = quantize(x)
    rows = BlockwiseFP8Tensor(fp8.operand.rowwise, shape=fp8.shape, dtype=fp8.dtype)
    rows.requires_grad_()
    grad = randn(T, K, seed=1)
    rows[ORDER].backward(grad)
    plain[ORDER].backward(grad)
    assert rows.grad is not None
    assert plain.grad is not None
    assert torch.equal(rows.grad, plain.grad)


REFUSED: dict[str, Callable[[BlockwiseFP8Tensor], Tensor]] = {
    "columns": lambda x: x[:, ORDER],
    "columns, selected": lambda x: x.index_select(1, ORDER),
    "values": lambda x: x[SOME, SOME],
    "a matrix of indices": lambda x: x[ORDER.view(7, 10)],
    "gather": lambda x: x.gather(0, ORDER[:, None]),
}


@pytest.mark.parametrize("way", REFUSED)
def test_other_indices_are_refused(way: str) -> None:
    x = BlockwiseFP8Tensor.from_values(randn(T, K), recipe=POWER_OF_TWO, columnwise=False)
    text = complaint(NotImplementedError, lambda: REFUSED[way](x))
    assert "call .dequantize() first" in text.replace("\n", " ")


def test_rows_whose_columnwise_form_would_be_lost_are_refused() -> None:
    x = quantize(randn(4, 128))
    assert_expected_inline(
        complaint(NotImplementedError, lambda: x[torch.tensor([1])]),
        """\
aten.index.Tensor of BlockwiseFP8Tensor(shape=[4, 128], dtype=torch.bfloat16,
block_shape=(1, 128), scale='fp32', forms=rowwise+columnwise, device='cpu'), whose
columnwise blocks hold several rows each: index the tensor that it was cast from, or
.dequantize(), or cast rowwise alone (BlockwiseFP8Tensor.from_values(x,
columnwise=False))""",
    )


def test_a_copy_knows_when_the_source_of_its_source_changed() -> None:
    recipe = Recipe(wgrad_input="high_precision")
    values, others = randn(4, 256), randn(4, 256, seed=1)
    target, source = quantize(values, recipe), quantize(others, recipe)
    target.copy_(source)
    assert target.unchanged_source().data_ptr() == others.data_ptr()
    values.add_(1)  # the target does not read these any more
    target.unchanged_source()
    others.add_(1)
    with pytest.raises(RuntimeError, match="was changed in place since"):
        target.unchanged_source()
