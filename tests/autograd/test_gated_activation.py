"""A gated activation whose result exists in FP8 alone."""

from __future__ import annotations

import pytest
import torch
from expecttest import assert_expected_inline

from blocktensor import BlockwiseFP8Tensor, Recipe, functional, quantize
from tests.support.gated import EAGER, assert_bits, results, weights
from tests.support.models import FP32_SCALES, POWER_OF_TWO, Trace, assert_same, complaint, randn

gated_activation = functional.gated_activation


@pytest.mark.parametrize("wgrad_input", ["1x128", "128x128", "high_precision"])
@pytest.mark.parametrize("activation", EAGER)
def test_bits(activation: str, wgrad_input: str, device: torch.device) -> None:
    recipe = Recipe(wgrad_input=wgrad_input)  # type: ignore[arg-type]
    w_down = weights(recipe=recipe, device=device)[2]
    x, up = (randn(2, 70, 320, seed=i, device=device, grad=True) for i in range(2))
    wanted = results(
        lambda g, u, w: torch.nn.functional.linear(EAGER[activation](g) * u, w), x, [up, w_down]
    )

    def fused(g: torch.Tensor, u: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        h = gated_activation(g, u, activation, recipe)  # type: ignore[arg-type]
        return torch.nn.functional.linear(h, w)

    assert_bits(results(fused, x, [up, w_down]), wanted)


def test_it_is_the_cast_of_the_product() -> None:
    gate, up = randn(2, 70, 320), randn(2, 70, 320, seed=1)
    for recipe in (FP32_SCALES, POWER_OF_TWO, Recipe(wgrad_input="128x128")):
        made = gated_activation(gate, up, recipe=recipe)
        assert type(made) is BlockwiseFP8Tensor
        assert_same(made, quantize(torch.nn.functional.silu(gate) * up, recipe))
    with Trace() as trace:
        gated_activation(gate, up)
    assert trace.ops == ["blocktensor.gated silu 1x128 1x128"]


def test_bad_input() -> None:
    gate = randn(70, 320)
    assert_expected_inline(
        complaint(ValueError, lambda: gated_activation(gate, gate, "tanh")),  # type: ignore
        """activation 'tanh': expected one of silu, gelu, gelu_tanh, relu2""",
    )
    assert_expected_inline(
        complaint(ValueError, lambda: gated_activation(gate, gate[:1])),
        """gate has shape [70, 320] and up [1, 320]: expected the same [..., I]""",
    )
    with pytest.raises(TypeError, match=r"up has dtype torch\.float32"):
        gated_activation(gate, gate.float())
