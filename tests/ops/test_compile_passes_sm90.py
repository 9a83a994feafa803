"""The passes of RMS norms, sums of split products and casts of shards compile for sm_90."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from blocktensor.ops.cast import triton_128x128
from blocktensor.ops.formats import BLOCKS_128X128
from blocktensor.ops.gemm.hopper.split_k import plan_sum
from blocktensor.ops.norm import triton_passes
from blocktensor.ops.runtime.launch import Launch
from tests.support import producer_launches
from tests.support.sm90 import compile_for_sm90

launches = producer_launches.launches
BF16, FP32 = torch.bfloat16, torch.float32


def like(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def terms(kind: str) -> None:
    x, rstd, weight = like(300, 576), like(300, 1, dtype=FP32), like(576)
    triton_passes.gradient_terms(x, x, rstd, weight, kind, True)  # type: ignore[arg-type]


def gradient(kind: str) -> None:
    x, rstd, weight = like(300, 576), like(300, 1, dtype=FP32), like(576)
    triton_passes.input_gradient(x, x, rstd, rstd, weight, kind)  # type: ignore[arg-type]


RUNS: dict[str, Callable[[], object]] = {
    "squares": lambda: triton_passes.squares(like(300, 576)),
    "terms, llama": lambda: terms("llama"),
    "terms, gemma": lambda: terms("gemma"),
    "input gradient, llama": lambda: gradient("llama"),
    "input gradient, gemma": lambda: gradient("gemma"),
    "sum of splits": lambda: plan_sum(like(4, 128, 576, dtype=FP32), None, like(65, 576), False)(),
    "sum added": lambda: plan_sum(
        like(4, 128, 576, dtype=FP32), None, like(65, 576, dtype=FP32), True
    )(),
    "amax of a shard": lambda: triton_128x128.shard_amax(like(300, 576), BLOCKS_128X128, 20, 0),
    "cast of a shard": lambda: triton_128x128.quantize_shard(
        like(300, 576), like(3, 5, dtype=FP32), BLOCKS_128X128, 20, 0
    ),
}


@pytest.mark.parametrize("name", RUNS)
def test_compile(name: str, launches: list[Launch]) -> None:
    RUNS[name]()
    assert len(launches) == 1
    assert compile_for_sm90(launches[0]).spilled_bytes == 0
