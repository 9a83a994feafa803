"""Every variant of a producer compiles for sm_90, here and without a GPU, and spills nothing."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product

import pytest
import torch
from torch import Tensor

from blocktensor.ops.formats import BLOCKS_1X128, BLOCKS_1X128_POW2, BLOCKS_128X128, BlockFormat
from blocktensor.ops.producers.choose_backend import PRODUCER_BACKENDS, ProducerProblem
from tests.support.numeric import DTYPES

pytest.importorskip("triton")

import triton

from blocktensor.ops.runtime.launch import Launch
from tests.support.sm90 import compile_for_sm90

META = torch.device("meta")
BF16, FP16, FP32 = DTYPES
SPILLS = 0 if triton.__version__.startswith("3.6.") else 128
Formats = tuple[BlockFormat | None, BlockFormat | None]
BOTH: Formats = BLOCKS_1X128, BLOCKS_1X128
MIXED: Formats = BLOCKS_1X128, BLOCKS_128X128
COLUMNWISE: Formats = None, BLOCKS_1X128
ROWWISE: Formats = BLOCKS_1X128, None
POW2: Formats = BLOCKS_1X128_POW2, BLOCKS_1X128_POW2

VARIANTS: list[tuple[str, str, torch.dtype, tuple[int, int], Formats]] = [
    *product(["gluon"], ["silu"], [BF16], [(4096, 14336), (302, 130)], [BOTH, MIXED, COLUMNWISE]),
    *product(["gluon"], ["gelu", "gelu_tanh"], [BF16], [(302, 130)], [BOTH, MIXED]),
    ("gluon", "relu2", BF16, (300, 576), BOTH),
    ("gluon", "gelu", FP16, (302, 136), MIXED),
    ("gluon", "silu", FP32, (300, 520), BOTH),
    ("gluon", "gelu_tanh", FP32, (300, 576), MIXED),
    ("gluon", "silu", BF16, (300, 576), POW2),
    *product(["triton"], ["silu"], [BF16], [(4096, 14336)], [BOTH, MIXED, ROWWISE]),
    *product(["triton"], ["gelu", "gelu_tanh"], [BF16], [(129, 131)], [BOTH]),
    ("triton", "relu2", BF16, (129, 131), ROWWISE),
    *product(["triton"], ["gelu"], [BF16], [(129, 131)], [MIXED, POW2]),
    ("triton", "gelu", FP16, (129, 136), MIXED),
    *product(["triton"], ["gelu", "gelu_tanh"], [FP32], [(129, 136)], [BOTH]),
    ("triton", "silu", FP32, (300, 576), MIXED),
]


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[Launch]:
    found: list[Launch] = []
    monkeypatch.setattr(Launch, "__call__", lambda launch: found.append(launch))
    return found


def sources_of(shape: tuple[int, int], dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """The gradient of h; gate and up, halves of one tensor."""
    both = torch.empty((shape[0], 2 * shape[1]), dtype=dtype, device=META)
    gate, up = both.chunk(2, 1)
    return torch.empty(shape, dtype=dtype, device=META), gate, up


def compile_all(launches: list[Launch], launch: Callable[[], object]) -> int:
    launches.clear()
    launch()
    for made in launches:
        resources = compile_for_sm90(made)
        assert resources.spilled_bytes <= SPILLS, f"{made.kernel} {made.constants}"
    return len(launches)


@pytest.mark.parametrize(
    ("name", "activation", "dtype", "shape", "formats"),
    VARIANTS,
    ids=[f"{v[0]}-{v[1]}-{v[2]}-{i}" for i, v in enumerate(VARIANTS)],
)
def test_gated(
    name: str,
    activation: str,
    dtype: torch.dtype,
    shape: tuple[int, int],
    formats: Formats,
    launches: list[Launch],
) -> None:
    backend = next(backend for backend in PRODUCER_BACKENDS if backend.name == name)
    sources = grad, gate, up = sources_of(shape, dtype)
    given = up if name == "gluon" or dtype == BF16 else None
    assert (
        backend.declines(ProducerProblem(sources[: 3 if given is not None else 2], *formats))
        is None
    )
    kernels, rest = backend.load(), (None, activation, *formats)
    forward = 2 if name == "triton" and shape[1] % 8 and formats == MIXED else 1
    assert compile_all(launches, lambda: kernels.gated(gate, up, *rest)) == forward
    assert (
        compile_all(launches, lambda: kernels.gated_backward(grad, gate, given, *rest)) == forward
    )


@pytest.mark.parametrize("name", ["triton", "gluon"])
def test_plain_and_grouped(name: str, launches: list[Launch]) -> None:
    backend = next(backend for backend in PRODUCER_BACKENDS if backend.name == name)
    kernels = backend.load()
    grad, gate, up = sources_of((300, 576), BF16)
    rest = (None, "gelu", *BOTH)
    assert compile_all(launches, lambda: kernels.gated(gate, None, *rest)) == 1
    assert compile_all(launches, lambda: kernels.gated_backward(grad, gate, None, *rest)) == 1
    grouped = (torch.empty(8, dtype=torch.int32, device=META), "silu", *MIXED)
    assert compile_all(launches, lambda: kernels.gated(gate, up, *grouped)) == 1
    assert compile_all(launches, lambda: kernels.gated_backward(grad, gate, up, *grouped)) == 1
