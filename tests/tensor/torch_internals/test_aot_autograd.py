"""Compiled graphs that return FP8 tensors: eager's types, values and gradients, bit for bit."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo import graph_break
from torch._dynamo.utils import counters
from torch._subclasses.functional_tensor import FunctionalTensor, FunctionalTensorMode
from torch.multiprocessing.reductions import StorageWeakRef

from blocktensor import BlockwiseFP8Tensor, BlockwiseFP8Weight, Recipe, quantize
from blocktensor.tensor.torch_internals import aot_autograd as package_source
from blocktensor.tensor.torch_internals.aot_autograd import plain_tangent, share_storage, source_key
from tests.support.compiling import afresh, fresh, instantiates, reads_grad
from tests.support.models import linear, randn

pytestmark = [
    instantiates,
    reads_grad,
]

__all__ = ["afresh"]

inductor = pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler on CPUs")

N, K = 256, 192


def by_linear(made: Tensor, x: Tensor) -> Tensor:
    return F.linear(x, made)


def by_matmul(made: Tensor, x: Tensor) -> Tensor:
    return x @ made


def assert_as_eager(
    f: Callable[[Tensor, Tensor, Tensor], Any],
    use: Callable[[Any, Tensor], Tensor] = by_linear,
    weight: Callable[[], Tensor] = lambda: linear(N, K).weight,
    **options: Any,
) -> None:
    """What a graph returns is what eager mode returns, and so is what ``use`` then computes."""
    results = []
    for run in (torch.compile(f, backend="aot_eager", **options), f):
        leaves = weight(), randn(N, K, seed=5, grad=True), randn(12, K, seed=6, grad=True)
        made = run(*leaves)
        y = use(made, leaves[2])
        if y.requires_grad:
            y.float().square().sum().backward()
        returned = made if isinstance(made, tuple) else (made,)
        results.append([*returned, y.detach(), *(leaf.grad for leaf in leaves)])
    for got, want in zip(*results, strict=True):
        assert type(got) is type(want)
        if want is not None:
            assert (got.shape, got.requires_grad) == (want.shape, want.requires_grad)
            if not isinstance(got, BlockwiseFP8Tensor):
                assert torch.equal(got, want)
                assert got.stride() == want.stride()


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
    computed, view = COMPUTED.get(make), VIEWS.get(make)
    assert_as_eager(lambda w, d, x: computed(w, d) if computed else view(w))


def test_a_weight_of_symbolic_sizes() -> None:
    assert_as_eager(lambda w, d, x: (w * d).t(), by_matmul, dynamic=True)


@pytest.mark.parametrize(
    "pick", [lambda w: w[1], lambda w: w.select(0, -1), lambda w: w.unbind()[1]]
)
def test_a_matrix_of_a_stack_of_symbolic_sizes(pick: Any) -> None:
    def stack() -> Tensor:
        return nn.Parameter(BlockwiseFP8Weight(randn(3, N, K, seed=1)))

    assert_as_eager(lambda w, d, x: F.linear(x, pick(w)), lambda y, x: y, stack, dynamic=True)


@pytest.mark.parametrize("compute", [lambda w: w * 2, lambda w: w[5:].detach()])
def test_a_graph_break_between_a_weight_and_its_product(compute: Any) -> None:
    def f(w: Tensor, d: Tensor, x: Tensor) -> Tensor:
        made = compute(w)
        graph_break()
        return F.linear(x, made)

    assert_as_eager(f, lambda y, x: y)


def with_a_write_to_a_view(w: Tensor, d: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    with torch.no_grad():
        w[:128].mul_(2)
    return w[128:], F.linear(x, w[:128])


def with_outputs_that_share_memory(w: Tensor, d: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    made = w * 1
    made[:128].mul_(2)
    return made, made.t()


def test_graphs_of_several_outputs() -> None:
    assert_as_eager(with_a_write_to_a_view, lambda made, x: F.linear(x, made[0]) + made[1])
    assert_as_eager(
        with_outputs_that_share_memory, lambda made, x: F.linear(x, made[0]) + x @ made[1]
    )
    for use in (lambda made, x: F.linear(x, made[0]), lambda made, x: made[1]):
        assert_as_eager(lambda w, d, x: (w * 2, F.linear(x, w)), use)


def test_a_weight_that_needs_no_gradient() -> None:
    def weight() -> Tensor:
        return linear(N, K).weight.requires_grad_(False)

    assert_as_eager(
        lambda w, d, x: (w + d, w[128:]),
        lambda made, x: F.linear(x, made[0])[:, :128] + F.linear(x, made[1]),
        weight,
    )
    # a plain tensor that shares the memory of a weight; no FP8 weight is made of it
    assert_as_eager(lambda w, d, x: w.high_precision(), weight=weight)


@pytest.mark.parametrize("wgrad_input", ["1x128", "128x128", "high_precision"])
def test_a_shared_cast_that_a_graph_returns(wgrad_input: Any) -> None:
    recipe = Recipe(wgrad_input=wgrad_input)
    assert_as_eager(
        lambda w, d, x: (quantize(x, recipe), w),
        lambda made, x: F.linear(*made),
        lambda: linear(N, K, recipe=recipe).weight,
    )


@pytest.mark.parametrize("trainable", [False, True], ids=["frozen", "gathered"])
@pytest.mark.parametrize("view", [lambda w: w.t(), lambda w: w[:128].t()])
def test_a_graph_returns_a_view_of_an_fp8_tensor(view: Any, trainable: bool) -> None:
    """FSDP2 gathers the weight of a trainable shard as an FP8 tensor."""

    def use(made: Tensor, x: Tensor) -> Tensor:
        assert isinstance(made, BlockwiseFP8Tensor)
        return x @ made

    def weight() -> Tensor:
        return linear(N, K, frozen=True).weight.detach().requires_grad_(trainable)

    assert_as_eager(lambda w, d, x: view(w), use, weight)


@pytest.mark.parametrize(
    ("name", "backend"),
    [*((name, "aot_eager") for name in VIEWS), pytest.param("w[:128]", "inductor", marks=inductor)],
)
def test_a_returned_view_is_a_view_of_the_weight(name: str, backend: str) -> None:
    weight, x = linear(N, K).weight, randn(5, K, grad=True)
    made = torch.compile(VIEWS[name], backend=backend)(weight)
    assert isinstance(made, BlockwiseFP8Weight)
    assert made is weight or made._version == weight._version
    y = F.linear(x, made)
    with torch.no_grad():
        weight.mul_(2)
    assert made._version == weight._version
    assert torch.equal(F.linear(x, made), F.linear(x, VIEWS[name](weight)))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_only_a_gradient_that_is_a_weight_or_plain_is_taken() -> None:
    weight, grad = linear(N, K).weight, linear(N, K).weight
    made = torch.compile(lambda w: w * 3, backend="aot_eager")(weight)
    (got,) = torch.autograd.grad(made, weight, grad)
    assert type(got) is Tensor
    assert torch.equal(got, grad.master * 3)
    with pytest.raises(RuntimeError, match="BlockwiseFP8Tensor"):
        torch.compile(lambda w: w * 3, backend="aot_eager")(weight).backward(weight._quantized())
    coerced = weight.__coerce_same_metadata_as_tangent__
    assert coerced(None, Tensor) is weight.master
    assert coerced(None, BlockwiseFP8Tensor) is coerced(None) is None


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


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
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
    for new in (package / "new.py", package / "ops" / "cast" / "new.py"):
        new.write_text("")
        assert key() not in (first, "")
        new.unlink()
        assert key() == first
    monkeypatch.setattr(package_source, "_IMPORTED", time.time() - 60)
    assert len({first, key(), key()}) == 3  # what runs is not what the files say
    source_key.cache_clear()


@inductor
def test_torch_finds_compiled_graphs_by_the_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a second process does, in which nothing but the files of the cache is known.

    AOTAutograd's cache finds nothing under another key, and then inductor's finds nothing.
    """
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    module, x, found = linear(256, 256), randn(8, 256), []
    assert torch.compiler.config.cache_key_tag.endswith(source_key())
    for key in ("a", "a", "b"):
        tag = torch.compiler.config.patch(cache_key_tag=key + source_key())
        with tag, fresh(), torch.no_grad():
            assert torch.equal(torch.compile(module)(x), module(x))
            hits = counters["aot_autograd"]["autograd_cache_hit"]
            found.append((hits, counters["inductor"]["fxgraph_cache_miss"]))
    assert found == [(0, 1), (1, 0), (0, 1)]


WITHOUT_FP8_TENSORS = {
    "a matmul of plain weights": """
run = torch.compile(functional.linear, backend="aot_eager", fullgraph=True)
run(torch.zeros(4, 128), torch.zeros(128, 128, requires_grad=True)).sum().backward()
""",
    "a plain model in a context": """
run = torch.compile(lambda x: x.sin().cos(), backend="aot_eager")
with blocktensor.saved_tensors_in_fp8():
    run(torch.zeros(64, 128, requires_grad=True)).sum().backward()
""",
}


@pytest.mark.parametrize("name", WITHOUT_FP8_TENSORS)
def test_compiled_code_without_fp8_tensors_names_our_code(name: str) -> None:
    script = f"""
import torch, blocktensor
from blocktensor import functional
assert torch.compiler.config.cache_key_tag == ""
{WITHOUT_FP8_TENSORS[name]}
from blocktensor.tensor.torch_internals.aot_autograd import source_key
assert torch.compiler.config.cache_key_tag == source_key()
"""
    subprocess.run([sys.executable, "-c", script], check=True)
