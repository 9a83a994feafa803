"""Parallel linears and their prepared inputs compute what one process does, bit for bit."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.parallel import parallelize_module

from blocktensor import Recipe, convert, freeze, quantize
from blocktensor.distributed import ColwiseParallel, PrepareModuleInput, RowwiseParallel
from blocktensor.sharding.dtensor import local_of
from tests.support.numeric import assert_same, relative_error
from tests.support.parallel_linears import (
    BF16,
    Computed,
    assert_alike,
    compute,
    converted,
    drawn,
    in_order,
    local,
    my_part,
    of_all,
    one_backend,
    partial,
    summed,
    summed_dbias,
    wgrad_of_part,
)
from tests.support.ranks import on_ranks, shared_mesh
from tests.support.sharded import Wire

K = 256
CUTS = {"on the grid": 128, "192 a rank": 192, "64 a rank": 64}
"""What a rank holds of the dimension that is cut."""

TOKENS = {
    "128 a rank": ((128,), 0),
    "a multiple": ((2, 128), 1),
    "off the grid": ((2, 64), 1),
    "across a batch": ((50, 3), 0),
}
"""Leading dimensions of a rank's tokens, and which of them is cut."""

DTYPES = (torch.float32, BF16)
RECIPES = (
    Recipe(scale="power_of_two", cache_weight=False),
    Recipe.deepseek(),
    Recipe(wgrad_input="high_precision"),
)

both_styles = pytest.mark.parametrize("style", ["colwise", "rowwise"])


def computed(
    mesh: DeviceMesh,
    style: str,
    cut: str,
    tokens: str,
    dtype: torch.dtype = BF16,
    bias: bool = False,
    sequence: bool = True,
    recipe: Recipe | None = None,
    in_rank_order: bool = True,
    reduce_dtype: torch.dtype | None = None,
) -> tuple[Computed, Computed]:
    """What this rank gets of a linear whose outputs or inputs are cut, and one process."""
    (shape, dim), world, device = TOKENS[tokens], mesh.size(), mesh.device_type
    shape = (*shape[:dim], shape[dim] * world, *shape[dim + 1 :])
    wide, narrow = (drawn((*shape, n), dtype, n).to(device) for n in (CUTS[cut] * world, K))
    is_colwise = style == "colwise"
    x, grad = (narrow, wide) if is_colwise else (wide, narrow)
    options: Any = {"in_rank_order": in_rank_order, "reduce_dtype": reduce_dtype}
    layout = Shard(dim) if sequence else Replicate()
    kind, name = (ColwiseParallel, "input") if is_colwise else (RowwiseParallel, "output")
    how = kind(**{f"{name}_layouts": layout}, **options)
    whole, module = (
        converted(grad.shape[-1], x.shape[-1], bias, dtype, recipe).to(device) for _ in range(2)
    )
    module = parallelize_module(module, mesh, how)

    def tokens_of(x: Tensor) -> Tensor:
        return my_part(mesh, x, dim) if sequence else x

    def columns_of(x: Tensor) -> Tensor:
        return my_part(mesh, x, -1)

    with one_backend(device):
        y, dx, grads = compute(whole, x, grad)
        if is_colwise:
            dx = summed(whole, grad, mesh, reduce_dtype, dgrad=True)
            want = Computed(
                columns_of(y), tokens_of(dx), {"weight": my_part(mesh, grads["weight"], 0)}
            )
            if bias:  # a sum of more columns may add rows in another order
                want.grads["bias"] = summed_dbias(columns_of(grad), 0, 1)
            return compute(module, tokens_of(x), columns_of(grad)), want
        dw = columns_of(grads["weight"])
        if whole.weight.recipe.wgrad_input != "1x128":
            dw = wgrad_of_part(whole, x, grad, mesh)
        y = summed(whole, x, mesh, reduce_dtype)
        want = Computed(tokens_of(y), columns_of(dx), {"weight": dw})
        if bias:
            want.grads["bias"] = summed_dbias(grad, dim, world) if sequence else grads["bias"]
        return compute(module, columns_of(x), tokens_of(grad)), want


@both_styles
@pytest.mark.parametrize("cut", CUTS)
@on_ranks(2, 4, gpus=[2])
def test_bits_are_those_of_partial_sums(mesh: DeviceMesh, cut: str, style: str) -> None:
    """Every dtype and bias meets tokens that are cut and tokens that are not."""
    for (index, tokens), sequence in itertools.product(enumerate(TOKENS), (False, True)):
        dtype, bias = DTYPES[index // 2], bool(index % 2) == sequence
        assert_alike(*computed(mesh, style, cut, tokens, dtype, bias, sequence))


@both_styles
@on_ranks(4, gpus=())
def test_ranks_of_a_mesh_of_two_dimensions(style: str) -> None:
    mesh = shared_mesh("cpu", 2, 2, names=("data", "tensor"))["tensor"]
    assert_alike(*computed(mesh, style, "192 a rank", "off the grid"))


@both_styles
@on_ranks(2, gpus=[2])
def test_recipes(mesh: DeviceMesh, style: str) -> None:
    for recipe, cut, tokens in itertools.product(RECIPES, CUTS, TOKENS):
        got, want = computed(mesh, style, cut, tokens, recipe=recipe)
        if recipe.wgrad_input == "high_precision":  # products of other sizes, summed otherwise
            assert relative_error(got.grads["weight"], want.grads["weight"]) < 4e-3
            got.grads.update(want.grads)
        assert_alike(got, want)


@both_styles
@on_ranks(2, 4, gpus=[2])
def test_partial_sums_in_fp32_and_in_the_order_of_the_backend(mesh: DeviceMesh, style: str) -> None:
    for sequence in (False, True):
        case = (style, "192 a rank", "128 a rank", BF16, True, sequence)
        assert_alike(*computed(mesh, *case, reduce_dtype=torch.float32))
    for dtype, sequence in itertools.product(DTYPES, (False, True)):
        case = (style, "192 a rank", "off the grid", dtype, False, sequence)
        got, want = computed(mesh, *case, in_rank_order=False)
        total = "dx" if style == "colwise" else "y"
        limit = 8e-3 if dtype == BF16 else 1e-6
        assert relative_error(getattr(got, total), getattr(want, total)) < limit
        assert_alike(got._replace(**{total: getattr(want, total)}), want)


@pytest.mark.parametrize("frozen", [False, True])
@on_ranks(2, gpus=())
def test_a_linear_that_was_in_float64(mesh: DeviceMesh, frozen: bool) -> None:
    module = converted(K, 512, True, torch.float32)
    if frozen:
        freeze(module)
    module = parallelize_module(module, mesh, ColwiseParallel())
    kind = type(local_of(module.weight))
    x, grad = drawn((9, 512), torch.float32, 1), drawn((9, K // 2), torch.float32, 2)
    before = compute(module, x, grad)
    module.double()
    assert type(local_of(module.weight)) is kind
    with pytest.raises(TypeError, match=r"torch\.float64"):
        module(x.double())
    module.float().zero_grad()
    assert_alike(compute(module, x, grad), before)


@on_ranks(2, gpus=())
def test_an_output_that_is_cut_by_features(mesh: DeviceMesh) -> None:
    x = my_part(mesh, drawn((6, K), BF16, 1), -1)
    whole = parallelize_module(converted(), mesh, RowwiseParallel())
    module = parallelize_module(converted(), mesh, RowwiseParallel(output_layouts=Shard(-1)))
    assert_same(module(x), my_part(mesh, whole(x), -1))
    assert_same(module(quantize(x)), module(x))
    module = parallelize_module(converted(), mesh, RowwiseParallel(output_layouts=Shard(0)))
    for needs_dx in (True, False):
        y = module(x.clone().requires_grad_(needs_dx))
        with Wire() as wire:
            y.sum().backward()
        assert len(wire.gathered) == 1 + 2 * needs_dx  # bf16 rows; bytes and scales


@on_ranks(2, gpus=())
def test_plain_inputs_of_other_layouts(mesh: DeviceMesh) -> None:
    x = drawn((2, 3, K), BF16, 1)
    part = my_part(mesh, x, -1)
    y = [parallelize_module(converted(), mesh, ColwiseParallel())(x)]
    y += [parallel(siblings(mesh), mesh, Replicate())(x)]
    for layout, given in ((Shard(-1), part), (Partial(), x * (mesh.get_local_rank() == 0))):
        module = parallelize_module(converted(), mesh, ColwiseParallel(input_layouts=layout))
        assert_same(module(given), y[0])
        assert_same(parallel(siblings(mesh), mesh, layout)(given), y[1])
    module = parallelize_module(converted(), mesh, RowwiseParallel(input_layouts=Replicate()))
    assert_same(module(x), parallelize_module(converted(), mesh, RowwiseParallel())(part))


@on_ranks(2)
def test_a_nan_reaches_all_ranks_that_share_its_block(mesh: DeviceMesh, device: str) -> None:
    for rank in range(2):
        module = parallelize_module(converted(128).to(device), mesh, ColwiseParallel())
        if mesh.get_local_rank() == rank:
            local(module.weight).data[0, 0] = float("nan")
        assert module(drawn((6, K), BF16, 1).to(device)).isnan().all()


@on_ranks(2, gpus=())
def test_an_fp8_input_whose_tokens_are_cut_off_the_grid(mesh: DeviceMesh) -> None:
    """Only a weight gradient reads columnwise blocks, of the tokens of all ranks."""
    module = parallelize_module(converted(), mesh, ColwiseParallel(input_layouts=Shard(0)))
    x = drawn((50, K), BF16, 1)
    with torch.no_grad():
        assert_same(module(quantize(x)), module(x))
    with pytest.raises(ValueError, match="its columnwise blocks of 128 tokens do not begin"):
        module(quantize(x))
    recipe = Recipe(wgrad_input="high_precision")  # whose weight gradient reads none
    module = parallelize_module(
        converted(recipe=recipe), mesh, ColwiseParallel(input_layouts=Shard(0))
    )
    assert_same(module(quantize(x, recipe=recipe)), module(x))


# PrepareModuleInput casts and gathers once for all linears that read an input

WGRAD_INPUTS: tuple[Any, ...] = ("1x128", "128x128", "high_precision")
LEADS = {"on the grid": ((2, 128), 1), "off the grid": ((2, 51), 1), "across a batch": ((32, 5), 0)}


class Siblings(nn.Module):
    def __init__(self, n: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = (nn.Linear(K, n, bias=False) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        return self.first(x) + self.second(x)


def siblings(
    mesh: DeviceMesh, n: int = 256, recipe: Recipe | None = None, skip: tuple[str, ...] = ()
) -> Siblings:
    made = Siblings(n).to(mesh.device_type, BF16)
    convert(made, recipe, skip=skip, skip_small=False)
    return made


def parallel(module: Siblings, mesh: DeviceMesh, tokens: Any = None, **options: Any) -> Siblings:
    """The module's linears cut; ``tokens``: the layout of its input, ``Shard(1)`` by default."""
    plan = {name: ColwiseParallel(**options) for name in ("first", "second")}
    parallelize_module(module, mesh, plan)
    style = PrepareModuleInput(
        input_layouts=tokens or Shard(1), desired_input_layouts=Replicate(), **options
    )
    parallelize_module(module, mesh, style)
    return module


def input_of(mesh: DeviceMesh) -> Tensor:
    return drawn((2, 128, K), BF16, 1).to(mesh.device_type).requires_grad_()


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


@on_ranks(2, gpus=())
@pytest.mark.parametrize("tokens", [Replicate(), Shard(1)])
def test_data_gradients_travel_in_the_dtype_of_an_input_in_fp8(
    mesh: DeviceMesh, tokens: Any
) -> None:
    """Which autocast does not change: sums of an fp32 input are not rounded to bf16."""
    linear = parallelize_module(converted(), mesh, ColwiseParallel(input_layouts=tokens))
    x = drawn((2, 128, K), torch.float32, 1).requires_grad_()
    with torch.autocast("cpu", BF16):
        y = linear(quantize(x))
    with Wire() as wire:
        y.sum().backward()
    sent = wire.scattered if tokens == Shard(1) else wire.reduced
    assert [each.dtype for each in sent] == [torch.float32]
    assert (x.grad != x.grad.to(BF16)).any()


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


@on_ranks(2, gpus=())
@pytest.mark.parametrize("sequence", [False, True])
@pytest.mark.parametrize("style", [ColwiseParallel, RowwiseParallel])
def test_outputs_may_be_changed_in_place(mesh: DeviceMesh, style: Any, sequence: bool) -> None:
    is_colwise = style is ColwiseParallel
    layout = Shard(0) if sequence else Replicate()
    module = parallelize_module(
        converted(), mesh, style(**{f"{'input' if is_colwise else 'output'}_layouts": layout})
    )
    x = input_of(mesh).detach().flatten(0, -2)
    x = x if is_colwise else my_part(mesh, x, -1)
    grads = []
    for change in (lambda y: y * 2, lambda y: y.mul_(2)):
        leaf = x.clone().requires_grad_()
        change(module(leaf)).sum().backward()
        grads.append(leaf.grad)
    assert_same(*grads)


@on_ranks(2, gpus=())
def test_outputs_without_a_gradient_send_nothing(mesh: DeviceMesh) -> None:
    """And the input gets none, as from linear layers of torch, whose gradients may be undefined."""
    colwise = ColwiseParallel(input_layouts=Shard(1))
    for module in (
        parallel(siblings(mesh), mesh),
        parallel(siblings(mesh), mesh, Replicate()),
        parallelize_module(converted(), mesh, colwise),
        parallelize_module(converted(), mesh, RowwiseParallel(output_layouts=Shard(0))),
    ):
        x = input_of(mesh)
        if isinstance(module, nn.Linear) and module.weight.placements == (Shard(1),):
            x = my_part(mesh, x.detach(), -1).requires_grad_()
        y = torch._C._functions.UndefinedGrad()(module(x))
        with Wire() as wire:
            y.sum().backward()
        assert wire.collectives == [] and x.grad is None
        assert all(p.grad is None for p in module.parameters())
