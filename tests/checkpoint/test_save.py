"""What save_fp8 writes, byte for byte, and what it leaves when it is interrupted."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("safetensors")

from expecttest import assert_expected_inline
from safetensors.torch import load_file, save_file, save_model

from blocktensor import BlockwiseFP8Tensor, Recipe, convert, load_fp8, save_fp8
from blocktensor.checkpoint import export
from blocktensor.checkpoint.names import possible_names, whole
from blocktensor.checkpoint.on_disk import tensor_digest
from blocktensor.ops import reference
from blocktensor.ops.formats import BLOCKS_128X128
from tests.support.checkpoint_experts import MATRICES, STACKS, E, K, Layer, layer, read
from tests.support.checkpoint_folders import INDEX
from tests.support.checkpoint_models import assert_same, bits, filled, on_meta, state
from tests.support.models import complaint

FILES = "blocktensor.checkpoint.files.ShardFile"
SUFFIXES = {"deepseek": "_scale_inv", "compressed-tensors": "_scale"}


def config(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "config.json").read_text())


@pytest.mark.parametrize("format", SUFFIXES)
@pytest.mark.parametrize("frozen", [False, True])
def test_weights_are_their_casts(tmp_path: Path, format: str, frozen: bool) -> None:
    model = filled(frozen=frozen)
    tensors = read(save_fp8(model, tmp_path / "fp8", format=format))
    suffix = SUFFIXES[format]
    for name in ("up", "down"):
        weight = getattr(filled(convert=False), name).weight
        data, scale, _ = reference.quantize_rowwise(weight, BLOCKS_128X128)
        assert torch.equal(bits(tensors[f"{name}.weight"]), bits(data))
        assert torch.equal(tensors[f"{name}.weight{suffix}"], scale)
    for name in ("norm.weight", "norm.bias", "up.bias", "embed.weight", "steps"):
        assert torch.equal(tensors[name], model.state_dict()[name])
    names = {"up.bias", "embed.weight", "norm.weight", "norm.bias", "steps"}
    names |= {f"{n}.weight{s}" for n in ("up", "down") for s in ("", suffix)}
    assert set(tensors) == names  # the head is the embedding


def test_the_config_of_transformers(tmp_path: Path) -> None:
    model = filled()
    model.config = SimpleNamespace(to_dict=lambda: {"model_type": "tiny", "hidden_size": 5})
    assert config(save_fp8(model, tmp_path / "fp8")) == {
        "model_type": "tiny",
        "hidden_size": 5,
        "quantization_config": {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": [128, 128],
            "modules_to_not_convert": ["head"],
        },
    }
    powers = filled(recipe=Recipe(scale="power_of_two"))
    described = config(save_fp8(powers, tmp_path / "powers", config={"a": 1}))
    assert described["a"] == 1
    assert described["quantization_config"]["scale_fmt"] == "ue8m0"


def test_the_config_names_linears_whose_weight_is_computed(tmp_path: Path) -> None:
    model = filled()
    model.gate = nn.utils.parametrizations.weight_norm(nn.Linear(5, 5))
    described = config(save_fp8(model, tmp_path / "fp8"))["quantization_config"]
    assert described["modules_to_not_convert"] == ["gate", "head"]


def test_the_config_of_compressed_tensors(tmp_path: Path) -> None:
    written = config(save_fp8(filled(), tmp_path / "fp8", format="compressed-tensors"))
    described = written["quantization_config"]
    assert described["quant_method"] == "compressed-tensors"
    assert described["ignore"] == ["head"]
    (group,) = described["config_groups"].values()
    assert group["weights"]["block_structure"] == [128, 128]


@pytest.mark.parametrize("format", SUFFIXES)
@pytest.mark.parametrize("size", [1, 60_000, 1 << 30])
def test_shards_index_and_digests(tmp_path: Path, format: str, size: int) -> None:
    folder = save_fp8(filled(), tmp_path / "fp8", format=format, max_shard_bytes=size)
    files, headers = sorted(file.name for file in folder.glob("*.safetensors")), {}
    assert (len(files) > 2) == (size <= 60_000)
    assert files[0] == f"model-00001-of-{len(files):05}.safetensors"
    index = json.loads((folder / INDEX).read_text())
    for file in files:
        inside, data = load_file(folder / file), (folder / file).read_bytes()
        assert {name for name, place in index["weight_map"].items() if place == file} == set(inside)
        assert len(inside) <= 2 or sum(x.nbytes for x in inside.values()) <= size
        headers[file] = hashlib.sha256(data[: 8 + int.from_bytes(data[:8], "little")]).hexdigest()
    tensors, metadata = read(folder), index["metadata"]
    assert set(index["weight_map"]) == set(tensors)
    assert metadata["total_size"] == sum(x.nbytes for x in tensors.values())
    assert metadata["header_sha256"] == headers
    wanted = {name: tensor_digest(x) for name, x in tensors.items()}
    assert list(metadata["tensor_sha256"].items()) == sorted(wanted.items())


@pytest.mark.parametrize("frozen", [False, True])
def test_a_file_may_be_as_large_as_asked_and_no_larger(tmp_path: Path, frozen: bool) -> None:
    model = filled(frozen=frozen)
    plain = {"steps", "embed.weight"}
    whole = 8 + model.embed.weight.nbytes + 200 * 300 + 4 * 2 * 3  # with up's data and scales
    for size, wanted in ((whole, plain | {"up.weight", "up.weight_scale_inv"}), (whole - 1, plain)):
        folder = save_fp8(model, tmp_path / str(size), max_shard_bytes=size)
        assert set(load_file(min(folder.glob("*.safetensors")))) == wanted
    folder = save_fp8(model, tmp_path / "small", max_shard_bytes=1)
    sizes = [len(load_file(file)) for file in folder.glob("*.safetensors")]
    assert sorted(sizes) == [1] * 5 + [2] * 2  # a weight and its scales stay together


# What is refused


def test_what_cannot_be_saved(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no FP8 weight: convert it first"):
        save_fp8(filled(convert=False), tmp_path / "a")
    with pytest.raises(ValueError, match="format='gguf'"):
        save_fp8(filled(), tmp_path / "a", format="gguf")
    with pytest.raises(ValueError, match="max_shard_bytes=0"):
        save_fp8(filled(), tmp_path / "a", max_shard_bytes=0)
    model = on_meta()
    convert(model, skip_small=False)
    with pytest.raises(ValueError, match="on the meta device"):
        save_fp8(model, tmp_path / "a")
    with pytest.raises(TypeError, match=r"save_fp8 takes a model, an nn\.Module: got a dict"):
        save_fp8({}, tmp_path / "a")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "full", [f"{FILES}.create", f"{FILES}.write", "pathlib.Path.write_text", "os.fsync"]
)
@pytest.mark.parametrize("is_there", [False, True])
def test_a_full_disk(
    is_there: bool, full: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, model = tmp_path / "a", filled()
    before = read(save_fp8(model, folder)) if is_there else {}

    def raises(*args: Any, **kwargs: Any) -> None:
        raise OSError("No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(full, raises)
        message = rf"^{folder} was not written \(No space left.*\), .*: free space on its disk"
        with pytest.raises(OSError, match=message):
            save_fp8(model, folder, overwrite=True)
    assert [x.name for x in tmp_path.iterdir()] == (["a"] if is_there else [])
    assert not is_there or read(folder).keys() == before.keys()
    save_fp8(model, folder, overwrite=True)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("recipe", [Recipe(), Recipe(scale="power_of_two")], ids=["fp32", "pow2"])
def test_weights_with_nan_or_inf(tmp_path: Path, bad: float, frozen: bool, recipe: Recipe) -> None:
    model = filled(convert=False)
    with torch.no_grad():
        model.down.weight[140, 130] = bad
    model.down.weight.requires_grad_(not frozen)
    convert(model, recipe, skip_small=False)
    save_fp8(filled(1), tmp_path / "fp8")
    before = read(tmp_path / "fp8")
    message = (
        r"down.weight has a block that FP8 cannot hold, the scale of block \[1, 1\] is (nan|inf)"
    )
    for path in (tmp_path / "fp8", tmp_path / "new"):
        with pytest.raises(ValueError, match=message):
            save_fp8(model, path, overwrite=True)
    after = read(tmp_path / "fp8")
    assert all(torch.equal(bits(after[name]), bits(x)) for name, x in before.items())
    assert [path.name for path in tmp_path.iterdir()] == ["fp8"]
    assert len(list((tmp_path / "fp8").iterdir())) == 3


def test_scales_that_could_not_be_loaded(tmp_path: Path) -> None:
    """Of tensors made by hand."""
    for scale, recipe in ((-1.0, Recipe()), (0.0, Recipe()), (3.0, Recipe(scale="power_of_two"))):
        module = nn.Module()
        data = torch.ones(5, 7).to(torch.float8_e4m3fn)
        weight = BlockwiseFP8Tensor.from_data(
            data, torch.full((1, 1), scale), block_shape=(128, 128), recipe=recipe
        )
        module.weight = nn.Parameter(weight, requires_grad=False)
        with pytest.raises(
            ValueError, match=rf"^weight has .* block \[0, 0\] is {scale}: expected a"
        ):
            save_fp8(module, tmp_path / "fp8")


# Stacks of experts


@pytest.mark.parametrize("format", SUFFIXES)
@pytest.mark.parametrize("frozen", [False, True])
def test_matrices_are_rows_of_the_stack(tmp_path: Path, format: str, frozen: bool) -> None:
    model = layer(frozen=frozen)
    folder = save_fp8(model, tmp_path / "fp8", format=format, expert_names="separate")
    suffix = SUFFIXES[format]
    tensors, plain = read(folder), layer(convert=False).experts
    digests = json.loads((folder / INDEX).read_text())["metadata"]["tensor_sha256"]
    assert digests == {name: tensor_digest(x) for name, x in tensors.items()}
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
    frozen = BlockwiseFP8Tensor.from_values(model.linear.weight.detach(), (128, 128))
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

    original = export.quantize_rowwise
    monkeypatch.setattr(export, "quantize_rowwise", quantize)
    save_fp8(layer(), tmp_path / "fp8", expert_names="separate")
    assert shapes == [(256, K)] * E + [(K, 128)] * E


NO_NAMES: dict[str, tuple[str, tuple[int, ...]]] = {
    "another name": ("kernel", (2, 130, 200)),
    # half of 257 rows is a whole block, but 257 rows are not two halves
    "gate and up of different sizes": ("gate_up_proj", (2, 257, K)),
}


@pytest.mark.parametrize("stack", NO_NAMES)
def test_stacks_without_names_for_single_experts(tmp_path: Path, stack: str) -> None:
    name, shape = NO_NAMES[stack]
    model = nn.Module()
    frozen = BlockwiseFP8Tensor.from_values(torch.ones(shape).bfloat16(), (128, 128))
    model.register_parameter(name, nn.Parameter(frozen, requires_grad=False))
    message = rf"{name} \[{shape[0]}, {shape[1]}, {shape[2]}\] has no names for single experts"
    with pytest.raises(ValueError, match=message):
        save_fp8(model, tmp_path / "fp8", expert_names="separate")
    with pytest.raises(ValueError, match="expert_names='both': expected one of auto, separate, f"):
        save_fp8(model, tmp_path / "fp8", expert_names="both")
    assert list(tmp_path.iterdir()) == []
    assert possible_names(Layer(experts=0))["experts.down_proj"] == [whole("experts.down_proj")]


@pytest.mark.parametrize("frozen", [False, True])
def test_experts_with_nan(tmp_path: Path, frozen: bool) -> None:
    model = layer(convert=False, frozen=frozen)
    with torch.no_grad():
        model.experts.down_proj[1, 140, 3] = float("nan")
    convert(model, skip_small=False)
    message = (
        r"experts.down_proj\[1\] has a block that FP8 cannot hold, the scale of block \[1, 0\]"
    )
    with pytest.raises(ValueError, match=message):
        save_fp8(model, tmp_path / "fp8", expert_names="separate")
    assert list(tmp_path.iterdir()) == []


# Other writers


def test_safetensors_of_a_frozen_model(tmp_path: Path) -> None:
    model = filled(frozen=True)
    tensors = dict(model.state_dict())
    del tensors["head.weight"]
    assert_expected_inline(
        complaint(RuntimeError, lambda: save_file(tensors, tmp_path / "x")),
        """\
this BlockwiseFP8Tensor [200, 300] has no storage of its own, so that safetensors
cannot write it: blocktensor.save_fp8(model, path) writes the model in FP8; in high
precision write .dequantize() of a frozen weight, and state_dict() of trainable
ones, which holds plain tensors""",
    )
    with pytest.raises(RuntimeError, match=r"blocktensor.save_fp8\(model, path\) writes"):
        save_model(model, str(tmp_path / "x"))
    with pytest.raises(RuntimeError, match=r"this BlockwiseFP8Weight \[200, 300\] has no stor"):
        filled().up.weight.storage()
    plain = filled().state_dict()
    del plain["head.weight"]
    save_file(plain, tmp_path / "x")


def test_a_matrix_and_its_transpose_in_one_memory_are_both_stored(tmp_path: Path) -> None:
    model = filled()
    square = torch.arange(16.0).view(4, 4)
    model.register_buffer("square", square)
    model.register_buffer("turned", square.t())
    tensors = read(save_fp8(model, tmp_path / "fp8"))
    assert torch.equal(tensors["square"], square)
    assert torch.equal(tensors["turned"], square.t())


def test_scales_of_two_kinds_are_not_described_as_powers_of_two(tmp_path: Path) -> None:
    model = filled(convert=False)
    convert(model.up, Recipe(scale="power_of_two"), skip_small=False)
    convert(model.down, Recipe(), skip_small=False)
    assert "scale_fmt" not in config(save_fp8(model, tmp_path / "fp8"))["quantization_config"]
