"""The choice of a GEMM backend, and the words in which it is explained."""

from __future__ import annotations

import re
import warnings
from dataclasses import replace

import pytest
import torch

from blocktensor.ops.devices import H200
from blocktensor.ops.formats import (
    BLOCKS_1X128,
    BLOCKS_1X128_POW2,
    BLOCKS_128X128,
    BLOCKS_128X128_POW2,
    BlockFormat,
)
from blocktensor.ops.gemm import choose_backend
from blocktensor.ops.gemm.choose_backend import (
    GEMM_BACKENDS,
    GemmChoice,
    GemmProblem,
    choose_gemm,
    gemm_backend,
    usable_gemm_backends,
)
from blocktensor.ops.gemm.hopper.tiles import choose_tile
from blocktensor.ops.gemm.ops import gemm
from blocktensor.ops.runtime.specialize import GEMM_VARIABLE
from tests.support.numeric import operand
from tests.support.pretended_gpu import CPU, CUDA, OFF, Pretend, pretend

__all__ = ["pretend"]

pytestmark = pytest.mark.usefixtures("pretend")

PROBLEM = GemmProblem(4096, 7168, 2048, BLOCKS_1X128, BLOCKS_128X128, torch.bfloat16, CUDA)


def words(choice: GemmChoice) -> tuple[str, str]:
    return choice.name, choice.reason


def test_the_order_of_preference() -> None:
    assert [b.name for b in GEMM_BACKENDS] == ["gluon", "cublas", "triton", "reference"]


def test_every_backend_has_its_functions() -> None:
    for backend in GEMM_BACKENDS:
        assert gemm_backend(backend.name) is backend
        assert callable(backend.function("gemm"))
        declines_accumulation = backend.declines(replace(PROBLEM, accumulate=True)) is not None
        assert (backend.function("gemm_add_") is None) == declines_accumulation
        assert backend.launches == (backend.name in ("gluon", "triton"))


# What runs where


def test_a_cpu_runs_the_reference() -> None:
    assert usable_gemm_backends(CPU) == ("reference",)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        choice = choose_gemm(replace(PROBLEM, device=CPU))
    reason = "runs on any device; gluon, cublas, triton: needs a CUDA device, got 'cpu'"
    assert words(choice) == ("reference", reason)


def test_a_gpu_without_fp8_runs_the_reference_and_says_so_once(pretend: Pretend) -> None:
    pretend((8, 0), fast=False)
    assert usable_gemm_backends(CUDA) == ("reference",)
    with pytest.warns(UserWarning, match="slow") as caught:
        choice = choose_gemm(PROBLEM)
    assert choice.name == "reference"
    assert [str(w.message) for w in caught] == [
        "blocktensor: FP8 GEMMs on cuda:0 run in the slow pure-torch reference "
        "(gluon, cublas, triton: needs a GPU with FP8 (sm_89 or later), got sm_80)"
    ]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert choose_gemm(replace(PROBLEM, m=77)).name == "reference"


NEWER = f"gluon: {OFF}"
SM90_ONLY = (
    "takes any shape; gluon: written for sm_90; cublas: cuBLAS scales blockwise on sm_90 only"
)


@pytest.mark.parametrize(
    ("capability", "cuda", "name", "reason"),
    [
        ((8, 9), "13.0", "triton", SM90_ONLY),
        ((10, 0), "13.0", "triton", SM90_ONLY),
        (
            (9, 0),
            "12.8",
            "triton",
            f"takes any shape; {NEWER}; cublas: needs CUDA >= 12.9, torch has 12.8",
        ),
        (
            (9, 0),
            None,
            "triton",
            f"takes any shape; {NEWER}; cublas: needs CUDA >= 12.9, torch has None",
        ),
        ((9, 0), "12.9", "cublas", f"takes this shape; {NEWER}"),
        ((9, 0), "13.0", "cublas", f"takes this shape; {NEWER}"),
    ],
)
def test_the_choice_on_a_gpu(
    pretend: Pretend, capability: tuple[int, int], cuda: str | None, name: str, reason: str
) -> None:
    pretend(capability, cuda, fast=capability != (9, 0))
    assert words(choose_gemm(PROBLEM)) == (name, reason)
    expected = ("cublas", "triton", "reference") if name == "cublas" else ("triton", "reference")
    assert usable_gemm_backends(CUDA) == expected


def test_cublas_needs_no_triton(pretend: Pretend) -> None:
    pretend((9, 0), triton=False)
    assert usable_gemm_backends(CUDA) == ("cublas", "reference")
    with pytest.warns(UserWarning, match="gluon, triton: triton is not installed"):
        assert choose_gemm(replace(PROBLEM, accumulate=True)).name == "reference"


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"accumulate": True}, "cannot add to an existing output"),
        (
            {"bias": torch.float32},
            "takes a bias in bf16 for a bf16 output only, got torch.float32 for torch.bfloat16",
        ),
        (
            {"bias": torch.bfloat16, "out_dtype": torch.float32},
            "takes a bias in bf16 for a bf16 output only, got torch.bfloat16 for torch.float32",
        ),
        ({"out_dtype": torch.float16}, "output torch.float16 not supported"),
        ({"a_format": BLOCKS_128X128}, "no 128x128 blocks on the left"),
        ({"k": 0}, "nothing to contract"),
        ({"k": 2056}, "K and N must be multiples of 16, got K=2056, N=7168"),
        ({"n": 130}, "K and N must be multiples of 16, got K=2048, N=130"),
        ({"m": 4097}, "M must be a multiple of 4, got M=4097"),
    ],
)
def test_what_cublas_declines_goes_to_triton(
    pretend: Pretend, change: dict[str, object], reason: str
) -> None:
    pretend((9, 0), fast=False)
    assert words(choose_gemm(replace(PROBLEM, **change))) == (
        "triton",
        f"takes any shape; {NEWER}; cublas: {reason}",
    )


@pytest.mark.parametrize(
    "change",
    [
        {"bias": torch.bfloat16},
        {"out_dtype": torch.float32},
        {"b_format": BLOCKS_1X128},
        {"m": 4, "n": 16, "k": 16},
    ],
)
def test_what_cublas_takes(pretend: Pretend, change: dict[str, object]) -> None:
    pretend((9, 0), fast=False)
    assert choose_gemm(replace(PROBLEM, **change)).name == "cublas"


# Formats


@pytest.mark.parametrize("fast", [True, False])
def test_the_rounding_of_scales_makes_no_difference(pretend: Pretend, fast: bool) -> None:
    pretend((9, 0), fast=fast)
    for a, b, change in (
        (BLOCKS_1X128_POW2, BLOCKS_128X128_POW2, {}),
        (BLOCKS_1X128_POW2, BLOCKS_1X128_POW2, {"b_format": BLOCKS_1X128}),
        (BLOCKS_128X128_POW2, BLOCKS_128X128, {"a_format": BLOCKS_128X128}),
    ):
        fp32 = choose_gemm(replace(PROBLEM, **change))
        power_of_two = choose_gemm(replace(PROBLEM, a_format=a, b_format=b))
        assert words(power_of_two) == words(fp32)


@pytest.mark.parametrize("side", ["a_format", "b_format"])
def test_a_format_without_kernels_runs_in_the_reference(pretend: Pretend, side: str) -> None:
    pretend((9, 0))
    problem = replace(PROBLEM, **{side: BlockFormat("1x32", (1, 32))})
    with pytest.warns(UserWarning, match="slow pure-torch reference"):
        choice = choose_gemm(problem)
    reason = "runs on any device; gluon, cublas, triton: no kernels for format 1x32"
    assert words(choice) == ("reference", reason)


# The kernel for Hopper


@pytest.mark.parametrize(
    "change",
    [
        {"bias": torch.float32, "out_dtype": torch.float16},
        {"m": 7168, "n": 2048, "k": 4096, "b_format": BLOCKS_1X128, "accumulate": True},
        {"m": 64, "n": 2048, "k": 7168},
        {"m": 4097, "n": 129, "k": 2055},
    ],
)
def test_hopper_runs_its_own_kernel(pretend: Pretend, change: dict[str, object]) -> None:
    """The choice of tile shows, and what it is expected to take."""
    pretend((9, 0))
    problem = replace(PROBLEM, **change)
    choice = choose_gemm(problem)
    assert choice.name == "gluon"
    shown = re.fullmatch(r"(\d+)x(\d+) tiles(?: and (\d+) parts of K)?, .* \d+ us", choice.reason)
    assert shown is not None
    shape = problem.m, problem.n, -(-problem.k // 128), problem.b_format.rows
    tile, parts, _ = choose_tile(*shape, H200, accumulate=problem.accumulate)
    assert [int(number or 1) for number in shown.groups()] == [*tile.size, parts]


@pytest.mark.parametrize(
    ("change", "name", "reason"),
    [
        ({"a_format": BLOCKS_128X128}, "triton", "no 128x128 blocks on the left"),
        ({"k": 0}, "triton", "nothing to contract"),
        (
            {"b_format": BLOCKS_1X128, "bias": torch.float32},
            "triton",
            "no bias where both sides have 1x128 blocks",
        ),
    ],
)
def test_what_hoppers_kernel_leaves_to_others(
    pretend: Pretend, change: dict[str, object], name: str, reason: str
) -> None:
    pretend((9, 0))
    choice = choose_gemm(replace(PROBLEM, **change))
    assert choice.name == name
    assert "gluon" in choice.reason
    assert reason in choice.reason


def test_where_cublas_is_faster_it_is_left_to_it(
    pretend: Pretend, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend((9, 0))
    monkeypatch.setattr(choose_backend, "cublas_is_faster", lambda *_: True)
    choice = choose_gemm(PROBLEM)
    assert choice.name == "cublas"
    assert "gluon: cuBLAS is predicted to be faster here" in choice.reason


def test_a_slower_kernel_can_be_forced(pretend: Pretend, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend((9, 0))
    monkeypatch.setattr(choose_backend, "cublas_is_faster", lambda *_: True)
    monkeypatch.setenv(GEMM_VARIABLE, "gluon")
    assert words(choose_gemm(PROBLEM)) == ("gluon", "forced by BLOCKTENSOR_GEMM")


# Forcing one


@pytest.mark.parametrize("name", ["cublas", "triton", "reference"])
def test_a_backend_can_be_forced(
    pretend: Pretend, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    pretend((9, 0), fast=False)
    monkeypatch.setenv(GEMM_VARIABLE, name)
    assert words(choose_gemm(PROBLEM)) == (name, "forced by BLOCKTENSOR_GEMM")


def test_an_empty_variable_forces_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(GEMM_VARIABLE, "")
    assert choose_gemm(replace(PROBLEM, device=CPU)).reason.startswith("runs on any device")


END = "Unset BLOCKTENSOR_GEMM to let blocktensor choose."


@pytest.mark.parametrize(
    ("name", "problem", "message"),
    [
        (
            "cutlass",
            PROBLEM,
            "BLOCKTENSOR_GEMM=cutlass: no backend of this name. Usable here for M=4096, N=7168, "
            f"K=2048: cublas, triton, reference. {END}",
        ),
        (
            "cublas",
            replace(PROBLEM, m=3, bias=torch.bfloat16),
            "BLOCKTENSOR_GEMM=cublas: M must be a multiple of 4, got M=3. Usable here for M=3, "
            f"N=7168, K=2048: triton, reference. {END}",
        ),
        (
            "triton",
            replace(PROBLEM, device=CPU),
            "BLOCKTENSOR_GEMM=triton: needs a CUDA device, got 'cpu'. Usable here for M=4096, "
            f"N=7168, K=2048: reference. {END}",
        ),
    ],
)
def test_a_backend_that_cannot_be_forced(
    pretend: Pretend,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    problem: GemmProblem,
    message: str,
) -> None:
    pretend((9, 0), fast=False)
    monkeypatch.setenv(GEMM_VARIABLE, name)
    with pytest.raises(ValueError, match="BLOCKTENSOR_GEMM") as error:
        choose_gemm(problem)
    assert str(error.value) == message


def test_the_variable_is_read_at_every_call(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = torch.Generator().manual_seed(0)
    a, b = operand(3, 5, 1, rng), operand(4, 5, 128, rng)
    want = gemm(a, b)
    monkeypatch.setenv(GEMM_VARIABLE, "cublas")
    with pytest.raises(ValueError, match="needs a CUDA device, got 'cpu'"):
        gemm(a, b)
    monkeypatch.setenv(GEMM_VARIABLE, "reference")
    assert torch.equal(gemm(a, b), want)
