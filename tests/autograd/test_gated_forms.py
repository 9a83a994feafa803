"""What the backward of a gated MLP casts and when; what its forward saves, and when it is freed."""

from __future__ import annotations

import functools
import gc
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor

from blocktensor import BlockwiseFP8Weight, functional
from blocktensor.autograd import gated_forms, matmuls
from tests.support.gated import HIDDEN, KINDS, K, Kind, N, before, weights, whether_recomputed
from tests.support.linear_ways import function_of, saved_by
from tests.support.models import Trace, randn
from tests.support.steps import assert_trace

fused = functional.gated_mlp
JOINT, EXPERTS = KINDS["joint"], KINDS["experts"]
BF16, E4M3 = torch.bfloat16, torch.float8_e4m3fn


def inputs(rows: int, grad: bool = True, **options: Any) -> Tensor:
    return randn(rows, K, seed=5, grad=grad, **options)


PRODUCT = "gemm 1x128 128x128"  # dgrad and wgrad alike
OF_WEIGHT, OF_GRAD = "quantize_with_transpose 128x128", "quantize_both 1x128"
OF_X = f"{OF_GRAD} 128x128"
TO_H = [OF_X, OF_WEIGHT, PRODUCT, OF_WEIGHT, PRODUCT, "gated silu 1x128"]
TO_DH = [OF_GRAD, PRODUCT, "gated silu 128x128", PRODUCT]
OF_BOTH = "gated_backward silu 1x128 1x128"
# name: the kind, whether it is recomputed, the ops of forward and of backward
RUNS: dict[str, tuple[Kind, bool, list[str], list[str]]] = {
    "MLP": (KINDS["MLP"], False, [*TO_H, OF_WEIGHT, PRODUCT], [*TO_DH, OF_BOTH, *[PRODUCT] * 4]),
    "MLP, recompute": (
        KINDS["MLP"],
        True,
        [*TO_H, OF_WEIGHT, PRODUCT],
        [*TO_DH, OF_BOTH, PRODUCT, PRODUCT, "gated silu 1x128 1x128", PRODUCT, PRODUCT],
    ),
    "joint": (
        JOINT,
        False,
        [OF_X, OF_WEIGHT, PRODUCT, "gated silu 1x128 128x128", OF_WEIGHT, PRODUCT],
        [OF_GRAD, PRODUCT, PRODUCT, f"joint_{OF_BOTH}", PRODUCT, PRODUCT],
    ),
}


@pytest.mark.parametrize("name", RUNS)
def test_what_runs(name: str) -> None:
    """One cast of x and one of dy; all others are made where the values are computed."""
    kind, recompute, forward, backward = RUNS[name]
    run = functools.partial(kind.fused, recompute=recompute)
    assert_trace(run, inputs(70), *kind.weights(), forward=forward, backward=backward)


@pytest.mark.parametrize("activation", ["gelu", "gelu_tanh"])
def test_h_of_gelu_is_saved(activation: Any) -> None:
    with Trace() as trace:
        fused(inputs(70), *weights(), activation=activation).backward(randn(70, N))
    assert trace.ops.count(f"blocktensor.gated {activation} 1x128 128x128") == 1
    assert trace.ops.count(f"blocktensor.gated_backward {activation} 1x128 1x128") == 1


@pytest.mark.parametrize("frozen", [(0,), (1,), (2,), (0, 1)], ids=str)
def test_h_and_gradients_of_which_some_are_not_needed(frozen: tuple[int, ...]) -> None:
    """H is made again for the weight gradient of down alone."""
    for x_grad in (True, False):
        x, operands = inputs(70, grad=x_grad), weights(frozen=frozen)
        with Trace() as trace:
            fused(x, *operands).backward(randn(70, N))
        is_read = 2 not in frozen and (x_grad or frozen != (0, 1))
        assert trace.ops.count("blocktensor.gated silu 128x128") == is_read


@pytest.mark.parametrize("is_large", [False, True])
@pytest.mark.parametrize(
    ("kind", "activation"), [(KINDS["MLP"], "gelu_tanh"), (EXPERTS, "silu")], ids=["MLP", "experts"]
)
def test_large_gradients_are_made_one_after_the_other(
    kind: Kind, activation: Any, is_large: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = kind.inputs(70)
    y = kind.fused(x, *kind.weights(), activation=activation)
    monkeypatch.setattr(gated_forms, "LARGE_BYTES", 2 * len(x) * HIDDEN + (not is_large))
    with Trace() as trace:
        y.backward(randn(*y.shape))
    assert trace.ops.count(f"blocktensor.gated {activation} 1x128 1x128") == is_large
    assert trace.ops.count(f"blocktensor.gated_backward {activation} 1x128 1x128") == 1


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh", "relu2"])
@whether_recomputed
def test_what_is_saved(recompute: bool, activation: Any) -> None:
    x, operands = inputs(70), weights()
    saved = saved_by(lambda: fused(x, *operands, activation=activation, recompute=recompute))
    plain_ones = [t for t in saved if type(t) is Tensor]
    assert [t.numel() for t in plain_ones if t.dtype == BF16] == [70 * HIDDEN] * 2
    rows = 128  # of a multiple of 64
    makes_h = recompute or activation != "gelu_tanh"
    wanted = [K * rows] if makes_h else [K * rows, HIDDEN * rows]
    assert sorted(t.untyped_storage().nbytes() for t in plain_ones if t.dtype == E4M3) == wanted
    assert sum(isinstance(t, BlockwiseFP8Weight) for t in saved) == 3


@pytest.mark.not_repeated
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
@whether_recomputed
@pytest.mark.parametrize("retained", [False, True])
def test_backward_frees_what_it_has_read(
    retained: bool, recompute: bool, activation: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    y = fused(inputs(256), *weights(), activation=activation, recompute=recompute)
    _, _, _, h, _, gate, up, *_ = function_of(y).saved_tensors
    named = {"h": h, "gate": gate, "up": up}
    refs = {name: weakref.ref(t) for name, t in named.items() if t is not None}
    del h, gate, up, named
    alive: list[str] = []

    def note(*_: Any) -> None:
        alive.append(" ".join(name for name, ref in refs.items() if ref() is not None))

    before(monkeypatch, gated_forms, "gated_backward", note)
    before(monkeypatch, matmuls.Dense, "dgrad", note)
    y.backward(torch.ones_like(y), retain_graph=retained)
    if retained:
        saves_h = activation == "gelu_tanh" and not recompute
        assert set(alive) == {"h gate up" if saves_h else "gate up"}
    elif recompute:
        assert alive == ["gate up", "gate up", "gate", ""]
    elif activation == "silu":
        assert alive == ["gate up", "gate up", "", ""]
    else:
        assert alive == ["h gate up", "gate up", "", ""]


@pytest.mark.not_repeated
def test_backward_of_both_frees_what_it_has_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gate, up and dh are gone when the products of both begin."""
    rows, seen = 77, []

    def note(*_: Any) -> None:
        held = (t.shape for t in gc.get_objects() if type(t) is Tensor and t.dtype == BF16)
        seen.append(sorted(shape for shape in held if shape in [(rows, 256), (rows, 512)]))

    before(monkeypatch, matmuls.Dense, "wgrad", note)
    for recompute in (False, True):
        JOINT.fused(inputs(rows), *JOINT.weights(), recompute=recompute).backward(randn(rows, N))
    of_down, of_both = [(rows, 256), (rows, 512)], []
    assert seen == [of_down, of_both] * 2


@whether_recomputed
def test_what_experts_save_and_cast(recompute: bool) -> None:
    x, operands, outputs = EXPERTS.inputs(), EXPERTS.weights(), []
    with Trace() as trace:
        saved = saved_by(lambda: outputs.append(EXPERTS.fused(x, *operands, recompute=recompute)))
    high = [t.shape for t in saved if t.dtype == BF16 and t.ndim == 2]
    assert high == [(270, HIDDEN)] * 2  # gate and up
    assert sum(t.dtype == E4M3 for t in saved) == (1 if recompute else 2)
    assert trace.count("quantize_grouped") == trace.count("gated ") == 1
    with Trace() as trace:
        outputs[0].sum().backward()
    assert trace.count("quantize_grouped") == 1  # of the output's gradient
    assert trace.count("gated ") == (2 if recompute else 0)
