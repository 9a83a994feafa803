"""Gated MLPs, fused norms and grouped linears under torch.compile: one graph, eager's bits."""

from __future__ import annotations

import functools
import shutil
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from blocktensor import BlockwiseFP8Tensor, BlockwiseFP8Weight, Recipe, functional, share_inputs
from blocktensor.ops.formats import group_columns
from blocktensor.overrides import dynamo
from tests.support import mlps, siblings
from tests.support.compiling import (
    afresh,
    assert_as_eager,
    compiled_graphs,
    graphs,
    instantiates,
    ops_in,
)
from tests.support.gated import results, unfused, weights
from tests.support.groups import ends
from tests.support.models import POWER_OF_TWO, SQUARE, plain, randn
from tests.support.norms import NAMES, Norm, OfTorch, fused_blocks
from tests.support.steps import assert_bits, step

pytestmark = instantiates
__all__ = ["afresh"]
dynamo.announce()
compiled = functools.partial(torch.compile, fullgraph=True, backend="aot_eager")


def fused(*operands: Tensor, **options: Any) -> Tensor:
    return functional.gated_mlp(*operands, **options)


recomputed = functools.partial(fused, recompute=True)


def checkpointed(*operands: Tensor) -> Tensor:
    made: Tensor = checkpoint(fused, *operands, use_reentrant=False)
    return made


FROZEN = {"kind": "tensor", "frozen": (0, 1, 2)}
WAYS: dict[str, tuple[Any, dict[str, Any], Any]] = {
    "autocast": (fused, {"dtype": torch.float32}, lambda: torch.autocast("cpu")),
    "no_grad": (fused, {}, torch.no_grad),
    "checkpoint": (checkpointed, {}, torch.enable_grad),
    "frozen": (fused, FROZEN, torch.enable_grad),
    "frozen, recomputed": (recomputed, FROZEN, torch.enable_grad),
    "plain": (fused, {}, torch.enable_grad),
    "plain, recomputed": (recomputed, {}, torch.enable_grad),
}
"""FP8 weights that train: tests/autograd/test_gated.py."""


@pytest.mark.parametrize("way", WAYS)
def test_bits(way: str) -> None:
    run, options, mode = WAYS[way]
    x = randn(2, 70, 192, dtype=options.get("dtype", torch.bfloat16), grad=True)
    operands = weights(**options)
    with mode():
        wanted = results(unfused, x, operands)
        if way.startswith("plain"):
            operands = [plain(w).requires_grad_() for w in operands]
        assert_bits(results(compiled(run), x, operands), wanted)
    assert graphs() == 1


@pytest.mark.parametrize("announced", [True, False])
def test_a_plain_weight_among_fp8_ones(announced: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """It runs in FP8 too, whether Dynamo was there before the first call or not."""
    monkeypatch.setattr(dynamo, "_announced", announced)
    gate, up, down = weights()
    values = plain(gate).requires_grad_()
    run = functools.partial(fused, recipe=gate.recipe) if announced else fused
    assert_as_eager(lambda x: run(x, values, up, down), randn(70, 192), of=[values, up, down])


def test_another_recipe_than_a_weight_has_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    x, (w, up, down), target = randn(70, 192), weights(), torch.zeros(70, dtype=torch.int64)
    same, other = w.recipe, Recipe(wgrad_input="1x128")
    assert_as_eager(lambda x: functional.linear(x, w, recipe=same), x, of=[w])
    for run in (
        lambda x: functional.linear(x, w, recipe=other),
        lambda x: functional.linear_cross_entropy(x, w, target, recipe=other),
        lambda x: functional.gated_mlp(x, w, up, down, recipe=other),
    ):
        for announced in (True, False):
            monkeypatch.setattr(dynamo, "_announced", announced)
            with pytest.raises(torch._dynamo.exc.Unsupported, match="leave out the recipe"):
                compiled(run)(x)


@pytest.mark.parametrize(
    "options",
    [
        {"ignore_index": 5, "label_smoothing": 0.1},
        {"reduction": "sum", "weight": torch.rand(320)},
    ],
    ids=["mean", "sum"],
)
def test_a_loss_that_dynamo_traces_first(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It takes the logits of all tokens in fp32, as the loss in chunks does."""
    monkeypatch.setattr(dynamo, "_announced", False)
    w, bias = weights()[0], randn(320, seed=3, grad=True)
    x, target = randn(2, 35, 192), torch.arange(70).view(2, 35) % 7

    def wanted(x: Tensor) -> Tensor:
        logits = F.linear(x, w, bias).float()
        return F.cross_entropy(logits.flatten(0, 1), target.flatten(), **options)

    def run(x: Tensor) -> Tensor:
        return functional.linear_cross_entropy(x, w, target, bias, **options)

    assert_bits(step(compiled(run), x, of=[w, bias]), step(wanted, x, of=[w, bias]))
    assert graphs() == 1


def ops_that_run(run: Any, operands: list[Any]) -> list[str]:
    """The package's ops in the graphs of a forward and of its backward, and others of silu."""
    found = compiled_graphs(run, randn(9, 192), *operands, of=operands)
    names = [name.removeprefix("blocktensor.") for graph in found for name in ops_in(graph)]
    assert not any("silu" in name for name in names)
    return names


@pytest.mark.parametrize("recompute", [False, True])
def test_registered_ops_run(recompute: bool) -> None:
    made = ops_that_run(recomputed if recompute else fused, weights())
    # h is made again; with recompute, the gradient of up is a gated product, too
    assert made.count("gated") == (3 if recompute else 2)
    assert made.count("gated_backward") == 1
    assert made.count("quantize_both") == 2


def saved_by(graph: torch.fx.Graph) -> list[Tensor]:
    """What a graph of a forward returns, its output among it."""
    made = [getattr(x, "meta", {}).get("val") for x in graph.output_node().args[0]]  # type: ignore[union-attr]
    return [x for x in made if isinstance(x, Tensor)]


@pytest.mark.parametrize("norm", [Norm, OfTorch])
def test_fused_norms_save_one_form_of_each_input(norm: Any) -> None:
    model, twin = fused_blocks(norm, fused=NAMES if norm is Norm else [])
    forward, _ = compiled_graphs(
        model, call=lambda run: assert_bits(mlps.results(model, run=run), mlps.results(twin))
    )
    assert graphs() == 1
    # Of each layer: the input of o_proj and two norms. That of down_proj is made by backward.
    assert [x.dtype for x in saved_by(forward)].count(torch.float8_e4m3fn) == 6


def test_sharing_is_left_to_the_compiler() -> None:
    model = siblings.converted(siblings.Mlp())
    share_inputs(model)
    forward, _ = compiled_graphs(model, siblings.X)
    # the input of gate and up, and that of down
    assert [x.dtype for x in saved_by(forward)].count(torch.float8_e4m3fn) == 2


def test_gradients_of_rows_in_groups_are_made_one_after_the_other() -> None:
    stacks = [BlockwiseFP8Weight(torch.stack([plain(w)] * 2)).requires_grad_() for w in weights()]
    seen = ops_that_run(functools.partial(functional.gated_experts, offs=ends(4, 5)), stacks)
    assert seen.count("gated") == 2  # the gradient of up is one, too
    assert seen.count("gated_backward") == 1
    assert seen.count("quantize_grouped") == 2


def test_before_it_is_announced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dynamo, "_announced", False)
    with monkeypatch.context() as without:
        without.delitem(sys.modules, "torch._dynamo")
        dynamo.announce_if_loaded()
    assert not dynamo._announced
    x, operands = randn(9, 192, grad=True), weights()
    with monkeypatch.context() as silent:
        silent.setattr(dynamo, "announce_if_loaded", lambda: None)
        assert_bits(results(compiled(fused), x, operands), results(unfused, x, operands))
    assert not dynamo._announced
    fused(x, *operands)  # Dynamo is there already
    assert dynamo._announced


# Grouped linears: few graphs for any groups

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
    w, kn = stack(), stack(kn=True)
    in_rows, high = (stack(recipe=Recipe(wgrad_input=x)) for x in ("1x128", "high_precision"))
    scaled = stack(recipe=POWER_OF_TWO)
    leaf, bias = plain(w).requires_grad_(), randn(E, N, seed=2, grad=True)
    frozen, master = BlockwiseFP8Tensor.from_values(plain(w), SQUARE), stack(dtype=torch.float32)
    linear = functional.grouped_linear

    def autocast(x: Tensor, offs: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return F.grouped_mm(x, master.mT, offs=offs)

    return {
        "F.grouped_mm": (lambda x, o: F.grouped_mm(x, w.transpose(-2, -1), offs=o), [w]),
        "F.grouped_mm of [E, K, N]": (lambda x, o: F.grouped_mm(x, kn, offs=o), [kn]),
        "functional, with bias": (lambda x, o: linear(x, w, o, bias), [w, bias]),
        "one of two plain": (
            lambda x, o: torch.cat([linear(x, scaled, o), linear(x, leaf, o, recipe=POWER_OF_TWO)]),
            [scaled, leaf],
        ),
        "frozen": (lambda x, o: F.grouped_mm(x, frozen.mT, offs=o), []),
        "changed in place": (lambda x, o: linear(x, w, o).mul_(2), [w]),
        "x in rows": (lambda x, o: linear(x, in_rows, o), [in_rows]),
        "wgrad in high precision": (lambda x, o: linear(x, high, o), [high]),
        "autocast": (autocast, [master]),
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
        dtype = torch.float32 if way == "autocast" else torch.bfloat16
        given = randn(rows, K, seed=number, dtype=dtype), ends(*sizes)
        assert_as_eager(run, given, of=leaves, strides=True, compiled=compiled)
        assert graphs() == (1 if number <= 2 else 2)


@every_backend
@pytest.mark.parametrize("way", ["F.grouped_mm", "functional, with bias"])
def test_routing_within_the_graph_down_to_no_tokens(way: str, backend: str) -> None:
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


@pytest.mark.parametrize("kn", [False, True])
def test_the_fallback_of_transformers(kn: bool) -> None:
    moe = pytest.importorskip("transformers.integrations.moe")
    w = stack(kn, torch.float32)

    def run(x: Tensor, offs: Tensor) -> Tensor:
        return moe._grouped_linear(x, w, offs, is_transposed=kn)

    given = randn(160, K, dtype=torch.float32), ends(1, 0, 129, 20)
    assert_as_eager(run, given, of=[w], strides=True)
    assert graphs() == 1
    ran = [op for graph in compiled_graphs(run, *given, of=[w]) for op in ops_in(graph)]
    fprop = "blocktensor.grouped_gemm" if kn else "blocktensor.linear_fprop"
    products = [op for op in ran if "mm" in op or "linear" in op]
    assert products == [fprop, "blocktensor.linear_backward"]


def test_batched_products() -> None:
    w = stack(kn=True)
    batches = [randn(E, tokens, K) for tokens in (5, 130, 131)]
    assert_as_eager(lambda x: torch.bmm(x, w), *batches, of=[w], strides=True)
    assert graphs() == 2


def test_compiled_graphs_save_no_form_of_the_weight() -> None:
    """Its dgrad is one op with the cast: nothing the size of the weight waits for backward."""
    w, saved = stack(), []
    run = compiled(lambda x, o: F.grouped_mm(x, w.mT, offs=o))
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        run(randn(160, K, grad=True), ends(1, 0, 129, 20))
    shapes = [tuple(t.shape) for t in saved if t.dtype == torch.float8_e4m3fn]
    assert shapes == [(K, group_columns(160, E))]
