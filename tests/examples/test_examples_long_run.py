"""The long run: its text is read once at most, and a run that stops goes on as if it had not."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.scripts import Load

pytest.importorskip("tokenizers")

FILES = [
    (f"drivers/net/a{i}.c", f"int function_{i}(int x)\n{{\n\treturn {i};\n}}\n" * 9)
    for i in range(300)
]
SIZES = {"dim": 128, "layers": 1, "heads": 2, "seq": 32, "batch": 2, "steps": 6}
TINY = [word for name, size in SIZES.items() for word in (f"--{name}", str(size))]
TINY += ["--no-compile", "--evaluate-every", "4", "--device", "cpu", "--convert-small"]


@pytest.fixture(scope="module")
def data(load: Load, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("kernel_text")
    load("kernel_text").build(FILES, folder, most=5000, vocab=384)
    return folder


def test_tokens_are_those_of_the_files(load: Load, data: Path) -> None:
    from tokenizers import Tokenizer

    kernel_text = load("kernel_text")
    tokens, tokenizer = kernel_text.load(data), Tokenizer.from_file(str(data / "tokenizer.json"))

    def text_of(part: torch.Tensor) -> list[str]:
        whole = tokenizer.decode(part.tolist(), skip_special_tokens=False)
        return whole.split(kernel_text.END_OF_FILE)

    texts = {text: name for name, text in FILES}
    heldout = [texts[text] for text in text_of(tokens.heldout) if text]
    *train, cut = text_of(tokens.train)
    assert heldout == [name for name, _ in sorted(FILES) if kernel_text.is_heldout(name)]
    names = [texts[text] for text in train]
    assert len(set(names)) == len(names) == tokens.facts["train_files"] - 1
    assert any(text.startswith(cut) for text in texts)
    assert not set(names) & set(heldout)
    assert names != sorted(names)
    assert len(tokens.train) == tokens.facts["train_tokens"] == 5000
    assert len(tokens.heldout) == tokens.facts["heldout_tokens"]
    assert tokens.facts["all_train_tokens"] > 5000


def test_too_few_files_are_refused(load: Load, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="1 source files are too few"):
        load("kernel_text").build(FILES[:1], tmp_path, most=10)


def result_of(out: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((out / "result.json").read_text())
    return found


@pytest.mark.parametrize(
    "flags",
    [
        ["--variant", "bf16"],
        ["--variant", "fp8, activations in powers of two"],
        ["--variant", "fp8, wgrad_input=128x128", "--saved-in-fp8"],
    ],
)
def test_a_run_that_stops_goes_on_as_if_it_had_not(
    load: Load, data: Path, tmp_path: Path, flags: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    long_run = load("long_run")
    monkeypatch.setattr(long_run, "TIMED", 2)
    arguments = [str(data), *flags, *TINY]
    long_run.main([*arguments, "--out", str(tmp_path / "whole")])

    options = long_run.parse([*arguments, "--out", str(tmp_path / "parts")])
    first = long_run.Training(options, load("kernel_text").load(data))
    next(first.run(math.inf))
    options.out.mkdir()
    first.save(options.out / "checkpoint.pt")
    long_run.main([*arguments, "--out", str(options.out)])

    whole, parts = result_of(tmp_path / "whole"), result_of(options.out)
    for name in ("loss", "norm", "heldout", "steps", "parameters", "variant"):
        assert whole[name] == parts[name], name
    assert whole["steps"] == 6
    assert [step for step, _ in whole["heldout"]] == [4, 6]
    states = [torch.load(tmp_path / name / "checkpoint.pt") for name in ("whole", "parts")]
    for a, b in zip(states[0]["model"].values(), states[1]["model"].values(), strict=True):
        assert torch.equal(a, b)


def test_fused_models_train_alike_and_moved_ones_do_not(
    load: Load, data: Path, tmp_path: Path
) -> None:
    def losses(*flags: str) -> tuple[str, list[float]]:
        out = tmp_path / str(len(list(tmp_path.iterdir())))
        load("long_run").main([str(data), *TINY, "--variant", "fp8", *flags, "--out", str(out)])
        result = result_of(out)
        return result["variant"], result["loss"]

    name, whole = losses()
    assert name == "fp8"
    assert losses("--fuse") == ("fp8, fused", whole)
    name, saved = losses("--saved-in-fp8")
    assert name == "fp8, activations saved in FP8"
    assert saved[0] == whole[0]  # outputs are the same, gradients are not
    assert all(abs(a - b) < 0.1 for a, b in zip(saved, whole, strict=True)) and saved != whole
    name, moved = losses("--move", "1e-2")
    assert name == "fp8, weights moved by 0.01"
    assert all(0 < abs(a - b) < 0.1 for a, b in zip(moved, whole, strict=True))
    with pytest.raises(SystemExit, match="--fuse needs an FP8 --variant"):
        load("long_run").main([str(data), *TINY, "--fuse", "--out", str(tmp_path / "none")])


def test_no_window_is_read_twice(load: Load, data: Path, tmp_path: Path) -> None:
    long_run, tokens = load("long_run"), load("kernel_text").load(data)
    training = long_run.Training(long_run.parse([str(data), *TINY, "--out", str(tmp_path)]), tokens)
    assert sorted(training.order.tolist()) == list(range(4999 // 32))
    other = long_run.parse([str(data), *TINY, "--seed", "1", "--out", str(tmp_path)])
    assert not torch.equal(training.order, long_run.Training(other, tokens).order)
    many = long_run.parse([str(data), *TINY, "--steps", "79", "--out", str(tmp_path)])
    with pytest.raises(ValueError, match=r"158 windows, but the text has 156\. Use --steps of at"):
        long_run.Training(many, tokens)


def test_experts_leave_their_router(load: Load, data: Path, tmp_path: Path) -> None:
    long_run = load("long_run")
    arguments = [str(data), *TINY, "--variant", "fp8", "--experts", "4", "--steps", "2"]
    long_run.main([*arguments, "--stop-after", "0", "--out", str(tmp_path / "none")])
    nothing = result_of(tmp_path / "none")
    assert nothing["steps"] == 0
    assert nothing["tokens_per_second"] is None
    long_run.main([*arguments, "--out", str(tmp_path / "two")])
    assert math.isfinite(result_of(tmp_path / "two")["loss"][-1])

    options = long_run.parse([*arguments, "--out", str(tmp_path)])
    training = long_run.Training(options, load("kernel_text").load(data))
    router = training.model.blocks[0].mlp
    before = router.bias.clone()
    training.heldout_loss()
    assert torch.equal(router.bias, before)
    training.train_step()
    assert not torch.equal(router.bias, before)
