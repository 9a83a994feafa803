"""The choice of a GEMM backend, and the words in which it is explained."""

from __future__ import annotations

import re
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch

from blocktensor.ops import formats
from blocktensor.ops.devices import H200
from blocktensor.ops.formats import BLOCKS_1X128, BLOCKS_1X128_POW2, BLOCKS_128X128
from blocktensor.ops.gemm import choose_backend
from blocktensor.ops.gemm.choose_backend import GEMM_BACKENDS, choose_gemm, usable_gemm_backends
from blocktensor.ops.gemm.hopper.tiles import choose_tile
from blocktensor.ops.runtime.specialize import GEMM_VARIABLE
from tests.support.backends import CPU, CUDA, OFF, Pretend

pytestmark = pytest.mark.usefixtures("pretend")

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
PROBLEM = choose_backend.GemmProblem(4096, 7168, 2048, BLOCKS_1X128, BLOCKS_128X128, BF16, CUDA)


def words(choice: choose_backend.GemmChoice) -> tuple[str, str]:
    return choice.name, choice.reason


def test_every_backend_has_its_functions() -> None:
    assert [b.name for b in GEMM_BACKENDS] == ["gluon", "cublas", "triton", "reference"]
    for backend in GEMM_BACKENDS:
        assert choose_backend.gemm_backend(backend.name) is backend
        assert callable(backend.function("gemm"))
        assert backend.launches == (backend.name in ("gluon", "triton"))


HOPPER, PORTABLE = ((9, 0),), ((9, 0), "13.0", True, False)
"""Arguments of ``pretend``: a GPU, and one without the kernels in Gluon."""

ANY, TAKEN = "takes any shape", f"takes this shape; gluon: {OFF}"
SM90_ONLY = f"{ANY}; gluon: written for sm_90; cublas: cuBLAS scales blockwise on sm_90 only"
OLD_CUDA = f"{ANY}; gluon: {OFF}; cublas: needs CUDA >= 12.9, torch has"
DECLINED = f"{ANY}; gluon: {OFF}; cublas:"
BF16_BIAS = "takes a bias in bf16 for a bf16 output only, got"
SIXTEENS = "K and N must be multiples of 16, got"
SLOW = "runs on any device; gluon, cublas, triton:"
OTHER, NO_KERNELS = formats.BlockFormat("1x32", (1, 32)), f"{SLOW} no kernels for format 1x32"


@pytest.mark.parametrize(
    ("gpu", "change", "name", "reason"),
    [
        (HOPPER, {"device": CPU}, "reference", f"{SLOW} needs a CUDA device, got 'cpu'"),
        (((8, 9),), {}, "triton", SM90_ONLY),
        (((10, 0),), {}, "triton", SM90_ONLY),
        (((9, 0), "12.8", True, False), {}, "triton", f"{OLD_CUDA} 12.8"),
        (((9, 0), None, True, False), {}, "triton", f"{OLD_CUDA} None"),
        (((9, 0), "12.9", True, False), {}, "cublas", TAKEN),
        (((9, 0), "13.0", False), {"bias": FP32}, "reference",
         "runs on any device; gluon, triton: triton is not installed; "
         f"cublas: {BF16_BIAS} torch.float32 for torch.bfloat16"),
        # What cuBLAS takes, or leaves to Triton
        (PORTABLE, {}, "cublas", TAKEN),
        (PORTABLE, {"bias": BF16}, "cublas", TAKEN),
        (PORTABLE, {"out_dtype": FP32}, "cublas", TAKEN),
        (PORTABLE, {"b_format": BLOCKS_1X128}, "cublas", TAKEN),
        (PORTABLE, {"m": 4, "n": 16, "k": 16}, "cublas", TAKEN),
        (PORTABLE, {"bias": FP32}, "triton",
         f"{DECLINED} {BF16_BIAS} torch.float32 for torch.bfloat16"),
        (PORTABLE, {"bias": BF16, "out_dtype": FP32}, "triton",
         f"{DECLINED} {BF16_BIAS} torch.bfloat16 for torch.float32"),
        (PORTABLE, {"out_dtype": FP16}, "triton", f"{DECLINED} output torch.float16 not supported"),
        (PORTABLE, {"a_format": BLOCKS_128X128}, "triton",
         f"{DECLINED} no 128x128 blocks on the left"),
        (PORTABLE, {"k": 0}, "triton", f"{DECLINED} nothing to contract"),
        (PORTABLE, {"k": 2056}, "triton", f"{DECLINED} {SIXTEENS} K=2056, N=7168"),
        (PORTABLE, {"n": 130}, "triton", f"{DECLINED} {SIXTEENS} K=2048, N=130"),
        (PORTABLE, {"m": 4097}, "triton", f"{DECLINED} M must be a multiple of 4, got M=4097"),
        # What the kernel for Hopper leaves to others
        (HOPPER, {"a_format": BLOCKS_128X128}, "triton",
         f"{ANY}; gluon, cublas: no 128x128 blocks on the left"),
        (HOPPER, {"k": 0}, "triton", f"{ANY}; gluon, cublas: nothing to contract"),
        (HOPPER, {"b_format": BLOCKS_1X128, "bias": FP32}, "triton",
         f"{ANY}; gluon: no bias where both sides have 1x128 blocks; "
         f"cublas: {BF16_BIAS} torch.float32 for torch.bfloat16"),
        (HOPPER, {"a_format": OTHER}, "reference", NO_KERNELS),
        (HOPPER, {"b_format": OTHER}, "reference", NO_KERNELS),
    ],
)  # fmt: skip
def test_the_choice(pretend: Pretend, gpu: Any, change: Any, name: str, reason: str) -> None:
    pretend(*gpu)
    problem = replace(PROBLEM, **change)
    is_slow = name == "reference" and problem.device == CUDA
    with pytest.warns(UserWarning, match="slow pure-torch") if is_slow else nullcontext():
        choice = choose_gemm(problem)
    assert words(choice) == (name, reason)


def test_what_is_usable(pretend: Pretend) -> None:
    names = "cublas", "triton", "reference"
    for gpu, usable in ((PORTABLE, names), (((10, 0),), names[1:]), (((8, 0),), names[2:])):
        pretend(*gpu)
        assert usable_gemm_backends(CUDA) == usable
    assert usable_gemm_backends(CPU) == ("reference",)


def test_a_gpu_without_fp8_runs_the_reference_and_says_so_once(pretend: Pretend) -> None:
    pretend((8, 0), fast=False)
    with pytest.warns(UserWarning, match="slow") as caught:
        assert choose_gemm(PROBLEM).name == "reference"
    assert [str(w.message) for w in caught] == [
        "blocktensor: FP8 GEMMs on cuda:0 run in the slow pure-torch reference "
        "(gluon, cublas, triton: needs a GPU with FP8 (sm_89 or later), got sm_80)"
    ]
    assert choose_gemm(replace(PROBLEM, m=77)).name == "reference"  # a warning would be an error


@pytest.mark.parametrize("fast", [True, False])
def test_the_rounding_of_scales_makes_no_difference(pretend: Pretend, fast: bool) -> None:
    pretend((9, 0), fast=fast)
    for a, b, change in (
        (BLOCKS_1X128_POW2, formats.BLOCKS_128X128_POW2, {}),
        (BLOCKS_1X128_POW2, BLOCKS_1X128_POW2, {"b_format": BLOCKS_1X128}),
        (formats.BLOCKS_128X128_POW2, BLOCKS_128X128, {"a_format": BLOCKS_128X128}),
    ):
        power_of_two = choose_gemm(replace(PROBLEM, a_format=a, b_format=b))
        assert words(power_of_two) == words(choose_gemm(replace(PROBLEM, **change)))


@pytest.mark.parametrize(
    "change",
    [
        {"bias": FP32, "out_dtype": FP16},
        {"m": 7168, "n": 2048, "k": 4096, "b_format": BLOCKS_1X128},
        {"m": 64, "n": 2048, "k": 7168},
        {"m": 4097, "n": 129, "k": 2055},
    ],
)
def test_hopper_runs_its_own_kernel(pretend: Pretend, change: dict[str, Any]) -> None:
    pretend((9, 0))
    problem = replace(PROBLEM, **change)
    choice = choose_gemm(problem)
    assert choice.name == "gluon"
    shown = re.fullmatch(r"(\d+)x(\d+) tiles(?: and (\d+) parts of K)?, .* \d+ us", choice.reason)
    assert shown is not None
    shape = problem.m, problem.n, -(-problem.k // 128), problem.b_format.rows
    tile, parts, _ = choose_tile(*shape, H200)
    assert [int(number or 1) for number in shown.groups()] == [tile.m, tile.n, parts]


def test_where_cublas_is_faster_it_is_left_to_it(
    pretend: Pretend, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend((9, 0))
    monkeypatch.setattr(choose_backend, "cublas_is_faster", lambda *_: True)
    choice = choose_gemm(PROBLEM)
    assert choice.name == "cublas"
    assert "gluon: cuBLAS is predicted to be faster here" in choice.reason
    monkeypatch.setenv(GEMM_VARIABLE, "gluon")
    assert words(choose_gemm(PROBLEM)) == ("gluon", "forced by BLOCKTENSOR_GEMM")
    assert choose_backend.predict_gemm(PROBLEM, H200)[0] == "cublas"
    monkeypatch.delenv(GEMM_VARIABLE)
    pretend((9, 0), "12.8")  # without those kernels of cuBLAS
    assert choose_gemm(PROBLEM).name == "gluon"


def test_rows_that_keep_their_bits_share_one_way_to_sum(
    pretend: Pretend, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend((9, 0))
    monkeypatch.setattr(choose_backend, "cublas_is_faster", lambda *_: True)
    for m in (1, 64, 4096):
        choice = choose_gemm(replace(PROBLEM, m=m, n=2048, k=7168, batch_invariant=True))
        assert choice.name == "gluon"
        assert "parts" not in choice.reason
    assert "parts" in choose_gemm(replace(PROBLEM, m=65, n=2048, k=7168)).reason


def test_an_empty_variable_forces_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(GEMM_VARIABLE, "")
    assert choose_gemm(replace(PROBLEM, device=CPU)).reason.startswith("runs on any device")


@pytest.mark.parametrize(
    ("name", "change", "said"),
    [
        ("cublas", {}, None), ("triton", {}, None), ("reference", {}, None),
        ("cutlass", {}, "no backend of this name. Usable here for M=4096, N=7168, "
         "K=2048: cublas, triton, reference."),
        ("cublas", {"m": 3, "bias": BF16}, "M must be a multiple of 4, got M=3. Usable here for "
         "M=3, N=7168, K=2048: triton, reference."),
        ("triton", {"device": CPU}, "needs a CUDA device, got 'cpu'. Usable here for M=4096, "
         "N=7168, K=2048: reference."),
    ],
)  # fmt: skip
def test_a_backend_can_be_forced(
    pretend: Pretend, monkeypatch: pytest.MonkeyPatch, name: str, change: Any, said: str | None
) -> None:
    pretend(*PORTABLE)
    monkeypatch.setenv(GEMM_VARIABLE, name)
    problem = replace(PROBLEM, **change)
    if said is None:
        assert words(choose_gemm(problem)) == (name, "forced by BLOCKTENSOR_GEMM")
        return
    with pytest.raises(ValueError, match="BLOCKTENSOR_GEMM") as error:
        choose_gemm(problem)
    end = "Unset BLOCKTENSOR_GEMM to let blocktensor choose."
    assert str(error.value) == f"BLOCKTENSOR_GEMM={name}: {said} {end}"
