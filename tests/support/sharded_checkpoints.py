"""A small sharded model, its optimizer, and what torch.distributed.checkpoint writes of both."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict as dcs
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import blocktensor
from blocktensor.recipe import DEFAULT_RECIPE, Recipe
from tests.support.sharded import places_of, scale, whole

# the mean over 3 ranks of what is the same on each is that, if rounded once
IN_FP32 = MixedPrecisionPolicy(reduce_dtype=torch.float32)


def first_ranks(count: int) -> DeviceMesh:
    return DeviceMesh("cpu", list(range(count)))


class Averaged(torch.optim.AdamW):
    """AdamW that also keeps a copy of each parameter, as optimizers that average weights do."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step(closure)
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if "average" not in state:
                    state["average"] = p.detach().clone()
                state["average"].lerp_(p.detach(), 0.5)


def plain(seed: int = 0) -> nn.Sequential:
    """Rows that no number of ranks divides; of the last weight only rank 0 has any."""
    torch.manual_seed(seed)
    layers = (nn.Linear(192, 130), nn.ReLU(), nn.Linear(130, 300, bias=False), nn.ReLU())
    return nn.Sequential(*layers, nn.Linear(300, 1, bias=False)).bfloat16()


def converted(seed: int = 0, recipe: Recipe = DEFAULT_RECIPE) -> nn.Sequential:
    model = plain(seed)
    blocktensor.convert(model, recipe, skip_small=False)
    return model


def sharded(model: nn.Sequential, mesh: DeviceMesh) -> tuple[nn.Sequential, torch.optim.Optimizer]:
    for layer in (*model[::2], model):
        fully_shard(layer, mesh=mesh, mp_policy=IN_FP32)
    return model, Averaged(model.parameters(), lr=1e-2)


def trained(mesh: DeviceMesh) -> tuple[nn.Sequential, torch.optim.Optimizer]:
    """A converted, sharded model after its first two steps, and its optimizer."""
    model, optimizer = sharded(converted(), mesh)
    for step in range(2):
        train(model, optimizer, step)
    return model, optimizer


def table_of(model: nn.Sequential, layer: int) -> Any:
    (place,) = places_of(model[layer])
    return place.table


def loss_of(model: nn.Module, step: int) -> Tensor:
    x = torch.randn(20, 192, generator=torch.Generator().manual_seed(step)).bfloat16()
    x = x.to(next(model.parameters()).device)
    return (model(x).float() - 1).square().mean()


def train(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> Tensor:
    """Train one step, whose batch depends on its number; the loss."""
    optimizer.zero_grad()
    loss = loss_of(model, step)
    loss.backward()
    optimizer.step()
    return loss.detach()


def weights_of(model: nn.Module) -> dict[str, Tensor]:
    """The whole parameters; all ranks of the model must ask."""
    return {name: whole(p) for name, p in model.named_parameters()}


def snapshot(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    found = weights_of(model)
    for name, p in model.named_parameters():
        for key, value in optimizer.state[p].items():
            found[f"{name}:{key}"] = whole(value)
    return found


def assert_same_tensors(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        assert type(found[name]) is Tensor, name
        assert torch.equal(found[name], value), name


def assert_forward_is_fresh(model: nn.Sequential, like: nn.Module | None = None) -> None:
    """The output is that of an unsharded model (``like``) with the weights as they are now."""
    reference = like or converted()
    reference.load_state_dict(weights_of(model))
    with torch.no_grad():
        for step in (7, 8):
            assert torch.equal(loss_of(model, step), loss_of(reference, step))


def save(
    model: nn.Module, optimizer: torch.optim.Optimizer, folder: Any, mesh: DeviceMesh | None = None
) -> None:
    """Write a model and its optimizer, from the ranks of ``mesh``, or from all."""
    weights, state = dcs.get_state_dict(model, optimizer)
    both = {"model": weights, "optimizer": state}
    dcp.save(both, checkpoint_id=folder, process_group=mesh and mesh.get_group())


def load(
    model: nn.Module, optimizer: torch.optim.Optimizer, folder: Any, mesh: DeviceMesh | None = None
) -> None:
    """Read what :func:`save` has written, on any number of ranks."""
    weights, state = dcs.get_state_dict(model, optimizer)
    both = {"model": weights, "optimizer": state}
    dcp.load(both, checkpoint_id=folder, process_group=mesh and mesh.get_group())
    dcs.set_state_dict(
        model, optimizer, model_state_dict=weights, optim_state_dict=both["optimizer"]
    )


def assert_read_by(others: Any, model: nn.Module, step: Any, folder: Any) -> None:
    """What a model writes is read by others, which train on from there as it does, bit for bit.

    Args:
        others: make models, sharded in other ways.
        model: trains one step, is written, and trains on.
        step: trains one step of this number.
        folder: for the checkpoint, empty.
    """

    def train_on(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[dict[str, Tensor]]:
        found = []
        for number in (1, 2):
            step(model, optimizer, number)
            found.append(weights_of(model))
        return found

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    step(model, optimizer, 0)
    save(model, optimizer, folder)
    wanted = [weights_of(model), *train_on(model, optimizer)]
    for make in others:
        other = make()
        scale(2, *other.parameters())
        optimizer = torch.optim.AdamW(other.parameters(), lr=1e-2)
        step(other, optimizer, 7)  # amaxes and moments of other weights are there
        load(other, optimizer, folder)
        found = [weights_of(other), *train_on(other, optimizer)]
        for got, want in zip(found, wanted, strict=True):
            assert_same_tensors(got, want)
