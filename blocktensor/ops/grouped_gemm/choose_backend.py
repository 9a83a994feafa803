"""The registry of backends of grouped GEMMs, and the choice of one for a problem."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from ..devices import lacks_triton, sms
from ..formats import BlockFormat, num_blocks
from ..gemm.choose_backend import (
    GEMM_BACKENDS,
    choose_product,
    gluon_unusable,
    unknown_format,
)
from ..registry import Backend, Choice
from ..runtime.specialize import forced_gemm
from .tiles import choose_gemm_tile, choose_wgrad_tile


@dataclass(frozen=True)
class GroupedProblem:
    """A grouped GEMM as far as the choice of backend depends on it; sizes of groups are unknown.

    Attributes:
        kind: ``"gemm"``: ``[T, K] x [E, N, K]^T``. ``"wgrad"``: ``[E, N, K]`` from T tokens.
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
    accumulate: bool = False


def _gluon_unusable(device: torch.device) -> str | None:
    if reason := gluon_unusable(device):
        return reason
    from . import trial  # needs Triton

    return trial.grouped_gemms_fail(device)


def _triton_declines(p: GroupedProblem) -> str | None:
    return unknown_format(p.a_format, p.b_format)


def _gluon_why(p: GroupedProblem) -> str:
    if p.kind == "gemm":
        tile, _ = choose_gemm_tile(
            p.tokens, p.n, num_blocks(p.k), p.experts, sms(p.device), p.bias is not None
        )
    else:
        tile, _ = choose_wgrad_tile(
            p.n, p.k, p.tokens, p.experts, p.b_format.rows, sms(p.device), p.accumulate
        )
    rows, cols = tile.size
    return f"{rows}x{cols} tiles"


def _gluon_declines(p: GroupedProblem) -> str | None:
    if reason := _triton_declines(p):
        return reason
    if p.a_format.rows > 1:
        return "no 128x128 blocks on the left"
    return "nothing to contract" if p.kind == "gemm" and p.k == 0 else None


GroupedBackend = Backend[GroupedProblem]
GroupedChoice = Choice[GroupedProblem]

GROUPED_BACKENDS: tuple[GroupedBackend, ...] = (
    Backend(
        "gluon", ("grouped_gemm.hopper_launch",), _gluon_unusable, _gluon_declines, why=_gluon_why
    ),
    Backend(
        "triton", ("grouped_gemm.triton_gemm",), lacks_triton, _triton_declines,
        why=lambda _: "takes any shape",
    ),
    Backend("reference", ("reference",), why=lambda _: "runs on any device", launches=False),
)  # fmt: skip
"""In order of preference; the reference takes every problem."""

_OF_MATRICES_ONLY = {b.name for b in GEMM_BACKENDS} - {b.name for b in GROUPED_BACKENDS}


def choose_grouped(problem: GroupedProblem) -> GroupedChoice:
    """Return the backend that will run ``problem``, and why.

    ``BLOCKTENSOR_GEMM`` forces one of its name, where grouped GEMMs have one ("cublas" does not).

    Raises:
        ValueError: the forced backend cannot run here or cannot take this problem; the message
            lists the usable ones.
    """
    forced = forced_gemm()
    if forced in _OF_MATRICES_ONLY:
        forced = None
    shape = f"T={problem.tokens}, N={problem.n}, K={problem.k}, E={problem.experts}"
    return choose_product(GROUPED_BACKENDS, problem, problem.device, forced, shape)
