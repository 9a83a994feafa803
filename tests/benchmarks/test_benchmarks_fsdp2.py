"""The FSDP2 benchmark: which commands it runs, and what it makes of their results."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("rich")

from benchmarks import __main__ as cli
from benchmarks import fsdp2
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
        "--steps 5 --warmup-steps 2 --accumulate 16 --precision fp8 --wgrad-input 128x128 --fuse "
        "--head fp8 --no-reshard-after-forward"
    )


def test_one_gpu_is_too_few(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert cli.main(["fsdp2", "--out", str(tmp_path)]) == 2
    assert capsys.readouterr().err == "fsdp2 needs 2 GPUs: not measured\n"
    assert not list(tmp_path.iterdir())


def test_rows_are_compared_on_as_many_ranks() -> None:
    def row(
        variant: str,
        ranks: int,
        speed: float,
        peak: int | None,
        dry: bool = False,
        microbatches: int = 1,
    ) -> Any:
        result = {
            "world_size": ranks,
            "model": {"parameters": 8_000_000_000},
            "tokens_per_second_per_gpu": speed,
            "mfu": 0.56789,
            "max_memory_allocated": peak,
            "step_seconds": 0.5,
        }
        run = fsdp2.Run(variant, microbatches, dry, ["python", "x.py"])
        return fsdp2.row_of(run, result, {} if dry else {"gemms": 1.26})

    rows: list[Any] = []
    for made in (
        row("bf16", 2, 1000, 2**30),
        row("fp8", 2, 1250, 2**29),
        row("fp8, gathered in bf16", 2, 1200, 2**30),
        row("bf16", 2, 5000, 2**20, dry=True),
        row("fp8", 2, 6000, 2**20, dry=True),
        row("bf16", 4, 900, None),
        row("fp8", 4, 1080, None),
        row("bf16", 2, 1100, 2**30, microbatches=16),
        row("fp8, fused, head in fp8", 2, 1430, 2**30, microbatches=16),
    ):
        rows.append(fsdp2.compared(made, rows))
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


def test_runs_for_real(monkeypatch: pytest.MonkeyPatch) -> None:
    """One real run and a dry one, of the first variant, to which others are compared.

    It has the flags of FP8 here; that other variants' flags are known is tested above.
    """
    made = fsdp2.runs
    monkeypatch.setattr(
        fsdp2, "runs", lambda *args: [run for run in made(*args) if run.variant == "bf16"]
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
