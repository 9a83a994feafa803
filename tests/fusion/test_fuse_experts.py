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
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from blocktensor import Recipe, convert, fuse, unfuse
from blocktensor.fusion.fused_class import fused_modules
from tests.support.expert_parallel import cut
from tests.support.fused_experts import EXPERTS, ROWS, Ends, K, Sizes, converted, results
from tests.support.fused_kinds import KINDS, count_runs, why_left_alone
from tests.support.gated import WeightShapes, assert_bits
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


HIDDEN: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "clamped": lambda gate, up: F.silu(gate).clamp(max=7.0) * up,
    "swapped": lambda gate, up: F.silu(up) * gate,
    "rounded once less": lambda gate, up: (F.silu(gate.float()) * up.float()).to(up.dtype),
    "a stopped gradient": lambda gate, up: F.silu(gate) * up.detach(),
}
"""h of gate and up, in other ways."""


def planted(name: str) -> Sizes:
    class Planted(Sizes):
        def hidden(self, gate: Tensor, up: Tensor) -> Tensor:
            return HIDDEN[name](gate, up)

    return Planted()


HIGH = Recipe(wgrad_input="high_precision")


def test_planted_differences() -> None:
    models = {name: converted(planted(name)) for name in HIDDEN}
    models |= {"a bias": converted(Biased()), "all rows": converted(AllRows())}
    models["a recipe"] = converted(Sizes(), HIGH)
    assert_expected_inline(
        "\n".join(f"{name}: {why_left_alone(model)}" for name, model in models.items()),
        """\
clamped: differs in its output
swapped: differs in its output
rounded once less: differs in its output
a stopped gradient: differs in the gradient of its input
a bias: has more than stacks and an activation: bias
all rows: differs in its output
a recipe: weight gradients read high precision (wgrad_input='high_precision')""",
    )


@pytest.mark.parametrize("recipe", [Recipe(), Recipe(scale="power_of_two", wgrad_input="1x128")])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    "make", [Sizes, lambda: Ends("gelu_tanh"), lambda: GroupedExperts(EXPERTS, K, 320)]
)
def test_bits(make: Callable[[], Any], dtype: torch.dtype, recipe: Recipe) -> None:
    model = converted(make().to(dtype), recipe)
    twin = copy.deepcopy(model)
    (entry,) = fuse(model).fused
    w1, w2, w3 = sorted(dict(model.named_parameters()))
    act = getattr(model, "act_name", "silu")
    assert entry.computes == f"{w2}({act}({w1}(x)) * {w3}(x)) by expert"
    assert model._fused_pattern.ends == isinstance(model, Ends)
    assert_bits(results(model), results(twin))


class Joint(Sizes):
    """One stack makes gate and up."""

    NAMES = ("gate_up_proj", "down_proj")

    def __init__(self) -> None:
        nn.Module.__init__(self)
        whole, self.act_name = Sizes(), "silu"
        both = torch.cat([plain(whole.w1), plain(whole.w3)], 1)
        for name, stack in zip(self.NAMES, (both, whole.w2), strict=True):
            self.register_parameter(name, nn.Parameter(stack))

    def forward(self, x: Tensor, groups: Tensor) -> Tensor:
        offs = self.offs(groups)
        first, last = (self._parameters[name] for name in self.NAMES)
        both = torch._grouped_mm(x, first.transpose(1, 2), offs)
        h = self.hidden(*both.chunk(2, -1))
        return torch._grouped_mm(h, last.transpose(1, 2), offs)


class Flagged(Joint):
    """Has two flags of transformers' classes, which route rows."""

    def __init__(self) -> None:
        super().__init__()
        self.has_gate, self.is_transposed = True, False


class Projections(Sizes):
    NAMES = ("gate_proj", "up_proj", "down_proj")


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


class Local(Sizes):
    """This rank's experts."""

    def plain(self, stack: Any) -> Any:
        return stack.to_local() if isinstance(stack, DTensor) else stack


class Whole(Sizes):
    """The experts of all ranks."""

    def plain(self, stack: Any) -> Any:
        return stack.full_tensor() if isinstance(stack, DTensor) else stack


class Doubled(Sizes):
    """Something else, where they are cut."""

    def plain(self, stack: Any) -> Any:
        return stack.to_local() * 2 if isinstance(stack, DTensor) else stack


def built(kind: type[Sizes]) -> Any:
    return converted(kind(experts=4, hidden=256))


def run(model: Sizes) -> tuple[list[Tensor], bool]:
    """The output and all gradients; whether it ran as one function."""
    x = randn(90, K, seed=dist.get_rank(), grad=True)
    sizes = (30, 0, 20, 40) if isinstance(model, Whole) else (40, 50)
    with Trace() as trace:
        y = model(x, torch.tensor(sizes, dtype=torch.int32))
    y.backward(randn(*y.shape, seed=9))
    grads = [p.grad.to_local() for p in model.parameters()]
    return [y.detach(), x.grad, *grads], trace.count("blocktensor.gated ") == 1


@pytest.mark.parametrize("kind", [Local, Whole, Doubled], ids=lambda kind: kind.__name__)
@on_ranks(2, gpus=())
def test_stacks_that_are_cut(world: int, device: str, kind: type[Sizes]) -> None:
    mesh = mesh_of(world, device)
    model, twin = (cut(built(kind), mesh) for _ in range(2))
    report = fuse(model)
    assert len(report.fused) == (kind is Local)
    for entry in report.left_alone:
        assert entry.reason.startswith("with stacks that are DTensors it ")
    (made, runs_fused), (wanted, _) = run(model), run(twin)
    assert runs_fused == (kind is Local)
    assert_bits(made, wanted)
    if kind is not Whole:  # as well after the fusion
        later = built(kind)
        assert fuse(later).left_alone == ()
        made, runs_fused = run(cut(later, mesh))
        assert runs_fused == (kind is Local)
        assert_bits(made, wanted)


@on_ranks(2, gpus=())
def test_stacks_that_fsdp_alone_has_cut(world: int, device: str) -> None:
    """It gathers them: a forward that takes no local parts of DTensors gets none."""
    model, twin = built(Sizes), built(Sizes)
    for each in (model, twin):
        fully_shard(each, mesh=mesh_of(world, device))
    assert fuse(model).left_alone == ()
    batch = randn(20, K), torch.tensor([5, 0, 3, 12], dtype=torch.int32)
    assert count_runs(model, *batch) == 1
    with torch.no_grad():
        assert torch.equal(model(*batch), twin(*batch))


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
