"""Tokens that arrive as bytes and scales: linear layers and experts derive what wgrad reads."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from blocktensor import (
    BlockwiseFP8Tensor,
    BlockwiseFP8Weight,
    Recipe,
    Scales,
    functional,
    quantize,
    share_inputs,
)
from blocktensor.autograd import plan as plans
from blocktensor.ops import reference
from blocktensor.ops.formats import Quantized
from blocktensor.ops.op import OPS
from tests.docs.code_blocks import ROOT
from tests.support.asserts import refused
from tests.support.compiling import afresh, graphs, instantiates
from tests.support.grouped_linears import K, N, every_grouping, natural, sample, stack
from tests.support.linear_ways import ROWS, saved_by, way_of_linears
from tests.support.models import (
    POWER_OF_TWO,
    X_IN_POWERS,
    Trace,
    assert_matches,
    linear,
    plain,
    randn,
)
from tests.support.numeric import assert_same, relative_error
from tests.support.outliers import KINDS, drawn
from tests.support.steps import ours

__all__ = ["afresh", "way_of_linears"]

ROWS_IN_POWERS = Recipe(scale=Scales(activations="power_of_two"), wgrad_input="1x128")
RECIPES = (X_IN_POWERS, ROWS_IN_POWERS, POWER_OF_TWO)
every_recipe = pytest.mark.parametrize("recipe", RECIPES, ids=str)


def rowwise(x: Tensor, recipe: Recipe) -> Quantized:
    """The bytes and scales of ``x[T, K]``, as another rank or kernel sends them."""
    return reference.quantize_rowwise(x.detach(), recipe.activation_format)


def received(x: Tensor, recipe: Recipe = X_IN_POWERS) -> BlockwiseFP8Tensor:
    """Tokens that arrive as bytes and scales alone, and want a gradient."""
    data, scale, _ = rowwise(x, recipe)
    given = BlockwiseFP8Tensor.from_data(
        data, scale, block_shape=(1, 128), dtype=x.dtype, recipe=recipe
    )
    return given.requires_grad_()


def results(run: Callable[[Any], Tensor], x: Tensor, grad: Tensor, *leaves: Tensor) -> list[Any]:
    """The output and the gradients of x and of ``leaves``."""
    y = run(x)
    return [y.detach(), *torch.autograd.grad(y, [x, *leaves], grad)]


@every_recipe
@pytest.mark.parametrize("tokens", [1, 130, 384])
@pytest.mark.usefixtures("way_of_linears")
def test_a_linear_layer(recipe: Recipe, tokens: int, device: torch.device) -> None:
    """Forward and data gradient have the bits of tokens that were cast here."""
    module = linear(200, 136, recipe=recipe, device=device)
    x, grad = randn(tokens, 136, device=device), randn(tokens, 200, seed=1, device=device)
    y, dx, dw = results(module, received(x, recipe), grad, module.weight)
    want = results(module, quantize(x.requires_grad_(), recipe), grad, module.weight)
    assert_same(y, want[0])
    assert_same(dx, want[1])
    format = recipe.wgrad_input_format
    assert format is not None
    x_col = reference.columnwise_from_rowwise(rowwise(x, recipe), format)
    g_col = reference.quantize_columnwise(grad, recipe.gradient_format)
    assert_matches(dw, reference.gemm(g_col, x_col, None, torch.bfloat16))


@pytest.mark.parametrize("shape", [(136,), (2, 3, 136), (0, 136)], ids=str)
def test_leading_dimensions(shape: tuple[int, ...]) -> None:
    module, x = linear(200, 136, recipe=X_IN_POWERS), randn(*shape)
    grad = randn(*shape[:-1], 200, seed=1)
    flat = received(x.reshape(-1, 136))
    y, dx, dw = results(module, flat.view(shape), grad, module.weight)
    want = results(module, flat, grad.reshape(-1, 200), module.weight)
    assert (y.shape, dx.shape) == (grad.shape, shape)
    assert_same(y.reshape(-1, 200), want[0])
    assert_same(dx.reshape(-1, 136), want[1])
    assert_same(dw, want[2])


@every_recipe
@pytest.mark.parametrize("kn", [False, True])
@every_grouping
@pytest.mark.usefixtures("way_of_linears")
def test_experts(groups: str, kn: bool, recipe: Recipe) -> None:
    """Columnwise blocks begin anew in every group; rows of no group are NaN and reach nothing."""
    x, grad, offs = sample(groups)
    w = stack(len(offs), recipe=recipe, kn=kn)
    run = lambda t: functional.grouped_linear(t, natural(w), offs)  # noqa: E731
    y, dx, dw = results(run, received(x, recipe), grad, w)
    want = results(run, x.requires_grad_(), grad, w)
    assert_same(y, want[0])
    assert_same(dx, want[1])
    format = recipe.wgrad_input_format_kn if kn else recipe.wgrad_input_format
    assert format is not None
    x_col = reference.columnwise_from_rowwise(rowwise(x, recipe), format, offs)
    _, g_col = reference.quantize_grouped(grad, offs, None, recipe.gradient_format)
    assert g_col is not None
    operands = (x_col, g_col) if kn else (g_col, x_col)
    assert_same(dw, reference.grouped_gemm_wgrad(*operands, offs, len(x), torch.bfloat16))


@pytest.mark.parametrize("joint", [False, True])
@every_recipe
@pytest.mark.usefixtures("way_of_linears")
def test_gated_experts(recipe: Recipe, joint: bool) -> None:
    """The bits of three grouped linear layers of the same tokens."""
    x, _, offs = sample("rows of no group")
    gate, up = (stack(len(offs), recipe=recipe) for _ in range(2))
    if joint:
        both = torch.cat([plain(gate), plain(up)], 1)
        gate, up = nn.Parameter(BlockwiseFP8Weight(both, recipe)), None
    down = nn.Parameter(BlockwiseFP8Weight(randn(len(offs), K, N, seed=4) / N**0.5, recipe))
    weights = [w for w in (gate, up, down) if w is not None]
    grad = randn(len(x), K, seed=5)

    def apart(t: Tensor) -> Tensor:
        of_gate = functional.grouped_linear(t, gate, offs)
        if up is None:
            of_gate, of_up = of_gate.chunk(2, -1)
        else:
            of_up = functional.grouped_linear(t, up, offs)
        return functional.grouped_linear(nn.functional.silu(of_gate) * of_up, down, offs)

    fused = lambda t: functional.gated_experts(t, gate, up, down, offs)  # noqa: E731
    made = results(fused, received(x, recipe), grad, *weights)
    for got, want in zip(made, results(apart, received(x, recipe), grad, *weights), strict=True):
        assert_same(got, want)
    assert all(each.isfinite().all() for each in made)


def decisions() -> int:
    """The plans and decisions of ops that are known."""
    return len(plans._PLANS) + sum(map(len, OPS.values()))


@pytest.mark.parametrize("has_room", [False, True])
def test_experts_decide_once_for_numbers_of_tokens_in_a_step(has_room: bool) -> None:
    w = stack(3, recipe=X_IN_POWERS)
    known = []
    for tokens in (1030, 2047, 1500, 1111):
        x, grad = received(randn(2048 if has_room else tokens, K)), randn(tokens, N, seed=1)
        x = x.detach()[:tokens].requires_grad_()
        offs = torch.tensor([tokens - 20, tokens - 20, tokens - 1], dtype=torch.int32)
        results(lambda t: functional.grouped_linear(t, w, offs), x, grad, w)  # noqa: B023
        known.append(decisions())
    # The first call records sequences of ops; ops that a sequence calls decide without a table.
    assert known[1:] == [known[1]] * 3


def test_linear_layers_plan_once_for_numbers_of_tokens_in_a_step() -> None:
    w = linear(N, K, recipe=X_IN_POWERS).weight
    made = [plans.plan_matmul(received(randn(t, K)), w, None, None) for t in (70, 100, 128, 129)]
    assert made[0] is made[1] is made[2] is not made[3]


def saved_of_x(run: Callable[[], Any]) -> int:
    """The bytes of e4m3 and of fp32 scales that ``run()`` saves, without weights'."""
    kept = {x.untyped_storage()._cdata: x for x in saved_by(run) if type(x) is Tensor}
    return sum(x.untyped_storage().nbytes() for x in kept.values() if x.is_floating_point())


@pytest.mark.parametrize("recipe", [*RECIPES, Recipe(), ROWS], ids=str)
def test_one_form_of_x_is_saved(recipe: Recipe) -> None:
    """At most 1.05 bytes an element of x, for several weights too."""
    x = randn(2048, K).requires_grad_()
    offs = torch.tensor([2048, 2048, 2048], dtype=torch.int32)
    w, v = (linear(N, K, recipe=recipe).weight for _ in range(2))
    stacks = [stack(3, recipe=recipe) for _ in range(2)]
    shared = Siblings(recipe)
    share_inputs(shared)
    runs: dict[str, Callable[[], Any]] = {
        "a linear layer": lambda: functional.linear(x, w),
        "linear layers of a shared cast": lambda: [
            functional.linear(cast, each) for cast in [quantize(x, recipe)] for each in (w, v)
        ],
        "shared inputs": lambda: shared(x),
    }
    if recipe in RECIPES:
        arrived = received(x, recipe)
        runs |= {
            "tokens that arrive": lambda: [functional.linear(arrived, each) for each in (w, v)],
            "tokens that arrive, shared": lambda: shared(arrived),
            "experts": lambda: [functional.grouped_linear(arrived, s, offs) for s in stacks],
        }
    for name, run in runs.items():
        assert x.numel() <= saved_of_x(run) <= 1.05 * x.numel(), name


@pytest.mark.parametrize("grouped", [False, True])
def test_bytes_that_change_before_the_backward(grouped: bool) -> None:
    """A receive buffer that is used again, for example."""
    x, _, offs = sample("ragged")
    arrived = received(x)
    if grouped:
        w = stack(len(offs), recipe=X_IN_POWERS)
        y = functional.gated_experts(arrived, w, w, w.detach().mT, offs)
    else:
        y = functional.linear(arrived, linear(N, K, recipe=X_IN_POWERS).weight)
    assert arrived.rowwise_data is not None
    arrived.rowwise_data.view(torch.uint8).zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_gated_mlps() -> None:
    up, gate = (linear(256, 128, recipe=X_IN_POWERS).weight for _ in range(2))
    down, grad = linear(128, 256, recipe=X_IN_POWERS).weight, randn(130, 128, seed=1)
    x = randn(130, 128)
    run = lambda t: functional.gated_mlp(t, gate, up, down)  # noqa: E731
    made = results(run, received(x), grad, gate, up, down)
    want = results(run, x.requires_grad_(), grad, gate, up, down)
    for got, wanted in zip(made[:2], want[:2], strict=True):
        assert_same(got, wanted)
    for got, wanted in zip(made[2:], want[2:], strict=True):
        assert (got - wanted).norm() <= 0.02 * wanted.norm()


class Siblings(nn.Module):
    """Linear layers that read one input."""

    def __init__(self, recipe: Recipe = X_IN_POWERS) -> None:
        super().__init__()
        self.q, self.k = linear(N, K, recipe=recipe), linear(64, K, recipe=recipe)
        self.v = linear(64, K, recipe=recipe)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.q(x), self.k(x), self.v(x)], -1)


def test_one_derivation_for_linear_layers_that_share_an_input() -> None:
    model = Siblings()
    x = received(randn(130, K))
    parameters = [*model.parameters()]
    grad = torch.ones_like(model(x))
    want = results(model, x, grad, *parameters)
    report = share_inputs(model)
    with Trace() as trace:  # a mode shares nothing
        results(model, x, grad, *parameters)
    assert [op for op in ours(trace) if "columnwise_from" in op] == [
        "columnwise_from_rowwise 1x128_pow2 128x128_pow2"
    ] * 3
    for count in (1, 2):
        for got, wanted in zip(results(model, x, grad, *parameters), want, strict=True):
            assert_same(got, wanted)
        assert (report.casts, report.saved) == (count, 2 * count)
    with torch.no_grad():
        model(x)
    assert report.casts == 2


@instantiates
@pytest.mark.parametrize("grouped", [False, True])
def test_compiled(grouped: bool) -> None:
    x, grad, offs = sample("ragged")
    if grouped:
        w = stack(len(offs), recipe=X_IN_POWERS)
    else:
        w = linear(N, K, recipe=X_IN_POWERS).weight
        x, grad = randn(130, K), randn(130, N, seed=1)

    def run(t: Tensor) -> Tensor:
        if grouped:
            return functional.grouped_linear(t, w, offs)
        return nn.functional.linear(t, w)

    compiled: Any = torch.compile(run, fullgraph=True, backend="aot_eager")
    made = results(compiled, received(x), grad, w)
    for got, want in zip(made, results(run, received(x), grad, w), strict=True):
        assert_same(got, want)
    assert graphs() == 1


@instantiates
def test_compiled_for_any_number_of_tokens() -> None:
    w = linear(N, K, recipe=X_IN_POWERS).weight
    run = lambda t: nn.functional.linear(t, w)  # noqa: E731
    compiled: Any = torch.compile(run, fullgraph=True, backend="aot_eager")
    for number, tokens in enumerate((130, 200, 300, 270)):
        x, grad = randn(tokens, K), randn(tokens, N, seed=1)
        made = results(compiled, received(x), grad, w)
        for got, want in zip(made, results(run, received(x), grad, w), strict=True):
            assert_same(got, want)
        assert graphs() == min(number + 1, 2)


def test_rows_of_a_tensor_are_tokens() -> None:
    module, x, grad = linear(N, K, recipe=X_IN_POWERS), randn(130, K), randn(64, N, seed=1)
    whole = received(x)
    y = module(whole[2:66])
    dx, dw = torch.autograd.grad(y, [whole, module.weight], grad)
    want = results(module, received(x[2:66]), grad, module.weight)
    for got, wanted in zip((y.detach(), dx[2:66], dw), want, strict=True):
        assert_same(got, wanted)
    assert not dx[:2].any()
    assert not dx[66:].any()


def test_with_checkpointing_and_autocast() -> None:
    module, x, grad = linear(N, K, recipe=X_IN_POWERS), randn(130, K), randn(130, N, seed=1)
    want = results(module, received(x), grad, module.weight)
    again = lambda t: checkpoint(module, t, use_reentrant=False)  # noqa: E731
    for got, wanted in zip(results(again, received(x), grad, module.weight), want, strict=True):
        assert_same(got, wanted)
    wide = linear(N, K, recipe=X_IN_POWERS, dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        y = wide(received(x.float()))
    dw = torch.autograd.grad(y, [wide.weight], grad)[0]
    assert (y.dtype, dw.dtype) == (torch.bfloat16, torch.float32)


def test_torchs_grouped_mm() -> None:
    x, grad, offs = sample("ragged")
    w = stack(len(offs), recipe=X_IN_POWERS)
    run = lambda t: nn.functional.grouped_mm(t, w.transpose(-2, -1), offs=offs)  # noqa: E731
    want = results(lambda t: functional.grouped_linear(t, w, offs), received(x), grad, w)
    for got, wanted in zip(results(run, received(x), grad, w), want, strict=True):
        assert_same(got, wanted)


def test_a_gradient_that_arrives_as_bytes() -> None:
    """The gradient of experts' outputs, from a wire in FP8."""
    x, grad, offs = sample("ragged")
    w = stack(len(offs), recipe=POWER_OF_TWO)
    run = lambda t: functional.grouped_linear(t, w, offs)  # noqa: E731
    given = received(grad, POWER_OF_TWO).requires_grad_(False)
    _, dx, dw = results(run, x.requires_grad_(), given, w)
    assert_same(dx, results(run, x, grad, w)[1])
    g_col = reference.columnwise_from_rowwise(
        rowwise(grad, POWER_OF_TWO), POWER_OF_TWO.gradient_format, offs
    )
    _, x_col = reference.quantize_grouped(x.detach(), offs, None, POWER_OF_TWO.wgrad_input_format)
    assert x_col is not None
    assert_same(dw, reference.grouped_gemm_wgrad(g_col, x_col, offs, len(x), torch.bfloat16))


def test_the_columnwise_form_of_a_tensor() -> None:
    x = randn(130, 136)
    given = received(x).detach()
    want = reference.columnwise_from_rowwise(rowwise(x, X_IN_POWERS), given.rowwise_format)
    assert_same(given.columnwise().data, want.data)
    assert_same(given.columnwise().scale, want.scale)
    with pytest.raises(ValueError, match="without its columnwise form, which needs other scales"):
        received(x, ROWS).columnwise()


def test_what_would_round_twice_is_refused() -> None:
    x, grad, offs = sample("ragged")
    w, own = stack(len(offs)), linear(N, K)
    powers, high = stack(len(offs), recipe=X_IN_POWERS), Recipe(wgrad_input="high_precision")
    y = functional.grouped_linear(received(x), powers, offs)
    assert_expected_inline(
        refused(
            lambda: own(received(x, Recipe())),
            lambda: functional.grouped_linear(received(x, Recipe()), w, offs),
            lambda: functional.gated_experts(received(x, Recipe()), w, w, w, offs),
            lambda: functional.grouped_linear(received(x), w, offs),
            lambda: linear(N, K, recipe=high)(received(x, high)),
            lambda: y.backward(received(grad), retain_graph=True),
        ),
        """\
ValueError: the input [270, 192], which is FP8 already, has no columnwise blocks, which the
  gradient of the weight needs; to cast them from its rowwise blocks would round twice, since
  their scales are no powers of two: cast it by blocktensor.quantize(x, recipe=weight.recipe),
  or give tokens and weights Recipe(scale=Scales(activations='power_of_two'))
ValueError: the input [270, 192] of a grouped FP8 linear layer is FP8 already, and its
  columnwise blocks, which the gradient of the weight needs, ignore the groups; to cast them
  from its rowwise blocks would round twice, since their scales are no powers of two: pass the
  high-precision tensor (share_inputs(model) casts it once for several weights), or give tokens
  and weights Recipe(scale=Scales(activations='power_of_two'))
ValueError: the input [270, 192] of a grouped FP8 linear layer is FP8 already, and its
  columnwise blocks, which the gradient of the weight needs, ignore the groups; to cast them
  from its rowwise blocks would round twice, since their scales are no powers of two: pass the
  high-precision tensor (share_inputs(model) casts it once for several weights), or give tokens
  and weights Recipe(scale=Scales(activations='power_of_two'))
ValueError: mixed recipes: activations are cast with scale='fp32' here, and one was cast with
  scale='power_of_two'; cast both operands with one recipe, e.g. blocktensor.quantize(x,
  recipe=weight.recipe), or give both Recipe(scale=Scales(activations='power_of_two'))
ValueError: the input [270, 192], which is FP8 already, lacks the tensor from which it was cast,
  which the gradient of the weight reads (wgrad_input='high_precision'): slices and
  concatenations lose it, and tokens that arrive as bytes have none; cut or join the high-
  precision tensors, then call blocktensor.quantize(x, recipe=weight.recipe), or convert with
  wgrad_input='128x128'
NotImplementedError: a gradient of a grouped FP8 linear layer that is FP8 already: its
  columnwise blocks, which the gradient of the weight needs, ignore the groups; pass it in high
  precision (.dequantize())""",
    )
    with torch.no_grad():  # where nothing reads columnwise blocks
        assert functional.grouped_linear(received(x, Recipe()), w, offs).shape == grad.shape
    frozen = stack(len(offs)).requires_grad_(False)
    given = received(x, Recipe())
    (dx,) = torch.autograd.grad(functional.grouped_linear(given, frozen, offs), [given], grad)
    assert dx.shape == x.shape


def rows_on_the_page() -> dict[str, list[float]]:
    page = (ROOT / "docs/guides/moe.md").read_text("utf-8")
    _, _, after = page.partition("| arrived in fp32 scales, cast again |\n")
    lines = [line.strip("|").split("|") for line in after.split("\n\n")[0].splitlines()[1:]]
    return {name.strip(): [*map(float, rest)] for name, *rest in lines}


@pytest.mark.parametrize("kind", KINDS)
def test_the_table_on_the_page(kind: str, device: torch.device) -> None:
    """A weight gradient of tokens that arrive in FP8 loses no more than by a cast here."""
    x, grad, w = (part.bfloat16().to(device) for part in drawn(kind))
    exact = grad.double().t() @ x.double()

    def sqnr(given: Tensor, recipe: Recipe) -> float:
        leaf = w.detach().requires_grad_()
        y = functional.linear(given, leaf, recipe=recipe)
        (dw,) = torch.autograd.grad(y, [leaf], grad)
        return -20 * math.log10(relative_error(dw, exact))

    arrived = sqnr(received(x), X_IN_POWERS)
    assert arrived == pytest.approx(sqnr(x, X_IN_POWERS), abs=0.02)
    made = [sqnr(x, Recipe()), arrived, sqnr(quantize(x).dequantize(), Recipe())]
    assert rows_on_the_page()[kind] == pytest.approx(made, abs=0.1)
