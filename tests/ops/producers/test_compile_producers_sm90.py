"""Every variant of a producer and of its norms compiles for sm_90, and spills little."""

from __future__ import annotations

import functools
from itertools import product

import pytest
import torch
from torch import Tensor

from tests.support.numeric import DTYPES

pytest.importorskip("triton")

from blocktensor.ops.cast.gluon_ahead import cast_ahead_kernel
from blocktensor.ops.formats import (
    BLOCKS_1X128,
    BLOCKS_1X128_POW2,
    BLOCKS_128X128,
    BLOCKS_128X128_POW2,
    BlockFormat,
)
from tests.support import sm90
from tests.support.producer_launches import (
    BOTH,
    COLUMNWISE,
    META,
    MIXED,
    POW2,
    ROWWISE,
    Formats,
    allowed_spills,
    kernels_for,
)
from tests.support.sm90 import Launches, compile_for_sm90

launches = sm90.launches
BF16, FP16, FP32 = DTYPES

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


def sources_of(shape: tuple[int, int], dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """The gradient of h; gate and up, halves of one tensor."""
    both = torch.empty((shape[0], 2 * shape[1]), dtype=dtype, device=META)
    gate, up = both.chunk(2, 1)
    return torch.empty(shape, dtype=dtype, device=META), gate, up


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
    launches: Launches,
) -> None:
    sources = grad, gate, up = sources_of(shape, dtype)
    given = up if name == "gluon" or dtype == BF16 else None
    kernels = kernels_for(name, sources[: 3 if given is not None else 2], formats)
    rest = activation, *formats
    forward = 2 if name == "triton" and shape[1] % 8 and formats == MIXED else 1
    assert launches.compile(lambda: kernels.gated(gate, up, *rest), allowed_spills) == forward
    assert (
        launches.compile(lambda: kernels.gated_backward(grad, gate, given, *rest), allowed_spills)
        == forward
    )
    if name == "gluon" and shape[1] % 128 == 0:
        gate_up = torch.empty((shape[0], 2 * shape[1]), dtype=dtype, device=META)
        assert launches.compile(
            lambda: kernels.joint_gated_backward(grad, gate_up, *rest), allowed_spills
        )
    if given is not None:
        of_gate = functools.partial(kernels.gated_backward, grad, gate, up, *rest, of_up=False)
        assert launches.compile(of_gate, allowed_spills) == forward


def test_which_gradients_are_cast_by_programs_that_copy_tiles_ahead(
    launches: Launches,
) -> None:
    """Those of gate and up together, in both forms, of bf16 in rows of whole vectors."""

    def copies_ahead(
        shape: tuple[int, int] = (300, 576),
        dtype: torch.dtype = BF16,
        formats: Formats = BOTH,
        offs: Tensor | None = None,
        of_up: bool = True,
    ) -> bool:
        launches.clear()
        sources = sources_of(shape, dtype)
        backward = kernels_for("gluon", sources, formats).gated_backward
        backward(*sources, "silu", *formats, offs, of_up=of_up)
        (made,) = launches
        return made.kernel is cast_ahead_kernel

    assert copies_ahead()
    assert copies_ahead(formats=MIXED)
    assert copies_ahead(formats=POW2)
    assert not copies_ahead(formats=(BLOCKS_1X128_POW2, BLOCKS_128X128_POW2))
    assert not copies_ahead((300, 580))
    assert not copies_ahead((0, 576))
    assert not copies_ahead(dtype=FP16)
    assert not copies_ahead(formats=COLUMNWISE)
    assert not copies_ahead(offs=torch.empty(8, dtype=torch.int32, device=META))
    assert not copies_ahead(of_up=False)


def test_gradients_of_swiglu_spill_little_with_every_triton(launches: Launches) -> None:
    """120 bytes with Triton 3.9, unless ptxas allocates registers by its default."""
    sources = grad, gate, up = sources_of((4096, 14336), BF16)
    kernels_for("gluon", sources, BOTH).gated_backward(grad, gate, up, "silu", *BOTH)
    assert compile_for_sm90(launches.pop()).spilled_bytes <= 32


@pytest.mark.parametrize(
    "formats",
    [
        (*BOTH, BLOCKS_1X128),
        (*BOTH, BLOCKS_128X128),
        (*POW2, BLOCKS_1X128_POW2),
        (*POW2, BLOCKS_128X128_POW2),
    ],
    ids=range(4),
)
def test_gradients_with_h(formats: tuple[BlockFormat, ...], launches: Launches) -> None:
    """One launch, unless the computation takes all registers or the scales are rounded apart."""
    sources = sources_of((300, 576), BF16)
    with_h = kernels_for("gluon", sources, formats[:2]).gated_backward_with_h
    assert launches.compile(lambda: with_h(*sources, "silu", *formats), allowed_spills) == 1
    assert launches[0].kernel is cast_ahead_kernel
    assert launches[0].constants["THIRD"]
    other = BLOCKS_1X128 if formats[2].power_of_two else BLOCKS_1X128_POW2
    launches.clear()
    with_h(*sources, "silu", *formats[:2], other)
    with_h(*sources, "gelu", *formats)
    assert len(launches) == 4
    assert not any(launch.constants.get("THIRD") for launch in launches)


@pytest.mark.parametrize("formats", [BOTH, MIXED], ids=["both", "mixed"])
@pytest.mark.parametrize("activation", ["gelu", "gelu_tanh"])
def test_gradients_of_gelus_that_copy_tiles_ahead(
    activation: str, formats: Formats, launches: Launches
) -> None:
    sources = sources_of((300, 576), BF16)
    backward = kernels_for("gluon", sources, formats).gated_backward
    assert launches.compile(lambda: backward(*sources, activation, *formats), allowed_spills) == 1
    assert launches[0].kernel is cast_ahead_kernel


@pytest.mark.parametrize("name", ["triton", "gluon"])
def test_plain_and_grouped(name: str, launches: Launches) -> None:
    sources = grad, gate, up = sources_of((300, 576), BF16)
    kernels = kernels_for(name, sources, BOTH)
    rest = ("gelu", *BOTH)
    assert launches.compile(lambda: kernels.gated(gate, None, *rest), allowed_spills) == 1
    assert (
        launches.compile(lambda: kernels.gated_backward(grad, gate, None, *rest), allowed_spills)
        == 1
    )
    grouped = ("silu", *MIXED, torch.empty(8, dtype=torch.int32, device=META))
    assert launches.compile(lambda: kernels.gated(gate, up, *grouped), allowed_spills) == 1
    assert (
        launches.compile(lambda: kernels.gated_backward(grad, gate, up, *grouped), allowed_spills)
        == 1
    )
