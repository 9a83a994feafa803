"""The generated parts of README.md and docs/results.md."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import __main__ as cli
from benchmarks import page_parts, plots, results, results_page, shapes
from benchmarks.results import Row
from benchmarks.results_page import END, PAGES, README, RESULTS, START, Page

each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.path.name)


def rows_shown(folder: Path) -> list[str]:
    """The lines of tables on the page of results."""
    return [line for line in RESULTS.render(folder).splitlines() if line.startswith("|")]


def this_device() -> str:
    return results.environment("any")["device"]


@pytest.fixture
def no_plots(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plots, "FOLDER", tmp_path / "no_plots")


@each_page
def test_a_page_shows_the_results_on_disk(page: Page) -> None:
    assert page.render() in page.path.read_text("utf-8"), "run: python -m benchmarks page"


@each_page
@pytest.mark.usefixtures("no_plots")
def test_updating_changes_the_generated_part_alone(page: Page, tmp_path: Path) -> None:
    copy = replace(page, path=tmp_path / "copy.md")
    copy.path.write_text(f"above\n{START}\nold\n{END}\nbelow\n")
    assert copy.update()
    assert copy.path.read_text("utf-8") == f"above\n{copy.render()}\nbelow\n"
    assert not copy.update()


def test_a_page_without_marks_is_an_error(tmp_path: Path) -> None:
    copy = replace(README, path=tmp_path / "README.md")
    copy.path.write_text("no marks")
    with pytest.raises(ValueError, match="needs the marks"):
        copy.update()
    assert copy.path.read_text() == "no marks"


@each_page
def test_without_results_a_page_has_no_tables(page: Page, tmp_path: Path) -> None:
    assert page.render(tmp_path) == f"{START}\n\n{END}"


@pytest.mark.usefixtures("no_plots")
def test_the_command_updates_every_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    copies = [replace(page, path=tmp_path / page.path.name) for page in PAGES]
    monkeypatch.setattr(results_page, "PAGES", copies)
    monkeypatch.setattr(results_page, "ROOT", tmp_path)
    for copy in copies:
        copy.path.write_text(f"{START}\n{END}\n")
    for done in ("updated", "is up to date"):
        assert cli.main(["page"]) == 0
        assert capsys.readouterr().out == f"README.md {done}\nresults.md {done}\n"
        assert all(copy.path.read_text("utf-8") == f"{copy.render()}\n" for copy in copies)


@each_page
def test_plots_are_linked_once_they_are_drawn(
    page: Page, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plots, "FOLDER", tmp_path / "docs" / "plots")
    folder = "docs/plots" if page is README else "plots"
    copy = replace(page, path=tmp_path / page.path.relative_to(results_page.ROOT))
    results.write("linear", [], tmp_path)
    assert "![" not in copy.render(tmp_path)
    plots.FOLDER.mkdir(parents=True)
    (plots.FOLDER / "linear_speedup.png").touch()
    link = f"![speed-up of linear layers]({folder}/linear_speedup.png)"
    assert link in copy.render(tmp_path).splitlines()


def gemm_row(kind: str, shape: shapes.Shape, ours: float, cublas: float | None) -> Row:
    m, n, k = shape
    sizes = {"kind": kind, "m": m, "n": n, "k": k}
    return {**sizes, "blocktensor": ours, "cublas": cublas, "tensorwise": 1250.0}


@pytest.mark.usefixtures("no_plots")
def test_gemms(tmp_path: Path) -> None:
    rows = [
        gemm_row("fprop", (4096, 2048, 7168), 1200.0, 1000.0) | {"bf16": 600.0, "deepgemm": 1200.0},
        gemm_row("fprop", (4096, 2048, 2048), 1000.0, 1000.0),
        gemm_row("wgrad", (4096, 2048, 7168), 900.0, None),
    ]
    results.write("gemm", rows, tmp_path, absent={"torchao": "No module", "deepgemm": "No module"})
    lines, table = RESULTS.render(tmp_path).splitlines(), rows_shown(tmp_path)
    assert table[2] == "| 4096 x (2048 x 7168) | 1200 | 1.20x | 0.96x | 900 | – | 0.72x |"
    assert table[3] == "| 4096 x (2048 x 2048) | 1000 | 1.00x | 0.80x | – | – | – |"
    assert table[4] == "| geometric mean |  | 1.10x | 0.88x |  | – | 0.72x |"
    text = " ".join(lines)
    assert "geometric means: forward 2.00x bf16, 1.00x DeepGEMM." in text
    assert "(`python -m benchmarks gemm`, " in text
    assert "; not installed there: deepgemm, torchao)" in text
    assert all(len(line) <= page_parts.LINE_LENGTH for line in lines)


def test_casts_keep_precisions_apart(tmp_path: Path) -> None:
    rows: list[Row] = [
        {"op": "rowwise", "dtype": "bfloat16", "m": 4, "k": 2, "share_of_copy": 0.98},
        {"op": "rowwise", "dtype": "bfloat16", "m": 8, "k": 2, "share_of_copy": 0.99},
        {"op": "rowwise", "dtype": "float32", "m": 8, "k": 2, "share_of_copy": 0.5},
        {"op": "transpose", "dtype": "float8_e4m3fn", "m": 8, "k": 2, "share_of_copy": 0.6},
    ]
    results.write("cast", rows, tmp_path)
    lines = rows_shown(tmp_path)
    assert lines[0] == "| cast | 8 x 2 | 4 x 2 |"
    assert lines[2:] == [
        "| rowwise, bf16 | 99% | 98% |",
        "| rowwise, fp32 | 50% | – |",
        "| transpose | 60% | – |",
    ]


def test_host_times(tmp_path: Path) -> None:
    results.write("host", [{"what": "cast", "us": 9.5}, {"what": "gemm"}], tmp_path)
    lines = rows_shown(tmp_path)
    assert lines == ["| what | us |", "|---|---|", "| cast | 9.5 |", "| gemm | – |"]


def grouped_row(kind: str, groups: str, ours: float, **rates: float) -> Row:
    ratios = {"vs_bf16": "bf16", "of_dense": "dense"}
    return {
        **{"kind": kind, "groups": groups, "experts": 8, "tokens": 4096, "n": 2048, "k": 1024},
        **{"blocktensor": ours, **rates},
        **{label: ours / rates[peer] for label, peer in ratios.items() if peer in rates},
    }


@pytest.mark.usefixtures("no_plots")
def test_products_of_experts(tmp_path: Path) -> None:
    rows = [
        grouped_row("fprop", "ragged", 1000.0, bf16=500.0, dense=1250.0),
        grouped_row("fprop", "aligned", 1200.0, bf16=500.0, dense=1200.0, deepgemm=1000.0),
        grouped_row("wgrad", "ragged", 900.0, dense=1000.0),
        grouped_row("cast", "aligned", 3000.0, dense=3000.0),
    ]
    results.write("grouped", rows, tmp_path, absent={"deepgemm": "No module"})
    lines, table = RESULTS.render(tmp_path).splitlines(), rows_shown(tmp_path)
    assert table[2:] == [
        "| 8: 4096 x (2048 x 1024) | 1000 | 2.00x | 0.80x | 900 | – | 0.90x |",
        "| geometric mean |  | 2.00x | 0.80x |  | – | 0.90x |",
    ]
    text = " ".join(lines)
    assert "forward 1.00x dense, 1.20x DeepGEMM; casts of any groups 1.00x dense." in text
    assert "; not installed there: deepgemm)" in text


def test_layers_and_models_of_experts(tmp_path: Path) -> None:
    sizes = {"experts": 8, "tokens": 64, "dim": 7168, "hidden": 2048}
    times = {"ms": 2.0, "speedup": 1.5, "peak_mib": 80.0, "peak_of_bf16": 0.8}
    spent = {"saved_of_bf16": 0.7, "gemms_us": 1500.0, "copies_us": 2.0}
    rows: list[Row] = [
        {"what": "layer", **sizes, "variant": "fp8, inputs shared", **times, **spent},
        {
            "what": "Qwen3-MoE, 2 layers",
            **sizes,
            "variant": "fp8, inputs shared",
            **times,
            "speedup": 1.2,
        },
        {"what": "Qwen3-MoE, 2 layers", **sizes, "variant": "fp8, fused", **times, "speedup": 1.3},
    ]
    results.write("experts", rows, tmp_path)
    lines = rows_shown(tmp_path)
    name = "8 experts of 7168 x 2048, 64 tokens"
    assert lines[2:5] == [
        f"| {name} each | fp8, inputs shared | 2.0 | 1.50x | 80.0 | 0.80x | 0.70x |",
        f"| Qwen3-MoE, 2 layers: {name} | fp8, inputs shared | 2.0 | 1.20x | 80.0 | 0.80x | – |",
        f"| Qwen3-MoE, 2 layers: {name} | fp8, fused | 2.0 | 1.30x | 80.0 | 0.80x | – |",
    ]
    assert lines[5:] == [
        *("|  |  | GEMMs | copies |", "|---|---|---|---|"),
        f"| {name} | fp8, inputs shared | 1500.0 | 2.0 |",
    ]
    _, brief, _ = README.render(tmp_path).split("\n\n")
    assert " ".join(brief.split()) == (
        "Experts with SwiGLU, forward + backward: 1.50x (8 of 7168 x 2048) bf16's speed; a "
        f"Qwen3-MoE step 1.20x, fused 1.30x (`python -m benchmarks experts`, {this_device()})."
    )


def test_losses_of_both_demos(tmp_path: Path) -> None:
    runs = [
        {"seed": 3, "precision": precision, "heldout_loss": loss}
        for precision, loss in (("bf16", 2.0), ("fp8", 2.01))
    ]
    for name, model in (("train_lm", {}), ("train_moe", {"experts": 8})):
        config = {"parameters": 1.1e8, "steps": 400, "model": model}
        demo = {"runs": runs, "config": config, "device": {"name": "CPU"}, "date": "2026-01-02T3"}
        (tmp_path / f"{name}.json").write_text(json.dumps(demo))
    text = RESULTS.render(tmp_path)
    assert text.count("| 3 | 2.0000 | 2.0100 | +0.50% |") == 2
    assert "**The demo's model, 110M parameters, 400 steps**" in text
    assert "(`python examples/train_lm.py --seeds 1`, CPU, 2026-01-02)" in text
    assert "**The demo's mixture of experts, 110M parameters, 400 steps**" in text
    assert "(`python examples/train_lm.py --experts 8 --seeds 1`, CPU, 2026-01-02)" in text


def test_the_readme_names_the_speed_of_whole_models(tmp_path: Path) -> None:
    blocks = {"layers": 4, "eager_speedup": 1.36, "compiled_speedup": None}
    fused = {"variant": "fp8, fused", "eager_speedup": 1.4, "compiled_speedup": 1.41}
    rows = [{"variant": "bf16"}, {"variant": "fp8", **blocks}, fused]
    results.write("block", rows, tmp_path)
    run = {
        "parameters": 8e9,
        "ranks": 2,
        "microbatches": 1,
        "speed_of_bf16": 1.23,
        "peak_of_bf16": 0.93,
    }
    rows = [{"variant": "fp8", "mode": mode, **run} for mode in ("run", "dry run")]
    results.write("fsdp2", rows, tmp_path)
    _, stack, training, _ = README.render(tmp_path).split("\n\n")
    wanted = (
        "4 Llama-8B-shaped blocks, forward + backward: 1.36x bf16 in eager mode, – compiled; with "
        f"`fuse` 1.40x and 1.41x (`python -m benchmarks block`, {this_device()})."
    )
    assert " ".join(stack.split()).endswith(wanted)
    assert "8.0B parameters, FSDP2 on 2 GPUs: 1.23x bf16's speed, 0.93x its memory" in training


@pytest.mark.usefixtures("no_plots")
def test_cards_follow_each_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    row: Row = {"m": 4096, "n": 4096, "k": 4096, "eager_speedup": 1.25}
    for card, ratio in (("h200", 1.25), ("h100", 0.95)):
        monkeypatch.setattr(results, "environment", lambda name, card=card: _environment(card))
        folder = results.of_card(card, tmp_path)
        results.write("linear", [{**row, "eager_speedup": ratio}], folder)
    plots.FOLDER.mkdir(parents=True)
    (plots.FOLDER / "linear_speedup.png").touch()
    copy = replace(RESULTS, path=tmp_path / "results.md")
    shown = copy.render(tmp_path)
    assert [line for line in shown.splitlines() if "4096 x (4096 x 4096)" in line] == [
        "| 4096 x (4096 x 4096) | 1.25x |",
        "| 4096 x (4096 x 4096) | 0.95x |",
    ]
    assert shown.index("NVIDIA H200") < shown.index("NVIDIA H100")
    assert shown.count("![") == 1
    assert "\n\n\n" not in shown


def _environment(card: str) -> dict[str, str]:
    where = {"command": "python -m benchmarks linear", "device": f"NVIDIA {card.upper()}"}
    return where | {"torch": "2.11.0", "triton": "3.6.0", "date": "2026-11-25"}


@pytest.mark.parametrize(
    ("device", "folder"),
    [("NVIDIA H200", "."), ("NVIDIA H100 80GB HBM3", "h100"), ("NVIDIA L40S", ".")],
)
def test_results_of_a_card_have_a_folder(
    device: str, folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(results, "FOLDER", tmp_path)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.get_device_name", lambda: device)
    assert results.here() == tmp_path / folder
