"""What a library must know of stacks that ranks share: reports, checkpoints, optimizers, writes."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import blocktensor
from blocktensor import BlockwiseFP8Tensor, BlockwiseFP8Weight, Recipe, convert, freeze, unfreeze
from tests.support import compiling
from tests.support.compiling import assert_as_eager, instantiates
from tests.support.expert_parallel import converted, cut, experts_of, local_values, step_of
from tests.support.models import randn
from tests.support.ranks import on_ranks, shared_mesh
from tests.support.sharded import assert_equal, local_kinds, scale, step
from tests.support.sharded_checkpoints import assert_read_by

K, N = 192, 256
FLOAT = torch.float32
SIZES = torch.tensor([20, 20])


def fresh(count: int = 4, recipe: Recipe | None = None) -> nn.Module:
    return converted(experts_of(count), recipe)


@on_ranks(2, gpus=())
def test_other_parts_of_the_library_know_cut_stacks(mesh: DeviceMesh) -> None:
    model = cut(experts_of(4), mesh)
    assert_expected_inline(
        "\n".join(str(convert(model, skip_small=False)).splitlines()[2:]),
        """\
w*_EFD (2)  4x256x192  float32  66.7%  fp8      trainable (experts, E x N x K: E=4, N=256, K=192; on this rank 2 x 256 x 192)
w2_EDF      4x192x256  float32  33.3%  fp8      trainable (experts, E x N x K: E=4, N=192, K=256; on this rank 2 x 192 x 256)
3 converted, 0 skipped; 100.0% of 589,824 parameters in FP8; 1.1 MiB before, 1.4 MiB with FP8 forms""",  # noqa: E501
    )
    assert {p.sizes for p in blocktensor.explain(model, tokens=64).matmuls} == {
        "64 x 256 x 192 in 2 groups",
        "64 x 192 x 256 in 2 groups",
        "256 x 192 x 64 in 2 groups",
        "192 x 256 x 64 in 2 groups",
    }
    assert sum(p.to_local().master.nbytes for p in model.parameters()) == 3 * 2 * K * N * 4
    assert "FP8: 100.0% of FLOPs" in str(blocktensor.audit(model, randn(40, K), SIZES))
    wanted = step_of(model)

    state = model.state_dict()
    assert {type(x._local_tensor) for x in state.values()} == {Tensor}
    other = converted(cut(experts_of(4), mesh))
    scale(0, *other.parameters())
    other.load_state_dict(state)
    assert torch.equal(step_of(other), wanted)
    other.load_state_dict({name: x.clone() * 2 for name, x in state.items()}, assign=True)
    assert torch.equal(local_values(other.w1_EFD), 2 * local_values(model.w1_EFD))
    for made in (other, copy.deepcopy(other), other.bfloat16()):
        assert local_kinds(made) == {BlockwiseFP8Weight}

    convert(model, Recipe(scale="power_of_two"), skip_small=False)
    assert model.w1_EFD._local_tensor.recipe.scale == "power_of_two"
    wanted = step_of(model)
    assert freeze(model) == ["w1_EFD", "w2_EDF", "w3_EFD"]
    assert local_kinds(model) == {BlockwiseFP8Tensor}
    assert not any(p.requires_grad for p in model.parameters())
    assert torch.equal(step_of(model), wanted)
    unfreeze(model)
    assert local_kinds(model) == {BlockwiseFP8Weight}
    frozen = experts_of(4).requires_grad_(False)
    assert local_kinds(converted(cut(frozen, mesh))) == {BlockwiseFP8Tensor}


@on_ranks(2, gpus=())
def test_audit_marks_products_with_the_values_of_a_cut_stack(mesh: DeviceMesh) -> None:
    class Around(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.experts = cut(converted(experts_of(4, dtype=torch.bfloat16)), mesh)

        def forward(self, x: Tensor) -> Tensor:
            return x @ self.experts.w1_EFD.to_local().high_precision()[0].t()

    audit = blocktensor.audit(Around(), randn(40, K))
    assert "reads the master of experts.w" in str(audit)
    assert len(audit.marked) == len(audit.entries) == 2


@on_ranks(2, gpus=())
def test_optimizers_and_clipping(mesh: DeviceMesh) -> None:
    for make in (
        lambda ps: torch.optim.AdamW(ps, lr=1e-2, foreach=True),
        lambda ps: torch.optim.AdamW(ps, lr=1e-2, foreach=False),
        lambda ps: torch.optim.AdamW(ps, lr=1e-2, fused=True),
        lambda ps: torch.optim.SGD(ps, lr=1e-2, momentum=0.9),
    ):
        single = fresh()
        model = cut(copy.deepcopy(single), mesh)
        optimizers = [make(m.parameters()) for m in (model, single)]
        for seed in range(2):
            for p, q in zip(model.parameters(), single.parameters(), strict=True):
                q.grad = randn(*q.shape, seed=seed, dtype=FLOAT)
                p.grad = distribute_tensor(q.grad, mesh, [Shard(0)])
            norms = [nn.utils.clip_grad_norm_(m.parameters(), 1.0) for m in (model, single)]
            torch.testing.assert_close(norms[0].full_tensor(), norms[1], rtol=1e-5, atol=0)
            for p, q in zip(model.parameters(), single.parameters(), strict=True):
                q.grad = p.grad.full_tensor()
            step(*optimizers)
        assert_equal(model.parameters(), single.parameters())
        mine = [q.master.chunk(2)[mesh.get_local_rank()] for q in single.parameters()]
        assert_equal(map(local_values, model.parameters()), mine)


def by_sgd(p: Any) -> None:
    p.grad = torch.ones_like(p.detach())
    torch.optim.SGD([p], lr=0.5).step()
    p.grad = None


WRITES: dict[str, Callable[[Any], Any]] = {
    "in place": lambda p: p.mul_(2),
    ".data": lambda p: p.data.mul_(2),
    "detached": lambda p: p.detach().mul_(2),
    "_local_tensor": lambda p: p._local_tensor.mul_(2),
    "_local_tensor.data": lambda p: p._local_tensor.data.mul_(2),
    "to_local()": lambda p: p.to_local().mul_(2),
    "to_local().data": lambda p: p.to_local().data.mul_(2),
    "master": lambda p: p._local_tensor.master.mul_(2),
    "an optimizer": by_sgd,
    "copy_": lambda p: p.copy_(p * 2),
}


@on_ranks(2, gpus=())
def test_no_write_to_a_cut_stack_leaves_its_cast_stale(mesh: DeviceMesh) -> None:
    for name, write in WRITES.items():
        model = cut(fresh(2), mesh)
        before = step_of(model)
        model.zero_grad()
        other = cut(experts_of(2), mesh)
        with torch.no_grad():
            for p, q in zip(other.parameters(), model.parameters(), strict=True):
                write(q)
                p.to_local().copy_(local_values(q))
        got = step_of(model)
        assert torch.equal(got, step_of(converted(other))), name
        assert not torch.equal(got, before), name
    y = model(randn(20, K, grad=True), torch.tensor([20]))
    scale(2, model.w1_EFD)
    with pytest.raises(RuntimeError, match="modified by an in-place operation between a forward"):
        y.sum().backward()


@instantiates
@pytest.mark.usefixtures("group")
def test_compiled_experts() -> None:
    experts: Any = cut(fresh(3), init_device_mesh("cpu", (1,)))
    sizes = torch.tensor([20, 0, 13])
    with compiling.fresh():
        assert_as_eager(lambda x: experts(x, sizes), randn(33, K), of=[experts])


@pytest.mark.filterwarnings("ignore:While redistributing")
@on_ranks(4, gpus=())
def test_who_reads_a_checkpoint(mesh: DeviceMesh, tmp_path: Path) -> None:
    """Written from 4 ranks; read by experts on 2 x 2, under FSDP2, whole, and by plain ones."""
    both = shared_mesh("cpu", 2, 2, names=("data", "expert"))

    def train(model: nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> None:
        for p in model.parameters():
            p.grad = randn(4, *p.shape[1:], seed=seed, dtype=FLOAT)
            if isinstance(p, DTensor):
                p.grad = distribute_tensor(p.grad, p.device_mesh, p.placements)
        step(optimizer)

    others = (
        lambda: cut(fresh(), both["expert"]),
        lambda: fully_shard(cut(fresh(), both["expert"]), mesh=both["data"]),
        fresh,
        lambda: cut(experts_of(4), mesh),
    )
    assert_read_by(others, cut(fresh(), mesh), train, tmp_path)
