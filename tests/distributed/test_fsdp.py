"""FSDP2 gathers FP8 bytes, and every rank computes what one process with it all would."""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest
import torch

from tests.distributed import mistakes, ranks, ways, wire

SMALL = wire.ROWS[:-2]


@pytest.mark.parametrize(("world", "large"), [(2, 0), (3, 2), (4, 0)])
def test_gathered_bytes_are_those_of_the_whole_cast(world: int, large: int) -> None:
    rows = wire.ROWS[: len(SMALL) + large]
    found = ranks.run(wire.gathered_bytes, world, "cpu", rows)
    assert found == [len(SMALL) * 2 * 3 + large * 2] * world


@functools.cache
def failures(world: int, device: str) -> dict[str, str]:
    """Of all ways to train, on all ranks: what went wrong."""
    chosen = (ways.twenty_steps, ways.hybrid) if world == 4 else ways.WAYS
    backend = "gloo" if device == "cpu" else "nccl"
    found = ranks.run(ways.all_ways, world, device, chosen, backend=backend)
    return {name: "\n".join(filter(None, (one[name] for one in found))) for name in found[0]}


@pytest.mark.parametrize("way", [way.__name__ for way in ways.WAYS])
def test_two_ranks_train_as_one(way: str) -> None:
    assert not failures(2, "cpu")[way], failures(2, "cpu")[way]


@pytest.mark.parametrize("way", ["twenty_steps", "hybrid"])
def test_four_ranks_train_as_one(way: str) -> None:
    assert not failures(4, "cpu")[way], failures(4, "cpu")[way]


@pytest.mark.multi_gpu
@pytest.mark.parametrize("way", [way.__name__ for way in ways.WAYS])
def test_two_gpus_train_as_one(way: str) -> None:
    assert not failures(2, "cuda")[way], failures(2, "cuda")[way]


@pytest.mark.multi_gpu
@pytest.mark.skipif(torch.cuda.device_count() < 4, reason="needs 4 GPUs")
@pytest.mark.parametrize("way", ["twenty_steps", "hybrid"])
def test_four_gpus_train_as_one(way: str) -> None:
    assert not failures(4, "cuda")[way], failures(4, "cuda")[way]


@pytest.mark.multi_gpu
def test_bytes_gathered_by_nccl() -> None:
    found = ranks.run(wire.gathered_bytes, 2, "cuda", wire.ROWS, backend="nccl")
    assert found == [len(SMALL) * 2 * 3 + 2 * 2] * 2


def traffic(layers: int, fp8: bool, micro: int) -> list[tuple[int, int, int, int, set[str]]]:
    """Of each step: gathers, bytes gathered, all-reduces, their bytes, dtypes gathered."""
    steps = ranks.run(wire.wire, 2, "cpu", layers, fp8, micro)[0]
    return [
        (
            sum(what == "gather" for what, _, _ in step),
            sum(n for what, n, _ in step if what == "gather"),
            sum(what == "reduce" for what, _, _ in step),
            sum(n for what, n, _ in step if what == "reduce"),
            {dtype for what, _, dtype in step if what == "gather"},
        )
        for step in steps
    ]


def test_half_the_bytes_and_one_small_reduction_a_step() -> None:
    plain, fp8 = traffic(3, False, 1), traffic(3, True, 1)
    for bf16_step, fp8_step in zip(plain, fp8, strict=True):
        gathers, bf16_bytes, others, _, dtypes = bf16_step
        assert (others, dtypes) == (0, {"torch.bfloat16"})
        fp8_gathers, fp8_bytes, reductions, small, dtypes = fp8_step
        assert (fp8_gathers, reductions, dtypes) == (gathers, 1, {"torch.uint8"})
        assert small == 3 * 16 * 4  # 3 weights of 4 x 4 blocks
        assert fp8_bytes == bf16_bytes / 2
        assert fp8_bytes + small <= 0.505 * bf16_bytes
    # neither more layers nor more microbatches reduce more often
    assert [step[2] for step in traffic(6, True, 3)] == [1, 1, 1]


MISTAKES = {
    mistakes.other_recipe: "RuntimeError: ranks disagree on sharded FP8 weights: rank ",
    mistakes.other_conversion: "RuntimeError: ranks disagree on sharded FP8 weights: rank ",
    mistakes.under_fsdp1: "NotImplementedError: FullyShardedDataParallel",
    mistakes.resharded_to_fewer: "NotImplementedError: reshard_after_forward=2 with FP8 weights",
}


@pytest.mark.parametrize(("mistake", "message"), MISTAKES.items())
def test_every_rank_says_what_is_wrong(mistake: Callable[..., str], message: str) -> None:
    for found in ranks.run(mistake, 4 if mistake is mistakes.resharded_to_fewer else 2):
        assert found.startswith(message), found


def test_who_does_not_come_is_named() -> None:
    found = ranks.run(mistakes.one_rank_forgets, 2)
    assert found[0].startswith("RuntimeError: rank 0 waited 3 s for rank 1 to compare sharded FP8")
