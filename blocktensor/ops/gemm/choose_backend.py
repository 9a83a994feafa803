"""List the GEMM backends, and choose one for a problem, or by its name."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from .. import reference
from ..devices import HOPPER, Card, capability, card, lacks_fp8, lacks_gluon, lacks_triton
from ..formats import BLOCKS_1X128, BLOCKS_128X128, KERNEL_FORMATS, BlockFormat, num_blocks
from ..registry import Backend, Choice, Problem, first_choice
from ..runtime.specialize import GEMM_VARIABLE, forced_gemm
from ..runtime.triton_compat.versions import differ, on, tried
from .hopper.tiles import CUBLAS, TILES, choose_tile, cublas_is_faster, speeds


@dataclass(frozen=True)
class GemmProblem:
    """The facts of a GEMM ``[M, K] x [N, K]^T`` on which the choice of a backend depends."""

    m: int
    n: int
    k: int
    a_format: BlockFormat
    b_format: BlockFormat
    out_dtype: torch.dtype
    device: torch.device
    bias: torch.dtype | None = None
    batch_invariant: bool = False


def unknown_format(*formats: BlockFormat) -> str | None:
    """Return why kernels cannot read operands of these formats; None if they can."""
    for format in formats:
        if format not in KERNEL_FORMATS:
            return f"no kernels for format {format.name}"
    return None


def _cublas_unusable(device: torch.device) -> str | None:
    if reason := lacks_fp8(device):
        return reason
    if capability(device) != HOPPER:
        return "cuBLAS scales blockwise on sm_90 only"
    version = tuple(int(part) for part in (torch.version.cuda or "0.0").split(".")[:2])
    return None if version >= (12, 9) else f"needs CUDA >= 12.9, torch has {torch.version.cuda}"


def declines_on_hopper(a: BlockFormat, b: BlockFormat, contraction: int) -> str | None:
    """Return why Hopper kernels cannot multiply these operands; None if they can."""
    if reason := unknown_format(a, b):
        return reason
    if a.rows > 1:  # cuBLAS's 128x128 by 1x128 kernel refuses most ragged shapes
        return "no 128x128 blocks on the left"
    return "nothing to contract" if contraction == 0 else None


def _cublas_declines(problem: GemmProblem) -> str | None:
    if reason := declines_on_hopper(problem.a_format, problem.b_format, problem.k):
        return reason
    if problem.batch_invariant:
        return "may compute a row in another order for another M"
    bias, out_dtype = problem.bias, problem.out_dtype
    if bias is not None and (bias, out_dtype) != (torch.bfloat16, torch.bfloat16):
        return f"takes a bias in bf16 for a bf16 output only, got {bias} for {out_dtype}"
    if out_dtype not in (torch.bfloat16, torch.float32):
        return f"output {out_dtype} not supported"
    if problem.k % 16 or problem.n % 16:
        return f"K and N must be multiples of 16, got K={problem.k}, N={problem.n}"
    if problem.m % 4:
        return f"M must be a multiple of 4, got M={problem.m}"
    return None


def gluon_unusable(device: torch.device) -> str | None:
    """Return why the Hopper kernel cannot run on ``device``; None if it can."""
    if reason := lacks_gluon(device):
        return reason
    if capability(device) != HOPPER:
        return "written for sm_90"
    return gemms_fail(device)


@tried
def gemms_fail(device: torch.device) -> str | None:
    """Return which tile of the Hopper GEMM is wrong; None if all are right."""
    from .hopper.launch import for_tma, gemm, plan_gemm  # these imports need Triton

    x = torch.linspace(-3, 3, 304 * 512).view(304, 512).bfloat16()
    w = torch.linspace(2, -1, 400 * 512).view(400, 512).bfloat16()
    a = reference.quantize_rowwise(x, BLOCKS_1X128)
    for format in (BLOCKS_128X128, BLOCKS_1X128):
        b = reference.quantize_rowwise(w, format)
        wanted = reference.gemm(a, b, None, torch.float32)
        operands = for_tma(on(device, a)), for_tma(on(device, b))
        for name, tile in TILES.items():
            if tile.b_block != format.rows:
                continue
            out = torch.ones(304, 400, dtype=torch.float32, device=device)
            plan_gemm(*operands, None, out, tile)()
            if differ(out, wanted):
                return f"GEMMs by the tile {name!r} differ from the reference"
        if differ(gemm(*operands, None, torch.bfloat16), wanted):
            return f"GEMMs of {format.name} blocks differ from the reference"
    return None


def _triton_declines(problem: GemmProblem) -> str | None:
    return unknown_format(problem.a_format, problem.b_format)


def _gluon_declines(problem: GemmProblem) -> str | None:
    if reason := declines_on_hopper(problem.a_format, problem.b_format, problem.k):
        return reason
    if problem.b_format.rows == 1 and problem.bias is not None:
        return "no bias where both sides have 1x128 blocks"
    return None


def _gluon_why(problem: GemmProblem) -> str:
    return _by_tiles(problem, card(problem.device))[0]


def _by_tiles(problem: GemmProblem, gpu: Card) -> tuple[str, float]:
    """Describe the tiles of a problem, and return the predicted microseconds."""
    tile, parts, us = choose_tile(
        problem.m,
        problem.n,
        num_blocks(problem.k),
        problem.b_format.rows,
        gpu,
        splits_k=not problem.batch_invariant,
    )
    cut = f" and {parts} parts of K" if parts > 1 else ""
    return f"{tile.m}x{tile.n} tiles{cut}, predicted {us:.0f} us", us


def _gluon_yields(problem: GemmProblem) -> str | None:
    is_usable = _cublas_unusable(problem.device) is None
    if is_usable and _cublas_is_faster(problem, card(problem.device)):
        return "cuBLAS is predicted to be faster here"
    return None


def _cublas_is_faster(problem: GemmProblem, gpu: Card) -> bool:
    shape = problem.m, problem.n, num_blocks(problem.k), problem.b_format.rows
    return _cublas_declines(problem) is None and cublas_is_faster(*shape, gpu)


def predict_gemm(problem: GemmProblem, gpu: Card) -> tuple[str, str, float]:
    """Return the backend on a card with the fast path, the reason, and predicted microseconds."""
    if not _cublas_is_faster(problem, gpu):
        return "gluon", *_by_tiles(problem, gpu)
    speed = speeds(gpu.name)[CUBLAS[problem.b_format.rows]]
    us = speed.microseconds(problem.m, problem.n, num_blocks(problem.k), gpu.sms)
    return "cublas", f"predicted {us:.0f} us", us


GemmBackend = Backend[GemmProblem]
GemmChoice = Choice[GemmProblem]


def _gluon() -> tuple[Any, ...]:
    from .hopper import launch

    return (launch,)


def _cublas() -> tuple[Any, ...]:
    from . import cublas

    return (cublas,)


def _triton() -> tuple[Any, ...]:
    from . import triton_gemm

    return (triton_gemm,)


GEMM_BACKENDS: tuple[GemmBackend, ...] = (
    Backend("gluon", _gluon, gluon_unusable, _gluon_declines, _gluon_yields, _gluon_why),
    Backend(
        "cublas",
        _cublas,
        _cublas_unusable,
        _cublas_declines,
        why=lambda _: "takes this shape",
        launches=False,
    ),
    Backend(
        "triton",
        _triton,
        lacks_triton,
        _triton_declines,
        why=lambda _: "takes any shape",
    ),
    Backend("reference", lambda: (reference,), why=lambda _: "runs on any device", launches=False),
)
"""All backends, best first; the reference takes every problem."""


def gemm_backend(name: str) -> GemmBackend:
    """Return the entry of the table with this name."""
    return next(backend for backend in GEMM_BACKENDS if backend.name == name)


def usable_gemm_backends(device: torch.device) -> tuple[str, ...]:
    """Return the names of the GEMM backends that run on ``device``, best first."""
    return tuple(b.name for b in GEMM_BACKENDS if b.unusable(device) is None)


def choose_gemm(problem: GemmProblem) -> GemmChoice:
    """Return the backend that will run ``problem``, and why.

    Raises:
        ValueError: ``BLOCKTENSOR_GEMM`` names an unknown backend, or one that cannot run here or
            cannot take this shape; the message lists the usable ones.
    """
    shape = f"M={problem.m}, N={problem.n}, K={problem.k}"
    return choose_matmul(GEMM_BACKENDS, problem, problem.device, forced_gemm(), shape)


def choose_matmul(
    backends: Sequence[Backend[Problem]],
    problem: Problem,
    device: torch.device,
    forced: str | None,
    shape: str,
) -> Choice[Problem]:
    """Return the backend named ``forced``, or else the first backend that takes ``problem``.

    Raises:
        ValueError: the forced one is unknown or cannot run ``problem``; ``shape`` describes it.
    """
    if forced is None:
        choice = first_choice(backends, problem, device)
        if choice.name == "reference" and device.type == "cuda":
            warn_slow(device, choice.others)
        return choice
    objections = {b.name: b.unusable(device) or b.declines(problem) for b in backends}
    objection = objections.get(forced, "no backend of this name")
    if objection is None:
        (backend,) = (b for b in backends if b.name == forced)
        return Choice(backend, f"forced by {GEMM_VARIABLE}")
    usable = [name for name, reason in objections.items() if reason is None]
    raise ValueError(
        f"{GEMM_VARIABLE}={forced}: {objection}. Usable here for {shape}: {', '.join(usable)}. "
        f"Unset {GEMM_VARIABLE} to let blocktensor choose."
    )


@functools.cache
def warn_slow(device: torch.device, why: str) -> None:
    """Warn once that matmuls run in the reference on a GPU."""
    warnings.warn(
        f"blocktensor: FP8 GEMMs on {device} run in the slow pure-torch reference ({why})",
        stacklevel=2,
    )
