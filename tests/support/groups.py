"""What tests of grouped products share: awkward group sizes, stacks, and operands by groups."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

import torch
from torch import Generator, Tensor

from blocktensor.ops import reference
from blocktensor.ops.formats import BLOCKS_1X128, BLOCKS_128X128, BlockFormat, Quantized
from tests.support.numeric import E4M3, FORMATS, lay_out, operand

GROUPS: dict[str, tuple[int, tuple[int, ...]]] = {
    "ragged": (270, (1, 0, 127, 129, 13)),
    "whole blocks": (384, (128, 0, 256)),
    "rows of no group": (200, (70, 0, 60)),
    "all in one": (150, (0, 150, 0)),
    "one group": (150, (150,)),
    "all empty": (5, (0, 0)),
    "no rows": (0, (0, 0, 0)),
}
"""Rows that there are, and the sizes of the groups."""


def ends(*sizes: int, device: torch.device | str = "cpu") -> Tensor:
    """``offs`` of groups of these sizes."""
    return torch.tensor(list(accumulate(sizes)), dtype=torch.int32, device=device)


def ranges(offs: Tensor) -> list[slice]:
    """The rows of each group."""
    bounds = [0, *offs.tolist()]
    return [slice(a, b) for a, b in pairwise(bounds)]


def stack(experts: int, n: int, k: int, rng: Generator) -> Quantized:
    """A stack ``[E, N, K]`` in 128x128 blocks, with ordinary data and scales."""
    parts = [operand(n, k, 128, rng) for _ in range(experts)]
    data, scale = (torch.stack([part[i] for part in parts]) for i in (0, 1))
    return Quantized(data, scale, FORMATS[128])


def columnwise(x: Tensor, offs: Tensor, format: BlockFormat = BLOCKS_1X128) -> Quantized:
    """The columnwise cast of ``x[T, K]`` in groups."""
    return reference.quantize_grouped(x, offs, None, format)[1]


SIZES = (0, 1, 3, 127, 128, 129, 300, 700)
"""Sizes of groups at and around those of blocks and tiles."""


def filled(form: Quantized, sizes: Sequence[int]) -> Quantized:
    """The blocks of a columnwise cast that groups of these sizes fill."""
    blocks = sum(-(-size // 128) for size in sizes)
    return form._replace(data=form.data[:, : 128 * blocks], scale=form.scale[:, :blocks])


def first(form: Quantized, rows: int) -> Quantized:
    """The first rows of a rowwise cast, which may hold anything in those behind."""
    return form._replace(data=form.data[:rows], scale=form.scale[:rows])


class Groups(NamedTuple):
    """Groups of tokens, some of which may belong to none, and the sizes of an expert."""

    sizes: tuple[int, ...]
    left_over: int
    n: int
    k: int

    @property
    def tokens(self) -> int:
        return sum(self.sizes) + self.left_over


def drawn(seed: int, count: int, n: Sequence[int], k: Sequence[int]) -> Iterator[Groups]:
    """``count`` seeded cases; each of ``n`` and ``k`` is met in turn."""
    draw = random.Random(seed)
    for i in range(count):
        experts = draw.choice((1, 2, 3, 8, 33))
        sizes = tuple(draw.choice(SIZES) for _ in range(experts))
        if i % 7 == 3:  # all tokens in one group
            sizes = tuple(sum(sizes) * (j == experts // 2) for j in range(experts))
        left_over = draw.choice((0, 0, 1, 200))
        yield Groups(sizes, left_over if sum(sizes) else 5, n[i % len(n)], k[i % len(k)])


class Operands(NamedTuple):
    """The casts of ``x[T, K]``, ``g[T, N]`` and ``w[E, N, K]``; rows of no group are NaN."""

    offs: Tensor
    x: tuple[Quantized, Quantized]
    g: tuple[Quantized, Quantized]
    w: Quantized


def operands(
    case: Groups,
    device: torch.device | str,
    format: BlockFormat = BLOCKS_1X128,
    weight_format: BlockFormat = BLOCKS_128X128,
    x_columnwise: BlockFormat | None = None,
) -> Operands:
    """``x_columnwise``: the format of x columnwise; by default ``format``."""
    rng = Generator(device).manual_seed(case.tokens)
    offs = ends(*case.sizes, device=device)

    def tokens(width: int) -> Tensor:
        made = torch.randn(case.tokens, width, generator=rng, device=device).bfloat16()
        made[sum(case.sizes) :] = float("nan")
        return made

    w = torch.randn(len(case.sizes), case.n, case.k, generator=rng, device=device).bfloat16()
    return Operands(
        offs,
        reference.quantize_grouped(tokens(case.k), offs, format, x_columnwise or format),
        reference.quantize_grouped(tokens(case.n), offs, format, format),
        reference.quantize_rowwise(w, weight_format),
    )


RANKS = (8, 16, 24, 32, 64)
"""Ranks of low-rank products that grouped GEMMs add."""


class Exact(NamedTuple):
    """Operands whose sums fp32 holds exactly, in any order: ``x``, ``w``, and low-rank matrices.

    Rows of no group of ``left[T, R]`` are NaN.
    """

    offs: Tensor
    x: Quantized
    w: Quantized
    left: Tensor
    right: Tensor


def exact(case: Groups, rank: int, device: torch.device | str) -> Exact:
    rng = Generator().manual_seed(case.tokens + rank)
    experts, blocks = len(case.sizes), -(-case.k // 128)

    def drawn(most: int, *shape: int) -> Tensor:
        return torch.randint(-most, most + 1, shape, generator=rng).float()

    scales = drawn(2, case.tokens, blocks).exp2()
    x = Quantized(drawn(1, case.tokens, case.k).to(E4M3), lay_out(scales, 1), FORMATS[1])
    w = stack(experts, case.n, case.k, rng)
    w.data.copy_(drawn(1, experts, case.n, case.k))
    w.scale.copy_(drawn(2, *w.scale.shape).exp2())
    left = drawn(3, case.tokens, rank)
    left[sum(case.sizes) :] = float("nan")
    made = x, w, left.bfloat16(), drawn(3, experts, case.n, rank).bfloat16()
    x, w, left, right = (
        Quantized(t.data.to(device), t.scale.to(device), t.format)
        if isinstance(t, Quantized)
        else t.to(device)
        for t in made
    )
    return Exact(ends(*case.sizes, device=device), x, w, left, right)
