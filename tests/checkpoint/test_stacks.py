"""Stacks of experts in checkpoints: whole, or a matrix for each expert, in the same bytes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("safetensors")

from safetensors.torch import load_file

from blocktensor import (
    BlockwiseFP8Tensor,
    BlockwiseFP8Weight,
    Recipe,
    convert,
    load_fp8,
    save_fp8,
    unfreeze,
)
from blocktensor.checkpoint import save as save_module
from blocktensor.checkpoint.names import Names, possible_names
from blocktensor.ops import reference
from blocktensor.ops.formats import BLOCKS_128X128
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
    written,
)
from tests.support.checkpoint_models import assert_same, bits, state

# What is written


@pytest.mark.parametrize("spelling", ["deepseek", "compressed-tensors"])
@pytest.mark.parametrize("frozen", [False, True])
def test_matrices_are_rows_of_the_stack(tmp_path: Path, spelling: str, frozen: bool) -> None:
    model = layer(frozen=frozen)
    folder = save_fp8(model, tmp_path / "fp8", spelling=spelling, expert_names="separate")
    suffix = {"deepseek": "_scale_inv", "compressed-tensors": "_scale"}[spelling]
    tensors, plain = read(folder), layer(convert=False).experts
    assert tensors.pop("router").dtype == torch.bfloat16
    for e in range(E):
        gate, up = plain.gate_up_proj[e].chunk(2)
        for name, x in zip(MATRICES, (gate, up, plain.down_proj[e]), strict=True):
            data, scale, _ = reference.quantize_rowwise(x, BLOCKS_128X128)
            name = f"experts.{e}.{name}.weight"
            assert torch.equal(bits(tensors.pop(name)), bits(data))
            assert torch.equal(tensors.pop(name + suffix), scale)
    assert tensors == {}


@pytest.mark.parametrize("expert_names", ["auto", "fused"])
def test_other_models_keep_their_names(tmp_path: Path, expert_names: str) -> None:
    tensors = read(save_fp8(layer(), tmp_path / "fp8", expert_names=expert_names))
    assert set(tensors) == {"router", *STACKS, *(f"{name}_scale_inv" for name in STACKS)}


def test_experts_that_are_not_fp8(tmp_path: Path) -> None:
    """They are split, too, and the config names their module."""
    model = layer(convert=False)
    model.linear = nn.Linear(128, 128, bias=False, dtype=torch.bfloat16)
    frozen = BlockwiseFP8Tensor.quantize(model.linear.weight.detach(), (128, 128))
    model.linear.weight = nn.Parameter(frozen, requires_grad=False)
    for expert_names, name in (("separate", "experts.0.down_proj.weight"), ("auto", None)):
        folder = save_fp8(model, tmp_path / expert_names, expert_names=expert_names)
        described = json.loads((folder / "config.json").read_text())["quantization_config"]
        assert described["modules_to_not_convert"] == ["experts"]
        x = read(folder)[name or "experts.down_proj"]
        stack = model.experts.down_proj
        assert torch.equal(x, stack[0] if name else stack)
        loaded = layer(1, convert=False)
        loaded.linear = nn.Linear(128, 128, bias=False, dtype=torch.bfloat16)
        load_fp8(loaded, folder)
        assert_same(state(loaded), state(model))


def test_a_file_holds_whole_experts(tmp_path: Path) -> None:
    size = 2 * (256 * K + 4 * 4)  # gate and up of two experts
    model = layer(frozen=True)
    folder = save_fp8(model, tmp_path / "fp8", expert_names="separate", max_shard_bytes=size)
    found = [sorted(load_file(file)) for file in sorted(folder.glob("*.safetensors"))]
    of = [{f"experts.{e}.{n}.weight" for n in MATRICES[:2]} for e in range(E)]
    with_scales = [names | {f"{n}_scale_inv" for n in names} for names in of]
    assert set(found[0]) == with_scales[0] | {"router"}
    assert set(found[1]) == with_scales[1] | with_scales[2]
    loaded = layer(1, convert=False)
    load_fp8(loaded, folder)
    assert_same(state(loaded), state(model))


def test_experts_are_cast_one_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shapes = []

    def quantize(x: Tensor, *args: object) -> object:
        shapes.append(tuple(x.shape))
        return original(x, *args)

    original = save_module.quantize_rowwise
    monkeypatch.setattr(save_module, "quantize_rowwise", quantize)
    save_fp8(layer(), tmp_path / "fp8", expert_names="separate")
    assert shapes == [(256, K)] * E + [(K, 128)] * E


# There and back


@pytest.mark.parametrize("recipe", [Recipe(), Recipe(scale="power_of_two")], ids=["fp32", "pow2"])
@pytest.mark.parametrize("expert_names", ["separate", "fused"])
@pytest.mark.parametrize(
    "make",
    [lambda: layer(5, convert=False), lambda: layer(5, frozen=True), on_meta],
    ids=["plain", "frozen", "meta"],
)
def test_there_and_back(
    tmp_path: Path, make: Callable[[], Layer], expert_names: str, recipe: Recipe
) -> None:
    source, model = layer(frozen=True, recipe=recipe), make()
    save_fp8(source, tmp_path / "fp8", expert_names=expert_names)
    report = load_fp8(model, tmp_path / "fp8", recipe=recipe)
    assert_same(state(model), state(source))
    assert (set(report.fp8), report.plain) == (STACKS, ("router",))
    assert (report.missing, report.unexpected) == ((), ())
    unfreeze(model)
    assert isinstance(model.experts.down_proj, BlockwiseFP8Weight)
    again = save_fp8(model, tmp_path / "again", expert_names=expert_names)
    assert_same_files(again, tmp_path / "fp8")


def assert_same_files(a: Path, b: Path) -> None:
    tensors, others = read(a), read(b)
    assert tensors.keys() == others.keys()
    assert all(torch.equal(bits(x), bits(others[name])) for name, x in tensors.items())


def test_what_is_loaded_does_not_lie_in_the_files(tmp_path: Path) -> None:
    folder = save_fp8(layer(), tmp_path / "fp8", expert_names="separate")
    model = on_meta()
    load_fp8(model, folder)
    before = state(model)
    (file,) = folder.glob("*.safetensors")
    with file.open("r+b") as opened:
        opened.write(b"\0" * file.stat().st_size)
    assert_same(state(model), before)


@pytest.mark.parametrize("names", [("w1", "w3", "w2"), MATRICES])
def test_either_names_of_matrices(tmp_path: Path, names: tuple[str, ...]) -> None:
    source = layer(frozen=True)
    spelled = dict(zip(MATRICES, names, strict=True))

    def rename(made: dict[str, Tensor]) -> None:
        for name in list(made):
            words = name.split(".")
            made[".".join(spelled.get(word, word) for word in words)] = made.pop(name)

    model = layer(1, convert=False)
    load_fp8(model, written(tmp_path / "fp8", rename))
    assert_same(state(model), state(source))


def test_torchtitans_experts(tmp_path: Path) -> None:
    source, model = split_experts(0), split_experts(1)
    folder = save_fp8(source, tmp_path / "fp8", expert_names="separate")
    assert {f"2.w{i}.weight" for i in (1, 2, 3)} <= set(read(folder))
    load_fp8(model, folder)
    assert_same(state(model), state(source))


def test_masters_of_trainable_experts(tmp_path: Path) -> None:
    """Matrices in bf16 are written to them, as ``load_state_dict`` would."""
    plain = layer(2, convert=False).experts

    def to_bf16(made: dict[str, Tensor]) -> None:
        for e in range(E):
            gate, up = plain.gate_up_proj.detach()[e].chunk(2)
            for name, x in zip(MATRICES, (gate, up, plain.down_proj.detach()[e]), strict=True):
                made[f"experts.{e}.{name}.weight"] = x
                del made[f"experts.{e}.{name}.weight_scale_inv"]

    folder = written(tmp_path / "fp8", to_bf16)
    for recipe in (Recipe(), Recipe(cache_weight="step")):
        model = layer(1, recipe=recipe)
        stack = model.experts.gate_up_proj
        assert isinstance(stack, BlockwiseFP8Weight)
        stack.rowwise()  # a cast that must not be used again
        before = stack.master.clone()
        half = stack.half()  # its values are read later
        report = load_fp8(model, folder)
        assert report.fp8 == ()
        assert model.experts.gate_up_proj is stack
        assert torch.equal(stack.master, plain.gate_up_proj)
        assert torch.equal(model.experts.down_proj.master, plain.down_proj)
        data, scale, _ = reference.quantize_rowwise(plain.gate_up_proj.detach(), BLOCKS_128X128)
        assert torch.equal(bits(stack.rowwise().data), bits(data))
        assert torch.equal(stack.rowwise().scale, scale)
        assert torch.equal(half.master, before.half())
    model = on_meta()
    load_fp8(model, folder)
    assert torch.equal(model.experts.gate_up_proj, plain.gate_up_proj)


def test_scales_without_dimensions_of_one_block(tmp_path: Path) -> None:
    """As transformers 5.17 writes those of experts."""

    def squeeze(made: dict[str, Tensor]) -> None:
        for name in list(made):
            if "scale" in name:
                made[name] = made[name].squeeze()
        assert made["experts.0.down_proj.weight_scale_inv"].shape == (2,)

    model = layer(1, convert=False)
    load_fp8(model, written(tmp_path / "fp8", squeeze))
    assert_same(state(model), state(layer(frozen=True)))


# Blocks that two matrices share, and other stacks that are not split


def test_blocks_that_gate_and_up_share(tmp_path: Path) -> None:
    """144 rows of each: the second block of the stack has 112 of gate's and 16 of up's."""
    model = layer(n=144, frozen=True)
    with pytest.raises(ValueError, match=r"have 144 rows, no multiple of 128, and share blocks"):
        save_fp8(model, tmp_path / "fp8", expert_names="separate")
    save_fp8(model, tmp_path / "fp8")
    loaded = layer(1, n=144, convert=False)
    load_fp8(loaded, tmp_path / "fp8")
    assert_same(state(loaded), state(model))


def test_stacks_that_are_transposed(tmp_path: Path) -> None:
    model = layer(is_transposed=True, frozen=True)
    with pytest.raises(ValueError, match=r"gate_up_proj \[3, 200, 256\] has no names for single"):
        save_fp8(model, tmp_path / "fp8", expert_names="separate")
    save_fp8(model, tmp_path / "fp8")
    loaded = layer(1, is_transposed=True, convert=False)
    load_fp8(loaded, tmp_path / "fp8")
    for name in STACKS:
        values = [m.get_parameter(name).dequantize() for m in (model, loaded)]
        assert torch.equal(*values)
    # matrices [K, N] would fit by their shape
    square = Layer(100, is_transposed=True)
    report = load_fp8(square, written(tmp_path / "other", lambda made: None), strict=False)
    assert set(report.missing) == STACKS


def test_gate_and_up_of_different_sizes(tmp_path: Path) -> None:
    """Half of 257 rows is a whole block, but 257 rows are not two halves."""
    model = nn.Module()
    frozen = BlockwiseFP8Tensor.quantize(torch.ones(2, 257, K).bfloat16(), (128, 128))
    model.gate_up_proj = nn.Parameter(frozen, requires_grad=False)
    with pytest.raises(ValueError, match=r"gate_up_proj \[2, 257, 200\] has no names for single"):
        save_fp8(model, tmp_path / "fp8", expert_names="separate")


def test_no_experts_in_a_stack() -> None:
    assert possible_names(Layer(experts=0))["experts.down_proj"] == [Names(("experts.down_proj",))]


def test_names_that_do_not_exist(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="expert_names='both': expected one of auto, separate, f"):
        save_fp8(layer(), tmp_path / "fp8", expert_names="both")
    model = nn.Module()
    frozen = BlockwiseFP8Tensor.quantize(torch.ones(2, 130, 200).bfloat16(), (128, 128))
    model.kernel = nn.Parameter(frozen, requires_grad=False)
    with pytest.raises(ValueError, match=r"kernel \[2, 130, 200\] has no names for single experts"):
        save_fp8(model, tmp_path / "fp8", expert_names="separate")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("frozen", [False, True])
def test_experts_with_nan(tmp_path: Path, frozen: bool) -> None:
    model = layer(convert=False, frozen=frozen)
    with torch.no_grad():
        model.experts.down_proj[1, 140, 3] = float("nan")
    convert(model, auto_filter_small_kn=False)
    message = (
        r"experts.down_proj\[1\] has a block that FP8 cannot hold, the scale of block \[1, 0\]"
    )
    with pytest.raises(ValueError, match=message):
        save_fp8(model, tmp_path / "fp8", expert_names="separate")
    assert list(tmp_path.iterdir()) == []
