"""The demo: its model, its data, its command line, and what it leaves on disk."""

import contextlib
import json
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("rich")
pytest.importorskip("matplotlib")

from tests.support.scripts import TINY_MODEL, Load, flags

TINY = [*TINY_MODEL, *flags(samples=1)]


def test_model_is_causal_and_tells_positions_apart(load: Load) -> None:
    gpt = load("common.gpt")
    torch.manual_seed(0)
    config = gpt.ModelConfig(dim=24, layers=2, heads=2, seq=12)
    model = gpt.GPT(config)
    assert gpt.GPT.count_parameters(config) == sum(p.numel() for p in model.parameters())
    tokens = torch.randint(256, (3, 12))
    changed = tokens.clone()
    changed[:, 7:] = (changed[:, 7:] + 1) % 256
    a, b, swapped = model(tokens), model(changed), model(tokens[:, [1, 0, *range(2, 12)]])
    torch.testing.assert_close(a[:, :7], b[:, :7], rtol=0, atol=1e-6)
    assert not torch.allclose(a[:, 7:], b[:, 7:], atol=1e-3)
    assert not torch.allclose(a[:, -1], swapped[:, -1], atol=1e-5)


def test_generate_continues_the_prompt_past_the_context(load: Load) -> None:
    gpt = load("common.gpt")
    torch.manual_seed(0)
    model = gpt.GPT(gpt.ModelConfig(dim=24, layers=1, heads=2, seq=8))
    first, second = gpt.generate(model, b"def ", length=12, samples=2, seed=3)
    assert first.startswith(b"def ")
    assert len(first) == len(second) == 16
    assert first != second
    assert gpt.generate(model, b"def ", length=12, samples=2, seed=3) == [first, second]


def test_corpus_split_is_deterministic_and_disjoint(stdlib: Path, load: Load) -> None:
    text = load("common.text")
    corpus, again = text.load_corpus(), text.load_corpus()
    assert corpus.digest == again.digest
    assert torch.equal(corpus.train, again.train)
    assert torch.equal(corpus.heldout, again.heldout)

    train, heldout = set(corpus.train_files), set(corpus.heldout_files)
    assert train and heldout and not train & heldout
    assert len(train) + len(heldout) == 40
    assert not any("skipped" in name for name in train | heldout)
    assert corpus.train.numel() == sum((stdlib / name).stat().st_size + 1 for name in train)

    # A new file joins one side and moves no other.
    (stdlib / "another.py").write_text("pass\n")
    grown = text.load_corpus()
    assert train <= set(grown.train_files)
    assert heldout <= set(grown.heldout_files)


def test_batches_depend_on_the_seed_alone(stdlib: Path, load: Load) -> None:
    text = load("common.text")
    stream = text.load_corpus().train

    def take(seed: int) -> list[torch.Tensor]:
        torch.rand(1)  # The global generator has no say.
        batches = text.random_batches(stream, batch=3, seq=8, seed=seed)
        return [tensor for _ in range(4) for tensor in next(batches)]

    assert all(map(torch.equal, take(0), take(0)))
    assert not all(map(torch.equal, take(0), take(1)))
    for inputs, targets in zip(take(0)[::2], take(0)[1::2], strict=True):
        assert torch.equal(inputs[:, 1:], targets[:, :-1])


def test_run_writes_json_and_plot(stdlib: Path, load: Load, tmp_path: Path, capsys: Any) -> None:
    out = tmp_path / "new" / "out"
    arguments = [*TINY, "--seeds", "2", "--out", str(out)]
    assert load("train_lm").main(arguments) == 0
    record = json.loads((out / "train_lm.json").read_text())
    assert (record["status"], record["device"]["type"]) == ("complete", "cpu")
    assert record["command"].endswith(" ".join(arguments))
    assert (record["config"]["steps"], record["config"]["model"]["dim"]) == (6, 16)
    assert record["versions"]["torch"] and record["date"] and record["data"]["train_files"]
    assert [(run["seed"], run["precision"]) for run in record["runs"]] == [
        (0, "bf16"),
        (0, "fp8"),
        (1, "bf16"),
        (1, "fp8"),
    ]
    for run in record["runs"]:
        assert len(run["losses"]) == 6
        assert run["losses"][-1] < run["losses"][0]
        assert run["heldout_loss"] > 0
        assert run["seconds"] > 0
        assert len(run["samples"]) == 1
        assert bool(run["backends"]) == (run["precision"] == "fp8")
    bf16, fp8 = record["runs"][:2]
    # The same weights and data: the first losses differ by rounding, and do differ.
    assert fp8["losses"] != bf16["losses"]
    assert fp8["losses"][0] == pytest.approx(bf16["losses"][0], rel=0.02)
    expected = (fp8["heldout_loss"] / bf16["heldout_loss"] - 1) * 100
    assert record["differences"][0]["heldout_percent"] == pytest.approx(expected)
    assert record["summary"]["heldout_percent"]["seeds"] == 2
    assert (out / "train_lm.png").read_bytes().startswith(b"\x89PNG")
    assert {path.name for path in out.iterdir()} == {"train_lm.json", "train_lm.png"}
    printed = capsys.readouterr().out
    for words in ("held-out loss", "FP8 against bf16, by seed", "FP8, sample 1", fp8["conversion"]):
        assert words in printed
    assert printed.startswith("No GPU: FP8 is emulated here") and "time, training" not in printed


@pytest.fixture
def ctrl_c() -> Iterator[None]:
    """Ctrl-C raises; a shell lets the jobs that it starts in the background ignore it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("ctrl_c")
@pytest.mark.parametrize(
    ("error", "completed"),
    [(KeyboardInterrupt, 0), (MemoryError, 0), (KeyboardInterrupt, 3), (MemoryError, 9)],
)
def test_a_run_that_stops_keeps_what_was_done(
    error: type[BaseException],
    completed: int,
    stdlib: Path,
    load: Load,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Ctrl-C, or an error, hits the step after so many; a result of no step replaces no other."""
    training = load("common.training")
    real, left = training.train_step, iter(range(completed))

    def train_step(*args: object) -> torch.Tensor:
        if next(left, None) is None:
            raise error
        loss: torch.Tensor = real(*args)
        return loss

    monkeypatch.setattr(training, "train_step", train_step)
    file = tmp_path / "train_lm.json"
    file.write_text("earlier")
    with contextlib.suppress(MemoryError):
        assert load("train_lm").main([*TINY, "--out", str(tmp_path)]) == 130
        assert error is KeyboardInterrupt
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if completed == 0:
        assert file.read_text() == "earlier"
        return
    record = json.loads(file.read_text())
    status = "interrupted" if error is KeyboardInterrupt else "failed"
    assert record["status"] == status
    assert status in capsys.readouterr().out
    assert sum(len(run["losses"]) for run in record["runs"]) == completed
    assert len(record["runs"]) == (1 if completed < 6 else 2)
    assert record["runs"][-1]["heldout_loss"] is None
    assert (tmp_path / "train_lm.png").read_bytes().startswith(b"\x89PNG")


def test_divergence_is_shown_and_still_makes_valid_json(
    stdlib: Path, load: Load, tmp_path: Path
) -> None:
    assert load("train_lm").main([*TINY, "--lr", "1e30", "--out", str(tmp_path)]) == 0
    record = json.loads((tmp_path / "train_lm.json").read_text(), parse_constant=pytest.fail)
    assert record["runs"][0]["losses"][0] > 0
    assert record["runs"][0]["losses"][-1] is None
    assert record["runs"][0]["samples"] == []


def test_seq_longer_than_the_text_is_explained(stdlib: Path, load: Load) -> None:
    with pytest.raises(SystemExit, match="--seq 999999 is longer than the held-out text"):
        load("train_lm").main([*TINY, "--seq", "999999"])


def test_flags_override_the_preset(load: Load) -> None:
    options = load("common.options")
    parsed = options.parse_options(["--preset", "gpu", "--device", "cpu", "--layers", "2"])
    assert parsed.model.layers == 2
    assert parsed.model.dim == options.PRESETS["gpu"].dim
    assert parsed.lr == options.PRESETS["gpu"].lr


def test_missing_extra_is_named(load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    load("train_lm")
    monkeypatch.setitem(sys.modules, "rich", None)
    monkeypatch.delitem(sys.modules, "train_lm")
    for name in [name for name in sys.modules if name.startswith("rich.")]:
        monkeypatch.delitem(sys.modules, name)
    with pytest.raises(SystemExit, match=r"pip install '\.\[demo\]'"):
        load("train_lm")
