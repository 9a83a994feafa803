"""The FSDP2 example on two CPU ranks: its losses, its checkpoints, and what it writes down."""

from __future__ import annotations

import hashlib
import importlib
import io
import json
import shutil
import sys
from collections.abc import Iterator
from contextlib import redirect_stdout
from pathlib import Path
from statistics import fmean
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist

pytest.importorskip("rich")
if not dist.is_available():
    pytest.skip("torch was built without distributed", allow_module_level=True)

from tests.support import ranks
from tests.support.scripts import EXAMPLES, examples

TINY = ["--device", "cpu", "--layers", "2", "--seq", "32", "--batch", "2", "--warmup-steps", "2"]
STEPS = 12
FEW = 4
"""Steps of the runs whose losses have to be those of another run, to the bit."""


def run(example: ModuleType, out: Path, *flags: str, steps: int = STEPS) -> Any:
    """Run the example in this rank; what rank 0 wrote."""
    assert example.main([*TINY, "--steps", str(steps), *flags, "--out", str(out)]) == 0
    return json.loads((out / "result.json").read_text()) if dist.get_rank() == 0 else None


def weights(example: ModuleType) -> dict[str, str]:
    """Digests of the whole initial weights."""
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
    """Every run with two ranks: processes start once."""
    sys.path.insert(0, str(EXAMPLES))
    example = importlib.import_module("fsdp2_llama")
    where = Path(folder)
    bf16 = ["--master-dtype", "bf16"]
    fp8 = [*bf16, "--precision", "fp8"]
    printed = io.StringIO()
    with redirect_stdout(printed):
        of_fp8 = run(example, where / "fp8", *fp8)
    found = {
        "printed": printed.getvalue(),
        "bf16": run(example, where / "bf16", *bf16),
        "fp8": of_fp8,
        "fused": run(example, where / "fused", *fp8, "--fuse", steps=FEW),
        "gather": run(example, where / "gather", *fp8, "--gather", "bf16", steps=FEW),
        "ac": run(example, where / "ac", *fp8, "--ac", "--no-reshard-after-forward", steps=FEW),
        "fp32": run(example, where / "fp32", "--precision", "fp8", "--loss-chunk", "50"),
    }
    more = [*fp8, "--accumulate", "3", "--wgrad-input", "128x128"]
    found["accumulated"] = run(example, where / "accumulated", *more, steps=FEW)
    found["kept"] = run(example, where / "kept", *more, "--no-reshard-after-forward", steps=FEW)
    once = [*more, "--cache-weight", "step"]
    found["cast once"] = run(example, where / "cast_once", *once, steps=FEW)
    found["head"] = run(example, where / "head", *fp8, "--head", "fp8")
    saving = [*fp8, "--checkpoint", str(where / "saved"), "--checkpoint-every", "4"]
    found["stopped"] = run(example, where / "stopped", *saving, steps=6)
    if rank == 0:  # as runs leave it that are killed while they write
        for name in ("step-00000008", ".step-00000007.tmp"):
            shutil.copytree(where / "saved" / "step-00000006", where / "saved" / name)
            (where / "saved" / name / ".metadata").unlink()
    dist.barrier()
    found["resumed"] = run(example, where / "resumed", *saving)
    found["names"] = sorted(path.name for path in (where / "saved").iterdir())
    found["again"] = run(example, where / "again", *saving)
    try:
        run(example, where / "other", *saving, "--seed", "7")
    except SystemExit as error:
        found["other"] = str(error)
    found["weights"] = weights(example)
    return found


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("fsdp2")
    results = ranks.run(all_runs, 2, str(folder))
    assert results[0]["other"] == results[1]["other"]
    assert "result.json" not in results[1]["printed"], "rank 0 alone speaks"
    return {"folder": folder, **results[0]}


@pytest.fixture
def example() -> Iterator[ModuleType]:
    with examples() as load:
        yield load("fsdp2_llama")


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
    assert record["losses"] == runs["kept"]["losses"] == runs["cast once"]["losses"]
    assert record["losses"] != runs["fp8"]["losses"][:FEW]
    assert record["losses"][0] == pytest.approx(runs["fp8"]["losses"][0], rel=0.05)
    assert record["tokens_per_second_per_gpu"] == pytest.approx(3 * 64 / record["step_seconds"])


@pytest.mark.parametrize("other", ["gather", "ac", "fused"])
def test_the_way_to_the_weights_changes_no_bit(runs: dict[str, Any], other: str) -> None:
    assert runs[other]["losses"] == runs["fp8"]["losses"][:FEW]


def test_a_resumed_run_is_the_uninterrupted_one(runs: dict[str, Any]) -> None:
    assert runs["stopped"]["losses"] == runs["fp8"]["losses"][:6]
    assert runs["resumed"]["resumed_at"] == 6
    assert runs["resumed"]["losses"] == runs["fp8"]["losses"]
    # what was begun and never finished was not taken, and made way
    assert runs["names"] == [f"step-{step:08d}" for step in (4, 6, 8, 12)]


def test_a_finished_run_is_not_run_again(runs: dict[str, Any]) -> None:
    assert runs["again"]["resumed_at"] == STEPS
    assert runs["again"]["losses"] == runs["fp8"]["losses"]
    assert runs["again"]["tokens_per_second_per_gpu"] is None


def test_a_checkpoint_of_another_setting_is_refused(runs: dict[str, Any]) -> None:
    assert "step-00000012 was made with --seed 0, this run has 7" in runs["other"]
    assert "another --checkpoint DIR" in runs["other"]


def test_result_is_written_down(runs: dict[str, Any]) -> None:
    record = runs["gather"]
    assert record["options"]["gather"] == "bf16"
    assert record["options"]["steps"] == FEW
    assert record["model"]["layers"] == 2
    assert record["model"]["fp8_linears"] == 14
    assert runs["fp8"]["model"] == record["model"]
    assert runs["bf16"]["model"] == {**record["model"], "fp8_linears": 0}
    assert runs["bf16"]["options"]["gather"] is None
    assert record["versions"]["torch"] == torch.__version__
    assert record["device"] == "CPU"
    assert "tokens/s per GPU" in runs["printed"]
    assert runs["printed"].count("result.json") == 1
    assert record["world_size"] == 2
    assert record["max_memory_allocated"] is None
    assert record["tokens_per_second_per_gpu"] == pytest.approx(64 / record["step_seconds"])
    shape = record["model"]
    weights = shape["parameters"] - shape["vocab"] * shape["dim"] - 5 * shape["dim"]
    flops = 6 * weights + 12 * shape["layers"] * shape["dim"] * 32
    rate = record["tokens_per_second_per_gpu"]
    assert record["mfu"] == pytest.approx(flops * rate / 989e12)


def test_result_is_drawn(runs: dict[str, Any]) -> None:
    pytest.importorskip("matplotlib")
    assert (runs["folder"] / "fp8" / "losses.png").read_bytes().startswith(b"\x89PNG")
    names = {path.name for path in (runs["folder"] / "fp8").iterdir()}
    assert names == {"result.json", "losses.png"}


def test_weights_do_not_depend_on_the_number_of_ranks(
    runs: dict[str, Any], example: ModuleType
) -> None:
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
@pytest.mark.filterwarnings(
    "ignore:The .grad attribute of a Tensor that is not a leaf"
)  # Dynamo reads it
@pytest.mark.parametrize("precision", ["bf16", "fp8"])
def test_blocks_compile_whole(precision: str, example: ModuleType, tmp_path: Path) -> None:
    flags = [*TINY, "--steps", "3", "--precision", precision, "--out", str(tmp_path)]
    losses = []
    for more in ([], ["--compile", "--ac"]):
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        assert example.main([*flags, *more]) == 0
        losses.append(json.loads((tmp_path / "result.json").read_text())["losses"])
    counted = torch._dynamo.utils.counters
    assert counted["stats"]["unique_graphs"] == 1  # one for both blocks
    assert not counted["graph_break"]
    assert losses[1] == pytest.approx(losses[0], rel=0.01)


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
