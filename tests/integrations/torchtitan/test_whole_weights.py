"""Linear layers whose weight every tensor parallel rank has whole."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Placement,
    Replicate,
    Shard,
    distribute_tensor,
)

from blocktensor import convert
from tests.support import titan_cpu
from tests.support.models import randn
from tests.support.ranks import on_ranks

titan_cpu.skip_without_torchtitan()


@on_ranks(2, gpus=())
@pytest.mark.parametrize("tokens", [Shard(0), Replicate()], ids=str)
def test_gradients_are_those_of_one_process(mesh: DeviceMesh, tokens: Placement) -> None:
    from blocktensor.integrations.torchtitan.parallel import _run_on_own_tokens
    from blocktensor.tensor_parallel.styles import cut_parameter

    torch.manual_seed(0)
    linear = nn.Linear(256, 128)
    convert(linear, skip_small=False)
    single = copy.deepcopy(linear)
    linear.weight = nn.Parameter(cut_parameter(linear.weight, mesh, Replicate(), 0))
    linear.bias = nn.Parameter(distribute_tensor(linear.bias.detach(), mesh, [Replicate()]))
    x, grad = randn(2 * 128, 256, dtype=torch.float32), randn(2 * 128, 128, dtype=torch.float32)
    y = _run_on_own_tokens(linear, distribute_tensor(x, mesh, [tokens]))
    wanted = single(x)
    assert isinstance(y, DTensor)
    assert y.placements == (tokens,)
    assert torch.equal(y.full_tensor(), wanted)
    y.backward(distribute_tensor(grad, mesh, [tokens]))
    wanted.backward(grad)
    for name in ("weight", "bias"):
        made = getattr(linear, name).grad.full_tensor()
        torch.testing.assert_close(made, getattr(single, name).grad, rtol=1e-5, atol=1e-4)


@on_ranks(2, gpus=())
@pytest.mark.parametrize("layout", [Partial(), Shard(-1), Shard(1)], ids=str)
def test_inputs_that_are_no_whole_tokens_are_refused(mesh: DeviceMesh, layout: Placement) -> None:
    """Casts of parts are others than of the whole, and each rank would add the bias."""
    from blocktensor.integrations.torchtitan.parallel import _run_on_own_tokens

    linear = nn.Linear(256, 128)
    convert(linear, skip_small=False)
    x = DTensor.from_local(randn(128, 256), mesh, [layout], run_check=False)
    with pytest.raises(NotImplementedError, match=r"the input .* is .*: expected whole tokens"):
        _run_on_own_tokens(linear, x)
