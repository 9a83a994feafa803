"""Ops that keep a BlockwiseFP8Tensor in FP8: views of its bytes, copies."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from expecttest import assert_expected_inline
from torch import Tensor, nn

from blocktensor import BlockwiseFP8Tensor, BlockwiseFP8Weight, convert, quantize, unfreeze
from blocktensor.ops import reference
from tests.support.linear_ways import HIGH
from tests.support.models import (
    POWER_OF_TWO,
    ROW,
    SQUARE,
    assert_same,
    complaint,
    in_a_layer,
    inner,
    linear,
    pointers,
    quantized,
    randn,
)

TRANSPOSES: dict[str, Callable[[Tensor], Tensor]] = {
    "t": lambda x: x.t(),
    "T": lambda x: x.T,
    "mT": lambda x: x.mT,
    "transpose": lambda x: x.transpose(0, 1),
    "transpose(-1, -2)": lambda x: x.transpose(-1, -2),
    "permute": lambda x: x.permute(1, 0),
    "adjoint": lambda x: x.adjoint(),
}
every_block = pytest.mark.parametrize("block", [ROW, SQUARE], ids=str)


@pytest.mark.parametrize("name", TRANSPOSES)
@every_block
def test_transposing_swaps_the_labels(block: tuple[int, int], name: str) -> None:
    x = quantized(200, 300, block=block)
    flipped = TRANSPOSES[name](x)
    assert (tuple(flipped.shape), flipped.stride()) == ((300, 200), (1, 300))
    for side, other in (("rowwise", "columnwise"), ("columnwise", "rowwise")):
        for part in ("data", "scale"):
            assert getattr(flipped, f"{side}_{part}") is getattr(x, f"{other}_{part}")
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
    for outside in (
        lambda: x.transpose(0, 3),
        lambda: x.permute(0, 1, 5),
        lambda: x.permute(-4, 1, 2),
    ):
        with pytest.raises(IndexError, match="Dimension out of range"):
            outside()


@pytest.mark.parametrize("shape", [(2, 3, 200), (6, 200), (3, 2, 1, 200), (-1, 200), (1, -1, 200)])
def test_views_of_leading_dimensions(shape: tuple[int, ...]) -> None:
    x = quantized(6, 200)
    for y in (x.view(shape), x.reshape(shape)):
        assert_same(y, BlockwiseFP8Tensor.from_values(randn(6, 200).view(shape)))
        assert pointers(y) == pointers(x)
    assert_same(x.view(shape).flatten(0, -2), x)
    for bad in ((5, 7), (-1, 0)):
        with pytest.raises(ValueError, match="is invalid for a tensor of 1200 elements"):
            x.view(bad)


@pytest.mark.parametrize(
    ("shape", "other"),
    [
        ((384, 200), (3, 128, 200)),
        ((512, 16), (2, 256, 16)),
        ((130, 200), (1, 130, 200)),
        ((2, 256, 130), (4, 128, 130)),
        ((1, 300, 7), (300, 7)),
        ((3, 0, 7), (0, 7)),
        ((256, 0), (2, 128, 0)),
    ],
)
def test_rows_of_a_weight_become_a_stack(shape: tuple[int, ...], other: tuple[int, ...]) -> None:
    values, x = randn(*shape), quantized(*shape, block=SQUARE)
    for y in (x.view(other), x.reshape(other), x.view(other).view(shape).view(other)):
        assert_same(y, BlockwiseFP8Tensor.from_values(values.view(other), SQUARE))
        assert pointers(y) == pointers(x)
    columnwise = BlockwiseFP8Tensor.from_values(values.mT, SQUARE).mT
    assert torch.equal(columnwise.reshape(other).dequantize(), x.dequantize().view(other))


def test_a_stack_of_one_matrix() -> None:
    w = quantized(130, 200, block=SQUARE)
    assert_same(w[None], w.view(1, 130, 200))
    assert_same(w.unsqueeze(-3).flatten(0, 1), w)
    assert_same(w[None][0], w)


def test_views_of_a_weight_that_cut_blocks_say_what_works() -> None:
    module = nn.Linear(200, 384, bias=False)
    convert(module.requires_grad_(False), skip_small=False)
    assert_expected_inline(
        complaint(NotImplementedError, lambda: module.weight.view(2, -1, 200)),
        """\
cannot view an FP8 weight [384, 200] without a master, in blocks of (128, 128), as
[2, 192, 200]: its rows can become the rows of matrices [N, K] of a stack [E, N, K]
where N is a multiple of 128. To view it otherwise, call
blocktensor.unfreeze(module) before any fully_shard: views of a weight with a master
have blocks of their own. Or call .dequantize() first""",
    )
    unfreeze(module)
    assert module.weight.view(2, -1, 200)[1].dequantize().shape == (192, 200)
    for view in (
        lambda w: w.view(3, 128, 2, 100),
        lambda w: w.view(768, 100),
        lambda w: w.view(4, 96, 200),
        lambda w: w.view(1, 3, 128, 200),
        lambda w: w.view(1, 384, 200).view(4, 96, 200),
        lambda w: w.t().reshape(200, 3, 128),
        lambda w: w.unsqueeze(1),
    ):
        assert ".dequantize()" in complaint(
            NotImplementedError, lambda view=view: view(quantized(384, 200, block=SQUARE))
        )


@every_block
def test_detach_and_alias_share_bytes(block: tuple[int, int]) -> None:
    x = quantized(200, 300, block=block).requires_grad_()
    alias = torch.ops.aten.alias(x)
    for y in (x.detach(), x.data, alias, x.contiguous(), nn.Parameter(x), x.transpose(1, -1)):
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
        lambda x: x.as_strided((4, 256), (256, 1), 1),
    ],
)
def test_reshapes_that_move_blocks_are_refused(run: Callable[[Tensor], Any]) -> None:
    assert ".dequantize()" in complaint(NotImplementedError, lambda: run(quantized(4, 256)))


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


COPIED = [
    *((ROW, shape) for shape in ((5, 200), (2, 3, 200), (3, 200, 130), (0, 7))),
    *((SQUARE, shape) for shape in ((5, 200), (3, 200, 130), (0, 7))),
]


def pinned(x: Any) -> Any:
    """Pin, with copies in the place of torch's op, which needs a GPU."""
    assert x.is_pinned() is False

    def strided_copy(part: Tensor) -> Tensor:
        return torch.empty_strided(part.shape, part.stride(), dtype=part.dtype).copy_(part)

    return x._ops[torch.ops.aten._pin_memory.default](strided_copy, x)


@pytest.mark.parametrize(
    "copier", [torch.clone, copy.deepcopy, lambda x: x.to(x.dtype, copy=True), pinned]
)
@pytest.mark.parametrize(("block", "shape"), COPIED)
@pytest.mark.parametrize("transposed", [False, True])
def test_copies_are_equal_and_share_nothing(
    copier: Callable[[Tensor], Tensor],
    block: tuple[int, int],
    shape: tuple[int, ...],
    transposed: bool,
    device: torch.device,
) -> None:
    x = quantized(*shape, block=block, device=device)
    if transposed and (block == SQUARE or len(shape) == 2):
        x = x.mT
    y = copier(x)
    assert_same(y, x)
    for name, tensor in inner(y).items():
        original = getattr(x, name)
        assert tensor.stride() == original.stride()
        if tensor.numel():
            assert tensor.untyped_storage().data_ptr() != original.untyped_storage().data_ptr()


def test_a_pinned_copy_of_a_trainable_weight_is_a_weight() -> None:
    w = linear(200, 130).weight
    copied = pinned(w)
    assert type(copied) is BlockwiseFP8Weight
    assert torch.equal(copied.master, w.master)
    assert copied.master.data_ptr() != w.master.data_ptr()


@every_block
def test_empty_like_has_the_layout_of_its_model(block: tuple[int, int]) -> None:
    x = quantized(201, 301, block=block)
    y = torch.empty_like(x)
    assert inner(y).keys() == inner(x).keys()
    for name, tensor in inner(y).items():
        original = getattr(x, name)
        assert (tensor.shape, tensor.stride()) == (original.shape, original.stride())
        assert tensor.data_ptr() != original.data_ptr()
    meta = torch.empty_like(x, device="meta", dtype=torch.float16)
    assert (meta.device.type, meta.dtype) == ("meta", torch.float16)
    assert {t.device.type for t in inner(meta).values()} == {"meta"}


@every_block
def test_copy_writes_the_forms_of_the_target(block: tuple[int, int]) -> None:
    values = randn(200, 300, seed=7)
    target, source = quantized(200, 300, block=block), BlockwiseFP8Tensor.from_values(values, block)
    empty, before = torch.empty_like(target), pointers(target)
    assert target.copy_(source) is target
    assert_same(target, source)
    assert_same(empty.copy_(source), source)
    assert pointers(target) == before
    if block == SQUARE:  # a target that holds the other form derives it
        flipped = torch.empty_like(source.t())
        flipped.copy_(BlockwiseFP8Tensor.from_values(values.t(), block))
        assert_same(flipped, source.t())


def test_copies_between_a_transpose_and_a_cast_of_its_own() -> None:
    """One has zeros after its columns where the other has none."""
    x, w = randn(129, 300), quantized(64, 300, block=SQUARE)
    plain, turned = quantized(129, 300), BlockwiseFP8Tensor.from_values(x.t().contiguous(), ROW).t()
    assert plain.rowwise_data.shape != turned.rowwise_data.shape
    for target in (torch.empty_like(plain), torch.empty_like(turned)):  # NaN in tests
        for source in (plain, turned):
            target.copy_(source)
            assert torch.equal(target.dequantize(), source.dequantize())
            assert torch.equal(target.t().dequantize(), source.t().dequantize())
            y = F.linear(target, w)
            assert torch.equal(y, F.linear(source, w))
            assert y.isfinite().all()


def test_copy_of_another_kind_is_refused() -> None:
    target, other = quantized(200, 300), quantized(200, 300, recipe=POWER_OF_TWO)
    before = target.dequantize()
    for source in (quantized(200, 301), quantized(200, 300, block=SQUARE), other):
        with pytest.raises(ValueError, match="one shape, block_shape and scale rounding"):
            target.copy_(source)
        assert torch.equal(target.dequantize(), before)


@every_block
def test_to_another_dtype_changes_the_label_only(block: Any, device: torch.device) -> None:
    x = quantized(5, 200, block=block, device=device)
    for y, dtype in ((x.half(), torch.float16), (x.to(torch.float32), torch.float32)):
        assert y.dtype == dtype
        assert torch.equal(y.dequantize(), x.dequantize(dtype))
        assert_same(y.to(x.dtype), x)
        assert y.rowwise_data.data_ptr() != x.rowwise_data.data_ptr()
        # a weight's copy in a layer shares the bytes, as no forward writes it
        read = in_a_layer(lambda dtype=dtype: x.to(dtype))()
        shares = read.rowwise_data.data_ptr() == x.rowwise_data.data_ptr()
        assert shares == (block == SQUARE)
    for bad in (torch.float64, torch.int32, torch.float8_e4m3fn):
        assert "expected one of torch.bfloat16" in complaint(TypeError, lambda d=bad: x.to(d))


IN_ANOTHER_DTYPE: dict[str, Callable[[nn.Module], Tensor]] = {
    "a state in another dtype": lambda m: m.state_dict()["weight"].half(),
    "the state before a conversion": lambda m: (m.state_dict(), m.half())[0]["weight"],
}


@pytest.mark.parametrize("way", IN_ANOTHER_DTYPE)
def test_a_write_to_a_weight_leaves_its_copy_in_another_dtype(way: str) -> None:
    """And a write to the copy leaves the weight, as with plain tensors."""
    module = linear(200, 300, frozen=True)
    kept = IN_ANOTHER_DTYPE[way](module)
    first, second = kept.dequantize(), randn(200, 300, seed=7)
    module.load_state_dict({"weight": BlockwiseFP8Tensor.from_values(second, SQUARE)})
    loaded = module.weight.dequantize()
    assert torch.equal(kept.dequantize(), first)
    kept.copy_(BlockwiseFP8Tensor.from_values(torch.zeros(200, 300), SQUARE))
    assert torch.equal(module.weight.dequantize(), loaded)


@every_block
def test_zeros_like_it_are_plain(block: Any) -> None:
    """The initial value of a gradient."""
    x = quantized(5, 200, block=block)
    for like in (x, x.half(), x.t()):
        for options in ({}, {"dtype": torch.float32}, {"device": "meta"}):
            made = torch.zeros_like(like, **options)
            wanted = torch.zeros_like(like.dequantize(), **options)
            assert type(made) is Tensor
            assert (made.dtype, made.shape) == (wanted.dtype, wanted.shape)
            assert made.device == wanted.device
            assert made.is_meta or not made.count_nonzero()


@pytest.mark.gpu
@every_block
def test_to_and_from_the_gpu(block: tuple[int, int]) -> None:
    x = quantized(201, 301, block=block)
    there = x.cuda()
    assert {t.device.type for t in (there, *inner(there).values())} == {"cuda"}
    assert_same(there, quantized(201, 301, block=block, device="cuda"))
    assert_same(there.cpu(), x)
    assert_same(x.to("cuda", torch.float16, non_blocking=True).to("cpu", torch.bfloat16), x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("shape", [(200, 300), (3, 200, 130)])
def test_a_plain_tensor_takes_the_values_of_a_weight(shape: Any, dtype: torch.dtype) -> None:
    """Every value fits fp32; wider than it, and in other dtypes, they are those of the weight."""
    weight = quantized(*shape, block=SQUARE)
    for x in (weight, weight.mT):
        target = torch.empty(x.shape, dtype=dtype)
        assert target.copy_(x) is target
        assert torch.equal(target, x.dequantize(torch.bfloat16 if dtype.itemsize == 8 else dtype))
        with pytest.raises(RuntimeError, match="size"):
            torch.empty(7, 7).copy_(x)


def test_a_copy_knows_when_the_source_of_its_source_changed() -> None:
    values, others = randn(4, 256), randn(4, 256, seed=1)
    target = quantize(values, HIGH).copy_(quantize(others, HIGH))
    assert target.unchanged_source().data_ptr() == others.data_ptr()
    values.add_(1)  # the target does not read these any more
    target.unchanged_source()
    others.add_(1)
    with pytest.raises(RuntimeError, match="was changed in place since"):
        target.unchanged_source()
