"""Ranks whose parallel layers differ raise on every rank, and compare them once."""

from __future__ import annotations

import time

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import parallelize_module

from blocktensor import Recipe, convert
from blocktensor.distributed import ColwiseParallel, RowwiseParallel
from blocktensor.tensor_parallel import parallel_forward
from tests.support.parallel_linears import BF16, batches, converted, drawn, parallel_block, plain
from tests.support.ranks import on_ranks

POW2 = Recipe(scale="power_of_two")


@pytest.mark.parametrize("what", ["converted", "recipe", "alone", "layouts"])
@on_ranks(2, gpus=())
def test_ranks_that_disagree(mesh: DeviceMesh, what: str) -> None:
    rank, started = mesh.get_local_rank(), time.monotonic()
    if what in ("alone", "layouts"):  # a linear without a shared input
        module, is_local = plain(256, 256, False, BF16), rank == 0 or what == "alone"
        if rank or what == "layouts":
            convert(module, skip_small=False)
        style = ColwiseParallel(input_layouts=Shard(0), use_local_output=is_local)
        parallelize_module(module, mesh, style)
        text = r"^ranks disagree on tensor parallel linear layers: rank"
        with pytest.raises(RuntimeError, match=text):
            module(drawn((128, 256), BF16, 1))
    else:
        model = parallel_block(mesh, recipe=None)
        if what == "recipe" or rank == 0:
            convert(model, (Recipe(), POW2)[rank], skip_small=False)
        for _ in range(2):  # nothing that differs is remembered as agreed on
            with pytest.raises(RuntimeError, match=r"^ranks disagree on inputs of tensor parallel"):
                model(batches(mesh)[0])
    assert time.monotonic() - started < 30


@pytest.mark.parametrize("what", ["dtype", "outputs", "inputs", "style"])
@on_ranks(2, gpus=())
def test_ranks_whose_linears_differ(mesh: DeviceMesh, what: str) -> None:
    rank = mesh.get_local_rank()
    n, k = (256 << (rank * (what == each)) for each in ("outputs", "inputs"))
    dtype = torch.float32 if rank and what == "dtype" else BF16
    style = RowwiseParallel if rank and what == "style" else ColwiseParallel
    module = converted(n, k, dtype=dtype)
    layouts = {"input_layouts": Replicate(), "output_layouts": Replicate()}
    parallelize_module(module, mesh, style(**layouts), src_data_rank=None)
    x = drawn((4, k), dtype, 1)
    with pytest.raises(RuntimeError, match=r"^ranks disagree on tensor parallel linear layers: ra"):
        module(x)


@on_ranks(2, gpus=())
def test_ranks_compare_once_and_after_a_change(
    mesh: DeviceMesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[str] = []
    agree = parallel_forward.agree
    monkeypatch.setattr(parallel_forward, "agree", lambda *x: (found.append(x[0]), agree(*x)))
    x = batches(mesh)[0]
    model = parallel_block(mesh)
    wanted = 2 * ["inputs of tensor parallel linear layers"] + 7 * ["tensor parallel linear layers"]
    for recipe in (Recipe(), POW2):
        convert(model, recipe, skip_small=False)
        found.clear()
        for _ in range(2):
            model(x)
        assert sorted(found) == wanted
