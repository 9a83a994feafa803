"""Traced tensors: what they say of an op is what it does to values."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from blocktensor.checkpoint.parts import Part, cover
from blocktensor.checkpoint.traced import TracedTensor, traced
from blocktensor.ops.formats import BLOCKS_128X128

SHAPES = {"a": (4, 6, 8), "b": (4, 6, 8), "c": (6, 8), "d": (1, 8), "e": (12,)}
REAL = {
    name: torch.arange(torch.Size(shape).numel()).view(shape) + 1000 * i
    for i, (name, shape) in enumerate(SHAPES.items())
}

Op = Callable[..., Any]
OPS: dict[str, Op] = {
    "chunk": lambda a, b, **_: torch.cat(a.chunk(2, 1)[::-1], 1),
    "split": lambda a, b, **_: a.split([1, 5], 1)[1],
    "stack": lambda a, b, **_: torch.stack([a, b]),
    "stack last": lambda a, b, **_: torch.stack([a[0], b[0]], -1),
    "cat": lambda a, b, **_: torch.cat([a, b], -1),
    "unbind": lambda a, b, **_: torch.stack(a.unbind(0)[1:]),
    "select": lambda a, b, c, **_: torch.cat([a[2], c]),
    "expert by expert": lambda a, b, **_: torch.stack([x.squeeze(0) for x in a.chunk(4)]),
    "transpose": lambda a, b, **_: a.transpose(1, 2).contiguous(),
    "transpose, then cut": lambda a, b, **_: a.transpose(0, 2)[3:5, 1:4].clone(),
    "permute": lambda a, b, **_: a.permute(2, 0, 1).to(torch.float64).long(),
    "view": lambda a, b, **_: a.view(24, 8)[6:12],
    "view of two": lambda a, b, **_: a.view(4, 48),
    "unsqueeze": lambda c, d, **_: torch.cat([c.unsqueeze(0), c[None]]),
    "one row": lambda c, d, **_: torch.cat([d, c, d]),
    "a vector": lambda e, **_: torch.cat([e[3:7], e.chunk(3)[2]]),
    "nothing": lambda a, **_: a,
}
COMPUTED: dict[str, Op] = {
    "a sum": lambda a, b, **_: a + b,
    "interleaved rows": lambda a, b, **_: a.view(4, 3, 2, 8).transpose(1, 2).reshape(4, 6, 8),
    "a repeated row": lambda d, **_: d.expand(3, 8),
    "with a constant": lambda a, b, **_: torch.cat([a, torch.zeros(1, 6, 8, dtype=a.dtype)]),
}


def assembled(shape: Any, parts: tuple[Part, ...]) -> Tensor:
    made = torch.full(shape, -1)
    for part in parts:
        assert (made[part.here] == -1).all()  # they do not overlap
        made[part.here] = part.take(REAL[part.name])
    return made


def both(op: Op) -> tuple[Tensor, Any]:
    """What an op makes of values, and of traced tensors."""
    without = {name: traced(name, shape, torch.int64) for name, shape in SHAPES.items()}
    return op(**REAL), op(**without)


@pytest.mark.parametrize("case", OPS)
def test_parts_have_the_values_of_the_op(case: str) -> None:
    wanted, found = both(OPS[case])
    assert isinstance(found, TracedTensor)
    assert (found.shape, found.dtype) == (wanted.shape, wanted.dtype)
    if case in ("stack last", "view of two"):  # no box, though nothing but places changes
        assert found.origins <= SHAPES.keys() and (found.parts is None) == (case == "view of two")
    if found.parts is not None:
        assert cover(found.parts, wanted.shape)
        assert torch.equal(assembled(wanted.shape, found.parts), wanted)
        assert found.origins == {part.name for part in found.parts}


@pytest.mark.parametrize("case", COMPUTED)
def test_what_is_no_part_says_so(case: str) -> None:
    wanted, found = both(COMPUTED[case])
    assert found.shape == wanted.shape and found.parts is None and found.origins


WRITES: dict[str, Op] = {
    "to itself": lambda a, **_: a.mul_(2),
    "to a view": lambda a, **_: a[1:, :2].transpose(1, 2).neg_(),
    "to a new tensor": lambda a, **_: torch.empty_like(a).copy_(a),
    "to a tensor with values": lambda a, **_: torch.zeros(a.shape).copy_(a),
    "out=": lambda a, b, **_: torch.add(a, b, out=torch.empty_like(a)),
}


@pytest.mark.parametrize("case", WRITES)
def test_writes_are_refused(case: str) -> None:
    """Whoever reads the values by another view would not know of them."""
    without = {name: traced(name, shape, torch.int64) for name, shape in SHAPES.items()}
    with pytest.raises(NotImplementedError, match="writes to a tensor, which is not traced"):
        WRITES[case](**without)


def test_the_same_box_from_the_other_side() -> None:
    for case in OPS:
        wanted, found = both(OPS[case])
        for part in found.parts or ():
            back = part.of("x")
            taken = back.take(wanted).reshape(-1)
            assert torch.equal(taken, REAL[part.name][part.there].reshape(-1)), case
            assert back.of(part.name)[:3] == part[:3]


def test_blocks_of_parts() -> None:
    """Where a part has blocks of its own, its scales are the part of the scales."""
    draw = random.Random(0)
    aligned = 0
    for _ in range(300):
        experts, rows, cols = draw.choice([(1, 300, 200), (3, 384, 256), (2, 256, 384)])
        x = traced("x", (experts, rows, cols), torch.bfloat16)
        begin, end = sorted(draw.sample(range(0, rows + 1, draw.choice([1, 64, 128])), 2))
        made: Any = x[draw.randrange(experts), begin:end]
        if draw.random() < 0.5:
            made = made.t()
        made = torch.cat([made, made], 0) if draw.random() < 0.5 else made
        numbers = torch.arange(experts * -(-rows // 128) * -(-cols // 128), dtype=torch.float32)
        scales = numbers.view(BLOCKS_128X128.scale_shape((experts, rows, cols)))
        every = scales.repeat_interleave(128, 1).repeat_interleave(128, 2)[:, :rows, :cols]
        for part in made.parts:
            block = part.in_blocks(made.shape)
            if block is None:
                continue
            aligned += 1
            spread = block.take(scales).repeat_interleave(128, 0).repeat_interleave(128, 1)
            height, width = part.shape
            assert torch.equal(spread[:height, :width], part.take(every))
    assert aligned > 50
