"""torchtitan's tensor, pipeline and hybrid parallelism in FP8, compared with one process.

All runs go on from one checkpoint, with the same data.
"""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor

from tests.support import ranks, titan_cpu
from tests.support.sharded import Wire
from tests.support.titan_cpu import (
    MODELS,
    Losses,
    Products,
    assert_all_in_fp8,
    assert_close,
    audited,
    compiled,
    debug_config,
    error_of,
    in_fp8,
    one_step,
    parallel,
    saved,
    train,
)

titan_cpu.skip_without_torchtitan()

pytestmark = pytest.mark.slow

START = 2
"""The step of the checkpoint, which one process made."""

SCHEDULES = ("1F1B", "Interleaved1F1B")
ZERO_BUBBLE = ("InterleavedZeroBubble", "ZBVZeroBubble")

Gradients = dict[str, torch.Tensor]


class Runs:
    """Runs that go on from the checkpoint in a folder, by a number of steps."""

    def __init__(self, folder: str) -> None:
        titan_cpu.start()
        self.folder = folder

    def bf16(self, model: str, steps: int, start: str = "", **degrees: Any) -> Any:
        config = parallel(debug_config(model, "", 0), **degrees)
        saved(config, f"{self.folder}/{start or model}", START + steps)
        config.checkpoint.load_only, config.checkpoint.interval = not start, 1
        config.lr_scheduler.total_steps = 12
        return config

    def fp8(self, model: str = "llama3", steps: int = 2, start: str = "", **degrees: Any) -> Any:
        return in_fp8(self.bf16(model, steps, start, **degrees))

    def step(self, model: str = "llama3", **degrees: Any) -> tuple[Gradients, Products]:
        """Return gradients of the first step, and the products of another."""
        return train(self.fp8(model, 0, **degrees), lambda run: (gradients(run), audited(run)))[1]


def gradients(trainer: Any) -> Gradients:
    """Return whole gradients of the parameters on this rank's stages."""
    trainer.optimizers.zero_grad()
    one_step(trainer)
    return {name: whole(parameter.grad).clone() for name, parameter in parameters(trainer)}


def sums(trainer: Any) -> dict[str, float]:
    """Return a number for the values of each parameter on this rank's stages."""
    return {name: whole(x.detach()).double().sum().item() for name, x in parameters(trainer)}


def parameters(trainer: Any) -> Iterator[tuple[str, Any]]:
    for part in trainer.model_parts:
        for name, parameter in part.named_parameters():
            yield name.replace("_checkpoint_wrapped_module.", ""), parameter


def whole(x: Any) -> torch.Tensor:
    found: torch.Tensor = x.full_tensor() if isinstance(x, DTensor) else x
    return found


def gathers(trainer: Any) -> Counter[torch.dtype]:
    """Count the dtypes that tensor parallel ranks gather."""
    with Wire() as wire:
        one_step(trainer)
    return Counter(x.dtype for x in wire.gathered)


def in_microbatches(config: Any, count: int, ranks: int = 1) -> Any:
    """Let a pipeline take ``count`` sequences one by one; without one, accumulate over them.

    ``ranks``: how many of data parallelism take so many each.
    """
    pipelined = config.parallelism.pipeline_parallel_degree > 1
    config.training.local_batch_size = count if pipelined else 1
    config.training.global_batch_size = count * ranks
    return config


def runs_alone(rank: int, world: int, folder: str) -> dict[str, Any]:
    runs = Runs(folder)
    for model in MODELS:
        config = runs.fp8(model, 0)
        config.checkpoint.load_only = False
        train(config)
    return {
        "bf16": train(runs.bf16("llama3", 2))[0],
        "fp8": train(runs.fp8())[0],
        "deepseek_v3": train(runs.fp8("deepseek_v3"))[0],
        "microbatches": train(in_microbatches(runs.fp8(), 4))[0],
        **{f"{model}, gradients": train(runs.fp8(model, 0), gradients)[1] for model in MODELS},
    }


def cut_inside_blocks(folder: str, **options: Any) -> Any:
    """Tensor parallel, with MLPs of which each rank gets 320 features."""
    config = parallel(debug_config("llama3", folder, 2), tensor_parallel_degree=2)
    for layer in config.model_spec.model.layers:
        mlp = layer.feed_forward
        mlp.w1.out_features = mlp.w3.out_features = mlp.w2.in_features = 640
    return in_fp8(config, **options)


def runs_on_two(rank: int, world: int, folder: str) -> dict[str, Any]:
    runs = Runs(folder)
    tp: dict[str, Any] = {"tensor_parallel_degree": 2}
    pp: dict[str, Any] = {"pipeline_parallel_degree": 2}
    experts: dict[str, Any] = {**tp, "expert_parallel_degree": 2}

    def pipelined(schedule: str) -> Losses:
        config = runs.fp8(pipeline_parallel_schedule=schedule, **pp)
        return train(in_microbatches(config, 4))[0]

    def zero_bubble(make: Callable[..., Any], schedule: str) -> Losses:
        config = make("llama3", 2, **pp, pipeline_parallel_schedule=schedule)
        config.activation_checkpoint = None
        return train(in_microbatches(config, 4))[0]

    plain, long = runs.fp8(**tp), runs.fp8(steps=0, **tp)
    plain.activation_checkpoint = long.activation_checkpoint = None
    long.training.seq_len = 256  # 128 of each rank, a whole block
    return {
        "tp": train(runs.fp8(**tp))[0],
        "tp, step": runs.step(**tp),
        "tp without sp, step": runs.step(**tp, enable_sequence_parallel=False),
        "tp, saved": train(runs.fp8(steps=1, start="tp", **tp), sums),
        "tp, in pp": train(in_microbatches(runs.fp8(steps=1, start="tp", **pp), 4), sums),
        "tp, more": train(runs.fp8(start="tp", **tp))[0],
        "tp, gathers": train(long, gathers)[1],
        "tp, compiled": train(compiled(plain))[0],
        "deepseek_v3, tp, step": runs.step("deepseek_v3", **tp),
        "deepseek_v3, tp and ep, step": runs.step("deepseek_v3", **experts),
        "deepseek_v3, tp and ep": train(runs.fp8("deepseek_v3", **experts))[0],
        **{schedule: pipelined(schedule) for schedule in SCHEDULES},
        **{schedule: zero_bubble(runs.fp8, schedule) for schedule in ZERO_BUBBLE},
        **{f"{schedule}, bf16": zero_bubble(runs.bf16, schedule) for schedule in ZERO_BUBBLE},
        "pp, saved": train(in_microbatches(runs.fp8(steps=1, start="pp", **pp), 4), sums),
        "pp, in tp": train(runs.fp8(steps=1, start="pp", **tp), sums),
        "pp, more": train(in_microbatches(runs.fp8(start="pp", **pp), 4))[0],
        "pp, step": train(in_microbatches(runs.fp8(steps=1, **pp), 4), audited)[1],
        "fsdp": train(runs.fp8())[0],
        "cut inside blocks": error_of(cut_inside_blocks(folder)),
        "remedy": train(cut_inside_blocks(folder, filter_fqns=["feed_forward"]), audited),
        "one of three": train(in_fp8(runs.bf16("llama3", 2, **tp), filter_fqns=["w1"]), audited),
        "fused": error_of(in_fp8(runs.bf16("llama3", 2, **tp), fuse=True)),
    }


def runs_on_four(rank: int, world: int, folder: str) -> dict[str, Any]:
    runs = Runs(folder)
    tp: dict[str, Any] = {"tensor_parallel_degree": 2}
    pp: dict[str, Any] = {"pipeline_parallel_degree": 2}
    hsdp: dict[str, Any] = {"data_parallel_replicate_degree": 2}
    return {
        "fsdp": train(runs.fp8())[0],
        "hsdp": train(runs.fp8(**hsdp), audited),
        "tp x fsdp": train(runs.fp8(**tp), audited),
        "tp x fsdp, bf16": train(runs.bf16("llama3", 2, **tp))[0],
        "tp x pp": train(in_microbatches(runs.fp8(**tp, **pp), 4))[0],
        "fsdp x pp": train(in_microbatches(runs.fp8(**pp), 4, ranks=2), audited),
        "fsdp x pp, bf16": train(in_microbatches(runs.bf16("llama3", 2, **pp), 4, ranks=2))[0],
    }


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("parallel")


@pytest.fixture(scope="module")
def alone(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = ranks.run(runs_alone, 1, folder / "alone")[0]
    for copy in ("tp", "pp"):
        shutil.copytree(folder / "alone" / "llama3", folder / "alone" / copy)
    return found


@pytest.fixture(scope="module")
def on_two(alone: dict[str, Any], folder: Path) -> list[dict[str, Any]]:
    return ranks.run(runs_on_two, 2, folder / "two", start=folder / "alone")


@pytest.fixture(scope="module")
def on_four(alone: dict[str, Any], folder: Path) -> list[dict[str, Any]]:
    return ranks.run(runs_on_four, 4, folder / "four", start=folder / "alone")


def assert_rounded(got: Losses, want: Losses, steps: int, by: float = 0.002) -> None:
    """Losses and norms of gradients of one process, but for the order of sums over ranks."""
    assert len(got) == len(want) == steps
    for ours, theirs in zip(got, want, strict=True):
        assert ours == pytest.approx(theirs, rel=by)


def last_stage(on_ranks: list[dict[str, Any]], run: str) -> Losses:
    """Return what a rank with the last stage logged; others log a loss of -1."""
    found: Losses = next(rank[run] for rank in on_ranks if rank[run][0][0] != -1)
    return found


def test_tensor_parallel(alone: dict[str, Any], on_two: list[dict[str, Any]]) -> None:
    for rank in on_two:
        assert_rounded(rank["tp"], alone["fp8"], steps=2)
        assert_close(rank["tp"], alone["bf16"], steps=2)


@pytest.mark.parametrize(
    "run", ["tp", "tp without sp", "deepseek_v3, tp", "deepseek_v3, tp and ep"]
)
def test_every_gradient_under_tensor_parallel(
    alone: dict[str, Any], on_two: list[dict[str, Any]], run: str
) -> None:
    model = "deepseek_v3" if "deepseek_v3" in run else "llama3"
    wanted: Gradients = alone[f"{model}, gradients"]
    for rank in on_two:
        found, products = rank[f"{run}, step"]
        assert_all_in_fp8(products, MODELS[model])
        assert found.keys() == wanted.keys()
        for name, want in wanted.items():
            # sums in another order round to other e4m3 values: 2 to 4.4% were measured, and 6 to 7%
            # for experts on a CPU without AVX-512
            assert (found[name] - want).norm() < 0.08 * want.norm(), name


def test_gathers_are_in_fp8_and_compiled_blocks_keep_the_bits(on_two: list[dict[str, Any]]) -> None:
    for rank in on_two:
        # of 2 layers: inputs of 2 modules, twice; gradients of 2 linears, both forms; scales, too
        assert rank["tp, gathers"] == {torch.uint8: 2 * 16, torch.bfloat16: 2}
        assert rank["tp, compiled"] == rank["tp"]


def test_experts_under_tensor_parallel(alone: dict[str, Any], on_two: list[dict[str, Any]]) -> None:
    for rank in on_two:
        assert_rounded(rank["deepseek_v3, tp and ep"], alone["deepseek_v3"], steps=2)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_pipeline(alone: dict[str, Any], on_two: list[dict[str, Any]], schedule: str) -> None:
    assert_rounded(last_stage(on_two, schedule), alone["microbatches"], steps=2, by=1e-4)


@pytest.mark.parametrize("schedule", ZERO_BUBBLE)
def test_zero_bubble(alone: dict[str, Any], on_two: list[dict[str, Any]], schedule: str) -> None:
    """The norm of the gradients is 0.3% less than with 1F1B, in bf16 too: torch's."""
    found, plain = last_stage(on_two, schedule), last_stage(on_two, f"{schedule}, bf16")
    assert_rounded(found, plain, steps=2, by=2e-4)
    assert_rounded(found, alone["microbatches"], steps=2, by=4e-3)


def test_tensor_parallel_stages(alone: dict[str, Any], on_four: list[dict[str, Any]]) -> None:
    assert_rounded(last_stage(on_four, "tp x pp"), alone["microbatches"], steps=2)


def test_every_product_of_a_pipeline(on_two: list[dict[str, Any]]) -> None:
    for rank in on_two:
        assert_all_in_fp8(rank["pp, step"], MODELS["llama3"])


def test_tensor_parallel_with_fsdp2(
    on_two: list[dict[str, Any]], on_four: list[dict[str, Any]]
) -> None:
    for rank in on_four:
        found, products = rank["tp x fsdp"]
        assert_rounded(found, on_two[0]["fsdp"], steps=2)
        assert_close(found, rank["tp x fsdp, bf16"], steps=2)
        assert_all_in_fp8(products, MODELS["llama3"])


def test_hybrid_sharding_and_stages_that_fsdp2_shards(on_four: list[dict[str, Any]]) -> None:
    for rank in on_four:
        found, products = rank["fsdp x pp"]
        assert_close(found, rank["fsdp x pp, bf16"], steps=2)
        assert_all_in_fp8(products, MODELS["llama3"])
        found, products = rank["hsdp"]
        assert_rounded(found, rank["fsdp"], steps=2)
        assert_all_in_fp8(products, MODELS["llama3"])
    assert any(rank["fsdp x pp"][0][0][0] > 0 for rank in on_four), "a loss of the last stage"


def test_checkpoints(alone: dict[str, Any], on_two: list[dict[str, Any]]) -> None:
    """Runs go on as if they had not stopped, and other parallelism reads the same weights."""
    for rank in on_two:
        assert rank["tp, saved"][0] + rank["tp, more"] == rank["tp"]
        for saved_by, read_by in (("tp", "pp"), ("pp", "tp")):
            losses, mine = rank[f"{saved_by}, in {read_by}"]
            assert losses == []
            kept = {k: v for other in on_two for k, v in other[f"{saved_by}, saved"][1].items()}
            assert mine == {name: kept[name] for name in mine}
            assert mine
    for rank in on_two:
        assert_rounded(rank["pp, saved"][0] + rank["pp, more"], rank["1F1B"], steps=2, by=1e-4)


def test_what_tensor_parallel_lacks(alone: dict[str, Any], on_two: list[dict[str, Any]]) -> None:
    for rank in on_two:
        assert "NotImplementedError: 'layers.0.feed_forward.w1'" in rank["cut inside blocks"]
        assert "filter_fqns=['layers.0.feed_forward.w1']" in rank["cut inside blocks"]
        losses, products = rank["remedy"]
        assert len(losses) == 2
        assert_all_in_fp8(products, {"wqkv", "wo"})
        losses, products = rank["one of three"]  # w1 reads the same input as w3
        assert_close(losses, alone["bf16"], steps=2)
        assert_all_in_fp8(products, {"wqkv", "wo", "w2", "w3"})
        assert "takes 'layers.0.feed_forward' apart" in rank["fused"]
        assert "no tensor or expert parallelism" in rank["fused"]
