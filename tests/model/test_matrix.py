"""Facts about a matrix of a model: of its parameter at the time of the question, on this rank."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from blocktensor import BlockwiseFP8Tensor, BlockwiseFP8Weight, convert, explain, freeze, unfreeze
from blocktensor.distributed import ColwiseParallel, RowwiseParallel
from blocktensor.model.matrix import Matrix, Sizes, all_fp8_weights
from tests.support.expert_parallel import cut_in_fp8, experts_of
from tests.support.matrices import E, Flagged, K, N
from tests.support.models import Conv1D, linear
from tests.support.ranks import on_ranks, shared_mesh


def test_facts_follow_a_parameter_whose_content_is_exchanged() -> None:
    model = nn.Sequential(nn.Linear(256, 128))
    matrix = Matrix("0", "weight", model[0])
    assert matrix.fp8 is None and not matrix.lacks_master and not matrix.is_frozen
    convert(model, skip_small=False)
    assert isinstance(matrix.fp8, BlockwiseFP8Weight) and not matrix.lacks_master
    freeze(model)
    assert isinstance(matrix.fp8, BlockwiseFP8Tensor) and matrix.lacks_master and matrix.is_frozen
    unfreeze(model)
    assert isinstance(matrix.fp8, BlockwiseFP8Weight) and not matrix.lacks_master
    model[0].weight = nn.Parameter(torch.zeros(64, 32))
    assert matrix.fp8 is None and matrix.sizes == (None, 64, 32)


def test_sizes_are_outputs_and_inputs_whatever_the_layout() -> None:
    for module in (nn.Linear(K, N), Conv1D(N, K)):
        matrix = Matrix("", "weight", module)
        assert matrix.sizes == matrix.sizes_here == Sizes(None, N, K)
    for module in (Flagged(), Flagged(is_transposed=True)):
        matrix = Matrix("", "gate_up_proj", module)
        assert matrix.sizes == matrix.sizes_here == Sizes(E, 2 * N, K)


def test_a_matrix_that_a_linear_layer_does_not_read_is_no_weight() -> None:
    """It is FP8, because another linear layer holds it too."""
    model = nn.ModuleDict({"first": linear(256, 128), "second": linear(128, 256)})
    model["second"].lora = model["first"].weight
    lora = Matrix("second", "lora", model["second"])
    assert lora.fp8 is model["first"].weight and not lora.is_read
    assert [matrix.label for matrix in all_fp8_weights(model)] == ["first", "second"]


def two_dims(device: str) -> DeviceMesh:
    return shared_mesh(device, 2, 2, names=("data", "other"))


def products(model: nn.Module) -> list[tuple[int, ...]]:
    return [(p.m, p.n, p.k, p.groups) for p in explain(model, tokens=64).matmuls]


@pytest.mark.parametrize("style", [ColwiseParallel, RowwiseParallel])
@on_ranks(4, gpus=())
def test_fsdp2_gathers_the_part_of_a_parallel_linear_layer(device: str, style: type) -> None:
    """A rank multiplies by this part, and not by the rows of it that FSDP2 leaves to the rank."""
    mesh = two_dims(device)
    model = nn.Sequential(linear(512, 256))
    style()._apply(model[0], mesh["other"])
    alone = products(model)
    fully_shard(model, mesh=mesh["data"])
    (matrix,) = all_fp8_weights(model)
    assert matrix.sizes == (None, 512, 256)
    assert matrix.sizes_here == ((None, 256, 256) if style is ColwiseParallel else (None, 512, 128))
    assert products(model) == alone


@on_ranks(4, gpus=())
def test_fsdp2_gathers_the_experts_of_a_rank(device: str) -> None:
    mesh = two_dims(device)
    model = cut_in_fp8(experts_of(6, device=device), mesh["other"], before=True)
    alone = products(model)
    fully_shard(model, mesh=mesh["data"])
    matrix = all_fp8_weights(model)[0]
    assert matrix.sizes.experts == 6 and matrix.sizes_here == matrix.sizes._replace(experts=3)
    assert products(model) == alone
