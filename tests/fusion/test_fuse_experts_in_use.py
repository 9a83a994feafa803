"""What may change around fused experts: arguments, groups, stacks, and who holds them."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from blocktensor import BlockwiseFP8Weight, Recipe, convert, fuse
from tests.support.expert_parallel import cut
from tests.support.fused_experts import (
    ROWS,
    Ends,
    K,
    Sizes,
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
    convert(model, skip_small=False, stacks={"*": ("w1", "w3", "w2")})
    twin = copy.deepcopy(model)
    assert fuse(model, **options).left_alone == ()
    return model, twin


def runs_fused(model: nn.Module, *args: Any, **kwargs: Any) -> bool:
    with Trace() as trace, torch.no_grad():
        model(*(args or (randn(ROWS, K), groups_of())), **kwargs)
    return trace.count("blocktensor.gated ") == 1


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
    class Act(Sizes):
        act_fn: Any = None

        def act(self, x: Tensor) -> Tensor:
            made: Tensor = (self.act_fn or F.silu)(x)
            return made

    def plain_stack(model: Any) -> None:
        model.w3 = nn.Parameter(model.w3.master.detach().clone())

    def other_recipe(model: Any) -> None:
        recipe = Recipe(wgrad_input="128x128")
        model.w3 = nn.Parameter(BlockwiseFP8Weight(model.w3.master.clone(), recipe))

    def other_activation(model: Any) -> None:
        model.act_fn = F.gelu

    for change in (plain_stack, other_recipe, other_activation):
        model, twin = fused(Act)
        assert runs_fused(model)
        for each in (model, twin):
            change(each)
        if change is not plain_stack:  # torch's own product reads the NaN of rows of no group
            assert_bits(results(model), results(twin))
        assert not runs_fused(model)


# Stacks that ranks have cut: the report says what runs

NAMES = {"": ("w1", "w3", "w2", "silu")}
STACKS = {"*": Sizes.NAMES}


class Taking(Sizes):
    """Experts that make plain stacks of DTensors, in the way of a subclass."""

    def plain(self, stack: Any) -> Tensor:
        raise NotImplementedError

    def forward(self, x: Tensor, groups: Tensor) -> Any:
        offs = self.offs(groups)
        stacks = [self._parameters[name] for name in self.NAMES]
        gate, up, down = (self.plain(x) if isinstance(x, DTensor) else x for x in stacks)

        def by(x: Tensor, w: Any) -> Tensor:
            return torch._grouped_mm(x.bfloat16(), w.bfloat16().transpose(-2, -1), offs=offs)

        return by(self.hidden(by(x, gate), by(x, up)), down)


class Local(Taking):
    """This rank's experts."""

    def plain(self, stack: Any) -> Tensor:
        made: Tensor = stack.to_local()
        return made


class Whole(Taking):
    """The experts of all ranks."""

    def plain(self, stack: Any) -> Tensor:
        made: Tensor = stack.full_tensor()
        return made


class Doubled(Taking):
    """Something else, where they are cut."""

    def plain(self, stack: Any) -> Tensor:
        made: Tensor = stack.to_local() * 2
        return made


def built(kind: type[Sizes]) -> Sizes:
    model = kind(experts=4, hidden=256)
    convert(model, stacks=STACKS, skip_small=False)
    return model


def run(model: Sizes) -> tuple[list[Tensor], bool]:
    """The output and all gradients; whether it ran as one function."""
    rank = dist.get_rank()
    x = randn(90, K, seed=rank, grad=True)
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
    report = fuse(model, experts=NAMES)
    assert len(report.fused) == (kind is Local)
    (made, runs_fused), (wanted, _) = run(model), run(twin)
    assert runs_fused == (kind is Local)
    assert_bits(made, wanted)
    for entry in report.left_alone:
        assert entry.reason.startswith("with stacks that are DTensors it ")


@on_ranks(2, gpus=())
def test_stacks_that_are_cut_after_the_fusion(world: int, device: str) -> None:
    mesh = mesh_of(world, device)
    for kind in (Local, Doubled):
        model, twin = built(kind), cut(built(kind), mesh)
        assert fuse(model, experts=NAMES).left_alone == ()
        (made, runs_fused), (wanted, _) = run(cut(model, mesh)), run(twin)
        assert runs_fused == (kind is Local)
        assert_bits(made, wanted)


@on_ranks(2, gpus=())
def test_stacks_that_fsdp_alone_has_cut(world: int, device: str) -> None:
    """It gathers them: a forward that takes no local parts of DTensors gets none."""
    model, twin = built(Sizes), built(Sizes)
    for each in (model, twin):
        fully_shard(each, mesh=mesh_of(world, device))
    assert fuse(model, experts=NAMES).left_alone == ()
    x, groups = randn(20, K), torch.tensor([5, 0, 3, 12], dtype=torch.int32)
    with Trace() as trace, torch.no_grad():
        y = model(x, groups)
    assert trace.count("blocktensor.gated ") == 1
    with torch.no_grad():
        assert torch.equal(y, twin(x, groups))
