"""Weights that are written to in a forward, between two gathers, or before a backward."""

from __future__ import annotations

import copy
import datetime
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from blocktensor import convert
from blocktensor.sharding import ranks
from blocktensor.sharding.fsdp import amax_table
from tests.support.compiling import Traced
from tests.support.ranks import on_ranks, run
from tests.support.sharded import assert_equal, reductions, scale, step, whole
from tests.support.sharded_layers import (
    K,
    Teacher,
    assert_same_step,
    batch,
    body,
    evaluate,
    following,
    twins,
)


@on_ranks(1, 2, gpus=())
def test_a_teacher_that_is_written_inside_of_a_forward(
    mesh: DeviceMesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks agree once that this happens; then every forward reduces its amaxes again."""
    agreed: list[str] = []
    agree = amax_table.agree
    monkeypatch.setattr(amax_table, "agree", lambda *x: (agreed.append(x[0]), agree(*x)))
    model, single = following(mesh)
    optimizers = [torch.optim.SGD(m.student.parameters(), lr=1.0) for m in (model, single)]
    for number in range(3):
        assert_same_step(model, single, number)
        step(*optimizers)
        assert_equal(model.parameters(), single.parameters())
    assert reductions(model) == 2 * 3
    asked = "FP8 weights that a forward writes to before it gathers them"
    assert agreed == ["sharded FP8 weights", asked][: mesh.size()]
    # the rows of one rank alone, or uncounted
    for write in (lambda p: p.to_local().mul_(3), lambda p: p.to_local().view(-1).data.mul_(3)):
        model.follow = lambda write=write: mesh.get_local_rank() or write(model.shard)
        model.shard = None
        for part in (model.student, model.teacher, model):
            part.reshard()
        model.shard = model.teacher.weight
        before = whole(model.teacher.weight)
        found = evaluate(model)
        assert not torch.equal(before, whole(model.teacher.weight))
        single.follow = lambda: None
        with torch.no_grad():
            for p, q in zip(single.parameters(), model.parameters(), strict=True):
                p.copy_(whole(q))
        assert torch.equal(found, evaluate(single))


class Twice(nn.Module):
    """Runs one linear layer twice, and may write to its rows in between."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(K, K, bias=False)
        self.between: Callable[[], Any] = lambda: None

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        with torch.no_grad():
            self.between()
        z: Tensor = self.linear(y)
        return z


@on_ranks(1, 2, gpus=())
def test_rows_that_are_written_uncounted_between_two_gathers_of_a_forward(mesh: DeviceMesh) -> None:
    model, single = twins(mesh, Twice)
    rows = model.linear.weight.to_local().view(-1)
    model.between = lambda: rows.data.mul_(3)
    single.between = lambda: single.linear.weight.mul_(3)
    for _ in range(2):
        assert torch.equal(evaluate(model), evaluate(single))


def _written_on_one_rank(rank: int, world: int, folder: str) -> None:
    ranks.TIMEOUT = datetime.timedelta(seconds=1)
    model, _ = following(init_device_mesh("cpu", (world,)))
    weight, x = model.teacher.weight, batch(0).requires_grad_()
    write = lambda: rank and weight.to_local().mul_(2)  # noqa: E731
    if Path(folder).name == "in a forward":
        model.follow = write
        fails = lambda: model(x)  # noqa: E731
    else:
        fails = model(x).sum().backward
        with torch.no_grad():
            write()
    with pytest.raises(RuntimeError) as error:
        fails()
    Path(folder, str(rank)).write_text(str(error.value))
    os._exit(rank)  # the other one waits for it


@pytest.mark.parametrize(
    ("when", "error"),
    [
        (
            "in a forward",
            r"rank 1 waited 1 s for rank 0 to compare FP8 weights that a forward writes to before "
            r"it gathers them, of which it has teacher\.weight: write to the shards on all ranks, "
            r"or before the forward$",
        ),
        ("before a backward", "an FP8 weight that FSDP2 gathers was changed or moved on this rank"),
    ],
)
def test_one_rank_alone_writes(tmp_path: Path, when: str, error: str) -> None:
    """It raises, and so does the other one as soon as that has ended."""
    folder = tmp_path / when
    with pytest.raises(RuntimeError, match="exit code"):
        run(_written_on_one_rank, 2, folder)
    assert re.match(error, (folder / "1").read_text())
    assert (folder / "0").exists()


@on_ranks(2, gpus=())
def test_ranks_with_whole_weights_wait_for_nobody(mesh: DeviceMesh) -> None:
    """A replica may run a forward alone, and has scales of its own weights."""
    single = body()
    convert(single, skip_small=False, convert_head=True)
    model = replicate(copy.deepcopy(single), mesh=mesh)
    assert torch.equal(evaluate(model), evaluate(single))
    model.reshard()
    if mesh.get_local_rank() == 0:
        for weight in (model[0].weight, single[0].weight):
            with torch.no_grad():
                (weight if weight is single[0].weight else weight.to_local()).mul_(5)
        for _ in range(2):
            model.reshard()
            assert torch.equal(evaluate(model), evaluate(single))
    dist.barrier()
    assert torch.equal(evaluate(model), evaluate(single))


@on_ranks(2, gpus=())
def test_a_replica_that_writes_inside_of_its_forwards_alone(
    mesh: DeviceMesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has nothing to compare with the others, which do not write."""
    monkeypatch.setattr(ranks, "TIMEOUT", datetime.timedelta(seconds=1))
    single = Teacher()
    convert(single, skip_small=False)
    model: Any = copy.deepcopy(single)
    parts = (model.student, model.teacher, model)
    for part in parts:
        replicate(part, mesh=mesh)
    assert torch.equal(evaluate(model), evaluate(single))
    if mesh.get_local_rank() == 0:
        single.follow = lambda: single.teacher.weight.mul_(3)
        model.follow = lambda: shard.to_local().mul_(3)
        for _ in range(2):
            for part in parts:
                part.reshard()
            shard = model.teacher.weight
            assert torch.equal(evaluate(model), evaluate(single))
    dist.barrier()


# Writes that PyTorch does not count, between the reduction and a gather: NaN, on all ranks

UNSEEN: dict[str, Callable[[Any], Any]] = {
    "greater": lambda p: p.to_local().view(-1).data.mul_(3),
    "smaller": lambda p: p.to_local().view(-1).data.mul_(0.3),
    "some rows": lambda p: p.to_local().view(-1).data[-500:].add_(9),
    "numpy": lambda p: p._local_tensor.master.numpy().__imul__(2),
}


@pytest.mark.parametrize("write", UNSEEN)
@on_ranks(2, gpus=())
def test_writes_that_nobody_counts(mesh: DeviceMesh, write: str) -> None:
    for writes in ((0, 1), (1,)):
        model, _ = following(mesh)
        weight, is_mine = model.teacher.weight, mesh.get_local_rank() in writes
        change = lambda p=weight, mine=is_mine: mine and UNSEEN[write](p)  # noqa: E731
        model.follow = change
        assert evaluate(model).isnan().any()  # in the forward, before the gather
        model.follow = lambda: None
        assert evaluate(model).isfinite().all()
        x = batch(0).requires_grad_()
        y = model(x)
        change()
        y.sum().backward()
        assert x.grad.isnan().any()


@pytest.mark.parametrize("by", [1.5, 0.0])
@on_ranks(2, gpus=())
def test_a_compiled_block_whose_weight_changes_before_backward(mesh: DeviceMesh, by: float) -> None:
    """A traced backward cannot raise: its gradients are NaN."""
    model, _ = twins(mesh)
    model[1].__class__ = type("Compiled", (Traced, type(model[1])), {})
    model[1].compile(backend="aot_eager")  # others may keep a form of the weight
    x = batch(0).requires_grad_()
    y = model(x)
    scale(by, model[1].weight)
    y.sum().backward()
    assert x.grad.isnan().all()
