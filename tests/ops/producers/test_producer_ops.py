"""The ops of producers: joint gradients, the choice of a backend, gradients with h.

Their reference casts what autograd computes in eager mode, bit for bit.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Generator, Tensor

from blocktensor.ops import reference as casts
from blocktensor.ops.cast.producer import halves
from blocktensor.ops.formats import (
    BLOCKS_1X128,
    BLOCKS_1X128_POW2,
    BLOCKS_128X128,
    BLOCKS_128X128_POW2,
    BlockFormat,
)
from blocktensor.ops.producers import ops, reference
from blocktensor.ops.producers.choose_backend import PRODUCER_BACKENDS, ProducerProblem
from blocktensor.ops.producers.ops import gated_backward_with_h, is_from_one_read
from blocktensor.ops.producers.reference import ACTIVATIONS
from tests.support.casts import Functions, kernels
from tests.support.groups import ends, filled
from tests.support.numeric import DTYPES, KINDS, assert_same_forms, values
from tests.support.producers import FORMATS, SIZES, Formats, three

BF16, FP16, FP32 = DTYPES
CUDA = torch.device("cuda")
every_formats = pytest.mark.parametrize("formats", FORMATS, ids=range(len(FORMATS)))


@every_formats
@pytest.mark.parametrize("cols", [1, 128, 256, 300])
def test_a_joint_gradient_is_both_gradients_side_by_side(cols: int, formats: Formats) -> None:
    grad, gate, up = three(130, cols)
    both = torch.cat([gate, up], 1)
    for offs in (None, ends(100, 0, 30)):
        rest = ("gelu_tanh", *formats, offs)
        made = ops.joint_gated_backward(grad, both, *rest)
        assert_same_forms(made, reference.joint_gated_backward(grad, both, *rest))
        if cols % 128 == 0:
            parts = ops.gated_backward(grad, gate, up, *rest)
            assert_same_forms(halves(made), parts)


META = {"dtype": BF16, "device": "meta"}
HALVES = torch.empty((128, 512), **META).chunk(2, 1)  # type: ignore[call-overload]
ODD = torch.empty((128, 257), **META)[:, :256]  # type: ignore[call-overload]
ACROSS = torch.empty((256, 128), **META).t()  # type: ignore[call-overload]
WIDE = torch.empty((128, 256), device="meta")


@pytest.mark.parametrize(
    ("name", "sources", "reason"),
    [
        ("gluon", HALVES, None),
        ("triton", HALVES, None),
        ("gluon", (HALVES[0], ODD), "reads rows of whole 32-bit words"),
        ("triton", (HALVES[0], ODD), None),
        ("triton", (HALVES[0], ACROSS), "reads rows of unit stride"),
        ("reference", (HALVES[0], ACROSS), None),
        ("triton", 3 * (WIDE,), "computes from three tensors in bf16 alone: others would spill"),
        ("gluon", 3 * (WIDE,), None),
        (
            "triton",
            (torch.empty((128, 258), device="meta"),),
            "reads fp16 and fp32 in whole vectors of eight elements",
        ),
        ("triton", (WIDE,), None),
    ],
)
def test_who_takes_which_layouts(
    name: str, sources: tuple[Tensor, ...], reason: str | None
) -> None:
    assert [backend.name for backend in PRODUCER_BACKENDS] == ["gluon", "triton", "reference"]
    problem = ProducerProblem(sources, BLOCKS_1X128, BLOCKS_1X128)
    assert kernels(name, PRODUCER_BACKENDS).backend.declines(problem) == reason


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


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_bytes_of_two_functions(
    activation: ops.ActivationName, dtype: torch.dtype, device: torch.device
) -> None:
    for formats in (*WITH_H, *MIXED_WITH_H):
        for shape in ((0, 128), (1, 8), (130, 304), (129, 131)):
            if shape[1] % 8 and dtype != BF16:
                continue
            given = three(*shape, dtype, device=device)
            got = gated_backward_with_h(*given, activation, *formats)
            both = ops.gated_backward(*given, activation, *formats[:2])
            _, h = ops.gated(*given[1:], activation, None, formats[2])
            assert_same_forms(got, (*both, h))


def test_what_comes_from_one_read() -> None:
    assert is_from_one_read("silu", BF16, 14336)
    assert not is_from_one_read("silu", BF16, 14340)
    assert not is_from_one_read("silu", FP16, 14336)
    assert [name for name in ACTIVATIONS if is_from_one_read(name, BF16, 8)] == ["silu"]  # type: ignore[arg-type]


@pytest.fixture
def backend() -> Functions:
    pytest.importorskip("triton")
    return kernels("gluon", PRODUCER_BACKENDS)


@pytest.mark.gpu
def test_fuzzed_bytes(backend: Functions) -> None:
    """200 shapes, kinds of values, layouts and formats; eager ops and casts are compared with."""
    draw = random.Random(0)
    for turn in range(200):
        rows = cols = 2**20
        while rows * cols > 1_500_000 or cols % 8:
            rows, cols = draw.choice(SIZES), draw.choice(SIZES)
        kinds = draw.choice(KINDS), "normal", "normal"
        given = [*three(rows, cols, BF16, kinds, turn, CUDA)]
        if turn % 4 == 1:
            given[1:] = torch.cat(given[1:], 1).chunk(2, 1)
        if turn % 4 == 2:
            given = [x.new_zeros((rows, cols + 16))[:, 8:-8].copy_(x) for x in given]
        rest = "silu", *draw.choice(WITH_H + MIXED_WITH_H)
        got = backend.gated_backward_with_h(*given, *rest)
        assert_same_forms(got, reference.gated_backward_with_h(*given, *rest))


@pytest.mark.gpu
@pytest.mark.parametrize("formats", WITH_H, ids=range(len(WITH_H)))
def test_programs_of_several_tiles_with_h(formats: Three, backend: Functions) -> None:
    """Whose third result waits where the next tile will be copied to."""
    for shape in ((2304, 2176), (2300, 2056), (4095, 1160), (8192, 4096)):
        given = *three(*shape, device=CUDA), "silu", *formats
        want = reference.gated_backward_with_h(*given)
        for _ in range(20):
            assert_same_forms(backend.gated_backward_with_h(*given), want)


MODULES: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
}
"""As models write them."""


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_values_and_gradients_are_those_of_autograd(
    activation: str, dtype: torch.dtype, rng: Generator
) -> None:
    for kind in ("normal", "edges", "zeros"):
        grad, gate, up = (values(kind, 130, 300, dtype, rng) for _ in range(3))
        h = MODULES[activation](gate.requires_grad_()) * up.requires_grad_()
        eager = torch.autograd.grad(h, (gate, up), grad)
        formats = BLOCKS_1X128, BLOCKS_128X128
        given = gate.detach(), up.detach(), activation, *formats
        assert_same_forms(reference.gated(*given), casts.quantize_both(h.detach(), *formats))
        of_gate, of_up = reference.gated_backward(grad, *given)
        assert_same_forms(of_gate, casts.quantize_both(eager[0], *formats))
        assert_same_forms(of_up, casts.quantize_both(eager[1], *formats))
        alone = reference.gated_backward(grad, *given, of_up=False)
        assert_same_forms(alone, (of_gate, (None, None)))
        assert_same_forms(reference.gated(gate.detach(), grad, *given[2:]), of_up)


def test_blocks_begin_anew_at_groups(rng: Generator) -> None:
    gate, up = (values("normal", 300, 130, torch.bfloat16, rng) for _ in range(2))
    sizes = 130, 0, 150
    h, offs = F.silu(gate) * up, ends(*sizes)
    for row, col in ((BLOCKS_1X128, BLOCKS_1X128), (None, BLOCKS_128X128), (BLOCKS_1X128, None)):
        got_row, got_col = reference.gated(gate, up, "silu", row, col, offs)
        assert_same_forms(got_row, None if row is None else casts.quantize_rowwise(h, row))
        assert (got_col is None) == (col is None)
        if got_col is not None and col is not None:
            want = casts.quantize_grouped_columnwise(h, offs, col)
            assert_same_forms(filled(got_col, sizes), filled(want, sizes))
