"""The example with DeepSeek-V3's layers: what it writes, loads, trains and saves."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

pytest.importorskip("accelerate")
pytest.importorskip("transformers", minversion="5.17")
pytest.importorskip("peft")
pytest.importorskip("safetensors")

from safetensors.torch import load_file

from tests.support.ranks import run

EXAMPLE = "lora_deepseek"
TINY = ["--tiny", "--layers", "2", "--device", "cpu", "--seq", "16", "--lr", "1e-2"]
DEPRECATED = "ignore:.*gradient_checkpointing.* is deprecated:FutureWarning"


def adapters_in(folder: Path) -> dict[str, Any]:
    tensors: dict[str, Any] = load_file(folder / "adapters" / "adapter_model.safetensors")
    return tensors


@pytest.mark.filterwarnings(DEPRECATED)
def test_one_process(example: ModuleType, tmp_path: Path) -> None:
    assert example.main([*TINY, "--steps", "3", "--out", str(tmp_path)]) == 0
    result = json.loads((tmp_path / "result.json").read_text())
    assert len(result["losses"]) == 3 and all(0 < x < 10 for x in result["losses"])
    assert result["tokens_per_second"] > 0
    adapters = adapters_in(tmp_path)
    assert sum(x.numel() for x in adapters.values()) == result["adapter_parameters"]
    assert all(x.abs().max() > 0 for x in adapters.values())
    assert not (tmp_path / "adapters.part").exists()
    stored = load_file(tmp_path / "tiny-2x8" / "model-1.safetensors")
    expert = "model.layers.1.mlp.experts.7.gate_proj.weight"
    assert stored[expert].dtype == torch.float8_e4m3fn
    assert stored[f"{expert}_scale_inv"].shape == (1, 2)
    assert stored["model.layers.1.mlp.gate.weight"].dtype == torch.bfloat16
    assert stored["model.layers.1.mlp.gate.e_score_correction_bias"].dtype == torch.float32
    # the same folder as a real one, of which some layers are read; adapters are written anew
    few = ["--folder", str(tmp_path / "tiny-2x8"), "--layers", "1", "--steps", "1"]
    assert example.main([*TINY, *few, "--no-checkpointing", "--out", str(tmp_path)]) == 0
    assert len(adapters_in(tmp_path)) == len(adapters) // 2


@pytest.mark.filterwarnings(DEPRECATED)
@pytest.mark.filterwarnings("ignore:This sequence already has </s>:UserWarning")  # trl adds one too
def test_preferences(example: ModuleType, tmp_path: Path) -> None:
    pytest.importorskip("trl")
    pytest.importorskip("datasets")
    assert example.main([*TINY, "--dpo", "--steps", "2", "--out", str(tmp_path)]) == 0
    losses = json.loads((tmp_path / "result.json").read_text())["losses"]
    assert losses[0] == pytest.approx(torch.tensor(2.0).log().item(), abs=1e-3)
    assert losses[1] != losses[0]


def on_a_rank(rank: int, world: int, folder: str) -> None:
    """Run the example, cut by FSDP2 and by experts."""
    import warnings

    from tests.support.scripts import examples

    warnings.simplefilter("ignore", FutureWarning)
    with examples() as load:
        example = load(EXAMPLE)
        for ways in ([], ["--ep"]):
            out = str(Path(folder, *ways))
            assert example.main([*TINY, *ways, "--steps", "1", "--out", out]) == 0


def test_two_ranks_write_the_same_adapters_in_both_layouts(tmp_path: Path) -> None:
    pytest.importorskip("transformers", minversion="5.23")
    run(on_a_rank, 2, tmp_path)
    fsdp, ep = (adapters_in(x) for x in (tmp_path, tmp_path / "--ep"))
    assert fsdp.keys() == ep.keys()
    for name, x in fsdp.items():
        torch.testing.assert_close(ep[name], x, rtol=0, atol=0.3 * 1e-2)
