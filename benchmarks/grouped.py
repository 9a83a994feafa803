"""Products and casts of experts: ours and peers', on groups of tokens of uneven sizes.

Sizes are 0.3 to 1.7 of their mean, as multiples of 128 rows ("aligned") and any ("ragged").
"dense" is our kernel for one matrix and all tokens at once: what a grouped one can hope for.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

from blocktensor.ops.cast.ops import (
    quantize_both,
    quantize_columnwise,
    quantize_grouped,
    quantize_rowwise,
)
from blocktensor.ops.formats import (
    BLOCK,
    BLOCKS_1X128,
    BLOCKS_128X128,
    BlockFormat,
    Quantized,
)
from blocktensor.ops.gemm.ops import gemm
from blocktensor.ops.grouped_gemm.choose_backend import GroupedProblem, choose_grouped
from blocktensor.ops.grouped_gemm.ops import grouped_gemm, grouped_gemm_wgrad

from . import peers
from .shapes import GROUPED, SMALL_GROUPED, GroupedShape, group_sizes
from .timing import Maker, times_of

KINDS = ("fprop", "wgrad", "cast", "square", "square_cast")
"""``[T, K] x [E, N, K]`` to bf16 (dgrad is this with N and K exchanged); ``[E, N, K]`` to bf16;
both forms of ``[T, K]``; these two with the columnwise form of x in 128x128 blocks."""

GROUPS = {"aligned": BLOCK, "ragged": 1}
"""The sizes of groups are multiples of this."""

QUICK: dict[str, Any] = {"shapes": (SMALL_GROUPED,), "rounds": 4}
"""The arguments of a smoke run."""

_FLOPS_A_BYTE = 250  # about what an H200 multiplies in FP8 in the time that it moves a byte


@dataclass(frozen=True)
class Case:
    """One product, or cast, of one shape of experts."""

    kind: str
    groups: str
    experts: int
    tokens: int
    n: int
    k: int

    @cached_property
    def sizes(self) -> list[int]:
        """Rows of each group."""
        return group_sizes(self.experts, self.tokens, GROUPS[self.groups])

    @property
    def is_cast(self) -> bool:
        """True for a cast."""
        return self.kind.endswith("cast")

    @property
    def x_columnwise(self) -> BlockFormat:
        """The format of the columnwise form of x."""
        return BLOCKS_128X128 if self.kind.startswith("square") else BLOCKS_1X128

    @property
    def unit(self) -> str:
        """The unit of the rates."""
        return "GB/s" if self.is_cast else "TFLOP/s"

    @property
    def work(self) -> int:
        """Flops of all rows; of a cast bytes, bf16 read and two forms written."""
        return self.tokens * self.k * (4 if self.is_cast else 2 * self.n)

    @property
    def flops(self) -> int:
        """The flops that take as long as the work."""
        return self.work * (_FLOPS_A_BYTE if self.is_cast else 1)

    @property
    def read(self) -> int:
        """Bytes that a call reads."""
        if self.is_cast:
            return 2 * self.tokens * self.k
        if self.kind == "fprop":
            return (self.tokens + self.experts * self.n) * self.k
        return self.tokens * (self.n + self.k)

    def problem(self, device: torch.device) -> GroupedProblem:
        """Return the problem that the choice of backend sees."""
        is_fprop = self.kind == "fprop"
        return GroupedProblem(
            "gemm" if is_fprop else "wgrad",
            self.tokens,
            self.n,
            self.k,
            self.experts,
            BLOCKS_1X128,
            BLOCKS_128X128 if is_fprop else self.x_columnwise,
            torch.bfloat16,
            device,
        )


class Inputs(NamedTuple):
    """One set of operands: of the bf16 product, the grouped FP8 one, and the dense one.

    ``out`` is what a peer writes.
    """

    left: Tensor
    right: Tensor
    offs: Tensor
    a: Quantized
    b: Quantized
    dense_a: Quantized
    dense_b: Quantized
    out: Tensor


def make_inputs(case: Case, device: torch.device | str = "cuda") -> Inputs:
    """Operands cast from normal numbers, as layers make them."""

    def randn(*shape: int) -> Tensor:
        return torch.randn(shape, device=device, dtype=torch.bfloat16)

    def empty(*shape: int) -> Tensor:
        return torch.zeros(shape, device=device, dtype=torch.bfloat16)

    offs = torch.tensor(list(accumulate(case.sizes)), dtype=torch.int32, device=device)
    x = randn(case.tokens, case.k)
    if case.is_cast:
        form = quantize_rowwise(x, BLOCKS_1X128)
        return Inputs(x, x, offs, form, form, form, form, empty(0))
    if case.kind == "fprop":
        w = randn(case.experts, case.n, case.k)
        a, b = quantize_rowwise(x, BLOCKS_1X128), quantize_rowwise(w, BLOCKS_128X128)
        first = Quantized(b.data[0], b.scale[0], b.format)
        return Inputs(x, w.transpose(1, 2), offs, a, b, a, first, empty(case.tokens, case.n))
    g = randn(case.tokens, case.n)
    formats = ((g, BLOCKS_1X128), (x, case.x_columnwise))
    forms = (quantize_grouped(t, offs, None, format)[1] for t, format in formats)
    a, b = (form for form in forms if form is not None)
    dense_a, dense_b = (quantize_columnwise(t, format) for t, format in formats)
    return Inputs(g.t(), x, offs, a, b, dense_a, dense_b, empty(0))


def ours(case: Case) -> dict[str, Maker]:
    """The public op, and the dense one of as much work."""
    if case.is_cast:
        rows, col = BLOCKS_1X128, case.x_columnwise
        return {
            "blocktensor": lambda i: lambda: quantize_grouped(i.left, i.offs, rows, col),
            "dense": lambda i: lambda: quantize_both(i.left, rows, col),
        }
    dense: Maker = lambda i: lambda: gemm(i.dense_a, i.dense_b)  # noqa: E731
    if case.kind != "fprop":
        return {
            "blocktensor": lambda i: lambda: grouped_gemm_wgrad(i.a, i.b, i.offs, case.tokens),
            "dense": dense,
        }
    return {"blocktensor": lambda i: lambda: grouped_gemm(i.a, i.b, i.offs), "dense": dense}


def others(case: Case) -> dict[str, Maker]:
    """Peers that are here and take such groups."""
    makers: dict[str, Maker] = {}
    if case.is_cast:
        return makers
    makers["bf16"] = lambda i: lambda: torch._grouped_mm(i.left, i.right, offs=i.offs)
    if peers.present("deepgemm") and case.groups == "aligned" and case.kind == "fprop":
        makers["deepgemm"] = lambda i: peers.deepgemm_grouped(i.a, i.b, case.sizes, i.out)
    return makers


def measure_case(case: Case, rounds: int) -> dict[str, Any]:
    """The rate of every candidate on one shape."""
    ms, note = times_of(case, make_inputs, ours, others, rounds)
    return row(case, ms, note, torch.device("cuda", torch.cuda.current_device()))


def row(case: Case, ms: dict[str, float], note: str, device: torch.device) -> dict[str, Any]:
    """One row of the results: rates, and ratios made from them before they were rounded."""
    scale = 1e-6 if case.is_cast else 1e-9
    rates = {name: case.work / each * scale for name, each in ms.items()}
    made: dict[str, Any] = {
        "kind": case.kind,
        "groups": case.groups,
        "experts": case.experts,
        "tokens": case.tokens,
        "n": case.n,
        "k": case.k,
        "tokens_per_expert": round(case.tokens / case.experts),
        "unit": case.unit,
        **{name: round(rate, 1) for name, rate in rates.items()},
    }
    if not case.is_cast:
        made["backend"] = choose_grouped(case.problem(device)).name
    for label, peer in (("of_dense", "dense"), ("vs_bf16", "bf16"), ("vs_deepgemm", "deepgemm")):
        if peer in rates:
            made[label] = round(rates["blocktensor"] / rates[peer], 3)
    return made | {"note": note}


def facts() -> dict[str, Any]:
    """Return facts to record with the rows."""
    return {"absent": {k: v for k, v in peers.absent().items() if k == "deepgemm"}}


def measure(
    shapes: tuple[GroupedShape, ...] = GROUPED, rounds: int = 12
) -> Iterator[dict[str, Any]]:
    """One row a shape, kind of groups and kind of work, all candidates in one round robin."""
    for kind in KINDS:
        for groups in GROUPS:
            for shape in shapes:
                yield measure_case(Case(kind, groups, *shape), rounds)
                torch.cuda.empty_cache()  # graphs hold outputs of gigabytes
