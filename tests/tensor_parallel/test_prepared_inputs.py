"""``PrepareModuleInput`` casts and gathers an input once for all linear layers that read it."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import parallelize_module

from blocktensor import Recipe, convert
from blocktensor.distributed import ColwiseParallel, PrepareModuleInput, RowwiseParallel
from tests.support.numeric import assert_same, relative_error
from tests.support.parallel_linears import (
    BF16,
    compute,
    converted,
    drawn,
    in_order,
    local,
    my_part,
    of_all,
    one_backend,
    partial,
)
from tests.support.prepared_inputs import K, input_of, parallel, siblings
from tests.support.ranks import on_ranks
from tests.support.sharded import Wire

WGRAD_INPUTS: tuple[Any, ...] = ("1x128", "128x128", "high_precision")


LEADS = {"on the grid": ((2, 128), 1), "off the grid": ((2, 51), 1), "across a batch": ((32, 5), 0)}


@on_ranks(2, 4, gpus=[2])
def test_bits_are_those_of_one_process(mesh: DeviceMesh, world: int, device: str) -> None:
    """On 4 ranks every fifth way, so that each value of each option is there."""
    ways = itertools.product(WGRAD_INPUTS, (128, 64), LEADS.values(), (True, False))
    some = itertools.islice(ways, 0, None, 1 if world == 2 else 5)
    for wgrad_input, each, ((*shape,), dim), sequence in some:
        shape = [size * (world if i == dim else 1) for i, size in enumerate(shape)]
        n, recipe = each * world, Recipe(wgrad_input=wgrad_input)
        x, grad = (drawn((*shape, size), BF16, seed).to(device) for size, seed in ((K, 1), (n, 2)))
        layout = Shard(dim) if sequence else Replicate()
        module = parallel(siblings(mesh, n, recipe), mesh, layout, in_rank_order=True)
        whole = siblings(mesh, n, recipe)
        with one_backend(device):
            want = compute(whole, x, grad)
            x_mine = my_part(mesh, x, dim) if sequence else x
            got = compute(module, x_mine, my_part(mesh, grad, -1))
            mine = [partial(m, grad, mesh, BF16, True) for m in (whole.first, whole.second)]
            want_dx = in_order(of_all(mesh, mine[0] + mine[1])).to(BF16).view_as(x)
        assert_same(got.y, my_part(mesh, want.y, -1))
        for name, dw in got.grads.items():
            if wgrad_input == "high_precision":  # a product of another size, summed otherwise
                assert relative_error(dw, my_part(mesh, want.grads[name], 0)) < 4e-3
            else:
                assert_same(dw, my_part(mesh, want.grads[name], 0))
        assert_same(got.dx, my_part(mesh, want_dx, dim) if sequence else want_dx)


@on_ranks(2)
def test_bytes_on_the_wire_and_saved(mesh: DeviceMesh, world: int) -> None:
    """Once for both linears; only this rank's tokens are saved."""
    x = input_of(mesh)
    module = parallel(siblings(mesh), mesh)
    module(x)  # ranks compare
    saved: list[Tensor] = []
    hooks = torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t)
    with Wire() as forward, hooks:
        y = module(x)
    with Wire() as backward:
        y.sum().backward()
    for wire in (forward, backward):  # forward rowwise, backward columnwise
        sent = sum(tensor.nbytes for tensor in wire.gathered)
        assert [tensor.dtype for tensor in wire.gathered] == [torch.uint8] * 2  # data and scales
        assert x.numel() < sent <= 0.52 * x.nbytes
    assert not forward.scattered
    (dx,) = backward.scattered
    assert (dx.dtype, dx.numel()) == (BF16, x.numel() * world)
    assert not forward.reduced and not backward.reduced
    kept = {(t.data_ptr(), t.dtype, t.numel()) for t in saved if not hasattr(t, "master")}
    assert sorted(str(dtype) for _, dtype, _ in kept) == ["torch.float32", "torch.float8_e4m3fn"]
    assert {n for _, dtype, n in kept if dtype == torch.float8_e4m3fn} == {x.numel()}


@on_ranks(2)
def test_sums_of_data_gradients_travel_in_the_dtype_asked_for(mesh: DeviceMesh) -> None:
    module = parallel(siblings(mesh), mesh, reduce_dtype=torch.float32)
    with Wire() as wire:
        module(input_of(mesh)).sum().backward()
    assert [x.dtype for x in wire.scattered] == [torch.float32]


@on_ranks(2, gpus=())
def test_autocast_and_an_input_by_keyword(mesh: DeviceMesh) -> None:
    alone = parallelize_module(converted(), mesh, ColwiseParallel())
    x = drawn((2, 128, K), torch.float32, 1)
    for module in (parallel(siblings(mesh), mesh), alone):
        with torch.autocast("cpu", BF16):
            y = module(x)
        assert_same(y, module(x.to(BF16)))
    x, module = input_of(mesh), siblings(mesh)
    parallelize_module(module, mesh, {name: ColwiseParallel() for name in ("first", "second")})
    style = PrepareModuleInput(
        input_kwarg_layouts={"x": Shard(1)}, desired_input_kwarg_layouts={"x": Replicate()}
    )
    parallelize_module(module, mesh, style)
    assert_same(module(x=x), parallel(siblings(mesh), mesh)(x))


@on_ranks(2)
def test_a_linear_left_in_high_precision(mesh: DeviceMesh, device: str) -> None:
    x, grad = (drawn((2, 256, n), BF16, i).to(device) for n, i in ((K, 1), (256, 2)))
    whole = siblings(mesh, skip=("second",))
    module = parallel(siblings(mesh, skip=("second",)), mesh)
    with one_backend(device):
        want = compute(whole, x, grad)
        got = compute(module, my_part(mesh, x, 1), my_part(mesh, grad, -1))
    assert_same(got.grads["first.weight"], my_part(mesh, want.grads["first.weight"], 0))
    assert relative_error(got.y, my_part(mesh, want.y, -1)) < 4e-3


@on_ranks(2, gpus=())
def test_a_rowwise_linear_of_the_module_reads_another_input(mesh: DeviceMesh) -> None:
    module, x = siblings(mesh), input_of(mesh)
    module.add_module("third", converted(K, 256, recipe=Recipe(scale="power_of_two")))
    parallelize_module(module.third, mesh, RowwiseParallel())
    parallel(module, mesh)
    module.register_forward_hook(lambda m, args, y: m.third(y))
    assert_same(module(x), module.third(parallel(siblings(mesh), mesh)(x)))


@on_ranks(2)
def test_what_is_refused(mesh: DeviceMesh, device: str) -> None:
    module, x = siblings(mesh), input_of(mesh)
    convert(module.second, Recipe(scale="power_of_two"), skip_small=False)
    parallel(module, mesh)
    why = "2 FP8 linear layers of unequal recipes cannot be cast once"
    with pytest.raises(ValueError, match=why):
        module(x)

    other = pytest.raises(NotImplementedError, match="a matmul of a layer without ColwiseParallel")
    module = siblings(mesh)
    module.add_module("third", nn.Linear(K, 8, bias=False).to(device, BF16))
    parallel(module, mesh)
    module.register_forward_pre_hook(lambda m, args: (m.third(args[0].view(-1, K)),))
    with other:
        module(x)
    convert(module.third, skip_small=False)
    parallelize_module(module.third, mesh, RowwiseParallel(input_layouts=Replicate()))
    with other:
        module(x)


@on_ranks(2)
def test_backward_twice(mesh: DeviceMesh) -> None:
    module = parallel(siblings(mesh), mesh, in_rank_order=True)
    loss = module(input_of(mesh)).square().sum()
    loss.backward(retain_graph=True)
    first = local(module.first.weight.grad).clone()
    torch._C._functions.UndefinedGrad()(module(input_of(mesh))).sum().backward()
    with Wire() as wire:
        loss.backward()
    assert_same(local(module.first.weight.grad), first * 2)
    assert len(wire.gathered) == 2  # again: nothing gathered is kept after its last use
