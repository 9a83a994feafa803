"""What a GEMM backend has to pass on a GPU, whichever it is."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Generator, Tensor

from blocktensor.ops import reference
from blocktensor.ops.formats import Quantized
from tests.support import numeric
from tests.support.numeric import E4M3, FORMATS, lay_out, operand, relative_error, worst_row

TOLERANCE = {torch.bfloat16: 4e-3, torch.float16: 4e-3, torch.float32: 2e-4}


Blocks = tuple[int, int]
"""Rows of the blocks of both sides."""


class Shape(NamedTuple):
    m: int
    n: int
    k: int


def shapes(seed: int, count: int, sizes: Any, accepted: Any) -> Iterator[Shape]:
    """``count`` distinct seeded shapes of ``sizes``, each size met as M, N and K early on."""
    draw = random.Random(seed)
    found: set[Shape] = set()
    decks: list[list[int]] = [[], [], []]
    while len(found) < count:
        for deck in decks:
            deck.extend(draw.sample(sizes, len(sizes)) if not deck else [])
        shape = Shape(*(deck.pop() for deck in decks))
        if shape not in found and math.prod(shape) < 3e11 and accepted(shape):
            found.add(shape)
            yield shape


def operands(shape: Shape, blocks: Blocks, rng: Generator) -> tuple[Quantized, Quantized]:
    return operand(shape.m, shape.k, blocks[0], rng), operand(shape.n, shape.k, blocks[1], rng)


def check(
    module: Any, a: Quantized, b: Quantized, dtype: torch.dtype, bias: Tensor | None = None
) -> None:
    """One product agrees with the reference as a whole, and with float64 in every row."""
    got = module.gemm(a, b, bias, dtype)
    want = reference.gemm(a, b, bias, torch.float32)
    assert (got.dtype, got.shape, got.is_contiguous()) == (dtype, want.shape, True)
    if got.numel() > 1000:  # a few numbers may happen to cancel
        assert relative_error(got, want) <= TOLERANCE[dtype]
    # Raw sums of FP8 tensor cores keep some 14 bits, which single rows show more than the whole.
    assert worst_row(got, a, b, bias) <= 4 * TOLERANCE[dtype]


def check_shape(
    module: Any,
    shape: Shape,
    blocks: Blocks,
    rng: Generator,
    dtype: torch.dtype,
    bias: torch.dtype | None = None,
) -> None:
    """A product of drawn numbers, with a bias if its dtype is given."""
    a, b = operands(shape, blocks, rng)
    if dtype == torch.float16:
        a.scale.mul_(2**-14)  # products of some 10^4, else beyond fp16
    added = None
    if bias is not None:
        added = 1000 * torch.randn(shape.n, generator=rng, device=rng.device).to(bias)
    check(module, a, b, dtype, added)


def check_promotion(module: Any, blocks: Blocks, rng: Generator) -> None:
    """Small partial products survive beside a large one: raw Hopper sums keep some 14 bits."""
    data = torch.zeros((128, 128 * 64), device=rng.device)
    data[:, :128] = 64
    data[:, 128::128] = 1
    scale = torch.ones((128, 64), device=rng.device)
    a, b = (
        Quantized(data.to(E4M3), lay_out(scale[: 128 // block], block), FORMATS[block])
        for block in blocks
    )
    assert (module.gemm(a, b, None, torch.float32) == 2**19 + 63).all()


def check_scales_per_block(module: Any, blocks: Blocks, rng: Generator) -> None:
    """Every 128 of K, and every row or block of rows, has its own scale: exact powers of two."""
    m, n, k = 260, 272, 400

    def exact(rows: int, block: int) -> Quantized:
        shape = (-(-rows // block), 4)
        scale = torch.randint(-4, 5, shape, generator=rng, device=rng.device).float().exp2()
        data = torch.randint(-1, 2, (rows, k), generator=rng, device=rng.device)
        return Quantized(data.float().to(E4M3), lay_out(scale, block), FORMATS[block])

    a, b = exact(m, blocks[0]), exact(n, blocks[1])
    numeric.assert_same(
        module.gemm(a, b, None, torch.float32), reference.gemm(a, b, None, torch.float32)
    )


def check_bad_blocks(module: Any, blocks: Blocks, rng: Generator) -> None:
    """NaN and Inf scales spoil the outputs that they spoil in the reference, and no others."""
    a, b = operands(Shape(300, 272, 400), blocks, rng)
    a.scale[-1, 3], a.scale[0, 1], b.scale[1, 2] = math.nan, math.inf, math.nan
    got = module.gemm(a, b, None, torch.float32)
    want = reference.gemm(a, b, None, torch.float32)
    assert torch.equal(got.isfinite(), want.isfinite())
    good = want.isfinite()
    assert good.any()
    assert not good.all()
    assert relative_error(got[good], want[good]) <= TOLERANCE[torch.float32]


def check_determinism(module: Any, blocks: Blocks, rng: Generator) -> None:
    a, b = operands(Shape(3000, 1552, 10944), blocks, rng)
    first = module.gemm(a, b, None, torch.float32)
    for _ in range(50):
        assert torch.equal(module.gemm(a, b, None, torch.float32), first)


def check_stream(module: Any, blocks: Blocks, rng: Generator) -> None:
    """The product runs after what its stream has to do before, not on the default stream."""
    a, b = operands(Shape(256, 512, 640), blocks, rng)
    want = module.gemm(a, b, None, torch.float32)
    late = a._replace(data=torch.zeros_like(a.data))
    module.gemm(late, b, None, torch.float32)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(100_000_000)  # cycles: some 50 ms
        late.data.copy_(a.data)
        got = module.gemm(late, b, None, torch.float32)
    stream.synchronize()
    assert torch.equal(got, want)


def check_views(module: Any, blocks: Blocks, rng: Generator) -> None:
    """Operands inside larger ones: rows of data, slices of scales, scales of other strides."""
    a, b = operands(Shape(256, 272, 384), blocks, rng)
    some_rows, last_rows = (
        Quantized(x.data[rows], x.scale[rows.start // block : -(-rows.stop // block)], x.format)
        for x, rows, block in ((a, slice(128, 256), blocks[0]), (b, slice(128, 272), blocks[1]))
    )
    check(module, some_rows, last_rows, torch.float32)
    check(module, *(x._replace(scale=x.scale.contiguous()) for x in (a, b)), torch.float32)
    check(module, a, b._replace(scale=b.scale.t().contiguous().t()), torch.float32)
    flat = torch.zeros(8 + a.data.numel(), device=rng.device).to(E4M3)
    flat[8:] = a.data.flatten()
    unaligned = flat[8:].view(256, 384)
    assert unaligned.data_ptr() % 16 == 8
    check(module, a._replace(data=unaligned), b, torch.float32)


Check = Callable[[Any, Blocks, Generator], None]
"""``check(module, blocks, rng)``."""

OF_EVERY_TILE: tuple[Check, ...] = (
    check_promotion,
    check_scales_per_block,
    check_bad_blocks,
    check_determinism,
)
CHECKS = (*OF_EVERY_TILE, check_stream, check_views)
"""The contract of every GEMM backend."""
