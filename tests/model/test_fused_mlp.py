"""A fused MLP in its surroundings: hooks, adapters, sharding, checkpointing, compilers."""

from __future__ import annotations

import copy
import functools
import pickle
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

from blocktensor import Recipe, convert, freeze, fuse, share_inputs, unfreeze, unfuse
from tests.support.compiling import afresh, graphs  # noqa: F401
from tests.support.gated import assert_bits
from tests.support.mlps import HIDDEN, MLP, K, Model, X, converted, fused_in, results, with_adapter
from tests.support.models import Trace, plain
from tests.support.ranks import on_ranks

MLP_NAMES = ["layers.0.mlp", "layers.1.mlp"]


def fused(model: nn.Module | None = None) -> tuple[nn.Module, nn.Module]:
    """A fused model, and its twin that is not."""
    model = converted(Model()) if model is None else model
    twin = copy.deepcopy(model)
    assert fuse(model).left_alone == ()
    return model, twin


def runs_fused(model: nn.Module) -> int:
    """How many MLPs of a model did run fused."""
    with Trace() as trace, torch.no_grad():
        model(X.to(next(model.parameters()).dtype))
    return trace.count("blocktensor.gated ")


@pytest.mark.parametrize("which", ["gate_proj", "up_proj", "down_proj", "act_fn"])
@pytest.mark.parametrize("kind", ["forward", "forward_pre", "full_backward", "full_backward_pre"])
def test_hooks_on_inner_modules_that_come_later_run(kind: str, which: str) -> None:
    model, twin = fused()
    seen: list[str] = []
    target = getattr(model.layers[0]["mlp"], which)
    handle = getattr(target, f"register_{kind}_hook")(lambda *_: seen.append(kind) or None)
    assert_bits(results(model), results(twin))
    assert seen == [kind]
    assert runs_fused(model) == 1
    handle.remove()
    assert runs_fused(model) == 2


def test_hooks_for_all_modules_run() -> None:
    model, _ = fused()
    seen: list[nn.Module] = []
    handle = nn.modules.module.register_module_forward_hook(lambda m, *_: seen.append(m) or None)
    try:
        model(X.bfloat16())
    finally:
        handle.remove()
    assert model.layers[1]["mlp"].up_proj in seen
    assert runs_fused(model) == 2


def test_hooks_on_the_mlp_itself_run() -> None:
    model, twin = fused()
    for each in (model, twin):
        mlp = each.layers[0]["mlp"]
        mlp.register_forward_pre_hook(lambda m, args: (args[0] * 2,))
        mlp.register_forward_hook(lambda m, args, y: y * 3)
    assert_bits(results(model), results(twin))
    assert runs_fused(model) == 2


def test_modules_that_are_replaced_later() -> None:
    def tanh(mlp: Any) -> None:
        mlp.act_fn = nn.Tanh()

    def plain_up(mlp: Any) -> None:
        weight = plain(mlp.up_proj.weight)
        mlp.up_proj = nn.Linear(K, HIDDEN, bias=False, dtype=torch.bfloat16)
        mlp.up_proj.weight = nn.Parameter(weight * 2)

    def other_weight(mlp: Any) -> None:
        mlp.up_proj.weight = nn.Parameter(plain(mlp.up_proj.weight) * 2)

    def other_forward(mlp: Any) -> None:
        mlp.up_proj.forward = lambda x: torch.zeros_like(mlp.gate_proj(x))

    class Doubled(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * 2

    def other_class(mlp: Any) -> None:
        mlp.up_proj.__class__ = Doubled

    for change in (tanh, plain_up, other_weight, other_forward, other_class):
        model, twin = fused()
        for each in (model, twin):
            change(each.layers[0]["mlp"])
        with torch.no_grad():
            x = X.bfloat16()
            assert torch.equal(model(x), twin(x))
        assert runs_fused(model) == 1


def scaled(forward: Any) -> Any:
    return lambda self, x: forward(self, x) * 2


@pytest.mark.parametrize("kind", [MLP, nn.Linear, nn.SiLU])
@pytest.mark.parametrize("name", ["forward", "__call__"])
def test_code_of_a_class_that_is_replaced_later_runs(
    monkeypatch: pytest.MonkeyPatch, kind: type, name: str
) -> None:
    if (kind, name) == (MLP, "__call__"):
        return  # that calls the forward of the fused MLP
    (model, twin), x = fused(), X.bfloat16()
    early = copy.deepcopy(model)
    with monkeypatch.context() as patched:
        patched.setattr(kind, name, scaled(getattr(kind, name)))
        late = copy.deepcopy(model)
        for each in (model, early, late, pickle.loads(pickle.dumps(model))):
            assert_bits(results(each), results(twin))
            assert runs_fused(each) == 0
        compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
        if name == "forward":  # Dynamo calls modules in its own way
            assert torch.equal(compiled(x), twin(x))
    for each in (model, early, late):
        assert_bits(results(each), results(twin))
        assert runs_fused(each) == 2
    assert torch.equal(compiled(x), twin(x))


def test_a_pickle_of_other_code_runs_as_written(monkeypatch: pytest.MonkeyPatch) -> None:
    (model, twin), x = fused(), X.bfloat16()
    pickled = pickle.dumps(model)
    monkeypatch.setattr(MLP, "forward", scaled(MLP.forward))
    made = pickle.loads(pickled)
    assert torch.equal(made(x), twin(x))
    assert runs_fused(made) == 0


class Halves(TorchFunctionMode):
    """Changes what an op of the MLP computes."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        return made / 2 if func in (F.silu, F.linear) else made


def test_torch_function_modes_see_the_ops_of_the_mlp() -> None:
    model, twin = fused()
    with Halves():
        assert_bits(results(model), results(twin))
        assert runs_fused(model) == 0
    with torch.device("cpu"):  # a mode too, which changes where tensors are made
        assert_bits(results(model), results(twin))
        assert runs_fused(model) == 2


@pytest.mark.parametrize("name", ["gate_proj", "down_proj"])
@pytest.mark.parametrize(
    "recipe", [Recipe(scale="power_of_two"), Recipe(scale="fp32", wgrad_input="high_precision")]
)
def test_a_linear_that_gets_another_recipe_later(name: str, recipe: Recipe) -> None:
    model, twin = fused()
    for each in (model, twin):
        convert(getattr(each.layers[0]["mlp"], name), recipe, auto_filter_small_kn=False)
    assert_bits(results(model), results(twin))
    assert runs_fused(model) == 1
    report = fuse(model)
    assert [entry.name for entry in report.left_alone] == ["layers.0.mlp"]
    for each in (model, twin):  # all of them, and fused again
        convert(each.layers[0]["mlp"], Recipe(scale="power_of_two"), auto_filter_small_kn=False)
    assert fuse(model).left_alone == ()
    assert_bits(results(model), results(twin))
    assert runs_fused(model) == 2


def test_other_arguments_run_as_written() -> None:
    class Takes(MLP):
        def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
            return super().forward(x) * scale

    (model, twin), x = fused(converted(Takes())), X.bfloat16()
    assert torch.equal(model(x, 2.0), twin(x) * 2)
    assert torch.equal(model(x=x), twin(x))
    assert torch.equal(model(x, scale=0.5), twin(x) * 0.5)
    assert runs_fused(model) == 1


@pytest.mark.parametrize("first", ["adapters", "fuse"])
def test_adapters(first: str) -> None:
    model = converted(Model())
    wanted = with_adapter(copy.deepcopy(model), "up_proj")
    if first == "fuse":
        fuse(model)
        made = with_adapter(model, "up_proj")
    else:
        made = with_adapter(model, "up_proj")
        report = fuse(made)
        assert [entry.reason for entry in report.left_alone] == [
            "up_proj is a Linear, not an nn.Linear"
        ] * 2
    with torch.no_grad():
        assert torch.equal(made(X.bfloat16()), wanted(X.bfloat16()))
    assert runs_fused(made) == 0


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_activation_checkpointing(use_reentrant: bool) -> None:
    model, twin = fused()
    run = functools.partial(checkpoint, model, use_reentrant=use_reentrant)
    assert_bits(results(model, run=run), results(twin))


def test_autocast_and_fp32_masters() -> None:
    model, twin = fused(converted(Model(), dtype=torch.float32))
    assert_bits(results(model), results(twin))
    with torch.autocast("cpu", torch.bfloat16):
        assert_bits(results(model), results(twin))
        assert runs_fused(model) == 2


def test_frozen_thawed_and_main_grads() -> None:
    model, twin = fused()
    freeze(model), freeze(twin)
    assert_bits(results(model), results(twin))
    assert runs_fused(model) == 2
    unfreeze(model), unfreeze(twin)
    for each in (model, twin):
        for module in each.modules():
            if isinstance(module, nn.Linear):
                module.weight.main_grad = torch.ones(module.weight.shape)
    assert_bits(results(model), results(twin))
    for a, b in zip(model.modules(), twin.modules(), strict=True):
        if isinstance(a, nn.Linear):
            assert torch.equal(a.weight.main_grad, b.weight.main_grad)
            assert not torch.equal(a.weight.main_grad, torch.ones(a.weight.shape))


# Dynamo itself instantiates the Functions that it traces.
@pytest.mark.filterwarnings("ignore:.*should not be instantiated.*:DeprecationWarning")
@pytest.mark.parametrize("shared", [False, True])
def test_compiled(shared: bool) -> None:
    model, twin = fused()
    if shared:
        share_inputs(model)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    for _ in range(2):
        assert_bits(results(model, run=compiled), results(twin))
    assert graphs() == 1
    unfuse(model)
    assert_bits(results(model, run=compiled), results(twin))


def shard(model: Any, order: str) -> None:
    """Blocks sharded, and where ``order`` says so the MLPs by themselves."""
    for layer in model.layers:
        if "mlp" in order:
            fully_shard(layer["mlp"])
    fully_shard(model)


def steps(model: nn.Module, count: int = 3) -> list[Tensor]:
    optimizer, ys = torch.optim.SGD(model.parameters(), lr=0.1), []
    for i in range(count):
        optimizer.zero_grad()
        y = model((X * (i + 1)).bfloat16())
        y.square().mean().backward()
        optimizer.step()
        ys.append(y.detach())
    return ys


@pytest.mark.parametrize("order", ["fuse, shard", "shard, fuse", "fuse, shard mlp"])
@on_ranks(2)
def test_fsdp2(world: int, device: str, order: str) -> None:
    model = converted(Model(), Recipe())
    twin = copy.deepcopy(model)
    shard(twin, order)
    if order.startswith("fuse"):
        fuse(model)
    shard(model, order)
    if order.endswith("fuse"):
        assert fuse(model).left_alone == ()
    assert fused_in(model) == MLP_NAMES
    wanted = steps(twin)
    for a, b in zip(steps(model), wanted, strict=True):
        assert torch.equal(a, b)
    assert runs_fused(model) == 2
    assert unfuse(model) == tuple(MLP_NAMES)
    assert fused_in(model) == []
    assert runs_fused(model) == 0
    model(X.bfloat16()).sum().backward()
