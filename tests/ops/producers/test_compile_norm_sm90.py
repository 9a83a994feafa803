"""Every variant of the norm's kernels compiles for sm_90, without a GPU, and spills nothing."""

from __future__ import annotations

import pytest
import torch

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
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    launches: list[Launch] = []
    monkeypatch.setattr(Launch, "__call__", lambda launch: launches.append(launch))
    backend = next(backend for backend in PRODUCER_BACKENDS if backend.name == name)
    x, weight = (torch.empty(s, dtype=dtype, device=META) for s in (shape, shape[1:]))
    rstd = torch.empty((shape[0], 1), device=META)
    sources = x, weight.expand(shape)
    assert backend.declines(ProducerProblem(sources, *formats)) is None
    backend.load().normalized(x, rstd, weight, kind, *formats)
    awkward = name == "triton" and shape[1] % 8 and formats == MIXED
    assert len(launches) == (2 if awkward else 1)
    for made in launches:
        resources = compile_for_sm90(made)
        print(name, kind, dtype, shape, resources.registers, resources.spilled_bytes)
        assert resources.spilled_bytes <= SPILLS, f"{made.kernel} {made.constants}"
