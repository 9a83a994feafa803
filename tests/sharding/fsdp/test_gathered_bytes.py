"""What is gathered has the bytes and scales of the whole cast."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard

from blocktensor import BlockwiseFP8Tensor, Recipe, convert
from blocktensor.ops import reference
from blocktensor.sharding.fsdp.amax_table import Reduced, Reduction
from blocktensor.sharding.fsdp.shards import FP8Shard
from tests.support.models import randn
from tests.support.ranks import on_ranks
from tests.support.sharded import assert_same_cast, reductions

COLUMNS = 240  # 2, 3 and 4 ranks share them evenly, in parts of blocks


class Pair(nn.Module):
    def __init__(self, rows: int, tied: bool) -> None:
        super().__init__()
        torch.manual_seed(rows)
        self.a = nn.Linear(COLUMNS, rows, bias=False)
        self.b = nn.Linear(COLUMNS, rows, bias=False)
        if tied:
            self.b.weight = self.a.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.a(x) + self.b(x)


@pytest.mark.parametrize(
    ("rows", "recipe"),
    [
        *((rows, Recipe()) for rows in (1, 127, 128, 192, 1000, 10944)),
        (192, Recipe(scale="power_of_two")),
    ],
)
@on_ranks(2, 3, 4, gpus=(2,))
def test_bytes_of_the_whole_cast(mesh: DeviceMesh, device: str, rows: int, recipe: Recipe) -> None:
    for tied, dim in ((False, 0), (False, 1), *([(True, 0)] if rows <= 1000 else [])):
        model = Pair(rows, tied).to(device, torch.bfloat16)
        with torch.no_grad():
            model.a.weight[rows // 2, 5] = 300.0  # a block's maximum on one rank
        convert(model, recipe, skip_small=False)
        masters = [m.weight.master.clone() for m in (model.a, model.b)]
        place = None if dim == 0 else (lambda p: Shard(1))
        fully_shard(model, mesh=mesh, shard_placement_fn=place, reshard_after_forward=False)
        with torch.no_grad():
            y = model(torch.ones(2, COLUMNS, device=device, dtype=torch.bfloat16))
        assert y.shape == (2, rows)
        for module, master in zip((model.a, model.b), masters, strict=True):
            assert isinstance(module.weight, BlockwiseFP8Tensor)
            assert module.weight.columnwise_data is None
            wanted = reference.quantize_rowwise(master, recipe.weight_format)
            assert_same_cast(module.weight.rowwise(), wanted)
        model.reshard()
        assert reductions(model) == 1


def test_a_later_gather_changes_the_weight_in_place() -> None:
    """FSDP may gather into other memory, and frees what it has gathered, no more."""
    shape, made = torch.Size((200, 192)), None
    rows = FP8Shard(torch.ones(shape), Recipe())
    for seed, recipe in enumerate((Recipe(), Recipe(scale="power_of_two"))):
        cast = reference.quantize_rowwise(randn(*shape, seed=seed), recipe.weight_format)
        gathered = cast.data.view(torch.uint8).flatten()
        reduced = Reduced(cast.scale, cast.scale, cast.scale, seed, Reduction(cast.scale))
        sent = (shape, cast.scale, recipe, reduced)
        returned = rows.fsdp_post_all_gather((gathered,), sent, torch.bfloat16, out=made)
        made, _ = returned or (made, ())
        assert made.rowwise_data.data_ptr() == gathered.data_ptr()
        assert_same_cast(made.rowwise(), cast)
        assert made.recipe == recipe and made.columnwise() and made.columnwise_data is None
