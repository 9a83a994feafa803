"""Checkpoints there and back through transformers: it reads our bytes, we read its."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("safetensors")
pytest.importorskip("accelerate")
pytest.importorskip("transformers", minversion="5.17")

from transformers import FineGrainedFP8Config
from transformers.quantizers.quantizer_finegrained_fp8 import FineGrainedFP8HfQuantizer

from blocktensor import BlockwiseFP8Tensor, Recipe, convert, load_fp8, save_fp8, unfreeze
from tests.support import pretrained
from tests.support.checkpoint_experts import join_matrices, read, rewrite, save_whole
from tests.support.checkpoint_models import assert_same, bits, state
from tests.support.moe_models import TOKENS, transformers_moe
from tests.support.pretrained import silent as silent

LLAMAS, MOES = ("llama", "tied"), ("qwen3", "mixtral", "deepseek")
FP8_WEIGHTS = {"llama": 14, "tied": 14, "qwen3": 12, "mixtral": 12, "deepseek": 18}
FP32, POW2 = Recipe(), Recipe(scale="power_of_two")


@pytest.fixture
def keeping(monkeypatch: pytest.MonkeyPatch) -> None:
    """It keeps FP8 layers on a GPU, and on a CPU if it does not look for a GPU."""
    monkeypatch.setattr(FineGrainedFP8HfQuantizer, "validate_environment", lambda *_, **__: None)


@pytest.fixture
def dequantizing(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a machine without a GPU."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


def model_of(kind: str, n: int = 256, seed: int = 0) -> Any:
    """A tiny one in bf16, all of whose weights are whole blocks if ``n`` is."""
    if kind in LLAMAS:
        model = pretrained.llama(hidden=256, intermediate=n, tied=kind == "tied")
    else:
        sizes: dict[str, Any] = {"hidden_size": 256, "moe_intermediate_size": n}
        sizes["intermediate_size"] = n if kind == "mixtral" else 256
        sizes |= pretrained.LATENT if kind == "deepseek" else {}
        model = transformers_moe(kind, **sizes)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.copy_(0.05 * torch.randn(parameter.shape, generator=generator))
    return model.bfloat16()


def converted(model: Any, recipe: Recipe = FP32, frozen: bool = False) -> Any:
    model.requires_grad_(not frozen)
    convert(model, recipe, skip_small=False)
    return model


def theirs(model: Any, folder: Path, **options: Any) -> Any:
    """What transformers loads, all of it."""
    made, info = type(model).from_pretrained(folder, output_loading_info=True, **options)
    assert not any(info.values()), info
    return made


def scaled(data: Tensor, scale: Tensor, block: tuple[int, int] = (128, 128)) -> Tensor:
    """The specification: fp32 product, rounded once."""
    rows, cols = data.shape[-2:]
    wide = scale.float().repeat_interleave(block[0], -2).repeat_interleave(block[1], -1)
    return (data.float() * wide[..., :rows, :cols]).bfloat16()


def assert_tied(model: Any, kind: str) -> None:
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == (kind == "tied")


@pytest.mark.parametrize("kind", FP8_WEIGHTS)
@pytest.mark.parametrize("recipe", [FP32, POW2], ids=["fp32", "pow2"])
@pytest.mark.usefixtures("dequantizing")
def test_it_dequantizes_our_bytes_as_we_do(tmp_path: Path, kind: str, recipe: Recipe) -> None:
    """It multiplies in fp32 and rounds once to the model's dtype, as we do: bit for bit."""
    folder = save_fp8(converted(model_of(kind), recipe), tmp_path / "fp8")
    ours = model_of(kind, seed=1)
    made = theirs(ours, folder)
    assert len(load_fp8(ours, folder, recipe=recipe).fp8) == FP8_WEIGHTS[kind]
    weights = dict(ours.named_parameters())
    for name, weight in made.named_parameters():
        mine = weights.pop(name)
        values = mine.dequantize() if isinstance(mine, BlockwiseFP8Tensor) else mine
        assert values.dtype == torch.bfloat16
        if isinstance(mine, BlockwiseFP8Tensor):  # transformers 5.24 keeps routers in fp32
            assert weight.dtype == values.dtype
        assert torch.equal(weight.bfloat16(), values), name
    assert not weights
    assert_tied(made, kind)
    assert_tied(ours, kind)
    # what it has loaded is saved under the same names
    again = save_fp8(converted(made, recipe), tmp_path / "again")
    assert read(again).keys() == read(folder).keys()


DEVICES: Any = (("cpu", ()), ("cuda", pytest.mark.gpu))
LAYERS: list[Any] = [
    *[
        pytest.param(kind, n, "auto", recipe, device, marks=marks)
        for kind in LLAMAS
        for n in (384, 320, 200)
        for recipe in (FP32, POW2)
        for device, marks in DEVICES
    ],
    *[
        (kind, n, names, FP32, "cpu")
        for kind in MOES
        for n in (256, 128, 192)
        for names in ("auto", "whole")
    ],
]


@pytest.mark.parametrize(("kind", "n", "names", "recipe", "device"), LAYERS)
@pytest.mark.usefixtures("keeping")
def test_its_fp8_layers_hold_our_bytes(
    tmp_path: Path, kind: str, n: int, names: str, recipe: Recipe, device: str
) -> None:
    """Of any size. For scale_fmt "ue8m0" it makes e8m0 parameters: fp32's powers of two fit."""
    source = converted(model_of(kind, n), recipe, frozen=True)
    save = save_whole if names == "whole" else partial(save_fp8, all_in_fp8=True)
    folder = save(source, tmp_path / "fp8")
    whole = "model.layers.1.mlp.experts.down_proj_scale_inv" in read(folder)
    # where gate and up share blocks, too
    assert whole == (kind in MOES and (names == "whole" or n == 192))
    model = theirs(source, folder, device_map=device)
    mlp = model.model.layers[1].mlp
    fp8 = mlp.down_proj if kind in LLAMAS else mlp.experts
    assert type(fp8).__name__ == ("FP8Linear" if kind in LLAMAS else "FP8Experts")
    assert type(model.lm_head) is nn.Linear
    assert {x.device.type for x in model.parameters()} == {device}
    held = {name: x.detach().cpu() for name, x in model.named_parameters()}
    for name, weight in source.named_parameters():
        x = held.pop(name)
        if isinstance(weight, BlockwiseFP8Tensor):
            data, scale, _ = weight.rowwise()
            assert torch.equal(bits(x), bits(data)), name
            theirs_scale = held.pop(f"{name}_scale_inv")
            wanted = torch.float8_e8m0fnu if recipe.power_of_two else torch.float32
            assert theirs_scale.dtype == wanted
            assert torch.equal(theirs_scale.float(), scale), name
        else:
            assert torch.equal(x, weight), name
    assert held == {}
    assert_tied(model, kind)
    # and what it writes of them is what we read, after scales of stacks got their stacks
    model.save_pretrained(tmp_path / "theirs")
    rewrite(tmp_path / "theirs", join_matrices)
    loaded = model_of(kind, n, seed=1)
    load_fp8(loaded, tmp_path / "theirs", recipe=recipe)
    assert_same(state(loaded), state(source))


@pytest.mark.usefixtures("dequantizing")
def test_what_it_cannot_dequantize(tmp_path: Path) -> None:
    """It takes sizes over numbers of scales for the block's; it leaves out scales of stacks."""
    source = model_of("llama", 320)
    folder = save_fp8(converted(source), tmp_path / "320")
    with pytest.raises(RuntimeError, match="conversion"):
        type(source).from_pretrained(folder)
    folder = save_fp8(converted(model_of("llama", 200)), tmp_path / "200", all_in_fp8=True)
    name, stored = "model.layers.0.mlp.up_proj.weight", read(folder)
    values = type(source).from_pretrained(folder).get_parameter(name)
    data, scale = stored[name], stored[f"{name}_scale_inv"]
    assert torch.equal(values, scaled(data, scale, (100, 128)))
    assert not torch.equal(values, scaled(data, scale))

    source = model_of("qwen3")
    folder = save_whole(converted(source), tmp_path / "stacks")
    model, info = type(source).from_pretrained(folder, output_loading_info=True)
    name = "model.layers.1.mlp.experts.down_proj"
    assert f"{name}_scale_inv" in info["unexpected_keys"]
    assert torch.equal(model.get_parameter(name), read(folder)[name].bfloat16())


@pytest.mark.parametrize("kind", ["qwen3", "mixtral"])
@pytest.mark.usefixtures("keeping")
def test_experts_that_stay_in_bf16(tmp_path: Path, kind: str) -> None:
    """The config tells it which, under the names of the checkpoint."""
    source = model_of(kind)
    convert(source, skip_small=False, skip=["*.experts"])
    model = theirs(source, save_fp8(source, tmp_path / "fp8"), device_map="cpu")
    for layer, other in zip(source.model.layers, model.model.layers, strict=True):
        assert type(other.self_attn.q_proj).__name__ == "FP8Linear"
        for name, stack in layer.mlp.experts.named_parameters():
            assert torch.equal(other.mlp.experts.get_parameter(name), stack), name


READ: list[Any] = [
    *[pytest.param(kind, 384, device, marks=marks) for kind in LLAMAS for device, marks in DEVICES],
    *[(kind, n, "cpu") for kind in MOES for n in (256, 128)],
]


@pytest.mark.parametrize(("kind", "n", "device"), READ)
@pytest.mark.parametrize("scale_fmt", ["float", "ue8m0"])
@pytest.mark.usefixtures("keeping")
def test_we_read_what_it_quantizes(
    tmp_path: Path, kind: str, scale_fmt: str, n: int, device: str
) -> None:
    """After scales of stacks, which 5.23 writes beside matrices of experts, got their stacks."""
    source, config = model_of(kind, n), FineGrainedFP8Config(scale_fmt=scale_fmt)
    source.save_pretrained(tmp_path / "bf16")
    model = theirs(source, tmp_path / "bf16", quantization_config=config, device_map=device)
    folder = tmp_path / "theirs"
    model.save_pretrained(folder)
    held = {name: x.detach().cpu() for name, x in model.named_parameters()}
    dtype = torch.float8_e8m0fnu if scale_fmt == "ue8m0" else torch.float32
    assert {x.dtype for name, x in read(folder).items() if name.endswith("_scale_inv")} == {dtype}
    rewrite(folder, join_matrices)
    plain = model_of(kind, n, seed=1)
    kinds = set(map(type, plain.modules()))
    frozen = converted(model_of(kind, n, seed=2), frozen=True)
    for ours in (plain, frozen):
        report = load_fp8(ours, folder)
        assert len(report.fp8) == FP8_WEIGHTS[kind]
        for name, weight in ours.named_parameters():
            if name not in report.fp8:
                assert torch.equal(weight, held[name])
                continue
            assert isinstance(weight, BlockwiseFP8Tensor)
            data, scale, _ = weight.rowwise()
            assert torch.equal(bits(data), bits(held[name]))
            assert torch.equal(scale, held[f"{name}_scale_inv"].float())
            assert torch.equal(weight.dequantize(), scaled(data, scale))
        assert_tied(ours, kind)
    assert set(map(type, plain.modules())) == kinds
    unfreeze(plain)
    for name in report.fp8:
        weight = plain.get_parameter(name)
        assert weight.requires_grad
        assert torch.equal(weight.master, frozen.get_parameter(name).dequantize())
    plain(TOKENS).logits.float().square().mean().backward()
    assert all(plain.get_parameter(name).grad.abs().sum() > 0 for name in report.fp8)
