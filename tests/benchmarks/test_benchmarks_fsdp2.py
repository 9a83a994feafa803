"""Benchmarks of several ranks: commands and rows of FSDP2, and variants that compute alike."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

pytest.importorskip("rich")

from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from benchmarks import __main__ as cli
from benchmarks import fsdp2
from benchmarks.timing import Call
from blocktensor import BlockwiseFP8Weight
from tests.support.numeric import assert_same
from tests.support.ranks import call_on_ranks, on_ranks, shared_mesh
from tests.support.scripts import examples


def test_commands() -> None:
    found = fsdp2.runs(8, fsdp2.FLAGS, {1: (14, 4), 16: (5, 2)}, (4, 64))
    real = [run for run in found if not run.is_dry]
    assert [run.variant for run in real] == [*fsdp2.VARIANTS, *fsdp2.ACCUMULATED]
    assert real[2].words[:4] == ["torchrun", "--standalone", "--nproc-per-node", "8"]
    assert real[2].words[-4:] == ["--precision", "fp8", "--gather", "bf16"]
    dry = [run for run in found if run.is_dry]
    assert [run.variant for run in dry] == ["bf16", "fp8"] * 2
    assert " ".join(dry[-1].words) == (
        "python examples/fsdp2_llama.py --model 8b --seq 8192 --batch 1 --compile --steps 14 "
        "--warmup-steps 4 --fake-ranks 64 --precision fp8"
    )
    assert " ".join(found[-1].words).endswith(
        "--steps 5 --warmup-steps 2 --accumulate 16 --precision fp8 --fuse "
        "--head fp8 --no-reshard-after-forward"
    )


def test_one_gpu_is_too_few(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert cli.main(["fsdp2", "--out", str(tmp_path)]) == 2
    assert capsys.readouterr().err == "fsdp2 needs 2 GPUs: not measured\n"
    assert not list(tmp_path.iterdir())


def test_rows_are_compared_on_as_many_ranks() -> None:
    rows: list[Any] = []
    for variant, ranks, speed, peak, is_dry, microbatches in (
        ("bf16", 2, 1000, 2**30, False, 1),
        ("fp8", 2, 1250, 2**29, False, 1),
        ("fp8, gathered in bf16", 2, 1200, 2**30, False, 1),
        ("bf16", 2, 5000, 2**20, True, 1),
        ("fp8", 2, 6000, 2**20, True, 1),
        ("bf16", 4, 900, None, False, 1),
        ("fp8", 4, 1080, None, False, 1),
        ("bf16", 2, 1100, 2**30, False, 16),
        ("fp8, fused, head in fp8", 2, 1430, 2**30, False, 16),
    ):
        result = {"world_size": ranks, "model": {"parameters": 8_000_000_000}, "mfu": 0.56789}
        result |= {"tokens_per_second_per_gpu": speed, "max_memory_allocated": peak}
        run = fsdp2.Run(variant, microbatches, is_dry, ["python", "x.py"])
        parts = {} if is_dry else {"gemms": 1.26}
        rows.append(fsdp2.compared(fsdp2.row_of(run, {**result, "step_seconds": 0.5}, parts), rows))
    assert [r["speed_of_bf16"] for r in rows] == [1, 1.25, 1.2, 1, 1.2, 1, 1.2, 1, 1.3]
    assert [r.get("speed_of_fp8") for r in rows] == [None, None, 0.96, *[None] * 6]
    assert [r.get("peak_of_bf16") for r in rows] == [1, 0.5, 1, 1, 1, None, None, 1, 1]
    assert rows[1]["mode"] == "run" and rows[3]["mode"] == "dry run"
    assert rows[1]["gemms_ms"] == 1.3 and "gemms_ms" not in rows[3]
    assert rows[1]["peak_mib"] == 512.0 and rows[1]["mfu"] == 0.5679


def test_variants_are_options_of_the_example() -> None:
    with examples() as load:
        example = load("fsdp2_llama")
        for flags in (*fsdp2.VARIANTS.values(), *fsdp2.ACCUMULATED.values()):
            example.parse([*fsdp2.FLAGS, *flags])


def run_example(words: list[str]) -> None:
    with examples() as load:
        assert load("fsdp2_llama").main(words) == 0


def test_runs_for_real(monkeypatch: pytest.MonkeyPatch) -> None:
    """One run on ranks of the tests, and a dry one in this process, of the first variant.

    It has the flags of FP8 here; that other variants' flags are known is tested above.
    """
    made = fsdp2.runs

    def run(words: list[str], timeout: float) -> None:
        begin = words.index("examples/fsdp2_llama.py") + 1
        if words[0] == "torchrun":
            call_on_ranks(2, "cpu", run_example, words[begin:])
        else:
            run_example(words[begin:])

    monkeypatch.setattr(fsdp2, "run_to_end", run)
    monkeypatch.setattr(
        fsdp2, "runs", lambda *args: [r for r in made(*args) if r.variant == "bf16"]
    )
    fp8 = fsdp2.VARIANTS["fp8"]
    monkeypatch.setattr(fsdp2, "VARIANTS", {"bf16": fp8, "fp8": fp8})
    steps = {1: fsdp2.QUICK["steps"][1]}
    rows = list(fsdp2.measure(gpus=2, **{**fsdp2.QUICK, "steps": steps, "dry": (3,)}))
    found = [(r["mode"], r["ranks"], r["microbatches"]) for r in rows]
    assert found == [("run", 2, 1), ("dry run", 3, 1)]
    assert all(r["tokens_per_second_per_gpu"] > 0 for r in rows)
    assert [r for r in rows if "exposed_ms" in r] == rows[:1]


def test_what_fails_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["python", "-c", "import sys; sys.exit('out of memory')"]
    monkeypatch.setattr(fsdp2, "runs", lambda *_: [fsdp2.Run("bf16", 1, True, words)])
    with pytest.raises(RuntimeError, match="out of memory"):
        list(fsdp2.measure(gpus=2))


def calls_of(name: str, *arguments: Any) -> tuple[list[nn.Module], dict[str, Call]]:
    """The models of a benchmark's variants, and its ``calls`` of the shape "tiny"."""
    models: list[nn.Module] = []
    with examples(), pytest.MonkeyPatch.context() as patch:
        worker = importlib.import_module(f"benchmarks.{name}")
        made = worker.variant

        def variant(*args: Any) -> nn.Module:
            models.append(made(*args))
            return models[-1]

        patch.setattr(worker, "variant", variant)
        calls = worker.calls(worker.SHAPES["tiny"], *arguments)
        assert tuple(calls) == worker.VARIANTS
        return models, calls


def gradients(model: nn.Module) -> dict[str, Any]:
    grads = {name: p.grad for name, p in model.named_parameters()}
    return {n: g.full_tensor() if isinstance(g, DTensor) else g for n, g in grads.items()}


@on_ranks(2, gpus=())
def test_tensor_parallel_variants_compute_alike(world: int, device: str) -> None:
    blocks, calls = calls_of("tensor_parallel", 256, shared_mesh(device, world, names=("tensor",)))
    computed = []
    for block, call in zip(blocks, calls.values(), strict=True):
        call()
        call()
        local = [p.to_local() if isinstance(p, DTensor) else p for p in block.parameters()]
        casts = [w.cache.casts for w in local if isinstance(w, BlockwiseFP8Weight)]
        assert casts in ([], [2] * 7)
        computed.append(torch.cat([grad.flatten() for grad in gradients(block).values()]))
    bf16, ours, fp8, square = computed
    assert torch.equal(bf16, ours)
    assert not torch.equal(fp8, square)
    for gradient in (fp8, square):
        assert 0 < (gradient - bf16).norm() < 0.1 * bf16.norm()


@on_ranks(2, gpus=())
def test_expert_parallel_variants_compute_alike(world: int, device: str) -> None:
    mesh = shared_mesh(device, world, names=("experts",))
    models, calls = calls_of("expert_parallel", 256, 1, mesh)
    computed = {}
    for model, (name, call) in zip(models, calls.items(), strict=True):
        call()
        call()
        computed[name] = gradients(model)
    for name, parameters in computed.items():
        reference = computed["bf16, gathered" if "gathered" in name else "bf16"]
        for parameter, grad in parameters.items():
            error = (grad - reference[parameter]).norm() / reference[parameter].norm()
            if name.startswith("bf16"):
                assert error == 0
            elif "router" not in parameter:  # small differences send tokens elsewhere
                assert 0 < error < 0.15, (name, parameter)
    for parameter, grad in computed["fp8, fused"].items():
        assert_same(grad, computed["fp8"][parameter])


@on_ranks(2, gpus=())
def test_qwen3_on_two_ranks_trains_as_on_one(world: int, device: str) -> None:
    meshes = init_device_mesh(device, (world, 1), mesh_dim_names=("experts", "alone"))
    with examples():
        qwen3 = importlib.import_module("benchmarks.qwen3")
    shape = qwen3.SHAPES["tiny"]
    given = [qwen3.batch(shape, 64, 32, rank, 0) for rank in range(world)]
    both = [torch.cat(parts) for parts in zip(*given, strict=True)]
    for name in (qwen3.VARIANTS[0], qwen3.VARIANTS[-1]):
        cut, whole = (
            qwen3.Trainer(qwen3.build(name, shape, meshes[x]), meshes[x])
            for x in ("experts", "alone")
        )
        for error in (1e-5, 1e-2):  # AdamW's first update enlarges the differences of bf16 sums
            loss, norm = cut.step(*given[dist.get_rank()])
            dist.all_reduce(loss)
            wanted, norm_alone = whole.step(*both)
            assert float(loss) / world == pytest.approx(float(wanted), rel=error)
            assert float(norm) == pytest.approx(float(norm_alone), rel=0.03)
        assert float(wanted) < 6
