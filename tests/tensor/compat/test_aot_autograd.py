"""Compiled graphs that return FP8 tensors: eager's types, values and gradients, bit for bit."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._dynamo import graph_break
from torch._dynamo.utils import counters
from torch._subclasses.functional_tensor import FunctionalTensor, FunctionalTensorMode
from torch.multiprocessing.reductions import StorageWeakRef

from blocktensor import BlockwiseFP8Tensor, BlockwiseFP8Weight, Recipe, quantize
from blocktensor.tensor import base
from blocktensor.tensor.compat import aot_autograd as package_source
from blocktensor.tensor.compat.aot_autograd import plain_tangent, share_storage, source_key
from tests.support.compiling import afresh, fresh
from tests.support.models import linear, randn

pytestmark = [
    # Dynamo itself instantiates the Functions that it traces,
    pytest.mark.filterwarnings(
        "ignore:.*should not be instantiated. Methods on autograd:DeprecationWarning"
    ),
    # and reads .grad of a graph's inputs, of which it hides the warning but not the error
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not:UserWarning"),
]

__all__ = ["afresh"]

needs_inductor = pytest.mark.skipif(
    shutil.which("g++") is None, reason="inductor needs a C++ compiler on CPUs"
)

N, K = 256, 192
Compile = Callable[[Callable[..., Any]], Callable[..., Any]]


def aot_eager(f: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(f, backend="aot_eager")


def assert_as_eager(
    run: Callable[[Compile, Tensor, Tensor, Tensor], tuple[Any, Tensor]],
    compile: Compile = aot_eager,
    weight: Callable[[], Tensor] = lambda: linear(N, K).weight,
) -> None:
    """``run`` gives what a graph returned, and the result of using it in eager mode."""
    results = []
    for how in (compile, lambda f: f):
        leaves = weight(), randn(N, K, seed=5, grad=True), randn(12, K, seed=6, grad=True)
        returned, y = run(how, *leaves)
        if y.requires_grad:
            y.float().square().sum().backward()
        results.append([returned, y.detach(), *(leaf.grad for leaf in leaves)])
    for got, want in zip(*results, strict=True):
        assert type(got) is type(want)
        if want is not None:
            assert (got.shape, got.requires_grad) == (want.shape, want.requires_grad)
            assert isinstance(got, BlockwiseFP8Tensor) or torch.equal(got, want)
            assert isinstance(got, BlockwiseFP8Tensor) or got.stride() == want.stride()


COMPUTED: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "w * 2": lambda w, d: w * 2,
    "w + d": lambda w, d: w + d,
    "w * w * d": lambda w, d: w * w * d,
    "w.detach() + d": lambda w, d: w.detach() + d,
    "(w * 2).detach()": lambda w, d: (w * 2).detach(),
    "w.clone()": lambda w, d: w.clone(),
    "normalize(w)": lambda w, d: F.normalize(w),
    "cat([w, w])": lambda w, d: torch.cat([w, w]),
    "(w * 2).t().t()": lambda w, d: (w * 2).t().t(),
}
VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "w": lambda w: w,
    "w.detach()": lambda w: w.detach(),
    "w.view_as(w)": lambda w: w.view_as(w),
    "w[:128]": lambda w: w[:128],
    "w.chunk(2)[1]": lambda w: w.chunk(2)[1],
    "w[:K].t()": lambda w: w[:K].t(),
    "w.view(2, 128, K)[1]": lambda w: w.view(2, 128, K)[1],
}


@pytest.mark.parametrize("make", [*COMPUTED, *VIEWS])
def test_a_graph_returns_a_view_of_a_weight_or_one_computed_from_it(make: str) -> None:
    def run(compile: Compile, w: Tensor, d: Tensor, x: Tensor) -> tuple[Any, Tensor]:
        made = compile(COMPUTED[make])(w, d) if make in COMPUTED else compile(VIEWS[make])(w)
        return made, F.linear(x, made)

    assert_as_eager(run)


def test_a_weight_of_symbolic_sizes() -> None:
    def run(compile: Compile, w: Tensor, d: Tensor, x: Tensor) -> tuple[Any, Tensor]:
        made = compile(lambda w, d: (w * d).t())(w, d)
        return made, x @ made

    assert_as_eager(run, lambda f: torch.compile(f, backend="aot_eager", dynamic=True))


def test_a_weight_that_needs_no_gradient() -> None:
    def run(compile: Compile, w: Tensor, d: Tensor, x: Tensor) -> tuple[Any, Tensor]:
        w.requires_grad_(False)
        made, view = compile(lambda w, d: (w + d, w[128:]))(w, d)
        return view, F.linear(x, made)[:, :128] + F.linear(x, view)

    assert_as_eager(run)


@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS)
def test_a_returned_view_is_a_view_of_the_weight(view: Callable[[Tensor], Tensor]) -> None:
    weight, x = linear(N, K).weight, randn(5, K, grad=True)
    made = aot_eager(view)(weight)
    assert isinstance(made, BlockwiseFP8Weight)
    assert made is weight or made._version == weight._version
    y = F.linear(x, made)
    with torch.no_grad():
        weight.mul_(2)
    assert made._version == weight._version
    assert torch.equal(F.linear(x, made), F.linear(x, view(weight)))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


@needs_inductor
def test_inductors_view_of_a_weight_counts_the_weights_writes() -> None:
    weight, x = linear(N, K).weight, randn(5, K, grad=True)
    y = F.linear(x, torch.compile(lambda w: w[:128], backend="inductor")(weight))
    with torch.no_grad():
        weight.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


@pytest.mark.parametrize("compute", [lambda w: w * 2, lambda w: w[5:].detach()])
def test_a_graph_break_between_a_weight_and_its_product(
    compute: Callable[[Tensor], Tensor],
) -> None:
    def f(w: Tensor, x: Tensor) -> Tensor:
        made = compute(w)
        graph_break()
        return F.linear(x, made)

    assert_as_eager(lambda compile, w, d, x: (None, compile(f)(w, x)))


@pytest.mark.parametrize("used", [0, 1])
def test_backward_from_one_of_two_outputs(used: int) -> None:
    def run(compile: Compile, w: Tensor, d: Tensor, x: Tensor) -> tuple[Any, Tensor]:
        made, y = compile(lambda w, x: (w * 2, F.linear(x, w)))(w, x)
        return made, (F.linear(x, made), y)[used]

    assert_as_eager(run)


def test_outputs_that_share_memory() -> None:
    def run(compile: Compile, w: Tensor, d: Tensor, x: Tensor) -> tuple[Any, Tensor]:
        def f(w: Tensor) -> tuple[Tensor, Tensor]:
            made = w * 1
            made[:128].mul_(2)
            return made, made.t()

        a, b = compile(f)(w)
        return b, F.linear(x, a) + x @ b

    assert_as_eager(run)


def test_a_write_to_a_view_in_the_graph() -> None:
    def run(compile: Compile, w: Tensor, d: Tensor, x: Tensor) -> tuple[Any, Tensor]:
        def f(w: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
            with torch.no_grad():
                w[:128].mul_(2)
            return w[128:], F.linear(x, w[:128])

        made, y = compile(f)(w, x)
        return made, F.linear(x, made) + y

    assert_as_eager(run)


def test_high_precision_on_purpose() -> None:
    """A plain tensor that shares the memory of a weight; no FP8 weight is made of it."""

    def run(compile: Compile, w: Tensor, d: Tensor, x: Tensor) -> tuple[Any, Tensor]:
        w.requires_grad_(False)
        made = compile(lambda w: w.high_precision())(w)
        assert type(made) is Tensor
        return made, F.linear(x, made)

    assert_as_eager(run)


@pytest.mark.parametrize("wgrad_input", ["1x128", "128x128", "high_precision"])
def test_a_shared_cast_that_a_graph_returns(wgrad_input: Any) -> None:
    recipe = Recipe(wgrad_input=wgrad_input)

    def run(compile: Compile, w: Tensor, d: Tensor, x: Tensor) -> tuple[Any, Tensor]:
        made = compile(lambda x: quantize(x, recipe))(x)
        return made, F.linear(made, w)

    assert_as_eager(run, weight=lambda: linear(N, K, recipe=recipe).weight)


@pytest.mark.parametrize("trainable", [False, True], ids=["frozen", "gathered"])
@pytest.mark.parametrize("view", [lambda w: w.t(), lambda w: w[:128].t()])
def test_a_graph_returns_a_view_of_an_fp8_tensor(
    view: Callable[[Tensor], Tensor], trainable: bool
) -> None:
    """FSDP2 gathers the weight of a trainable shard as an FP8 tensor."""

    def run(compile: Compile, w: Tensor, d: Tensor, x: Tensor) -> tuple[Any, Tensor]:
        made = compile(view)(w)
        assert isinstance(made, BlockwiseFP8Tensor)
        return made, x @ made

    def weight() -> Tensor:
        return linear(N, K, frozen=True).weight.detach().requires_grad_(trainable)

    assert_as_eager(run, weight=weight)


def test_a_gradient_that_is_a_weight() -> None:
    weight, grad = linear(N, K).weight, linear(N, K).weight
    made = aot_eager(lambda w: w * 3)(weight)
    (got,) = torch.autograd.grad(made, weight, grad)
    assert type(got) is Tensor
    assert torch.equal(got, grad.master * 3)


def test_a_gradient_that_is_no_weight_is_refused() -> None:
    weight = linear(N, K).weight
    made = aot_eager(lambda w: w * 3)(weight)
    with pytest.raises(RuntimeError, match="BlockwiseFP8Tensor"):
        made.backward(weight._quantized())


def test_only_plain_tensors_are_expected_in_place_of_a_weight() -> None:
    weight = linear(N, K).weight
    assert weight.__coerce_same_metadata_as_tangent__(None, Tensor) is weight.master
    assert weight.__coerce_same_metadata_as_tangent__(None, BlockwiseFP8Tensor) is None
    assert weight.__coerce_same_metadata_as_tangent__(None) is None


@pytest.mark.parametrize("of", [lambda w: w, lambda w: w._quantized()])
def test_plain_tangent(of: Callable[[Any], Tensor]) -> None:
    output = of(linear(N, K, dtype=torch.float32).weight)
    tangent = plain_tangent(output)
    assert type(tangent) is Tensor
    assert (tangent.shape, tangent.dtype) == ((N, K), torch.float32)
    assert not torch.utils._python_dispatch.is_traceable_wrapper_subclass(tangent)


@pytest.mark.parametrize("traced", [True, False])
def test_share_storage(traced: bool) -> None:
    master = randn(N, K)
    with FunctionalTensorMode() if traced else nullcontext():
        master = FunctionalTensor.to_functional(master) if traced else master
        weight, view, copy = map(BlockwiseFP8Weight, (master, master[:128], master * 1))
        outputs = view, copy, master
        own = [StorageWeakRef(x.untyped_storage()) for x in outputs]
        share_storage(outputs, weight)
        shared = [StorageWeakRef(x.untyped_storage()) for x in outputs]
    assert shared[1:] == own[1:]
    assert shared[0] == (StorageWeakRef(weight.untyped_storage()) if traced else own[0])


# The key of compiled graphs


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the package, in the place of this one."""
    made = tmp_path / "blocktensor"
    shutil.copytree(package_source._PACKAGE, made, ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.setattr(package_source, "_PACKAGE", made)
    monkeypatch.setattr(package_source, "_IMPORTED", time.time() + 1)
    return made


def key() -> str:
    source_key.cache_clear()
    return source_key()


def test_the_key_is_that_of_the_source(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = key()
    (package / "tensor" / "__pycache__").mkdir()
    (package / "notes.txt").write_text("no source")
    for file in package.rglob("*.py"):
        os.utime(file)  # another copy of the same
    assert key() == first
    (package / "new.py").write_text("")
    assert key() not in (first, "")
    (package / "new.py").unlink()
    assert key() == first
    monkeypatch.setattr(package_source, "_IMPORTED", time.time() - 60)
    assert len({first, key(), key()}) == 3  # what runs is not what the files say
    source_key.cache_clear()


@needs_inductor
def test_torch_finds_compiled_graphs_by_the_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a second process does, in which nothing but the files of the cache is known."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    module, x, found = linear(256, 256), randn(8, 256), []
    for key in ("a", "a", "b"):
        monkeypatch.setattr(base, "source_key", lambda key=key: key)
        with fresh(), torch.no_grad():
            assert torch.equal(torch.compile(module)(x), module(x))
            found.append(counters["aot_autograd"]["autograd_cache_hit"])
    assert found == [0, 1, 0]
