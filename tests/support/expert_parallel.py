"""Expert parallelism for tests, as torchtitan has it: cut stacks, tokens that travel to them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_to_all_single_autograd
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_module, distribute_tensor

from blocktensor import BlockwiseFP8Tensor, Recipe, convert
from tests.support.models import randn
from tests.support.moe_models import GroupedExperts
from tests.support.sharded import assert_equal, gradients, step


class Dispatched(nn.Module):
    """Experts whose stacks are cut between the ranks of ``group``, and the way to them and back.

    ``send``: the autograd function that brings rows to other ranks.
    """

    def __init__(
        self,
        experts: nn.Module,
        group: dist.ProcessGroup,
        send: Callable[..., Any] = all_to_all_single_autograd,
    ) -> None:
        super().__init__()
        self.experts, self.group, self.send = experts, group, send

    def forward(self, x: Tensor, sizes: Sequence[int]) -> Tensor:
        """``x[T, K]`` of this rank, sorted by expert; ``sizes``: how many rows each expert gets."""
        ranks, experts = self.group.size(), len(sizes)
        each = -(-experts // ranks)
        mine = slice(self.group.rank() * each, (self.group.rank() + 1) * each)
        everyone: list[Any] = [None] * ranks
        dist.all_gather_object(everyone, list(sizes), self.group)
        sent = [sum(sizes[r * each : (r + 1) * each]) for r in range(ranks)]
        arriving = [counts[mine] for counts in everyone]  # by source, then by expert
        got = [sum(counts) for counts in arriving]
        rows = self.send(x, got, sent, self.group)
        expert = [e for counts in arriving for e, n in enumerate(counts) for _ in range(n)]
        order = torch.tensor(expert, dtype=torch.long).argsort(stable=True).to(x.device)
        local = torch.tensor([sum(n) for n in zip(*arriving, strict=True)], dtype=torch.long)
        y = self.experts(rows[order], local.to(x.device))
        y = y.new_empty(y.shape).index_copy(0, order, y)
        return all_to_all_single_autograd(y, sent, got, self.group)


def experts_of(
    count: int, k: int = 192, n: int = 256, device: str = "cpu", dtype: torch.dtype = torch.float32
) -> GroupedExperts:
    return GroupedExperts(count, k, n).to(device, dtype)


def assert_steps_as_one(single: nn.Module, model: Dispatched, sizes: Any, device: str) -> None:
    """Two steps of AdamW on several ranks are those of one process, bit for bit.

    Args:
        single: all experts, which get the rows of all ranks.
        model: the same, of which each rank has some.
        sizes: for each rank of the group, how many rows each expert gets.
    """
    rank, k = model.group.rank(), next(single.parameters()).shape[-1]
    begin = sum(map(sum, sizes[:rank]))
    mine = slice(begin, begin + sum(sizes[rank]))
    # one process sorts the rows of all ranks by expert, then by rank
    expert = [e for counts in sizes for e, n in enumerate(counts) for _ in range(n)]
    index = torch.tensor(expert, dtype=torch.long).argsort(stable=True).to(device)
    counts = torch.tensor(sizes).sum(0).to(device)
    options: dict[str, Any] = {"lr": 1e-2, "foreach": False}  # as in sharded.assert_trains_as
    optimizers = [torch.optim.AdamW(m.parameters(), **options) for m in (model, single)]
    for number in range(2):
        everything = randn(len(expert), k, seed=2 * number, device=device, grad=True)
        grad = randn(len(expert), k, seed=2 * number + 1, device=device)
        y = single(everything[index], counts)
        y = torch.empty_like(y).index_copy(0, index, y)
        y.backward(grad)
        x = everything.detach()[mine].clone().requires_grad_()
        got = model(x, sizes[rank])
        got.backward(grad[mine])
        assert_equal([got, x.grad], [y[mine], everything.grad[mine]])
        assert_equal(gradients(model), gradients(single))
        step(*optimizers)
        assert_equal(model.parameters(), single.parameters())


def converted(model: nn.Module, recipe: Recipe | None = None) -> nn.Module:
    convert(model, recipe, skip_small=False)
    return model


def cut(model: nn.Module, mesh: DeviceMesh, dim: int = 0, **dims: int) -> nn.Module:
    """Cut every stack along ``dim``, or those named along their own."""

    def cut(name: str, module: nn.Module, mesh: DeviceMesh) -> None:
        for key, parameter in module.named_parameters(recurse=False):
            cut = distribute_tensor(parameter, mesh, [Shard(dims.get(key, dim))])
            module.register_parameter(key, nn.Parameter(cut, parameter.requires_grad))

    return distribute_module(model, mesh, cut)


def cut_in_fp8(model: nn.Module, mesh: DeviceMesh, before: bool, **dims: int) -> nn.Module:
    """Cut a copy of the model; convert it ``before``, or the parts."""
    model = copy.deepcopy(model)
    return cut(converted(model), mesh, **dims) if before else converted(cut(model, mesh, **dims))


def local_values(stack: Tensor) -> Tensor:
    """Of a stack, or of the part of it on this rank, plain."""
    local: Any = stack.to_local() if isinstance(stack, DTensor) else stack
    return local.dequantize() if isinstance(local, BlockwiseFP8Tensor) else local.master


def step_of(model: nn.Module) -> Tensor:
    """The output of 20 rows for each expert of this rank, after its backward."""
    count, _, k = model.w1_EFD.to_local().shape
    y = model(randn(20 * count, k, seed=5, grad=True), torch.full((count,), 20))
    y.backward(randn(*y.shape, seed=6))
    return y.detach()
