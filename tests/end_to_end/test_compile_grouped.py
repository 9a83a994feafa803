"""torch.compile of grouped linears: no breaks, few graphs, eager's bits, any groups."""

from __future__ import annotations

import shutil
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.utils.checkpoint import checkpoint

from blocktensor import BlockwiseFP8Tensor, BlockwiseFP8Weight, Recipe, functional
from tests.support.compiling import (
    afresh,
    assert_as_eager,
    compiled_graphs,
    graphs,
    instantiates,
    ops_in,
)
from tests.support.groups import ends
from tests.support.models import SQUARE, plain, randn

pytestmark = instantiates
__all__ = ["afresh"]

E, N, K = 4, 144, 192
Run = Callable[[Tensor, Tensor], Tensor]
needs_cpp = pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler")
every_backend = pytest.mark.parametrize(
    "backend", ["aot_eager", pytest.param("inductor", marks=needs_cpp)]
)


def stack(
    kn: bool = False, dtype: torch.dtype = torch.bfloat16, recipe: Recipe | None = None
) -> nn.Parameter:
    shape = (E, K, N) if kn else (E, N, K)
    values = randn(*shape, seed=1, dtype=dtype) / K**0.5
    return nn.Parameter(BlockwiseFP8Weight(values, recipe or Recipe()))


def ways() -> dict[str, tuple[Run, list[Tensor]]]:
    w, kn, other = stack(), stack(kn=True), stack()
    squares, high = (stack(recipe=Recipe(wgrad_input=x)) for x in ("128x128", "high_precision"))
    leaf, bias = plain(w).requires_grad_(), randn(E, N, seed=2, grad=True)
    frozen = BlockwiseFP8Tensor.from_values(plain(w), SQUARE)
    linear = functional.grouped_linear
    return {
        "F.grouped_mm": (lambda x, o: F.grouped_mm(x, w.transpose(-2, -1), offs=o), [w]),
        "F.grouped_mm of [E, K, N]": (lambda x, o: F.grouped_mm(x, kn, offs=o), [kn]),
        "functional, with bias": (lambda x, o: linear(x, w, o, bias), [w, bias]),
        "two weights": (lambda x, o: torch.cat(linear(x, [w, other], o)), [w, other]),
        "plain": (lambda x, o: linear(x, leaf, o), [leaf]),
        "frozen": (lambda x, o: F.grouped_mm(x, frozen.mT, offs=o), []),
        "x in squares": (lambda x, o: linear(x, squares, o), [squares]),
        "wgrad in high precision": (lambda x, o: linear(x, high, o), [high]),
        "checkpointed": (lambda x, o: checkpoint(linear, x, w, o, use_reentrant=False), [w]),
    }


@pytest.mark.parametrize("way", ways())
def test_tokens_and_groups_of_changing_sizes(way: str) -> None:
    run, leaves = ways()[way]
    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    for number, sizes in enumerate(
        [(1, 0, 129, 20), (0, 0, 0, 0), (150, 0, 0, 0), (127, 1, 100, 60), (3, 2, 1, 0)]
    ):
        rows = max(sum(sizes), 10) if number > 2 else 160  # first one number of tokens, then others
        given = randn(rows, K, seed=number), ends(*sizes)
        assert_as_eager(run, given, of=leaves, strides=True, compiled=compiled)
        # scales of 128x128 blocks need no padding for 4, 8, ... blocks
        assert graphs() == (1 if number <= 2 else 2 + (way == "x in squares" and number == 4))


@every_backend
@pytest.mark.parametrize("way", ["F.grouped_mm", "functional, with bias"])
def test_routing_within_the_graph_down_to_no_tokens(way: str, backend: str) -> None:
    """The number of tokens that are routed here is known to the graph alone."""
    grouped, leaves = ways()[way]

    def run(x: Tensor, expert: Tensor) -> Tensor:
        expert, order = expert.sort()
        (here,) = torch.where(expert < E)
        offs = torch.histc(expert.float(), E, 0, E - 1).cumsum(0, dtype=torch.int32)
        return grouped(x[order][here], offs)

    rng = torch.Generator().manual_seed(0)
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        compiled = torch.compile(run, fullgraph=True, backend=backend)
        for routed in (60, 0, 30, 1):
            expert = torch.randint(0, E, (60,), generator=rng)
            expert[routed:] = E
            given = randn(60, K, seed=routed), expert
            assert_as_eager(run, given, of=leaves, strides=True, compiled=compiled)
    assert graphs() == 1


@needs_cpp
def test_inductor() -> None:
    run, leaves = ways()["F.grouped_mm"]
    sizes = ((160, (1, 0, 129, 20)), (200, (0, 0, 0, 0)), (0, (0, 0, 0, 0)))
    batches = [(randn(rows, K), ends(*groups)) for rows, groups in sizes]
    assert_as_eager(run, *batches, of=leaves, backend="inductor", strides=True)
    assert graphs() <= 3  # none of no rows serves others, in plain torch either


@pytest.mark.parametrize("kn", [False, True])
def test_the_fallback_of_transformers(kn: bool) -> None:
    """Which its experts take when compiled with weights in fp32."""
    moe = pytest.importorskip("transformers.integrations.moe")
    w = stack(kn, torch.float32)

    def run(x: Tensor, offs: Tensor) -> Tensor:
        return moe._grouped_linear(x, w, offs, is_transposed=kn)

    given = randn(160, K, dtype=torch.float32), ends(1, 0, 129, 20)
    assert_as_eager(run, given, of=[w], strides=True)
    assert graphs() == 1
    ran = [op for graph in compiled_graphs(run, *given, of=[w]) for op in ops_in(graph)]
    assert sorted(op for op in ran if "gemm" in op or "mm" in op) == [
        "blocktensor.grouped_gemm",
        "blocktensor.grouped_gemm",
        "blocktensor.grouped_gemm_wgrad",
    ]


def test_batched_products() -> None:
    w = stack(kn=True)
    batches = [randn(E, tokens, K) for tokens in (5, 130, 131)]
    assert_as_eager(lambda x: torch.bmm(x, w), *batches, of=[w], strides=True)
    assert graphs() == 2


def test_autocast() -> None:
    w = stack(dtype=torch.float32)

    def run(x: Tensor, offs: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return F.grouped_mm(x, w.mT, offs=offs)

    given = randn(160, K, dtype=torch.float32), ends(1, 0, 129, 20)
    assert_as_eager(run, given, of=[w], strides=True)


def test_compiled_graphs_save_no_form_of_the_weight() -> None:
    """Its dgrad is one op with the cast: nothing the size of the weight waits for backward.

    Unless one cast is to serve both: then the form that dgrad reads does.
    """
    of_x = (K, 128 * ((160 + 127 * E) // 128))
    for recipe, of_weight in ((Recipe(), []), (Recipe(cache_weight="step"), [(E, K, N)])):
        w = stack(recipe=recipe)
        saved: list[Tensor] = []
        compiled = torch.compile(
            lambda x, o, w=w: F.grouped_mm(x, w.mT, offs=o), fullgraph=True, backend="aot_eager"
        )
        with torch.autograd.graph.saved_tensors_hooks(
            lambda t, to=saved: to.append(t) or t, lambda t: t
        ):
            compiled(randn(160, K, grad=True), ends(1, 0, 129, 20))
        shapes = [tuple(t.shape) for t in saved if t.dtype == torch.float8_e4m3fn]
        assert sorted(shapes) == sorted([of_x, *of_weight])


def test_main_grad_is_refused() -> None:
    w = stack()
    w.main_grad = torch.zeros(w.shape)
    compiled = torch.compile(
        lambda x, o: functional.grouped_linear(x, w, o), fullgraph=True, backend="aot_eager"
    )
    with pytest.raises(Exception, match=r"weight\.main_grad under torch\.compile"):
        compiled(randn(160, K), ends(1, 0, 129, 20))
    assert not counters["stats"]["unique_graphs"]
