"""DTensors as operands of products that no style has cut, and cuts of stacks inside blocks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from expecttest import assert_expected_inline
from torch import nn

if not dist.is_available():
    pytest.skip("torch was built without distributed", allow_module_level=True)

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from blocktensor import BlockwiseFP8Tensor, BlockwiseFP8Weight, functional, quantize
from tests.support.models import complaint, linear, randn
from tests.support.ranks import on_ranks
from tests.support.sharded import assert_equal
from tests.support.steps import step

K, N, T = 192, 256, 8


class Operands:
    def __init__(self) -> None:
        mesh = init_device_mesh("cpu", (2,))
        self.as_dtensor = lambda x: DTensor.from_local(x, mesh, [Replicate()], run_check=False)
        self.module = linear(N, K, bias=True)
        self.w, self.bias = self.module.weight, self.module.bias.detach()
        self.frozen = linear(N, K, frozen=True).weight
        self.down = linear(K, N).weight
        self.stack = nn.Parameter(BlockwiseFP8Weight(randn(2, N, K)))
        self.offs = torch.tensor([3, T], dtype=torch.int32)
        self.target = torch.zeros(T, dtype=torch.long)
        self.x = randn(T, K, grad=True)
        self.d = self.as_dtensor(self.x)


CALLS: dict[str, Callable[[Operands], Any]] = {
    "a module": lambda o: o.module(o.d),
    "frozen": lambda o: F.linear(o.d, o.frozen),
    "matmul": lambda o: o.d @ o.w.t(),
    "from the left": lambda o: o.w @ o.d.t(),
    "addmm": lambda o: torch.addmm(o.bias, o.d, o.w.t()),
    "bias": lambda o: F.linear(o.x, o.w, o.as_dtensor(o.bias)),
    "linear": lambda o: functional.linear(o.d, o.w),
    "a plain weight": lambda o: functional.linear(o.d, randn(N, K)),
    "weight": lambda o: functional.linear(o.x, o.as_dtensor(randn(N, K))),
    "quantize": lambda o: quantize(o.d),
    "cast": lambda o: BlockwiseFP8Tensor.from_values(o.d),
    "gated_mlp": lambda o: functional.gated_mlp(o.d, o.w, o.frozen, o.down),
    "its weight": lambda o: functional.gated_mlp(o.x, o.w, o.as_dtensor(randn(N, K)), o.down),
    "grouped_linear": lambda o: functional.grouped_linear(o.d, o.stack, o.offs),
    "offs": lambda o: functional.grouped_linear(o.x, o.stack, o.as_dtensor(o.offs)),
    "gated_experts": lambda o: functional.gated_experts(o.d, o.stack, o.stack, o.stack.mT, o.offs),
    "grouped_mm": lambda o: F.grouped_mm(o.d, o.stack.mT, offs=o.offs),
    "loss": lambda o: functional.linear_cross_entropy(o.d, o.w, o.target),
    "target": lambda o: functional.linear_cross_entropy(o.x, o.w, o.as_dtensor(o.target)),
}


@pytest.fixture
def operands() -> Any:
    dist.init_process_group("fake", rank=0, world_size=2)
    yield Operands()
    dist.destroy_process_group()


@pytest.mark.parametrize("call", CALLS)
def test_a_dtensor_is_refused(call: str, operands: Operands) -> None:
    for recording in (True, False):
        with torch.set_grad_enabled(recording):
            text = complaint(NotImplementedError, lambda: CALLS[call](operands))
        assert "DTensor" in text
        assert any(remedy in text.replace("\n", " ") for remedy in (".to_local()", "local, plain"))


def test_what_the_error_says(operands: Operands) -> None:
    assert_expected_inline(
        complaint(NotImplementedError, lambda: functional.linear(operands.d, operands.w)),
        """\
the input of an FP8 linear layer is a DTensor [8, 192], (Replicate(),): expected a
local tensor. Pass .full_tensor(), or .to_local() of one with Replicate(); or cut
the linear layers with ColwiseParallel and RowwiseParallel of
blocktensor.distributed, which take DTensors""",
    )


@on_ranks(2, gpus=())
def test_what_the_error_recommends(mesh: DeviceMesh) -> None:
    x, module = randn(8, K), linear(N, K, bias=True)
    wanted = step(module, x)
    for placement, take in (
        (Replicate(), DTensor.to_local),
        (Replicate(), DTensor.full_tensor),
        (Shard(0), DTensor.full_tensor),
        (Shard(1), DTensor.full_tensor),
    ):
        given = distribute_tensor(x, mesh, [placement])
        assert_equal(step(lambda x, take=take: module(take(x)), given, of=[module]), wanted)
