"""What the backward of a gated MLP casts and when; what its forward saves, and when it is freed."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from torch import Tensor

from blocktensor import BlockwiseFP8Weight, functional
from blocktensor.autograd import gated_forms, plan, products
from tests.support.gated import HIDDEN, K, N, results, weights
from tests.support.models import Trace, randn

fused = functional.gated_mlp


def inputs(*shape: int, grad: bool = True, **options: Any) -> Tensor:
    return randn(*shape, K, seed=5, grad=grad, **options)


def test_what_runs() -> None:
    """One cast of x and one of dy; all others are made where the values are computed."""
    operands, x = weights(), inputs(70)
    with Trace() as trace:
        fused(x, *operands).backward(randn(70, N))
    ours = [op for op in trace.ops if "blocktensor" in op and "gemm" not in op]
    assert_expected_inline(
        "\n".join(ours),
        """\
blocktensor.quantize_both 1x128
blocktensor.quantize_with_transpose 128x128
blocktensor.quantize_with_transpose 128x128
blocktensor.gated silu 1x128
blocktensor.quantize_with_transpose 128x128
blocktensor.quantize_both 1x128
blocktensor.gated_backward_with_h silu 1x128 1x128 1x128""",
    )


@pytest.mark.parametrize("activation", ["gelu", "gelu_tanh", "relu2"])
def test_h_is_saved_where_a_kernel_would_read_for_it_again(activation: Any) -> None:
    with Trace() as trace:
        fused(inputs(70), *weights(), activation=activation).backward(randn(70, N))
    assert trace.ops.count(f"blocktensor.gated {activation} 1x128 1x128") == 1
    assert trace.ops.count(f"blocktensor.gated_backward {activation} 1x128 1x128") == 1
    for dtype in (torch.float16, torch.float32):
        operands = weights(dtype=dtype)
        with Trace() as trace:
            fused(inputs(70, dtype=dtype), *operands).backward(randn(70, N, dtype=dtype))
        assert trace.ops.count("blocktensor.gated silu 1x128 1x128") == 1


@pytest.mark.parametrize("frozen", [(0,), (1,), (2,), (0, 1)], ids=str)
def test_h_and_gradients_of_which_some_are_not_needed(frozen: tuple[int, ...]) -> None:
    """Without both forms of a gradient, or without the weight gradient that reads h."""
    for x_grad in (True, False):
        x, operands = inputs(70, grad=x_grad), weights(frozen=frozen)
        with Trace() as trace:
            fused(x, *operands).backward(randn(70, N))
        beside = x_grad and frozen in ((0,), (1,))
        assert any("gated_backward_with_h" in op for op in trace.ops) == beside


def test_gradients_of_some_weights_alone() -> None:
    """Which `torch.autograd.grad` asks for: h was not saved, and is not computed for others."""
    operands, x = weights(), inputs(70)
    wanted = results(fused, x, operands)
    for place in range(3):
        y = fused(x, *operands)
        (made,) = torch.autograd.grad(y, operands[place], randn(*y.shape, seed=77, dtype=y.dtype))
        assert torch.equal(made, wanted[2 + place])  # type: ignore[arg-type]


@pytest.mark.parametrize("least", [2 * 70 * HIDDEN, 2 * 70 * HIDDEN + 1])
def test_large_gradients_are_made_one_after_the_other(
    least: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    y = fused(inputs(70), *weights(), activation="gelu")
    monkeypatch.setattr(plan, "LARGE_BYTES", least)
    with Trace() as trace:
        y.backward(randn(70, N))
    large = least == 2 * 70 * HIDDEN
    assert trace.ops.count("blocktensor.gated gelu 1x128 1x128") == large
    assert trace.ops.count("blocktensor.gated_backward gelu 1x128 1x128") == 1


def test_recompute_makes_one_gradient_after_the_other() -> None:
    operands, x = weights(), inputs(70)
    y = fused(x, *operands, recompute=True)
    with Trace() as trace:
        y.backward(randn(70, N))
    assert_expected_inline(
        "\n".join(op for op in trace.ops if "blocktensor" in op),
        """\
blocktensor.quantize_both 1x128
blocktensor.gemm 1x128 128x128
blocktensor.gated silu 1x128
blocktensor.gemm 1x128 1x128
blocktensor.gated_backward silu 1x128 1x128
blocktensor.gemm 1x128 128x128
blocktensor.gemm 1x128 1x128
blocktensor.gated silu 1x128 1x128
blocktensor.gemm 1x128 128x128
blocktensor.gemm 1x128 1x128""",
    )


@pytest.mark.parametrize("activation", ["silu", "gelu"])
@pytest.mark.parametrize("recompute", [False, True])
def test_what_is_saved(recompute: bool, activation: Any) -> None:
    saved: list[Tensor] = []
    x, operands = inputs(70), weights()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        fused(x, *operands, activation=activation, recompute=recompute)
    plain_ones = [t for t in saved if type(t) is Tensor]
    e4m3 = torch.float8_e4m3fn
    assert sorted(t.numel() for t in plain_ones if t.dtype == torch.bfloat16) == [
        70 * HIDDEN,
        70 * HIDDEN,
    ]
    rows = 80  # of a multiple of 16
    makes_h = recompute or activation == "silu"
    wanted = [K * rows] if makes_h else [K * rows, HIDDEN * rows]
    assert sorted(t.untyped_storage().nbytes() for t in plain_ones if t.dtype == e4m3) == wanted
    assert sum(isinstance(t, BlockwiseFP8Weight) for t in saved) == 3


@pytest.mark.parametrize("activation", ["silu", "gelu"])
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("retained", [False, True])
def test_backward_frees_what_it_has_read(
    retained: bool, recompute: bool, activation: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    y = fused(inputs(256), *weights(), activation=activation, recompute=recompute)
    assert y.grad_fn is not None
    _, _, _, h, _, gate, _, up, *_ = y.grad_fn.saved_tensors
    named = {"h": h, "gate": gate, "up": up}
    refs = {name: weakref.ref(t) for name, t in named.items() if t is not None}
    del h, gate, up, named
    alive: list[str] = []

    def noting(function: Callable[..., Any]) -> Callable[..., Any]:
        def noted(*args: Any, **options: Any) -> Any:
            alive.append(" ".join(name for name, ref in refs.items() if ref() is not None))
            return function(*args, **options)

        return noted

    for owner, name in (
        (gated_forms, "gated_backward"),
        (gated_forms, "gated_backward_with_h"),
        (products.Dense, "dgrad"),
    ):
        monkeypatch.setattr(owner, name, noting(getattr(owner, name)))
    y.backward(torch.ones_like(y), retain_graph=retained)
    if retained:
        saves_h = activation == "gelu" and not recompute
        assert set(alive) == {"h gate up" if saves_h else "gate up"}
    elif recompute:
        assert alive == ["gate up", "gate up", "gate", ""]
    elif activation == "silu":
        assert alive == ["gate up", "gate up", "", ""]
    else:
        assert alive == ["h gate up", "gate up", "", ""]
