"""Ranks of a parallel linear layer compare what decides their collectives."""

from __future__ import annotations

import pytest
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from blocktensor.tensor_parallel.parallel_forward import Agreement
from tests.support.ranks import on_ranks


@on_ranks(2, gpus=())
def test_what_changes_later_is_compared_again(mesh: DeviceMesh, device: str) -> None:
    agreement = Agreement("colors", mesh)
    for _ in range(2):
        agreement.check("red", 1)
    agreement.check("blue", 1)
    with pytest.raises(RuntimeError, match=r"ranks disagree on colors: rank [01] has green, [01]"):
        agreement.check("green", dist.get_rank())
