"""However FSDP2's events follow each other, weights are those of one process, or an error.

``BLOCKTENSOR_FUZZ=1000 pytest tests/sharding/fsdp/test_programs.py`` runs a thousand programs.
"""

from __future__ import annotations

import os
from collections import Counter

import pytest
from torch.distributed.device_mesh import DeviceMesh

from tests.support.fsdp_programs import Program
from tests.support.ranks import on_ranks, shared_mesh

KINDS = 6
PROGRAMS = int(os.environ.get("BLOCKTENSOR_FUZZ", "30")) // KINDS
AT_ONCE = 5
"""Programs of one test: ranks have some minutes for a test."""

some = pytest.mark.parametrize("first", range(0, PROGRAMS, AT_ONCE))


def run(mesh: DeviceMesh, how: str, first: int) -> None:
    counts: Counter[str] = Counter()
    for seed in range(first, min(first + AT_ONCE, PROGRAMS)):
        program = Program(seed, mesh, how)
        program.run()
        counts += program.counts
    print(how, mesh.mesh.shape, dict(counts))
    assert counts["outputs"] and counts["backwards"]


@some
@on_ranks(1, 2, 4, gpus=())
def test_sharded(mesh: DeviceMesh, first: int) -> None:
    run(mesh, "shard", first)


@some
@on_ranks(2, 4, gpus=())
def test_replicated(mesh: DeviceMesh, first: int) -> None:
    run(mesh, "replicate", first)


@some
@on_ranks(4, gpus=())
def test_sharded_and_replicated(device: str, first: int) -> None:
    run(shared_mesh(device, 2, 2, names=("outer", "inner")), "shard", first)
