"""Stacks of experts that do not fit the model: an error, and an unchanged model."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("safetensors")

from safetensors.torch import save_file

from blocktensor import Recipe, load_fp8
from blocktensor.checkpoint.on_disk import tensor_digest
from tests.support.checkpoint_experts import (
    DOWN,
    GATE_UP,
    SCALES,
    E,
    K,
    Tensors,
    drop,
    each_scales,
    layer,
    own_scales,
    read,
    sharing,
    to_bf16,
    written,
)
from tests.support.checkpoint_folders import INDEX
from tests.support.checkpoint_models import assert_refused


def changed(name: str, change: Callable[[Tensor], Tensor]) -> Callable[[Tensors], object]:
    return lambda made: made.update({name: change(made[name])})


def set_to(value: float, *at: int) -> Callable[[Tensor], Tensor]:
    def change(scale: Tensor) -> Tensor:
        scale[at] = value
        return scale

    return change


def with_ones(*names: str, rows: int = 2, cols: int = 1) -> Callable[[Tensors], object]:
    """Further scales."""
    return lambda made: made.update({name: torch.ones(rows, cols) for name in names})


FAULTS: list[tuple[str, str, Callable[[Tensors], object], str]] = [
    ("a missing expert", "either", drop("experts.1."),
     r"'experts.gate_up_proj' is a stack of 3 experts: of their 6 matrices 2 are missing "
     r"\(experts.1.gate_proj.weight, experts.1.up_proj.weight\)"),
    ("a missing matrix", "either", drop("experts.2.up_proj"),
     r"of their 6 matrices 1 are missing \(experts.2.up_proj.weight\)"),
    ("a matrix in bf16", "either", to_bf16("experts.1.up_proj"),
     r"'experts.1.up_proj.weight' is BF16, 'experts.0.gate_proj.weight' of the same stack is "
     r"F8_E4M3: expected all in FP8 or none"),
    ("another shape", "either",
     changed("experts.1.up_proj.weight", lambda x: x[:, :190].contiguous()),
     r"'experts.1.up_proj.weight' has shape \[128, 190\], the model's has \[128, 200\] for an "
     r"expert of 'experts.gate_up_proj' \[3, 256, 200\]"),
    ("missing scales", "own", drop("experts.2.up_proj.weight_scale_inv"),
     r"'experts.2.up_proj.weight' is FP8 and has 0 scales"),
    ("an infinite scale", "own",
     changed("experts.2.down_proj.weight_scale_inv", set_to(torch.inf, 1, 0)),
     r"'experts.2.down_proj.weight_scale_inv': the scale of block \[1, 0\] is inf"),
    ("no scales", "stack", drop(GATE_UP),
     r"'experts.0.gate_proj.weight' is FP8 and has 0 scales: expected one of "
     r"experts.0.gate_proj.weight_scale_inv or experts.0.gate_proj.weight_scale or "
     r"experts.gate_up_proj_scale_inv or experts.gate_up_proj_scale$"),
    ("scales of an expert less", "stack", changed(GATE_UP, lambda x: x[1:].clone()),
     r"'experts.gate_up_proj_scale_inv' is F32 \[2, 2, 2\]: expected F32 or .*, \[3, 2, 2\]: a "
     r"scale for each 128x128 block of \[3, 256, 200\]"),
    ("scales of an expert more", "stack", changed(DOWN, lambda x: torch.cat([x, x[:1]])),
     r"'experts.down_proj_scale_inv' is F32 \[4, 2, 1\]: expected F32 or .*, \[3, 2, 1\]: a"),
    ("scales of gate alone", "stack", changed(GATE_UP, lambda x: x[:, :1].clone()),
     r"'experts.gate_up_proj_scale_inv' is F32 \[3, 1, 2\]: expected F32 or .*, \[3, 2, 2\]: a"),
    ("another dtype", "stack", changed(DOWN, lambda x: x.view(torch.int32)),
     r"'experts.down_proj_scale_inv' is I32 \[3, 2, 1\]: expected F32 or BF16 or F16 or F8_E8M0"),
    ("a scale of 0", "stack", changed(GATE_UP, set_to(0.0, 2, 1)),
     r"'experts.gate_up_proj_scale_inv': the scale of block \[2, 1, 0\] is 0.0: expected a fin"),
    ("under both suffixes", "stack",
     lambda made: made.update({DOWN.removesuffix("_inv"): made[DOWN].clone()}),
     r"'experts.0.down_proj.weight' is FP8 and has 2 scales: expected one of .*_proj_scale_inv"),
    ("one matrix has its own, too", "stack",
     with_ones("experts.1.up_proj.weight_scale_inv", rows=1, cols=2),
     r"'experts.1.up_proj.weight' is FP8 and has 2 scales: expected either "
     r"experts.1.up_proj.weight_scale_inv, and so for each matrix of 'experts.gate_up_proj', or "
     r"experts.gate_up_proj_scale_inv$"),
    ("all matrices have their own, too", "stack",
     with_ones(*(f"experts.{e}.down_proj.weight_scale" for e in range(E))),
     r"'experts.0.down_proj.weight' is FP8 and has 2 scales: expected either"),
    ("the first matrix has not", "stack",
     lambda made: (with_ones(*(f"experts.{e}.down_proj.weight_scale" for e in (1, 2)))(made)
                   or made.pop(DOWN)),
     r"'experts.0.down_proj.weight' is FP8 and has 0 scales"),
]  # fmt: skip
CASES = [
    pytest.param(scales, change, message, id=f"{fault}, {scales}")
    for fault, which, change, message in FAULTS
    for scales in (SCALES if which == "either" else (which,))
]


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize(("scales", "change", "message"), CASES)
def test_what_does_not_fit(
    tmp_path: Path, scales: str, change: Callable[[Tensors], object], message: str, strict: bool
) -> None:
    folder = written(tmp_path / "fp8", lambda made: (SCALES[scales](made), change(made)))
    assert_refused(folder, layer(1, convert=False), message, strict=strict)


def test_more_experts_than_the_model_has(tmp_path: Path) -> None:
    folder = written(tmp_path / "fp8", own_scales, experts=E + 1)
    message = r"3 experts: the checkpoint has more \(experts.3"
    assert_refused(folder, layer(1, convert=False), message, strict=False)


@each_scales
def test_fp8_over_trainable_experts(tmp_path: Path, scales: str) -> None:
    folder = written(tmp_path / "fp8", SCALES[scales])
    assert_refused(folder, layer(1), "trainable and would lose its high-precision values")


def test_scales_of_another_recipe(tmp_path: Path) -> None:
    folder = written(tmp_path / "fp8", SCALES["stack"])
    message = rf"'{GATE_UP}': the scale of block \[0, 0, 0\] is .*: expected a power of two"
    assert_refused(folder, layer(1, convert=False), message, recipe=Recipe(scale="power_of_two"))


def test_blocks_of_matrices_of_another_library(tmp_path: Path) -> None:
    """Each matrix of 144 rows begins a block, which in the stack has rows of both."""

    def split(made: Tensors) -> None:
        for name in [name for name in made if "gate" in name or "up" in name]:
            made[name] = torch.cat([made[name], made[name]])[: 2 if "scale" in name else 144]

    folder = written(tmp_path / "fp8", split)
    model = layer(1, n=144, convert=False)
    model.experts.down_proj = nn.Parameter(torch.zeros(E, K, 128, dtype=torch.bfloat16))
    message = (
        r"'experts.0.gate_proj.weight' has 144 rows, no multiple of 128.*'experts.gate_up_proj'"
    )
    assert_refused(folder, model, message)


def test_shared_blocks_have_no_place_in_stacks_of_gate_and_of_up(tmp_path: Path) -> None:
    model = nn.Module()
    model.router, model.experts = nn.Parameter(torch.zeros(E, K)), nn.Module()
    for name, shape in {"w1": (144, K), "w3": (144, K), "w2": (K, 144)}.items():
        model.experts.register_parameter(name, nn.Parameter(torch.zeros(E, *shape)))
    message = (
        r"'experts.gate_up_proj_scale_inv' has the scales of \[3, 288, 200\], in which "
        r"'experts.0.gate_proj.weight' shares blocks with another matrix: the model's 'experts.w1'"
    )
    assert_refused(sharing(tmp_path / "fp8"), model, message)


MATRIX = "experts.2.up_proj.weight"
OF_EITHER = [("own", MATRIX), ("own", f"{MATRIX}_scale_inv"), ("stack", MATRIX), ("stack", GATE_UP)]


@pytest.mark.parametrize(("scales", "name"), OF_EITHER)
def test_digests(tmp_path: Path, scales: str, name: str) -> None:
    """Of scales that lie in another file than their weights, too."""
    folder = written(tmp_path / "fp8", SCALES[scales])
    made = read(folder)
    (folder / "model.safetensors").unlink()
    places = {x: "scales.safetensors" if "scale" in x else "a.safetensors" for x in made}

    def write() -> None:
        for file in set(places.values()):
            save_file({x: made[x] for x in made if places[x] == file}, folder / file)

    digests = {x: tensor_digest(value) for x, value in made.items()}
    index = {"weight_map": places, "metadata": {"tensor_sha256": digests}}
    (folder / INDEX).write_text(json.dumps(index))
    write()
    load_fp8(layer(1, convert=False), folder)
    made[name].view(torch.uint8)[-1] ^= 1
    write()
    message = f"corrupted: tensor '{name}' is not the one"
    assert_refused(folder, layer(1, convert=False), message)
