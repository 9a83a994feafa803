"""Block formats, and layouts of data and of scales: also those that cuBLAS and TMA are handed."""

from __future__ import annotations

import copy
import math
import pickle
from typing import Any

import numpy as np
import pytest
import torch
from torch import Generator, Tensor

from blocktensor.ops import formats, scale_layouts
from blocktensor.ops.formats import BLOCKS_1X128, BLOCKS_128X128, BlockFormat, Quantized
from blocktensor.ops.scale_layouts import empty_quantized, empty_scale, pad4, tma_scale
from tests.support.numeric import E4M3, assert_same, operand

CPU = torch.device("cpu")
NAMES = ("1x128", "1x128_pow2", "128x128", "128x128_pow2")
every_format = pytest.mark.parametrize(
    "format", formats.KERNEL_FORMATS, ids=lambda format: format.name
)


@pytest.fixture
def other(monkeypatch: pytest.MonkeyPatch) -> BlockFormat:
    """A registered format that the package does not have."""
    monkeypatch.setattr(formats, "_FORMATS", dict(formats._FORMATS))
    return formats.register(BlockFormat("4x32", (4, 32), "power_of_two", torch.float8_e5m2))


def test_names_are_unique(other: BlockFormat) -> None:
    known = [format.name for format in formats._FORMATS.values()]
    assert known == list(formats._FORMATS)
    assert (known[:4], known[-1]) == ([*NAMES], "4x32")
    assert [formats.named(name) for name in NAMES] == list(formats.KERNEL_FORMATS)
    for name in (*NAMES, other.name):
        with pytest.raises(ValueError, match=f"^a format named '{name}' is registered already$"):
            formats.register(BlockFormat(name, (7, 7)))
        assert formats.named(name).block_shape != (7, 7)
    with pytest.raises(ValueError, match="no format") as error:
        formats.named("1x64")
    assert str(error.value) == f"no format is named '1x64': expected one of {', '.join(known)}"


@pytest.mark.parametrize("rounding", ["fp32", "power_of_two"])
def test_formats_are_found_by_their_blocks(rounding: formats.ScaleRounding) -> None:
    chosen = formats.ACTIVATION_FORMATS[rounding], formats.WEIGHT_FORMATS[rounding]
    for format, blocks in zip(chosen, ((1, 128), (128, 128)), strict=True):
        assert formats.with_block_shape(list(blocks), rounding) is format
        assert (format.block_shape, format.scale_rounding) == (blocks, rounding)


def test_another_format_has_its_own_blocks_and_dtype(other: BlockFormat) -> None:
    assert (other.rows, other.cols, other.power_of_two, other.transposes) == (4, 32, True, False)
    assert other.ranks == (2, 3)
    assert other.scale_shape((2, 9, 65)) == (2, 3, 3)
    made = empty_quantized((9, 65), other, CPU)
    assert made.data.dtype == torch.float8_e5m2
    assert made.scale.shape == (3, 3)


@every_format
@pytest.mark.parametrize("shape", [(300, 300), (1, 1), (0, 5), (5, 0), (128, 640), (3, 129, 130)])
def test_bytes_are_those_of_data_and_scales(format: BlockFormat, shape: tuple[int, ...]) -> None:
    if len(shape) not in format.ranks:
        shape = shape[1:]
    made = empty_quantized(shape, format, CPU)
    assert format.nbytes(shape) == made.data.numel() * made.data.itemsize + 4 * made.scale.numel()


@every_format
def test_a_copy_is_the_same_object(format: BlockFormat) -> None:
    assert copy.copy(format) is copy.deepcopy(format) is copy.deepcopy([format])[0] is format
    assert pickle.loads(pickle.dumps(format)) is format
    assert type(format)(*vars(format).values()) is BlockFormat(**vars(format)) is format


def test_formats_compare_by_identity() -> None:
    other = BlockFormat("1x128", (1, 64))  # of other values
    assert other != BLOCKS_1X128
    assert (other.block_shape, BLOCKS_1X128.block_shape) == ((1, 64), (1, 128))
    assert len({*formats.KERNEL_FORMATS, copy.deepcopy(BLOCKS_1X128)}) == len(NAMES)


def test_a_copy_of_quantized_data_keeps_its_format() -> None:
    x = Quantized(torch.zeros(2, 3), torch.ones(2, 1), BLOCKS_1X128)
    for again in (copy.deepcopy(x), pickle.loads(pickle.dumps(x))):
        assert type(again) is Quantized
        assert again.format is BLOCKS_1X128
        assert torch.equal(again.data, x.data)
        assert again.data is not x.data


def test_a_pickle_of_an_unknown_format_is_refused(other: BlockFormat) -> None:
    stored = pickle.dumps(other)
    del formats._FORMATS["4x32"]
    with pytest.raises(ValueError, match="no format is named '4x32'"):
        pickle.loads(stored)


@pytest.mark.parametrize("scale_rounding", ["fp32", "power_of_two"])
@pytest.mark.parametrize("block_shape", [(128, 1), (1, 64), (1,), (1, 128, 1), ()])
def test_unknown_blocks_are_refused(
    block_shape: tuple[int, ...], scale_rounding: formats.ScaleRounding
) -> None:
    with pytest.raises(ValueError, match="block_shape") as error:
        formats.with_block_shape(block_shape, scale_rounding)
    assert str(error.value) == (
        f"block_shape {block_shape}: expected (1, 128) (activations, gradients) or (128, 128) "
        "(weights)"
    )


def filled(scale: Tensor) -> Tensor:
    """``scale`` with a different number in each place."""
    return scale.copy_(torch.arange(1.0, scale.numel() + 1).view(scale.shape))


@pytest.mark.parametrize(
    ("format", "shape", "scale_shape", "stride"),
    [
        (BLOCKS_1X128, (300, 300), (300, 3), (1, 320)),  # column-major
        (BLOCKS_1X128, (129, 128), (129, 1), (1, 192)),
        (BLOCKS_1X128, (1, 257), (1, 3), (1, 64)),
        (BLOCKS_1X128, (0, 128), (0, 1), None),
        (BLOCKS_1X128, (5, 0), (5, 0), None),
        (BLOCKS_128X128, (300, 300), (3, 3), (4, 1)),  # row-major
        (BLOCKS_128X128, (128, 640), (1, 5), (8, 1)),
        (BLOCKS_128X128, (1, 1), (1, 1), (4, 1)),
        (BLOCKS_128X128, (2, 129, 512), (2, 2, 4), (8, 4, 1)),
        (BLOCKS_128X128, (2, 129, 513), (2, 2, 5), (16, 8, 1)),
    ],
)
def test_layouts(format: BlockFormat, shape: Any, scale_shape: Any, stride: Any) -> None:
    for rounding in ("fp32", "power_of_two"):
        format = formats.with_block_shape(format.block_shape, rounding)
        scale, made = empty_scale(shape, format, CPU), empty_quantized(shape, format, CPU)
        assert made.format is format
        assert (made.data.shape, made.data.dtype, made.data.is_contiguous()) == (shape, E4M3, True)
        for x in (scale, made.scale):
            assert (x.shape, x.dtype) == (scale_shape, torch.float32)
            assert stride is None or x.stride() == stride


@pytest.mark.parametrize(
    ("tokens", "width"),
    [(0, 0), (1, 64), (63, 64), (64, 64), (127, 128), (128, 128), (129, 192), (4095, 4096)],
)
def test_columnwise_casts_have_few_widths(tokens: int, width: int) -> None:
    x = torch.empty(tokens, 3)
    for format in (BLOCKS_1X128, formats.BLOCKS_128X128_POW2, BlockFormat("1x64", (1, 64))):
        assert scale_layouts.columnwise_width(tokens, format) == width
        data, scale, _ = scale_layouts.empty_columnwise(x, format)
        assert (data.shape, data.stride()) == ((3, width), (max(width, 1), 1))
        assert scale.shape == format.scale_shape((3, tokens))  # the zeros need no more blocks
        if format.rows == 1:
            assert scale.stride() == empty_quantized((3, width), format, CPU).scale.stride()
        else:  # contiguous for no number of tokens, since compiled graphs depend on it
            assert scale.stride() == (scale.shape[1] // 4 * 4 + 4, 1)
    assert scale_layouts.columnwise_width(tokens, BlockFormat("1x50", (1, 50))) == tokens
    whole_vectors = scale_layouts.columnwise_width(tokens, BlockFormat("1x32", (1, 32)))
    assert whole_vectors == -(-tokens // 16) * 16


@pytest.mark.parametrize(("of_target", "of_source"), [(127, 128), (128, 127), (128, 128)])
def test_copies_between_widths_leave_zeros_after_the_data(of_target: int, of_source: int) -> None:
    source = torch.rand(3, 128)
    source[:, 127] = 0
    target = torch.empty(3, of_target, dtype=E4M3)  # NaN in tests
    scale_layouts.copy_data_(target, source[:, :of_source].to(E4M3))
    assert_same(target, source[:, :of_target].to(E4M3))


def test_scales_are_laid_out_once() -> None:
    x = operand(5, 300, 1, Generator().manual_seed(0))
    same = scale_layouts.laid_out(*x)
    assert same.data is x.data
    assert same.scale is x.scale
    stack = torch.zeros(2, 129, 300).to(E4M3)
    for data, scale, format in (
        x._replace(scale=x.scale.contiguous()),
        (stack, torch.rand(2, 2, 3), BLOCKS_128X128),
    ):
        copy = scale_layouts.laid_out(data, scale, format)
        assert copy.format is format
        assert copy.scale.stride() == empty_scale(data.shape, format, CPU).stride()
        assert_same(copy.scale, scale)


def quantized(scale: Tensor, rows: int, cols: int, format: BlockFormat) -> Quantized:
    """An operand with these scales; its data is never looked at."""
    return Quantized(torch.empty((rows, cols), dtype=E4M3, device="meta"), scale, format)


@pytest.mark.parametrize("rows", [1, 3, 64, 128, 129, 132])
@pytest.mark.parametrize("cols", [1, 128, 129, 1000])
def test_rowwise_scales_for_cublas(rows: int, cols: int) -> None:
    scale = filled(empty_scale((rows, cols), BLOCKS_1X128, CPU))
    given = scale_layouts.cublas_scale(quantized(scale, rows, cols, BLOCKS_1X128))
    assert given.stride() == (1, rows)
    assert torch.equal(given, scale)
    assert (given.data_ptr() == scale.data_ptr()) == (rows % 64 == 0)


@pytest.mark.parametrize("rows", [1, 128, 129, 513])
@pytest.mark.parametrize("cols", [1, 128, 512, 513, 1000])
def test_square_scales_for_cublas(rows: int, cols: int) -> None:
    scale = filled(empty_scale((rows, cols), BLOCKS_128X128, CPU))
    given = scale_layouts.cublas_scale(quantized(scale, rows, cols, BLOCKS_128X128))
    n_rows, n_cols = scale.shape
    assert given.shape == (pad4(n_cols), n_rows)
    assert given.stride() == (1, pad4(n_cols))
    assert torch.equal(given[:n_cols].t(), scale)
    assert given.data_ptr() == scale.data_ptr()


PARTS = (np.s_[1:3], np.s_[:, 1:4], np.s_[:, :4], np.s_[2:3], np.s_[:, 5:6], np.s_[:, 1:6])


@pytest.mark.parametrize("part", PARTS, ids=str)
@pytest.mark.parametrize("layout", ["ours", "dense", "transposed"])
def test_slices_of_square_scales_for_cublas(part: Any, layout: str) -> None:
    """Whatever view comes in: right values, readable to the end, no view past the storage."""
    scale = filled(empty_scale((512, 768), BLOCKS_128X128, CPU))  # [4, 6], padded to 8
    if layout == "dense":
        scale = scale.contiguous()
    if layout == "transposed":
        scale = scale.t().contiguous().t()
    scale = scale[part]
    n_rows, n_cols = scale.shape
    given = scale_layouts.cublas_scale(quantized(scale, 128 * n_rows, 128 * n_cols, BLOCKS_128X128))
    assert given.stride() == (1, pad4(n_cols))
    assert torch.equal(given[:n_cols].t(), scale)
    if given.untyped_storage().data_ptr() != scale.untyped_storage().data_ptr():
        assert (given[n_cols:] == 0).all()
    end = given.storage_offset() + math.prod(given.shape)
    assert end * 4 <= given.untyped_storage().nbytes()


def test_tma_reads_aligned_scales_where_they_lie() -> None:
    for format in (BLOCKS_1X128, BLOCKS_128X128):
        for shape in ((1, 1), (3, 300), (128, 128), (129, 1000), (513, 513)):
            scale = filled(empty_scale(shape, format, CPU))
            assert tma_scale(quantized(scale, *shape, format)) is scale
    rowwise = filled(empty_scale((520, 768), BLOCKS_1X128, CPU))[4:260, 1:3]
    assert tma_scale(quantized(rowwise, 256, 256, BLOCKS_1X128)) is rowwise
    square = filled(empty_scale((512, 1024), BLOCKS_128X128, CPU))[1:3, 4:7]
    assert tma_scale(quantized(square, 256, 384, BLOCKS_128X128)) is square


@pytest.mark.parametrize("format", [BLOCKS_1X128, BLOCKS_128X128], ids=lambda f: f.name)
@pytest.mark.parametrize(
    "layout", ["dense", "transposed", "unaligned", "repeated", "overlapping", "sliced"]
)
def test_other_scales_are_copied_for_tma(layout: str, format: BlockFormat) -> None:
    shape = (513, 646)  # scales [513, 6] or [5, 6]
    ours = empty_scale(shape, format, CPU)
    scale = filled(torch.empty(ours.shape))
    if layout == "transposed":
        scale = scale.t().contiguous().t()
    if layout == "unaligned":
        flat = torch.empty(1 + 6 * 576)[1:]
        scale = flat.as_strided(ours.shape, ours.stride()).copy_(scale)
    if layout == "repeated":
        scale = scale[:1, :1].expand(ours.shape)
    if layout == "overlapping":  # lines 16 bytes apart, and longer than that
        strides = (1, 4) if format is BLOCKS_1X128 else (4, 1)
        scale = torch.arange(1.0, 1000.0).as_strided(ours.shape, strides)
    if layout == "sliced":  # lines as far apart as ours, the first of them unaligned
        wide = empty_scale((513 + 128, 646 + 128), format, CPU)
        scale = wide[np.s_[1:514, :6] if format is BLOCKS_1X128 else np.s_[:5, 1:]].copy_(scale)
    given = tma_scale(quantized(scale, *shape, format))
    assert given.stride() == ours.stride()
    assert given.data_ptr() % 16 == 0
    assert torch.equal(given, scale)


def test_scales_of_stacks_for_tma() -> None:
    ours = empty_scale((3, 300, 700), BLOCKS_128X128, CPU)  # [3, 3, 6], padded to 8
    others = (
        torch.empty(3, 3, 6),
        empty_scale((3, 600, 700), BLOCKS_128X128, CPU)[:, 1:4],
        empty_scale((3, 300, 1000), BLOCKS_128X128, CPU)[..., 1:7],  # unaligned
    )
    for scale in (*map(filled, (ours, *others)), torch.ones(6).expand(3, 3, 6)):
        given = scale_layouts.stacked_scale(scale)
        assert (given is scale) == (scale is ours)
        assert (given.stride(), given.data_ptr() % 16) == (ours.stride(), 0)
        assert torch.equal(given, scale)


@pytest.mark.parametrize("k", [0, 1, 15, 16, 17, 128, 130])
def test_rows_of_whole_vectors(k: int) -> None:
    data = torch.arange(3 * k).remainder(100).float().view(3, k).to(E4M3)
    unaligned = torch.zeros(3 * k + 8).to(E4M3)[8:].view(3, k).copy_(data)
    for source in (data, unaligned):
        given = scale_layouts.in_vectors(source)
        assert given.is_contiguous()
        assert given.shape == (3, -(-k // 16) * 16)
        assert given.data_ptr() % 16 == 0
        assert_same(given[:, :k], data)
        assert (given.view(torch.uint8)[:, k:] == 0).all()
        assert (given is source) == (k % 16 == 0 and source.data_ptr() % 16 == 0)
