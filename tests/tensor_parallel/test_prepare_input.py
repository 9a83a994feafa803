"""PrepareModuleInput casts and gathers once for all linears that read an input."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import parallelize_module

from blocktensor import Recipe, convert
from blocktensor.distributed import ColwiseParallel, PrepareModuleInput, RowwiseParallel
from tests.support.numeric import assert_same, relative_error
from tests.support.parallel_linears import drawn, in_order, local, one_backend, partial_dgrad
from tests.support.ranks import on_ranks
from tests.support.sharded import mesh_of
from tests.support.wire import Wire

K = 256
WGRAD_INPUTS = ("1x128", "128x128", "high_precision")
LEADS = {"on the grid": ((2, 128), 1), "off the grid": ((2, 51), 1), "across a batch": ((64, 5), 0)}


class Siblings(nn.Module):
    """Two linears of one input."""

    def __init__(self, n: int) -> None:
        super().__init__()
        self.first, self.second = (nn.Linear(K, n, bias=False) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.first(x) + self.second(x)
        return made


def siblings(n: int, recipe: Recipe | None, dtype: torch.dtype = torch.bfloat16) -> Siblings:
    torch.manual_seed(0)
    made = Siblings(n).to(dtype)
    if recipe is not None:
        convert(made, recipe, skip_small=False)
    return made


def parallel(module: Siblings, world: int, device: str, tokens: Any, **options: Any) -> Siblings:
    mesh = mesh_of(world, device)
    plan = {name: ColwiseParallel(**options) for name in ("first", "second")}
    parallelize_module(module.to(device), mesh, plan)
    style = PrepareModuleInput(input_layouts=tokens, desired_input_layouts=Replicate(), **options)
    parallelize_module(module, mesh, style)
    return module


def mine(x: Tensor, world: int, dim: int) -> Tensor:
    return x.chunk(world, dim=dim)[dist.get_rank()].contiguous()


def run(module: Siblings, x: Tensor, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    x = x.clone().requires_grad_()
    y = module(x)
    y.backward(grad)
    assert x.grad is not None
    return y.detach(), x.grad, local(module.first.weight.grad), local(module.second.weight.grad)


@on_ranks(2, 4, gpus=[2])
def test_bits_are_those_of_one_process(world: int, device: str) -> None:
    with one_backend(device):
        check_bits(world, device)


def check_bits(world: int, device: str) -> None:
    for wgrad_input, each, lead, sequence in itertools.product(
        WGRAD_INPUTS, (128, 64) if world == 2 else (64,), LEADS, (True, False)
    ):
        recipe, ((*shape,), dim) = Recipe(wgrad_input=wgrad_input), LEADS[lead]  # type: ignore[arg-type]
        n, dtype = each * world, torch.bfloat16
        shape[dim] *= world
        x, grad = (drawn((*shape, size), dtype, seed).to(device) for size, seed in ((K, 1), (n, 2)))
        whole = siblings(n, recipe).to(device)
        want_y, _, *want_dws = run(whole, x, grad)
        layout = Shard(dim) if sequence else Replicate()
        module = parallel(siblings(n, recipe), world, device, layout, in_rank_order=True)
        x_mine = mine(x, world, dim) if sequence else x
        y, dx, *dws = run(module, x_mine, mine(grad, world, -1))
        assert_same(y, mine(want_y, world, -1))
        for dw, want in zip(dws, want_dws, strict=True):
            if wgrad_input == "high_precision":  # a product of another size, summed otherwise
                assert relative_error(dw, mine(want, world, 0)) < 4e-3
            else:
                assert_same(dw, mine(want, world, 0))
        partials = [
            sum(partial_dgrad(m, grad, world, r, dtype) for m in (whole.first, whole.second))
            for r in range(world)
        ]
        want_dx = in_order(partials).to(dtype).view_as(x)  # type: ignore[arg-type]
        assert_same(dx, mine(want_dx, world, dim) if sequence else want_dx)


@on_ranks(2)
def test_bytes_on_the_wire(world: int, device: str) -> None:
    x = drawn((2, 128, K), torch.bfloat16, 1).to(device).requires_grad_()
    module = parallel(siblings(256, Recipe()), world, device, Shard(1))
    module(x)  # ranks compare
    with Wire() as forward:
        y = module(x)
    with Wire() as backward:
        y.sum().backward()
    for wire in (forward, backward):  # forward rowwise, backward columnwise: once for both linears
        sent = sum(tensor.nbytes for tensor in wire.gathered)
        assert [tensor.dtype for tensor in wire.gathered] == [torch.uint8] * 2  # data and scales
        assert x.numel() < sent <= 0.52 * x.nbytes
    assert not forward.scattered
    (dx,) = backward.scattered
    assert (dx.dtype, dx.numel()) == (torch.bfloat16, x.numel() * world)
    assert not forward.reduced and not backward.reduced


@on_ranks(2)
def test_only_this_ranks_tokens_are_saved(world: int, device: str) -> None:
    saved: list[Tensor] = []
    x = drawn((2, 128, K), torch.bfloat16, 1).to(device).requires_grad_()
    module = parallel(siblings(256, Recipe()), world, device, Shard(1))
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        module(x)
    kept = {(t.data_ptr(), t.dtype, t.numel()) for t in saved if not hasattr(t, "master")}
    assert sorted(str(dtype) for _, dtype, _ in kept) == ["torch.float32", "torch.float8_e4m3fn"]
    assert {n for _, dtype, n in kept if dtype == torch.float8_e4m3fn} == {x.numel()}


@on_ranks(2)
def test_a_linear_left_in_high_precision(world: int, device: str) -> None:
    """The input is gathered as it came, and each linear computes in its own precision."""
    x, grad = (drawn((2, 256, n), torch.bfloat16, i).to(device) for n, i in ((K, 1), (256, 2)))
    whole = siblings(256, None).to(device)
    convert(whole, skip=["second"], skip_small=False)
    module = siblings(256, None)
    convert(module, skip=["second"], skip_small=False)
    parallel(module, world, device, Shard(1))
    with one_backend(device):
        want_y, _, want_dw, _ = run(whole, x, grad)
        y, _, dw, _ = run(module, mine(x, world, 1), mine(grad, world, -1))
    assert_same(dw, mine(want_dw, world, 0))
    assert relative_error(y, mine(want_y, world, -1)) < 4e-3


@on_ranks(2)
def test_unequal_recipes_are_refused(world: int, device: str) -> None:
    module = siblings(256, Recipe())
    convert(module.second, Recipe(scale="power_of_two"), skip_small=False)
    parallel(module, world, device, Shard(1))
    with pytest.raises(ValueError, match="2 FP8 linears of unequal recipes cannot be cast once"):
        module(drawn((2, 128, K), torch.bfloat16, 1).to(device))


@on_ranks(2)
def test_other_products_of_a_prepared_input_are_refused(world: int, device: str) -> None:
    module = siblings(256, Recipe())
    module.add_module("third", nn.Linear(K, 8, bias=False).bfloat16())
    parallel(module, world, device, Shard(1))
    module.register_forward_pre_hook(lambda m, args: (m.third(args[0].view(-1, K)),))
    with pytest.raises(NotImplementedError, match="a product that is not one of ColwiseParallel"):
        module(drawn((2, 128, K), torch.bfloat16, 1).to(device))
    convert(module.third, skip_small=False)
    style = RowwiseParallel(input_layouts=Replicate())
    parallelize_module(module.third, mesh_of(world, device), style)
    with pytest.raises(NotImplementedError, match="a product that is not one of ColwiseParallel"):
        module(drawn((2, 128, K), torch.bfloat16, 1).to(device))


@on_ranks(2)
def test_backward_twice(world: int, device: str) -> None:
    x = drawn((2, 128, K), torch.bfloat16, 1).to(device).requires_grad_()
    module = parallel(siblings(256, Recipe()), world, device, Shard(1), in_rank_order=True)
    loss = module(x).square().sum()
    loss.backward(retain_graph=True)
    first = local(module.first.weight.grad).clone()
    with Wire() as wire:
        loss.backward()
    assert_same(local(module.first.weight.grad), first * 2)
    assert len(wire.gathered) == 2  # again: nothing gathered is kept after its last use
