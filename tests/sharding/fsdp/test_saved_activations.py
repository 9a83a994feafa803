"""Under FSDP2, activations that are saved in FP8 train as in one process; weights are kept."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint

from blocktensor import convert, saved_tensors_in_fp8
from tests.support.models import randn
from tests.support.ranks import on_ranks
from tests.support.saved import rounding
from tests.support.sharded import assert_equal, gradients

T, K = 64, 256


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(K, dtype=torch.bfloat16)
        self.up = nn.Linear(K, 2 * K, bias=False, dtype=torch.bfloat16)
        self.down = nn.Linear(2 * K, K, bias=False, dtype=torch.bfloat16)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.silu(self.up(self.norm(x))))


def run(model: nn.Module, x: Tensor, checkpoints: bool) -> Tensor:
    for layer in model:
        x = checkpoint(layer, x, use_reentrant=False) if checkpoints else layer(x)
    return x


@pytest.mark.parametrize("checkpoints", [False, True])
@pytest.mark.parametrize("fp8", [False, True])
@on_ranks(2)
def test_sharded_layers(mesh: DeviceMesh, device: str, fp8: bool, checkpoints: bool) -> None:
    torch.manual_seed(0)
    first = nn.Linear(K, K, bias=False, dtype=torch.bfloat16)
    model: Any = nn.Sequential(first, Layer(), Layer()).to(device)
    if fp8:
        convert(model, skip_small=False)
    single = copy.deepcopy(model)
    for part in (*model, model):
        fully_shard(part, mesh=mesh)
    x = randn(T, K, device=device)
    saved = saved_tensors_in_fp8()
    for _ in range(2):
        for each, context in ((model, saved), (single, rounding())):
            each.zero_grad()
            with context:
                y = run(each, x, checkpoints)
            y.float().square().mean().backward()
        in_fp8 = {kind.shape for kind in saved.kinds if kind.kept_as == "FP8"}
        assert in_fp8 == ({(T, K)} if checkpoints else {(T, K), (T, 2 * K)})
        assert_equal(gradients(model), gradients(single))
