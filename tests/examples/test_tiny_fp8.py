"""examples/tiny_fp8.py computes the bits of the library on a CPU."""

from __future__ import annotations

import re
import sys
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from blocktensor import functional
from blocktensor.ops import reference
from blocktensor.ops.formats import BLOCKS_1X128, BLOCKS_128X128, Quantized
from tests.support.scripts import EXAMPLES

EXAMPLE = "tiny_fp8"
FORMATS = {1: BLOCKS_1X128, 128: BLOCKS_128X128}
INF, NAN = float("inf"), float("nan")

dtypes = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16])


def drawn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Numbers of many magnitudes: every block has another scale."""
    random = torch.Generator().manual_seed(seed)
    magnitude = torch.randn(shape, generator=random).mul(3).exp2()
    return (torch.randn(shape, generator=random) * magnitude).to(dtype)


def assert_same(found: Any, expected: Any) -> None:
    """The same numbers, dtypes and shapes, of one tensor or of several; NaN equals NaN."""
    torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)


def assert_same_cast(found: tuple[Tensor, Tensor, int], expected: Quantized, columns: int) -> None:
    """The same bytes and scales; the library's data may go on in zeros."""
    data, scale, block_rows = found
    assert block_rows == expected.format.rows
    assert data.is_contiguous()
    assert_same(data.view(torch.uint8), expected.data[:, :columns].view(torch.uint8))
    assert_same(scale, expected.scale)


def outputs_and_gradients(linear: Any, operands: Any, g: Tensor) -> list[Tensor]:
    given = [t if t is None else t.clone().requires_grad_() for t in operands]
    y = linear(*given)
    return [y.detach(), *torch.autograd.grad(y, [t for t in given if t is not None], g)]


@dtypes
@pytest.mark.parametrize("rows", [1, 127, 129, 576])
@pytest.mark.parametrize("cols", [1, 127, 129, 576])
def test_casts(example: ModuleType, rows: int, cols: int, dtype: torch.dtype) -> None:
    x = drawn(rows, cols, dtype=dtype)
    row, col = reference.quantize_both(x, BLOCKS_1X128)
    assert_same_cast(example.quantize(x, 1), row, cols)
    assert_same_cast(example.quantize(x.t(), 1), col, rows)
    row, col = reference.quantize_with_transpose(x, BLOCKS_128X128)
    assert_same_cast(example.quantize(x, 128), row, cols)
    assert_same_cast(example.transpose(example.quantize(x, 128)), col, rows)


@dtypes
@pytest.mark.parametrize("block_rows", FORMATS)
def test_special_blocks(example: ModuleType, block_rows: int, dtype: torch.dtype) -> None:
    x = drawn(256, 1024, dtype=dtype)
    limits = torch.finfo(dtype)
    x[:, :256] = torch.tensor([0.0, -0.0]).repeat_interleave(128)
    for block, value in enumerate((INF, -INF, NAN, limits.max), start=2):
        x[:, 128 * block] = value
    x[:4, 128 * 5] = torch.tensor([NAN, -NAN, INF, -INF])
    x[:, 128 * 6 : 128 * 7] = limits.tiny * limits.eps  # the smallest number: amax / 448 may be 0
    found = example.quantize(x, block_rows)
    wanted, values = reference.quantize_rowwise(x, FORMATS[block_rows]), example.dequantize(found)
    assert_same_cast(found, wanted, 1024)
    assert_same(values, reference.dequantize(wanted, torch.float32))
    assert (found.scale[:, :2] == 1).all()
    assert values[:, 256:640].isnan().all()
    assert values[:, 768:].isfinite().all()


@dtypes
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize(
    ("tokens", "n", "k"),
    [(1, 127, 129), (127, 1, 576), (129, 576, 1), (576, 129, 127), (0, 128, 128), (129, 128, 576)],
)
def test_output_and_gradients(
    example: ModuleType, tokens: int, n: int, k: int, dtype: torch.dtype, with_bias: bool
) -> None:
    bias = drawn(n, seed=2, dtype=dtype) if with_bias else None
    operands = drawn(tokens, k, dtype=dtype), drawn(n, k, seed=1, dtype=dtype), bias
    g = drawn(tokens, n, seed=3, dtype=dtype)
    found = outputs_and_gradients(example.FP8Linear.apply, operands, g)
    assert len(found) == 3 + with_bias
    assert all(map(torch.equal, found, outputs_and_gradients(functional.linear, operands, g)))


@pytest.mark.parametrize("value", [INF, NAN, 0.0])
@pytest.mark.parametrize("of", ["x", "w", "g"])
def test_inf_nan_and_zeros_reach_the_same_numbers(
    example: ModuleType, value: float, of: str
) -> None:
    tensors = {"x": drawn(129, 576), "w": drawn(127, 576, seed=1), "g": drawn(129, 127, seed=3)}
    tensors[of][5, :3] = value
    tensors[of][:2, 7] = value
    g = tensors.pop("g")
    operands = *tensors.values(), None
    found = outputs_and_gradients(example.FP8Linear.apply, operands, g)
    assert_same(found, outputs_and_gradients(functional.linear, operands, g))
    assert value == 0 or not all(ours.isfinite().all() for ours in found)


@pytest.mark.parametrize("leading", [(), (3,), (2, 5), (0, 2)])
@pytest.mark.parametrize("autocast", [False, True])
def test_module(example: ModuleType, leading: tuple[int, ...], autocast: bool) -> None:
    module = example.Linear(129, 127)
    x = drawn(*leading, 129, dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        y, expected = module(x), functional.linear(x, module.weight, module.bias)
    assert_same(y, expected)
    gradients = [torch.autograd.grad(out.sum(), module.parameters()) for out in (y, expected)]
    assert_same(*gradients)


def test_frozen_operands_get_no_gradient(example: ModuleType) -> None:
    operands = [drawn(2, 128), drawn(3, 128), drawn(3)]
    for trained in operands:
        trained.requires_grad_()
        example.FP8Linear.apply(*operands).sum().backward()
        assert [t.grad is not None for t in operands] == [t is trained for t in operands]
        trained.grad = None
        trained.requires_grad_(False)


def test_training(example: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    example.main(steps=20)
    _, first, *_, last = map(str.split, capsys.readouterr().out.splitlines())
    assert (first[0], last[0]) == ("1", "20")
    bf16, fp8 = map(float, last[1:])
    assert bf16 < float(first[1]) * 0.7
    assert abs(fp8 / bf16 - 1) < 0.02


def test_is_one_page_of_torch() -> None:
    text = (EXAMPLES / "tiny_fp8.py").read_text()
    assert text.count("\n") <= 200
    imported = set(re.findall(r"^\s*(?:from|import) (\w+)", text, re.MULTILINE))
    assert imported - set(sys.stdlib_module_names) == {"torch"}
