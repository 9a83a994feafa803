"""Gated MLPs under torch.compile: one graph, the registered ops, the bits of eager mode."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch.utils.checkpoint import checkpoint

from blocktensor import BlockwiseFP8Weight, Recipe, functional
from blocktensor.autograd import whole_functions
from tests.support.compiling import afresh, graphs  # noqa: F401
from tests.support.gated import assert_bits, results, unfused, weights
from tests.support.groups import ends
from tests.support.models import plain, randn

# Dynamo itself instantiates the Functions that it traces.
pytestmark = pytest.mark.filterwarnings(
    "ignore:.*should not be instantiated. Methods on autograd:DeprecationWarning"
)
whole_functions.announce()
compiled = functools.partial(torch.compile, fullgraph=True, backend="aot_eager")


def fused(*operands: Tensor, recompute: bool = False) -> Tensor:
    return functional.gated_mlp(*operands, recompute=recompute)


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("kind", ["weight", "tensor", "plain"])
def test_bits(kind: str, recompute: bool) -> None:
    frozen = (0, 1, 2) if kind == "tensor" else ()
    operands = weights(kind, frozen=frozen)
    wanted = results(unfused, randn(2, 70, 192, grad=True), operands)
    if kind == "plain":
        operands = [plain(w).requires_grad_() for w in operands]
    run = compiled(functools.partial(fused, recompute=recompute))
    for _ in range(2):
        assert_bits(results(run, randn(2, 70, 192, grad=True), operands), wanted)
    assert graphs() == 1


def test_one_cast_for_forward_and_backward() -> None:
    operands = weights(recipe=Recipe(cache_weight="step"))
    wanted = results(unfused, randn(70, 192, grad=True), operands)
    assert_bits(results(compiled(fused), randn(70, 192, grad=True), operands), wanted)


def test_autocast() -> None:
    operands = weights(dtype=torch.float32)
    x = randn(70, 192, dtype=torch.float32, grad=True)
    with torch.autocast("cpu"):
        wanted = results(unfused, x, operands)
        assert_bits(results(compiled(fused), x, operands), wanted)


def test_no_grad() -> None:
    operands = weights()
    with torch.no_grad():
        x = randn(70, 192)
        assert_bits(results(compiled(fused), x, operands), results(unfused, x, operands))


def test_activation_checkpointing() -> None:
    def run(*operands: Tensor) -> Tensor:
        made: Tensor = checkpoint(fused, *operands, use_reentrant=False)
        return made

    operands, x = weights(), randn(70, 192, grad=True)
    assert_bits(results(compiled(run), x, operands), results(unfused, x, operands))


def ops_that_run(run: Callable[..., Tensor], operands: Sequence[Tensor]) -> list[str]:
    """The targets of the graphs of a forward and of its backward."""
    seen: list[str] = []

    def see(gm: torch.fx.GraphModule, example: object) -> Callable[..., object]:
        seen.extend(str(node.target) for node in gm.graph.nodes)
        return make_boxed_func(gm.forward)

    backend = aot_autograd(fw_compiler=see, bw_compiler=see)
    run = torch.compile(run, fullgraph=True, backend=backend)
    results(run, randn(9, 192, grad=True), [*operands])
    return seen


@pytest.mark.parametrize("recompute", [False, True])
def test_registered_ops_run(recompute: bool) -> None:
    seen = ops_that_run(functools.partial(fused, recompute=recompute), weights())
    made = [name for name in seen if name.startswith("blocktensor.") and "gemm" not in name]
    # with recompute, h is made again and the gradient of up is a gated product, too
    assert made.count("blocktensor.gated.default") == (3 if recompute else 1)
    backward = "gated_backward" if recompute else "gated_backward_with_h"
    assert made.count(f"blocktensor.{backward}.default") == 1
    assert made.count("blocktensor.quantize_both.default") == 2
    assert not any("silu" in name for name in seen)


@pytest.mark.parametrize("recompute", [False, True])
def test_what_is_stored_in_fp8(recompute: bool) -> None:
    """Compiled graphs save the bytes of gate and up, and no high precision beside them."""
    saved: list[Tensor] = []

    def see_forward(graph: torch.fx.GraphModule, example: object) -> Callable[..., object]:
        made = [x.meta["val"] for x in graph.graph.output_node().args[0][1:] if x is not None]
        saved.extend(x for x in made if isinstance(x, Tensor))
        return make_boxed_func(graph.forward)

    backend = aot_autograd(
        fw_compiler=see_forward,
        bw_compiler=lambda graph, _: make_boxed_func(graph.forward),
        partition_fn=min_cut_rematerialization_partition,
    )
    operands, x = weights(), randn(80, 192, grad=True)
    run = functools.partial(functional.gated_mlp, store_fp8=True, recompute=recompute)
    made = results(torch.compile(run, fullgraph=True, backend=backend), x, operands)
    assert_bits(made, results(run, x, operands))
    rows = [t.dtype for t in saved if 320 in t.shape and 80 in t.shape]
    assert rows == [torch.float8_e4m3fn] * (2 if recompute else 3)  # gate, up and h


def test_gradients_of_rows_in_groups_are_made_one_after_the_other() -> None:
    stacks = [BlockwiseFP8Weight(torch.stack([plain(w)] * 2)).requires_grad_() for w in weights()]
    run = functools.partial(functional.gated_experts, offs=ends(4, 5))
    seen = ops_that_run(run, stacks)
    assert seen.count("blocktensor.gated.default") == 2  # the gradient of up is one, too
    assert seen.count("blocktensor.gated_backward.default") == 1
    assert seen.count("blocktensor.quantize_grouped.default") == 2


def test_before_it_is_announced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Linears then run one by one; and nothing is announced that would import Dynamo."""
    monkeypatch.setattr(whole_functions, "_announced", False)
    with monkeypatch.context() as without:
        without.delitem(sys.modules, "torch._dynamo")
        whole_functions.announce_if_loaded()
    assert not whole_functions._announced
    monkeypatch.setattr(whole_functions, "announce_if_loaded", lambda: None)
    x, operands = randn(9, 192, grad=True), weights()
    assert_bits(results(compiled(fused), x, operands), results(unfused, x, operands))
    assert not whole_functions._announced
