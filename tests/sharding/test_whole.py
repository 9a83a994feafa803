"""Whole weights gathered in FP8: the bytes of one process, whoever cut them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

from blocktensor import BlockwiseFP8Tensor, BlockwiseFP8Weight, Recipe
from blocktensor.ops.cast.ops import quantize_rowwise
from blocktensor.ops.formats import Quantized
from blocktensor.sharding import whole as whole_module
from blocktensor.sharding.cuts import frozen_parts
from blocktensor.sharding.ranks import Ranks
from blocktensor.sharding.whole import whole_tensors
from tests.support.models import randn
from tests.support.numeric import assert_same
from tests.support.ranks import on_ranks, shared_mesh
from tests.support.sharded import assert_same_cast

POWERS = Recipe(scale="power_of_two")
HALVES: Any = _StridedShard(1, split_factor=2)

CUTS: list[tuple[tuple[int, ...], tuple[int, ...], tuple[Any, ...]]] = [
    ((300, 130), (4,), (Shard(0),)),
    ((130, 300), (4,), (Shard(1),)),
    ((3, 200), (4,), (Shard(0),)),  # ranks without rows
    ((1, 1), (4,), (Shard(0),)),
    ((300, 130), (4,), (Replicate(),)),
    ((300, 520), (2, 2), (Shard(0), Shard(1))),
    ((300, 520), (2, 2), (Shard(1), Shard(0))),
    ((300, 520), (2, 2), (Replicate(), Shard(0))),
    ((304, 520), (2, 2), (_StridedShard(0, split_factor=2), Shard(0))),  # FSDP over TP
    ((5, 256, 130), (4,), (Shard(0),)),
    ((6, 256, 512), (2, 2), (Shard(0), Shard(2))),
    ((3, 512, 130), (2,), (HALVES,)),  # gate and up in one stack
    ((2, 128, 130), (2,), (HALVES,)),  # a rank has two parts of a block
]
"""Shape, mesh and placements."""


def values(shape: tuple[int, ...], device: str) -> Tensor:
    x = randn(*shape, device=device)
    if min(shape) > 100:
        x[..., 128:, :128] *= 1e4  # blocks of other scales
        x[..., :2, :2] = 0
    return x


def whole(*tensors: Any) -> list[Any]:
    """The tensors whole; the scales that were checked before are theirs."""
    checked: dict[int, Tensor] = {}
    made = list(whole_tensors(tensors, lambda i, scale, format: checked.update({i: scale})))
    for i, scale in checked.items():
        assert_same(scale, made[i].scale.cpu())
    assert [i for i, x in enumerate(made) if isinstance(x, Quantized)] == [*checked]
    return made


@on_ranks(2, 4, gpus=(2,))
def test_every_cut(world: int, device: str) -> None:
    """One after another, and all at once, in batches of several; frozen parts are whole blocks."""
    cuts, wanted = [], []
    for shape, sizes, placements in CUTS:
        if torch.Size(sizes).numel() != world:
            continue
        mesh = shared_mesh(device, *sizes, names=tuple(f"d{i}" for i in range(len(sizes))))
        for recipe, dtype in ((Recipe(), torch.bfloat16), (POWERS, torch.float32)):
            plain = values(shape, device).to(dtype)
            cut, weight, frozen = (
                distribute_tensor(plain, mesh, placements, src_data_rank=None) for _ in range(3)
            )
            local = cut.to_local()
            weight._local_tensor = BlockwiseFP8Weight(local.clone(), recipe)
            form = quantize_rowwise(plain, recipe.weight_format)
            assert_same(*whole(cut), plain)
            assert_same_cast(*whole(weight), form)
            cuts += [cut, weight, torch.ones(3)]
            wanted += [plain, form, None]
            if len(shape) == 3 and shape[1] >= 256:
                given = (local, recipe.weight_format, recipe)
                frozen._local_tensor = BlockwiseFP8Tensor.from_values(*given)
                cuts.append(frozen)
                wanted.append(form)
    for got, want in zip(whole(*cuts), wanted, strict=True):
        if isinstance(want, Quantized):
            assert_same_cast(got, want)
        else:
            assert (got is None) if want is None else torch.equal(got, want)


@on_ranks(2)
def test_few_weights_are_gathered_before_they_are_used(
    world: int, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two batches, each of at most four times the bytes of the largest weight, and 256 MiB."""
    sizes: list[int] = []
    send = whole_module._send

    def watched(batch: Any) -> Any:
        sizes.append(len(batch))
        return send(batch)

    monkeypatch.setattr(whole_module, "_send", watched)
    mesh = shared_mesh(device, 1, world, names=("one", "all"))
    weights = [
        distribute_tensor(randn(n, 128, device=device), mesh, [Shard(1), Shard(0)])
        for n in (128, 128, 256, *[128] * 12)
    ]
    for weight in weights:
        weight._local_tensor = BlockwiseFP8Weight(weight.to_local())
    for limit, wanted in ((256 << 20, [7, 8]), (256 * 128, [2, 1, *[2] * 6])):
        monkeypatch.setattr(whole_module, "_BATCH_BYTES", limit)
        for used, _ in enumerate(whole_tensors(weights, lambda *_: None)):
            assert sum(sizes) <= used + 2 * max(wanted)
        assert sizes == wanted
        sizes.clear()


@on_ranks(2, gpus=())
def test_what_is_abandoned_is_waited_for(world: int, device: str) -> None:
    """Torch keeps what a collective fills until somebody waits for it."""
    from torch._C import _distributed_c10d as c10d

    mesh = shared_mesh(device, world, names=("all",))
    cuts = [distribute_tensor(randn(255, 128), mesh, [Shard(0)]) for _ in range(6)]
    gathering = whole_tensors(cuts, lambda *_: None)
    before = c10d._get_work_registry_size()
    for _ in range(2):
        next(gathering)
        assert c10d._get_work_registry_size() == before + 1
    gathering.close()
    assert c10d._get_work_registry_size() == before


@on_ranks(2, gpus=())
def test_the_default_device_may_be_meta(world: int, device: str) -> None:
    plain = randn(77, 131)  # of a size that no other test has cut
    mesh = shared_mesh(device, world, names=("all",))
    cuts = (plain, Shard(0)), (torch.tensor(3.0), Replicate())
    cut = [distribute_tensor(x, mesh, [placement]) for x, placement in cuts]
    with torch.device("meta"):
        made = whole(*cut)
    assert_same(made[0], plain)
    assert made[1].item() == 3


@on_ranks(2, gpus=())
def test_a_mesh_whose_ranks_descend_is_refused(world: int, device: str) -> None:
    cut = distribute_tensor(randn(300, 130), DeviceMesh(device, [1, 0]), [Shard(0)])
    for refused in (lambda: whole(cut), lambda: Ranks(cut.device_mesh)):
        with pytest.raises(NotImplementedError, match=r"ranks \[1, 0\], which descend"):
            refused()


@on_ranks(4, gpus=())
def test_a_mesh_that_descends_along_its_last_dimension_is_refused(world: int, device: str) -> None:
    mesh = DeviceMesh(device, [[1, 0], [3, 2]])
    cut = distribute_tensor(randn(300, 130), mesh, [Replicate(), Shard(0)])
    with pytest.raises(NotImplementedError, match=r"ranks \[\[1, 0\], \[3, 2\]\], which descend"):
        whole(cut)


@on_ranks(2)
def test_blocks_that_hold_nan(world: int, device: str) -> None:
    plain = randn(200, 300, device=device)
    plain[150, 7], plain[3, 290] = float("nan"), float("inf")
    cut = distribute_tensor(plain, shared_mesh(device, world, names=("all",)), [Shard(0)])
    cut._local_tensor = BlockwiseFP8Weight(cut.to_local())
    assert_same_cast(*whole(cut), quantize_rowwise(plain, Recipe().weight_format))


@on_ranks(4, gpus=())
def test_equal_cuts_on_other_meshes(world: int, device: str) -> None:
    """Between the same placements lie other ranks: in turns, and in one call."""
    square = shared_mesh(device, 2, 2, names=("outer", "inner"))
    meshes = square["outer"], shared_mesh(device, world, names=("all",)), square["inner"]
    cuts, wanted = [], []
    for seed, mesh in enumerate((*meshes, *meshes)):
        plain = randn(300, 130, seed=seed)
        cut = distribute_tensor(plain, mesh, [Shard(0)], src_data_rank=None)
        if seed % 2:
            cut._local_tensor = BlockwiseFP8Weight(cut.to_local())
        cuts.append(cut)
        wanted.append(quantize_rowwise(plain, Recipe().weight_format) if seed % 2 else plain)
    for got, want in zip(whole(*cuts), wanted, strict=True):
        (assert_same_cast if isinstance(want, Quantized) else assert_same)(got, want)


@on_ranks(2, gpus=())
def test_scales_are_cut_as_the_weight_is(mesh: DeviceMesh) -> None:
    """Also a stack of one expert, of which the first rank holds all scales."""
    for experts, rows in ((1, 130), (2, 130), (3, 512)):
        weight: Any = distribute_tensor(randn(experts, rows, 200), mesh, [Shard(0)])
        weight._local_tensor = BlockwiseFP8Tensor.from_values(weight.to_local(), (128, 128))
        parts = frozen_parts(weight)
        assert [part.placements for part in parts] == [(Shard(0),)] * 2
        assert parts[0].shape == weight.shape
        assert parts[1].shape == (experts, -(-rows // 128), 2)
