"""The choice of a GEMM backend, and the words in which it is explained."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch

from blocktensor.ops import backends, library
from blocktensor.ops.backends import Choice, GemmProblem, choose_gemm, usable_gemm_backends
from blocktensor.ops.gluon.tiles import choose_tile
from tests.numeric import E4M3, operand

CUDA = torch.device("cuda", 0)
CPU = torch.device("cpu")
PROBLEM = GemmProblem(4096, 7168, 2048, 1, 128, torch.bfloat16, CUDA)

Pretend = Callable[..., None]


def forget() -> None:
    for cached in (backends._choose, backends._warn_slow, backends._cast_modules):
        cached.cache_clear()


@pytest.fixture(autouse=True)
def afresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv(backends.FORCE_VARIABLE, raising=False)
    forget()
    yield
    forget()


@pytest.fixture
def pretend(monkeypatch: pytest.MonkeyPatch) -> Pretend:
    """Make `backends` see a GPU of some capability, a CUDA version, a Triton version or none."""

    def install(
        capability: tuple[int, int], cuda: str | None = "13.0", triton: str | None = "3.9.0"
    ) -> None:
        monkeypatch.setattr(backends, "_capability", lambda index: capability)
        monkeypatch.setattr(backends, "_has_triton", lambda: triton is not None)
        monkeypatch.setattr(backends, "_triton_version", lambda: triton)
        monkeypatch.setattr(backends, "sms", lambda device: 132)
        monkeypatch.setattr(torch.version, "cuda", cuda)

    return install


def test_the_order_of_preference() -> None:
    assert [b.name for b in backends.GEMM_BACKENDS] == ["gluon", "cublas", "triton", "reference"]


def test_every_backend_has_its_functions() -> None:
    for backend in backends.GEMM_BACKENDS:
        module = backends.gemm_module(backend.name)
        assert callable(module.gemm)
        declines_accumulation = backend.declines(replace(PROBLEM, accumulate=True)) is not None
        assert hasattr(module, "gemm_add_") != declines_accumulation


# What runs where


def test_a_cpu_runs_the_reference() -> None:
    assert usable_gemm_backends(CPU) == ("reference",)
    assert choose_gemm(replace(PROBLEM, device=CPU)) == Choice(
        "reference",
        "runs on any device; gluon, cublas, triton: needs a CUDA device, got 'cpu'",
    )


def test_a_gpu_without_fp8_runs_the_reference_and_says_so_once(pretend: Pretend) -> None:
    pretend((8, 0))
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


def test_a_cpu_runs_the_reference_without_a_warning() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        choose_gemm(replace(PROBLEM, device=CPU))


NEWER = "gluon: tested with Triton 3.6, got 3.9.0"
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
    pretend(capability, cuda)
    assert choose_gemm(PROBLEM) == Choice(name, reason)
    expected = ("cublas", "triton", "reference") if name == "cublas" else ("triton", "reference")
    assert usable_gemm_backends(CUDA) == expected


def test_cublas_needs_no_triton(pretend: Pretend) -> None:
    pretend((9, 0), triton=None)
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
        ({"a_block": 128}, "no 128x128 blocks on the left"),
        ({"k": 0}, "nothing to contract"),
        ({"k": 2056}, "K and N must be multiples of 16, got K=2056, N=7168"),
        ({"n": 130}, "K and N must be multiples of 16, got K=2048, N=130"),
        ({"m": 4097}, "M must be a multiple of 4, got M=4097"),
    ],
)
def test_what_cublas_declines_goes_to_triton(
    pretend: Pretend, change: dict[str, object], reason: str
) -> None:
    pretend((9, 0))
    assert choose_gemm(replace(PROBLEM, **change)) == Choice(
        "triton", f"takes any shape; {NEWER}; cublas: {reason}"
    )


@pytest.mark.parametrize(
    "change",
    [
        {"bias": torch.bfloat16},
        {"out_dtype": torch.float32},
        {"b_block": 1},
        {"m": 4, "n": 16, "k": 16},
    ],
)
def test_what_cublas_takes(pretend: Pretend, change: dict[str, object]) -> None:
    pretend((9, 0))
    assert choose_gemm(replace(PROBLEM, **change)).name == "cublas"


# The kernel for Hopper


@pytest.mark.parametrize(
    "change",
    [
        {"bias": torch.float32, "out_dtype": torch.float16},
        {"m": 7168, "n": 2048, "k": 4096, "b_block": 1, "accumulate": True},
        {"m": 64, "n": 2048, "k": 7168},
        {"m": 4097, "n": 129, "k": 2055},
    ],
)
def test_hopper_runs_its_own_kernel(pretend: Pretend, change: dict[str, object]) -> None:
    """The choice of tile shows, and what it is expected to take."""
    pretend((9, 0), triton="3.6.0")
    problem = replace(PROBLEM, **change)
    choice = choose_gemm(problem)
    assert choice.name == "gluon"
    shown = re.fullmatch(r"(\d+)x(\d+) tiles(?: and (\d+) parts of K)?, .* \d+ us", choice.reason)
    assert shown is not None
    shape = problem.m, problem.n, -(-problem.k // 128), problem.b_block
    tile, parts, _ = choose_tile(*shape, 132, accumulate=problem.accumulate)
    assert [int(number or 1) for number in shown.groups()] == [*tile.size, parts]


@pytest.mark.parametrize(
    ("change", "name", "reason"),
    [
        ({"a_block": 128}, "triton", "no 128x128 blocks on the left"),
        ({"k": 0}, "triton", "nothing to contract"),
        (
            {"b_block": 1, "bias": torch.float32},
            "triton",
            "no bias where both sides have 1x128 blocks",
        ),
    ],
)
def test_what_hoppers_kernel_leaves_to_others(
    pretend: Pretend, change: dict[str, object], name: str, reason: str
) -> None:
    pretend((9, 0), triton="3.6.0")
    choice = choose_gemm(replace(PROBLEM, **change))
    assert choice.name == name
    assert "gluon" in choice.reason
    assert reason in choice.reason


def test_where_cublas_is_faster_it_is_left_to_it(
    pretend: Pretend, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend((9, 0), triton="3.6.0")
    monkeypatch.setattr(backends, "cublas_is_faster", lambda *_: True)
    choice = choose_gemm(PROBLEM)
    assert choice.name == "cublas"
    assert "gluon: cuBLAS is predicted to be faster here" in choice.reason


def test_a_slower_kernel_can_be_forced(pretend: Pretend, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend((9, 0), triton="3.6.0")
    monkeypatch.setattr(backends, "cublas_is_faster", lambda *_: True)
    monkeypatch.setenv(backends.FORCE_VARIABLE, "gluon")
    assert choose_gemm(PROBLEM) == Choice("gluon", "forced by BLOCKTENSOR_GEMM")


# Forcing one


@pytest.mark.parametrize("name", ["cublas", "triton", "reference"])
def test_a_backend_can_be_forced(
    pretend: Pretend, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    pretend((9, 0))
    monkeypatch.setenv(backends.FORCE_VARIABLE, name)
    assert choose_gemm(PROBLEM) == Choice(name, "forced by BLOCKTENSOR_GEMM")


def test_an_empty_variable_forces_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(backends.FORCE_VARIABLE, "")
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
    pretend((9, 0))
    monkeypatch.setenv(backends.FORCE_VARIABLE, name)
    with pytest.raises(ValueError, match="BLOCKTENSOR_GEMM") as error:
        choose_gemm(problem)
    assert str(error.value) == message


def test_the_variable_is_read_at_every_call(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = torch.Generator().manual_seed(0)
    a, b = operand(3, 5, 1, rng), operand(4, 5, 128, rng)
    want = library.gemm(*a, *b)
    monkeypatch.setenv(backends.FORCE_VARIABLE, "cublas")
    with pytest.raises(ValueError, match="needs a CUDA device, got 'cpu'"):
        library.gemm(*a, *b)
    monkeypatch.setenv(backends.FORCE_VARIABLE, "reference")
    assert torch.equal(library.gemm(*a, *b), want)


# Casts


class Fake:
    """As much of a CUDA tensor as the choice of a cast looks at."""

    def __init__(self, dtype: torch.dtype, shape: tuple[int, int], stride: tuple[int, int]) -> None:
        like = torch.empty_strided(shape, stride, dtype=dtype, device="meta")
        self.element_size, self.stride, self.data_ptr = like.element_size, like.stride, lambda: 0
        self.shape, self.dtype, self.device = like.shape, dtype, CUDA


@pytest.mark.parametrize(
    ("dtype", "shape", "stride", "module"),
    [
        (torch.bfloat16, (256, 272), (272, 1), "gluon.cast"),
        (torch.float16, (16, 16), (32, 1), "gluon.cast"),
        (torch.float32, (252, 271), (271, 1), "gluon.cast"),
        (torch.bfloat16, (252, 270), (272, 1), "gluon.cast"),
        (torch.bfloat16, (254, 272), (272, 1), "triton.cast"),
        (torch.bfloat16, (256, 271), (272, 1), "triton.cast"),
        (torch.bfloat16, (256, 270), (271, 1), "triton.cast"),
        (torch.bfloat16, (256, 272), (1, 256), "triton.cast"),
        (torch.bfloat16, (256, 272), (2**24, 1), "triton.cast"),
    ],
)
def test_who_casts(
    pretend: Pretend,
    dtype: torch.dtype,
    shape: tuple[int, int],
    stride: tuple[int, int],
    module: str,
) -> None:
    pretend((9, 0))
    x = Fake(dtype, shape, stride)
    assert backends.cast_module(x).__name__ == f"blocktensor.ops.{module}"


@pytest.mark.parametrize(
    ("shape", "stride", "module"),
    [
        ((256, 272), (272, 1), "gluon.transpose"),
        ((252, 268), (268, 1), "gluon.transpose"),
        ((254, 272), (272, 1), "triton.transpose"),
        ((256, 270), (272, 1), "triton.transpose"),
        ((256, 272), (274, 1), "triton.transpose"),
        ((256, 272), (1, 256), "triton.transpose"),
    ],
)
def test_who_transposes(
    pretend: Pretend, shape: tuple[int, int], stride: tuple[int, int], module: str
) -> None:
    pretend((9, 0))
    x = Fake(torch.float8_e4m3fn, shape, stride)
    assert backends.transpose_module(x).__name__ == f"blocktensor.ops.{module}"


def test_gluon_casts_on_sm_90_and_later(pretend: Pretend) -> None:
    pretend((8, 9))
    x = Fake(torch.bfloat16, (256, 272), (272, 1))
    assert backends.cast_module(x).__name__ == "blocktensor.ops.triton.cast"
    assert backends.transpose_module(x).__name__ == "blocktensor.ops.triton.transpose"


@pytest.mark.parametrize(("capability", "triton"), [((8, 0), "3.6.0"), ((9, 0), None)])
def test_casts_fall_back_to_the_reference(
    pretend: Pretend, capability: tuple[int, int], triton: str | None
) -> None:
    pretend(capability, triton=triton)
    x = Fake(torch.bfloat16, (256, 272), (272, 1))
    for module in (
        backends.cast_module(x),
        backends.transpose_module(x),
    ):
        assert module.__name__ == "blocktensor.ops.reference"


def test_an_empty_product_asks_no_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(backends.FORCE_VARIABLE, "cublas")  # would be refused
    data, scale = torch.empty(0, 5, dtype=E4M3), torch.empty(0, 1)
    other = torch.empty(3, 5, dtype=E4M3), torch.empty(3, 1)
    assert library.gemm(data, scale, *other).shape == (0, 3)
    assert library.gemm(*other, data, scale).shape == (3, 0)
    library.gemm_add_(torch.empty(0, 3), data, scale, *other)
    library.gemm_add_(torch.empty(3, 0), *other, data, scale)
