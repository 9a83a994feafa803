"""Casts that are made of other casts: transposes, casts with their transpose, casts of parts."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Generator, Tensor

from blocktensor.ops import formats, reference
from blocktensor.ops.cast import ops
from blocktensor.ops.cast.choose_backend import cast_backend
from blocktensor.ops.cast.ops import quantize_transpose, quantize_with_transpose
from blocktensor.ops.formats import BLOCKS_1X128, BLOCKS_128X128, BlockFormat, ceil_div
from tests.support.backends import decide_anew
from tests.support.casts import gluon_takes
from tests.support.models import randn
from tests.support.numeric import DTYPES, KINDS, assert_same, assert_same_forms, to_device, values

SQUARES = [BLOCKS_128X128, formats.BLOCKS_128X128_POW2]
every_format = pytest.mark.parametrize("format", SQUARES, ids=lambda format: format.name)
SHAPES = [(0, 128), (1, 1), (128, 0), (127, 129), (128, 300), (192, 10), (272, 1096), (300, 576)]


@every_format
@pytest.mark.parametrize("shape", [*SHAPES, (3, 130, 70), (16, 130, 70)], ids=str)
def test_quantize_transpose(shape: Any, format: BlockFormat, device: torch.device) -> None:
    for dtype in (torch.bfloat16, torch.float32):
        x = randn(*shape, dtype=dtype, device=device)
        transposed = reference.transpose(reference.quantize_rowwise(x.cpu(), format))
        for lies in (x, x.mT.contiguous().mT, torch.stack([x, x], -1)[..., 0]):
            is_columnwise = x.ndim == 2 and shape[0] % 64 == 0 and lies.stride(-2) != 1
            want = reference.quantize_columnwise(x.cpu(), format) if is_columnwise else transposed
            check([quantize_transpose(lies, format)], [want])
            assert torch.equal(want.data.view(torch.uint8), transposed.data.view(torch.uint8))


@pytest.mark.parametrize(
    ("x", "want"),
    [
        (randn(192, 70), ["quantize_columnwise"]),
        (randn(70, 150).t(), ["quantize_rowwise"]),
        (randn(150, 70), ["quantize_rowwise", "transpose"]),
    ],
)
def test_what_runs(x: Tensor, want: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[str] = []

    def noting(name: str, function: Callable[..., Any], *args: Any) -> Any:
        ran.append(name)
        return function(*args)

    decide_anew(monkeypatch)
    for name in ("quantize_columnwise", "quantize_rowwise", "transpose"):
        monkeypatch.setattr(ops, name, partial(noting, name, getattr(ops, name)))
    quantize_transpose(x, BLOCKS_128X128)
    assert ran == want


# With the transpose: in one pass where rows are whole vectors, or two

PASS_SHAPES = [
    (0, 128),
    (128, 0),
    (16, 1),
    (16, 2),
    (48, 130),
    (128, 128),
    (272, 1096),
    (1104, 64),
    (1, 1),
    (127, 129),
    (129, 128),
    (300, 576),
]


def check(made: Any, wanted: Any) -> None:
    """The same casts, laid out alike."""
    assert_same_forms(made, wanted)
    for got, want in zip(made, wanted, strict=True):
        assert got.data.is_contiguous()
        assert got.scale.stride() == want.scale.stride()


def check_with_transpose(x: Tensor, format: BlockFormat) -> None:
    wanted = reference.quantize_with_transpose(x.cpu(), format)
    check(quantize_with_transpose(x, format), wanted)


@every_format
@pytest.mark.parametrize("shape", PASS_SHAPES, ids=str)
def test_casts_of_matrices_with_their_transpose(
    shape: tuple[int, int], format: BlockFormat, device: torch.device, rng: Generator
) -> None:
    kinds = KINDS if device.type == "cuda" else ("normal", "nan")  # a CPU runs the reference itself
    for dtype in DTYPES:
        for kind in kinds:
            x = to_device(values(kind, *shape, dtype, rng), device)
            check_with_transpose(x, format)
        for lies in (x.t().contiguous().t(), torch.stack([x, x], -1)[..., 0]):
            check_with_transpose(lies, format)


@every_format
@pytest.mark.parametrize("shape", [(3, 128, 256), (2, 272, 130), (2, 130, 70), (0, 128, 128)])
def test_casts_of_stacks_with_their_transpose(
    shape: tuple[int, ...], format: BlockFormat, device: torch.device, rng: Generator
) -> None:
    experts, n, k = shape
    for dtype in DTYPES:
        x = values("normal", experts * n, k, dtype, rng).view(shape)
        x = to_device(x * torch.tensor([1, 1e-3, 64]).to(dtype)[:experts, None, None], device)
        for lies in (x, x.mT.contiguous().mT, torch.cat([x, x], -1)[..., :k]):
            check_with_transpose(lies, format)


@pytest.mark.parametrize("dtype", DTYPES)
def test_tiny_and_empty_blocks(dtype: torch.dtype, device: torch.device) -> None:
    """Of blocks below 2^-60, the elements are multiplied before they are divided."""
    x = randn(256, 384, dtype=torch.float32)
    x[:128, :128] *= 2.0**-90
    x[128:, 128:256] = 0
    x[128:, 256:] *= -0.0
    for format in SQUARES:
        check_with_transpose(to_device(x.to(dtype), device), format)


@pytest.mark.gpu
def test_one_pass_is_taken_where_rows_are_whole_vectors() -> None:
    for shape, passes in (((160, 70), 1), ((150, 70), 2), ((160, 71), 2), ((3, 160, 70), 1)):
        x = randn(*shape, device="cuda")
        one_pass = cast_backend(x, BLOCKS_128X128).function("quantize_with_transpose") is not None
        assert one_pass == gluon_takes(x, BLOCKS_128X128)
        decided: Any = ops._decide_with_transpose(x, BLOCKS_128X128)
        assert (decided.function is ops._in_two_passes) == (passes == 2)


# Parts: together they give the bytes and scales of the whole matrix's cast

BF16, FP16, FP32 = DTYPES


def parts_of(
    x: Tensor, format: BlockFormat, row_cuts: list[int], col_cuts: list[int]
) -> list[tuple[Tensor, int, int, Any]]:
    """Pieces of ``x``, how far each begins into its first block, and which blocks it lies in."""
    rows, cols = format.block_shape
    found = []
    for top, bottom in zip([0, *row_cuts], [*row_cuts, x.shape[-2]], strict=True):
        for left, right in zip([0, *col_cuts], [*col_cuts, x.shape[-1]], strict=True):
            blocks = (
                ...,
                slice(top // rows, ceil_div(bottom, rows)),
                slice(left // cols, ceil_div(right, cols)),
            )
            found.append((x[..., top:bottom, left:right], top % rows, left % cols, blocks))
    return found


def cast_in_parts(
    x: Tensor, rows: list[int], cols: list[int], format: BlockFormat, module: Any = ops
) -> None:
    data, scale, _ = reference.quantize_rowwise(x, format)
    pieces = [p for p in parts_of(x, format, rows, cols) if p[0].numel()]
    amax = torch.zeros(scale.shape, dtype=FP32, device=x.device)
    for piece, row, col, blocks in pieces:
        bits = module.shard_amax(piece, format, row, col).view(torch.int32)
        amax[blocks] = torch.maximum(amax[blocks].view(torch.int32), bits).view(FP32)
    assert_same(reference.scale_from_amax(amax, format), scale)
    whole = [p for p in parts_of(data, format, rows, cols) if p[0].numel()]
    for (piece, row, col, blocks), (wanted, *_) in zip(pieces, whole, strict=True):
        assert_same(module.quantize_shard(piece, amax[blocks], format, row, col), wanted)


CUTS = ([64], [100, 100], [128], [1, 127, 129, 256], [200, 299])


@every_format
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_parts_make_the_whole(
    device: torch.device, dtype: torch.dtype, kind: str, format: BlockFormat, rng: Generator
) -> None:
    x = values(kind, 300, 260, dtype, rng).to(device)
    for cuts in CUTS:
        cast_in_parts(x, cuts, [], format)
    cast_in_parts(x, [], [130], format)
    cast_in_parts(x[:129, :3], [0, 1, 129], [0, 2], format)
    cast_in_parts(x, [77, 200], [65, 128, 200], format)
    stack = torch.stack([x, x * 2, -x])
    cast_in_parts(stack, [90], [], format)
    cast_in_parts(x.t(), [90], [31], format)


@every_format
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_blocks_of_a_part_that_changed_become_nan(
    device: torch.device, dtype: torch.dtype, format: BlockFormat, rng: Generator
) -> None:
    """Where their amax did: other changes leave the bytes of the whole matrix."""
    x = torch.stack([values("normal", 300, 260, dtype, rng)] * 2).to(device)
    own = ops.shard_amax(x, format, 100, 7)
    greatest = torch.maximum(own, own.flip(0)) * 2  # the amax of whole blocks
    given = format, 100, 7
    assert_same(
        ops.quantize_shard(x, greatest, *given, own), ops.quantize_shard(x, greatest, *given)
    )
    x[0, 28:156, 121:249] *= 1.5
    x[1, 0, 0] = math.inf
    x[1, 299, 259] = math.nan
    x[0, 29, 0] = 0
    found = ops.quantize_shard(x, greatest, *given, own)
    wanted = ops.quantize_shard(x, greatest, *given)
    wanted[0, 28:156, 121:249] = math.nan
    wanted[1, :28, :121] = wanted[1, 284:, 249:] = math.nan
    assert_same(found, wanted)
    assert_same(found, reference.quantize_shard(x, greatest, *given, own))


@pytest.mark.parametrize(
    "format",
    [
        BLOCKS_1X128,
        formats.BLOCKS_1X128_POW2,
        BlockFormat("32x64", (32, 64)),
        BlockFormat("1x32", (1, 32), "power_of_two"),
    ],
    ids=lambda format: format.name,
)
@pytest.mark.parametrize("kind", KINDS)
def test_the_reference_takes_parts_in_any_blocks(kind: str, format: BlockFormat) -> None:
    """The kernels are written for weights: for 128x128 blocks."""
    x = values(kind, 300, 260, BF16, Generator().manual_seed(0))
    for cuts in CUTS:
        cast_in_parts(x, cuts, [], format, reference)
    cast_in_parts(x, [77, 200], [65, 128, 200], format, reference)
