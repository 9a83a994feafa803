"""Compiled experts of expert parallelism, and tokens that travel in FP8: the bits of eager mode."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import parallelize_module

from blocktensor import convert
from blocktensor.distributed import all_to_all_fp8
from tests.support.compiling import afresh
from tests.support.expert_parallel import ExpertParallel, experts_of
from tests.support.models import randn

__all__ = ["afresh"]

# Dynamo itself instantiates the Functions that it traces.
pytestmark = pytest.mark.filterwarnings(
    "ignore:.*should not be instantiated. Methods on autograd:DeprecationWarning"
)

E, K, N = 3, 192, 256
SIZES = torch.tensor([20, 0, 13])


@pytest.mark.usefixtures("group")
def test_a_compiled_block_of_experts() -> None:
    mesh = init_device_mesh("cpu", (1,))
    group = mesh.get_group()
    experts: Any = experts_of(E, K, N, "cpu", torch.float32)
    convert(experts, auto_filter_small_kn=False)
    parallelize_module(experts, mesh, ExpertParallel())
    order = torch.arange(33).flip(0)

    def plain(x: Tensor) -> Tensor:
        return experts(x, SIZES)

    def sent(x: Tensor) -> Tensor:
        return experts(all_to_all_fp8(x, [33], [33], group)[order], SIZES)

    for block in (plain, sent):
        made = []
        for run in (block, torch.compile(block, fullgraph=True, backend="aot_eager")):
            x = randn(33, K, grad=True)
            y = run(x)
            y.backward(randn(33, K, seed=1))
            made.append([y.detach(), x.grad, *(p.grad.to_local() for p in experts.parameters())])
            experts.zero_grad()
        for eager, compiled in zip(*made, strict=True):
            assert torch.equal(eager, compiled)
