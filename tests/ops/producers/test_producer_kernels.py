"""Producers on a GPU give the bytes of eager mode there, whatever the inputs look like."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import pytest
import torch
from torch import Generator, Tensor
from torch.utils._pytree import tree_leaves

from blocktensor.ops import reference as casts
from blocktensor.ops.formats import BLOCKS_1X128, BLOCKS_128X128, Quantized
from blocktensor.ops.producers import ops, reference
from blocktensor.ops.producers.activations import ACTIVATIONS, ActivationName
from blocktensor.ops.producers.choose_backend import (
    PRODUCER_BACKENDS,
    ProducerProblem,
    producer_backend,
)
from blocktensor.ops.runtime import build_player
from tests.support.casts import FORMATS, SIZES, Formats, kernels, three
from tests.support.groups import ends, filled
from tests.support.numeric import DTYPES, KINDS, assert_same_forms, values
from tests.support.ptx import WITH_PTX

pytest.importorskip("triton")

CUDA = torch.device("cuda")
BF16, FP16, FP32 = DTYPES
on_a_gpu = pytest.mark.gpu

every_activation = pytest.mark.parametrize("activation", WITH_PTX)
every_backend = pytest.mark.parametrize("name", ["triton", "gluon"])
VIEWS = ("contiguous", "halves", "rows apart", "one row")


class Case(NamedTuple):
    rows: int
    cols: int
    kind: str
    view: str
    formats: Formats


def some_formats(activation: ActivationName, dtype: torch.dtype) -> Sequence[Formats]:
    """All formats for the usual activation in bf16, two for each other: they compile for long."""
    if (activation, dtype) == ("silu", BF16):
        return FORMATS
    turn = 3 * [*ACTIVATIONS].index(activation) + DTYPES.index(dtype)
    return FORMATS[turn % len(FORMATS)], FORMATS[(turn + 4) % len(FORMATS)]


def cases(name: str, activation: ActivationName, dtype: torch.dtype, part: int) -> Iterator[Case]:
    """Fifty cases that the backend takes; others for another part."""
    usual = [f for f in some_formats(activation, dtype) if f[1] or name == "triton"]
    unit = 8 if dtype != BF16 else 1 if name == "triton" else 2
    draw = random.Random(f"{name} {part}")
    for i in range(50):
        rows = cols = 2**20
        while rows * cols > 1_500_000 or cols % unit:
            rows, cols = draw.choice(SIZES), draw.choice(SIZES)
        formats = draw.choice(usual)
        yield Case(rows, cols, draw.choice(KINDS), VIEWS[i % len(VIEWS)], formats)


def laid_out(x: Tensor, view: str) -> Tensor:
    if view == "rows apart":
        return x.new_zeros((x.shape[0], x.shape[1] + 16))[:, 8:-8].copy_(x)
    return x[:1].expand(x.shape) if view == "one row" and len(x) else x


def inputs(case: Case, dtype: torch.dtype, rng: Generator) -> tuple[Tensor, Tensor, Tensor]:
    """The gradient of h, gate and up on the GPU; two of them have awkward values."""
    kinds, seed = (case.kind, case.kind, "normal"), int(torch.randint(2**31, (), generator=rng))
    grad, gate, up = three(case.rows, case.cols, dtype, kinds, seed, CUDA)
    if case.view == "halves":
        gate, up = torch.cat([gate, up], 1).chunk(2, 1) if case.cols else (gate, up)
    else:
        gate, up = laid_out(gate, case.view), laid_out(up, case.view)
    return grad, gate, up


def takes(
    name: str, activation: ActivationName, sources: tuple[Tensor, ...], formats: Formats
) -> bool:
    backend = kernels(name, PRODUCER_BACKENDS).backend
    return backend.declines(ProducerProblem(activation, sources, *formats)) is None


def by_casts(h: Tensor, formats: Formats) -> tuple[Any, Any]:
    """The forms of ``h``, each by a cast of its own."""
    row, col = formats
    return (
        None if row is None else casts.quantize_rowwise(h, row),
        None if col is None else casts.quantize_columnwise(h, col),
    )


def check(
    name: str,
    activation: ActivationName,
    sources: tuple[Tensor, Tensor, Tensor],
    formats: Formats,
    with_gradients: bool = True,
) -> None:
    """The results on the GPU are the casts of what eager mode computes there."""
    backend, (grad, gate, up) = kernels(name, PRODUCER_BACKENDS), sources
    act, rest = ACTIVATIONS[activation], (activation, *formats)
    h = act.value(gate)
    of_up = by_casts(grad * h, formats)
    assert_same_forms(backend.gated(gate, up, *rest), by_casts(h * up, formats))
    assert_same_forms(backend.gated(gate, grad, *rest), of_up)
    if with_gradients:
        of_gate = by_casts(act.gradient(grad * up, gate), formats)
        assert_same_forms(backend.gated_backward(grad, gate, up, *rest), (of_gate, of_up))
        alone = backend.gated_backward(grad, gate, up, *rest, of_up=False)
        assert_same_forms(alone, (of_gate, (None, None)))


@on_a_gpu
@pytest.mark.parametrize("part", range(4))  # processes share its many compilations
@pytest.mark.parametrize("dtype", DTYPES)
@every_activation
@every_backend
def test_bytes(name: str, activation: ActivationName, dtype: torch.dtype, part: int) -> None:
    rng = Generator().manual_seed(part)
    for case in cases(name, activation, dtype, part):
        sources = inputs(case, dtype, rng)
        with_gradients = name == "gluon" or dtype == BF16  # they read three tensors
        taken = sources if with_gradients else sources[1:]
        assert not case.cols or takes(name, activation, taken, case.formats)
        check(name, activation, sources, case.formats, with_gradients)


@on_a_gpu
@pytest.mark.parametrize("dtype", [BF16, FP16])
@every_activation
def test_every_gate(activation: ActivationName, dtype: torch.dtype, rng: Generator) -> None:
    """All 65,536 numbers as the gate, each alone in its row: its scale shows its 16 bits."""
    gate = torch.arange(-(2**15), 2**15, device=CUDA).to(torch.int16).view(dtype)[:, None]
    grad = up = torch.ones_like(gate)
    for kind in (None, "normal", "normal", "bits", "tiny"):
        if kind is not None:
            grad, up = (values(kind, 2**16, 1, dtype, rng).to(CUDA) for _ in range(2))
        check("triton", activation, (grad, gate, up), (BLOCKS_1X128, None))


GROUPS = ((130, 0, 150, 1), (128, 256), (0, 0, 5), (300,))


def filled_forms(made: Any, sizes: tuple[int, ...]) -> list[Any]:
    """Rowwise and columnwise casts, one after the other, with the blocks that groups fill."""
    forms = tree_leaves(made, is_leaf=lambda part: isinstance(part, Quantized))
    pairs = zip(forms[::2], forms[1::2], strict=True)
    return [(row, None if col is None else filled(col, sizes)) for row, col in pairs]


@on_a_gpu
@every_activation
@every_backend
def test_groups(name: str, activation: ActivationName) -> None:
    backend = kernels(name, PRODUCER_BACKENDS)
    for sizes in GROUPS:
        for spare, formats in ((0, FORMATS[0]), (3, FORMATS[1]), (3, FORMATS[2])):
            # some rows of no group
            grad, gate, up = three(sum(sizes) + spare, 576, device=CUDA)
            rest = (activation, *formats, ends(*sizes, device=CUDA))
            for function, given in (
                ("gated", (gate, up, *rest)),
                ("gated_backward", (grad, gate, up, *rest)),
            ):
                made = (getattr(module, function)(*given) for module in (backend, reference))
                assert_same_forms(*(filled_forms(forms, sizes) for forms in made))


@on_a_gpu
@every_activation
@every_backend
def test_joint_gradients(name: str, activation: ActivationName) -> None:
    """Those of gate and up, cast side by side; rows in groups too."""
    joint = kernels(name, PRODUCER_BACKENDS).joint_gated_backward
    for rows, cols in ((0, 128), (1, 128), (127, 256), (300, 384), (129, 1152)):
        for kind in KINDS:
            grad, gate, up = three(rows, cols, kinds=(kind, kind, kind), device=CUDA)
            both = torch.cat([gate, up], 1)
            sources = torch.cat(reference.gradients(grad, gate, up, activation), 1)
            for formats in FORMATS:
                if name == "gluon" and formats[1] is None:
                    continue
                got = joint(grad, both, activation, *formats)
                assert_same_forms(got, by_casts(sources, formats))
    for sizes in GROUPS[:3]:
        for formats in FORMATS[:2]:
            grad, gate, up = three(sum(sizes) + 3, 384, device=CUDA)
            both, offs = torch.cat([gate, up], 1), ends(*sizes, device=CUDA)
            given = grad, both, activation, *formats, offs
            made = joint(*given), reference.joint_gated_backward(*given)
            assert_same_forms(*(filled_forms(forms, sizes) for forms in made))


@on_a_gpu
def test_ops_repeat_recorded_launches() -> None:
    rest = "silu", BLOCKS_1X128, BLOCKS_128X128
    player = build_player.player()
    assert player is not None
    for seed in range(3):
        grad, gate, up = three(256, 576, seed=seed, device=CUDA)
        gate, up = torch.cat([gate, up], 1).chunk(2, 1)
        assert producer_backend("silu", (grad, gate, up), *rest[1:]).name == "gluon"
        wide, *parts = three(256, 512, seed=seed, device=CUDA)
        calls = {
            "gated": (gate, up, *rest, None),
            "gated_backward": (grad, gate, up, *rest, None, True),
            "joint_gated_backward": (wide, torch.cat(parts, 1), *rest, None),
        }
        for name, given in calls.items():
            plays = player.plays()
            assert_same_forms(getattr(ops, name)(*given), getattr(reference, name)(*given))
            assert seed == 0 or player.plays() > plays
