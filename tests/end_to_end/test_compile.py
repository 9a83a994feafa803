"""torch.compile: one graph, no breaks, eager's bits, and few compilations."""

from __future__ import annotations

import copy
import shutil
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from blocktensor import (
    BlockwiseFP8Tensor,
    BlockwiseFP8Weight,
    Recipe,
    Scales,
    convert,
    freeze,
    functional,
    quantize,
)
from tests.support.compiling import (
    afresh,
    assert_as_eager,
    compiled_graphs,
    graphs,
    instantiates,
    ops_in,
    reads_grad,
)
from tests.support.models import linear, randn
from tests.support.steps import assert_bits, step

pytestmark = instantiates
__all__ = ["afresh"]

K = 192
ROWS = Recipe(wgrad_input="1x128")
HIGH = Recipe(wgrad_input="high_precision")
POWER_OF_TWO = Recipe(scale="power_of_two")
POWER_OF_TWO_ROWS = Recipe(scale="power_of_two", wgrad_input="1x128")
X_IN_POWERS = Recipe(scale=Scales(activations="power_of_two"))
WGRAD_INPUTS = [Recipe(), ROWS, HIGH, X_IN_POWERS]


def mlp(recipe: Recipe | None = None, dtype: torch.dtype = torch.bfloat16) -> nn.Sequential:
    torch.manual_seed(0)
    made = nn.Sequential(nn.Linear(K, 320, bias=False), nn.GELU(), nn.Linear(320, K)).to(dtype)
    convert(made, recipe or Recipe(), skip_small=False)
    return made


# Ways to use weights: a function, and what it trains

Way = tuple[Callable[[Tensor], Tensor], list[Any]]


def whole(recipe: Recipe, dtype: torch.dtype = torch.bfloat16) -> Way:
    model = mlp(recipe, dtype)
    return model, [model]


def checkpointed(recipe: Recipe) -> Way:
    model = mlp(recipe)
    return lambda x: checkpoint(model, x, use_reentrant=False), [model]


def mixed(model: nn.Module, cast: Callable[[Tensor], Tensor] = lambda x: x) -> Way:
    def run(x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            made: Tensor = model(cast(x))
        return made

    return run, [model]


def plain_weight() -> Way:
    w = randn(128, K, grad=True)
    return lambda x: functional.linear(x, w), [w]


def given_to_functional() -> Way:
    """FP8 weights that Dynamo meets in our own function."""
    a, b = linear(128, K, bias=True), linear(128, K)
    w = b.weight
    return lambda x: functional.linear(x, a.weight, a.bias) + functional.linear(x, w), [a, b]


def shared_cast(recipe: Recipe) -> Way:
    q, k = linear(128, K, bias=True, recipe=recipe), linear(128, K, recipe=recipe)

    def both(x: Tensor) -> Tensor:
        x = quantize(x, recipe)
        made: Tensor = q(x) + k(x)
        return made

    return both, [q, k]


def product(recipe: Recipe, transposed: bool = False) -> Way:
    module = linear(*((128, K) if transposed else (K, 128)), recipe=recipe)
    return lambda x: x @ (module.weight.t() if transposed else module.weight), [module]


COMPUTED: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "w * 2": lambda w, b: w * 2,
    "w + b": lambda w, b: w + b,
    "normalize(w)": lambda w, b: nn.functional.normalize(w),
    "w[:128]": lambda w, b: w[:128],
    "cat([w, w])": lambda w, b: torch.cat([w, w]),
    "w.detach() + b": lambda w, b: w.detach() + b,
}


def computed(name: str) -> Way:
    """A weight that is computed of weights."""
    w, b = linear(256, K).weight, randn(256, K, seed=5, grad=True)
    return lambda x: nn.functional.linear(x, COMPUTED[name](w, b)), [w, b]


WAYS: dict[str, Callable[[], Way]] = {
    **{f"model, {r}": partial(whole, r) for r in (POWER_OF_TWO, POWER_OF_TWO_ROWS)},
    **{f"shared cast, {r.wgrad_input}": partial(shared_cast, r) for r in WGRAD_INPUTS},
    "checkpoint": partial(checkpointed, Recipe()),
    "x @ w": partial(product, Recipe()),
    "x @ w.t()": partial(product, Recipe(), transposed=True),
    "fp32": partial(whole, Recipe(), torch.float32),
    "autocast": lambda: mixed(mlp(dtype=torch.float32)),
    **{
        f"autocast of an FP8 input, frozen={frozen}": lambda frozen=frozen: mixed(
            linear(128, K, dtype=torch.float32, frozen=frozen), quantize
        )
        for frozen in (False, True)
    },
    "a plain weight": plain_weight,
    "functional": given_to_functional,
    **{name: partial(computed, name) for name in COMPUTED},
}


@pytest.mark.parametrize("way", WAYS)
def test_eager_s_bits_in_one_graph(way: str) -> None:
    run, trained = WAYS[way]()
    dtype = torch.float32 if way == "fp32" or "autocast" in way else torch.bfloat16
    assert_as_eager(run, *(randn(12, K, seed=seed, dtype=dtype) for seed in range(2)), of=trained)
    assert graphs() == 1
    if way == "functional":
        assert [m.weight.cache.casts for m in trained] == [2, 2]  # of the two eager runs


@pytest.mark.parametrize("made", [False, True], ids=["", "columnwise made before"])
def test_a_frozen_model(made: bool) -> None:
    model = mlp()
    freeze(model)
    if made:
        model(randn(3, K, grad=True)).sum().backward()
    assert_as_eager(model, randn(12, K), randn(12, K, seed=1))
    assert graphs() == 1


@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler on CPUs")
def test_inductor() -> None:
    assert_as_eager(mlp(), randn(12, K), randn(12, K, seed=1), backend="inductor")
    assert graphs() == 1


@pytest.mark.parametrize("recipe", WGRAD_INPUTS, ids=str)
def test_training_compiles_once_and_batch_sizes_once_more(recipe: Recipe) -> None:
    model = mlp(recipe)
    eager = copy.deepcopy(model)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (model, eager)]
    for number, batch in enumerate((160, 160, 160, 160, 200, 300, 131, 129, 520, 512, 272)):
        x = randn(batch, K, seed=number)
        assert_bits(step(compiled, x), step(eager, x))
        for optimizer in optimizers:
            optimizer.step()
        assert graphs() == (1 if number < 4 else 2)
    for a, b in zip(model.parameters(), eager.parameters(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("policy", ["backward", False])
def test_each_direction_of_a_linear_layer_is_one_op(policy: Any) -> None:
    """Inputs are cast by ops of their own, which serve all linear layers that read them."""
    wanted = [{"quantize_both": 2, "linear_fprop": 2}, {"linear_backward": 2}]
    made = compiled_graphs(mlp(Recipe(cache_weight=policy)), randn(12, K))
    for graph, counts in zip(made, wanted, strict=True):
        ops = [op for op in ops_in(graph) if op.startswith("blocktensor.")]
        names = [op.removeprefix("blocktensor.") for op in ops]
        assert {op: names.count(op) for op in names} == counts


PARTS: dict[str, Callable[[Tensor], Tensor]] = {
    "matrix": lambda w: w[1],
    "rows": lambda w: w[1][64:],
    "transpose": lambda w: w[1].t().t(),
    "stack": lambda w: w.mT[1:][0].mT,
}


@reads_grad
@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("part", PARTS)
def test_a_graph_whose_input_is_a_part_of_a_weight_that_is_written(part: str, frozen: bool) -> None:
    """A write to the whole before the backward of the graph counts for the part."""
    values, other = randn(3, 192, K), randn(3, 192, K)
    w: Tensor = nn.Parameter(BlockwiseFP8Weight(values))
    if frozen:
        w, other = (BlockwiseFP8Tensor.from_values(t, (128, 128)) for t in (values, other))
        if part == "rows":
            pytest.skip("frozen blocks cannot be cut")
    x = randn(6, K, grad=True)
    y = torch.compile(F.linear, backend="aot_eager")(x, PARTS[part](w))
    torch.autograd.grad(y, x, torch.ones_like(y), retain_graph=True)
    with torch.no_grad():
        w.copy_(other)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(y, x, torch.ones_like(y))


def test_export_of_a_frozen_model() -> None:
    model = mlp()
    freeze(model)
    x = randn(6, K)
    program = torch.export.export(model, (x,))
    assert torch.equal(program.module()(x), model(x))
    targets = {str(node.target) for node in program.graph.nodes}
    assert not any("dequantize" in target for target in targets)


def test_export_of_a_trained_model() -> None:
    """A program that loses gradients is not made; without gradients it follows the weights."""
    model, x = mlp(), randn(6, K)
    with pytest.raises(NotImplementedError, match=r"is trained: .* Call blocktensor\.freeze"):
        torch.export.export(model, (x,))
    # strict: dynamo's own error, around the same words
    with pytest.raises(Exception, match=r"is trained: .* Call blocktensor\.freeze"):
        torch.export.export(model, (x,), strict=True)
    with torch.no_grad():
        program = torch.export.export(model, (x,)).module()
        assert torch.equal(program(x), model(x))
        program.get_parameter("0.weight").mul_(-2)
        assert torch.equal(program(x), model(x))


@pytest.mark.parametrize("strict", [False, True])
def test_export_of_a_cast_with_a_gradient(strict: bool) -> None:
    """A strict program would run it without gradients: those of layers before would be lost."""

    class Cast(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.before, self.fp8 = nn.Linear(K, K), nn.Linear(K, 320)

        def forward(self, x: Tensor) -> Tensor:
            return F.linear(quantize(self.before(x)), self.fp8.weight)

    model, x = Cast().bfloat16(), randn(6, K)
    convert(model, skip_small=False, skip=["before"])
    freeze(model)
    with pytest.raises(Exception, match=r"quantize\(x\) of an x with a gradient: .*no_grad"):
        torch.export.export(model, (x,), strict=strict)
    with torch.no_grad():
        program = torch.export.export(model, (x,), strict=strict).module()
        assert torch.equal(program(x), model(x))


@reads_grad
@pytest.mark.parametrize("recipe", [Recipe(), POWER_OF_TWO_ROWS])
def test_an_activation_that_a_graph_casts_enters_another(recipe: Recipe) -> None:
    model = mlp(recipe)[0]

    def cast(x: Tensor) -> Tensor:
        return quantize(x, recipe)

    def broken(x: Tensor) -> Tensor:
        q = cast(x)
        torch._dynamo.graph_break()
        return model(q)

    x, compiled = randn(128, K), torch.compile(broken, backend="aot_eager")
    assert_bits(step(compiled, x, of=[model]), step(broken, x, of=[model]))
    q, eager = torch.compile(cast, backend="aot_eager")(x), cast(x)
    joined = torch.cat([eager, q])
    with torch.no_grad():
        for compiled_linear in (model, torch.compile(model, backend="aot_eager")):
            assert torch.equal(compiled_linear(joined), model(torch.cat([eager, eager])))
            assert torch.equal(compiled_linear(q), model(eager))


TRANSFORMS: dict[str, Callable[..., Any]] = {
    "vmap": lambda run, x: torch.func.vmap(run)(x),
    "grad": lambda run, x: torch.func.grad(lambda x: run(x).sum())(x),
    "jvp": lambda run, x: torch.func.jvp(run, (x,), (x,)),
}


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("name", TRANSFORMS)
def test_torch_func_in_a_compiled_function_is_refused_with_a_remedy(
    name: str, frozen: bool
) -> None:
    model, x = mlp(dtype=torch.float32), randn(8, K, dtype=torch.float32)
    if frozen:
        freeze(model)
    compiled = torch.compile(lambda x: TRANSFORMS[name](model, x), backend="aot_eager")
    with pytest.raises(Exception, match=r"FP8 linear layer under torch\.func.*use torch\.autograd"):
        compiled(x)


@pytest.mark.parametrize("frozen", [False, True])
def test_forward_mode_through_a_compiled_model_is_refused(frozen: bool) -> None:
    model, x = mlp(dtype=torch.float32), randn(8, K, dtype=torch.float32)
    if frozen:
        freeze(model)
        model.requires_grad_(False)
    compiled = torch.compile(model, backend="aot_eager")
    with torch.autograd.forward_ad.dual_level(), torch.no_grad():
        assert compiled(x).shape == x.shape
        with pytest.raises(NotImplementedError, match="jvp"):
            compiled(torch.autograd.forward_ad.make_dual(x, torch.ones_like(x)))
