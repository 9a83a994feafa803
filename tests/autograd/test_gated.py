"""Gated MLPs and experts as one function: the bits of linears with torch's ops between them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from torch import Tensor

from blocktensor import BlockwiseFP8Weight, Recipe, functional, quantize
from blocktensor.autograd import gated_mlp
from blocktensor.overrides import dynamo
from tests.support.asserts import Call, refused
from tests.support.compiling import afresh, graphs, instantiates
from tests.support.gated import (
    EAGER,
    HIDDEN,
    KINDS,
    K,
    Kind,
    N,
    assert_bits,
    before,
    every_kind,
    results,
    unfused,
    weights,
    whether_recomputed,
)
from tests.support.groups import GROUPS, ends
from tests.support.linear_ways import (
    HIGH,
    ROWS,
    function_of,
    gone_when,
    run_linears,
    storage_is_gone,
    way_of_linears,
)
from tests.support.models import FP32_SCALES, POWER_OF_TWO, X_IN_POWERS, Trace, plain, randn

__all__ = ["afresh", "way_of_linears"]

RECIPES = (FP32_SCALES, POWER_OF_TWO, X_IN_POWERS, ROWS, HIGH, Recipe(cache_weight=False))


@functools.cache
def unfused_results(kind: Kind, recipe: Recipe, device: torch.device) -> list[list[Tensor | None]]:
    """Results of one product at a time, op by op: of an x with one use, and with another one."""
    with pytest.MonkeyPatch.context() as patch:
        run_linears("op by op", patch)
        x, operands = kind.inputs(device=device), kind.weights(recipe, device=device)
        return [results(kind.unfused, x, operands, again) for again in (False, True)]


@whether_recomputed
@pytest.mark.parametrize("recipe", RECIPES, ids=range(len(RECIPES)))
@every_kind
@pytest.mark.usefixtures("way_of_linears")
def test_bits(kind: Kind, recipe: Recipe, recompute: bool, device: torch.device) -> None:
    x, operands = kind.inputs(device=device), kind.weights(recipe, device=device)
    run = functools.partial(kind.fused, recompute=recompute)
    for again, wanted in zip((False, True), unfused_results(kind, recipe, device), strict=True):
        assert_bits(results(run, x, operands, again), wanted)


@pytest.mark.parametrize("frozen", [(), (0,), (2,)])
def test_sequences(frozen: Any, way_of_linears: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A forward that casts all weights is one, a backward that computes all gradients another."""
    ran: list[str] = []
    for name in ("_cast_and_fprop", "_of_forms"):
        before(monkeypatch, gated_mlp, name, lambda *_, name=name: ran.append(name))
    results(functional.gated_mlp, randn(9, K, grad=True), weights(frozen=frozen))
    of_all = [] if way_of_linears == "op by op" else ["_cast_and_fprop", "_of_forms"]
    assert ran == of_all[: 2 - len(frozen)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@every_kind
def test_activations_and_dtypes(kind: Kind, dtype: torch.dtype, device: torch.device) -> None:
    for activation in EAGER:
        operands = kind.weights(dtype=dtype, device=device)
        kind.assert_same_bits(kind.inputs(dtype=dtype, device=device), operands, activation)


@pytest.mark.not_repeated
def test_the_form_of_x_is_gone_at_the_last_dgrad(monkeypatch: pytest.MonkeyPatch) -> None:
    held: list[Callable[[], bool]] = []
    gone = gone_when(monkeypatch, "gemm", held)
    y = functional.gated_mlp(randn(9, K, grad=True), *weights())
    held.append(storage_is_gone(function_of(y).saved_tensors[1]))
    y.sum().backward()
    assert gone == [False] * 5 + [True]


@pytest.mark.parametrize("shape", [(K,), (0, K), (1, K), (129, K), (3, 1, 5, K)], ids=str)
@pytest.mark.parametrize("name", ["MLP", "joint", "joint, ragged"])
def test_shapes(name: str, shape: tuple[int, ...], device: torch.device) -> None:
    x = randn(*shape, seed=5, device=device, grad=True)
    KINDS[name].assert_same_bits(x, KINDS[name].weights(device=device))


@whether_recomputed
@pytest.mark.parametrize("joint", [False, True])
@pytest.mark.parametrize("groups", GROUPS)
def test_groups(groups: str, joint: bool, recompute: bool, device: torch.device) -> None:
    """Rows of no group are NaN; they reach nothing, and get zeros."""
    kind = Kind(joint, groups=groups)
    x, operands = kind.inputs(device=device), kind.weights(device=device)
    kind.assert_same_bits(x, operands, recompute=recompute)
    y, dx, *_ = results(kind.fused, x, operands)
    used = sum(GROUPS[groups][1])
    assert y is not None and dx is not None
    assert not y[used:].any() and not dx[used:].any()


@pytest.mark.parametrize("trained", [(), (0,), (1,), (2,), (0, 1, 2)], ids=str)
@pytest.mark.parametrize("frozen", [(), (0, 1, 2)], ids=str)
@pytest.mark.parametrize("name", ["MLP", "joint"])
def test_biases(name: str, trained: tuple[int, ...], frozen: tuple[int, ...]) -> None:
    kind = KINDS[name]
    biases = kind.biases()
    for i in {*trained} & {*range(len(biases))}:
        biases[i].requires_grad_()
    for x_grad in (True, False):
        kind.assert_same_bits(kind.inputs(70, grad=x_grad), [*kind.weights(frozen=frozen), *biases])


def test_other_uses_of_the_input_sum_in_the_same_order() -> None:
    """The order of three bf16 terms shows in the bits of the sum."""
    operands, other = weights(), weights()[0]

    def with_another(run: Callable[..., Tensor], first: bool) -> Callable[..., Tensor]:
        def call(x: Tensor, *args: Any) -> Tensor:
            before = torch.nn.functional.linear(x, other) if first else 0
            y = run(x, *args)
            after = 0 if first else torch.nn.functional.linear(x, other)
            return torch.cat([y, before + after], 1)

        return call

    x = randn(130, K, seed=5, grad=True)
    for first in (True, False):
        wanted = results(with_another(unfused, first), x, operands, again=True)
        assert_bits(results(with_another(functional.gated_mlp, first), x, operands, True), wanted)


@every_kind
def test_cast_inputs_and_recipes_of_plain_weights(kind: Kind) -> None:
    x, operands = kind.inputs(), kind.weights()
    wanted = results(kind.unfused, x, operands)
    if not kind.groups:
        assert_bits(results(lambda x, *ws: kind.fused(quantize(x), *ws), x, operands), wanted)
    values = [plain(w).requires_grad_() for w in operands]
    for recipe in (ROWS, HIGH):
        others = results(kind.unfused, x, kind.weights(recipe))
        assert_bits(results(functools.partial(kind.fused, recipe=recipe), x, values), others)
        assert not torch.equal(others[2], wanted[2])  # type: ignore[arg-type]


@whether_recomputed
@pytest.mark.parametrize("name", ["experts", "joint experts"])
def test_plain_weights_among_fp8_ones(name: str, recompute: bool) -> None:
    kind = KINDS[name]
    x, operands = kind.inputs(), kind.weights()
    run = functools.partial(kind.fused, recompute=recompute, recipe=FP32_SCALES)
    wanted = results(kind.unfused, x, operands)
    for i, w in enumerate(operands):
        mixed = [*operands[:i], plain(w).requires_grad_(), *operands[i + 1 :]]
        assert_bits(results(run, x, mixed), wanted)


@pytest.mark.parametrize(
    ("name", "lie"), [("experts", i) for i in ("012", "0", "1")] + [("joint experts", "01")]
)
def test_stacks_that_lie_transposed(name: str, lie: str) -> None:
    """As ``w.transpose(1, 2)`` of a parameter, whose gradient is computed as it lies."""
    kind = KINDS[name]
    x, operands = kind.inputs(), kind.weights(transposed=lie)

    def of(run: Callable[..., Tensor]) -> list[Tensor | None]:
        ws = (w.mT if str(i) in lie else w for i, w in enumerate(operands))
        return results(lambda x, *_: run(x, *ws), x, operands)

    assert_bits(of(kind.fused), of(kind.unfused))


def test_rows_that_are_fp8_already() -> None:
    kind = Kind(groups="whole blocks")
    rows, operands = quantize(kind.inputs(grad=False), FP32_SCALES), kind.weights()
    with torch.no_grad():
        assert torch.equal(kind.fused(rows, *operands), kind.unfused(rows, *operands))
    with pytest.raises(ValueError, match="pass the high-precision tensor"):
        kind.fused(rows, *operands)


def test_high_precision_weight_gradients_run_linear_by_linear() -> None:
    operands = weights(recipe=HIGH)
    with Trace() as trace, torch.no_grad():  # where nothing reads high precision
        functional.gated_mlp(randn(70, K), *operands)
    assert trace.count("blocktensor.gated") == 1
    with Trace() as trace:
        functional.gated_mlp(randn(70, K), *operands)
    assert trace.count("blocktensor.gated") == 0


@instantiates
@whether_recomputed
@every_kind
def test_compiled(kind: Kind, recompute: bool) -> None:
    dynamo.announce()
    x, operands = kind.inputs(70), kind.weights()
    want = results(kind.unfused, x, operands)
    run = torch.compile(
        functools.partial(kind.fused, recompute=recompute), fullgraph=True, backend="aot_eager"
    )
    for _ in range(2):
        assert_bits(results(run, x, operands), want)
    assert graphs() == 1


def test_bad_input() -> None:
    (gate, up, down), x = weights(), randn(70, K)
    narrow = BlockwiseFP8Weight(randn(64, K))
    stacks, offs = KINDS["experts"].weights(), ends(1, 0, 127, 129, 13)
    rows = KINDS["experts"].inputs()
    mlp: Any = functional.gated_mlp
    experts = functional.gated_experts
    both, odd = randn(2 * HIDDEN, K), randn(255, K)
    calls: list[Call] = [
        lambda: mlp(x, gate, up, down, activation="tanh"),
        lambda: mlp(x, gate, narrow, down),
        lambda: mlp(x, gate, *weights(recipe=ROWS)[1:]),
        lambda: mlp(x, gate, *weights(recipe=POWER_OF_TWO)[1:]),
        lambda: mlp(x.float(), gate, up, down),
        lambda: mlp(x, odd, None, down),
        lambda: mlp(x, both, None, down, bias_up=randn(HIDDEN)),
        lambda: mlp(x, both[:512], None, down),
        lambda: mlp(x, both, None, None),
        lambda: experts(rows, *stacks, offs[:2]),
        lambda: experts(rows, *stacks, offs[[0, *range(5)]]),
        lambda: experts(x, randn(0, 255, K), None, randn(0, N, 128), ends()),
    ]
    assert_expected_inline(
        refused(*calls),
        """\
ValueError: activation 'tanh': expected one of silu, gelu, gelu_tanh, relu2
ValueError: gate has 320 features and up 64: expected the same number
ValueError: mixed recipes: weights of one gated MLP have wgrad_input='128x128' and '1x128': give
  them one recipe, or call functional.linear for each
ValueError: mixed recipes: weights of one gated MLP have scale='fp32' and 'power_of_two': give
  them one recipe, or call functional.linear for each
TypeError: the input is torch.float32 and the weight torch.bfloat16: convert one of them, or run
  under torch.autocast
ValueError: w_gate has 255 features and there is no w_up: expected an even number, half for gate
  and half for up
ValueError: bias_up without w_up: give bias_gate the biases of both, gate first
ValueError: cannot contract input [70, 256] with weight [136, 320]: K is 256 in one and 320 in
  the other
TypeError: w_down is a NoneType: expected a tensor (w_up alone may be None, where w_gate holds
  gate and up)
ValueError: offs ends 2 groups, and the weight [5, 320, 192] is a stack of 5 experts: expected
  one end for each
ValueError: offs ends 6 groups, and the weight [5, 320, 192] is a stack of 5 experts: expected
  one end for each
ValueError: w_gate has 255 features and there is no w_up: expected an even number, half for gate
  and half for up""",
    )
    assert rows.grad is None and stacks[0].grad is None


def test_bad_input_before_dynamo_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the functions that it takes whole: linears then run one by one."""
    monkeypatch.setattr(dynamo, "_announced", False)
    monkeypatch.setattr(dynamo, "announce_if_loaded", lambda: None)
    w, down = (BlockwiseFP8Weight(randn(*shape)) for shape in ((400, 192), (136, 200)))
    run = torch.compile(
        lambda x, b: functional.gated_mlp(x, w, None, down, bias_up=b), backend="aot_eager"
    )
    with pytest.raises(Exception, match="bias_up without w_up: give bias_gate the biases of both"):
        run(randn(4, 192), randn(200))
