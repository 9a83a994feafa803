"""The ops of producers: joint gradients, the choice of a backend, and gradients with h."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from blocktensor.ops.cast.producer import halves
from blocktensor.ops.formats import (
    BLOCKS_1X128,
    BLOCKS_1X128_POW2,
    BLOCKS_128X128,
    BLOCKS_128X128_POW2,
    BlockFormat,
)
from blocktensor.ops.op import OPS
from blocktensor.ops.producers import ops, reference
from blocktensor.ops.producers.choose_backend import PRODUCER_BACKENDS, ProducerProblem
from blocktensor.ops.producers.ops import Results, gated_backward_with_h, is_from_one_read
from blocktensor.ops.producers.reference import ACTIVATIONS
from tests.support.casts import Functions, kernels
from tests.support.groups import ends
from tests.support.numeric import DTYPES, KINDS, values
from tests.support.producers import FORMATS, SIZES, Formats, assert_same_forms

BF16, FP16, FP32 = DTYPES
CUDA = torch.device("cuda")
every_formats = pytest.mark.parametrize("formats", FORMATS, ids=range(len(FORMATS)))


def three(
    rows: int = 130, cols: int = 300, dtype: torch.dtype = BF16, kind: str = "normal", seed: int = 0
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradient of h, gate and up; one of them has awkward values."""
    rng = torch.Generator().manual_seed(seed)
    turn = seed % 3
    made = [values(k, rows, cols, dtype, rng) for k in (kind, "normal", "normal")]
    grad, gate, up = made[turn:] + made[:turn]
    return grad, gate, up


@every_formats
@pytest.mark.parametrize("cols", [1, 128, 256, 300])
def test_a_joint_gradient_is_both_gradients_side_by_side(cols: int, formats: Formats) -> None:
    grad, gate, up = three(cols=cols)
    both = torch.cat([gate, up], 1)
    for offs in (None, ends(100, 0, 30)):
        rest = ("gelu", *formats, offs)
        made = ops.joint_gated_backward(grad, both, *rest)
        assert_same_forms(made, reference.joint_gated_backward(grad, both, *rest))
        if cols % 128 == 0:
            parts = ops.gated_backward(grad, gate, up, *rest)
            for got, want in zip(halves(made), parts, strict=True):
                assert_same_forms(got, want)


def declines(name: str, *sources: Tensor) -> str | None:
    backend = next(backend for backend in PRODUCER_BACKENDS if backend.name == name)
    return backend.declines(ProducerProblem(sources, BLOCKS_1X128, BLOCKS_1X128))


def test_who_takes_which_layouts() -> None:
    x = torch.empty((128, 512), dtype=BF16, device="meta")
    gate, up = x.chunk(2, 1)
    odd = torch.empty((128, 257), dtype=BF16, device="meta")[:, :256]
    across = torch.empty((256, 128), dtype=BF16, device="meta").t()
    assert [backend.name for backend in PRODUCER_BACKENDS] == ["gluon", "triton", "reference"]
    assert declines("gluon", gate, up) is None
    assert declines("triton", gate, up) is None
    assert declines("gluon", gate, odd) == "reads rows of whole 32-bit words"
    assert declines("triton", gate, odd) is None
    assert declines("triton", gate, across) == "reads rows of unit stride"
    assert declines("reference", gate, across) is None
    wide = torch.empty((128, 256), device="meta")
    three_alone = "computes from three tensors in bf16 alone: others would spill"
    assert declines("triton", wide, wide, wide) == three_alone
    assert declines("gluon", wide, wide, wide) is None
    wide = torch.empty((128, 258), device="meta")
    assert declines("triton", wide) == "reads fp16 and fp32 in whole vectors of eight elements"
    assert declines("triton", wide[:, :256].contiguous()) is None


# The gradients of gate and up with h from one read

Three = tuple[BlockFormat, BlockFormat, BlockFormat]
WITH_H: tuple[Three, ...] = (
    (BLOCKS_1X128, BLOCKS_1X128, BLOCKS_1X128),
    (BLOCKS_1X128, BLOCKS_1X128, BLOCKS_128X128),
    (BLOCKS_1X128_POW2, BLOCKS_1X128_POW2, BLOCKS_1X128_POW2),
    (BLOCKS_1X128_POW2, BLOCKS_1X128_POW2, BLOCKS_128X128_POW2),
)
MIXED_WITH_H: tuple[Three, ...] = (
    (BLOCKS_1X128, BLOCKS_128X128, BLOCKS_1X128),
    (BLOCKS_1X128, BLOCKS_1X128, BLOCKS_1X128_POW2),
)


def assert_same_results(got: Results, want: Results | tuple[object, ...]) -> None:
    of_gate, of_up, h = want
    assert_same_forms(got[0], of_gate)  # type: ignore[arg-type]
    assert_same_forms(got[1], of_up)  # type: ignore[arg-type]
    assert_same_forms([got[2]], [h])  # type: ignore[list-item]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_bytes_of_two_functions(
    activation: ops.ActivationName, dtype: torch.dtype, device: torch.device
) -> None:
    for formats in (*WITH_H, *MIXED_WITH_H):
        for shape in ((0, 128), (1, 8), (130, 304), (129, 131)):
            if shape[1] % 8 and dtype != BF16:
                continue
            given = [x.to(device) for x in three(*shape, dtype)]
            got = gated_backward_with_h(*given, activation, *formats)
            both = ops.gated_backward(*given, activation, *formats[:2])
            _, h = ops.gated(*given[1:], activation, None, formats[2])
            assert_same_results(got, (*both, h))


def test_what_comes_from_one_read() -> None:
    assert is_from_one_read("silu", BF16, 14336)
    assert not is_from_one_read("silu", BF16, 14340)
    assert not is_from_one_read("silu", FP16, 14336)
    assert [name for name in ACTIVATIONS if is_from_one_read(name, BF16, 8)] == ["silu"]  # type: ignore[arg-type]


def gluon() -> Functions:
    pytest.importorskip("triton")
    return kernels("gluon", PRODUCER_BACKENDS)


@pytest.mark.gpu
def test_fuzzed_bytes() -> None:
    """200 shapes, kinds of values, layouts and formats; eager ops and casts are compared with."""
    draw, backend = random.Random(0), gluon()
    for turn in range(200):
        rows = cols = 2**20
        while rows * cols > 1_500_000 or cols % 8:
            rows, cols = draw.choice(SIZES), draw.choice(SIZES)
        given = [x.to(CUDA) for x in three(rows, cols, BF16, draw.choice(KINDS), turn)]
        if turn % 4 == 1:
            given[1:] = torch.cat(given[1:], 1).chunk(2, 1)
        if turn % 4 == 2:
            given = [x.new_zeros((rows, cols + 16))[:, 8:-8].copy_(x) for x in given]
        rest = "silu", *draw.choice(WITH_H + MIXED_WITH_H)
        got = backend.gated_backward_with_h(*given, *rest)
        assert_same_results(got, reference.gated_backward_with_h(*given, *rest))


@pytest.mark.gpu
@pytest.mark.parametrize("formats", WITH_H, ids=range(len(WITH_H)))
def test_programs_of_several_tiles_with_h(formats: Three) -> None:
    """Whose third result waits where the next tile will be copied to."""
    backend = gluon()
    for shape in ((2304, 2176), (2300, 2056), (4095, 1160), (8192, 4096)):
        given = [x.to(CUDA) for x in three(*shape)]
        want = reference.gated_backward_with_h(*given, "silu", *formats)
        for _ in range(20):
            got = backend.gated_backward_with_h(*given, "silu", *formats)
            assert_same_results(got, want)


@pytest.mark.gpu
def test_the_launch_is_recorded() -> None:
    for seed in range(3):
        given = [x.to(CUDA) for x in three(256, 576, seed=seed)]
        rest = "silu", *WITH_H[1]
        got = gated_backward_with_h(*given, *rest)
        assert_same_results(got, reference.gated_backward_with_h(*given, *rest))
    found = OPS["gated_backward_with_h"].find(*given, *rest)
    assert getattr(found, "player", found) is not None
