"""Tokens that travel in FP8: the bits of a cast after the dispatch, in half of the bytes."""

from __future__ import annotations

import copy
import datetime
import re
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed._functional_collectives import all_to_all_single_autograd
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from blocktensor import BlockwiseFP8Tensor, BlockwiseFP8Weight, Recipe, functional, quantize
from blocktensor.distributed import all_to_all_fp8
from blocktensor.sharding import ranks
from tests.support.compiling import assert_as_eager, fresh, instantiates
from tests.support.expert_parallel import (
    Dispatched,
    assert_steps_as_one,
    converted,
    cut,
    experts_of,
)
from tests.support.models import POWER_OF_TWO, assert_same, randn
from tests.support.ranks import on_ranks, shared_mesh
from tests.support.wire import Wire

K, N = 192, 256

rowwise = partial(BlockwiseFP8Tensor.from_values, columnwise=False)


def here(mesh: DeviceMesh) -> tuple[dist.ProcessGroup, int]:
    return mesh.get_group(), mesh.get_local_rank()


def splits(mesh: DeviceMesh) -> tuple[list[int], list[int]]:
    """How many rows come from each rank, and go to each; some none."""
    rank, ranks = mesh.get_local_rank(), range(mesh.size())
    sizes = [[(3 * r + 5 * s) % 11 * (r != s or r == 0) for s in ranks] for r in ranks]
    return [row[rank] for row in sizes], sizes[rank]


def unwaited(x: Tensor) -> Tensor:
    return torch.ops._c10d_functional.wait_tensor(x)


@on_ranks(2, 4)
def test_what_arrives_is_the_cast_of_what_would_arrive(mesh: DeviceMesh, device: str) -> None:
    (group, rank), (received, sent), world = here(mesh), splits(mesh), mesh.size()
    for dtype in (torch.bfloat16, torch.float32):
        for recipe in (Recipe(), POWER_OF_TWO):
            x = randn(sum(sent), K, seed=rank, dtype=dtype, device=device)
            arrived = unwaited(all_to_all_single_autograd(x, received, sent, group))
            wanted = rowwise(arrived, recipe=recipe)
            for start in (x, rowwise(x, recipe=recipe)):
                got = all_to_all_fp8(start, received, sent, group, recipe=recipe)
                assert got.shape == (sum(received), K)
                assert (got.dtype, got.recipe, got.columnwise_data) == (dtype, recipe, None)
                assert_same(got, wanted)
                assert got.rowwise_scale.stride() == wanted.rowwise_scale.stride()
    x = randn(2 * world, K, seed=rank, device=device)
    given = all_to_all_fp8(x, [2] * world, [2] * world, group)
    assert_same(all_to_all_fp8(x, None, None, group), given)


@on_ranks(2, gpus=())
def test_gradients_travel_back(mesh: DeviceMesh) -> None:
    (group, rank), (received, sent) = here(mesh), splits(mesh)
    for dtype in (torch.bfloat16, torch.float32):
        grad = randn(sum(received), K, seed=9 + rank, dtype=dtype)
        way_back = unwaited(all_to_all_single_autograd(grad, sent, received, group))
        for send, wanted in (
            (all_to_all_fp8, way_back),
            (partial(all_to_all_fp8, gradient="fp8"), rowwise(way_back).dequantize()),
        ):
            x = randn(sum(sent), K, seed=rank, dtype=dtype, grad=True)
            send(x, received, sent, group).backward(grad)
            assert torch.equal(x.grad, wanted)


@on_ranks(2, gpus=())
def test_rows_at_the_limit_of_their_dtype(mesh: DeviceMesh) -> None:
    """Power-of-two scales round them to numbers that the dtype lacks."""
    group, _ = here(mesh)
    for dtype in (torch.float16, torch.bfloat16):
        limit, tiny = torch.finfo(dtype).max, 2.0**-12
        x = torch.full((2, K), tiny, dtype=dtype)
        x[:, 0] = limit
        w = torch.nn.Parameter(BlockwiseFP8Weight(x.new_full((1, N, K), tiny), POWER_OF_TWO))
        x.requires_grad_()
        send = partial(all_to_all_fp8, group=group, recipe=POWER_OF_TWO, gradient="fp8")
        offs = torch.tensor([2], dtype=torch.int32)
        y = functional.grouped_linear(send(x, None, None), w, offs)
        y.backward(torch.full_like(y, tiny))
        exact = limit * 2 * tiny
        assert ((w.grad[0, :, 0].double() - exact).abs() <= exact / 16).all()
        x.grad = None
        grad = torch.full((2, K), limit, dtype=dtype)
        send(x, None, None).backward(grad)
        assert torch.equal(x.grad, grad)


@on_ranks(2, gpus=())
def test_bytes_on_the_wire(mesh: DeviceMesh) -> None:
    group, rank = here(mesh)

    def traffic(send: Any, k: int) -> list[int]:
        x = randn(64, k, seed=rank, grad=True)
        with Wire() as wire:
            y = send(x, [32, 32], [32, 32], group)
            forward = sum(t.nbytes for t in wire.exchanged)
            dtypes.append({t.dtype for t in wire.exchanged})
            y.backward(torch.ones(y.shape, dtype=y.dtype))
        return [forward, sum(t.nbytes for t in wire.exchanged) - forward]

    for k in (2048, 7168):
        dtypes: list[set[torch.dtype]] = []
        plain = traffic(all_to_all_single_autograd, k)
        assert plain == [64 * k * 2] * 2
        fp8 = traffic(all_to_all_fp8, k)
        both = traffic(partial(all_to_all_fp8, gradient="fp8"), k)
        assert dtypes[1:] == [{torch.uint8, torch.float32}] * 2
        assert fp8[0] == both[0] == both[1] <= 0.53 * plain[0]
        assert fp8[1] == plain[1]


@pytest.mark.filterwarnings("ignore:While redistributing")
@on_ranks(2, 4)
def test_experts_train_as_in_one_process_that_casts_rows_alone(
    mesh: DeviceMesh, device: str
) -> None:
    """Rows are indexed, sent, and indexed again in FP8; experts without rows, ranks without any."""
    alone = shared_mesh(device, mesh.size(), 1, names=("all", "alone")).get_group("alone")
    for experts, recipe in ((4, Recipe()), (3, Recipe.deepseek())):
        single = converted(experts_of(experts, device=device), recipe)
        model = Dispatched(cut(copy.deepcopy(single), mesh), mesh.get_group(), all_to_all_fp8)
        rng = torch.Generator().manual_seed(1)
        sizes = torch.randint(0, 40, (mesh.size(), experts), generator=rng)
        sizes[:, 1], sizes[0] = 0, 0
        cast = partial(all_to_all_fp8, output_split_sizes=None, input_split_sizes=None, group=alone)
        assert_steps_as_one(single, model, sizes.tolist(), device, cast)


@on_ranks(2, gpus=())
def test_ranks_that_disagree_raise(mesh: DeviceMesh) -> None:
    group, rank = here(mesh)
    x = randn(4, 2 * K)
    recipe = (Recipe(), POWER_OF_TWO)[rank]
    with pytest.raises(RuntimeError, match="ranks disagree on tokens that travel in FP8"):
        all_to_all_fp8(x, None, None, group, recipe=recipe)
    with pytest.raises(RuntimeError, match=f"gradient='{('fp8', 'high_precision')[rank]}'"):
        all_to_all_fp8(x, None, None, group, gradient=("fp8", "high_precision")[rank])
    assert len(all_to_all_fp8(x, None, None, group)) == 4


@on_ranks(2, gpus=())
def test_a_rank_that_sends_otherwise_later_is_told(
    mesh: DeviceMesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    group = dist.new_group()  # for comparisons of its own, of which one is not answered
    x = randn(4, 2 * K)
    all_to_all_fp8(x, None, None, group)
    if mesh.get_local_rank() == 0:  # has compared such tokens, and waits in the collective
        return
    monkeypatch.setattr(ranks, "TIMEOUT", datetime.timedelta(seconds=1))
    with pytest.raises(RuntimeError) as raised:
        all_to_all_fp8(x, None, None, group, recipe=POWER_OF_TWO)
    assert str(raised.value) == (
        "rank 1 waited 1 s for rank 0 to compare tokens that travel in FP8, of which it has 384 "
        "columns of torch.bfloat16 in 1x128_pow2 blocks, gradient='high_precision': pass x of one "
        "width and dtype, one recipe and one gradient on every rank"
    )


@on_ranks(2, gpus=())
def test_what_is_refused(mesh: DeviceMesh) -> None:
    group, rank = here(mesh)
    x = randn(4, K)
    alone = "expected the rowwise form alone"
    of_rank = f"one size for what rank {rank} of the group sends itself"
    for tokens, received, sent, message in (
        (
            *(x, [2, 2], [2, 3]),
            "output_split_sizes [2, 2] and input_split_sizes [2, 3] of 4 rows: expected 2 sizes "
            "each, one for every rank of the group, and the latter to add up to the rows",
        ),
        *((x, sizes, [2, 2], of_rank) for sizes in ([5, -1], [-1, 5], [3, 1], [1, 3])),
        (x, [5, -1], [5, -1], "no size below 0"),
        (x, [(2, -1), (-1, 2)][rank], [2, 2], "no size below 0"),
        (x, [(5, 0), (0, 5)][rank], [(5, -1), (-1, 5)][rank], "no size below 0"),
        (x, [4], [2, 2], "output_split_sizes [4] and input_split_sizes [2, 2]"),
        (x, [2, 2], None, "expected both, or None twice"),
        (x[:3], None, None, "3 rows in equal parts for 2 ranks: pass the split sizes"),
        (quantize(x), None, None, alone),
        (quantize(x, Recipe(wgrad_input="high_precision")), None, None, alone),
        (
            *(rowwise(x, recipe=POWER_OF_TWO), None, None),
            "the tokens to send are in 1x128_pow2 blocks, and the recipe says 1x128: pass "
            "recipe=x.recipe",
        ),
        (x.view(2, 2, K), None, None, "[T, K]"),
    ):
        with pytest.raises(ValueError, match=re.escape(message)):
            all_to_all_fp8(tokens, received, sent, group)
    with pytest.raises(ValueError, match="expected one of 'high_precision', 'fp8'"):
        all_to_all_fp8(x, None, None, group, gradient="bf16")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"torch\.int64"):
        all_to_all_fp8(x.long(), None, None, group)


@instantiates
@pytest.mark.usefixtures("group")
def test_a_compiled_block_of_experts() -> None:
    mesh = init_device_mesh("cpu", (1,))
    group = mesh.get_group()
    experts: Any = cut(converted(experts_of(3)), mesh)
    order, sizes = torch.arange(33).flip(0), torch.tensor([20, 0, 13])

    def plain(x: Tensor) -> Tensor:
        return experts(x, sizes)

    def sent(x: Tensor) -> Tensor:
        return experts(all_to_all_fp8(x, [33], [33], group)[order], sizes)

    with fresh():
        for block in (plain, sent):
            assert_as_eager(block, randn(33, K), of=[experts])
