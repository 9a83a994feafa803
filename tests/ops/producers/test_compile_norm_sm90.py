"""Every variant of the norm's kernels compiles for sm_90, without a GPU, and spills nothing."""

from __future__ import annotations

import pytest
import torch

from tests.support.numeric import DTYPES

pytest.importorskip("triton")

from blocktensor.ops.runtime.launch import Launch
from tests.support import producer_launches
from tests.support.producer_launches import (
    BOTH,
    COLUMNWISE,
    META,
    MIXED,
    POW2,
    ROWWISE,
    Formats,
    compile_all,
    kernels_for,
)

launches = producer_launches.launches
BF16, FP16, FP32 = DTYPES

VARIANTS: list[tuple[str, str, torch.dtype, tuple[int, int], Formats]] = [
    *(("gluon", "llama", BF16, (4096, 4096), formats) for formats in (BOTH, MIXED, COLUMNWISE)),
    *(("gluon", "gemma", BF16, (302, 130), formats) for formats in (BOTH, MIXED)),
    ("gluon", "gemma", BF16, (300, 576), POW2),
    ("gluon", "llama", FP16, (302, 136), MIXED),
    ("gluon", "gemma", FP16, (302, 136), BOTH),
    ("gluon", "gemma", FP32, (300, 520), BOTH),
    ("gluon", "llama", FP32, (300, 576), MIXED),
    *(("triton", "llama", BF16, (4096, 4096), formats) for formats in (BOTH, MIXED, ROWWISE)),
    *(("triton", "gemma", BF16, (129, 131), formats) for formats in (BOTH, MIXED, ROWWISE)),
    ("triton", "llama", FP16, (129, 136), BOTH),
    ("triton", "gemma", FP32, (129, 136), BOTH),
    ("triton", "llama", FP32, (300, 576), MIXED),
]


@pytest.mark.parametrize(
    ("name", "kind", "dtype", "shape", "formats"),
    VARIANTS,
    ids=[f"{v[0]}-{v[1]}-{v[2]}-{i}" for i, v in enumerate(VARIANTS)],
)
def test_normalized(
    name: str,
    kind: str,
    dtype: torch.dtype,
    shape: tuple[int, int],
    formats: Formats,
    launches: list[Launch],
) -> None:
    x, weight = (torch.empty(s, dtype=dtype, device=META) for s in (shape, shape[1:]))
    rstd = torch.empty((shape[0], 1), device=META)
    kernels = kernels_for(name, (x, weight.expand(shape)), formats)
    awkward = name == "triton" and shape[1] % 8 and formats == MIXED
    count = compile_all(launches, lambda: kernels.normalized(x, rstd, weight, kind, *formats))
    assert count == (2 if awkward else 1)
