"""Fused experts in their surroundings: other arguments, sharding, checkpointing, compilers."""

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
from torch.utils.checkpoint import checkpoint

from blocktensor import BlockwiseFP8Weight, Recipe, audit, convert, fuse, unfuse
from tests.support.compiling import afresh, graphs  # noqa: F401
from tests.support.expert_parallel import converted as converted_titan
from tests.support.expert_parallel import cut, experts_of
from tests.support.fused_experts import (
    COUNTS,
    EXPERTS,
    HIDDEN,
    ROWS,
    Ends,
    K,
    Sizes,
    fused_in,
    groups_of,
    results,
)
from tests.support.gated import assert_bits
from tests.support.models import Trace, randn
from tests.support.ranks import on_ranks
from tests.support.sharded import mesh_of


def fused(kind: type[Sizes] = Sizes, **options: Any) -> tuple[Any, Any]:
    """Fused experts, and their twins that are not."""
    model = kind()
    convert(model, auto_filter_small_kn=False, experts={"*": ("w1", "w3", "w2")})
    twin = copy.deepcopy(model)
    assert fuse(model, **options).left_alone == ()
    return model, twin


def runs_fused(model: nn.Module, *args: Any, **kwargs: Any) -> bool:
    with Trace() as trace, torch.no_grad():
        model(*(args or (randn(ROWS, K), groups_of())), **kwargs)
    return trace.count("blocktensor.gated ") == 1


def test_a_stack_that_gets_another_recipe_later() -> None:
    model, twin = fused()
    for each in (model, twin):
        w = each.w3.master.clone()
        each.w3 = nn.Parameter(BlockwiseFP8Weight(w, Recipe(wgrad_input="128x128")))
    assert torch.equal(model(randn(ROWS, K), groups_of()), twin(randn(ROWS, K), groups_of()))
    assert not runs_fused(model)


def test_a_forward_of_the_class_that_is_replaced_later_runs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (model, twin), x = fused(), (randn(ROWS, K), groups_of())
    forward = Sizes.forward
    with monkeypatch.context() as patched:
        patched.setattr(Sizes, "forward", lambda self, *args: forward(self, *args) * 2)
        assert torch.equal(model(*x), twin(*x))
        assert not runs_fused(model)
    assert torch.equal(model(*x), twin(*x))
    assert runs_fused(model)


def test_other_arguments_get_the_forward_as_written() -> None:
    model, twin = fused()
    x, groups = randn(ROWS, K), groups_of()
    assert runs_fused(model, x, groups)
    assert torch.equal(model(x.float(), groups), twin(x.float(), groups))
    assert not runs_fused(model, x.float(), groups)
    assert not runs_fused(model, x, groups=groups)
    model, _ = fused(Ends)
    ends = groups_of(ends=True)
    assert runs_fused(model, x, ends)
    with pytest.raises(TypeError, match=r"offs has dtype torch\.int64"):
        model(x, ends.long())


def test_what_changes_later() -> None:
    model, _ = fused()
    handle = nn.modules.module.register_module_forward_hook(lambda *_: None)
    assert not runs_fused(model)
    handle.remove()
    assert runs_fused(model)
    model.w3 = nn.Parameter(model.w3.master.detach().clone())
    assert not runs_fused(model)

    class Act(Sizes):
        act_fn: Any = None

        def act(self, x: Tensor) -> Tensor:
            made: Tensor = (self.act_fn or F.silu)(x)
            return made

    model, twin = fused(Act)
    assert runs_fused(model)
    model.act_fn = twin.act_fn = F.gelu
    assert_bits(results(model), results(twin))


def test_undone_and_copied() -> None:
    model, twin = fused()
    wanted = results(twin)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert fused_in(other) == [""]
        assert_bits(results(other), wanted)
        assert runs_fused(other)
    assert isinstance(model, Sizes)
    assert model.state_dict().keys() == twin.state_dict().keys()
    assert unfuse(model) == ("",)
    assert type(model) is Sizes and not runs_fused(model)


@pytest.mark.parametrize("store_fp8", [False, True])
@pytest.mark.parametrize("recompute", [False, True])
def test_what_is_saved(recompute: bool, store_fp8: bool) -> None:
    model, _ = fused(recompute=recompute, store_fp8=store_fp8)
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        model(randn(ROWS, K, grad=True), groups_of())
    rows = [t.dtype for t in saved if t.ndim == 2 and HIDDEN in t.shape]
    of_gate_and_up = 2 if store_fp8 else 0
    assert rows.count(torch.bfloat16) == 2 - of_gate_and_up
    assert rows.count(torch.float8_e4m3fn) == of_gate_and_up + (0 if recompute else 1)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_activation_checkpointing(use_reentrant: bool) -> None:
    model, twin = fused()
    run = functools.partial(checkpoint, model, use_reentrant=use_reentrant)
    assert_bits(results(model, run=run), results(twin))


def test_autocast() -> None:
    model, twin = fused()
    with torch.autocast("cpu", torch.bfloat16):
        assert_bits(results(model), results(twin))
        assert runs_fused(model)


def test_audit_shows_the_same_products() -> None:
    model, twin = fused()
    x = randn(ROWS, K, grad=True)
    reports = [audit(each, x, groups_of()) for each in (model, twin)]
    assert reports[0].fp8_share == reports[1].fp8_share == 1.0


# Dynamo itself instantiates the Functions that it traces.
@pytest.mark.filterwarnings("ignore:.*should not be instantiated.*:DeprecationWarning")
def test_compiled() -> None:
    model, twin = fused()
    seen: list[str] = []

    def backend(graph: Any, example: Any) -> Any:
        from torch._dynamo.backends.debugging import aot_eager

        seen.append(str(graph.graph))
        return aot_eager(graph, example)

    compiled = torch.compile(model, fullgraph=True, backend=backend)
    for _ in range(2):
        assert_bits(results(model, run=compiled), results(twin))
    assert graphs() == 1
    assert "_gated_mlp_whole" in seen[0]


@on_ranks(2)
def test_fsdp2(world: int, device: str) -> None:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    x, grad = (randn(ROWS, K, seed=i, device=device) for i in range(2))
    groups = groups_of().to(device)
    made = []
    for each in fused():
        each.to(device)
        fully_shard(each, mp_policy=policy)
        optimizer = torch.optim.SGD(each.parameters(), lr=0.1)
        for _ in range(2):
            y = each(x, groups)
            y.backward(grad)
            optimizer.step()
            optimizer.zero_grad()
        made.append(y.detach())
    assert torch.equal(*made)


@on_ranks(2, gpus=())
def test_expert_parallel_stacks(world: int, device: str) -> None:
    """Each rank runs its own experts, whose stacks are DTensors."""
    mesh = mesh_of(world, device)
    sizes = torch.tensor([70, 0, 129]) + mesh.get_local_rank()
    x, made = randn(ROWS, K, seed=mesh.get_local_rank()), []
    for is_fused in (True, False):
        model = experts_of(6, K, 256, device, torch.bfloat16)
        cut(model, mesh)
        converted_titan(model)
        if is_fused:
            assert fuse(model).left_alone == ()
            assert runs_fused(model, x, sizes)
        leaf = x.clone().requires_grad_()
        y = model(leaf, sizes)
        y.backward(torch.ones_like(y))
        grads = [p.grad.to_local() for p in model.parameters()]
        made.append([y.detach(), leaf.grad, *grads])
    assert_bits(*made)


def test_groups_of_other_steps() -> None:
    """No size is read on the host: rows, groups and empty experts may change."""
    model, twin = fused()
    for counts in ((0,) * EXPERTS, (ROWS, 0, 0, 0, 0), COUNTS):
        groups = torch.tensor(counts, dtype=torch.int32)
        with torch.no_grad():
            x = randn(ROWS, K)
            assert torch.equal(model(x, groups), twin(x, groups))


def test_recipes_that_read_high_precision_run_as_written() -> None:
    model = Sizes()
    recipe = Recipe(wgrad_input="high_precision")
    convert(model, recipe, auto_filter_small_kn=False, experts={"*": ("w1", "w3", "w2")})
    assert fuse(model).fused == ()
    assert not runs_fused(model)
