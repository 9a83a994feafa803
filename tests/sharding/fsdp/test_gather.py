"""What FSDP2 gathers: the bytes of the whole cast, one for each parameter, and little else."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard

from blocktensor import BlockwiseFP8Tensor, Recipe, convert
from blocktensor.distributed import FP8Shard
from blocktensor.ops import reference
from tests.support.ranks import on_ranks
from tests.support.sharded import (
    assert_same_cast,
    batch,
    build,
    deep,
    mesh_of,
    reductions,
    shard,
)
from tests.support.wire import Traffic, Wire

COLUMNS = 240  # 2, 3 and 4 ranks share them evenly, in parts of blocks


class Pair(nn.Module):
    """Two linears of the same size, or one twice."""

    def __init__(self, rows: int, tied: bool) -> None:
        super().__init__()
        self.a = nn.Linear(COLUMNS, rows, bias=False)
        self.b = nn.Linear(COLUMNS, rows, bias=False)
        if tied:
            self.b.weight = self.a.weight

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.a(x) + self.b(x)
        return made


def assert_gathered_as_one_process_casts(
    world: int, device: str, rows: int, recipe: Recipe, tied: bool = False, dim: int = 0
) -> None:
    torch.manual_seed(rows)
    model = Pair(rows, tied).to(device, torch.bfloat16)
    with torch.no_grad():
        model.a.weight[rows // 2, 5] = 300.0  # a block's maximum on one rank
    convert(model, recipe, skip_small=False)
    masters = [m.weight.master.clone() for m in (model.a, model.b)]
    place = None if dim == 0 else (lambda p: Shard(1))
    mesh = mesh_of(world, device)
    fully_shard(model, mesh=mesh, shard_placement_fn=place, reshard_after_forward=False)

    with torch.no_grad():
        y = model(torch.ones(2, COLUMNS, device=device, dtype=torch.bfloat16))

    assert y.shape == (2, rows)
    for module, master in zip((model.a, model.b), masters, strict=True):
        weight = module.weight
        assert isinstance(weight, BlockwiseFP8Tensor)
        assert weight.columnwise_data is None
        wanted = reference.quantize_rowwise(master, recipe.weight_format)
        assert_same_cast(weight.rowwise(), wanted)
    model.reshard()
    assert reductions(model) == 1


@pytest.mark.parametrize(
    ("rows", "recipe"),
    [
        *((rows, Recipe()) for rows in (1, 127, 128, 192, 1000, 10944)),
        (192, Recipe(scale="power_of_two")),
    ],
)
@on_ranks(2, 3, 4, gpus=(2,))
def test_bytes_of_the_whole_cast(world: int, device: str, rows: int, recipe: Recipe) -> None:
    assert_gathered_as_one_process_casts(world, device, rows, recipe)
    assert_gathered_as_one_process_casts(world, device, rows, recipe, dim=1)
    if rows <= 1000:
        assert_gathered_as_one_process_casts(world, device, rows, recipe, tied=True)


@on_ranks(2)
def test_a_byte_a_parameter_is_held_and_memory_does_not_grow(world: int, device: str) -> None:
    model = deep(4).to(device)
    convert(model, skip_small=False)
    mesh = mesh_of(world, device)
    for module in model:
        fully_shard(module, mesh=mesh, reshard_after_forward=False)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    held = []
    for step in range(200 if device == "cuda" else 5):
        x = torch.randn(64, 512, generator=torch.Generator().manual_seed(step))
        loss = model(x.to(device, torch.bfloat16)).float().square().mean()
        for module in model:  # in forward, and here until backward is done with it
            weight = module.weight
            assert isinstance(weight, BlockwiseFP8Tensor) and weight.columnwise_data is None
            data, scale, _ = weight.rowwise()
            assert data.nbytes + scale.nbytes <= 1.01 * weight.numel()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        held.append(torch.cuda.memory_allocated() if device == "cuda" else 0)
    assert max(held[3:]) == held[3]


def three_steps(model: nn.Sequential, world: int, device: str) -> list[Traffic]:
    """Return the traffic of each of three steps of a model, which is sharded."""
    mesh = mesh_of(world, device)
    for module in model:
        fully_shard(module, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    steps = []
    for step in range(3):
        with Wire() as wire:
            x = torch.randn(4, 512, generator=torch.Generator().manual_seed(step))
            model(x.to(device, torch.bfloat16)).float().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        steps.append(wire.traffic())
    return steps


@on_ranks(2, gpus=())
def test_half_the_bytes_and_one_small_reduction_a_step(world: int, device: str) -> None:
    plain, fp8 = deep(3), deep(3)
    convert(fp8, skip_small=False)
    bf16_steps, fp8_steps = (three_steps(m, world, device) for m in (plain, fp8))
    for was, found in zip(bf16_steps, fp8_steps, strict=True):
        assert (was.reductions, was.gathered_dtypes) == (0, {torch.bfloat16})
        assert (found.reductions, found.gathered_dtypes) == (1, {torch.uint8})
        assert found.gathers == was.gathers
        assert found.reduced_bytes == 3 * 16 * 4  # 3 weights of 4 x 4 blocks
        assert found.gathered_bytes == was.gathered_bytes / 2
        assert found.gathered_bytes + found.reduced_bytes <= 0.505 * was.gathered_bytes


@on_ranks(4, gpus=())
def test_gathering_over_fewer_ranks_for_backward_is_refused(world: int, device: str) -> None:
    model = build(Recipe())
    shard(model, mesh_of(world, device), reshard_after_forward=2)
    with pytest.raises(NotImplementedError, match=r"^reshard_after_forward=2 with FP8 weights"):
        model(batch(0, device)).sum().backward()


def test_a_later_gather_changes_the_weight_in_place() -> None:
    """FSDP may gather into other memory; scales are copied, since the table of amaxes goes on."""
    shape, recipe = torch.Size((200, 192)), Recipe()
    rows = FP8Shard(torch.ones(shape), recipe)
    made = None
    for seed in range(2):
        values = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
        cast = reference.quantize_rowwise(values, recipe.weight_format)
        gathered, table = cast.data.view(torch.uint8).flatten(), cast.scale.clone()
        returned = rows.fsdp_post_all_gather(
            (gathered,), (shape, table, recipe, (seed, False)), torch.bfloat16, out=made
        )
        made, others = (made, ()) if returned is None else returned
        assert others == ()
        table.fill_(-1)
        assert (type(made), made.dtype) == (BlockwiseFP8Tensor, torch.bfloat16)
        assert made.rowwise_data.data_ptr() == gathered.data_ptr()
        assert_same_cast(made.rowwise(), cast)
        made.columnwise()
        assert made.columnwise_data is None  # FSDP frees what it has gathered, and no more
