"""The reference of producers casts what autograd computes in eager mode, bit for bit."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from blocktensor.ops import reference as casts
from blocktensor.ops.formats import BLOCKS_1X128, BLOCKS_128X128
from blocktensor.ops.producers.reference import ACTIVATIONS, gated, gated_backward
from tests.support.groups import ends
from tests.support.numeric import DTYPES, assert_same, values
from tests.support.producers import assert_same_forms

MODULES: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu2": lambda x: torch.square(F.relu(x)),
}
"""As models write them."""


def test_every_activation_is_compared() -> None:
    assert set(MODULES) == set(ACTIVATIONS)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("is_gated", [True, False], ids=["gated", "plain"])
@pytest.mark.parametrize("activation", MODULES)
def test_values_and_gradients_are_those_of_autograd(
    activation: str, is_gated: bool, dtype: torch.dtype
) -> None:
    rng = torch.Generator().manual_seed(0)
    for kind in ("normal", "edges", "zeros"):
        grad, gate, up = (values(kind, 130, 300, dtype, rng) for _ in range(3))
        gate.requires_grad_()
        up.requires_grad_()
        h = MODULES[activation](gate) * up if is_gated else MODULES[activation](gate)
        h.backward(grad)
        formats = BLOCKS_1X128, BLOCKS_128X128
        given = (gate.detach(), up.detach() if is_gated else None, activation, *formats)
        assert_same_forms(gated(*given), casts.quantize_both(h.detach(), *formats))
        of_gate, of_up = gated_backward(grad, *given)
        assert gate.grad is not None
        assert_same_forms(of_gate, casts.quantize_both(gate.grad, *formats))
        if is_gated:
            assert up.grad is not None
            assert_same_forms(of_up, casts.quantize_both(up.grad, *formats))
            alone, none = gated_backward(grad, *given, of_up=False)
            assert none == (None, None)
            assert_same_forms(alone, of_gate)
            assert_same_forms(gated(gate.detach(), grad, *given[2:]), of_up)
        else:
            assert of_up == (None, None)


def test_blocks_begin_anew_at_groups() -> None:
    rng = torch.Generator().manual_seed(0)
    gate, up = (values("normal", 300, 130, torch.bfloat16, rng) for _ in range(2))
    offs = ends(130, 0, 150)
    h = F.silu(gate) * up
    for row, col in ((BLOCKS_1X128, BLOCKS_1X128), (None, BLOCKS_128X128), (BLOCKS_1X128, None)):
        got = gated(gate, up, "silu", row, col, offs)
        if col is not None:
            assert got[1] is not None
            want = casts.quantize_grouped_columnwise(h, offs, col)
            assert_same(got[1].data[:, :384], want.data[:, :384])  # the blocks of the groups
            assert_same(got[1].scale[:3], want.scale[:3]) if col.rows > 1 else None
        if row is not None:
            assert got[0] is not None
            assert_same(got[0].data, casts.quantize_rowwise(h, row).data)
