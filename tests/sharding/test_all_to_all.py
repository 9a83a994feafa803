"""Tokens that travel in FP8: the bits of a cast after the dispatch, in half of the bytes."""

from __future__ import annotations

import copy
import datetime
import functools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from expecttest import assert_expected_inline
from torch import Tensor
from torch.distributed._functional_collectives import all_to_all_single_autograd
from torch.distributed.device_mesh import init_device_mesh

from blocktensor import (
    BlockwiseFP8Tensor,
    BlockwiseFP8Weight,
    Recipe,
    functional,
    quantize,
)
from blocktensor.distributed import all_to_all_fp8
from blocktensor.sharding import compare_ranks
from tests.support import ranks
from tests.support.compiling import fresh
from tests.support.expert_parallel import (
    Dispatched,
    assert_steps_as_one,
    converted,
    cut,
    experts_of,
)
from tests.support.models import POWER_OF_TWO, complaint, randn
from tests.support.numeric import assert_same
from tests.support.ranks import on_ranks, shared_mesh
from tests.support.wire import Wire

K, N = 192, 256


def alone(device: str) -> dist.ProcessGroup:
    """A group of this rank."""
    return shared_mesh(device, dist.get_world_size(), 1, names=("all", "alone")).get_group("alone")


def here() -> tuple[dist.ProcessGroup, int]:
    group = dist.group.WORLD
    assert group is not None
    return group, group.rank()


def splits(world: int) -> list[list[int]]:
    """Row ``r``: how many rows rank r sends to each rank; some none."""
    return [[(3 * r + 5 * s) % 11 * (r != s or r == 0) for s in range(world)] for r in range(world)]


def unwaited(x: Tensor) -> Tensor:
    return torch.ops._c10d_functional.wait_tensor(x)


@on_ranks(2, 4)
def test_what_arrives_is_the_cast_of_what_would_arrive(world: int, device: str) -> None:
    group, rank = here()
    sizes = splits(world)
    sent, received = sizes[rank], [row[rank] for row in sizes]
    for dtype in (torch.bfloat16, torch.float32):
        for recipe in (Recipe(), POWER_OF_TWO):
            x = randn(sum(sent), K, seed=rank, dtype=dtype, device=device)
            wanted = all_to_all_single_autograd(x, received, sent, group)
            wanted = BlockwiseFP8Tensor.from_values(
                unwaited(wanted), recipe=recipe, columnwise=False
            )
            given = BlockwiseFP8Tensor.from_values(x, recipe=recipe, columnwise=False)
            for start in (x, given):
                got = all_to_all_fp8(start, received, sent, group, recipe=recipe)
                assert got.shape == (sum(received), K)
                assert (got.dtype, got.recipe, got.columnwise_data) == (dtype, recipe, None)
                assert_same(got.rowwise_data, wanted.rowwise_data)
                assert_same(got.rowwise_scale, wanted.rowwise_scale)
                assert got.rowwise_scale.stride() == wanted.rowwise_scale.stride()
    x = randn(2 * world, K, seed=rank, device=device)
    given = all_to_all_fp8(x, [2] * world, [2] * world, group)
    by_default = all_to_all_fp8(x, None, None, group)
    assert_same(by_default.rowwise_data, given.rowwise_data)
    assert_same(by_default.rowwise_scale, given.rowwise_scale)


@on_ranks(2, gpus=())
def test_gradients_travel_back(world: int, device: str) -> None:
    group, rank = here()
    sizes = splits(world)
    sent, received = sizes[rank], [row[rank] for row in sizes]
    for dtype in (torch.bfloat16, torch.float32):
        grad = randn(sum(received), K, seed=9 + rank, dtype=dtype, device=device)
        way_back = unwaited(all_to_all_single_autograd(grad, sent, received, group))
        rounded = BlockwiseFP8Tensor.from_values(way_back, columnwise=False).dequantize()
        for gradient, wanted in (("high_precision", way_back), ("fp8", rounded)):
            x = randn(sum(sent), K, seed=rank, dtype=dtype, device=device, grad=True)
            send = functools.partial(all_to_all_fp8, gradient=gradient)
            send(x, received, sent, group).backward(grad)
            assert torch.equal(x.grad, wanted)


@on_ranks(2, gpus=())
def test_rows_at_the_limit_of_their_dtype(world: int, device: str) -> None:
    """Power-of-two scales round them to numbers that the dtype lacks."""
    group, _ = here()
    for dtype in (torch.float16, torch.bfloat16):
        limit, tiny = torch.finfo(dtype).max, 2.0**-12
        x = torch.full((world, K), tiny, dtype=dtype, device=device)
        x[:, 0] = limit
        w = torch.full((1, N, K), tiny, dtype=dtype, device=device)
        w = torch.nn.Parameter(BlockwiseFP8Weight(w, POWER_OF_TWO))
        x.requires_grad_()
        arrived = all_to_all_fp8(x, None, None, group, recipe=POWER_OF_TWO, gradient="fp8")
        offs = torch.tensor([world], dtype=torch.int32, device=device)
        functional.grouped_linear(arrived, w, offs).backward(
            torch.full((world, N), tiny, dtype=dtype, device=device)
        )
        exact = limit * world * tiny
        assert ((w.grad[0, :, 0].double() - exact).abs() <= exact / 16).all()
        x.grad = None
        arrived = all_to_all_fp8(x, None, None, group, recipe=POWER_OF_TWO, gradient="fp8")
        arrived.backward(torch.full((world, K), limit, dtype=dtype, device=device))
        assert_same(x.grad, torch.full((world, K), limit, dtype=dtype, device=device))


@on_ranks(2, gpus=())
def test_bytes_on_the_wire(world: int, device: str) -> None:
    group, rank = here()

    def traffic(send: Any, k: int) -> list[int]:
        x = randn(64, k, seed=rank, device=device, grad=True)
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
        both = traffic(functools.partial(all_to_all_fp8, gradient="fp8"), k)
        assert dtypes[1:] == [{torch.uint8, torch.float32}] * 2
        assert fp8[0] == both[0] == both[1] <= 0.53 * plain[0]
        assert fp8[1] == plain[1]


@pytest.mark.filterwarnings("ignore:While redistributing")
@on_ranks(2, 4)
def test_experts_train_as_in_one_process_that_casts_rows_alone(world: int, device: str) -> None:
    """Rows are indexed, sent, and indexed again in FP8; experts without rows, ranks without any."""
    mesh = init_device_mesh(device, (world,))
    cast = functools.partial(all_to_all_fp8, group=alone(device))
    for experts, recipe in ((4, Recipe()), (3, Recipe(wgrad_input="128x128"))):
        single = converted(experts_of(experts, K, N, device, torch.float32), recipe)
        model = cut(copy.deepcopy(single), mesh)
        sizes = torch.randint(0, 40, (world, experts), generator=torch.Generator().manual_seed(1))
        sizes[:, 1], sizes[0] = 0, 0
        assert_steps_as_one(
            single,
            Dispatched(model, mesh.get_group(), all_to_all_fp8),
            sizes.tolist(),
            device,
            cast=lambda x: cast(x, None, None),
        )


@on_ranks(2, gpus=())
def test_ranks_that_disagree_raise(world: int, device: str) -> None:
    group, rank = here()
    x = randn(4, 2 * K, device=device)
    recipe = (Recipe(), POWER_OF_TWO)[rank]
    with pytest.raises(RuntimeError, match="ranks disagree on tokens that travel in FP8"):
        all_to_all_fp8(x, None, None, group, recipe=recipe)
    with pytest.raises(RuntimeError, match=f"gradient='{('fp8', 'high_precision')[rank]}'"):
        all_to_all_fp8(x, None, None, group, gradient=("fp8", "high_precision")[rank])
    assert len(all_to_all_fp8(x, None, None, group)) == 4


def _rank_1_sends_otherwise_later(rank: int, world: int) -> None:
    compare_ranks.TIMEOUT = datetime.timedelta(seconds=2)
    group, x = here()[0], randn(4, 2 * K)
    all_to_all_fp8(x, None, None, group)
    if rank == 0:  # has compared such tokens, and waits in the collective
        return
    with pytest.raises(RuntimeError) as raised:
        all_to_all_fp8(x, None, None, group, recipe=POWER_OF_TWO)
    assert str(raised.value) == (
        "rank 1 waited 2 s for rank 0 to compare tokens that travel in FP8, of which it has 384 "
        "columns of torch.bfloat16 in 1x128_pow2 blocks, gradient='high_precision': pass x of one "
        "width and dtype, one recipe and one gradient on every rank"
    )


def test_a_rank_that_sends_otherwise_later_is_told() -> None:
    ranks.run(_rank_1_sends_otherwise_later, 2)


@on_ranks(2, gpus=())
def test_what_is_refused(world: int, device: str) -> None:
    group, _ = here()
    x = randn(4, K, device=device)

    def text(*args: Any, kind: type[Exception] = ValueError, **kwargs: Any) -> str:
        return complaint(kind, lambda: all_to_all_fp8(*args, group, **kwargs))

    assert_expected_inline(
        text(x, [2, 2], [2, 3]),
        """\
output_split_sizes [2, 2] and input_split_sizes [2, 3] of 4 rows: expected 2 sizes
each, one for every rank of the group, and the latter to add up to the rows""",
    )
    of_rank = f"one size for what rank {group.rank()} of the group sends itself"
    for sizes in ([5, -1], [-1, 5], [3, 1], [1, 3]):
        if sizes[group.rank()] != 2:
            assert of_rank in text(x, sizes, [2, 2]).replace("\n", " ")
    assert "no size below 0" in text(x, [5, -1], [5, -1]).replace("\n", " ")
    assert text(x, [4], [2, 2]).startswith("output_split_sizes [4] and input_split_sizes [2, 2]")
    assert "expected both, or None twice" in text(x, [2, 2], None)
    assert_expected_inline(
        text(x[:3], None, None),
        """3 rows in equal parts for 2 ranks: pass the split sizes""",
    )
    sources = quantize(x, Recipe(wgrad_input="high_precision"))
    for cast in (quantize(x), sources):
        assert "expected the rowwise form alone" in text(cast, None, None).replace("\n", " ")
    pow2 = BlockwiseFP8Tensor.from_values(x, recipe=POWER_OF_TWO, columnwise=False)
    assert_expected_inline(
        text(pow2, None, None),
        """\
the tokens to send are in 1x128_pow2 blocks, and the recipe says 1x128: pass
recipe=x.recipe""",
    )
    assert "[T, K]" in text(x.view(2, 2, K), None, None)
    assert "expected one of 'high_precision', 'fp8'" in text(x, None, None, gradient="bf16")
    assert "torch.int64" in text(x.long(), None, None, kind=TypeError)


# Dynamo itself instantiates the Functions that it traces.
@pytest.mark.filterwarnings(
    "ignore:.*should not be instantiated. Methods on autograd:DeprecationWarning"
)
@pytest.mark.usefixtures("group")
def test_a_compiled_block_of_experts() -> None:
    """It computes the bits of eager mode."""
    mesh = init_device_mesh("cpu", (1,))
    group = mesh.get_group()
    experts: Any = cut(converted(experts_of(3, K, N, "cpu", torch.float32)), mesh)
    order, sizes = torch.arange(33).flip(0), torch.tensor([20, 0, 13])

    def plain(x: Tensor) -> Tensor:
        return experts(x, sizes)

    def sent(x: Tensor) -> Tensor:
        return experts(all_to_all_fp8(x, [33], [33], group)[order], sizes)

    with fresh():
        for block in (plain, sent):
            made = []
            for run in (block, torch.compile(block, fullgraph=True, backend="aot_eager")):
                x = randn(33, K, grad=True)
                y = run(x)
                y.backward(randn(33, K, seed=1))
                made.append(
                    [y.detach(), x.grad, *(p.grad.to_local() for p in experts.parameters())]
                )
                experts.zero_grad()
            for eager, compiled in zip(*made, strict=True):
                assert torch.equal(eager, compiled)
