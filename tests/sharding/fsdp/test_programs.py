"""However FSDP2's events follow each other, weights are those of one process, or an error.

``BLOCKTENSOR_FUZZ=1000 pytest tests/sharding/fsdp/test_programs.py`` runs so many programs.
"""

from __future__ import annotations

import os
from collections import Counter

import pytest
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from tests.support.fsdp_programs import Program
from tests.support.ranks import on_ranks, shared_mesh

PROGRAMS = int(os.environ.get("BLOCKTENSOR_FUZZ", "20"))


@pytest.mark.parametrize("how", ["shard"])
@on_ranks(1, 2, 4, gpus=())
def test_a_random_program(mesh: DeviceMesh, device: str, how: str, world: int) -> None:
    for seed in range(PROGRAMS):
        Program(seed, mesh, how).run()
