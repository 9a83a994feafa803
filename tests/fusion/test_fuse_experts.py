"""Experts are found by their stacks and verified; what only looks alike is left alone."""

from __future__ import annotations

import copy
import importlib.util
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from expecttest import assert_expected_inline
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from blocktensor import Recipe, convert, fuse, unfuse
from blocktensor.fusion.fused_class import fused_modules
from tests.support.expert_parallel import cut
from tests.support.fused_experts import EXPERTS, ROWS, Ends, K, Sizes, converted, results
from tests.support.fused_kinds import KINDS, count_runs, why_left_alone
from tests.support.gated import WeightShapes, assert_bits
from tests.support.mlps import H
from tests.support.models import Trace, plain, randn
from tests.support.moe_models import TOKENS, GroupedExperts, transformers_moe
from tests.support.ranks import on_ranks
from tests.support.sharded import mesh_of


class Biased(Sizes):
    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(192))


class AllRows(Sizes):
    """Gives the rows of no group to the last expert."""

    def offs(self, groups: Tensor) -> Tensor:
        offs = super().offs(groups)
        return torch.cat([offs[:-1], offs.new_full((1,), ROWS)])


def planted(name: str) -> Sizes:
    h = H[name]

    class Planted(Sizes):
        def hidden(self, gate: Tensor, up: Tensor) -> Tensor:
            return h(gate, up)

    return Planted()


def test_planted_differences() -> None:
    of_h = "a clamp of gate", "operands swapped", "a product in fp32", "a gradient stopped at up"
    models = {name: converted(planted(name)) for name in of_h}
    models |= {"a bias": converted(Biased()), "all rows": converted(AllRows())}
    models["a recipe"] = converted(Sizes(), Recipe(wgrad_input="high_precision"))
    assert_expected_inline(
        "\n".join(f"{name}: {why_left_alone(model)}" for name, model in models.items()),
        """\
a clamp of gate: differs in its output
operands swapped: differs in its output
a product in fp32: differs in its output
a gradient stopped at up: differs in the gradient of its input
a bias: has more than stacks and an activation: bias
all rows: differs in its output
a recipe: weight gradients read high precision (wgrad_input='high_precision')""",
    )


@pytest.mark.parametrize(
    ("dtype", "recipe"),
    [
        (torch.bfloat16, Recipe(scale="power_of_two", wgrad_input="1x128")),
        (torch.float32, Recipe()),
    ],
)
@pytest.mark.parametrize(
    "make", [Sizes, lambda: Ends("gelu"), lambda: GroupedExperts(EXPERTS, K, 160)]
)
def test_bits(make: Callable[[], Any], dtype: torch.dtype, recipe: Recipe) -> None:
    model = converted(make().to(dtype), recipe)
    twin = copy.deepcopy(model)
    (entry,) = fuse(model).fused
    w1, w2, w3 = sorted(dict(model.named_parameters()))
    act = "gelu" if isinstance(model, Ends) else "silu"
    assert entry.computes == f"{w2}({act}({w1}(x)) * {w3}(x)) by expert"
    assert model._fused_pattern.ends == isinstance(model, Ends)
    assert_bits(results(model), results(twin))


class Joint(Sizes):
    """One stack makes gate and up."""

    NAMES = ("gate_up_proj", "down_proj")

    def __init__(self) -> None:
        nn.Module.__init__(self)
        whole, self.of_gate = Sizes(), F.silu
        self.gate_up_proj = nn.Parameter(torch.cat([plain(whole.w1), plain(whole.w3)], 1))
        self.down_proj = whole.w2

    def forward(self, x: Tensor, groups: Tensor) -> Tensor:
        offs = self.offs(groups)
        both = torch._grouped_mm(x, self.gate_up_proj.transpose(1, 2), offs)
        h = self.hidden(*both.chunk(2, -1))
        return torch._grouped_mm(h, self.down_proj.transpose(1, 2), offs)


class Flagged(Joint):
    """Has two flags of transformers' classes, which route rows."""

    has_gate, is_transposed = True, False


class Projections(Sizes):
    NAMES = ("gate_proj", "up_proj", "down_proj")

    def stacks(self) -> tuple[Any, Any, Any]:
        return self.gate_proj, self.up_proj, self.down_proj


@pytest.mark.parametrize("model", [Projections("gelu_tanh"), Joint(), Flagged()], ids=type)
def test_known_names(model: Sizes) -> None:
    twin, held = copy.deepcopy(converted(model)), nn.ModuleDict({"experts": model})
    (entry,) = fuse(held).entries
    computes = "down_proj(silu(gate) * up), both of gate_up_proj(x) by expert"
    if isinstance(model, Projections):
        computes = "down_proj(gelu_tanh(gate_proj(x)) * up_proj(x)) by expert"
    assert (entry.name, entry.computes, entry.reason) == ("experts", computes, "")
    assert [name for name, _ in fused_modules(held)] == ["experts"]
    assert_bits(results(model), results(twin))


def test_large_experts_are_verified_with_fewer_features() -> None:
    model = converted(Sizes(experts=6, hidden=704))
    with WeightShapes() as stacks:
        assert fuse(model).left_alone == ()
    assert stacks.seen == {(4, 192, 656), (4, 656, 192)}


# Stacks that ranks have cut: the report says what runs


OF_CUT: dict[str, Callable[[DTensor], Any]] = {
    "this rank's": lambda stack: stack.to_local(),
    "all": lambda stack: stack.full_tensor(),
    "something else": lambda stack: stack.to_local() * 2,
}


class OfCut(Sizes):
    def __init__(self, how: str) -> None:
        super().__init__(experts=4, hidden=256)
        self.how, self.of_cut = how, OF_CUT[how]

    def plain(self, stack: Any) -> Any:
        return self.of_cut(stack) if isinstance(stack, DTensor) else stack


def run(model: OfCut) -> tuple[list[Tensor], bool]:
    """The output and all gradients; whether it ran as one function."""
    x = randn(90, K, seed=dist.get_rank(), grad=True)
    sizes = (30, 0, 20, 40) if model.how == "all" else (40, 50)
    with Trace() as trace:
        y = model(x, torch.tensor(sizes, dtype=torch.int32))
    y.backward(randn(*y.shape, seed=9))
    grads = [p.grad.to_local() for p in model.parameters()]
    return [y.detach(), x.grad, *grads], trace.count("blocktensor.gated ") == 1


@pytest.mark.parametrize("how", OF_CUT)
@on_ranks(2, gpus=())
def test_stacks_that_are_cut(world: int, device: str, how: str) -> None:
    mesh, fuses = mesh_of(world, device), how == "this rank's"
    model, twin, later = (converted(OfCut(how)) for _ in range(3))
    cut(model, mesh), cut(twin, mesh)
    report = fuse(model)
    assert len(report.fused) == fuses
    for entry in report.left_alone:
        assert entry.reason.startswith("with stacks that are DTensors it ")
    (made, runs_fused), (wanted, _) = run(model), run(twin)
    assert runs_fused == fuses
    assert_bits(made, wanted)
    if how != "all":  # as well after the fusion
        assert fuse(later).left_alone == ()
        made, runs_fused = run(cut(later, mesh))
        assert runs_fused == fuses
        assert_bits(made, wanted)


# Experts of transformers route tokens; gate and up are one weight, also in MLPs

needs_transformers = pytest.mark.skipif(
    not importlib.util.find_spec("transformers"), reason="needs transformers"
)


def step(model: nn.Module) -> list[Tensor | None]:
    """The loss and all gradients."""
    model.zero_grad()
    loss = model(TOKENS, labels=TOKENS).loss
    loss.backward()
    return [loss.detach(), *(p.grad for p in model.parameters())]


@needs_transformers
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("kind", ["qwen3", "mixtral", "deepseek"])
def test_bits_of_transformers_experts(kind: str, dtype: torch.dtype) -> None:
    model = transformers_moe(kind).to(dtype)
    convert(model, skip_small=False)
    twin = copy.deepcopy(model)
    report = fuse(model, recompute=kind == "mixtral")
    assert report.left_alone == ()
    formula = "down_proj(silu(gate) * up), both of gate_up_proj(x) by expert"
    assert formula in [x.computes for x in report.fused]
    runs = len(report.fused) if dtype == torch.bfloat16 else 3 if kind == "deepseek" else 2
    assert count_runs(model, TOKENS) == runs  # an MLP and shared experts
    for autocast in (False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            assert_bits(step(model), step(twin))
    unfuse(model)
    assert count_runs(model, TOKENS) == 0
    assert_bits(step(model), step(twin))


class Swapped(nn.Module):
    def _apply_gate(self, gate_up: Tensor) -> Tensor:
        up, gate = gate_up.chunk(2, -1)
        return F.silu(gate) * up


class Interleaved(nn.Module):
    def _apply_gate(self, gate_up: Tensor) -> Tensor:
        return F.silu(gate_up[:, ::2]) * gate_up[:, 1::2]


class Weighted(nn.Module):
    def forward(self, x: Tensor, index: Tensor, weights: Tensor) -> Any:
        return super().forward(x, index, weights * 0.5)  # type: ignore[misc]


class Once(nn.Module):
    """Leaves out the second expert of each token."""

    def forward(self, x: Tensor, index: Tensor, weights: Tensor) -> Any:
        return super().forward(x, index[:, :1], weights[:, :1])  # type: ignore[misc]


@needs_transformers
@pytest.mark.parametrize("other", [Swapped, Interleaved, Weighted, Once])
def test_planted_differences_of_routed_experts(other: type) -> None:
    experts: Any = KINDS["routed"].make(torch.bfloat16).experts
    experts.__class__ = type("Own", (other, type(experts)), {})
    assert why_left_alone(experts) == "differs in its output"
    assert experts.num_experts == 4


@needs_transformers
def test_another_implementation_of_routed_experts() -> None:
    experts: Any = KINDS["routed"].make(torch.bfloat16).experts
    experts.config._experts_implementation = "batched_mm"
    reason = "its experts_implementation is 'batched_mm': expected 'grouped_mm'"
    assert why_left_alone(experts) == reason


@needs_transformers
def test_an_implementation_that_is_registered_later(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS as TABLE

    kind = KINDS["routed"]
    model, twin = kind.fused()
    own = TABLE["grouped_mm"]
    monkeypatch.setitem(TABLE._local_mapping, "grouped_mm", lambda *args: own(*args) * 2)
    assert_bits(kind.results(model), kind.results(twin))
    assert kind.fused_runs(model) == 0
