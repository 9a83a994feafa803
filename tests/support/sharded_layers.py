"""Linear layers under FSDP2 and a copy that is whole; a teacher that forwards write to."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from blocktensor import convert
from tests.support.models import randn
from tests.support.sharded import assert_equal, gradients

K, HIDDEN = 192, 300


def body() -> nn.Sequential:
    """Three linears, of which the last belongs to the root's group."""
    torch.manual_seed(0)
    layers = nn.Linear(K, HIDDEN), nn.Linear(HIDDEN, HIDDEN, bias=False), nn.Linear(HIDDEN, K)
    return nn.Sequential(*layers)


def twins(mesh: DeviceMesh, make: Callable[[], nn.Module] = body, **options: Any) -> Any:
    """A converted model that is sharded by layer, and a copy that is not."""
    single = make()
    convert(single, skip_small=False, convert_head=True)
    model = copy.deepcopy(single)
    for layer in [*model.children()][:2]:
        fully_shard(layer, mesh=mesh, **options)
    fully_shard(model, mesh=mesh)
    return model, single


def batch(number: int) -> Tensor:
    return randn(24, K, seed=number, dtype=torch.float32)


def assert_same_step(model: nn.Module, single: nn.Module, number: int) -> None:
    """Outputs and gradients have the bits of one process."""
    x, y = (batch(number).requires_grad_() for _ in range(2))
    made, wanted = model(x), single(y)
    assert torch.equal(made, wanted)
    for each in (made, wanted):
        each.square().mean().backward()
    assert torch.equal(x.grad, y.grad)
    assert_equal(gradients(model), gradients(single))


@torch.no_grad()
def evaluate(model: nn.Module) -> Tensor:
    made: Tensor = model(batch(7))
    return made


class Teacher(nn.Module):
    """A student, and a teacher that follows it: written to inside of the forward, as in MoCo.

    The weights of the teacher begin a hundred times smaller.
    """

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.student = nn.Linear(K, HIDDEN, bias=False)
        self.teacher = nn.Linear(K, HIDDEN, bias=False)
        with torch.no_grad():
            self.teacher.weight.mul_(0.01)
        self.follow: Callable[[], Any] = lambda: None

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.student(x)
        with torch.no_grad():
            self.follow()
        return y * self.teacher(x)


def following(mesh: DeviceMesh) -> tuple[Teacher, Teacher]:
    model, single = twins(mesh, Teacher)
    for each in (model, single):
        student, teacher = each.student.weight, each.teacher.weight
        each.follow = lambda student=student, teacher=teacher: teacher.lerp_(student.detach(), 0.5)
    return model, single
