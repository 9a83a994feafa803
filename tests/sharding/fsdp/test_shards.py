"""Shards: how they come to be, what they show to others, frozen ones under adapters."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import distribute_tensor

from blocktensor import Recipe, convert, freeze, memory_report
from blocktensor.distributed import FP8Shard, FrozenShard
from blocktensor.sharding.fsdp.shards import chunks, shard_of
from tests.support.models import linear, plain
from tests.support.ranks import on_ranks
from tests.support.sharded import (
    HIDDEN,
    OUT,
    K,
    assert_same_cast,
    assert_trains_as,
    batch,
    build,
    loss_of,
    mesh_of,
    shard,
    twins,
    whole,
)

# In which order a model is converted, sharded and filled


@on_ranks(2)
def test_converted_after_it_was_sharded(world: int, device: str) -> None:
    model, single = build().to(device), build(Recipe()).to(device)
    shard(model, mesh_of(world, device))
    report = convert(model, skip_small=False)
    assert len(report.converted) == 3
    assert {entry.reason for entry in report.converted} == {"trainable, gathered in FP8"}
    assert_trains_as(single, model, device)


@on_ranks(2)
def test_sharded_on_the_meta_device_and_filled_and_loaded(world: int, device: str) -> None:
    single, mesh = build(Recipe()).to(device), mesh_of(world, device)
    with torch.device("meta"):
        model = build(Recipe())
    shard(model, mesh)
    model.to_empty(device=device)
    for p, q in zip(model.parameters(), single.parameters(), strict=True):
        with torch.no_grad():
            p.copy_(distribute_tensor(whole(q), mesh))
    assert_trains_as(single, model, device)
    other = build(Recipe()).to(device)
    model.load_state_dict({k: distribute_tensor(v, mesh) for k, v in other.state_dict().items()})
    assert_trains_as(other, model, device)


@on_ranks(2, gpus=())
def test_fsdp1_is_refused_on_every_rank(world: int, device: str) -> None:
    model = build(Recipe())
    with pytest.raises(NotImplementedError, match=r"^FullyShardedDataParallel"):
        FullyShardedDataParallel(model, device_id=torch.device("cpu"))


new_zeros = torch.ops.aten.new_zeros


@pytest.mark.parametrize(
    "zeros",
    [
        lambda w: new_zeros(w, (3, 192), dtype=torch.int64),
        lambda w: new_zeros(w, (3, 192), dtype=torch.float32),
        lambda w: new_zeros(w, (3, 192), device="meta"),
        lambda w: new_zeros(w, (192,)),
        lambda w: new_zeros(w, (1, 3, 192)),
    ],
)
def test_only_zeros_that_a_shard_could_be_made_of_are_shards(zeros: Callable[..., Tensor]) -> None:
    weight, frozen = linear(128, 192).weight, linear(128, 192, frozen=True).weight
    assert type(new_zeros(weight, (3, 192))) is FP8Shard
    assert type(new_zeros(frozen, (3, 192))) is FrozenShard
    wanted, got = zeros(plain(weight)), zeros(weight)
    assert type(got) is Tensor
    assert (got.shape, got.dtype, got.device) == (wanted.shape, wanted.dtype, wanted.device)
    with pytest.raises(NotImplementedError, match="new_zeros"):
        zeros(frozen)
    for w in (weight, frozen):  # called by anyone but FSDP
        made = w.new_zeros(3, 192)
        assert (type(made), made.dtype, made.any().item()) == (Tensor, w.dtype, False)


def test_which_tensors_are_shards_with_the_same_rows() -> None:
    master = torch.ones(3, 192)
    rows = FP8Shard(master, Recipe())
    for same in (rows.detach(), torch.ops.aten.alias(rows)):
        assert type(same) is FP8Shard
        assert same.master is master
    copies = (rows.clone(), torch.empty_like(rows), rows.new_zeros(3, 192), rows.bfloat16())
    for other in (*copies, rows[:2]):
        assert type(other) is FP8Shard
        assert other.master is not master


# What optimizers, clipping, reports and files see


@on_ranks(2)
def test_what_others_see_of_a_sharded_model(world: int, device: str) -> None:
    model, single = twins(device)
    shard(model, mesh_of(world, device))
    report = memory_report(model).trainable
    rows = sum(p._local_tensor.nbytes for p in model.parameters() if shard_of(p) is not None)
    assert memory_report(single).trainable.high_precision > report.high_precision == rows > 0
    assert report.fp8 == 0

    for m in (model, single):
        loss_of(m, batch(0, device)).backward()
    norms = [nn.utils.clip_grad_norm_(m.parameters(), 0.01) for m in (model, single)]
    assert torch.allclose(norms[0].full_tensor(), norms[1], rtol=1e-2)
    for name, value in get_model_state_dict(model).items():
        assert type(value._local_tensor) is Tensor, name
    weight = model.up.weight
    for full in (weight.full_tensor(), weight.detach().full_tensor()):
        assert type(full) is Tensor
        assert torch.equal(full, single.up.weight.master)
    local = weight.detach().to_local()
    assert torch.equal(torch.tensor(local.tolist(), device=device), local.master.float())

    x = torch.ones(1, local.shape[0], dtype=local.dtype, device=device)
    needs = pytest.raises(NotImplementedError, match="shard of an FP8 weight: a product needs")
    for rows in (local, weight.to_local(), local[:5]):
        with needs:
            nn.functional.linear(x.new_ones(3, K), rows)
    with needs:
        torch.mm(x, local)


@on_ranks(1, gpus=())
def test_a_full_tensor_of_one_rank_is_plain(world: int, device: str) -> None:
    model, _ = twins(device)
    shard(model, mesh_of(world, device))
    for weight in (model.up.weight, model.up.weight.detach()):
        assert type(weight.full_tensor()) is Tensor


@on_ranks(2, gpus=())
def test_state_dicts_give_the_parameters_themselves_if_asked(world: int, device: str) -> None:
    model, _ = twins(device)
    shard(model, mesh_of(world, device))
    loss_of(model, batch(0, device)).backward()
    state = model.state_dict(keep_vars=True)
    for name, parameter in model.named_parameters():
        assert state[name] is parameter


# Adapters on a base of frozen weights


def adapters_on_a_frozen_base(device: str) -> tuple[nn.Module, nn.Module]:
    """Return three frozen FP8 linears and one that trains; and a copy."""
    model = build(Recipe()).to(device)
    model.requires_grad_(False)
    freeze(model)
    tail = nn.Linear(OUT, OUT, bias=False, device=device, dtype=torch.bfloat16)
    model.down = nn.Sequential(model.down, tail)
    return model, copy.deepcopy(model)


def shard_base(model: nn.Module, world: int, device: str) -> list[FrozenShard]:
    """Shard the model; return what this rank holds of the base."""
    for part in (model.up, model):
        fully_shard(part, mesh=mesh_of(world, device))
    held = [p._local_tensor for p in model.parameters()]
    return [x for x in held if isinstance(x, FrozenShard)]


def test_frozen_rows_move() -> None:
    rows = chunks(adapters_on_a_frozen_base("cpu")[0].up.weight, 2)[0]
    assert (rows.dtype, rows.to(torch.float32).dtype) == (torch.bfloat16, torch.float32)
    assert rows.float().new_zeros(2, 3).dtype == torch.float32
    with torch.inference_mode():
        inferred = rows.to(torch.float16)
    for moved in (rows.float(), inferred):
        assert type(moved) is FrozenShard
        assert torch.equal(moved.data_rows.float(), rows.data_rows.float())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@on_ranks(2)
def test_a_sharded_model_changes_its_dtype(world: int, device: str, dtype: torch.dtype) -> None:
    model, single = adapters_on_a_frozen_base(device)
    shard_base(model, world, device)
    model.double().to(dtype), single.to(dtype)
    x = batch(0, device).to(dtype)
    assert torch.equal(model(x), single(x))


@on_ranks(2)
def test_adapters_train_and_the_base_stays(world: int, device: str) -> None:
    """It rests at a byte a parameter over all ranks; checkpoints hold the adapters alone."""
    model, single = adapters_on_a_frozen_base(device)
    before = {name: single.get_submodule(name).weight.rowwise() for name in ("up", "mid")}
    shards = shard_base(model, world, device)
    assert len(shards) == 3
    report = memory_report(model).frozen
    assert report.data == sum(x.numel() for x in shards) <= 150 * (K + 2 * HIDDEN)
    assert report.data + report.scales == report.total <= 1.01 * report.data

    with pytest.raises(NotImplementedError, match=r"gather.* needs the values of a frozen FP8"):
        get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    with pytest.raises(NotImplementedError, match="checkpoint needs the values of a frozen FP8"):
        shards[0].__get_tensor_shard__(None)
    adapters = get_model_state_dict(model, options=StateDictOptions(ignore_frozen_params=True))
    assert list(adapters) == ["down.1.weight"]

    assert_trains_as(single, model, device)
    model.unshard()
    model.up.unshard()
    for name, form in before.items():
        weight = model.get_submodule(name).weight
        assert not weight.requires_grad
        assert_same_cast(weight.rowwise(), form)
