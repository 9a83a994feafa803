"""Producers on a GPU give the bytes of eager mode there, whatever the inputs look like."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from blocktensor.ops.formats import (
    BLOCKS_1X128,
    BLOCKS_128X128,
)
from blocktensor.ops.op import OPS
from blocktensor.ops.producers import ops, reference
from blocktensor.ops.producers.choose_backend import (
    PRODUCER_BACKENDS,
    ProducerProblem,
    producer_backend,
)
from blocktensor.ops.producers.reference import ACTIVATIONS
from tests.support.casts import Functions
from tests.support.casts import kernels as functions
from tests.support.groups import ends
from tests.support.numeric import DTYPES, KINDS, assert_same, values
from tests.support.producers import FORMATS, SIZES, Formats, assert_same_forms, by_casts

pytest.importorskip("triton")

CUDA = torch.device("cuda")
BF16, FP16, FP32 = DTYPES
on_a_gpu = pytest.mark.gpu

ROWS: Formats = BLOCKS_1X128, None
VIEWS = ("contiguous", "halves", "rows apart", "one row")


class Case(NamedTuple):
    rows: int
    cols: int
    kind: str
    view: str
    formats: Formats
    is_gated: bool


def some_formats(activation: str, dtype: torch.dtype) -> Sequence[Formats]:
    """All formats for the usual activation in bf16, two for each other: they compile for long."""
    if (activation, dtype) == ("silu", BF16):
        return FORMATS
    turn = 3 * [*ACTIVATIONS].index(activation) + DTYPES.index(dtype)
    return FORMATS[turn % len(FORMATS)], FORMATS[(turn + 4) % len(FORMATS)]


def cases(name: str, activation: str, dtype: torch.dtype, part: int) -> Iterator[Case]:
    """Fifty cases that the backend takes; others for another part."""
    usual = [f for f in some_formats(activation, dtype) if f[1] or name == "triton"]
    unit = 8 if dtype != BF16 else 1 if name == "triton" else 2
    draw = random.Random(f"{name} {part}")
    for i in range(50):
        rows = cols = 2**20
        while rows * cols > 1_500_000 or cols % unit:
            rows, cols = draw.choice(SIZES), draw.choice(SIZES)
        formats = draw.choice(usual)
        yield Case(
            rows, cols, draw.choice(KINDS), VIEWS[i % len(VIEWS)], formats, draw.random() < 0.8
        )


def laid_out(x: Tensor, view: str) -> Tensor:
    if view == "rows apart":
        return x.new_zeros((x.shape[0], x.shape[1] + 16))[:, 8:-8].copy_(x)
    return x[:1].expand(x.shape) if view == "one row" and len(x) else x


def inputs(case: Case, dtype: torch.dtype, rng: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """The gradient of h, gate and up on the GPU; two of them have awkward values."""
    made = [
        values(kind, case.rows, case.cols, dtype, rng).to(CUDA)
        for kind in (case.kind, case.kind, "normal")
    ]
    turn = int(torch.randint(3, (), generator=rng))
    grad, gate, up = made[turn:] + made[:turn]
    if case.view == "halves":
        gate, up = torch.cat([gate, up], 1).chunk(2, 1) if case.cols else (gate, up)
    else:
        gate, up = laid_out(gate, case.view), laid_out(up, case.view)
    return grad, gate, up


def kernels(name: str) -> Functions:
    return functions(name, PRODUCER_BACKENDS)


def takes(name: str, sources: tuple[Tensor, ...], formats: Formats) -> bool:
    backend = next(backend for backend in PRODUCER_BACKENDS if backend.name == name)
    return backend.declines(ProducerProblem(sources, *formats)) is None


def check(
    backend: Functions,
    activation: str,
    sources: tuple[Tensor, Tensor, Tensor],
    is_gated: bool,
    formats: Formats,
) -> None:
    """The results on the GPU are the casts of what eager mode computes there."""
    grad, gate, up = sources
    act, rest = ACTIVATIONS[activation], (activation, *formats)
    h, d_value, given = act.value(gate), grad, None
    if is_gated:
        d_up, d_value, h, given = grad * h, grad * up, h * up, up
    of_gate, of_up = backend.gated_backward(grad, gate, given, *rest)
    assert_same_forms(backend.gated(gate, given, *rest), by_casts(h, formats))
    assert_same_forms(of_gate, by_casts(act.gradient(d_value, gate), formats))
    if is_gated:
        assert_same_forms(of_up, by_casts(d_up, formats))
        of_gate, none = backend.gated_backward(grad, gate, up, *rest, of_up=False)
        assert none == (None, None)
        assert_same_forms(of_gate, by_casts(act.gradient(d_value, gate), formats))
        assert_same_forms(backend.gated(gate, grad, *rest), by_casts(d_up, formats))


@on_a_gpu
@pytest.mark.parametrize("part", range(4))  # processes share its many compilations
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("name", ["triton", "gluon"])
def test_bytes(name: str, activation: str, dtype: torch.dtype, part: int) -> None:
    rng = torch.Generator().manual_seed(part)
    for case in cases(name, activation, dtype, part):
        sources = inputs(case, dtype, rng)
        is_gated = case.is_gated and (name == "gluon" or dtype == BF16)
        assert not case.cols or takes(name, sources[: 2 + is_gated], case.formats)
        check(kernels(name), activation, sources, is_gated, case.formats)


def every_number(dtype: torch.dtype) -> Tensor:
    return torch.arange(-(2**15), 2**15, device=CUDA).to(torch.int16).view(dtype)


@on_a_gpu
@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_every_gate(activation: str, dtype: torch.dtype) -> None:
    """All 65,536 numbers as the gate, each alone in its row: its scale shows its 16 bits."""
    gate = every_number(dtype)[:, None]
    rng = torch.Generator().manual_seed(0)
    for kind in ("ones", "normal", "normal", "bits", "tiny"):
        if kind == "ones":
            grad = up = torch.ones_like(gate)
        else:
            grad, up = (values(kind, 2**16, 1, dtype, rng).to(CUDA) for _ in range(2))
        check(kernels("triton"), activation, (grad, gate, up), True, ROWS)


@on_a_gpu
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("name", ["triton", "gluon"])
def test_groups(name: str, activation: str) -> None:
    rng = torch.Generator().manual_seed(0)
    backend = kernels(name)
    for sizes in ((130, 0, 150, 1), (128, 256), (0, 0, 5), (300,)):
        offs = ends(*sizes, device=CUDA)
        blocks = sum(-(-size // 128) for size in sizes)
        for spare, formats in ((0, FORMATS[0]), (3, FORMATS[1]), (3, FORMATS[2])):
            shape = sum(sizes) + spare, 576  # some rows of no group
            grad, gate, up = (values("normal", *shape, BF16, rng).to(CUDA) for _ in range(3))
            rest = (activation, *formats, offs)
            got = backend.gated(gate, up, *rest), *backend.gated_backward(grad, gate, up, *rest)
            want = (
                reference.gated(gate, up, *rest),
                *reference.gated_backward(grad, gate, up, *rest),
            )
            for (row, col), (want_row, want_col) in zip(got, want, strict=True):
                assert_same_forms([row], [want_row])
                data, scale = ((x[0].cpu(), x[1].cpu()) for x in (col, want_col))
                assert_same(data[0][:, : 128 * blocks], scale[0][:, : 128 * blocks])
                square = col.format.rows > 1
                used = slice(None, blocks)
                assert_same(data[1][:, used], scale[1][:, used])
                assert square == (formats[1] is BLOCKS_128X128)


@on_a_gpu
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("name", ["triton", "gluon"])
def test_joint_gradients(name: str, activation: str) -> None:
    """Those of gate and up, cast side by side; rows in groups too."""
    rng = torch.Generator().manual_seed(0)
    joint = kernels(name).joint_gated_backward
    for rows, cols in ((0, 128), (1, 128), (127, 256), (300, 384), (129, 1152)):
        for kind in KINDS:
            grad, gate, up = (values(kind, rows, cols, BF16, rng).to(CUDA) for _ in range(3))
            both = torch.cat([gate, up], 1)
            sources = torch.cat(reference.gradients(grad, gate, up, activation), 1)
            for formats in FORMATS:
                if name == "gluon" and formats[1] is None:
                    continue
                got = joint(grad, both, activation, *formats)
                assert_same_forms(got, by_casts(sources, formats))
    for sizes in ((130, 0, 150, 1), (128, 256), (0, 0, 5)):
        offs, blocks = ends(*sizes, device=CUDA), sum(-(-size // 128) for size in sizes)
        for formats in FORMATS[:2]:
            shape = sum(sizes) + 3, 384
            grad, gate, up = (values("normal", *shape, BF16, rng).to(CUDA) for _ in range(3))
            given = grad, torch.cat([gate, up], 1), activation, *formats, offs
            (row, col), (want_row, want_col) = joint(*given), reference.joint_gated_backward(*given)
            assert_same_forms([row], [want_row])
            for x, y in zip(col[:2], want_col[:2], strict=True):
                used = 128 * blocks if x is col.data else blocks
                assert_same(x[:, :used].cpu(), y[:, :used].cpu())


@on_a_gpu
@pytest.mark.parametrize("shape", [(2304, 2176), (2300, 2056), (4095, 1160)], ids=str)
def test_programs_of_several_tiles(shape: tuple[int, int]) -> None:
    """More tiles than programs: each program copies its next tile in while it casts one."""
    rng = torch.Generator().manual_seed(0)
    backend = kernels("gluon")
    for formats in (f for f in FORMATS if None not in f):
        grad, gate, up = (values("normal", *shape, BF16, rng).to(CUDA) for _ in range(3))
        check(backend, "silu", (grad, gate, up), True, formats)
        rest = ("silu", *formats)
        first = backend.gated_backward(grad, gate, up, *rest)
        for _ in range(20):
            for again, before in zip(
                backend.gated_backward(grad, gate, up, *rest), first, strict=True
            ):
                assert_same_forms(again, before)
        if shape[1] % 128 == 0:
            sources = torch.cat(reference.gradients(grad, gate, up, "silu"), 1)
            got = backend.joint_gated_backward(grad, torch.cat([gate, up], 1), *rest)
            assert_same_forms(got, by_casts(sources, formats))


@on_a_gpu
def test_ops_repeat_recorded_launches() -> None:
    rng = torch.Generator().manual_seed(0)
    formats = BLOCKS_1X128, BLOCKS_128X128
    for _ in range(3):
        gate, up = values("normal", 256, 1152, BF16, rng).to(CUDA).chunk(2, 1)
        grad = values("normal", 256, 576, BF16, rng).to(CUDA)
        assert producer_backend((grad, gate, up), *formats).name == "gluon"
        rest = ("silu", *formats)
        assert_same_forms(ops.gated(gate, up, "silu", *formats), reference.gated(gate, up, *rest))
        got = ops.gated_backward(grad, gate, up, "silu", *formats)
        want = reference.gated_backward(grad, gate, up, *rest)
        for ours, theirs in zip(got, want, strict=True):
            assert_same_forms(ours, theirs)
    for _ in range(3):
        both = values("normal", 256, 1024, BF16, rng).to(CUDA)
        grad = values("normal", 256, 512, BF16, rng).to(CUDA)
        got = ops.joint_gated_backward(grad, both, "silu", *formats)
        assert_same_forms(got, reference.joint_gated_backward(grad, both, *rest))
    found = OPS["joint_gated_backward"].find(grad, both, *rest, None)
    assert getattr(found, "player", found) is not None
    grad = values("normal", 256, 576, BF16, rng).to(CUDA)
    for name, given in (
        ("gated", (gate, up, *rest, None)),
        ("gated_backward", (grad, gate, up, *rest, None, True)),
    ):
        found = OPS[name].find(*given)
        assert getattr(found, "player", found) is not None


@on_a_gpu
def test_nothing_in_high_precision_is_allocated() -> None:
    gate, up = (torch.randn((4096, 7168), dtype=BF16, device=CUDA) for _ in range(2))
    formats = BLOCKS_1X128, BLOCKS_1X128
    for _ in range(2):
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        made = ops.gated(gate, up, "silu", *formats)
        grown = torch.cuda.max_memory_allocated() - before
        assert 2 * gate.numel() <= grown < 2.1 * gate.numel()
        del made
