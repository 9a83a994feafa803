"""What every fused module keeps in its surroundings: its bits, and all that others do to it."""

from __future__ import annotations

import copy
import functools
import pickle
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

from blocktensor import audit, freeze, fuse, share_inputs, unfreeze, unfuse
from blocktensor.fusion.fused_class import fused_modules
from tests.support.compiling import afresh, graphs  # noqa: F401
from tests.support.fused_kinds import COPIES, KINDS, Kind
from tests.support.gated import assert_bits
from tests.support.mlps import HIDDEN, MLP, Model
from tests.support.mlps import converted as converted_mlps
from tests.support.ranks import on_ranks

pytest.importorskip("transformers")


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> Kind:
    return KINDS[request.param]


def test_bits(kind: Kind, device: torch.device) -> None:
    model, twin = (x.to(device) for x in kind.fused())
    assert_bits(kind.results(model), kind.results(twin))
    assert kind.fused_runs(model) == kind.runs
    assert kind.fused_runs(twin) == 0


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_activation_checkpointing(kind: Kind, use_reentrant: bool) -> None:
    model, twin = kind.fused()
    run = functools.partial(checkpoint, model, use_reentrant=use_reentrant)
    assert_bits(kind.results(model, run), kind.results(twin))


WAYS = [
    (name, dtype, autocast)
    for name in KINDS
    for dtype in (torch.bfloat16, torch.float16, torch.float32)
    for autocast in (None, torch.bfloat16, torch.float16)
    # torch's layer norm mixes no dtypes, and other experts convert to bf16
    if name in ("norm", "routed")
    or torch.float16 not in (dtype, autocast)
    or (name == "experts" and dtype != torch.float16)
]


@pytest.mark.parametrize(("name", "dtype", "autocast"), WAYS)
def test_dtypes_and_autocast(name: str, dtype: torch.dtype, autocast: Any) -> None:
    kind = KINDS[name]
    model, twin = kind.fused(dtype)
    runs = kind.runs - (kind.in_bf16 if autocast or dtype == torch.float32 else 0)
    if name == "routed" and autocast and dtype not in (autocast, torch.float32):
        runs = 0  # h is rounded to the dtype of the stacks
    if name == "experts" and autocast == torch.float16:
        runs = 0  # h is rounded to bf16
    with torch.autocast("cpu", autocast, enabled=autocast is not None):
        assert_bits(kind.results(model), kind.results(twin))
        assert kind.fused_runs(model) == runs


@pytest.mark.parametrize("recompute", [False, True])
def test_audit_shows_the_same_products(kind: Kind, recompute: bool) -> None:
    reports = [audit(x, *kind.args(x)) for x in kind.fused(recompute=recompute)]
    ours, theirs = (
        (x.fp8_share, x.marked, sorted((e.kind, e.m, e.n, e.k, e.note) for e in x.entries))
        for x in reports
    )
    assert ours == theirs


def test_frozen_and_thawed(kind: Kind) -> None:
    model, twin = kind.fused()
    for change in (freeze, unfreeze):
        change(model), change(twin)
        assert_bits(kind.results(model), kind.results(twin))
        assert kind.fused_runs(model) == kind.runs


# Dynamo itself instantiates the Functions that it traces; transformers' experts as written.
@pytest.mark.filterwarnings("ignore:Dynamo detected a call to a:UserWarning")
@pytest.mark.filterwarnings("ignore:.*should not be instantiated.*:DeprecationWarning")
def test_compiled(kind: Kind) -> None:
    model, twin = kind.fused()
    for each in (model, twin):
        if hasattr(each, "layers"):
            del each.layers[1:]
    share_inputs(model)
    seen: list[int] = []

    def backend(graph: Any, example: Any) -> Any:
        from torch._dynamo.backends.debugging import aot_eager

        seen.append(sum("_gated_mlp_whole" in str(node.target) for node in graph.graph.nodes))
        return aot_eager(graph, example)

    compiled = torch.compile(model, fullgraph=True, backend=backend)
    for _ in range(2):
        assert_bits(kind.results(model, compiled), kind.results(twin))
    assert graphs() == 1
    assert seen == [1]
    with torch.no_grad():
        for _ in range(2):
            assert torch.equal(compiled(*kind.args(model)), twin(*kind.args(twin)))
            unfuse(model)


def trained(kind: Kind, model: nn.Module) -> Tensor:
    """The output of the second step."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        y = model(*kind.args(model))
        y.square().mean().backward()
        optimizer.step()
    return y.detach()


@pytest.mark.parametrize("order", ["fuse, shard", "shard, fuse", "fuse, shard it"])
@on_ranks(2)
def test_fsdp2(world: int, device: str, order: str) -> None:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    for name, kind in KINDS.items():
        dtype = torch.bfloat16 if name in ("mlp", "experts") else torch.float32
        model = kind.make(dtype).to(device)
        twin = copy.deepcopy(model)
        if order.startswith("fuse"):
            kind.fuse(model)
        for each in (model, twin):
            if order.endswith("it"):
                fully_shard(each.get_submodule(kind.module), mp_policy=policy)
            for layer in each.layers if "input_layernorm" in str(each) else ():
                fully_shard(layer, mp_policy=policy)
            if order.endswith("it") <= (kind.module != ""):
                fully_shard(each, mp_policy=policy)
        if order.endswith("fuse"):
            kind.fuse(model)
        assert torch.equal(trained(kind, model), trained(kind, twin))
        assert kind.fused_runs(model) == kind.runs
        assert len(unfuse(model)) == kind.runs
        assert kind.fused_runs(model) == 0
        kind.results(model)


# Copies, state, and back


@pytest.mark.parametrize("how", COPIES)
def test_copies_are_fused(kind: Kind, how: str) -> None:
    model, twin = kind.fused(recompute=True)
    made = COPIES[how](model)
    assert [x for x, _ in fused_modules(made)] == [x for x, _ in fused_modules(model)]
    assert_bits(kind.results(made), kind.results(twin))
    assert kind.fused_runs(made) == kind.runs
    assert len(unfuse(made)) == kind.runs
    assert kind.fused_runs(model) == kind.runs
    assert [type(x) for x in made.modules()] == [type(x) for x in twin.modules()]


def test_undone(kind: Kind) -> None:
    model, twin = kind.fused()
    for (name, one), other in zip(model.named_modules(), twin.modules(), strict=True):
        assert isinstance(one, type(other)), name
        assert (type(one).__name__, repr(one)) == (type(other).__name__, repr(other))
    assert model.state_dict().keys() == twin.state_dict().keys()
    part = model.get_submodule(kind.module)
    names = tuple(x for x, _ in fused_modules(part))
    assert "" in names and tuple(unfuse(part)) == names
    assert kind.fused_runs(model) == kind.runs - len(names)
    unfuse(model)
    assert unfuse(model) == []
    for one, other in zip(model.modules(), twin.modules(), strict=True):
        assert type(one) is type(other)
        assert vars(one).keys() == vars(other).keys()
    assert kind.fused_runs(model) == 0


def scaled(forward: Any) -> Any:
    return lambda self, *args: forward(self, *args) * 2


CODE: list[tuple[str, type | None, str]] = [
    *((name, None, "forward") for name in KINDS),  # of the module's own class
    *(("mlp", inner, name) for inner in (nn.Linear, nn.SiLU) for name in ("forward", "__call__")),
]


# transformers' experts as written
@pytest.mark.filterwarnings("ignore:Dynamo detected a call to a:UserWarning")
@pytest.mark.parametrize(("name", "of", "method"), CODE)
def test_code_of_a_class_that_is_replaced_later_runs(
    name: str, of: type | None, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind = KINDS[name]
    model, twin = kind.fused()
    early, pickled = copy.deepcopy(model), pickle.dumps(model)
    own: Any = of or type(twin.get_submodule(kind.module))
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    # other kinds are shown as written, and Dynamo calls modules in its own way
    compiles = name in ("mlp", "experts") and method == "forward"
    with monkeypatch.context() as patched:
        patched.setattr(own, method, scaled(getattr(own, method)))
        late, loaded = copy.deepcopy(model), pickle.loads(pickled)
        again = pickle.loads(pickle.dumps(model))
        for each in (model, early, late, loaded, again):
            assert_bits(kind.results(each), kind.results(twin))
            assert kind.fused_runs(each) == (kind.runs - kind.alike if of is None else 0)
        if compiles:
            assert torch.equal(compiled(*kind.args(model)), twin(*kind.args(twin)))
    for each in (model, early, late):
        assert_bits(kind.results(each), kind.results(twin))
        assert kind.fused_runs(each) == kind.runs
    if compiles:
        assert torch.equal(compiled(*kind.args(model)), twin(*kind.args(twin)))


def test_hooks_on_the_module_itself_run(kind: Kind) -> None:
    model, twin = kind.fused()
    for each in (model, twin):
        module = each.get_submodule(kind.module)
        module.register_forward_pre_hook(lambda m, args: (args[0] * 2, *args[1:]))
        module.register_forward_hook(lambda m, args, y: y * 3)
    assert_bits(kind.results(model), kind.results(twin))
    assert kind.fused_runs(model) == kind.runs


def test_hooks_for_all_modules_run(kind: Kind) -> None:
    model, _ = kind.fused()
    seen: list[nn.Module] = []
    handle = nn.modules.module.register_module_forward_hook(lambda m, *_: seen.append(m) or None)
    try:
        assert kind.fused_runs(model) == kind.in_bf16  # norms call no module
    finally:
        handle.remove()
    called = [m for m in model.modules() if not isinstance(m, nn.ModuleList | nn.ModuleDict)]
    assert set(called) <= set(seen)
    assert kind.fused_runs(model) == kind.runs


class Halves(TorchFunctionMode):
    """Changes what ops compute."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        return made / 2 if func in (F.silu, F.linear, torch.rsqrt) else made


def test_torch_function_modes_see_the_ops_of_the_module(kind: Kind) -> None:
    model, twin = kind.fused()
    with Halves():
        assert_bits(kind.results(model), kind.results(twin))
        assert kind.fused_runs(model) == 0
    with torch.device("cpu"):  # a mode too, which changes where tensors are made
        assert_bits(kind.results(model), kind.results(twin))
        assert kind.fused_runs(model) == kind.runs
        with Halves():
            assert_bits(kind.results(model), kind.results(twin))
            assert kind.fused_runs(model) == 0


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("name", ["mlp", "experts"])
def test_what_is_saved(name: str, recompute: bool) -> None:
    kind = KINDS[name]
    model, _ = kind.fused(recompute=recompute)
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        model(*kind.args(model))
    rows = [t.dtype for t in saved if type(t) is Tensor and t.ndim == 2 and HIDDEN in t.shape]
    assert rows.count(torch.bfloat16) == kind.runs * 2
    # of few rows backward computes h and both gradients at once
    of_h = not recompute and name == "experts"
    assert rows.count(torch.float8_e4m3fn) == kind.runs * of_h


def test_models_without_memory(kind: Kind) -> None:
    with torch.device("meta"):
        model = kind.make(torch.bfloat16)
    kind.fuse(model)
    assert all(p.is_meta for p in model.parameters())
    model.to_empty(device="cpu")
    twin = kind.make(torch.bfloat16)
    model.load_state_dict(twin.state_dict())
    for old, new in zip(twin.buffers(), model.buffers(), strict=True):
        new.copy_(old)
    assert_bits(kind.results(model), kind.results(twin))


def test_a_fused_module_takes_nothing_along() -> None:
    model, _ = KINDS["norm"].fused()
    norm = model.get_submodule("layers.0.input_layernorm")
    assert len(pickle.dumps(norm)) < 4 * 192 + 4000
    assert copy.deepcopy(norm)._modules == {}


def test_once_more() -> None:
    model = converted_mlps(Model())
    fuse(model)
    kinds = [type(each) for each in model.modules()]
    handle = model.layers[0]["mlp"].up_proj.register_forward_hook(lambda *_: None)
    assert [entry.name for entry in fuse(model, recompute=True).left_alone] == ["layers.0.mlp"]
    handle.remove()
    ((name, other),) = fused_modules(model)
    assert (name, other._fused_pattern.recompute) == ("layers.1.mlp", True)
    assert type(model.layers[0]["mlp"]) is MLP
    fuse(model)
    assert kinds == [type(each) for each in model.modules()]
