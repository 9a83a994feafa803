"""Matrices of experts that do not make a stack of the model: an error, and an unchanged model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("safetensors")

from blocktensor import CheckpointError, load_fp8, save_fp8
from tests.support.checkpoint_experts import STACKS, E, K, layer, read, written
from tests.support.checkpoint_models import assert_same, state


def drop(name: str) -> Callable[[dict[str, Tensor]], object]:
    return lambda made: [made.pop(key) for key in list(made) if key.startswith(name)]


def to_bf16(made: dict[str, Tensor]) -> None:
    made["experts.1.up_proj.weight"] = made["experts.1.up_proj.weight"].bfloat16()
    del made["experts.1.up_proj.weight_scale_inv"]


def narrow(made: dict[str, Tensor]) -> None:
    made["experts.1.up_proj.weight"] = made["experts.1.up_proj.weight"][:, :190].contiguous()


def infinite(made: dict[str, Tensor]) -> None:
    made["experts.2.down_proj.weight_scale_inv"][1, 0] = float("inf")


FAULTS = {
    "a missing expert": (
        drop("experts.1."),
        r"'experts.gate_up_proj' is a stack of 3 experts: of their 6 matrices 2 are missing "
        r"\(experts.1.gate_proj.weight, experts.1.up_proj.weight\)",
    ),
    "a missing matrix": (
        drop("experts.2.up_proj"),
        r"of their 6 matrices 1 are missing \(experts.2.up_proj.weight\)",
    ),
    "missing scales": (
        drop("experts.2.up_proj.weight_scale_inv"),
        r"'experts.2.up_proj.weight' is FP8 and has 0 scales",
    ),
    "another shape": (
        narrow,
        r"'experts.1.up_proj.weight' has shape \[128, 190\], the model's has \[128, 200\] for an "
        r"expert of 'experts.gate_up_proj' \[3, 256, 200\]",
    ),
    "one not in FP8": (
        to_bf16,
        r"'experts.1.up_proj.weight' is BF16, 'experts.0.gate_proj.weight' of the same stack is "
        r"F8_E4M3: expected all in FP8 or none",
    ),
    "an infinite scale": (
        infinite,
        r"'experts.2.down_proj.weight_scale_inv': the scale of block \[1, 0\] is inf",
    ),
}


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("fault", FAULTS)
def test_what_does_not_fit(tmp_path: Path, fault: str, strict: bool) -> None:
    change, message = FAULTS[fault]
    folder = written(tmp_path / "fp8", change)
    model = layer(1, convert=False)
    before = state(model)
    with pytest.raises(CheckpointError, match=message):
        load_fp8(model, folder, strict=strict)
    assert_same(state(model), before)


def test_more_experts_than_the_model_has(tmp_path: Path) -> None:
    folder = written(tmp_path / "fp8", lambda made: None, experts=E + 1)
    model = layer(1, convert=False)
    with pytest.raises(CheckpointError, match=r"3 experts: the checkpoint has more \(experts.3"):
        load_fp8(model, folder, strict=False)


def test_fp8_over_trainable_experts(tmp_path: Path) -> None:
    folder = save_fp8(layer(), tmp_path / "fp8", expert_names="separate")
    model = layer(1)
    before = state(model)
    with pytest.raises(CheckpointError, match="trainable and would lose its high-precision values"):
        load_fp8(model, folder)
    assert_same(state(model), before)


def test_no_experts_at_all(tmp_path: Path) -> None:
    folder = written(tmp_path / "fp8", drop("experts."))
    with pytest.raises(CheckpointError, match=r"2 missing \(experts.gate_up_proj, experts.down_pr"):
        load_fp8(layer(1, convert=False), folder)
    report = load_fp8(layer(1, convert=False), folder, strict=False)
    assert set(report.missing) == STACKS


@pytest.mark.parametrize(
    "name", ["experts.1.up_proj.weight", "experts.2.down_proj.weight_scale_inv"]
)
def test_digests_of_matrices(tmp_path: Path, name: str) -> None:
    folder = save_fp8(layer(), tmp_path / "fp8", expert_names="separate")
    (file,) = folder.glob("*.safetensors")
    header, made = file.read_bytes(), read(folder)
    values = made[name].contiguous().flatten().view(torch.uint8).numpy().tobytes()
    at = header.index(values)
    with file.open("r+b") as opened:
        opened.seek(at)
        opened.write(bytes([values[0] ^ 1]))
    model = layer(1, convert=False)
    before = state(model)
    with pytest.raises(CheckpointError, match=f"corrupted: tensor '{name}' is not the one"):
        load_fp8(model, folder)
    assert_same(state(model), before)


def test_their_matrices_of_another_library(tmp_path: Path) -> None:
    def split(made: dict[str, Tensor]) -> None:
        for name in [name for name in made if "gate" in name or "up" in name]:
            made[name] = torch.cat([made[name], made[name]])[: 2 if "scale" in name else 144]

    folder = written(tmp_path / "fp8", split)
    model = layer(1, n=144, convert=False)
    model.experts.down_proj = nn.Parameter(torch.zeros(E, K, 128, dtype=torch.bfloat16))
    before = state(model)
    message = (
        r"'experts.0.gate_proj.weight' has 144 rows, no multiple of 128.*'experts.gate_up_proj'"
    )
    with pytest.raises(CheckpointError, match=message):
        load_fp8(model, folder)
    assert_same(state(model), before)
