"""torchtitan's trainer and the example on debug models, in bf16 and FP8, on one rank and on two."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support import ranks, scripts, titan_cpu
from tests.support.titan_cpu import (
    MODELS,
    Losses,
    assert_all_in_fp8,
    assert_close,
    audited,
    compiled,
    debug_config,
    error_of,
    in_fp8,
    parallel,
    saved,
    train,
)

titan_cpu.skip_without_torchtitan()

pytest.importorskip("rich")

pytestmark = pytest.mark.slow


def example(model: str, folder: str) -> None:
    """The first rank writes ``result.json``."""
    small = ["--layers", "2", "--steps", "4", "--batch", "1", "--seq", "64"]
    with scripts.examples() as load:
        main = load("torchtitan_fp8").main
        assert main(["--model", f"{model}_debugmodel", *small, "--out", folder]) == 0


def runs_alone(rank: int, world: int, folder: str) -> dict[str, Any]:
    """All runs of one process, which imports torchtitan once."""
    titan_cpu.start()

    def config(model: str, steps: int = 2) -> Any:
        return debug_config(model, folder, steps)

    def fp8(model: str = "llama3", steps: int = 2, **options: Any) -> Any:
        return in_fp8(config(model, steps), **options)

    def both(model: str) -> tuple[Losses, Losses, Any]:
        return train(config(model, 4))[0], *train(fp8(model, 4), audited)

    def spmd(**options: Any) -> Any:
        return parallel(fp8(**options), spmd_backend="spmd_types")

    return {
        **{model: both(model) for model in MODELS},
        **{f"{model}, example": example(model, f"{folder}/{model}") for model in MODELS},
        "compiled": train(compiled(fp8()))[0],
        "compiled experts": train(compiled(fp8("deepseek_v3")))[0],
        "fused": train(fp8(fuse=True))[0],
        "spmd_types": train(spmd())[0],
        "fused spmd_types": error_of(spmd(fuse=True)),
        "four steps": train(saved(fp8(), f"{folder}/whole", 4))[0],
        "two steps": train(saved(fp8(), f"{folder}/parts", 2))[0],
        "two more": train(saved(fp8(), f"{folder}/parts", 4))[0],
        "two in bf16": train(saved(config("llama3"), f"{folder}/bf16", 2))[0],
        "two more in fp8": train(saved(fp8(), f"{folder}/bf16", 4))[0],
    }


def runs_on_two(rank: int, world: int, folder: str) -> dict[str, Any]:
    titan_cpu.start()
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world))

    def config(model: str, **degrees: Any) -> Any:
        return parallel(debug_config(model, folder, steps=2), **degrees)

    return {
        "llama3": (train(config("llama3"))[0], *train(in_fp8(config("llama3")), audited)),
        "deepseek_v3": (
            train(config("deepseek_v3"))[0],
            *train(in_fp8(config("deepseek_v3", expert_parallel_degree=2)), audited),
        ),
        "spmd_types": error_of(in_fp8(config("llama3", spmd_backend="spmd_types"))),
        "example": example("llama3", f"{folder}/example"),
    }


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("runs")
    found: dict[str, Any] = ranks.run(runs_alone, 1, folder)[0]
    return found | {f"{model}, example": written(folder / model) for model in MODELS}


@pytest.fixture(scope="module")
def on_two(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("runs")
    first, second = ranks.run(runs_on_two, 2, folder)
    assert str(first) == str(second)
    return {**first, "example": written(folder / "example")}


def written(folder: Path) -> Any:
    """What the example has written about its runs, by their names."""
    return json.loads(Path(folder, "result.json").read_text())["runs"]


@pytest.mark.parametrize("model", MODELS)
def test_alone(alone: dict[str, Any], model: str) -> None:
    plain, fp8, products = alone[model]
    assert_close(fp8, plain, steps=4)
    assert_all_in_fp8(products, MODELS[model])


@pytest.mark.parametrize("model", MODELS)
def test_fsdp2_and_expert_parallel(on_two: dict[str, Any], model: str) -> None:
    plain, fp8, products = on_two[model]
    assert_close(fp8, plain, steps=2)
    assert_all_in_fp8(products, MODELS[model])


@pytest.mark.parametrize("model", MODELS)
def test_losses_of_the_example_fall_alike(alone: dict[str, Any], model: str) -> None:
    runs = alone[f"{model}, example"]
    assert list(runs) == ["bf16", "fp8", "fp8, fused"]
    losses = [made["losses"] for made in runs.values()]
    bf16, fp8, fused = losses
    assert [len(each) for each in losses] == [4] * 3
    assert all(made["tokens_per_second"] > 0 for made in runs.values())
    assert fused == fp8 != bf16
    assert fp8 == pytest.approx(bf16, rel=0.01)
    assert bf16[-1] < bf16[0]


def test_the_example_on_two_ranks(on_two: dict[str, Any]) -> None:
    bf16, fp8 = (made["losses"] for made in on_two["example"].values())
    assert fp8 != bf16 and fp8 == pytest.approx(bf16, rel=0.01) and bf16[-1] < bf16[0]


@pytest.mark.multi_gpu
@pytest.mark.parametrize("flags", [["--cp", "2"], ["--compile", "--async-tp"]], ids=" ".join)
def test_the_example_on_two_gpus(flags: list[str], tmp_path: Path) -> None:
    """Context parallel and async tensor parallel, which torch has on GPUs alone."""
    start = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    script = str(scripts.EXAMPLES / "torchtitan_fp8.py")
    options = ["--steps", "8", "--seq", "2048", "--out", str(tmp_path), *flags]
    subprocess.run([*start, script, *options], check=True, timeout=300)
    runs = json.loads((tmp_path / "result.json").read_text())["runs"]
    bf16, fp8 = (runs[name]["losses"] for name in ("bf16", "fp8"))
    assert fp8 != bf16 and fp8 == pytest.approx(bf16, rel=0.002)


@pytest.mark.parametrize("run", ["compiled", "fused", "spmd_types"])
def test_what_keeps_the_bits(alone: dict[str, Any], run: str) -> None:
    assert alone[run] == alone["llama3"][1][:2]


def test_what_takes_fused_mlps_apart(alone: dict[str, Any]) -> None:
    assert "takes 'layers.0.feed_forward' apart (w1 has a forward" in alone["fused spmd_types"]
    assert "set --parallelism.spmd_backend partial_dtensor" in alone["fused spmd_types"]


def test_compiled_experts_and_a_run_that_goes_on(alone: dict[str, Any]) -> None:
    assert_close(alone["compiled experts"], alone["deepseek_v3"][0][:2], steps=2)
    assert alone["two steps"] + alone["two more"] == alone["four steps"]
    assert_close(alone["two in bf16"] + alone["two more in fp8"], alone["four steps"], steps=4)


def test_parallelism_that_fp8_lacks(on_two: dict[str, Any]) -> None:
    assert on_two["spmd_types"].startswith("NotImplementedError: spmd_backend='spmd_types' on 2")
