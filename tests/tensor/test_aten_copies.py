"""Copies of a BlockwiseFP8Tensor: equal bytes and labels, in storage of their own."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from blocktensor import BlockwiseFP8Tensor
from tests.support.models import (
    POWER_OF_TWO,
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


@pytest.mark.parametrize("weights_only", [False, True])
def test_save_and_load(weights_only: bool) -> None:
    for x in (quantized(5, 200), quantized(200, 300, block=SQUARE, recipe=POWER_OF_TWO).t()):
        file = io.BytesIO()
        torch.save(x, file)
        file.seek(0)
        assert_same(torch.load(file, weights_only=weights_only), x)


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
    target, source = quantized(200, 300, block=block), BlockwiseFP8Tensor.quantize(
        randn(200, 300, seed=7), block
    )  # fmt: skip
    before = pointers(target)
    assert target.copy_(source) is target
    assert_same(target, source)
    assert pointers(target) == before
    if block == SQUARE:  # a target that holds the other form derives it
        flipped = torch.empty_like(source.t())
        flipped.copy_(BlockwiseFP8Tensor.quantize(randn(200, 300, seed=7).t(), block))
        assert_same(flipped, source.t())


def test_copies_between_a_transpose_and_a_cast_of_its_own() -> None:
    """One has zeros after its columns where the other has none."""
    x = randn(129, 300)
    plain, turned = quantized(129, 300), BlockwiseFP8Tensor.quantize(x.t().contiguous(), ROW).t()
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


@pytest.mark.parametrize("block", [(1, 128), SQUARE])
def test_ops_between_fp8_and_plain_tensors_change_neither(block: tuple[int, int]) -> None:
    x = randn(4, 256, dtype=torch.float32)
    target, fp8 = x.clone(), BlockwiseFP8Tensor.quantize(x, block)
    before = fp8.dequantize()
    for run in (lambda: fp8.copy_(target + 1), lambda: fp8.mul_(2), lambda: target.add_(fp8)):
        complaint(NotImplementedError, run)
    if block == ROW:  # what reads the copy of an activation would run in high precision
        complaint(NotImplementedError, lambda: target.copy_(fp8))
        with pytest.raises(NotImplementedError):
            target[:] = fp8
    assert torch.equal(target, x)
    assert torch.equal(fp8.dequantize(), before)


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
