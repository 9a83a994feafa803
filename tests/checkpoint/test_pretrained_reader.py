"""Ask transformers what it would load: its functions may fail, or be missing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("safetensors")
pytest.importorskip("transformers", minversion="5.17")

from transformers import core_model_loading

from blocktensor import CheckpointError, convert, load_fp8, save_fp8
from blocktensor.checkpoint import pretrained_reader
from tests.support.checkpoint_models import assert_same, state
from tests.support.pretrained import llama


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    model = llama().bfloat16()
    convert(model, skip_small=False)
    return save_fp8(model, tmp_path / "fp8")


def test_a_function_that_fails_raises(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any) -> Any:
        raise TypeError("unexpected argument 'x'")

    monkeypatch.setattr(core_model_loading, "convert_and_load_state_dict_in_model", fail)
    model = llama(seed=1).bfloat16()
    before = state(model)
    why = r"would load into this LlamaForCausalLM \(TypeError: unexpected argument 'x'\): expected"
    with pytest.raises(CheckpointError, match=why):
        load_fp8(model, folder)
    assert_same(state(model), before)


def test_names_decide_without_rules(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted, found = llama(seed=1).bfloat16(), llama(seed=2).bfloat16()
    load_fp8(wanted, folder)
    monkeypatch.setattr(pretrained_reader, "has_rules", lambda: False)
    load_fp8(found, folder)
    assert_same(state(found), state(wanted))
