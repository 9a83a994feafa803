"""Gated MLPs whose gate and up are one weight: the bits of two linears and eager ops."""

from __future__ import annotations

import functools
import gc
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from torch import Tensor, nn

from blocktensor import BlockwiseFP8Weight, Recipe, functional, quantize
from blocktensor.autograd import products
from tests.support.gated import EAGER, assert_bits, results
from tests.support.groups import ends
from tests.support.models import FP32_SCALES, POWER_OF_TWO, Trace, complaint, plain, randn

F = torch.nn.functional
K, N = 192, 136
WHOLE, RAGGED = 256, 320
"""Features of h: gate and up share no block, or one."""

SQUARES = Recipe(wgrad_input="128x128")
RECIPES = (FP32_SCALES, POWER_OF_TWO, SQUARES, Recipe(cache_weight=False))
every_width = pytest.mark.parametrize("hidden", [WHOLE, RAGGED])


def joint(
    x: Tensor, w_gate_up: Tensor, w_down: Tensor, *biases: Tensor | None, **options: Any
) -> Tensor:
    of_both, of_down = biases or (None, None)
    return functional.gated_mlp(x, w_gate_up, None, w_down, of_both, None, of_down, **options)


def unfused(
    x: Tensor,
    w_gate_up: Tensor,
    w_down: Tensor,
    *biases: Tensor | None,
    activation: str = "silu",
) -> Tensor:
    of_both, of_down = biases or (None, None)
    gate, up = F.linear(x, w_gate_up, of_both).chunk(2, -1)
    return F.linear(EAGER[activation](gate) * up, w_down, of_down)


def weights(
    hidden: int = WHOLE,
    recipe: Recipe = FP32_SCALES,
    frozen: tuple[int, ...] = (),
    experts: tuple[int, ...] = (),
    **options: Any,
) -> list[Tensor]:
    """Of both, and of down."""
    shapes = ((*experts, 2 * hidden, K), (*experts, N, hidden))
    return [
        nn.Parameter(
            BlockwiseFP8Weight(randn(*shape, seed=i, **options) / 14, recipe), i not in frozen
        )
        for i, shape in enumerate(shapes)
    ]


def inputs(*shape: int, grad: bool = True, **options: Any) -> Tensor:
    return randn(*shape, K, seed=5, grad=grad, **options)


def assert_same_bits(
    x: Tensor, operands: list[Any], activation: str = "silu", **options: Any
) -> None:
    wanted = results(functools.partial(unfused, activation=activation), x, operands)
    run = functools.partial(joint, activation=activation, **options)
    assert_bits(results(run, x, operands), wanted)


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("recipe", RECIPES, ids=range(len(RECIPES)))
@every_width
def test_bits(hidden: int, recipe: Recipe, recompute: bool, device: torch.device) -> None:
    for activation in EAGER:
        operands = weights(hidden, recipe, device=device)
        assert_same_bits(inputs(2, 75, device=device), operands, activation, recompute=recompute)


@pytest.mark.parametrize("shape", [(), (0,), (1,), (129,), (3, 1, 5)])
@every_width
def test_shapes(hidden: int, shape: tuple[int, ...], device: torch.device) -> None:
    assert_same_bits(inputs(*shape, device=device), weights(hidden, device=device))


@pytest.mark.parametrize("trained", [(), (0,), (1,), (0, 1)], ids=str)
@pytest.mark.parametrize("frozen", [(), (0, 1)], ids=str)
def test_biases(trained: tuple[int, ...], frozen: tuple[int, ...]) -> None:
    made = [randn(2 * WHOLE, seed=8), randn(N, seed=9)]
    for i in trained:
        made[i].requires_grad_()
    for x_grad in (True, False):
        assert_same_bits(inputs(70, grad=x_grad), [*weights(frozen=frozen), *made])


def test_plain_weights_and_cast_inputs() -> None:
    fp8 = weights()
    operands = [plain(w).requires_grad_() for w in fp8]
    wanted = results(unfused, inputs(70), fp8)
    assert_bits(results(joint, inputs(70), operands), wanted)
    assert_bits(results(lambda x, *ws: joint(quantize(x), *ws), inputs(70), fp8), wanted)


@every_width
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("recipe", [FP32_SCALES, SQUARES], ids=["1x128", "128x128"])
def test_experts(recipe: Recipe, recompute: bool, hidden: int, device: torch.device) -> None:
    """Groups of no rows, of one, of more than a block; rows of no group."""
    offs = ends(0, 1, 130, 7, device=device)
    x = inputs(140, device=device)

    def one_by_one(x: Tensor, w_gate_up: Tensor, w_down: Tensor) -> Tensor:
        both = torch._grouped_mm(x, w_gate_up.transpose(1, 2), offs)
        gate, up = both.chunk(2, -1)
        return torch._grouped_mm(F.silu(gate) * up, w_down.transpose(1, 2), offs)

    def at_once(x: Tensor, w_gate_up: Tensor, w_down: Tensor) -> Tensor:
        return functional.gated_experts(x, w_gate_up, None, w_down, offs, recompute=recompute)

    operands = weights(hidden, recipe, experts=(4,), device=device)
    assert_bits(results(at_once, x, operands), results(one_by_one, x, operands))


def test_compiled_functions_give_the_same_bits() -> None:
    operands, x = weights(), inputs(70)
    wanted = results(joint, x, operands)
    compiled = torch.compile(joint, backend="aot_eager", fullgraph=True)
    assert_bits(results(compiled, x, operands), wanted)


def test_bad_input_in_the_first_call_of_a_process() -> None:
    """Compiled before Dynamo was told of the functions that it takes whole."""
    code = """
import torch
from blocktensor import BlockwiseFP8Weight, functional
w, down = (BlockwiseFP8Weight(torch.randn(*shape)) for shape in ((400, 192), (136, 200)))
run = torch.compile(
    lambda x, b: functional.gated_mlp(x, w, None, down, bias_up=b), backend="aot_eager"
)
run(torch.randn(4, 192), torch.randn(200))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "bias_up without w_up: give bias_gate the biases of both" in done.stderr


def alive(shapes: Sequence[tuple[int, ...]], dtype: torch.dtype) -> list[tuple[int, ...]]:
    """The shapes of the plain tensors that exist, of those asked for."""
    held = (x for x in gc.get_objects() if type(x) is Tensor)
    return sorted(tuple(x.shape) for x in held if x.dtype == dtype and tuple(x.shape) in shapes)


def test_backward_frees_what_it_has_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gate, up and dh are gone when the products of both begin."""
    rows, seen = 77, []
    original = products.Dense.wgrad

    def wgrad(self: Any, plan: Any, *args: Any) -> Any:
        seen.append(alive([(rows, 2 * WHOLE), (rows, WHOLE)], torch.bfloat16))
        return original(self, plan, *args)

    monkeypatch.setattr(products.Dense, "wgrad", wgrad)
    for recompute in (False, True):
        operands = weights()
        joint(inputs(rows), *operands, recompute=recompute).backward(randn(rows, N))
    of_down, of_both = [(rows, WHOLE), (rows, 2 * WHOLE)], []
    assert seen == [of_down, of_both] * 2


def test_what_runs() -> None:
    operands, x = weights(), inputs(70)
    with Trace() as trace:
        joint(x, *operands).backward(randn(70, N))
    assert_expected_inline(
        "\n".join(op for op in trace.ops if "blocktensor" in op),
        """\
blocktensor.quantize_both 1x128
blocktensor.quantize_with_transpose 128x128
blocktensor.gemm 1x128 128x128
blocktensor.gated silu 1x128 1x128
blocktensor.quantize_with_transpose 128x128
blocktensor.gemm 1x128 128x128
blocktensor.quantize_both 1x128
blocktensor.gemm 1x128 128x128
blocktensor.gemm 1x128 1x128
blocktensor.joint_gated_backward silu 1x128 1x128
blocktensor.gemm 1x128 128x128
blocktensor.gemm 1x128 1x128""",
    )


def test_bad_input() -> None:
    w_gate_up, w_down = weights()
    odd = nn.Parameter(BlockwiseFP8Weight(randn(255, K)))
    assert_expected_inline(
        "\n".join(
            complaint(ValueError, call)
            for call in (
                lambda: joint(inputs(3), odd, w_down),
                lambda: functional.gated_mlp(
                    inputs(3), w_gate_up, None, w_down, bias_up=randn(WHOLE)
                ),
                lambda: joint(inputs(3), w_gate_up, weights(RAGGED)[1]),
                lambda: functional.gated_experts(
                    inputs(3), randn(0, 255, K), None, randn(0, N, 128), ends()
                ),
            )
        )
        + "\n"
        + complaint(TypeError, lambda: functional.gated_mlp(inputs(3), w_gate_up, None, None)),  # type: ignore[arg-type]
        """\
w_gate has 255 features and there is no w_up: expected an even number, those of gate
and as many of up
bias_up without w_up: give bias_gate the biases of both, gate first
cannot contract input [3, 256] with weight [136, 320]: K is 256 in one and 320 in
the other
w_gate has 255 features and there is no w_up: expected an even number, those of gate
and as many of up
w_down is a NoneType: expected a tensor (w_up alone may be None, where w_gate holds
gate and up)""",
    )
