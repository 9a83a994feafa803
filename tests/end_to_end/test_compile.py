"""torch.compile: one graph, no breaks, eager's bits, and few compilations."""

from __future__ import annotations

import copy
import shutil
from collections.abc import Callable
from typing import Any

import pytest
import torch
from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.utils import counters
from torch.utils.checkpoint import checkpoint

from blocktensor import Recipe, convert, freeze, functional, quantize
from tests.support.compiling import afresh, graphs
from tests.support.models import linear, randn

# Dynamo itself instantiates the Functions that it traces.
pytestmark = pytest.mark.filterwarnings(
    "ignore:.*should not be instantiated. Methods on autograd:DeprecationWarning"
)

__all__ = ["afresh"]

K = 192
F = Callable[[Tensor], Tensor]


def mlp(recipe: Recipe | None = None, dtype: torch.dtype = torch.bfloat16) -> nn.Sequential:
    torch.manual_seed(0)
    made = nn.Sequential(nn.Linear(K, 320, bias=False), nn.GELU(), nn.Linear(320, K)).to(dtype)
    convert(made, recipe or Recipe(), auto_filter_small_kn=False)
    return made


def step(f: F, x: Tensor, *modules: nn.Module) -> list[Tensor]:
    """The output and every gradient of one forward and backward."""
    for module in modules:
        module.zero_grad()
    x = x.clone().requires_grad_()
    y = f(x)
    y.backward(randn(*y.shape, seed=7, dtype=y.dtype))
    grads = [p.grad.clone() for m in modules for p in m.parameters() if p.grad is not None]
    return [y.detach(), x.grad, *grads]


def assert_as_eager(f: F, *modules: nn.Module, backend: str = "aot_eager", **x: object) -> None:
    compiled = torch.compile(f, fullgraph=True, backend=backend)
    for seed in range(2):
        given = randn(12, K, seed=seed, **x)  # type: ignore[arg-type]
        got, want = step(compiled, given, *modules), step(f, given, *modules)
        assert len(got) == len(want)
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    assert graphs() == 1


@pytest.mark.parametrize(
    "recipe",
    [
        Recipe(),
        Recipe(scale="power_of_two"),
        Recipe(cache_weight="step"),
        Recipe(wgrad_input="128x128"),
        Recipe(scale="power_of_two", wgrad_input="128x128"),
        Recipe(wgrad_input="high_precision"),
    ],
    ids=str,
)
def test_a_converted_model(recipe: Recipe) -> None:
    model = mlp(recipe)
    assert_as_eager(model, model)


@pytest.mark.parametrize("made", [False, True], ids=["", "columnwise made before"])
def test_a_frozen_model(made: bool) -> None:
    model = mlp(Recipe())
    freeze(model)
    if made:
        model(randn(3, K, grad=True)).sum().backward()
    twin = copy.deepcopy(model)
    compiled = torch.compile(twin, fullgraph=True, backend="aot_eager")
    for seed in range(2):
        x = randn(12, K, seed=seed)
        got, want = step(compiled, x, twin), step(model, x, model)
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    assert graphs() == 1


def test_fp32_and_autocast() -> None:
    model = mlp(dtype=torch.float32)
    assert_as_eager(model, model, dtype=torch.float32)
    torch._dynamo.reset()
    counters.clear()

    def mixed(x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return model(x)

    assert_as_eager(mixed, model, dtype=torch.float32)


def test_a_plain_weight() -> None:
    w = randn(128, K, grad=True)
    assert_as_eager(lambda x: functional.linear(x, w))


def test_fp8_weights_given_to_functional_linear() -> None:
    """Dynamo meets them in our own function."""
    a, b = linear(128, K, bias=True), linear(128, K)
    w = b.weight

    def both(x: Tensor) -> Tensor:
        return functional.linear(x, a.weight, a.bias) + functional.linear(x, w)

    assert_as_eager(both, a, b)
    assert a.weight.cache.casts == b.weight.cache.casts == 2  # of the two eager runs


@pytest.mark.parametrize("wgrad_input", ["1x128", "128x128", "high_precision"])
def test_a_shared_cast(wgrad_input: Any) -> None:
    recipe = Recipe(wgrad_input=wgrad_input)
    q, k = linear(128, K, bias=True, recipe=recipe), linear(128, K, recipe=recipe)

    def both(x: Tensor) -> Tensor:
        x = quantize(x, recipe)
        return q(x) + k(x)

    assert_as_eager(both, q, k)


def test_matmul() -> None:
    module = linear(128, K)
    assert_as_eager(lambda x: x @ module.weight.t(), module)


@pytest.mark.parametrize("policy", ["backward", "step"])
def test_checkpointing(policy: Any) -> None:
    model = mlp(Recipe(cache_weight=policy))
    assert_as_eager(lambda x: checkpoint(model, x, use_reentrant=False), model)


@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler on CPUs")
def test_inductor() -> None:
    model = mlp()
    assert_as_eager(model, model, backend="inductor")


@pytest.mark.parametrize("wgrad_input", ["1x128", "128x128", "high_precision"])
def test_training_compiles_once_and_batch_sizes_once_more(wgrad_input: Any) -> None:
    """Twice more where scales of 128x128 blocks need no padding: of 4, 8, ... blocks of tokens."""
    model = mlp(Recipe(wgrad_input=wgrad_input))
    eager = copy.deepcopy(model)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    runs = [
        (compiled, torch.optim.AdamW(model.parameters(), lr=1e-2)),
        (eager, torch.optim.AdamW(eager.parameters(), lr=1e-2)),
    ]
    for number, batch in enumerate((160, 160, 160, 160, 200, 300, 131, 129, 520, 512, 272)):
        losses = []
        for module, optimizer in runs:
            optimizer.zero_grad()
            loss = module(randn(batch, K, seed=number)).float().square().mean()
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
        assert torch.equal(*losses)
        assert graphs() == (1 if number < 4 else 2 + (wgrad_input == "128x128" and number > 8))
    for a, b in zip(model.parameters(), eager.parameters(), strict=True):
        assert torch.equal(a, b)


def test_one_cast_of_a_weight_serves_forward_and_backward_if_asked_for() -> None:
    found = {}
    for policy in ("backward", "step", False):
        seen: list[list[str]] = []

        def see(gm: torch.fx.GraphModule, _: object, to: Any = seen) -> Callable[..., object]:
            to.append([str(node.target) for node in gm.graph.nodes])
            return make_boxed_func(gm.forward)

        model = mlp(Recipe(cache_weight=policy))  # type: ignore[arg-type]
        backend = aot_autograd(
            fw_compiler=see, bw_compiler=see, partition_fn=min_cut_rematerialization_partition
        )
        step(torch.compile(model, fullgraph=True, backend=backend), randn(12, K), model)
        ops = ("quantize_rowwise", "quantize_with_transpose", "transpose", "gemm")
        ops += ("quantize_transpose",)
        found[policy] = [
            {op: n for op in ops if (n := names.count(f"blocktensor.{op}.default"))}
            for names in seen
        ]
    again = [{"quantize_rowwise": 2, "gemm": 2}, {"gemm": 4, "quantize_transpose": 2}]
    once = [{"quantize_with_transpose": 2, "gemm": 2}, {"gemm": 4}]
    assert found == {"backward": again, "step": once, False: again}


def test_a_cast_that_serves_backward_is_that_of_its_forward() -> None:
    """Also if the weight is written to before backward, where eager mode raises."""
    model = mlp(Recipe(cache_weight="step"))
    twin = copy.deepcopy(model)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    x, y = (randn(12, K, grad=True) for _ in range(2))
    made = compiled(x)
    with torch.no_grad():
        model[0].weight.mul_(2)
    made.sum().backward()
    twin(y).sum().backward()
    assert torch.equal(x.grad, y.grad)  # type: ignore[arg-type]
    assert not torch.equal(compiled(x), made)


def test_what_is_compiled_sees_every_change_of_a_weight() -> None:
    model = mlp()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    x = randn(5, K)
    for scale in (1.0, -2.0, 0.5):
        with torch.no_grad():
            model[0].weight.mul_(scale)
        assert torch.equal(compiled(x), model(x))
    assert graphs() == 1


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


def test_what_the_compile_cache_is_told() -> None:
    a, b = linear(128, K), linear(128, K)
    frozen = copy.deepcopy(a)
    freeze(frozen)
    told = [m.weight._stable_hash_for_caching() for m in (a, b, frozen)]
    assert told[0] == told[1] != told[2]
    others = (linear(256, K), linear(128, K, dtype=torch.float32))
    others += (linear(128, K, recipe=Recipe(scale="power_of_two")),)
    assert told[0] not in [m.weight._stable_hash_for_caching() for m in others]


@pytest.mark.parametrize(
    "compute",
    [
        lambda w, b: w * 2,
        lambda w, b: w + b,
        lambda w, b: nn.functional.normalize(w),
        lambda w, b: w[:128],
        lambda w, b: torch.cat([w, w]),
        lambda w, b: w.detach() + b,
    ],
)
def test_weights_computed_of_weights(compute: Callable[[Tensor, Tensor], Tensor]) -> None:
    weight, delta = linear(256, K).weight, randn(256, K, seed=5, grad=True)

    def f(x: Tensor) -> Tensor:
        return nn.functional.linear(x, compute(weight, delta))

    results = []
    for run in (f, torch.compile(f, backend="aot_eager", fullgraph=True)):
        y = run(randn(12, K))
        y.sum().backward()
        results.append([y.detach(), *(p.grad for p in (weight, delta) if p.grad is not None)])
        weight.grad = delta.grad = None
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("frozen", [False, True])
def test_an_fp8_inputs_gradient_has_the_dtype_that_it_was_cast_from(frozen: bool) -> None:
    """Though autocast makes the output bf16."""
    module = linear(128, K, dtype=torch.float32, frozen=frozen)

    def run(x: Tensor) -> Tensor:
        return module(quantize(x))

    grad, gradients = randn(5, 128), []
    for f in (run, torch.compile(run, backend="aot_eager", fullgraph=True)):
        x = randn(5, K, dtype=torch.float32, grad=True)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = f(x)
        assert y.dtype == torch.bfloat16
        y.backward(grad)
        gradients.append(x.grad)
    assert not torch.equal(gradients[0], gradients[0].bfloat16().float())
    assert torch.equal(*gradients)


@pytest.mark.parametrize("policy", ["backward", "step"])
def test_a_transposed_weight(policy: Any) -> None:
    module = linear(K, 128, recipe=Recipe(cache_weight=policy))
    assert_as_eager(lambda x: x @ module.weight, module)


# Dynamo hides it, and an error comes before that.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@pytest.mark.parametrize("made_by", ["quantize", "rms_norm", "gated_activation"])
@pytest.mark.parametrize("recipe", [Recipe(), Recipe(scale="power_of_two", wgrad_input="128x128")])
def test_an_activation_that_a_graph_casts_enters_another(recipe: Recipe, made_by: str) -> None:
    model = mlp(recipe)[0]
    norm = torch.ones(K, dtype=torch.bfloat16)

    def cast(x: Tensor) -> Tensor:
        if made_by == "rms_norm":
            return functional.rms_norm(x, norm, recipe=recipe)
        if made_by == "gated_activation":
            return functional.gated_activation(x, x + 1, recipe=recipe)
        return quantize(x, recipe)

    def broken(x: Tensor) -> Tensor:
        q = cast(x)
        torch._dynamo.graph_break()
        return model(q)

    x, compiled = randn(128, K), torch.compile(broken, backend="aot_eager")
    for got, want in zip(step(compiled, x, model), step(broken, x, model), strict=True):
        assert torch.equal(got, want)
    q, eager = torch.compile(cast, backend="aot_eager")(x), cast(x)
    joined = torch.cat([eager, q])
    with torch.no_grad():
        for compiled_linear in (model, torch.compile(model, backend="aot_eager")):
            assert torch.equal(compiled_linear(joined), model(torch.cat([eager, eager])))
            assert torch.equal(compiled_linear(q), model(eager))
