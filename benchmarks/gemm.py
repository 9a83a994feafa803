"""GEMMs: every backend of ours, and our peers, on the same FP8 bytes under sustained load.

Each candidate is timed as a CUDA graph over several sets of inputs and outputs, so that neither
host time nor L2 hits count. "blocktensor" is what a user gets: the backend chosen for the shape.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from blocktensor.ops.cast.ops import quantize_columnwise, quantize_rowwise
from blocktensor.ops.formats import BLOCKS_1X128, BLOCKS_128X128, BlockFormat, Quantized
from blocktensor.ops.gemm import choose_backend
from blocktensor.ops.gemm.choose_backend import GemmBackend, GemmProblem
from blocktensor.ops.gemm.ops import gemm
from blocktensor.ops.scale_layouts import columnwise_width

from . import peers
from .shapes import SET_S, SMALL, Shape
from .timing import Maker, times_of

KINDS = ("fprop", "wgrad", "square")
"""1x128 by 128x128 to bf16 (dgrad is this with N and K exchanged); the weight gradient, 1x128 by
1x128; the same with x in 128x128 blocks."""

QUICK: dict[str, Any] = {"shapes": (SMALL,), "rounds": 6}
"""The arguments of a smoke run."""


@dataclass(frozen=True)
class Case:
    """One GEMM of a linear ``[M, K] x [N, K]^T``: of its forward or of its weight's gradient."""

    kind: str
    m: int
    n: int
    k: int

    @property
    def flops(self) -> int:
        return 2 * self.m * self.n * self.k

    @property
    def read(self) -> int:
        """Bytes that a call reads."""
        if self.kind == "fprop":
            return (self.m + self.n) * self.k
        return self.m * (self.n + self.k)

    @property
    def b_format(self) -> BlockFormat:
        """The format of the right operand."""
        return BLOCKS_1X128 if self.kind == "wgrad" else BLOCKS_128X128

    def problem(self) -> GemmProblem:
        """Return the problem that the choice of backend sees."""
        device = torch.device("cuda", torch.cuda.current_device())
        tokens = columnwise_width(self.m, self.b_format)
        sizes = (self.m, self.n, self.k) if self.kind == "fprop" else (self.n, self.k, tokens)
        return GemmProblem(*sizes, BLOCKS_1X128, self.b_format, torch.bfloat16, device)


class Inputs(NamedTuple):
    """One set of operands: the bf16 product is ``left @ right``, the FP8 one ``a bᵀ``.

    ``rows``: of a weight gradient, b in 1x128 blocks.
    """

    left: Tensor
    right: Tensor
    a: Quantized
    b: Quantized
    out: Tensor
    rows: Quantized


def make_inputs(case: Case) -> Inputs:
    """Operands cast from normal numbers, as layers make them."""
    x = torch.randn(case.m, case.k, device="cuda", dtype=torch.bfloat16)
    if case.kind == "fprop":
        w = torch.randn(case.n, case.k, device="cuda", dtype=torch.bfloat16)
        a, b = quantize_rowwise(x, BLOCKS_1X128), quantize_rowwise(w, BLOCKS_128X128)
        left, right, rows = x, w.t(), b
    else:
        g = torch.randn(case.m, case.n, device="cuda", dtype=torch.bfloat16)
        a, rows = quantize_columnwise(g, BLOCKS_1X128), quantize_columnwise(x, BLOCKS_1X128)
        b = quantize_columnwise(x, case.b_format)
        left, right = g.t(), x
    out = torch.zeros(a.data.shape[0], b.data.shape[0], dtype=torch.bfloat16, device="cuda")
    return Inputs(left, right, a, b, out, rows)


def ours(case: Case) -> dict[str, Maker]:
    """The public op, then every backend that takes this shape; they may not fail."""
    makers: dict[str, Maker] = {"blocktensor": lambda i: lambda: gemm(i.a, i.b)}
    problem = case.problem()
    for backend in choose_backend.GEMM_BACKENDS:
        if backend.name == "reference" or backend.unusable(problem.device):
            continue
        if backend.declines(problem) is None:
            makers[backend.name] = _backend(backend)
    return makers


def _backend(backend: GemmBackend) -> Maker:
    run = backend.function("gemm")
    assert run is not None
    return lambda i: lambda: run(i.a, i.b, None, torch.bfloat16)


def others(case: Case) -> dict[str, Maker]:
    """Peers that are here; one that fails on a shape is named in the row's note."""
    one = torch.ones((), device="cuda")
    dtype = torch.bfloat16
    makers: dict[str, Maker] = {
        "tensorwise": lambda i: (
            lambda: torch._scaled_mm(
                i.a.data, i.b.data.t(), one, one, out_dtype=dtype, use_fast_accum=True
            )
        ),
        "bf16": lambda i: lambda: torch.mm(i.left, i.right),
    }
    if case.kind == "square":  # what a linear runs without the option
        cublas = choose_backend.gemm_backend("cublas").function("gemm")
        assert cublas is not None
        makers["1x128"] = lambda i: lambda: gemm(i.a, i.rows)
        makers["cublas_1x128"] = lambda i: lambda: cublas(i.a, i.rows, None, dtype)
    if peers.present("torchao"):
        makers["torchao"] = lambda i: peers.torchao_gemm(i.a, i.b, dtype)
    if peers.present("deepgemm") and case.kind == "fprop":
        makers["deepgemm"] = lambda i: peers.deepgemm_fprop(i.a, i.b, i.out)
    return makers


def measure_case(case: Case, rounds: int) -> dict[str, Any]:
    """TFLOP/s of every candidate on one shape."""
    ms, note = times_of(case, make_inputs, ours, others, rounds)
    return _row(case, {name: case.flops / each * 1e-9 for name, each in ms.items()}, note)


def _row(case: Case, rates: dict[str, float], note: str) -> dict[str, Any]:
    """One row of the results: TFLOP/s, and ratios made from them before they were rounded."""
    row: dict[str, Any] = {
        "kind": case.kind,
        "m": case.m,
        "n": case.n,
        "k": case.k,
        "backend": choose_backend.choose_gemm(case.problem()).name,
        **{name: round(rate, 1) for name, rate in rates.items()},
    }
    ratios = {"vs_cublas": "cublas", "vs_bf16": "bf16", "of_limit": "tensorwise"}
    ratios |= {"vs_1x128": "1x128", "vs_cublas_1x128": "cublas_1x128"}
    for label, peer in ratios.items():
        if peer in rates:
            row[label] = round(rates["blocktensor"] / rates[peer], 3)
    return row | {"note": note}


def facts() -> dict[str, Any]:
    """Return facts to record with the rows."""
    return {"absent": peers.absent(), "unit": "TFLOP/s"}


def measure(shapes: tuple[Shape, ...] = SET_S, rounds: int = 20) -> Iterator[dict[str, Any]]:
    """One row a shape and kind: TFLOP/s of every candidate, all of a row in one round robin."""
    for kind in KINDS:
        for shape in shapes:
            yield measure_case(Case(kind, *shape), rounds)
