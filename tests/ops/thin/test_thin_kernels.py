"""The kernels of thin matmuls: interpreted on the CPU, compiled for sm_90, and on a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Generator, Tensor

from blocktensor.ops.thin import ops, reference
from tests.support.asserts import no_synchronization
from tests.support.groups import SIZES, ends
from tests.support.interpreter import interpreted
from tests.support.numeric import assert_same

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
CASES = (
    ((100, 0, 190), 10, 136),
    ((128, 256), 0, 130),
    ((0, 0, 5), 0, 1),
    ((0, 0), 5, 16),
    ((1, 0, 127, 129, 13, 576), 0, 200),
)
every_case = pytest.mark.parametrize("case", CASES, ids=lambda case: str(case[0]))
RANKS = (1, 5, 8, 16, 32, 64, 100)
every_rank = pytest.mark.parametrize("rank", RANKS)
INTERPRETED = [*((CASES[0], rank) for rank in RANKS), *((case, 16) for case in CASES[1:])]
"""No step of a kernel depends on the rank and also on the sizes of groups."""


def integers(*shape: int, dtype: torch.dtype, device: Any, seed: int) -> Tensor:
    """Small integers: fp32 holds all sums exactly."""
    rng = Generator().manual_seed(seed)
    return torch.randint(-2, 3, shape, generator=rng).to(device, dtype)


def check(module: Any, case: Any, rank: int, dtype: torch.dtype, device: str = "cpu") -> None:
    """Every kernel, bit for bit; rows of no group are NaN, and rows have gaps."""
    sizes, left_over, columns = case
    tokens, experts, offs = sum(sizes) + left_over, len(sizes), ends(*sizes, device=device)
    how: Any = {"dtype": dtype, "device": device}
    wide = integers(tokens, columns + 3, **how, seed=1)[:, :columns]
    wide[sum(sizes) :] = float("nan")
    for w in (
        integers(experts, columns, rank, dtype=FP32, device=device, seed=2) / 3,
        integers(columns, rank, experts, dtype=FP32, device=device, seed=3).permute(2, 0, 1),
        integers(experts, rank, columns, **how, seed=4).mT,
    ):
        operand = module.thin_operand(w, dtype)
        assert_same(operand, reference.thin_operand(w, dtype))
    for scaling in (1.0, 0.75):
        u = module.thin_rows(wide, operand, offs, scaling)
        assert_same(u, reference.thin_rows(wide, operand, offs, scaling))
    for out, order in ((FP32, "ecr"), (FP32, "cre"), (dtype, "erc")):
        made = module.thin_products(wide, u, offs, rank, out, order)
        wanted = reference.thin_products(wide, u, offs, rank, out, order)
        assert_same(made, wanted)
        assert made.stride() == wanted.stride()


@pytest.mark.parametrize(("case", "rank"), INTERPRETED, ids=str)
@interpreted
def test_interpreted(case: Any, rank: int) -> None:
    from blocktensor.ops.thin import triton_thin

    check(triton_thin, case, rank, BF16)


@interpreted
def test_large_tiles_interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    from blocktensor.ops.thin import triton_thin

    monkeypatch.setattr(triton_thin, "_FEW", 0)
    check(triton_thin, CASES[0], 16, BF16)


@pytest.mark.parametrize("wrong", [[600, 700, 800], [100, 100, 700], [-5, 100, 90]], ids=str)
@interpreted
def test_ends_before_the_first_token_or_beyond_the_last(wrong: list[int]) -> None:
    """No memory of others is read or written."""
    from blocktensor.ops.thin import triton_thin

    offs = torch.tensor(wrong, dtype=torch.int32)
    wide = integers(290, 40, dtype=BF16, device="cpu", seed=1)
    operand = integers(3, 40, 8, dtype=BF16, device="cpu", seed=2)
    u = triton_thin.thin_rows(wide, operand, offs, 1.0)
    triton_thin.thin_products(wide, u, offs, 8, FP32, "ecr")


def launches(experts: int, tokens: int, columns: int) -> Iterator[Any]:
    pytest.importorskip("triton")
    from blocktensor.ops.thin import triton_thin as kernels
    from tests.support.sm90 import like

    wide = like(tokens, columns)
    offs = None if experts == 1 else like(experts, dtype=torch.int32)
    for rank in (8, 16, 64, 128):
        thin, u = like(experts, columns, rank), like(tokens, rank)
        yield kernels.plan_operand(like(experts, rank, columns, dtype=FP32).mT, thin)
        yield kernels.plan_rows(wide, thin, offs, 0.5, u)
        for order in ("erc", "cre"):
            out = reference.empty_gradient(wide, offs, rank, FP32, order)
            yield kernels.plan_products(wide, u, offs, out)


@pytest.mark.parametrize(("experts", "tokens"), [(128, 40001), (1, 4001)], ids=["large", "small"])
def test_kernels_compile_for_sm_90_without_spills(experts: int, tokens: int) -> None:
    from tests.support.sm90 import compile_for_sm90

    for launch in launches(experts, tokens, 2048):
        code = compile_for_sm90(launch)
        assert code.spilled_bytes == 0, launch.kernel
        assert code.shared_bytes <= 227 * 1024
        if "operand" not in launch.kernel.__name__:
            assert ("GMMA" if experts > 1 else "HMMA") in code.sass
            assert "LDGSTS.E.BYPASS.128" in code.sass  # whole vectors, several tiles ahead
        assert "LDG.E.U16" not in code.sass


@pytest.mark.gpu
@every_rank
@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_on_a_gpu(rank: int, dtype: torch.dtype) -> None:
    for case in (*CASES, (SIZES, 7, 2048), ((300,) * 33, 0, 768), ((40_000,), 0, 328)):
        check(ops, case, rank, dtype, "cuda")


@pytest.mark.gpu
@pytest.mark.unchecked
def test_a_step_reads_nothing_on_the_host() -> None:
    wide = integers(300, 256, dtype=BF16, device="cuda", seed=1)
    operand = integers(2, 256, 16, dtype=BF16, device="cuda", seed=2)
    offs = ends(100, 190, device="cuda")
    for _ in range(2):
        with no_synchronization():
            u = ops.thin_rows(wide, operand, offs, 1.0)
            ops.thin_products(wide, u, offs, 16, FP32, "ecr")
        torch.cuda.synchronize()
