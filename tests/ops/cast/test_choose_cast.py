"""The choice of a cast backend."""

from __future__ import annotations

import pytest
import torch

from blocktensor.ops import reference
from blocktensor.ops.cast import ops
from blocktensor.ops.cast.choose_backend import (
    CAST_BACKENDS,
    CastProblem,
    cast_backend,
)
from blocktensor.ops.formats import (
    BLOCKS_1X128,
    BLOCKS_128X128,
    BLOCKS_128X128_POW2,
    KERNEL_FORMATS,
    BlockFormat,
)
from blocktensor.ops.op import OPS
from blocktensor.ops.registry import first_choice
from tests.support.casts import kernels
from tests.support.pretended_gpu import CPU, CUDA, Pretend, pretend

__all__ = ["pretend"]


COMPOSED = ("quantize_transpose",)
"""Ops made of others."""

CASTS = [name for name in vars(ops) if name in OPS and name not in COMPOSED]


def test_the_order_of_preference() -> None:
    assert [b.name for b in CAST_BACKENDS] == ["gluon", "triton", "reference"]


def test_every_backend_has_its_functions() -> None:
    pytest.importorskip("triton")
    for backend in CAST_BACKENDS:
        assert backend.launches == (backend.name != "reference")
        for name in CASTS:
            function = backend.function(name)
            if (backend.name, name) == ("triton", "quantize_with_transpose"):  # in two passes
                assert function is None
                continue
            assert function is not None
            assert function.__name__ == name
            assert (function is getattr(reference, name)) == (backend.name == "reference")


def test_gluon_has_kernels_of_its_own_where_they_are_faster() -> None:
    pytest.importorskip("triton")
    own = {name for name in CASTS if ".gluon_" in getattr(kernels("gluon"), name).__module__}
    columnwise = {"quantize_columnwise", "quantize_both"}
    grouped = {"quantize_grouped", "quantize_grouped_columnwise"}
    square = {"quantize_rowwise", "quantize_with_transpose"}
    assert own == square | columnwise | grouped


class Fake:
    """As much of a CUDA tensor as the choice of a cast looks at."""

    def __init__(self, dtype: torch.dtype, shape: tuple[int, int], stride: tuple[int, int]) -> None:
        like = torch.empty_strided(shape, stride, dtype=dtype, device="meta")
        self.element_size, self.stride, self.data_ptr = like.element_size, like.stride, lambda: 0
        self.shape, self.dtype, self.device = like.shape, dtype, CUDA


@pytest.mark.parametrize(
    ("dtype", "shape", "stride", "name"),
    [
        (torch.bfloat16, (256, 272), (272, 1), "gluon"),
        (torch.float16, (16, 16), (32, 1), "gluon"),
        (torch.float32, (252, 271), (271, 1), "gluon"),
        (torch.bfloat16, (252, 270), (272, 1), "gluon"),
        (torch.bfloat16, (254, 272), (272, 1), "gluon"),
        (torch.float16, (4095, 272), (272, 1), "gluon"),
        (torch.float32, (1, 271), (271, 1), "gluon"),
        (torch.bfloat16, (256, 271), (272, 1), "triton"),
        (torch.bfloat16, (256, 270), (271, 1), "triton"),
        (torch.bfloat16, (256, 272), (1, 256), "triton"),
        (torch.bfloat16, (256, 272), (2**24, 1), "triton"),
    ],
)
def test_who_casts(
    pretend: Pretend,
    dtype: torch.dtype,
    shape: tuple[int, int],
    stride: tuple[int, int],
    name: str,
) -> None:
    pretend((9, 0))
    x = Fake(dtype, shape, stride)
    for format in KERNEL_FORMATS:
        assert cast_backend(x, format).name == name


# The reasons


@pytest.mark.parametrize(
    ("capability", "shape", "reason"),
    [
        ((9, 0), (256, 272), "takes this problem"),
        ((9, 0), (255, 272), "takes this problem"),
        ((9, 0), (256, 271), "takes this problem; gluon: reads rows of whole 32-bit words"),
        (
            (9, 0),
            (2**24, 272),
            "takes this problem; gluon: uses 32-bit offsets inside a block",
        ),
        ((8, 9), (256, 272), "takes this problem; gluon: written for sm_90 and later"),
        (
            (8, 0),
            (256, 272),
            "takes this problem; gluon, triton: needs a GPU with FP8 (sm_89 or later), got sm_80",
        ),
    ],
)
def test_why(
    pretend: Pretend, capability: tuple[int, int], shape: tuple[int, int], reason: str
) -> None:
    pretend(capability)
    problem = CastProblem(Fake(torch.bfloat16, shape, (shape[1], 1)), BLOCKS_1X128)
    assert first_choice(CAST_BACKENDS, problem, CUDA).reason == reason


@pytest.mark.parametrize(
    ("formats", "name", "others"),
    [
        ((BLOCKS_1X128, BLOCKS_128X128), "gluon", ""),
        (
            (BlockFormat("1x32", (1, 32)),),
            "reference",
            "gluon, triton: no kernels for format 1x32",
        ),
        (
            (BLOCKS_1X128, BLOCKS_128X128_POW2),
            "reference",
            "gluon, triton: no kernels that round scales as both 1x128 and 128x128_pow2",
        ),
        (
            (BLOCKS_1X128, BlockFormat("32x32", (32, 32))),
            "reference",
            "gluon, triton: no kernels for format 32x32",
        ),
    ],
)
def test_who_casts_in_other_formats(
    pretend: Pretend, formats: tuple[BlockFormat, ...], name: str, others: str
) -> None:
    pretend((9, 0))
    x = Fake(torch.bfloat16, (256, 272), (272, 1))
    assert cast_backend(x, *formats).name == name
    choice = first_choice(CAST_BACKENDS, CastProblem(x, *formats), CUDA)
    assert choice.others == others


def test_without_triton_the_reference_casts(pretend: Pretend) -> None:
    pretend((9, 0), triton=False)
    assert cast_backend(Fake(torch.bfloat16, (256, 272), (272, 1)), BLOCKS_1X128).name == (
        "reference"
    )


def test_a_cpu_runs_the_reference() -> None:
    x = torch.rand(256, 272)
    assert cast_backend(x, BLOCKS_1X128).name == "reference"
    choice = first_choice(CAST_BACKENDS, CastProblem(x, BLOCKS_1X128), CPU)
    assert choice.others == "gluon, triton: needs a CUDA device, got 'cpu'"
