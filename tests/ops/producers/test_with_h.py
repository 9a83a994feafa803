"""The gradients of gate and up with h from one read: the bytes of two functions."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode

from blocktensor.ops.formats import (
    BLOCKS_1X128,
    BLOCKS_1X128_POW2,
    BLOCKS_128X128,
    BLOCKS_128X128_POW2,
    BlockFormat,
)
from blocktensor.ops.producers import ops, reference
from blocktensor.ops.producers.choose_backend import PRODUCER_BACKENDS, ProducerKernels
from blocktensor.ops.producers.reference import ACTIVATIONS
from blocktensor.ops.producers.with_h_ops import (
    Results,
    _with_h,
    gated_backward_with_h,
    is_from_one_read,
)
from tests.support.numeric import DTYPES, KINDS, values
from tests.support.producers import assert_same_forms

BF16, FP16, FP32 = DTYPES
CUDA = torch.device("cuda")
Three = tuple[BlockFormat, BlockFormat, BlockFormat]
FORMATS: tuple[Three, ...] = (
    (BLOCKS_1X128, BLOCKS_1X128, BLOCKS_1X128),
    (BLOCKS_1X128, BLOCKS_1X128, BLOCKS_128X128),
    (BLOCKS_1X128_POW2, BLOCKS_1X128_POW2, BLOCKS_1X128_POW2),
    (BLOCKS_1X128_POW2, BLOCKS_1X128_POW2, BLOCKS_128X128_POW2),
)
MIXED: tuple[Three, ...] = (
    (BLOCKS_1X128, BLOCKS_128X128, BLOCKS_1X128),
    (BLOCKS_1X128, BLOCKS_1X128, BLOCKS_1X128_POW2),
)
SIZES = (1, 127, 128, 129, 136, 256, 300, 512, 576, 1096, 10944)


def three(
    rows: int = 130, cols: int = 304, dtype: torch.dtype = BF16, kind: str = "normal", seed: int = 0
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradient of h, gate and up; one of them has awkward values."""
    rng = torch.Generator().manual_seed(seed)
    turn = seed % 3
    made = [values(k, rows, cols, dtype, rng) for k in (kind, "normal", "normal")]
    grad, gate, up = made[turn:] + made[:turn]
    return grad, gate, up


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
    for formats in (*FORMATS, *MIXED):
        for shape in ((0, 128), (1, 8), (130, 304), (129, 131)):
            if shape[1] % 8 and dtype != BF16:
                continue
            given = [x.to(device) for x in three(*shape, dtype)]
            got = gated_backward_with_h(*given, activation, *formats)
            both = ops.gated_backward(*given, activation, *formats[:2])
            _, h = ops.gated(*given[1:], activation, None, formats[2])
            assert_same_results(got, (*both, h))


def test_through_the_dispatcher() -> None:
    given = three()
    for formats in FORMATS[:2]:
        names = [format.name for format in formats]
        op = torch.ops.blocktensor.gated_backward_with_h.default
        torch.library.opcheck(op, (*given, "silu", *names))
        run = torch.compile(gated_backward_with_h, backend="aot_eager", fullgraph=True)
        real = gated_backward_with_h(*given, "silu", *formats)
        assert_same_results(run(*given, "silu", *formats), real)
        with FakeTensorMode() as mode:
            fake = gated_backward_with_h(*map(mode.from_tensor, given), "silu", *formats)
        forms = [(*of_gate, *of_up, h) for of_gate, of_up, h in (fake, real)]
        for mine, other in zip(*forms, strict=True):
            assert mine is not None
            assert other is not None
            for x, y in zip(mine[:2], other[:2], strict=True):
                assert (x.shape, x.stride(), x.dtype) == (y.shape, y.stride(), y.dtype)


def test_bad_input() -> None:
    grad, gate, up = three()
    formats = FORMATS[0]
    for wrong, error, message in (
        ((grad[:, :8], gate, up), ValueError, r"grad has shape \[130, 8\] and gate \[130, 304\]"),
        ((grad, gate, up.float()), TypeError, "up has dtype torch.float32 and gate"),
    ):
        with pytest.raises(error, match=message):
            gated_backward_with_h(*wrong, "silu", *formats)
    with pytest.raises(ValueError, match="activation 'tanh'"):
        gated_backward_with_h(grad, gate, up, "tanh", *formats)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="the rowwise format is 128x128"):
        gated_backward_with_h(grad, gate, up, "silu", BLOCKS_128X128, *formats[1:])


def test_what_comes_from_one_read() -> None:
    assert is_from_one_read("silu", BF16, 14336)
    assert not is_from_one_read("silu", BF16, 14340)
    assert not is_from_one_read("silu", FP16, 14336)
    assert [name for name in ACTIVATIONS if is_from_one_read(name, BF16, 8)] == ["silu"]  # type: ignore[arg-type]


def gluon() -> ProducerKernels:
    pytest.importorskip("triton")
    return next(backend for backend in PRODUCER_BACKENDS if backend.name == "gluon").load()


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
        rest = "silu", *draw.choice(FORMATS + MIXED)
        got = backend.gated_backward_with_h(*given, *rest)
        assert_same_results(got, reference.gated_backward_with_h(*given, *rest))


@pytest.mark.gpu
@pytest.mark.parametrize("formats", FORMATS, ids=range(len(FORMATS)))
def test_programs_of_several_tiles(formats: Three) -> None:
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
        rest = "silu", *FORMATS[1]
        got = gated_backward_with_h(*given, *rest)
        assert_same_results(got, reference.gated_backward_with_h(*given, *rest))
    found = _with_h.find(*given, *rest)
    assert getattr(found, "player", found) is not None
