"""Torch functions that answer by their caller: nn.Module, nn.Parameter, distribute_tensor."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from tests.support.models import linear, randn

N, K = 128, 192


def new_parameter(param: Tensor) -> nn.Parameter:
    return nn.Parameter(param)


def new_parameter_of_a_detached(param: Tensor) -> nn.Parameter:
    return nn.Parameter(param.detach())


@pytest.mark.parametrize("made_by", [new_parameter, new_parameter_of_a_detached])
def test_a_new_parameter_of_a_weight_has_nothing_that_hangs_on_it(
    made_by: Callable[[Tensor], nn.Parameter],
) -> None:
    """Whatever the caller's variables are called; ``nn.Module._apply`` calls its own ``param``."""
    weight, seen = linear(N, K).weight, []
    weight.register_post_accumulate_grad_hook(seen.append)
    weight.register_hook(lambda grad: seen.append(grad))
    weight.tag = "mine"
    made = made_by(weight)
    assert not hasattr(made, "tag")
    nn.functional.linear(randn(3, K), made).sum().backward()
    assert made.grad is not None
    assert seen == []


DISTRIBUTED: dict[str, Callable[[nn.Linear, DeviceMesh], Any]] = {
    "rows": lambda m, mesh: distribute_tensor(m.weight, mesh, [Shard(0)]),
    "columns": lambda m, mesh: distribute_tensor(m.weight.detach(), mesh, [Shard(1)]),
    "replicas": lambda m, mesh: distribute_tensor(m.weight, mesh, [Replicate()]),
    "a module": lambda m, mesh: distribute_module(m, mesh),
    "column parallel": lambda m, mesh: parallelize_module(m, mesh, ColwiseParallel()),
    "row parallel": lambda m, mesh: parallelize_module(m, mesh, RowwiseParallel()),
    "from_local": lambda m, mesh: DTensor.from_local(
        m.weight, mesh, [Replicate()], run_check=True, shape=m.weight.shape, stride=(K, 1)
    ),
}


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("way", DISTRIBUTED)
def test_tensor_parallel_is_refused_and_changes_nothing(way: str, frozen: bool) -> None:
    module = linear(N, K, frozen=frozen)
    weight, wanted = module.weight, module(randn(3, K))
    with pytest.raises(
        NotImplementedError, match=r"^distribute_tensor of an FP8 weight \[128, 192"
    ):
        DISTRIBUTED[way](module, init_device_mesh("cpu", (1,)))
    assert module.weight is weight
    assert torch.equal(module(randn(3, K)), wanted)
