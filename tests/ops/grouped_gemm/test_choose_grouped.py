"""The choice of a backend of grouped GEMMs."""

from __future__ import annotations

import pytest
import torch

from blocktensor.ops.formats import BLOCKS_1X128, BLOCKS_128X128, BlockFormat
from blocktensor.ops.grouped_gemm import choose_backend
from blocktensor.ops.grouped_gemm.choose_backend import GroupedProblem, choose_grouped
from tests.support.pretended_gpu import CUDA, Pretend, pretend

__all__ = ["pretend"]

ROWS, SQUARES = BLOCKS_1X128, BLOCKS_128X128


@pytest.mark.parametrize(
    ("a", "b", "name", "others"),
    [
        (ROWS, ROWS, "gluon", ""),
        (
            ROWS,
            SQUARES,
            "triton",
            "gluon: weight gradients of 1x128 blocks on both sides only",
        ),
        (SQUARES, ROWS, "triton", "gluon: no 128x128 blocks on the left"),
    ],
    ids=str,
)
def test_who_makes_weight_gradients(
    pretend: Pretend,
    monkeypatch: pytest.MonkeyPatch,
    a: BlockFormat,
    b: BlockFormat,
    name: str,
    others: str,
) -> None:
    pretend((9, 0), triton="3.6.0")
    monkeypatch.setattr(choose_backend, "sms", lambda device: 132)
    choose_backend._choose.cache_clear()
    problem = GroupedProblem("wgrad", 4096, 2048, 7168, 8, a, b, torch.bfloat16, CUDA)
    choice = choose_grouped(problem)
    choose_backend._choose.cache_clear()
    assert (choice.name, choice.others) == (name, others)
