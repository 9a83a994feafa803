"""The FSDP2 and the tensor parallel example on CPU ranks: losses, checkpoints, results."""

from __future__ import annotations

import hashlib
import importlib
import io
import json
import shutil
import sys
from contextlib import redirect_stdout
from dataclasses import replace
from functools import partialmethod
from pathlib import Path
from statistics import fmean
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

pytest.importorskip("rich")
if not dist.is_available():
    pytest.skip("torch was built without distributed", allow_module_level=True)

from blocktensor import convert, fuse
from tests.support import ranks
from tests.support.compiling import reads_grad
from tests.support.ranks import on_ranks
from tests.support.scripts import EXAMPLES, Load, examples

EXAMPLE = "fsdp2_llama"
TINY = ["--device", "cpu", "--layers", "1", "--seq", "32", "--batch", "2", "--warmup-steps", "2"]
STEPS = 12
FEW = 3
"""Steps of the runs whose losses have to be those of another run, to the bit."""


def weights(example: ModuleType) -> dict[str, str]:
    llama: Any = sys.modules["common.llama"]
    llama.INIT_ELEMENTS = 30 * 128  # runs that begin and end within ranks
    options, shape = example.parse([*TINY, "--precision", "fp8", "--vocab", "51"])
    with example.ranks("cpu") as device:
        model, _ = example.build(options, shape, device)
        return {
            name: hashlib.sha256(p.full_tensor().detach().numpy().tobytes()).hexdigest()
            for name, p in model.named_parameters()
        }


def all_runs(rank: int, world: int, folder: str) -> dict[str, Any]:
    """Every run with two ranks: processes start once. Rank 0 returns what it wrote, by name."""
    sys.path.insert(0, str(EXAMPLES))
    example: Any = importlib.import_module("fsdp2_llama")
    found: dict[str, Any] = {}
    saved = Path(folder, "saved")

    def run(name: str, *flags: str, steps: int = FEW) -> None:
        out = Path(folder, name)
        assert example.main([*TINY, "--steps", str(steps), *flags, "--out", str(out)]) == 0
        found[name] = json.loads((out / "result.json").read_text()) if rank == 0 else None

    bf16 = ["--master-dtype", "bf16"]
    fp8 = [*bf16, "--precision", "fp8"]
    with redirect_stdout(io.StringIO()) as printed:
        run("fp8", *fp8, steps=STEPS)
    found["printed"] = printed.getvalue()
    example.plot = lambda *_: False  # drawn once
    run("bf16", *bf16, steps=STEPS)
    run("fused", *fp8, "--fuse")
    run("gather", *fp8, "--gather", "bf16")
    run("ac", *fp8, "--ac", "--no-reshard-after-forward")
    run("fp32", "--precision", "fp8", "--loss-chunk", "50", steps=STEPS)
    more = [*fp8, "--accumulate", "3", "--wgrad-input", "128x128"]
    run("accumulated", *more)
    run("kept", *more, "--no-reshard-after-forward")
    run("head", *fp8, "--head", "fp8", steps=STEPS)
    saving = [*fp8, "--checkpoint", str(saved), "--checkpoint-every", "4"]
    run("stopped", *saving, steps=6)
    if rank == 0:  # as runs leave it that are killed while they write
        for name in ("step-00000008", ".step-00000007.tmp"):
            shutil.copytree(saved / "step-00000006", saved / name)
            (saved / name / ".metadata").unlink()
    dist.barrier()
    run("resumed", *saving, steps=STEPS)
    found["names"] = sorted(path.name for path in saved.iterdir())
    run("again", *saving, steps=STEPS)
    try:
        run("other", *saving, "--seed", "7", steps=STEPS)
    except SystemExit as error:
        found["other"] = str(error)
    found["weights"] = weights(example)
    return found


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("fsdp2")
    results = ranks.run(all_runs, 2, folder)
    assert results[0]["other"] == results[1]["other"]
    assert "result.json" not in results[1]["printed"], "rank 0 alone speaks"
    return {"folder": folder, **results[0]}


def test_both_precisions_learn_alike(runs: dict[str, Any]) -> None:
    ends = {}
    for name in ("bf16", "fp8", "head", "fp32"):
        losses = runs[name]["losses"]
        assert len(losses) == STEPS
        ends[name] = fmean(losses[-4:])
        assert ends[name] < 0.8 * losses[0]
    assert runs["fp8"]["losses"] != runs["bf16"]["losses"]
    assert runs["fp8"]["losses"][0] == pytest.approx(runs["bf16"]["losses"][0], rel=0.01)
    assert ends["fp8"] == pytest.approx(ends["bf16"], rel=0.03)
    assert runs["head"]["losses"] != runs["fp8"]["losses"]
    assert runs["head"]["model"]["fp8_linears"] == runs["fp8"]["model"]["fp8_linears"] + 1
    assert ends["head"] == pytest.approx(ends["fp8"], rel=0.01)
    assert ends["fp32"] == pytest.approx(ends["bf16"], rel=0.1)  # another master rounds otherwise


def test_microbatches(runs: dict[str, Any]) -> None:
    """Weights that stay gathered between them, or whose cast does, change no bit."""
    record = runs["accumulated"]
    assert record["losses"] == runs["kept"]["losses"]
    assert record["losses"] != runs["fp8"]["losses"][:FEW]
    assert record["losses"][0] == pytest.approx(runs["fp8"]["losses"][0], rel=0.05)
    assert record["tokens_per_second_per_gpu"] == pytest.approx(3 * 64 / record["step_seconds"])


@pytest.mark.parametrize("other", ["gather", "ac", "fused"])
def test_the_way_to_the_weights_changes_no_bit(runs: dict[str, Any], other: str) -> None:
    assert runs[other]["losses"] == runs["fp8"]["losses"][:FEW]


def test_a_resumed_run_is_the_uninterrupted_one(runs: dict[str, Any]) -> None:
    """A finished one is not run again, and one of another setting is refused."""
    assert runs["stopped"]["losses"] == runs["fp8"]["losses"][:6]
    assert runs["resumed"]["resumed_at"] == 6
    assert runs["resumed"]["losses"] == runs["fp8"]["losses"]
    # what was begun and never finished was not taken, and made way
    assert runs["names"] == [f"step-{step:08d}" for step in (4, 6, 8, 12)]
    assert runs["again"]["resumed_at"] == STEPS
    assert runs["again"]["losses"] == runs["fp8"]["losses"]
    assert runs["again"]["tokens_per_second_per_gpu"] is None
    assert "step-00000012 was made with --seed 0, this run has 7" in runs["other"]
    assert "another --checkpoint DIR" in runs["other"]


def test_result_is_written_down(runs: dict[str, Any]) -> None:
    record, fp8 = runs["gather"], runs["fp8"]
    options, model = record["options"], record["model"]
    assert (options["gather"], options["steps"]) == ("bf16", FEW)
    assert (model["layers"], model["fp8_linears"]) == (1, 7)
    assert fp8["model"] == model
    assert runs["bf16"]["model"] == {**model, "fp8_linears": 0}
    assert runs["bf16"]["options"]["gather"] is None
    assert record["versions"]["torch"] == torch.__version__
    assert (record["device"], record["world_size"]) == ("CPU", 2)
    assert "tokens/s per GPU" in runs["printed"]
    assert runs["printed"].count("result.json") == 1
    assert record["max_memory_allocated"] is None
    rate = record["tokens_per_second_per_gpu"]
    assert rate == pytest.approx(64 / record["step_seconds"])
    weights = model["parameters"] - model["vocab"] * model["dim"] - 3 * model["dim"]
    flops = 6 * weights + 12 * model["layers"] * model["dim"] * 32
    assert record["mfu"] == pytest.approx(flops * rate / 989e12)


def test_result_is_drawn(runs: dict[str, Any]) -> None:
    pytest.importorskip("matplotlib")
    assert (runs["folder"] / "fp8" / "losses.png").read_bytes().startswith(b"\x89PNG")
    names = {path.name for path in (runs["folder"] / "fp8").iterdir()}
    assert names == {"result.json", "losses.png"}


def test_weights_do_not_depend_on_the_number_of_ranks(runs: Any, example: ModuleType) -> None:
    assert weights(example) == runs["weights"]
    assert not dist.is_initialized()


@pytest.mark.parametrize("precision", ["bf16", "fp8"])
def test_pretends_to_be_one_of_many(
    precision: str,
    example: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    held: list[int] = []
    build_optimizer = example.build_optimizer

    def counted(model: Any, lr: float) -> Any:
        held.append(sum(p.to_local().numel() for p in model.parameters()))
        return build_optimizer(model, lr)

    monkeypatch.setattr(example, "build_optimizer", counted)
    flags = ["--fake-ranks", "4", "--precision", precision, "--steps", "3", "--out", str(tmp_path)]
    assert example.main([*TINY, *flags]) == 0
    assert not dist.is_initialized()
    record = json.loads((tmp_path / "result.json").read_text())
    assert record["world_size"] == 4
    assert held == [record["model"]["parameters"] // 4]
    assert record["tokens_per_second_per_gpu"] > 0
    assert record["losses"] == []
    assert not (tmp_path / "losses.png").exists()
    assert "4, all but one pretended" in capsys.readouterr().out


@pytest.mark.slow
@reads_grad
def test_blocks_compile_whole(
    example: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled = partialmethod(nn.Module.compile, backend="aot_eager")  # inductor's takes 10 s more
    monkeypatch.setattr(nn.Module, "compile", compiled)
    flags = [*TINY, "--layers", "2", "--steps", "3", "--precision", "fp8"]
    losses = []
    for more in ([], ["--compile", "--ac"]):
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        assert example.main([*flags, *more, "--out", str(tmp_path)]) == 0
        losses.append(json.loads((tmp_path / "result.json").read_text())["losses"])
    counted = torch._dynamo.utils.counters
    assert counted["stats"]["unique_graphs"] == 1  # one for both blocks
    assert not counted["graph_break"]
    assert losses[1] == pytest.approx(losses[0], rel=0.01)


def test_what_is_fused(load: Load) -> None:
    llama = load("common.llama")
    block = llama.Block(llama.SHAPES["tiny"]).bfloat16()
    convert(block, skip_small=False)
    assert [f"{x.name}: {x.reason or x.computes}" for x in fuse(block).entries] == [
        "mlp: down(silu(gate(x)) * up(x))",
        "attention_norm: torch computes it in one kernel",
        "mlp_norm: torch computes it in one kernel",
    ]


def test_a_sequence_longer_than_the_text_is_explained(example: ModuleType) -> None:
    with pytest.raises(SystemExit, match="--seq 999999999 is longer than the text"):
        example.main([*TINY, "--seq", "999999999"])
    assert not dist.is_initialized()


def test_no_flag_is_the_beginning_of_one_of_torchruns(example: ModuleType) -> None:
    from torch.distributed.run import get_args_parser

    theirs = [name for action in get_args_parser()._actions for name in action.option_strings]
    for action in sys.modules["common.fsdp2_options"].build_parser()._actions:
        for name in action.option_strings:
            if name not in ("-h", "--help"):
                assert not [other for other in theirs if other.startswith(name)], name


TINY_TP = ["--seq", "128", "--batch", "1", "--steps", "2", "--warmup-steps", "1", "--device", "cpu"]


def learned(example: ModuleType, out: Path, *flags: str) -> dict[str, Any]:
    """The result of a run."""
    assert example.main([*TINY_TP, *flags, "--out", str(out)]) == 0
    dist.barrier()
    result: dict[str, Any] = json.loads((out / "result.json").read_text())
    assert result["losses"][-1] < result["losses"][0] and result["tokens_per_second"] > 0
    return result


@on_ranks(4, gpus=())
def test_precisions_and_cuts_learn_alike(world: int, device: str, tmp_path: Path) -> None:
    with examples() as load:
        example = load("tp_llama")
        example.SIZES["tiny"] = replace(example.SIZES["tiny"], layers=1)
        bf16 = learned(example, tmp_path / "bf16", "--sp")
        fp8 = "--precision", "fp8"
        cut = learned(example, tmp_path / "fp8", "--sp", *fp8)
        whole = learned(example, tmp_path / "without sp", *fp8)
        both = learned(example, tmp_path / "fsdp2", "--tp", "2", "--sp", *fp8)
        with pytest.raises(SystemExit, match="--tp 3 must divide the 4 ranks"):
            example.main([*TINY_TP, "--tp", "3"])
    assert [x["fp8_linears"] for x in (bf16, cut, whole, both)] == [0, 7, 7, 7]
    for result in (bf16, whole):
        assert result["losses"] == pytest.approx(cut["losses"], rel=0.01)
    assert both["losses"][0] == pytest.approx(cut["losses"][0], rel=0.05)  # of other tokens, too
    key = "all_gather_into_tensor_coalesced"
    assert key not in whole["wire_bytes"]
    # of 2 inputs and 2 gradients: e4m3 and scales rowwise, bf16 for the columnwise form of tokens
    # that are no multiple of 128 a rank
    tokens, dim = 128 // 4, 256
    assert cut["wire_bytes"][key] == 4 * tokens * dim * (1 + 4 / 128 + 2)


@on_ranks(4, gpus=())
def test_schedules_of_a_pipeline_give_the_same_losses(
    world: int, device: str, tmp_path: Path
) -> None:
    flags, in_fp8 = ["--pp", "2", "--batch", "4", "--seq", "32"], ["--precision", "fp8"]
    with examples() as load:
        example = load("pp_llama")
        example.SIZES["tiny"] = replace(example.SIZES["tiny"], dim=128, hidden=256)
        bf16 = learned(example, tmp_path / "bf16", *flags, "--schedule", "zb")
        fp8 = learned(example, tmp_path / "fp8", *flags, *in_fp8)
        split = learned(example, tmp_path / "zb", *flags, *in_fp8, "--schedule", "zb")
        with pytest.raises(SystemExit, match="--pp 3 must divide the 4 ranks"):
            example.main([*TINY_TP, "--pp", "3", "--batch", "4"])
    assert [x["fp8_linears"] for x in (bf16, fp8, split)] == [0, 28, 28]
    assert fp8["losses"] == split["losses"]
    assert bf16["losses"] == pytest.approx(fp8["losses"], rel=0.01)
    assert bf16["losses"] != fp8["losses"]
