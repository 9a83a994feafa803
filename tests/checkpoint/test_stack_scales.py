"""Matrices of experts beside scales of their whole stacks, as transformers 5.23 saves them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("safetensors")

from safetensors.torch import save_file

from blocktensor import CheckpointError, Recipe, load_fp8, save_fp8
from blocktensor.checkpoint.on_disk import tensor_digest
from tests.support.checkpoint_experts import (
    MATRICES,
    STACKS,
    E,
    K,
    Layer,
    layer,
    on_meta,
    read,
    split_experts,
    stack_scales,
    written,
)
from tests.support.checkpoint_folders import INDEX
from tests.support.checkpoint_models import assert_same, state

GATE_UP, DOWN = "experts.gate_up_proj_scale_inv", "experts.down_proj_scale_inv"


def sharing(folder: Path) -> Path:
    """144 rows of gate and of up: the second block of the stack has rows of both."""
    made = read(save_fp8(layer(n=144, frozen=True), folder))
    for stack, parts in (("gate_up_proj", MATRICES[:2]), ("down_proj", MATRICES[2:])):
        for e, expert in enumerate(made.pop(f"experts.{stack}")):
            for part, x in zip(parts, expert.chunk(len(parts)), strict=True):
                made[f"experts.{e}.{part}.weight"] = x.clone()
    for file in folder.iterdir():
        file.unlink()
    save_file(made, folder / "model.safetensors")
    return folder


# What loads


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e8m0fnu])
@pytest.mark.parametrize(
    "make",
    [lambda: layer(5, convert=False), lambda: layer(5, frozen=True), on_meta],
    ids=["plain", "frozen", "meta"],
)
def test_stacks_have_the_bytes_of_the_files(
    tmp_path: Path, make: Callable[[], Layer], dtype: torch.dtype
) -> None:
    recipe = Recipe() if dtype == torch.float32 else Recipe(scale="power_of_two")

    def change(made: dict[str, Tensor]) -> None:
        stack_scales(made)
        assert (made[GATE_UP].shape, made[DOWN].shape) == ((E, 2, 2), (E, 2, 1))
        for name in (GATE_UP, DOWN):
            made[name] = made[name].to(dtype)

    folder, model = written(tmp_path / "fp8", change, recipe=recipe), make()
    report = load_fp8(model, folder, recipe=recipe)
    assert_same(state(model), state(layer(frozen=True, recipe=recipe)))
    assert (set(report.fp8), report.plain) == (STACKS, ("router",))
    assert (report.missing, report.unexpected) == ((), ())
    before = state(model)
    (file,) = folder.glob("*.safetensors")
    with file.open("r+b") as opened:
        opened.write(b"\0" * file.stat().st_size)
    assert_same(state(model), before)


def test_blocks_that_gate_and_up_share(tmp_path: Path) -> None:
    folder = sharing(tmp_path / "fp8")
    model = layer(1, n=144, convert=False)
    load_fp8(model, folder)
    assert_same(state(model), state(layer(n=144, frozen=True)))


def test_stacks_of_gate_and_of_up_take_their_rows(tmp_path: Path) -> None:
    """As torchtitan has them."""
    model = nn.Module()
    model.experts, model.router = split_experts(1), nn.Parameter(layer().router.detach())
    load_fp8(model, written(tmp_path / "fp8", stack_scales))
    assert_same(state(model.experts), state(split_experts(0)))


def test_experts_that_the_model_does_not_have(tmp_path: Path) -> None:
    model = nn.Module()
    model.router = nn.Parameter(torch.zeros(E, K))
    report = load_fp8(model, written(tmp_path / "fp8", stack_scales), strict=False)
    assert report.plain == ("router",)
    matrices = {f"experts.{e}.{matrix}.weight" for e in range(E) for matrix in MATRICES}
    assert set(report.unexpected) == {GATE_UP, DOWN} | matrices


@pytest.mark.parametrize("name", [GATE_UP, "experts.2.up_proj.weight"])
def test_digests(tmp_path: Path, name: str) -> None:
    """Of scales that lie in another file than their weights, too."""
    folder = written(tmp_path / "fp8", stack_scales)
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
    model = layer(1, convert=False)
    before = state(model)
    with pytest.raises(CheckpointError, match=f"corrupted: tensor '{name}' is not the one"):
        load_fp8(model, folder)
    assert_same(state(model), before)


# What does not

Tensors = dict[str, Tensor]


def bf16(made: Tensors, names: list[str]) -> None:
    for name in names:
        made[name] = made[name].bfloat16()


FAULTS: dict[str, tuple[Callable[[Tensors], object], str]] = {
    "no scales": (
        lambda made: made.pop(GATE_UP),
        r"'experts.0.gate_proj.weight' is FP8 and has 0 scales: expected one of "
        r"experts.0.gate_proj.weight_scale_inv or experts.0.gate_proj.weight_scale or "
        r"experts.gate_up_proj_scale_inv or experts.gate_up_proj_scale$",
    ),
    "an expert less": (
        lambda made: made.update({GATE_UP: made[GATE_UP][1:].clone()}),
        r"'experts.gate_up_proj_scale_inv' is F32 \[2, 2, 2\]: expected F32 or .*, \[3, 2, 2\]: a "
        r"scale for each 128x128 block of \[3, 256, 200\]",
    ),
    "an expert more": (
        lambda made: made.update({DOWN: torch.cat([made[DOWN], made[DOWN][:1]])}),
        r"'experts.down_proj_scale_inv' is F32 \[4, 2, 1\]: expected F32 or .*, \[3, 2, 1\]: a",
    ),
    "scales of gate alone": (
        lambda made: made.update({GATE_UP: made[GATE_UP][:, :1].clone()}),
        r"'experts.gate_up_proj_scale_inv' is F32 \[3, 1, 2\]: expected F32 or .*, \[3, 2, 2\]: a",
    ),
    "another dtype": (
        lambda made: made.update({DOWN: made[DOWN].view(torch.int32)}),
        r"'experts.down_proj_scale_inv' is I32 \[3, 2, 1\]: expected F32 or BF16 or F16 or F8_E8M0",
    ),
    "a scale of 0": (
        lambda made: made[GATE_UP][2, 1].zero_(),
        r"'experts.gate_up_proj_scale_inv': the scale of block \[2, 1, 0\] is 0.0: expected a fin",
    ),
    "under both suffixes": (
        lambda made: made.update({DOWN.removesuffix("_inv"): made[DOWN].clone()}),
        r"'experts.0.down_proj.weight' is FP8 and has 2 scales: expected one of .*_proj_scale_inv",
    ),
    "one matrix has its own, too": (
        lambda made: made.update({"experts.1.up_proj.weight_scale_inv": torch.ones(1, 2)}),
        r"'experts.1.up_proj.weight' is FP8 and has 2 scales: expected either "
        r"experts.1.up_proj.weight_scale_inv, and so for each matrix of 'experts.gate_up_proj', or "
        r"experts.gate_up_proj_scale_inv$",
    ),
    "all matrices have their own, too": (
        lambda made: made.update(
            {f"experts.{e}.down_proj.weight_scale": torch.ones(2, 1) for e in range(E)}
        ),
        r"'experts.0.down_proj.weight' is FP8 and has 2 scales: expected either",
    ),
    "the first matrix has not": (
        lambda made: (
            [made.update({f"experts.{e}.down_proj.weight_scale": torch.ones(2, 1)}) for e in (1, 2)]
            and made.pop(DOWN)
        ),
        r"'experts.0.down_proj.weight' is FP8 and has 0 scales",
    ),
    "a missing matrix": (
        lambda made: made.pop("experts.2.up_proj.weight"),
        r"of their 6 matrices 1 are missing \(experts.2.up_proj.weight\)",
    ),
    "a matrix in bf16": (
        lambda made: bf16(made, ["experts.1.up_proj.weight"]),
        r"'experts.1.up_proj.weight' is BF16, 'experts.0.gate_proj.weight' of the same stack is",
    ),
    "another shape": (
        lambda made: made.update(
            {"experts.1.up_proj.weight": made["experts.1.up_proj.weight"][:, :190].contiguous()}
        ),
        r"'experts.1.up_proj.weight' has shape \[128, 190\], the model's has \[128, 200\]",
    ),
}


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("fault", FAULTS)
def test_what_does_not_fit(tmp_path: Path, fault: str, strict: bool) -> None:
    change, message = FAULTS[fault]
    folder = written(tmp_path / "fp8", lambda made: (stack_scales(made), change(made)))
    model = layer(1, convert=False)
    before = state(model)
    with pytest.raises(CheckpointError, match=message) as caught:
        load_fp8(model, folder, strict=strict)
    assert str(folder) in str(caught.value)
    assert_same(state(model), before)


def test_scales_that_no_matrix_needs(tmp_path: Path) -> None:
    """So transformers 5.23 leaves what is no whole blocks: in bf16, its scales without meaning."""

    def change(made: Tensors) -> None:
        stack_scales(made)
        bf16(made, [f"experts.{e}.down_proj.weight" for e in range(E)])

    folder, model = written(tmp_path / "fp8", change), layer(1, convert=False)
    with pytest.raises(CheckpointError, match=rf"0 missing, 1 unexpected \({DOWN}\)"):
        load_fp8(model, folder)
    report = load_fp8(model, folder, strict=False)
    assert (report.fp8, report.unexpected) == (("experts.gate_up_proj",), (DOWN,))
    stored = read(folder)
    for e in range(E):
        x = model.experts.down_proj[e]
        assert torch.equal(x, stored[f"experts.{e}.down_proj.weight"])


def test_fp8_over_trainable_experts(tmp_path: Path) -> None:
    folder, model = written(tmp_path / "fp8", stack_scales), layer(1)
    before = state(model)
    with pytest.raises(CheckpointError, match="trainable and would lose its high-precision values"):
        load_fp8(model, folder)
    assert_same(state(model), before)


def test_scales_of_another_recipe(tmp_path: Path) -> None:
    folder, model = written(tmp_path / "fp8", stack_scales), layer(1, convert=False)
    before = state(model)
    message = rf"'{GATE_UP}': the scale of block \[0, 0, 0\] is .*: expected a power of two"
    with pytest.raises(CheckpointError, match=message):
        load_fp8(model, folder, recipe=Recipe(scale="power_of_two"))
    assert_same(state(model), before)


def test_shared_blocks_have_no_place_in_stacks_of_gate_and_of_up(tmp_path: Path) -> None:
    folder = sharing(tmp_path / "fp8")
    model = nn.Module()
    model.router, model.experts = nn.Parameter(torch.zeros(E, K)), nn.Module()
    for name, shape in {"w1": (144, K), "w3": (144, K), "w2": (K, 144)}.items():
        model.experts.register_parameter(name, nn.Parameter(torch.zeros(E, *shape)))
    before = state(model)
    message = (
        r"'experts.gate_up_proj_scale_inv' has the scales of \[3, 288, 200\], in which "
        r"'experts.0.gate_proj.weight' shares blocks with another matrix: the model's 'experts.w1'"
    )
    with pytest.raises(CheckpointError, match=message):
        load_fp8(model, folder)
    assert_same(state(model), before)
