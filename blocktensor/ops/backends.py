"""Which implementation runs: the one place that looks at devices, versions and shapes.

Casts run in Triton or Gluon on a CUDA GPU with FP8 (sm_89 and later), else in the reference. GEMMs
are chosen per problem from an ordered registry; ``BLOCKTENSOR_GEMM`` forces one backend by name.
"""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import importlib.util
import os
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from .gluon.tiles import choose_tile, cublas_is_faster, sms
from .layouts import BLOCK, num_blocks

FORCE_VARIABLE = "BLOCKTENSOR_GEMM"
_FP8_CAPABILITY = (8, 9)
_HOPPER = (9, 0)  # TMA and wgmma; 16-bit maxima, two at a time, in casts
_GLUON_TRITON = "3.6."


@dataclass(frozen=True)
class GemmProblem:
    """A GEMM ``[M, K] x [N, K]^T`` as far as the choice of backend depends on it.

    ``a_block`` and ``b_block`` are the rows that share a scale: 1 or 128.
    """

    m: int
    n: int
    k: int
    a_block: int
    b_block: int
    out_dtype: torch.dtype
    device: torch.device
    bias: torch.dtype | None = None
    accumulate: bool = False


@dataclass(frozen=True)
class GemmBackend:
    """One entry of the registry.

    ``unusable(device)``, ``declines(problem)`` and ``yields(problem)`` return the reason, or None
    where all is well; the latter two may assume a usable device. A backend that declines cannot;
    one that yields could, but the next is better.
    """

    name: str
    module: str
    unusable: Callable[[torch.device], str | None]
    declines: Callable[[GemmProblem], str | None]
    why: Callable[[GemmProblem], str]
    yields: Callable[[GemmProblem], str | None] = lambda problem: None


@dataclass(frozen=True)
class Choice:
    """The backend for a problem, and why it was chosen."""

    name: str
    reason: str


@functools.cache
def _capability(index: int) -> tuple[int, int]:
    return torch.cuda.get_device_capability(index)


@functools.cache
def _triton_version() -> str:
    return importlib.metadata.version("triton")


@functools.cache
def _has_triton() -> bool:
    try:
        return importlib.util.find_spec("triton") is not None
    except ValueError:  # sys.modules["triton"] is None: its import is blocked
        return False


def _lacks_fp8(device: torch.device) -> str | None:
    if device.type != "cuda":
        return f"needs a CUDA device, got {device.type!r}"
    capability = _capability(_index(device))
    if capability < _FP8_CAPABILITY:
        found = "sm_{}{}".format(*capability)
        return f"needs a GPU with FP8 (sm_89 or later), got {found}"
    return None


def _triton_unusable(device: torch.device) -> str | None:
    return _lacks_fp8(device) or (None if _has_triton() else "triton is not installed")


def _cublas_unusable(device: torch.device) -> str | None:
    if reason := _lacks_fp8(device):
        return reason
    if _capability(_index(device)) != _HOPPER:
        return "cuBLAS scales blockwise on sm_90 only"
    version = tuple(int(part) for part in (torch.version.cuda or "0.0").split(".")[:2])
    return None if version >= (12, 9) else f"needs CUDA >= 12.9, torch has {torch.version.cuda}"


def _cublas_declines(p: GemmProblem) -> str | None:
    if p.accumulate:
        return "cannot add to an existing output"
    if p.bias is not None and (p.bias, p.out_dtype) != (torch.bfloat16, torch.bfloat16):
        return f"takes a bias in bf16 for a bf16 output only, got {p.bias} for {p.out_dtype}"
    if p.out_dtype not in (torch.bfloat16, torch.float32):
        return f"output {p.out_dtype} not supported"
    if p.a_block == BLOCK:  # its 128x128 by 1x128 kernel refuses most ragged shapes
        return "no 128x128 blocks on the left"
    if p.k == 0:
        return "nothing to contract"
    if p.k % 16 or p.n % 16:
        return f"K and N must be multiples of 16, got K={p.k}, N={p.n}"
    if p.m % 4:
        return f"M must be a multiple of 4, got M={p.m}"
    return None


def _gluon_unusable(device: torch.device) -> str | None:
    if reason := _triton_unusable(device):
        return reason
    if _capability(_index(device)) != _HOPPER:
        return "written for sm_90"
    version = _triton_version()
    return None if version.startswith(_GLUON_TRITON) else f"tested with Triton 3.6, got {version}"


def _gluon_declines(p: GemmProblem) -> str | None:
    if p.a_block == BLOCK:
        return "no 128x128 blocks on the left"
    if p.k == 0:
        return "nothing to contract"
    if p.b_block == 1 and p.bias is not None:
        return "no bias where both sides have 1x128 blocks"
    return None


def _gluon_why(p: GemmProblem) -> str:
    tile, parts, us = choose_tile(
        p.m, p.n, num_blocks(p.k), p.b_block, sms(p.device), accumulate=p.accumulate
    )
    cut = f" and {parts} parts of K" if parts > 1 else ""
    rows, cols = tile.size
    return f"{rows}x{cols} tiles{cut}, predicted {us:.0f} us"


def _gluon_yields(p: GemmProblem) -> str | None:
    cublas_takes = _cublas_unusable(p.device) is None and _cublas_declines(p) is None
    shape = p.m, p.n, num_blocks(p.k), p.b_block
    if cublas_takes and cublas_is_faster(*shape, sms(p.device)):
        return "cuBLAS is predicted to be faster here"
    return None


def _never(_: object) -> None:
    return None


GEMM_BACKENDS = (
    GemmBackend(
        "gluon",
        "blocktensor.ops.gluon.gemm",
        _gluon_unusable,
        _gluon_declines,
        _gluon_why,
        _gluon_yields,
    ),
    GemmBackend(
        "cublas",
        "blocktensor.ops.cublas",
        _cublas_unusable,
        _cublas_declines,
        lambda problem: "takes this shape",
    ),
    GemmBackend(
        "triton",
        "blocktensor.ops.triton.gemm",
        _triton_unusable,
        _never,
        lambda _: "takes any shape",
    ),
    GemmBackend(
        "reference", "blocktensor.ops.reference", _never, _never, lambda _: "runs on any device"
    ),
)
"""In order of preference; every problem ends at the reference."""


def gemm_backend(name: str) -> GemmBackend:
    """The entry of the registry with this name."""
    return next(backend for backend in GEMM_BACKENDS if backend.name == name)


def usable_gemm_backends(device: torch.device) -> tuple[str, ...]:
    """Names of the GEMM backends that run on ``device``, best first."""
    return tuple(b.name for b in GEMM_BACKENDS if b.unusable(device) is None)


def choose_gemm(problem: GemmProblem) -> Choice:
    """The backend that will run ``problem``, and why.

    Raises:
        ValueError: ``BLOCKTENSOR_GEMM`` names an unknown backend, or one that cannot run here or
            cannot take this shape; the message lists the usable ones.
    """
    return _choose(problem, os.environ.get(FORCE_VARIABLE) or None)


def forced() -> object:
    """What ``BLOCKTENSOR_GEMM`` is now, for comparison only: read at every GEMM, so read fast."""
    return _environment.get(_FORCE_KEY)


# os.environ's own dictionary, where it has one: reading through os.environ costs a microsecond.
_environment = getattr(os.environ, "_data", os.environ)
_FORCE_KEY = FORCE_VARIABLE if _environment is os.environ else os.environ.encodekey(FORCE_VARIABLE)


@functools.lru_cache(maxsize=4096)
def _choose(problem: GemmProblem, forced: str | None) -> Choice:
    passed_over: dict[str, list[str]] = {}  # reason: names
    for backend in GEMM_BACKENDS:
        if forced is not None and backend.name != forced:
            continue
        reason = backend.unusable(problem.device) or backend.declines(problem)
        if forced is None:
            reason = reason or backend.yields(problem)
        if reason is not None:
            passed_over.setdefault(reason, []).append(backend.name)
            continue
        if forced is not None:
            return Choice(backend.name, f"forced by {FORCE_VARIABLE}")
        why_not = [f"{', '.join(names)}: {reason}" for reason, names in passed_over.items()]
        if backend.name == "reference" and problem.device.type == "cuda":
            _warn_slow(problem.device, "; ".join(why_not))
        return Choice(backend.name, "; ".join([backend.why(problem), *why_not]))
    usable = [
        b.name
        for b in GEMM_BACKENDS
        if b.unusable(problem.device) is None and b.declines(problem) is None
    ]
    why = next(iter(passed_over), "no backend of this name")
    raise ValueError(
        f"{FORCE_VARIABLE}={forced}: {why}. Usable here for M={problem.m}, N={problem.n}, "
        f"K={problem.k}: {', '.join(usable)}. Unset {FORCE_VARIABLE} to let blocktensor choose."
    )


@functools.cache
def _warn_slow(device: torch.device, why: str) -> None:
    warnings.warn(
        f"blocktensor: FP8 GEMMs on {device} run in the slow pure-torch reference ({why})",
        stacklevel=2,
    )


@functools.cache
def gemm_module(name: str) -> ModuleType:
    """The module behind a backend's name; has ``gemm`` and, unless it declines, ``gemm_add_``."""
    return importlib.import_module(gemm_backend(name).module)


def cast_module(x: Tensor) -> ModuleType:
    """Where casts of ``x`` run."""
    cast, _, fast, _ = _cast_modules(x.device.type, x.device.index)
    return fast if fast is not None and fast.takes(x) else cast


def part_module(x: Tensor) -> ModuleType:
    """Where casts of a part of a matrix, by the amax of the whole, run."""
    usable = _triton_unusable(x.device) is None
    return importlib.import_module(f"blocktensor.ops.{'triton.part' if usable else 'reference'}")


def transpose_module(x: Tensor) -> ModuleType:
    """Where byte transposes and dequantizes of ``x`` run."""
    _, transpose, _, fast = _cast_modules(x.device.type, x.device.index)
    return fast if fast is not None and fast.takes(x) else transpose


def recorder(device: torch.device) -> Callable[[Callable[..., Any]], Any] | None:
    """What records a function's launches on ``device``; None where kernels are not Triton's."""
    if _triton_unusable(device) is not None:
        return None
    recorded: Callable[[Callable[..., Any]], Any]
    recorded = importlib.import_module("blocktensor.ops.triton.replay").Replay
    return recorded


@functools.cache
def _cast_modules(
    kind: str, index: int | None
) -> tuple[ModuleType, ModuleType, ModuleType | None, ModuleType | None]:
    # for casts and for transposes: what takes every tensor; then what is faster where it takes one
    device = torch.device(kind, index or 0)
    load = importlib.import_module
    if _triton_unusable(device) is not None:
        reference = load("blocktensor.ops.reference")
        return reference, reference, None, None
    any_cast, any_transpose = (load(f"blocktensor.ops.triton.{op}") for op in ("cast", "transpose"))
    if (
        importlib.util.find_spec("triton.experimental.gluon") is None
        or _capability(_index(device)) < _HOPPER
    ):
        return any_cast, any_transpose, None, None
    cast, transpose = (load(f"blocktensor.ops.gluon.{op}") for op in ("cast", "transpose"))
    return any_cast, any_transpose, cast, transpose


def _index(device: torch.device) -> int:
    index: int | None = device.index
    return torch.cuda.current_device() if index is None else index
