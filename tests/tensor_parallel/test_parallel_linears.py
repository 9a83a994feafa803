"""ColwiseParallel and RowwiseParallel compute what one process does, bit for bit."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import parallelize_module

from blocktensor import Recipe, freeze
from blocktensor.distributed import ColwiseParallel, RowwiseParallel
from blocktensor.sharding.dtensor import local_of
from tests.support.numeric import assert_same, relative_error
from tests.support.parallel_linears import (
    Step,
    converted,
    drawn,
    one_backend,
    step,
    summed_dbias,
    summed_dgrad,
    summed_fprop,
    wgrad_of_part,
)
from tests.support.ranks import on_ranks
from tests.support.sharded import mesh_of

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

DTYPES = (torch.float32, torch.bfloat16)
RECIPES = (
    Recipe(),
    Recipe(scale="power_of_two", cache_weight=False),
    Recipe(wgrad_input="128x128"),
    Recipe(wgrad_input="high_precision", cache_weight="step"),
)


class Case:
    """One linear and its input, whole and cut."""

    def __init__(
        self, world: int, cut: str, tokens: str, dtype: torch.dtype, bias: bool, sequence: bool
    ) -> None:
        (lead, self.dim), self.world = TOKENS[tokens], world
        self.dtype, self.bias, self.sequence = dtype, bias, sequence
        self.size = CUTS[cut] * world
        whole = (*lead[: self.dim], lead[self.dim] * world, *lead[self.dim + 1 :])
        self.wide, self.narrow = drawn((*whole, self.size), dtype, 1), drawn((*whole, K), dtype, 2)

    def mine(self, x: Tensor, dim: int) -> Tensor:
        """This rank's part."""
        return x.chunk(self.world, dim=dim)[dist.get_rank()].contiguous()

    def tokens(self, x: Tensor) -> Tensor:
        """This rank's tokens."""
        return self.mine(x, self.dim) if self.sequence else x

    def colwise(self, device: str, recipe: Recipe, **options: object) -> tuple[Step, Step]:
        """What this rank gets of a linear whose outputs are cut, and one process."""
        style = ColwiseParallel(
            input_layouts=Shard(self.dim) if self.sequence else Replicate(),
            **options,  # type: ignore[arg-type]
        )
        whole = converted(self.size, K, self.bias, self.dtype, recipe).to(device)
        module = converted(self.size, K, self.bias, self.dtype, recipe).to(device)
        module = parallelize_module(module, mesh_of(self.world, device), style)
        x, grad = self.narrow.to(device), self.wide.to(device)
        want = step(whole, x, grad)
        wire = options.get("reduce_dtype")
        dx = summed_dgrad(whole, grad, self.world, wire)  # type: ignore[arg-type]
        want = Step(
            self.mine(want.y, -1),
            self.tokens(dx),
            self.mine(want.dw, 0),
            # a sum of more columns may add rows in another order
            None if want.dbias is None else summed_dbias(self.mine(grad, -1), 0, 1),
        )
        return step(module, self.tokens(x), self.mine(grad, -1)), want

    def rowwise(self, device: str, recipe: Recipe, **options: object) -> tuple[Step, Step]:
        """What this rank gets of a linear whose inputs are cut, and one process."""
        style = RowwiseParallel(
            output_layouts=Shard(self.dim) if self.sequence else Replicate(),
            **options,  # type: ignore[arg-type]
        )
        whole = converted(K, self.size, self.bias, self.dtype, recipe).to(device)
        module = converted(K, self.size, self.bias, self.dtype, recipe).to(device)
        module = parallelize_module(module, mesh_of(self.world, device), style)
        x, grad = self.wide.to(device), self.narrow.to(device)
        want = step(whole, x, grad)
        dw = self.mine(want.dw, 1)
        if recipe.wgrad_input != "1x128":
            dw = wgrad_of_part(whole, x, grad, self.world, dist.get_rank())
        dbias = want.dbias
        if dbias is not None and self.sequence:
            dbias = summed_dbias(grad, self.dim, self.world)
        wire = options.get("reduce_dtype")
        y = summed_fprop(whole, x, self.world, wire)  # type: ignore[arg-type]
        want = Step(self.tokens(y), self.mine(want.dx, -1), dw, dbias)
        return step(module, self.mine(x, -1), self.tokens(grad)), want


def assert_equal(got: Step, want: Step) -> None:
    """Every result, bit for bit."""
    for name, mine, one in zip(Step._fields, got, want, strict=True):
        if one is None:
            assert mine is None, name
            continue
        assert one.any(), name
        assert_same(mine, one)


@pytest.mark.parametrize("style", ["colwise", "rowwise"])
@pytest.mark.parametrize("cut", CUTS)
@on_ranks(2, 4, gpus=[2])
def test_bits_are_those_of_partial_sums(world: int, device: str, cut: str, style: str) -> None:
    """Every dtype and bias meets tokens that are cut and tokens that are not."""
    for (index, tokens), sequence in itertools.product(enumerate(TOKENS), (False, True)):
        dtype, bias = DTYPES[index // 2], bool(index % 2) == sequence
        case = Case(world, cut, tokens, dtype, bias, sequence)
        with one_backend(device):
            got, want = getattr(case, style)(device, Recipe(), in_rank_order=True)
        assert_equal(got, want)


@pytest.mark.parametrize("style", ["colwise", "rowwise"])
@on_ranks(2, gpus=[2])
def test_recipes(world: int, device: str, style: str) -> None:
    for recipe, cut, tokens in itertools.product(RECIPES[1:], CUTS, TOKENS):
        case = Case(world, cut, tokens, torch.bfloat16, False, True)
        with one_backend(device):
            got, want = getattr(case, style)(device, recipe, in_rank_order=True)
        if recipe.wgrad_input == "high_precision":  # products of other sizes, summed otherwise
            assert relative_error(got.dw, want.dw) < 4e-3
            got = got._replace(dw=want.dw)
        assert_equal(got, want)


@pytest.mark.parametrize("style", ["colwise", "rowwise"])
@on_ranks(2, 4, gpus=[2])
def test_partial_sums_in_fp32(world: int, device: str, style: str) -> None:
    for sequence in (False, True):
        case = Case(world, "192 a rank", "128 a rank", torch.bfloat16, True, sequence)
        options = {"in_rank_order": True, "reduce_dtype": torch.float32}
        with one_backend(device):
            got, want = getattr(case, style)(device, Recipe(), **options)
        assert_equal(got, want)


@pytest.mark.parametrize("style", ["colwise", "rowwise"])
@on_ranks(2, 4, gpus=[2])
def test_the_backend_adds_in_another_order(world: int, device: str, style: str) -> None:
    for dtype, sequence in itertools.product(DTYPES, (False, True)):
        case = Case(world, "192 a rank", "off the grid", dtype, False, sequence)
        with one_backend(device):
            got, want = getattr(case, style)(device, Recipe())
        summed = "dx" if style == "colwise" else "y"
        limit = 8e-3 if dtype == torch.bfloat16 else 1e-6
        assert relative_error(getattr(got, summed), getattr(want, summed)) < limit
        assert_equal(got._replace(**{summed: getattr(want, summed)}), want)


@pytest.mark.parametrize("frozen", [False, True])
@on_ranks(2, gpus=())
def test_a_linear_that_was_in_float64(world: int, device: str, frozen: bool) -> None:
    module = converted(K, 256 * world, True, torch.float32, Recipe()).to(device)
    if frozen:
        freeze(module)
    module = parallelize_module(module, mesh_of(world, device), ColwiseParallel())
    kind = type(local_of(module.weight))
    x, grad = drawn((9, 256 * world), torch.float32, 1), drawn((9, K // world), torch.float32, 2)
    before = step(module, x, grad)
    module.double()
    assert type(local_of(module.weight)) is kind
    with pytest.raises(TypeError, match=r"torch\.float64"):
        module(x.double())
    module.float().zero_grad()
    assert_equal(step(module, x, grad), before)
