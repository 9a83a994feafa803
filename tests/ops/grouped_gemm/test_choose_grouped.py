"""The choice of a backend of grouped GEMMs."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from blocktensor.ops.formats import BLOCKS_1X128, BLOCKS_128X128, BlockFormat
from blocktensor.ops.grouped_gemm.choose_backend import GroupedProblem, choose_grouped
from blocktensor.ops.grouped_gemm.tiles import choose_wgrad_tile, stores_fit
from blocktensor.ops.runtime.specialize import GEMM_VARIABLE
from tests.support.backends import CPU, CUDA, Pretend

pytestmark = pytest.mark.usefixtures("pretend")

PROBLEM = GroupedProblem(
    "gemm", 4096, 2048, 768, 16, BLOCKS_1X128, BLOCKS_128X128, torch.bfloat16, CUDA
)


def test_forced_backends(pretend: Pretend, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend((9, 0), fast=False)
    monkeypatch.setenv(GEMM_VARIABLE, "cublas")
    choice = choose_grouped(PROBLEM)
    assert (choice.name, choice.why) == ("triton", "takes any shape")
    monkeypatch.setenv(GEMM_VARIABLE, "triton")
    with pytest.raises(ValueError, match="BLOCKTENSOR_GEMM") as error:
        choose_grouped(replace(PROBLEM, device=CPU))
    assert str(error.value) == (
        "BLOCKTENSOR_GEMM=triton: needs a CUDA device, got 'cpu'. Usable here for T=4096, N=2048, "
        "K=768, E=16: reference. Unset BLOCKTENSOR_GEMM to let blocktensor choose."
    )


@pytest.mark.parametrize("other", [None, BlockFormat("64x64", (64, 64))])
def test_the_reference_on_a_gpu_warns(pretend: Pretend, other: BlockFormat | None) -> None:
    pretend((9, 0), triton=other is not None)
    why = "no kernels for format 64x64" if other else "triton is not installed"
    problem = replace(PROBLEM, b_format=other or BLOCKS_128X128)
    said = rf"run in the slow pure-torch reference \(gluon, triton: {why}"
    with pytest.warns(UserWarning, match=said):
        assert choose_grouped(problem).name == "reference"


@pytest.mark.parametrize(
    ("a", "b", "name", "others"),
    [
        (BLOCKS_1X128, BLOCKS_1X128, "gluon", ""),
        (BLOCKS_1X128, BLOCKS_128X128, "gluon", ""),
        (BLOCKS_128X128, BLOCKS_1X128, "triton", "gluon: no 128x128 blocks on the left"),
    ],
    ids=str,
)
def test_who_makes_weight_gradients(
    pretend: Pretend, a: BlockFormat, b: BlockFormat, name: str, others: str
) -> None:
    pretend((9, 0))
    large = replace(PROBLEM, tokens=8192, n=4096, k=7168, experts=2)
    problems = PROBLEM, large, replace(large, bias=torch.bfloat16)
    sizes = [choose_grouped(problem).why.removesuffix(" tiles") for problem in problems]
    assert sizes == ["128x128", "128x256", "128x128"]
    choice = choose_grouped(replace(PROBLEM, kind="wgrad", a_format=a, b_format=b))
    assert (choice.name, choice.others) == (name, others)
    assert choose_grouped(replace(PROBLEM, k=0)).others == "gluon: nothing to contract"


@pytest.mark.parametrize("b_block", [1, 128])
def test_rows_of_experts_that_end_inside_a_tile_fit_its_registers(b_block: int) -> None:
    for n in range(64, 4096, 64):
        assert stores_fit(choose_wgrad_tile(n, 7168, 65536, 8, b_block, 132)[0], n)


@pytest.mark.parametrize(("experts", "in_turn"), [(15, True), (16, False)])
def test_programs_of_many_weight_gradients_do_not_start_in_turn(
    experts: int, in_turn: bool
) -> None:
    tile, programs = choose_wgrad_tile(4096, 7168, 4096 * experts, experts, 128, sms=132)
    assert (programs > 132 * tile.programs) == in_turn
