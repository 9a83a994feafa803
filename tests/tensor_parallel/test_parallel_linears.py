"""Parallel linear layers compute the bits of one process, or of sums of parts."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import parallelize_module

from blocktensor import Recipe, Scales, freeze
from blocktensor.distributed import ColwiseParallel, RowwiseParallel
from blocktensor.sharding.dtensor import local_of
from tests.support.numeric import relative_error
from tests.support.parallel_linears import (
    BF16,
    Computed,
    assert_alike,
    compute,
    converted,
    drawn,
    local,
    my_part,
    one_backend,
    summed,
    summed_dbias,
    wgrad_of_part,
)
from tests.support.ranks import on_ranks, shared_mesh

K = 256
CUTS = ("on the grid", "192 a rank", "64 a rank")
SIZES = {"on the grid": 128, "192 a rank": 192, "64 a rank": 64, "100 a rank": 100}
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
    Recipe(scale=Scales(activations="power_of_two")),
    Recipe.deepseek(),
    Recipe(wgrad_input="high_precision"),
)


GRID = Recipe(scale=Scales(weights="power_of_two"), weight_grid="mxfp4")


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
    wide, narrow = (drawn((*shape, n), dtype, n).to(device) for n in (SIZES[cut] * world, K))
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
@on_ranks(2, gpus=[2])
def test_weights_on_the_grid_of_mxfp4(mesh: DeviceMesh, style: str) -> None:
    """Rows may be cut anywhere, columns between groups of 32."""
    for cut, tokens, dtype in zip((*CUTS, "100 a rank"), TOKENS, 2 * DTYPES, strict=True):
        if style == "rowwise" and SIZES[cut] % 32:
            with pytest.raises(NotImplementedError, match="need whole groups of 32"):
                computed(mesh, style, cut, tokens, dtype, recipe=GRID)
            continue
        got, want = computed(mesh, style, cut, tokens, dtype, recipe=GRID)
        assert_alike(got, want)
        without, _ = computed(
            mesh, style, cut, tokens, dtype, recipe=replace(GRID, weight_grid=None)
        )
        assert not torch.equal(got.y, without.y) and not torch.equal(got.dx, without.dx)


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


@on_ranks(2)
def test_a_nan_reaches_all_ranks_that_share_its_block(mesh: DeviceMesh, device: str) -> None:
    for rank in range(2):
        module = parallelize_module(converted(128).to(device), mesh, ColwiseParallel())
        if mesh.get_local_rank() == rank:
            local(module.weight).data[0, 0] = float("nan")
        assert module(drawn((6, K), BF16, 1).to(device)).isnan().all()
