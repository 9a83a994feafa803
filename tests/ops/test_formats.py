"""Block formats: their names, what they say of shapes and bytes, and how they are found."""

from __future__ import annotations

import copy
import math
import pickle

import pytest
import torch

from blocktensor.ops import formats
from blocktensor.ops.formats import (
    ACTIVATION_FORMATS,
    BLOCKS_1X128,
    BLOCKS_1X128_POW2,
    BLOCKS_128X128,
    BLOCKS_128X128_POW2,
    KERNEL_FORMATS,
    WEIGHT_FORMATS,
    BlockFormat,
    Quantized,
    ScaleRounding,
    ceil_div,
    named,
    num_blocks,
    register,
    with_block_shape,
)
from blocktensor.ops.scale_layouts import empty_quantized

NAMES = ("1x128", "128x128", "1x128_pow2", "128x128_pow2")
every_format = pytest.mark.parametrize("format", KERNEL_FORMATS, ids=lambda format: format.name)


@pytest.fixture
def other(monkeypatch: pytest.MonkeyPatch) -> BlockFormat:
    """A registered format that the package does not have."""
    monkeypatch.setattr(formats, "_FORMATS", dict(formats._FORMATS))
    return register(BlockFormat("4x32", (4, 32), "power_of_two", torch.float8_e5m2))


# Names


def test_names_are_unique() -> None:
    found = [format.name for format in formats._FORMATS.values()]
    assert found == list(formats._FORMATS)
    assert len(set(found)) == len(found)
    assert set(NAMES) <= set(found)
    assert [named(name) for name in NAMES] == list(KERNEL_FORMATS)


def test_a_name_is_registered_once(other: BlockFormat) -> None:
    for name in (*NAMES, other.name):
        with pytest.raises(ValueError, match="registered already") as error:
            register(BlockFormat(name, (7, 7)))
        assert str(error.value) == f"a format named '{name}' is registered already"
        assert named(name).block_shape != (7, 7)


def test_an_unknown_name_is_refused(other: BlockFormat) -> None:
    with pytest.raises(ValueError, match="no format") as error:
        named("1x64")
    known = ", ".join(formats._FORMATS)
    assert known.startswith("1x128, 128x128, 1x128_pow2, 128x128_pow2")
    assert known.endswith(", 4x32")
    assert str(error.value) == f"no format is named '1x64': expected one of {known}"


# Attributes


@pytest.mark.parametrize(
    ("format", "rows", "power_of_two", "transposes", "ranks"),
    [
        (BLOCKS_1X128, 1, False, False, (2,)),
        (BLOCKS_1X128_POW2, 1, True, False, (2,)),
        (BLOCKS_128X128, 128, False, True, (2, 3)),
        (BLOCKS_128X128_POW2, 128, True, True, (2, 3)),
    ],
    ids=NAMES[:1] + NAMES[2:3] + NAMES[1:2] + NAMES[3:],
)
def test_attributes(
    format: BlockFormat, rows: int, power_of_two: bool, transposes: bool, ranks: tuple[int, ...]
) -> None:
    assert (format.rows, format.cols) == format.block_shape == (rows, 128)
    assert format.power_of_two is power_of_two
    assert format.transposes is transposes
    assert format.ranks == ranks
    assert format.dtype == torch.float8_e4m3fn


def test_the_formats_of_a_recipe() -> None:
    rounding: ScaleRounding
    for rounding in ("fp32", "power_of_two"):
        rows, squares = ACTIVATION_FORMATS[rounding], WEIGHT_FORMATS[rounding]
        assert (rows.block_shape, squares.block_shape) == ((1, 128), (128, 128))
        assert rows.scale_rounding == squares.scale_rounding == rounding
    assert ACTIVATION_FORMATS.keys() == WEIGHT_FORMATS.keys()


@every_format
def test_a_format_of_the_same_values_is_the_registered_one(format: BlockFormat) -> None:
    assert type(format)(*vars(format).values()) is format
    assert BlockFormat(**vars(format)) is format


@every_format
@pytest.mark.parametrize("shape", [(300, 300), (1, 1), (0, 5), (5, 0), (128, 640), (3, 129, 130)])
def test_bytes_are_those_of_data_and_scales(format: BlockFormat, shape: tuple[int, ...]) -> None:
    if len(shape) not in format.ranks:
        shape = shape[1:]
    made = empty_quantized(shape, format, torch.device("cpu"))
    assert format.nbytes(shape) == math.prod(shape) + 4 * made.scale.numel()
    assert format.nbytes(shape) == made.data.numel() * made.data.itemsize + 4 * made.scale.numel()


def test_another_format_has_its_own_blocks_and_dtype(other: BlockFormat) -> None:
    assert (other.rows, other.cols, other.power_of_two, other.transposes) == (4, 32, True, False)
    assert other.ranks == (2, 3)
    assert other.scale_shape((2, 9, 65)) == (2, 3, 3)
    made = empty_quantized((9, 65), other, torch.device("cpu"))
    assert made.data.dtype == torch.float8_e5m2
    assert made.scale.shape == (3, 3)


@pytest.mark.parametrize(
    ("size", "edge", "blocks"), [(0, 4, 0), (1, 4, 1), (4, 4, 1), (5, 4, 2), (300, 128, 3)]
)
def test_partial_blocks_count(size: int, edge: int, blocks: int) -> None:
    assert ceil_div(size, edge) == blocks
    assert num_blocks(128 * size) == size
    assert num_blocks(128 * size + 1) == size + 1


# Copies


@every_format
def test_a_copy_is_the_same_object(format: BlockFormat) -> None:
    for again in (
        copy.copy(format),
        copy.deepcopy(format),
        pickle.loads(pickle.dumps(format)),
        copy.deepcopy([format])[0],
    ):
        assert again is format


def test_formats_compare_by_identity() -> None:
    other = BlockFormat("1x128", (1, 64))  # of other values
    assert other != BLOCKS_1X128
    assert (other.block_shape, BLOCKS_1X128.block_shape) == ((1, 64), (1, 128))
    assert (
        len(
            {
                BLOCKS_1X128,
                BLOCKS_128X128,
                BLOCKS_1X128_POW2,
                BLOCKS_128X128_POW2,
                copy.deepcopy(BLOCKS_1X128),
            }
        )
        == 4
    )


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


# By the shape of blocks


def test_a_format_is_found_by_its_blocks_and_rounding() -> None:
    for format in KERNEL_FORMATS:
        assert with_block_shape(format.block_shape, format.scale_rounding) is format
        assert with_block_shape(list(format.block_shape), format.scale_rounding) is format


@pytest.mark.parametrize("scale_rounding", ["fp32", "power_of_two"])
@pytest.mark.parametrize("block_shape", [(128, 1), (1, 64), (1,), (1, 128, 1), ()])
def test_unknown_blocks_are_refused(
    block_shape: tuple[int, ...], scale_rounding: ScaleRounding
) -> None:
    with pytest.raises(ValueError, match="block_shape") as error:
        with_block_shape(block_shape, scale_rounding)
    assert str(error.value) == (
        f"block_shape {block_shape}: expected (1, 128) (activations, gradients) or (128, 128) "
        "(weights)"
    )
