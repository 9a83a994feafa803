"""What save_fp8 writes, byte for byte, and what it leaves when it is interrupted."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("safetensors")

from expecttest import assert_expected_inline
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file, save_model

from blocktensor import BlockwiseFP8Tensor, Recipe, convert, load_fp8, save_fp8, save_mxfp4
from blocktensor.checkpoint import export
from blocktensor.checkpoint.names import Names, possible_names
from blocktensor.ops import reference
from blocktensor.ops.formats import BLOCKS_128X128
from tests.support.checkpoint_experts import MATRICES, STACKS, E, K, Layer, layer, read
from tests.support.checkpoint_models import (
    INDEX,
    NEW,
    OLD,
    assert_same,
    bits,
    content,
    filled,
    found,
    on_meta,
    save,
    state,
)
from tests.support.models import complaint


def config(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "config.json").read_text())


def assert_casts(tensors: dict[str, Tensor], values: dict[str, Tensor]) -> None:
    """Take the data and the scales of values in high precision out of what is stored."""
    for name, x in values.items():
        data, scale, _ = reference.quantize_rowwise(x.detach(), BLOCKS_128X128)
        assert torch.equal(bits(tensors.pop(name)), bits(data))
        assert torch.equal(tensors.pop(f"{name}_scale_inv"), scale)


@pytest.mark.parametrize("frozen", [False, True])
def test_weights_are_their_casts(tmp_path: Path, frozen: bool) -> None:
    model, plain = filled(frozen=frozen), filled(convert=False)
    tensors = read(save_fp8(model, tmp_path / "fp8"))
    assert_casts(tensors, {"up.weight": plain.up.weight, "down.weight": plain.down.weight})
    # the head is the embedding
    assert tensors.keys() == {"norm.weight", "norm.bias", "up.bias", "embed.weight", "steps"}
    assert all(torch.equal(x, model.state_dict()[name]) for name, x in tensors.items())
    # matrices of experts are rows of their stacks
    folder, experts = tmp_path / "experts", layer(convert=False).experts
    tensors = read(save_fp8(layer(frozen=frozen), folder, separate_experts=True))
    assert tensors.pop("router").dtype == torch.bfloat16
    for e in range(E):
        matrices = (*experts.gate_up_proj[e].chunk(2), experts.down_proj[e])
        names = [f"experts.{e}.{name}.weight" for name in MATRICES]
        assert_casts(tensors, dict(zip(names, matrices, strict=True)))
    assert tensors == {}


def test_the_config_of_transformers(tmp_path: Path) -> None:
    model = filled()
    entries, before = {"model_type": "tiny", "hidden_size": 5}, {"quantization_config": {"a": 1}}
    model.config = SimpleNamespace(to_dict=lambda: entries | before)
    assert config(save_fp8(model, tmp_path / "fp8")) == {
        **entries,
        "quantization_config": {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": [128, 128],
            "modules_to_not_convert": ["head"],
        },
    }
    powers = filled(recipe=Recipe(scale="power_of_two"))
    described = config(save_fp8(powers, tmp_path / "powers", config={"a": 1, **before}))
    assert (described["a"], described["quantization_config"]["scale_fmt"]) == (1, "ue8m0")


def test_other_configs(tmp_path: Path) -> None:
    model = filled()
    model.gate = nn.utils.parametrizations.weight_norm(nn.Linear(5, 5))  # it is computed
    more = ["v", "a", "q", "k", "o"]
    model.more = nn.ModuleDict({name: nn.Linear(5, 5) for name in more})
    described = config(save_fp8(model, tmp_path / "fp8"))["quantization_config"]
    wanted = ["gate", "head", *(f"more.{name}" for name in sorted(more))]  # alike in each process
    assert described["modules_to_not_convert"] == wanted
    model = filled(convert=False)  # of two kinds of scales
    convert(model.up, Recipe(scale="power_of_two"), skip_small=False)
    convert(model.down, Recipe(), skip_small=False)
    assert "scale_fmt" not in config(save_fp8(model, tmp_path / "two"))["quantization_config"]


@pytest.mark.parametrize("size", [1, 60_000, 1 << 30])
def test_shards_and_index(tmp_path: Path, size: int) -> None:
    folder = save_fp8(filled(), tmp_path / "fp8", max_shard_bytes=size)
    files = sorted(file.name for file in folder.glob("*.safetensors"))
    assert (len(files) > 2) == (size <= 60_000)
    assert files[0] == f"model-00001-of-{len(files):05}.safetensors"
    index = json.loads((folder / INDEX).read_text())
    for file in files:
        inside = load_file(folder / file)
        assert {name for name, place in index["weight_map"].items() if place == file} == set(inside)
        assert len(inside) <= 2 or sum(x.nbytes for x in inside.values()) <= size
    tensors = read(folder)
    assert set(index["weight_map"]) == set(tensors)
    assert index["metadata"] == {"total_size": sum(x.nbytes for x in tensors.values())}


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


def test_what_cannot_be_saved(tmp_path: Path) -> None:
    model, complex128 = on_meta(), filled()
    complex128.register_buffer("phase", torch.zeros(2, dtype=torch.complex128))
    with pytest.raises(TypeError, match=r"phase has dtype torch.complex128, which safetensors"):
        save_fp8(complex128, tmp_path / "b")
    (tmp_path / "b").rmdir()
    convert(model, skip_small=False)
    cases: list[tuple[type[Exception], Any, dict[str, Any], str]] = [
        (ValueError, filled(convert=False), {}, "no FP8 weight: convert it first"),
        (ValueError, filled(), {"max_shard_bytes": 0}, "max_shard_bytes=0"),
        (ValueError, model, {}, "on the meta device"),
        (TypeError, {}, {}, r"save_fp8 takes a model, an nn\.Module: got a dict"),
    ]
    for kind, model, options, message in cases:
        with pytest.raises(kind, match=message):
            save_fp8(model, tmp_path / "a", **options)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("save_to", [save_fp8, save_mxfp4])
def test_a_folder_in_the_place_of_the_model(save_to: Any, tmp_path: Path) -> None:
    message = rf"^{save_to.__name__} takes a model, an nn\.Module: got a str$"
    with pytest.raises(TypeError, match=message):
        save_to(str(tmp_path / "a"), filled())
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "full",
    ["pathlib.Path.touch", "pathlib.Path.write_text", "os.fsync", "safetensors.torch.save_file"],
)
@pytest.mark.parametrize("is_there", [False, True])
def test_a_full_disk(
    is_there: bool, full: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "a"
    before = content(save(OLD, folder)) if is_there else {}
    with monkeypatch.context() as patch:
        error = SafetensorError if "safetensors" in full else OSError
        patch.setattr(full, Mock(side_effect=error("No space left on device")))
        message = rf"^{folder} was not written \(No space left.*\), .*: free space on its disk"
        with pytest.raises(OSError, match=message):
            save(NEW, folder)
    assert content(folder) == before
    assert found(folder) == before.keys()
    save(NEW, folder)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("recipe", [Recipe(), Recipe(scale="power_of_two")], ids=["fp32", "pow2"])
def test_weights_with_nan_or_inf(tmp_path: Path, bad: float, frozen: bool, recipe: Recipe) -> None:
    model = filled(convert=False)
    model.down.weight.data[140, 130] = bad
    model.down.weight.requires_grad_(not frozen)
    convert(model, recipe, skip_small=False)
    save(OLD, tmp_path / "fp8")
    before = content(tmp_path / "fp8")
    message = r"down.weight has a block that FP8 cannot hold, .* of block \[1, 1\] is (nan|inf)"
    for path in (tmp_path / "fp8", tmp_path / "new"):
        with pytest.raises(ValueError, match=message):
            save_fp8(model, path, overwrite=True)
    assert content(tmp_path / "fp8") == before
    assert found(tmp_path / "new") == set()


def test_scales_that_could_not_be_loaded(tmp_path: Path) -> None:
    for scale, recipe in ((-1.0, Recipe()), (0.0, Recipe()), (3.0, Recipe(scale="power_of_two"))):
        module = nn.Module()
        data, scales = torch.ones(5, 7).to(torch.float8_e4m3fn), torch.full((1, 1), scale)
        weight = BlockwiseFP8Tensor.from_data(data, scales, block_shape=(128, 128), recipe=recipe)
        module.weight = nn.Parameter(weight, requires_grad=False)
        message = rf"^weight has .* block \[0, 0\] is {scale}: expected a"
        with pytest.raises(ValueError, match=message):
            save_fp8(module, tmp_path / "fp8")


def test_other_models_keep_their_names(tmp_path: Path) -> None:
    tensors = read(save_fp8(layer(), tmp_path / "fp8"))
    assert set(tensors) == {"router", *STACKS, *(f"{name}_scale_inv" for name in STACKS)}


def test_experts_that_are_not_fp8(tmp_path: Path) -> None:
    model = layer(convert=False)
    model.linear = nn.Linear(128, 128, bias=False, dtype=torch.bfloat16)
    frozen = BlockwiseFP8Tensor.from_values(model.linear.weight.detach(), (128, 128))
    model.linear.weight = nn.Parameter(frozen, requires_grad=False)
    for name in ("experts.0.down_proj.weight", None):
        folder = save_fp8(model, tmp_path / f"{name}", separate_experts=name is not None)
        assert config(folder)["quantization_config"]["modules_to_not_convert"] == ["experts"]
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
    folder = save_fp8(model, tmp_path / "fp8", separate_experts=True, max_shard_bytes=size)
    inside = [set(load_file(file)) for file in sorted(folder.glob("*.safetensors"))]
    of = [{f"experts.{e}.{n}.weight" for n in MATRICES[:2]} for e in range(E)]
    with_scales = [names | {f"{n}_scale_inv" for n in names} for names in of]
    assert inside[:2] == [with_scales[0] | {"router"}, with_scales[1] | with_scales[2]]
    loaded = layer(1, convert=False)
    load_fp8(loaded, folder)
    assert_same(state(loaded), state(model))


def test_experts_are_cast_one_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cast = Mock(wraps=export.quantize_rowwise)
    monkeypatch.setattr(export, "quantize_rowwise", cast)
    save_fp8(layer(), tmp_path / "fp8", separate_experts=True)
    shapes = [tuple(call.args[0].shape) for call in cast.mock_calls]
    assert shapes == [(256, K)] * E + [(K, 128)] * E


@pytest.mark.parametrize(
    ("name", "rows"),
    [("kernel", 130), ("gate_up_proj", 257)],  # 257 rows are not two halves of whole blocks
)
def test_stacks_without_names_for_single_experts(tmp_path: Path, name: str, rows: int) -> None:
    model = nn.Module()
    frozen = BlockwiseFP8Tensor.from_values(torch.ones(2, rows, K).bfloat16(), (128, 128))
    model.register_parameter(name, nn.Parameter(frozen, requires_grad=False))
    message = rf"{name} \[2, {rows}, {K}\] cannot be stored as matrices of single experts"
    with pytest.raises(ValueError, match=message):
        save_fp8(model, tmp_path / "fp8", separate_experts=True)
    assert list(tmp_path.iterdir()) == []
    assert possible_names(Layer(experts=0))["experts.down_proj"] == [Names(("experts.down_proj",))]


@pytest.mark.parametrize("frozen", [False, True])
def test_experts_with_nan(tmp_path: Path, frozen: bool) -> None:
    model = layer(convert=False, frozen=frozen)
    model.experts.down_proj.data[1, 140, 3] = float("nan")
    convert(model, skip_small=False)
    message = r"experts.down_proj\[1\] has a block that FP8 cannot hold, .* of block \[1, 0\]"
    with pytest.raises(ValueError, match=message):
        save_fp8(model, tmp_path / "fp8", separate_experts=True)


def test_safetensors_of_a_frozen_model(tmp_path: Path) -> None:
    model = filled(frozen=True)
    tensors = dict(model.state_dict())
    del tensors["head.weight"]
    assert_expected_inline(
        complaint(RuntimeError, lambda: save_file(tensors, tmp_path / "x")),
        """\
this BlockwiseFP8Tensor [200, 300] has no storage of its own, so that safetensors
cannot write it, nor load into it: blocktensor.save_fp8(model, path) writes the
model in FP8; in high precision write .dequantize() of a frozen weight, and
state_dict() of trainable ones, which holds plain tensors. In place of load_model,
call model.load_state_dict(load_file(path)), or blocktensor.load_fp8; accelerate's
save_state and save_model need safe_serialization=False""",
    )
    with pytest.raises(RuntimeError, match=r"blocktensor.save_fp8\(model, path\) writes"):
        save_model(model, str(tmp_path / "x"))
    with pytest.raises(RuntimeError, match=r"this BlockwiseFP8Weight \[200, 300\] has no stor"):
        filled().up.weight.storage()
    plain = filled().state_dict()
    del plain["head.weight"]
    save_file(plain, tmp_path / "x")


def test_what_shares_an_address_is_stored_each(tmp_path: Path) -> None:
    model, square = filled(), torch.arange(16.0).view(4, 4)
    buffers = {"square": square, "turned": square.t(), "nobody": torch.empty(0)}
    buffers["nothing"] = torch.empty(0)
    for name, x in buffers.items():
        model.register_buffer(name, x)
    tensors = read(save_fp8(model, tmp_path / "fp8"))
    assert all(torch.equal(tensors[name], x) for name, x in buffers.items())
