"""List the backends of grouped GEMMs, and choose one for a problem."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch

from .. import reference
from ..devices import lacks_triton, sms
from ..formats import BLOCKS_1X128, BLOCKS_128X128, BlockFormat, num_blocks
from ..gemm.choose_backend import (
    GEMM_BACKENDS,
    choose_matmul,
    declines_on_hopper,
    gluon_unusable,
    unknown_format,
)
from ..registry import Backend, Choice
from ..runtime.specialize import forced_gemm
from ..runtime.triton_compat.versions import differ, on, tried
from .tiles import choose_gemm_tile, choose_wgrad_tile


@dataclass(frozen=True)
class GroupedProblem:
    """The facts of a grouped GEMM on which the choice of a backend depends; not sizes of groups.

    Attributes:
        kind: ``"gemm"``: ``[T, K] x [E, N, K]^T``. ``"wgrad"``: ``[E, N, K]`` from T tokens.
        rank: of the low-rank product that is added; 0 if there is none.
    """

    kind: Literal["gemm", "wgrad"]
    tokens: int
    n: int
    k: int
    experts: int
    a_format: BlockFormat
    b_format: BlockFormat
    out_dtype: torch.dtype
    device: torch.device
    bias: torch.dtype | None = None
    rank: int = 0


def _gluon_unusable(device: torch.device) -> str | None:
    return gluon_unusable(device) or grouped_gemms_fail(device)


@tried
def grouped_gemms_fail(device: torch.device) -> str | None:
    """Return how the grouped Hopper GEMM is wrong, forward or wgrad; None if it is right."""
    from . import hopper_launch  # this import needs Triton

    x = torch.linspace(-3, 3, 304 * 400).view(304, 400).bfloat16()
    w = torch.linspace(2, -1, 3 * 272 * 400).view(3, 272, 400).bfloat16()
    ends = torch.tensor([100, 100, 290], dtype=torch.int32)
    offs, dtype = ends.to(device), torch.bfloat16
    a = reference.quantize_rowwise(x, BLOCKS_1X128)
    b = reference.quantize_rowwise(w, BLOCKS_128X128)
    left, right = x[:, :24].contiguous(), w[..., :24].contiguous()
    for low_rank in ((), (left, right)):
        there = (t.to(device) for t in low_rank)
        operands = on(device, a), on(device, b), offs
        computed = hopper_launch.grouped_gemm(*operands, None, dtype, len(x), *there)
        if differ(computed, reference.grouped_gemm(a, b, ends, None, dtype, len(x), *low_rank)):
            return "grouped GEMMs differ from the reference"
    for format in (BLOCKS_1X128, BLOCKS_128X128):
        _, g = reference.quantize_grouped(x, ends, None, BLOCKS_1X128)
        _, c = reference.quantize_grouped(x, ends, None, format)
        assert g is not None
        assert c is not None
        wanted = reference.grouped_gemm_wgrad(g, c, ends, len(x), torch.float32)
        forms = on(device, g), on(device, c), offs, len(x)
        computed = hopper_launch.grouped_gemm_wgrad(*forms, dtype)
        if differ(computed, wanted):
            return "grouped weight gradients differ from the reference"
    return None


def _triton_declines(p: GroupedProblem) -> str | None:
    return unknown_format(p.a_format, p.b_format)


def _gluon_why(p: GroupedProblem) -> str:
    if p.kind == "gemm":
        blocks = num_blocks(p.k) + (p.rank > 0)
        tile, _ = choose_gemm_tile(p.tokens, p.n, blocks, p.experts, sms(p.device), p.bias is None)
    else:
        tile, _ = choose_wgrad_tile(p.n, p.k, p.tokens, p.experts, p.b_format.rows, sms(p.device))
    return f"{tile.m}x{tile.n} tiles"


def _gluon_declines(p: GroupedProblem) -> str | None:
    contraction = p.k if p.kind == "gemm" else p.tokens
    return declines_on_hopper(p.a_format, p.b_format, contraction)


GroupedChoice = Choice[GroupedProblem]


def _gluon() -> tuple[Any, ...]:
    from . import hopper_launch

    return (hopper_launch,)


def _triton() -> tuple[Any, ...]:
    from . import triton_gemm

    return (triton_gemm,)


GROUPED_BACKENDS: tuple[Backend[GroupedProblem], ...] = (
    Backend("gluon", _gluon, _gluon_unusable, _gluon_declines, why=_gluon_why),
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

_OF_MATRICES_ONLY = {b.name for b in GEMM_BACKENDS} - {b.name for b in GROUPED_BACKENDS}


def choose_grouped(problem: GroupedProblem) -> GroupedChoice:
    """Return the backend that will run ``problem``, and why.

    ``BLOCKTENSOR_GEMM`` forces the backend of this name; "cublas" has no grouped GEMM.

    Raises:
        ValueError: the forced backend cannot run here or cannot take this problem; the message
            lists the usable ones.
    """
    forced = forced_gemm()
    if forced in _OF_MATRICES_ONLY:
        forced = None
    shape = f"T={problem.tokens}, N={problem.n}, K={problem.k}, E={problem.experts}"
    return choose_matmul(GROUPED_BACKENDS, problem, problem.device, forced, shape)
