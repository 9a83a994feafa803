"""The ops of producers: joint gradients, the choice of a backend.

Their reference casts what autograd computes in eager mode, bit for bit.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Generator

from blocktensor.ops import reference as casts
from blocktensor.ops.cast.producer import halves
from blocktensor.ops.formats import BLOCKS_1X128, BLOCKS_128X128
from blocktensor.ops.producers import ops, reference
from blocktensor.ops.producers.activations import ACTIVATIONS, ActivationName
from blocktensor.ops.producers.choose_backend import PRODUCER_BACKENDS, ProducerProblem
from tests.support.casts import FORMATS, Formats, kernels, three
from tests.support.gated import EAGER
from tests.support.groups import ends, filled
from tests.support.numeric import DTYPES, assert_same_forms, values

BF16 = torch.bfloat16
every_formats = pytest.mark.parametrize("formats", FORMATS, ids=range(len(FORMATS)))


@every_formats
@pytest.mark.parametrize("cols", [1, 128, 256, 300])
def test_a_joint_gradient_is_both_gradients_side_by_side(cols: int, formats: Formats) -> None:
    grad, gate, up = three(130, cols)
    both = torch.cat([gate, up], 1)
    for offs in (None, ends(100, 0, 30)):
        rest = ("gelu_tanh", *formats, offs)
        made = ops.joint_gated_backward(grad, both, *rest)
        assert_same_forms(made, reference.joint_gated_backward(grad, both, *rest))
        if cols % 128 == 0:
            assert_same_forms(halves(made), ops.gated_backward(grad, gate, up, *rest))


META = {"dtype": BF16, "device": "meta"}
HALVES = torch.empty((128, 512), **META).chunk(2, 1)  # type: ignore[call-overload]
ODD = torch.empty((128, 257), **META)[:, :256]  # type: ignore[call-overload]
ACROSS = torch.empty((256, 128), **META).t()  # type: ignore[call-overload]
WIDE = torch.empty((128, 256), device="meta")
EIGHTS = "reads fp16 and fp32 in whole vectors of eight elements"


@pytest.mark.parametrize(
    ("name", "sources", "reason"),
    [
        ("gluon", HALVES, None),
        ("triton", HALVES, None),
        ("gluon", (HALVES[0], ODD), "reads rows of whole 32-bit words"),
        ("triton", (HALVES[0], ODD), None),
        ("triton", (HALVES[0], ACROSS), "reads rows of unit stride"),
        ("reference", (HALVES[0], ACROSS), None),
        ("triton", 3 * (WIDE,), "computes from three tensors in bf16 alone: others would spill"),
        ("gluon", 3 * (WIDE,), None),
        ("triton", (WIDE.new_empty(128, 258),), EIGHTS),
        ("triton", (WIDE.new_empty(128, 264)[:, :258],), EIGHTS),
        ("triton", (WIDE,), None),
    ],
)
def test_who_takes_which_layouts(name: str, sources: Any, reason: str | None) -> None:
    assert [backend.name for backend in PRODUCER_BACKENDS] == ["gluon", "triton", "reference"]
    problem = ProducerProblem("silu", sources, BLOCKS_1X128, BLOCKS_1X128)
    assert kernels(name, PRODUCER_BACKENDS).backend.declines(problem) == reason


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_values_and_gradients_are_those_of_autograd(
    activation: ActivationName, dtype: torch.dtype, rng: Generator
) -> None:
    for kind in ("normal", "edges", "zeros"):
        grad, gate, up = (values(kind, 130, 300, dtype, rng) for _ in range(3))
        h = EAGER[activation](gate.requires_grad_()) * up.requires_grad_()
        eager = torch.autograd.grad(h, (gate, up), grad)
        formats = BLOCKS_1X128, BLOCKS_128X128
        given = gate.detach(), up.detach(), activation, *formats
        assert_same_forms(reference.gated(*given), casts.quantize_both(h.detach(), *formats))
        of_gate, of_up = reference.gated_backward(grad, *given)
        assert_same_forms(of_gate, casts.quantize_both(eager[0], *formats))
        assert_same_forms(of_up, casts.quantize_both(eager[1], *formats))
        alone = reference.gated_backward(grad, *given, of_up=False)
        assert_same_forms(alone, (of_gate, (None, None)))
        assert_same_forms(reference.gated(gate.detach(), grad, *given[2:]), of_up)


def test_blocks_begin_anew_at_groups(rng: Generator) -> None:
    gate, up = (values("normal", 300, 130, torch.bfloat16, rng) for _ in range(2))
    sizes = 130, 0, 150
    h, offs = F.silu(gate) * up, ends(*sizes)
    for row, col in ((BLOCKS_1X128, BLOCKS_1X128), (None, BLOCKS_128X128), (BLOCKS_1X128, None)):
        got_row, got_col = reference.gated(gate, up, "silu", row, col, offs)
        want_row, want_col = casts.quantize_grouped(h, offs, row, col)
        assert_same_forms(got_row, want_row)
        assert (got_col is None) == (want_col is None)
        if got_col is not None and want_col is not None:
            assert_same_forms(filled(got_col, sizes), filled(want_col, sizes))
