"""torch.distributed.checkpoint: any number of ranks, converted or not, in place."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict as dcs
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

import blocktensor
from blocktensor.distributed.shard import FP8Shard, shard_of
from tests.distributed import ranks

CROSSINGS = ((4, 1), (4, 2), (4, 3), (2, 3), (3, 2), (1, 4))
FULL = dcs.StateDictOptions(full_state_dict=True, cpu_offload=True)
BROADCAST = dcs.StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
# the mean over 3 ranks of what is the same on each is that, if rounded once
IN_FP32 = MixedPrecisionPolicy(reduce_dtype=torch.float32)


class _Averaged(torch.optim.AdamW):
    """AdamW that also keeps a copy of each parameter, as optimizers that average weights do."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step(closure)
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if "average" not in state:
                    state["average"] = p.detach().clone()
                state["average"].lerp_(p.detach(), 0.5)


def _plain(seed: int = 0) -> nn.Sequential:
    """Rows that no number of ranks divides; of the last weight only rank 0 has any."""
    torch.manual_seed(seed)
    layers = (nn.Linear(192, 130), nn.ReLU(), nn.Linear(130, 300, bias=False), nn.ReLU())
    return nn.Sequential(*layers, nn.Linear(300, 1, bias=False)).bfloat16()


def _converted(seed: int = 0) -> nn.Sequential:
    model = _plain(seed)
    blocktensor.convert(model, auto_filter_small_kn=False)
    return model


def _sharded(model: nn.Sequential, mesh: DeviceMesh) -> nn.Sequential:
    for layer in (*model[::2], model):
        fully_shard(layer, mesh=mesh, mp_policy=IN_FP32)
    return model


def _optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return _Averaged(model.parameters(), lr=1e-2)


def _loss(model: nn.Module, step: int) -> Tensor:
    x = torch.randn(20, 192, generator=torch.Generator().manual_seed(step)).bfloat16()
    loss: Tensor = (model(x).float() - 1).square().mean()
    return loss


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> Tensor:
    optimizer.zero_grad()
    loss = _loss(model, step)
    loss.backward()
    optimizer.step()
    return loss.detach()


def _whole(value: Tensor) -> Tensor:
    value = value.detach()
    return (value.full_tensor() if isinstance(value, DTensor) else value).clone()


def _snapshot(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Whole weights and optimizer state; all ranks of the model must ask."""
    found = {}
    for name, p in model.named_parameters():
        found[name] = _whole(p)
        for key, value in optimizer.state[p].items():
            found[f"{name}:{key}"] = _whole(value)
    return found


def _assert_same(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        assert type(found[name]) is Tensor, name
        assert torch.equal(found[name], value), name


def _load(
    model: nn.Module, optimizer: torch.optim.Optimizer, folder: str, mesh: DeviceMesh
) -> None:
    weights, state = dcs.get_state_dict(model, optimizer)
    whole = {"model": weights, "optimizer": state}
    dcp.load(whole, checkpoint_id=folder, process_group=mesh.get_group())
    dcs.set_state_dict(
        model, optimizer, model_state_dict=weights, optim_state_dict=whole["optimizer"]
    )


def _save(
    model: nn.Module, optimizer: torch.optim.Optimizer, folder: str, mesh: DeviceMesh
) -> None:
    weights, state = dcs.get_state_dict(model, optimizer)
    whole = {"model": weights, "optimizer": state}
    dcp.save(whole, checkpoint_id=folder, process_group=mesh.get_group())


def _cross(rank: int, world: int, folder: str) -> dict[str, Tensor]:
    warnings.simplefilter("ignore")
    meshes = {n: DeviceMesh("cpu", list(range(n))) for n in range(1, world + 1)}
    saved: dict[int, tuple[dict[str, Tensor], dict[str, Tensor]]] = {}
    for n, mesh in meshes.items():
        if rank < n:
            model = _sharded(_converted(), mesh)
            optimizer = _optimizer(model)
            for step in range(2):
                _step(model, optimizer, step)
            _save(model, optimizer, f"{folder}/{n}", mesh)
            saved[n] = _snapshot(model, optimizer), {}
            _step(model, optimizer, 2)
            saved[n] = saved[n][0], _snapshot(model, optimizer)
    dist.barrier()
    for source, target in CROSSINGS:
        if rank < target:
            model = _sharded(_converted(seed=1), meshes[target])
            optimizer = _optimizer(model)
            if source > target:  # amaxes of other weights are there
                _step(model, optimizer, 5)
            _load(model, optimizer, f"{folder}/{source}", meshes[target])
            after_load = _snapshot(model, optimizer)
            _step(model, optimizer, 2)
            after_step = _snapshot(model, optimizer)
            if source in saved:
                _assert_same(after_load, saved[source][0])
                _assert_same(after_step, saved[source][1])

    # an unconverted model, sharded: reads what the converted one wrote, and the reverse
    if rank < 3:
        mesh = meshes[3]
        model = _sharded(_plain(seed=1), mesh)
        optimizer = _optimizer(model)
        _load(model, optimizer, f"{folder}/2", mesh)
        ordinary = _snapshot(model, optimizer)
        _save(model, optimizer, f"{folder}/plain", mesh)
        model = _sharded(_converted(seed=1), mesh)
        optimizer = _optimizer(model)
        _load(model, optimizer, f"{folder}/plain", mesh)
        again = _snapshot(model, optimizer)
        assert {type(p._local_tensor) for p in model[::2].parameters() if p.ndim == 2} == {FP8Shard}
        if 2 in saved:
            _assert_same(ordinary, saved[2][0])
            _assert_same(again, saved[2][0])
    dist.barrier()

    # whole state dicts: gathered on rank 0, sent out from there
    mesh = meshes[world]
    model = _sharded(_converted(seed=1), mesh)
    optimizer = _optimizer(model)
    _load(model, optimizer, f"{folder}/{world}", mesh)
    weights = dcs.get_model_state_dict(model, options=FULL)
    state = dcs.get_optimizer_state_dict(model, optimizer, options=FULL)
    expected = {k: v for k, v in saved[world][0].items() if ":" not in k}
    _assert_same(weights, expected if rank == 0 else {})
    model = _sharded(_converted(seed=2), mesh)
    optimizer = _optimizer(model)
    _step(model, optimizer, 5)
    dcs.set_model_state_dict(model, weights, options=BROADCAST)
    dcs.set_optimizer_state_dict(model, optimizer, state, options=BROADCAST)
    _assert_same(_snapshot(model, optimizer), saved[world][0])
    _step(model, optimizer, 2)
    _assert_same(_snapshot(model, optimizer), saved[world][1])
    return expected


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_checkpoints_cross_numbers_of_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ranks, "TIMEOUT", 100)
    wanted = ranks.run(_cross, 4, str(tmp_path))[0]
    # one process without a group, in place: an unconverted model and a converted one
    for make in (_plain, _converted):
        for n in range(1, 5):
            model = make(seed=1)
            _loss(model, 0)
            state = {"model": model.state_dict()}
            dcp.load(state, checkpoint_id=tmp_path / str(n), no_dist=True)
            _assert_same(dict(model.state_dict()), wanted)
            if make is _converted:
                _forward_is_fresh(model)


def _forward_is_fresh(model: nn.Sequential) -> None:
    """The output is that of an unsharded model with the weights as they are now."""
    reference = _converted()
    whole = {name: _whole(p) for name, p in model.named_parameters()}
    reference.load_state_dict(whole)
    with torch.no_grad():
        for step in (7, 8):
            assert torch.equal(_loss(model, step), _loss(reference, step))


def _table(model: nn.Sequential, layer: int) -> Any:
    return shard_of(model[layer].weight).identity.place[0]


WRITES: tuple[Callable[[Tensor], Any], ...] = (
    lambda p: p.mul_(8),
    lambda p: p.data.mul_(8),
    lambda p: p.detach().mul_(8),
    lambda p: p.to_local().mul_(8),
    lambda p: p.data.to_local().mul_(8),
    lambda p: p.detach().to_local().mul_(8),
)


def _notice(rank: int, world: int, folder: str) -> None:
    warnings.simplefilter("ignore")
    mesh = DeviceMesh("cpu", list(range(world)))
    model = _sharded(_converted(), mesh)
    optimizer = _optimizer(model)
    for step in range(2):
        _step(model, optimizer, step)

    # one reduction an optimizer step, for all weights that every rank has rows of
    assert _table(model, 0) is _table(model, 2) is not _table(model, 4)
    for precompute in (False, True):
        before = _table(model, 0).reductions
        if precompute:
            assert blocktensor.distributed.precompute_block_amax(model) == 3
            assert _table(model, 0).reductions == before + 1
        for microbatch in range(3):
            model.set_requires_gradient_sync(microbatch == 2)
            _loss(model, microbatch).backward()
        assert _table(model, 0).reductions == before + 1
        optimizer.step()
        optimizer.zero_grad()

    # writes through aliases
    for write in WRITES:
        for layer in (0, 4):
            with torch.no_grad():
                write(model[layer].weight)
            _forward_is_fresh(model)

    # loads in place, of all and of one weight at a time
    larger = {name: value * 64 for name, value in model.state_dict().items()}
    dcp.save(larger, checkpoint_id=f"{folder}/larger")
    for names in (["4.weight"], ["2.weight"], ["0.bias"], ["0.weight"], list(larger)):
        _forward_is_fresh(model)
        state = model.state_dict()
        dcp.load({name: state[name] for name in names}, checkpoint_id=f"{folder}/larger")
        for name in names:
            assert torch.equal(_whole(model.get_parameter(name)), _whole(larger[name]))
        _forward_is_fresh(model)
        with torch.no_grad():
            for name in names:
                model.get_parameter(name).mul_(1 / 64)

    # saved while training goes on: what was there at the call
    at_call = _snapshot(model, optimizer)
    weights, state = dcs.get_state_dict(model, optimizer)
    group = dist.new_group(backend="gloo")  # of the thread that saves
    saving = dcp.async_save(
        {"model": weights, "optimizer": state},
        checkpoint_id=f"{folder}/async",
        process_group=group,
    )
    for step in range(3):
        _step(model, optimizer, step)
    saving.result()
    dist.barrier()
    other = _sharded(_converted(seed=3), mesh)
    their_optimizer = _optimizer(other)
    _load(other, their_optimizer, f"{folder}/async", mesh)
    _assert_same(_snapshot(other, their_optimizer), at_call)
    assert not torch.equal(_whole(model[2].weight), at_call["2.weight"])

    # plain DTensors: assigned, or copied, onto the same weights that FSDP gathers in FP8
    loads: tuple[tuple[bool, bool], ...] = ((True, True), (True, False), (False, True))
    for assign, after_forward in loads:
        target = _sharded(_converted(seed=4), mesh)
        if after_forward:
            _loss(target, 0)
        state = {name: value.clone() for name, value in model.state_dict().items()}
        assert {type(value._local_tensor) for value in state.values()} == {Tensor}
        target.load_state_dict(state, assign=assign)
        _forward_is_fresh(target)
        for layer in (0, 2, 4):
            local = target[layer].weight._local_tensor
            assert type(local) is FP8Shard
            assert local.recipe == model[layer].weight._local_tensor.recipe
            assert torch.equal(_whole(target[layer].weight), _whole(model[layer].weight))
        theirs = _optimizer(target)
        _step(target, theirs, 9)
        _forward_is_fresh(target)
    target = _sharded(_converted(seed=4), mesh)
    one = {"2.weight": model.state_dict()["2.weight"].clone()}
    _loss(target, 0)
    target.load_state_dict(one, assign=True, strict=False)
    _forward_is_fresh(target)


@pytest.mark.slow
def test_what_loads_and_writes_change_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ranks, "TIMEOUT", 100)  # ranks that disagree hang
    ranks.run(_notice, 3, str(tmp_path))
