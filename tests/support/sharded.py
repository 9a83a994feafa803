"""Small models for the tests of FSDP2, and the comparison of a sharded one with a whole one."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from blocktensor import BlockwiseFP8Weight, Recipe, convert
from blocktensor.ops.formats import Quantized
from blocktensor.sharding.dtensor import local_of
from blocktensor.sharding.fsdp.amax_table import Place, known_place
from blocktensor.sharding.fsdp.fsdp_internals import owner_of
from blocktensor.sharding.fsdp.shards import FP8Shard
from tests.support.numeric import assert_same

RECIPES = (Recipe(), Recipe(scale="power_of_two"))
K, HIDDEN, OUT = 192, 300, 130


def shard_of(x: Any) -> FP8Shard | None:
    """Return the local part of a DTensor, if that is an FP8Shard."""
    local = local_of(x)
    return local if isinstance(local, FP8Shard) else None


class Net(nn.Module):
    """Three linears that share rows and blocks between ranks; no bias, whose sums FSDP rounds."""

    def __init__(self, tied: bool = False) -> None:
        super().__init__()
        self.up = nn.Linear(K, HIDDEN, bias=False)
        self.mid = nn.Linear(HIDDEN, HIDDEN, bias=False)
        self.down = nn.Linear(HIDDEN, OUT, bias=False)
        self.norm = nn.LayerNorm(HIDDEN)
        if tied:
            self.mid2 = nn.Linear(HIDDEN, HIDDEN, bias=False)
            self.mid2.weight = self.mid.weight

    def forward(self, x: Tensor) -> Tensor:
        x = self.mid(self.norm(self.up(x).relu())).relu()
        if hasattr(self, "mid2"):
            x = self.mid2(x).relu()
        return self.down(x)


def build(
    recipe: Recipe | None = None, dtype: torch.dtype = torch.bfloat16, **kwargs: Any
) -> nn.Module:
    """A :class:`Net` of the same values on every rank, converted if there is a recipe."""
    torch.manual_seed(0)
    model = Net(**kwargs).to(dtype)
    if recipe is not None:
        convert(model, recipe, skip_small=False)
    return model


def twins(device: str, recipe: Recipe | None = None, **kwargs: Any) -> tuple[nn.Module, nn.Module]:
    """A converted :class:`Net`, to be sharded, and a copy of it, which stays whole."""
    model = build(recipe or Recipe(), **kwargs).to(device)
    return model, copy.deepcopy(model)


def deep(layers: int) -> nn.Sequential:
    """Linears of 4 x 4 blocks, one after the other."""
    torch.manual_seed(0)
    made = [nn.Linear(512, 512, bias=False) for _ in range(layers)]
    return nn.Sequential(*made).bfloat16()


def mesh_of(world: int, device: str) -> DeviceMesh:
    return init_device_mesh(device, (world,))


def shard(model: nn.Module, mesh: DeviceMesh, by_layer: bool = True, **kwargs: Any) -> None:
    """Shard a :class:`Net`: ``up`` and ``down`` by themselves unless not ``by_layer``, then all."""
    for module in [model.up, model.down] if by_layer else []:
        fully_shard(module, mesh=mesh, **kwargs)
    fully_shard(model, mesh=mesh, **kwargs)


def batch(step: int, device: str, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(20, K, generator=torch.Generator().manual_seed(step)).to(device, dtype)


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).float().square().mean()


def whole(x: Tensor) -> Tensor:
    """A plain copy: of all of a DTensor, of the master of an FP8 weight."""
    x = x.detach()
    x = x.full_tensor() if isinstance(x, DTensor) else x
    return (x.master if isinstance(x, (BlockwiseFP8Weight, FP8Shard)) else x).clone()


def assert_equal(found: Iterable[Tensor], wanted: Iterable[Tensor]) -> None:
    """The wholes agree, bit for bit."""
    for got, want in zip(found, wanted, strict=True):
        assert torch.equal(whole(got), whole(want))


def gradients(model: nn.Module) -> list[Tensor]:
    return [p.grad for p in model.parameters()]  # type: ignore[misc]


def local_kinds(model: nn.Module) -> set[type]:
    return {type(p._local_tensor) for p in model.parameters()}


@torch.no_grad()
def scale(by: float, *parameters: Tensor) -> None:
    for p in parameters:
        p.mul_(by)


def step(*optimizers: torch.optim.Optimizer) -> None:
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()


def assert_trains_as(
    single: nn.Module,
    model: nn.Module,
    device: str,
    steps: int = 3,
    microbatches: int = 1,
    exact_gradients: bool = True,
    run: Callable[[nn.Module, Tensor], Tensor] = loss_of,
    **adamw: Any,
) -> None:
    """Losses, gradients and weights of a sharded model are those of a whole one, bit for bit.

    Args:
        single, model: the whole one and the sharded one. What is not frozen is trained.
        device: of the inputs.
        steps: of AdamW, whose options are ``adamw``, each over ``microbatches``. It updates tensors
            one by one: on GPUs, in fp32, the other way rounds otherwise, and takes no FP8 weights.
        exact_gradients: False where ranks round as they sum gradients.
        run: returns the loss of a model.
    """

    def trainable() -> list[list[Tensor]]:
        return [[p for p in m.parameters() if p.requires_grad] for m in (model, single)]

    options: dict[str, Any] = {"lr": 1e-2, "foreach": False, **adamw}
    optimizers = [torch.optim.AdamW(parameters, **options) for parameters in trainable()]
    for number in range(steps):
        for micro in range(microbatches):
            x = batch(number * microbatches + micro, device)
            if isinstance(model, FSDPModule):
                model.set_requires_gradient_sync(micro == microbatches - 1)
            losses = [run(m, x) for m in (model, single)]
            assert torch.equal(*[loss.detach() for loss in losses]), (number, losses)
            for loss in losses:
                loss.backward()
        for p, q in zip(*trainable(), strict=True):
            assert p.grad is not None and q.grad is not None
            if exact_gradients:
                assert_equal([p.grad], [q.grad])
            q.grad.copy_(whole(p.grad))  # ranks that divide by 3 round
        step(*optimizers)
        assert_equal(*trainable())


def assert_same_cast(got: Quantized, want: Quantized) -> None:
    assert_same(got.data, want.data)
    assert_same(got.scale, want.scale)
    assert got.format is want.format


def places_of(model: nn.Module) -> list[Place]:
    """Where the weights of a sharded model are in tables of amaxes, after its first forward."""
    shards = [shard for p in model.parameters() if (shard := shard_of(p)) is not None]
    return [place for x in shards if (place := known_place(owner_of(x))) is not None]


def reductions(model: nn.Module) -> int:
    """How often block amaxes were reduced."""
    return sum(table.reductions for table in {place.table for place in places_of(model)})


def nbytes(tensors: Iterable[Tensor]) -> int:
    return sum(x.nbytes for x in tensors)


class Wire(TorchDispatchMode):
    """Every tensor that is gathered, all-reduced, or cut and sent to be added."""

    def __init__(self) -> None:
        super().__init__()
        self.gathered: list[Tensor] = []
        self.reduced: list[Tensor] = []
        self.scattered: list[Tensor] = []
        self.collectives: list[tuple[str, int]] = []
        """Names of functional collectives, and the bytes that this rank brings to each."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = func.overloadpacket.__name__
        if func.namespace == "c10d" and "gather" in name:
            self.gathered.append(args[1])
        elif func.namespace == "c10d" and "allreduce" in name:
            self.reduced += args[0]
        elif func.namespace == "_c10d_functional" and name != "wait_tensor":
            sent = args[0] if isinstance(args[0], list) else [args[0]]
            self.collectives.append((name, nbytes(sent)))
            for part, seen in (
                ("gather", self.gathered),
                ("all_reduce", self.reduced),
                ("reduce_scatter_tensor", self.scattered),
            ):
                seen += sent if part in name else []
        return func(*args, **(kwargs or {}))
