"""Tokens that travel to their experts in FP8: the bits of one process, and half of the bytes."""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from expecttest import assert_expected_inline
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._python_dispatch import TorchDispatchMode

from blocktensor import BlockwiseFP8Tensor, Recipe, functional, quantize
from blocktensor.distributed import all_to_all_fp8
from blocktensor.ops import reference
from blocktensor.ops.cast import rows as rows_of_casts
from blocktensor.ops.formats import BLOCKS_1X128_POW2, group_rows
from tests.support.asserts import refused
from tests.support.expert_parallel import Dispatched, converted, cut, experts_of
from tests.support.models import POWER_OF_TWO, X_IN_POWERS, randn
from tests.support.numeric import assert_same
from tests.support.ranks import on_ranks
from tests.support.sharded import assert_equal, gradients

ROWS_IN_POWERS = Recipe(scale=X_IN_POWERS.scale, wgrad_input="1x128")
DEQUANTIZED = Recipe(scale=X_IN_POWERS.scale, backward="dequantized")
RECIPES = (X_IN_POWERS, ROWS_IN_POWERS, POWER_OF_TWO, DEQUANTIZED)
# for each rank, how many rows each of four experts gets
SIZES = {
    "uneven": [[3, 0, 130, 7], [1, 129, 0, 64], [5, 5, 5, 5], [0, 0, 0, 1]],
    "an expert without rows": [[30, 0, 20, 1], [7, 0, 0, 300], [1, 0, 2, 3], [4, 0, 0, 0]],
    "a rank sends nothing": [[0, 0, 0, 0], [9, 10, 11, 12], [0, 0, 0, 0], [1, 2, 3, 4]],
    "a rank gets nothing": [[40, 2, 0, 0], [3, 200, 0, 0], [1, 1, 0, 0], [0, 5, 0, 0]],
    "nobody sends": [[0, 0, 0, 0]] * 4,
}


def arrived(x: Tensor, recipe: Recipe) -> BlockwiseFP8Tensor:
    """A leaf of the bytes of ``x``, as one process would read them."""
    data, scale, _ = reference.quantize_rowwise(x.detach(), recipe.activation_format)
    leaf = BlockwiseFP8Tensor.from_data(
        data, scale, block_shape=(1, 128), dtype=x.dtype, recipe=recipe
    )
    return leaf.requires_grad_()


@on_ranks(2, 4)
def test_experts_compute_the_bits_of_one_process(world: int, device: str, mesh: DeviceMesh) -> None:
    """Outputs and all gradients, for any numbers of rows."""
    for recipe in RECIPES:
        experts = converted(experts_of(4, device=device, dtype=torch.bfloat16), recipe)
        send = functools.partial(all_to_all_fp8, recipe=recipe)
        rows = torch.ones(world, 128, device=device)
        assert send(rows, None, None, mesh.get_group()).recipe == recipe
        model = Dispatched(cut(copy.deepcopy(experts), mesh), mesh.get_group(), send)
        for sizes in SIZES.values():
            assert_bits(experts, model, sizes[:world], recipe, device)


def assert_bits(
    single: nn.Module, model: Dispatched, sizes: Any, recipe: Recipe, device: str
) -> None:
    """``single`` gets the rows of all ranks, sorted by expert, then by rank."""
    rank = dist.get_rank()
    begin = sum(map(sum, sizes[:rank]))
    mine = slice(begin, begin + sum(sizes[rank]))
    expert = [e for counts in sizes for e, n in enumerate(counts) for _ in range(n)]
    index = torch.tensor(expert, dtype=torch.long).argsort(stable=True).to(device)
    everything, grad = (randn(len(expert), 192, seed=s, device=device) for s in (3, 4))
    back = index.argsort()
    leaf = arrived(everything[index], recipe)
    y = single(leaf, torch.tensor(sizes).sum(0).to(device))
    y.backward(grad[index])
    assert leaf.grad is not None
    x = everything[mine].clone().requires_grad_()
    got = model(x, sizes[rank])
    got.backward(grad[mine])
    assert x.grad is not None and x.grad.dtype == x.dtype
    assert_equal([got, x.grad], [y[back][mine], leaf.grad[back][mine]])
    assert_equal(gradients(model), gradients(single))
    for module in (single, model):
        module.zero_grad()


class Sent(TorchDispatchMode):
    """Collects the bytes that each collective sends."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops._c10d_functional.all_to_all_single.default:
            self.bytes.append(args[0].nbytes)
        return func(*args, **(kwargs or {}))


@contextmanager
def sent_bytes() -> Iterator[list[int]]:
    with Sent() as sent:
        yield sent.bytes


@on_ranks(2, gpus=())
def test_the_bytes_on_the_wire(world: int, mesh: DeviceMesh) -> None:
    """One collective forward, at most 0.52 of bf16's bytes; backward sends bf16."""
    for k in (128, 256, 576, 2048, 7168):
        x = randn(6, k).requires_grad_()
        with sent_bytes() as forward:
            y = all_to_all_fp8(x, [3, 3], [3, 3], mesh)
        assert len(forward) == 1 and forward[0] <= 0.52 * x.nbytes, k
        with sent_bytes() as backward:
            y.backward(randn(6, k))
        assert backward == [x.nbytes]


@on_ranks(2)
def test_what_arrives(world: int, device: str, mesh: DeviceMesh) -> None:
    """The bytes of a cast on the other rank, of any values; of rows of FP8 tokens too."""
    rank, group = dist.get_rank(), mesh.get_group()
    for k in (1, 130, 192, 256):
        x = randn(5, k, device=device)
        x[0, 0], x[1], x[3, -1] = float("inf"), 0, float("nan")
        both = [x * (r + 1) for r in range(world)]
        cast = [quantize(each, X_IN_POWERS) for each in both]
        want = arrived(torch.cat([both[0][rank : rank + 1], both[1][rank : rank + 1]]), X_IN_POWERS)
        for given in (both[rank], cast[rank], cast[rank].detach()):
            made = all_to_all_fp8(given[[0, 1]], None, None, group)
            assert made.dtype == x.dtype and made.shape == (2, k)
            assert made.columnwise_data is None
            for name in ("rowwise_data", "rowwise_scale"):
                assert_same(getattr(made, name).float(), getattr(want, name).float())
        if device == "cpu":
            assert_same(made.dequantize(), want.dequantize())


@on_ranks(1, gpus=())
def test_calls_that_are_refused(mesh: DeviceMesh) -> None:
    x = randn(4, 256)
    assert_expected_inline(
        refused(
            lambda: all_to_all_fp8(x, [4], [4], recipe=Recipe()),
            lambda: all_to_all_fp8(quantize(x), [4], [4]),
            lambda: all_to_all_fp8(quantize(x, POWER_OF_TWO).t(), [4], [4]),
            lambda: all_to_all_fp8(x, [4], [3]),
            lambda: all_to_all_fp8(x[None], [4], [4]),
            lambda: all_to_all_fp8(x.int(), [4], [4]),
            lambda: all_to_all_fp8([x], [4], [4]),  # type: ignore[arg-type]
            lambda: functional.linear(
                all_to_all_fp8(x, [4], [4]), x.clone().requires_grad_(), recipe=Recipe()
            ),
        ),
        """\
ValueError: all_to_all_fp8 in 1x128 blocks: their scales are no powers of two, so experts would
  round the tokens a second time for the gradients of their weights; convert the experts with
  Recipe(scale=Scales(activations='power_of_two')) and pass recipe=weight.recipe, or send x in
  high precision
ValueError: all_to_all_fp8 in 1x128 blocks: their scales are no powers of two, so experts would
  round the tokens a second time for the gradients of their weights; convert the experts with
  Recipe(scale=Scales(activations='power_of_two')) and pass recipe=weight.recipe, or send x in
  high precision
ValueError: all_to_all_fp8 of BlockwiseFP8Tensor(shape=[256, 4], dtype=torch.bfloat16,
  block_shape=(1, 128), scale='power_of_two', forms=rowwise 128x128_pow2+columnwise 1x128_pow2,
  device='cpu'): expected tokens [T, K] with a rowwise form in blocks of one row, as
  blocktensor.quantize(x) makes them
ValueError: all_to_all_fp8 of 4 rows with input_split_sizes=[3], a sum of 3: expected the number
  of rows that go to each rank
ValueError: the tensor to quantize has 3 dimensions, shape [1, 4, 256]: expected 2; flatten
  leading dimensions with .flatten(0, -2)
TypeError: the tensor to quantize has dtype torch.int32: blocktensor casts torch.bfloat16,
  torch.float16 and torch.float32 to FP8; convert it first, e.g. .to(torch.bfloat16)
TypeError: x is a list: expected a tensor
ValueError: mixed recipes: activations are cast with scale='fp32' here, and one was cast with
  scale='power_of_two'; cast both operands with one recipe, e.g. blocktensor.quantize(x,
  recipe=weight.recipe), or give both Recipe(scale=Scales(activations='power_of_two'))""",
    )


@pytest.mark.parametrize("shape", [(5, 256), (0, 256), (3, 130), (2, 1), (4, 0)], ids=str)
def test_rows_are_packed_and_unpacked(shape: tuple[int, int]) -> None:
    x = reference.quantize_rowwise(randn(*shape), BLOCKS_1X128_POW2)
    sent = rows_of_casts.packed(x)
    assert sent.nbytes == x.format.nbytes(shape)
    got = rows_of_casts.unpacked(sent, shape[1], x.format)
    assert torch.equal(got.data.float(), x.data.float()) and torch.equal(got.scale, x.scale)
    assert got.data.untyped_storage().nbytes() >= group_rows(shape[0]) * shape[1]
