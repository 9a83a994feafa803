"""torchtitan's trainer and the example on debug models, in bf16 and FP8, on one rank and on two."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support import ranks, scripts, titan_cpu
from tests.support.titan_cpu import Losses, debug_config, in_fp8, train

titan_cpu.skip_without_torchtitan()

pytest.importorskip("rich")

pytestmark = pytest.mark.slow


MODELS = {
    "llama3": {"wqkv", "wo", "w1", "w2", "w3"},
    "deepseek_v3": {"wq", "wkv_a", "wkv_b", "wo", "w1", "w2", "w3", "inner_experts"},
}
"""The linears that are in FP8."""


def compiled(config: Any) -> Any:
    config.compile.enable, config.compile.backend = True, "aot_eager"
    config.compile.components = ["model"]
    return config


def parallel(config: Any, **degrees: Any) -> Any:
    for name, value in degrees.items():
        setattr(config.parallelism, name, value)
    return config


def saved(config: Any, folder: str, steps: int) -> Any:
    """With a checkpoint after every second step, of a schedule that ends after four."""
    config.checkpoint.enable, config.checkpoint.interval = True, 2
    config.dump_folder, config.training.steps = folder, steps
    config.lr_scheduler.total_steps = 4
    return config


def error_of(config: Any) -> str:
    try:
        train(config)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def audited(trainer: Any) -> Counter[tuple[str, str, str]]:
    """Kinds of modules, products and precisions of one more forward and backward."""
    from blocktensor import audit_step

    inputs, labels = next(iter(trainer.dataloader))
    tokens = torch.tensor(labels.numel())
    model = trainer.model_parts[0]

    def step() -> None:
        trainer.forward_backward_step(input_dict=inputs, labels=labels, global_valid_tokens=tokens)

    report = audit_step(model, step)
    return Counter(
        (x.module.rpartition(".")[2], x.kind, x.reason or x.precision)
        for x in report.entries
        if not (x.attention or x.recomputed)
    )


def example(model: str, folder: str) -> Any:
    """What the example writes about its runs of a model, by their names."""
    small = ["--layers", "2", "--steps", "4", "--batch", "2", "--seq", "64"]
    with scripts.examples() as load:
        main = load("torchtitan_fp8").main
        assert main(["--model", f"{model}_debugmodel", *small, "--out", folder]) == 0
    return json.loads(Path(folder, "result.json").read_text())["runs"]


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

    def config(model: str, **degrees: Any) -> Any:
        return parallel(debug_config(model, folder, steps=2), **degrees)

    experts = {"expert_parallel_degree": 2}
    return {
        "llama3": (train(config("llama3"))[0], *train(in_fp8(config("llama3")), audited)),
        "deepseek_v3": (
            train(config("deepseek_v3"))[0],
            *train(in_fp8(config("deepseek_v3", **experts)), audited),
        ),
        "tensor parallel": error_of(in_fp8(config("llama3", tensor_parallel_degree=2))),
        "spmd_types": error_of(in_fp8(config("llama3", spmd_backend="spmd_types"))),
    }


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    found: dict[str, Any] = ranks.run(runs_alone, 1, str(tmp_path_factory.mktemp("runs")))[0]
    return found


@pytest.fixture(scope="module")
def on_two(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    first, second = ranks.run(runs_on_two, 2, str(tmp_path_factory.mktemp("runs")))
    assert str(first) == str(second)
    found: dict[str, Any] = first
    return found


def assert_close(got: Losses, want: Losses, steps: int) -> None:
    """Losses and norms of gradients that differ, by less than 1%."""
    assert len(got) == len(want) == steps
    for ours, theirs in zip(got, want, strict=True):
        assert ours == pytest.approx(theirs, rel=0.01)
        assert ours != theirs


def assert_all_in_fp8(products: Counter[tuple[str, str, str]], linears: set[str]) -> None:
    """All three products of each of ``linears`` ran in FP8, and the head's did not."""
    assert {name for name, _, precision in products if precision == "FP8"} == linears
    for name in linears:
        of_it = {(kind, precision): n for (x, kind, precision), n in products.items() if x == name}
        assert of_it.keys() == {(kind, "FP8") for kind in ("fprop", "dgrad", "wgrad")}
        assert len(set(of_it.values())) == 1


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


@pytest.mark.parametrize("run", ["compiled", "fused", "spmd_types"])
def test_what_keeps_the_bits(alone: dict[str, Any], run: str) -> None:
    assert alone[run] == alone["llama3"][1][:2]


def test_compiled_experts(alone: dict[str, Any]) -> None:
    assert_close(alone["compiled experts"], alone["deepseek_v3"][0][:2], steps=2)


def test_what_takes_fused_mlps_apart(alone: dict[str, Any]) -> None:
    assert "takes 'layers.0.feed_forward' apart (w1 has a forward" in alone["fused spmd_types"]
    assert "set --parallelism.spmd_backend partial_dtensor" in alone["fused spmd_types"]


def test_a_run_goes_on_from_its_checkpoint(alone: dict[str, Any]) -> None:
    """And in FP8 from a checkpoint in bf16."""
    assert alone["two steps"] + alone["two more"] == alone["four steps"]
    assert_close(alone["two in bf16"] + alone["two more in fp8"], alone["four steps"], steps=4)


def test_parallelism_that_fp8_lacks(on_two: dict[str, Any]) -> None:
    assert on_two["tensor parallel"].startswith("NotImplementedError: tensor_parallel_degree=2")
    assert "--parallelism.tensor_parallel_degree 1 and shard with FSDP" in on_two["tensor parallel"]
    assert on_two["spmd_types"].startswith("NotImplementedError: spmd_backend='spmd_types' on 2")
