"""Bars of long calls: who sees one, when, and what it counts."""

from __future__ import annotations

import io
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import blocktensor
from blocktensor.model import progress
from tests.support.ranks import on_ranks


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def model(frozen: bool = False) -> nn.Sequential:
    return nn.Sequential(nn.Linear(256, 256), nn.Linear(256, 128)).requires_grad_(not frozen)


def converted() -> nn.Sequential:
    made = model()
    blocktensor.convert(made, skip_small=False)
    return made


def gated() -> nn.Module:
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaMLP

    made = nn.Sequential(LlamaMLP(LlamaConfig(hidden_size=256, intermediate_size=256)))
    blocktensor.convert(made, skip_small=False)
    return made


def frozen() -> nn.Sequential:
    made = converted()
    blocktensor.freeze(made)
    return made


def save(folder: Path, **options: Any) -> None:
    folder.mkdir(exist_ok=True)
    blocktensor.save_fp8(converted(), folder / "saved", **options)


def save_mxfp4(folder: Path, **options: Any) -> None:
    scales = blocktensor.Scales(weights="power_of_two")
    made = model().bfloat16()
    blocktensor.convert(
        made, blocktensor.Recipe(scale=scales, weight_grid="mxfp4"), skip_small=False
    )
    folder.mkdir(exist_ok=True)
    blocktensor.save_mxfp4(made, folder / "saved", **options)


def load(folder: Path, **options: Any) -> None:
    blocktensor.save_fp8(converted(), folder / "loaded", progress=False)
    blocktensor.load_fp8(model(), folder / "loaded", **options)


Call = Callable[..., Any]
CALLS: dict[str, Call] = {
    "save_fp8": save,
    "save_mxfp4": save_mxfp4,
    "load_fp8": load,
    "convert": lambda _, **options: blocktensor.convert(
        model(frozen=True), skip_small=False, **options
    ),
    "freeze": lambda _, **options: blocktensor.freeze(converted(), **options),
    "unfreeze": lambda _, **options: blocktensor.unfreeze(frozen(), **options),
    "fuse": lambda _, **options: blocktensor.fuse(gated(), **options),
}


def last_line(shown: str) -> str:
    return shown.rstrip().rpartition("\r")[2]


@pytest.mark.parametrize("name", CALLS)
def test_a_bar_that_is_asked_for_ends_at_all_of_the_work(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if name == "fuse":
        pytest.importorskip("transformers")
    CALLS[name](tmp_path, progress=True)
    shown = capsys.readouterr().err
    assert re.match(f"{name}: 100%", last_line(shown)), shown
    done, total = re.findall(r"([\d.]+k?)/([\d.]+k?) ", last_line(shown))[-1]
    assert done == total


def test_modules_are_counted_in_whole_numbers(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("transformers")
    blocktensor.fuse(gated(), progress=True)
    assert "| 1/1 [" in last_line(capsys.readouterr().err)


@pytest.mark.parametrize("name", CALLS)
def test_logs_have_no_bar(
    name: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if name == "fuse":
        pytest.importorskip("transformers")
    monkeypatch.setattr(progress, "SECONDS", 0.0)
    CALLS[name](tmp_path)
    assert capsys.readouterr().err == ""


def test_short_calls_show_no_bar_in_a_terminal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stderr", Terminal())
    save(tmp_path)
    assert sys.stderr.getvalue() == ""


def test_long_calls_show_a_bar_in_a_terminal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "SECONDS", 0.0)
    monkeypatch.setattr(sys, "stderr", Terminal())
    save(tmp_path)
    assert "save_fp8: 100%" in sys.stderr.getvalue()


@pytest.mark.parametrize(("word", "is_shown"), [("0", False), ("1", True)])
def test_the_variable_is_the_default(
    word: str, is_shown: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "SECONDS", 0.0)
    monkeypatch.setenv(progress.VARIABLE, word)
    monkeypatch.setattr(sys, "stderr", io.StringIO() if is_shown else Terminal())
    save(tmp_path)
    assert ("save_fp8" in sys.stderr.getvalue()) == is_shown


def test_an_argument_prevails_over_the_variable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(progress.VARIABLE, "1")
    load(tmp_path, progress=False)
    assert "load_fp8" not in capsys.readouterr().err


def test_another_value_of_the_variable_raises(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(progress.VARIABLE, "off")
    with pytest.raises(ValueError, match="BLOCKTENSOR_PROGRESS='off': expected 0, 1 or nothing"):
        save(tmp_path)
    assert not (tmp_path / "saved").exists()


@pytest.mark.parametrize("name", CALLS)
def test_another_argument_raises(name: str, tmp_path: Path) -> None:
    if name == "fuse":
        pytest.importorskip("transformers")
    with pytest.raises(TypeError, match="progress=1: expected True, False or None"):
        CALLS[name](tmp_path, progress=1)


def test_without_tqdm_calls_are_silent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tqdm", None)
    monkeypatch.setenv(progress.VARIABLE, "1")
    monkeypatch.setattr(sys, "stderr", Terminal())
    save(tmp_path)
    assert sys.stderr.getvalue() == ""


@pytest.mark.parametrize("name", CALLS)
def test_without_tqdm_an_argument_warns_where_it_is_given(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if name == "fuse":
        pytest.importorskip("transformers")
    monkeypatch.setitem(sys.modules, "tqdm", None)
    with pytest.warns(UserWarning, match="tqdm is not installed") as told:
        CALLS[name](tmp_path, progress=True)
    assert told[0].filename == __file__


@on_ranks(2)
def test_rank_0_alone_shows_a_bar(
    mesh: DeviceMesh, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    save(tmp_path / str(mesh.get_rank()), progress=True)
    assert ("save_fp8: 100%" in sys.stderr.getvalue()) == (mesh.get_rank() == 0)
