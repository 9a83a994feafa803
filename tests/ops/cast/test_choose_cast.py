"""The choice of a cast backend."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch

from blocktensor.ops import reference
from blocktensor.ops.cast import ops
from blocktensor.ops.cast.choose_backend import CAST_BACKENDS, CastProblem, cast_backend
from blocktensor.ops.formats import (
    BLOCKS_1X128,
    BLOCKS_128X128,
    BLOCKS_128X128_POW2,
    CAST_FORMATS,
    BlockFormat,
)
from blocktensor.ops.op import OPS
from blocktensor.ops.registry import first_choice
from tests.support.backends import CUDA, Pretend

COMPOSED = ("quantize_transpose",)
"""Ops made of others."""

CASTS = [name for name in vars(ops) if name in OPS and name not in COMPOSED]


OF_GLUON = {
    "quantize_rowwise",
    "quantize_columnwise",
    "quantize_both",
    "quantize_with_transpose",
    "quantize_grouped",
}
"""Casts that Gluon has kernels of its own for, since they are faster."""


def test_every_backend_has_its_functions() -> None:
    pytest.importorskip("triton")
    assert [b.name for b in CAST_BACKENDS] == ["gluon", "triton", "reference"]
    for name in CASTS:
        gluon, triton, plain = (backend.function(name) for backend in CAST_BACKENDS)
        assert plain is getattr(reference, name)
        assert (triton is None) == (name == "quantize_with_transpose")  # in two passes
        for function in filter(None, (gluon, triton)):
            assert function.__name__ == name
            assert function is not plain
        assert (inspect.unwrap(gluon or print) != inspect.unwrap(triton or print)) == (
            name in OF_GLUON
        )
    assert [backend.launches for backend in CAST_BACKENDS] == [True, True, False]


class Fake:
    """As much of a CUDA tensor as the choice of a cast looks at."""

    def __init__(self, dtype: torch.dtype, shape: tuple[int, int], stride: tuple[int, int]) -> None:
        like = torch.empty_strided(shape, stride, dtype=dtype, device="meta")
        self.element_size, self.stride, self.data_ptr = like.element_size, like.stride, lambda: 0
        self.shape, self.dtype, self.device = like.shape, dtype, CUDA


BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
WORDS, FAR = "gluon: reads rows of whole 32-bit words", "gluon: uses 32-bit offsets inside a block"


@pytest.mark.parametrize(
    ("dtype", "shape", "stride", "name", "others"),
    [
        (BF16, (256, 272), (272, 1), "gluon", ""),
        (BF16, (255, 272), (272, 1), "gluon", ""),
        (FP16, (16, 16), (32, 1), "gluon", ""),
        (FP32, (252, 271), (271, 1), "gluon", ""),
        (BF16, (252, 270), (272, 1), "gluon", ""),
        (BF16, (254, 272), (272, 1), "gluon", ""),
        (FP16, (4095, 272), (272, 1), "gluon", ""),
        (FP32, (1, 271), (271, 1), "gluon", ""),
        (BF16, (256, 271), (272, 1), "triton", WORDS),
        (BF16, (256, 270), (271, 1), "triton", WORDS),
        (BF16, (256, 272), (1, 256), "triton", WORDS),
        (BF16, (256, 272), (2**24, 1), "triton", FAR),
        (BF16, (2**24, 272), (272, 1), "triton", FAR),
    ],
)
def test_who_casts(
    pretend: Pretend,
    dtype: torch.dtype,
    shape: tuple[int, int],
    stride: tuple[int, int],
    name: str,
    others: str,
) -> None:
    pretend((9, 0))
    x: Any = Fake(dtype, shape, stride)
    for format in CAST_FORMATS:
        if format.mxfp4_group is not None:
            no_gluon = f"gluon: no kernels that round to the grid of {format.name}"
            choice = first_choice(CAST_BACKENDS, CastProblem(x, format), CUDA)
            assert (choice.name, choice.others) == ("triton", no_gluon)
            continue
        assert cast_backend(x, format).name == name
        choice = first_choice(CAST_BACKENDS, CastProblem(x, format), CUDA)
        assert (choice.name, choice.why, choice.others) == (name, "takes this problem", others)


@pytest.mark.parametrize(
    ("gpu", "formats", "name", "others"),
    [
        (((8, 9),), [BLOCKS_1X128], "triton", "gluon: written for sm_90 and later"),
        (((8, 0), "13.0", False), [BLOCKS_1X128], "reference",
         "gluon, triton: needs a GPU with FP8 (sm_89 or later), got sm_80"),
        (((9, 0), "13.0", False), [BLOCKS_1X128], "reference",
         "gluon, triton: triton is not installed"),
        (((9, 0),), [BLOCKS_1X128, BLOCKS_128X128], "gluon", ""),
        (((9, 0),), [BlockFormat("1x32", (1, 32))], "reference",
         "gluon, triton: no kernels for format 1x32"),
        (((9, 0),), [BLOCKS_1X128, BLOCKS_128X128_POW2], "reference",
         "gluon, triton: no kernels that round scales as both 1x128 and 128x128_pow2"),
        (((9, 0),), [BLOCKS_1X128, BlockFormat("32x32", (32, 32))], "reference",
         "gluon, triton: no kernels for format 32x32"),
    ],
)  # fmt: skip
def test_who_casts_elsewhere_and_in_other_formats(
    pretend: Pretend, gpu: Any, formats: list[BlockFormat], name: str, others: str
) -> None:
    pretend(*gpu)
    x: Any = Fake(BF16, (256, 272), (272, 1))
    assert cast_backend(x, *formats).name == name
    assert first_choice(CAST_BACKENDS, CastProblem(x, *formats), CUDA).others == others
    x.data_ptr = lambda: 2  # not of a whole word
    assert cast_backend(x, *formats).name == name.replace("gluon", "triton")
    decided: Any = ops._decide_with_transpose(x, BLOCKS_128X128)
    in_two = getattr(decided, "function", decided) is ops._in_two_passes
    assert in_two == (cast_backend(x, BLOCKS_128X128).name == "triton")
