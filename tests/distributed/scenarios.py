"""What ranks do in the FSDP2 tests: each scenario trains a sharded model beside one whole one."""

from __future__ import annotations

import copy
import datetime
import traceback
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    fully_shard,
)
from torch.distributed.tensor import Shard, distribute_tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from blocktensor import BlockwiseFP8Tensor, BlockwiseFP8Weight, Recipe, convert
from blocktensor.distributed import FP8Shard, agreement, precompute_block_amax
from blocktensor.distributed.shard import shard_of
from blocktensor.ops import reference
from tests.numeric import assert_same

K, HIDDEN, OUT = 192, 300, 130


class Net(nn.Module):
    """Two linears that share rows and blocks between ranks; no bias, whose sums FSDP rounds."""

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
        made: Tensor = self.down(x)
        return made


def build(
    recipe: Recipe | None = None, dtype: torch.dtype = torch.bfloat16, **kwargs: Any
) -> nn.Module:
    torch.manual_seed(0)
    model = Net(**kwargs).to(dtype)
    if recipe is not None:
        convert(model, recipe, auto_filter_small_kn=False)
    return model


def shard(model: nn.Module, mesh: DeviceMesh, by_layer: bool = True, **kwargs: Any) -> None:
    for module in [model.up, model.down] if by_layer else []:
        fully_shard(module, mesh=mesh, **kwargs)
    fully_shard(model, mesh=mesh, **kwargs)


def batch(step: int, device: str, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(20, K, generator=torch.Generator().manual_seed(step)).to(device, dtype)


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    made: Tensor = model(x).float().square().mean()
    return made


def whole(parameter: Tensor) -> Tensor:
    """All of a parameter, plain."""
    if hasattr(parameter, "full_tensor"):
        parameter = parameter.full_tensor()
    return parameter.master if isinstance(parameter, (BlockwiseFP8Weight, FP8Shard)) else parameter


def train_beside_a_whole_one(
    model: nn.Module,
    single: nn.Module,
    device: str,
    steps: int = 3,
    microbatches: int = 1,
    exact_gradients: bool = True,
    run: Callable[[nn.Module, Tensor], Tensor] = loss_of,
    **adamw: Any,
) -> None:
    """Losses, gradients and weights agree bit for bit with one process that has it all."""
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2, **adamw) for m in (model, single)]
    for step in range(steps):
        for micro in range(microbatches):
            x = batch(step * microbatches + micro, device)
            if isinstance(model, FSDPModule):
                model.set_requires_gradient_sync(micro == microbatches - 1)
            losses = [run(m, x) for m in (model, single)]
            assert torch.equal(*[loss.detach() for loss in losses]), (step, losses)
            for loss in losses:
                loss.backward()
        for p, q in zip(model.parameters(), single.parameters(), strict=True):
            assert p.grad is not None and q.grad is not None
            gradient = p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad
            if exact_gradients:
                assert torch.equal(gradient, q.grad), step
            q.grad.copy_(gradient)  # ranks that divide by 3 round
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        for p, q in zip(model.parameters(), single.parameters(), strict=True):
            assert torch.equal(whole(p), whole(q)), step


def reductions(model: nn.Module) -> int:
    """How often block amaxes were reduced."""
    tables = {}
    for parameter in model.parameters():
        found = shard_of(parameter)
        if found is not None and found.identity.place is not None:
            tables[id(found.identity.place[0])] = found.identity.place[0]
    return sum(table.reductions for table in tables.values())


def mesh_of(world: int, device: str) -> DeviceMesh:
    return init_device_mesh(device, (world,))


# Bytes

ROWS = (1, 64, 127, 128, 192, 576, 1000, 4096, 10944)
RECIPES = (Recipe(), Recipe(scale="power_of_two"))
COLUMNS = 240  # 2, 3 and 4 ranks share them evenly, in parts of blocks


class Once(nn.Module):
    def __init__(self, rows: int, tied: bool) -> None:
        super().__init__()
        self.a = nn.Linear(COLUMNS, rows, bias=False)
        self.b = nn.Linear(COLUMNS, rows, bias=False)
        if tied:
            self.b.weight = self.a.weight

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.a(x) + self.b(x)
        return made


def gathered_bytes(rank: int, world: int, device: str, rows: tuple[int, ...]) -> int:
    """How many combinations were gathered as one process casts."""
    mesh, done = mesh_of(world, device), 0
    for n in rows:
        for recipe in RECIPES:
            for tied, dim in ((False, 0), (True, 0), (False, 1)):
                if n > 1000 and (tied or recipe.power_of_two):
                    continue  # large ones take their time
                torch.manual_seed(n)
                model = Once(n, tied).to(device, torch.bfloat16)
                with torch.no_grad():
                    model.a.weight[n // 2, 5] = 300.0  # a block's maximum on one rank
                convert(model, recipe, auto_filter_small_kn=False)
                masters = [m.weight.master.clone() for m in (model.a, model.b)]
                place = None if dim == 0 else (lambda p: Shard(1))
                fully_shard(model, mesh=mesh, shard_placement_fn=place, reshard_after_forward=False)
                with torch.no_grad():
                    y = model(torch.ones(2, COLUMNS, device=device, dtype=torch.bfloat16))
                assert y.shape == (2, n)
                for module, master in zip((model.a, model.b), masters, strict=True):
                    weight = module.weight
                    assert isinstance(weight, BlockwiseFP8Tensor)
                    assert weight.columnwise_data is None
                    wanted = reference.quantize_square(master, recipe.power_of_two)
                    for got, want in zip(weight.rowwise(), wanted, strict=True):
                        assert_same(got, want)
                model.reshard()
                # rows that some rank has none of are reduced by themselves
                alone = dim == 0 and -(-n // world) * (world - 1) >= n
                assert reductions(model) == (2 if alone and not tied else 1)
                done += 1
    return done


# Ways to train


def _plain(world: int, device: str, **kwargs: Any) -> tuple[nn.Module, nn.Module]:
    model = build(Recipe()).to(device)
    single = copy.deepcopy(model)
    shard(model, mesh_of(world, device), **kwargs)
    return model, single


def twenty_steps(world: int, device: str) -> None:
    model, single = _plain(world, device)
    train_beside_a_whole_one(model, single, device, steps=20, foreach=True)
    assert reductions(model) == 20


def fused_adamw(world: int, device: str) -> None:
    model, single = _plain(world, device)
    train_beside_a_whole_one(model, single, device, fused=True)


def power_of_two_kept_columnwise(world: int, device: str) -> None:
    model = build(Recipe(scale="power_of_two", columnwise="keep")).to(device)
    single = copy.deepcopy(model)
    shard(model, mesh_of(world, device))
    train_beside_a_whole_one(model, single, device)


def tied_weights(world: int, device: str) -> None:
    model = build(Recipe(), tied=True).to(device)
    single = copy.deepcopy(model)
    shard(model, mesh_of(world, device))
    train_beside_a_whole_one(model, single, device, exact_gradients=False)


def not_resharded(world: int, device: str) -> None:
    model, single = _plain(world, device, reshard_after_forward=False)
    train_beside_a_whole_one(model, single, device)


def one_group(world: int, device: str) -> None:
    model, single = _plain(world, device, by_layer=False)
    train_beside_a_whole_one(model, single, device)


def offloaded(world: int, device: str) -> None:
    model, single = _plain(world, device, offload_policy=CPUOffloadPolicy(pin_memory=False))
    if device == "cpu":
        train_beside_a_whole_one(model, single, device)
    else:
        for step in range(2):
            assert torch.equal(*[loss_of(m, batch(step, device)).detach() for m in (model, single)])


def microbatches(world: int, device: str) -> None:
    model, single = _plain(world, device)
    train_beside_a_whole_one(model, single, device, microbatches=3, exact_gradients=False)
    assert reductions(model) == 3  # once a step, whatever the number of forwards


def prefetching(world: int, device: str) -> None:
    model, single = _plain(world, device)
    model.set_modules_to_forward_prefetch([model.up, model.down])
    model.down.set_modules_to_backward_prefetch([model.up])
    train_beside_a_whole_one(model, single, device)


def evaluation_between(world: int, device: str) -> None:
    model, single = _plain(world, device)

    def run(m: nn.Module, x: Tensor) -> Tensor:
        with torch.no_grad():
            before = loss_of(m, x)
        loss = loss_of(m, x)
        assert torch.equal(before, loss.detach())
        return loss

    train_beside_a_whole_one(model, single, device, run=run)
    assert reductions(model) == 3


def sharded_by_columns(world: int, device: str) -> None:
    def place(p: Tensor) -> Shard | None:
        return Shard(1) if p.ndim == 2 and p.shape[1] % world == 0 else None

    model, single = _plain(world, device, shard_placement_fn=place)
    train_beside_a_whole_one(model, single, device, exact_gradients=world != 3)


def converted_afterwards(world: int, device: str) -> None:
    model, single = build().to(device), build(Recipe()).to(device)
    shard(model, mesh_of(world, device))
    report = convert(model, auto_filter_small_kn=False)
    assert len(report.converted) == 3
    assert {entry.reason for entry in report.converted} == {"trainable, gathered in FP8"}
    train_beside_a_whole_one(model, single, device)


def from_meta(world: int, device: str) -> None:
    single = build(Recipe()).to(device)
    with torch.device("meta"):
        model = build(Recipe())
    mesh = mesh_of(world, device)
    shard(model, mesh)
    model.to_empty(device=device)
    for p, q in zip(model.parameters(), single.parameters(), strict=True):
        with torch.no_grad():
            p.copy_(distribute_tensor(whole(q), mesh))
    train_beside_a_whole_one(model, single, device)


def loaded_in_place(world: int, device: str) -> None:
    model, single = _plain(world, device)
    train_beside_a_whole_one(model, single, device)
    other = build(Recipe()).to(device)
    state = {k: distribute_tensor(v, mesh_of(world, device)) for k, v in other.state_dict().items()}
    model.load_state_dict(state)
    train_beside_a_whole_one(model, other, device)


def checkpointed(world: int, device: str) -> None:
    model, single = _plain(world, device)

    def run(m: nn.Module, x: Tensor) -> Tensor:
        made: Tensor = checkpoint(loss_of, m, x, use_reentrant=False)
        return made

    train_beside_a_whole_one(model, single, device, run=run)


def compiled_by_block(world: int, device: str) -> None:
    torch.use_deterministic_algorithms(False)
    backend = "aot_eager" if device == "cpu" else "inductor"
    model = build(Recipe()).to(device)
    single = copy.deepcopy(model)
    for name in ("up", "down"):
        module = torch.compile(getattr(model, name), fullgraph=True, backend=backend)
        setattr(model, name, module)
    shard(model, mesh_of(world, device))
    train_beside_a_whole_one(model, single, device)


def compiled_in_place(world: int, device: str) -> None:
    torch.use_deterministic_algorithms(False)
    model, single = _plain(world, device)
    for module in (model.up, model.down):
        module.compile(fullgraph=True, backend="aot_eager" if device == "cpu" else "inductor")
    train_beside_a_whole_one(model, single, device)


def mixed_precision(world: int, device: str) -> None:
    """Masters in fp32: the cast is of them, as under autocast in one process."""
    model = build(Recipe(), torch.float32).to(device)
    single = copy.deepcopy(model)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    shard(model, mesh_of(world, device), mp_policy=policy)
    x = batch(0, device)
    model.unshard()
    for module, other in ((model.up, single.up), (model.mid, single.mid)):
        if isinstance(module, FSDPModule):
            module.unshard()
        weight = module.weight
        assert weight.dtype == torch.bfloat16
        wanted = reference.quantize_square(other.weight.master, False)
        for got, want in zip(weight.rowwise(), wanted, strict=True):
            assert_same(got, want)
    model.up.reshard()
    model.reshard()
    loss_of(model, x).backward()
    assert all(p.grad.dtype == torch.float32 for p in model.parameters())


def clipping_and_full_tensors(world: int, device: str) -> None:
    model, single = _plain(world, device)
    for m in (model, single):
        loss_of(m, batch(0, device)).backward()
    norms = [nn.utils.clip_grad_norm_(m.parameters(), 0.01) for m in (model, single)]
    assert torch.allclose(norms[0].full_tensor(), norms[1], rtol=1e-2)
    full = model.up.weight.full_tensor()
    assert type(full) is Tensor
    assert torch.equal(full, single.up.weight.master)
    for name, value in get_model_state_dict(model).items():
        assert type(value._local_tensor) is Tensor, name


def early_reduction(world: int, device: str) -> None:
    model, single = _plain(world, device)
    assert precompute_block_amax(model) == 0
    train_beside_a_whole_one(model, single, device)
    assert precompute_block_amax(model) == 3  # weights, after the last optimizer step
    before = reductions(model)
    assert torch.equal(*[loss_of(m, batch(9, device)).detach() for m in (model, single)])
    assert reductions(model) == before == 4


def a_shard_in_a_product(world: int, device: str) -> None:
    model, _ = _plain(world, device)
    local = shard_of(model.up.weight)
    assert local is not None
    with pytest.raises(NotImplementedError, match="a product needs the whole weight"):
        torch.mm(torch.ones(1, local.shape[0], dtype=local.dtype, device=device), local)


def hybrid(world: int, device: str) -> None:
    model = build(Recipe()).to(device)
    single = copy.deepcopy(model)
    shard(model, init_device_mesh(device, (2, world // 2), mesh_dim_names=("replicate", "shard")))
    train_beside_a_whole_one(model, single, device)


def replicated(world: int, device: str) -> None:
    model = build(Recipe()).to(device)
    single = copy.deepcopy(model)
    replicate(model, mesh=mesh_of(world, device))
    train_beside_a_whole_one(model, single, device)


WAYS: tuple[Callable[[int, str], None], ...] = (
    twenty_steps,
    fused_adamw,
    power_of_two_kept_columnwise,
    tied_weights,
    not_resharded,
    one_group,
    offloaded,
    microbatches,
    prefetching,
    evaluation_between,
    sharded_by_columns,
    converted_afterwards,
    from_meta,
    loaded_in_place,
    checkpointed,
    compiled_by_block,
    compiled_in_place,
    mixed_precision,
    clipping_and_full_tensors,
    early_reduction,
    a_shard_in_a_product,
    replicated,
)


def all_ways(
    rank: int, world: int, device: str, ways: tuple[Callable[[int, str], None], ...]
) -> dict[str, str]:
    """The traceback of each way that failed, by name; empty where it did not."""
    torch.use_deterministic_algorithms(True)
    found = {}
    for way in ways:
        try:
            way(world, device)
            found[way.__name__] = ""
        except Exception:
            found[way.__name__] = traceback.format_exc()
        torch._dynamo.reset()
        dist.barrier()
    return found


# What goes over the wire


class Wire(TorchDispatchMode):
    """Every collective: its name, and the bytes and dtypes of what each rank brings."""

    def __init__(self) -> None:
        super().__init__()
        self.sent: list[tuple[str, int, str]] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func.namespace == "c10d" and "gather" in str(func):
            self.sent.append(("gather", args[1].nbytes, str(args[1].dtype)))
        elif func.namespace == "c10d" and "allreduce" in str(func):
            (tensor,) = args[0]
            self.sent.append(("reduce", tensor.nbytes, str(tensor.dtype)))
        return func(*args, **(kwargs or {}))


def deep(layers: int) -> nn.Module:
    torch.manual_seed(0)
    made = [nn.Linear(512, 512, bias=False) for _ in range(layers)]
    return nn.Sequential(*made).bfloat16()


def wire(
    rank: int, world: int, device: str, layers: int, fp8: bool, micro: int
) -> list[list[tuple[str, int, str]]]:
    """What is gathered and all-reduced in each of three steps."""
    model = deep(layers).to(device)
    if fp8:
        convert(model, auto_filter_small_kn=False)
    mesh = mesh_of(world, device)
    for module in model:
        fully_shard(module, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    steps = []
    for step in range(3):
        with Wire() as seen:
            for _ in range(micro):
                x = torch.randn(4, 512, generator=torch.Generator().manual_seed(step))
                model(x.to(device, torch.bfloat16)).float().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        steps.append(seen.sent)
    return steps


# Mistakes


def _message(attempt: Callable[[], object]) -> str:
    try:
        attempt()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def other_recipe(rank: int, world: int) -> str:
    model = build(RECIPES[rank % 2])
    shard(model, mesh_of(world, "cpu"))
    return _message(lambda: model(batch(0, "cpu")))


def other_conversion(rank: int, world: int) -> str:
    model = build()
    skip = ["mid"] if rank else []
    convert(model, skip=skip, auto_filter_small_kn=False)
    shard(model, mesh_of(world, "cpu"))
    return _message(lambda: model(batch(0, "cpu")))


def one_rank_forgets(rank: int, world: int) -> str:
    agreement.TIMEOUT = datetime.timedelta(seconds=3)
    if rank:
        return "stayed away"
    model = build(Recipe())
    shard(model, mesh_of(world, "cpu"))
    return _message(lambda: model(batch(0, "cpu")))


def under_fsdp1(rank: int, world: int) -> str:
    from torch.distributed.fsdp import FullyShardedDataParallel

    model = build(Recipe())
    return _message(lambda: FullyShardedDataParallel(model, device_id=torch.device("cpu")))


def resharded_to_fewer(rank: int, world: int) -> str:
    model = build(Recipe())
    shard(model, mesh_of(world, "cpu"), reshard_after_forward=2)

    def step() -> None:
        model(batch(0, "cpu")).sum().backward()

    return _message(step)
