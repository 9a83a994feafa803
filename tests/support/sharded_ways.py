"""Ways to train under FSDP2, each compared with one process: run by ``test_fsdp.py`` on ranks."""

from __future__ import annotations

import copy
import traceback
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    fully_shard,
)
from torch.distributed.tensor import Shard, distribute_tensor
from torch.utils.checkpoint import checkpoint

from blocktensor import (
    BlockwiseFP8Tensor,
    Recipe,
    convert,
    memory_report,
    save_fp8,
    share_inputs,
)
from blocktensor.distributed import precompute_block_amax
from blocktensor.distributed.shard import shard_of
from blocktensor.ops import reference
from tests.distributed.frozen_base import adapters_on_a_frozen_base
from tests.distributed.nets import (
    K,
    batch,
    build,
    deep,
    loss_of,
    mesh_of,
    reductions,
    shard,
    train_beside_a_whole_one,
    whole,
)
from tests.support.numeric import assert_same


class Siblings(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.gate, self.up = (nn.Linear(K, 130, bias=False) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.gate(x) * self.up(x)
        return made


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


def inputs_shared(world: int, device: str) -> None:
    model = Siblings().to(device, torch.bfloat16)
    convert(model, auto_filter_small_kn=False)
    single = copy.deepcopy(model)
    fully_shard(model, mesh=mesh_of(world, device))
    report = share_inputs(model)
    train_beside_a_whole_one(model, single, device)
    assert (report.casts, report.saved) == (3, 3)


def reports_and_files(world: int, device: str) -> None:
    model, single = _plain(world, device)
    for one in (model, single):
        assert memory_report(one).trainable.high_precision > 0
    rows = sum(p._local_tensor.nbytes for p in model.parameters() if shard_of(p) is not None)
    assert memory_report(model).trainable.high_precision == rows
    assert memory_report(model).trainable.fp8 == 0
    with pytest.raises(NotImplementedError, match=r"up\.weight is a DTensor, its model sharded"):
        save_fp8(model, "nowhere")


def a_byte_a_parameter_and_no_growth(world: int, device: str) -> None:
    model = deep(4).to(device)
    convert(model, auto_filter_small_kn=False)
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
            size = sum(part.nbytes for part in weight.rowwise())
            assert size <= 1.01 * weight.numel()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        held.append(torch.cuda.memory_allocated() if device == "cuda" else 0)
    assert max(held[3:]) == held[3]


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
    adapters_on_a_frozen_base,
    inputs_shared,
    reports_and_files,
    a_byte_a_parameter_and_no_growth,
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
