"""Weights stored in MXFP4: FP8 blocks hold their values exactly, or are counted by name."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from blocktensor import CheckpointError, Recipe, Scales, convert, load_fp8
from blocktensor.checkpoint.mxfp4 import VALUES
from tests.support.models import randn

WEIGHTS_IN_POWERS = Recipe(scale=Scales(weights="power_of_two"))


def codes_of(n: int, k: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Any numbers ``[N, K]`` of four bits; each group has the largest. And exponents of groups."""
    rng = torch.Generator().manual_seed(seed)
    codes = torch.randint(16, (n, k), generator=rng, dtype=torch.uint8)
    codes[:, ::32] = 7
    return codes, torch.randint(-7, 8, (n, k // 32), generator=rng)


def packed(codes: Tensor) -> Tensor:
    return codes[..., 0::2] | codes[..., 1::2] << 4


def values_of(codes: Tensor, exponents: Tensor) -> Tensor:
    numbers = torch.tensor(VALUES)[codes.int()]
    return numbers * torch.exp2(exponents.float()).repeat_interleave(32, -1)


def biased(exponents: Tensor) -> Tensor:
    return (exponents + 127).to(torch.uint8)


def as_deepseek(codes: Tensor, exponents: Tensor, name: str = "0") -> dict[str, Tensor]:
    scale = biased(exponents).view(torch.float8_e8m0fnu)
    return {f"{name}.weight": packed(codes).view(torch.int8), f"{name}.scale": scale}


def stored(folder: Path, tensors: dict[str, Tensor]) -> Path:
    save_file({name: x.contiguous() for name, x in tensors.items()}, folder / "model.safetensors")
    return folder


def linear(n: int, k: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(k, n, bias=False))


@pytest.mark.parametrize("shape", [(256, 256), (200, 160), (1, 32), (130, 4096)], ids=str)
def test_every_value_is_exact(shape: tuple[int, int], tmp_path: Path) -> None:
    """Also where scales in a block are 14 binades apart; the frozen weight of any recipe."""
    codes, exponents = codes_of(*shape)
    folder, want = stored(tmp_path, as_deepseek(codes, exponents)), values_of(codes, exponents)
    for recipe in (None, Recipe(), WEIGHTS_IN_POWERS, Recipe(scale="power_of_two")):
        model = linear(*shape)
        report = load_fp8(model, folder, recipe=recipe)
        assert report.fp8 == ("0.weight",) and report.rounded == {}
        assert torch.equal(model[0].weight.dequantize(), want)
        assert torch.equal(model[0].weight.dequantize().signbit(), want.signbit())


@pytest.mark.parametrize("scale", ["F8_E8M0", "U8"])
def test_scales_are_exponents(scale: str, tmp_path: Path) -> None:
    codes, exponents = codes_of(128, 64)
    tensors = as_deepseek(codes, exponents)
    tensors["0.weight_scale"] = tensors.pop("0.scale")
    if scale == "U8":
        tensors = {name: x.view(torch.uint8) for name, x in tensors.items()}
    model = linear(128, 64)
    load_fp8(model, stored(tmp_path, tensors))
    assert torch.equal(model[0].weight.dequantize(), values_of(codes, exponents))


def test_masters_and_forwards_in_powers_of_two_are_exact(tmp_path: Path) -> None:
    """A trained weight is cast again: exactly with its scales in powers of two alone."""
    codes, exponents = codes_of(256, 256)
    folder, want = stored(tmp_path, as_deepseek(codes, exponents)), values_of(codes, exponents)
    x = randn(5, 256, dtype=torch.float32)
    for recipe, is_exact in ((WEIGHTS_IN_POWERS, True), (Recipe(), False)):
        model = linear(256, 256)
        convert(model, recipe, skip_small=False)
        load_fp8(model, folder, trainable=True)
        assert torch.equal(model[0].weight.master, want)
        assert torch.equal(model[0].weight.dequantize(), want) == is_exact
        frozen = linear(256, 256)
        load_fp8(frozen, folder, recipe=recipe)
        assert torch.equal(model(x), frozen(x)) == is_exact


def test_blocks_that_are_not_exact_are_counted_by_name(tmp_path: Path) -> None:
    """Scales of one block that are more than 14 binades apart."""
    tensors: dict[str, Tensor] = {}
    for name, far in (("0", 15), ("1", 14)):
        codes, exponents = codes_of(256, 256)
        codes[140, 40], exponents[...], exponents[140, 1] = 1, 0, -far
        exponents[3, 1] = exponents[3, 5] = 0
        tensors |= as_deepseek(codes, exponents, name)
    model = nn.Sequential(*(nn.Linear(256, 256, bias=False) for _ in range(2)))
    with torch.device("meta"):  # any default device
        report = load_fp8(model, stored(tmp_path, tensors))
    assert report.rounded == {"0.weight": 1}
    assert "rounded  1 blocks of MXFP4" in str(report)
    assert report.to_dict()["rounded"] == {"0.weight": 1}


def test_matrices_of_each_expert(tmp_path: Path) -> None:
    """The stored layout is DeepSeek-V4's; gate and up are rows of one stack here."""
    model, tensors, want = nn.Module(), {}, {}
    model.experts = nn.Module()
    for stack, names, shape in (
        ("gate_up_proj", "w1 w3", (256, 64)),
        ("down_proj", "w2", (64, 256)),
    ):
        matrices = []
        for e in range(2):
            made = {name: codes_of(*shape, seed=len(tensors)) for name in names.split()}
            for name, each in made.items():
                tensors |= as_deepseek(*each, f"experts.{e}.{name}")
            matrices.append(torch.cat([values_of(*each) for each in made.values()]))
        want[stack] = torch.stack(matrices)
        setattr(model.experts, stack, nn.Parameter(torch.zeros_like(want[stack])))
    report = load_fp8(model, stored(tmp_path, tensors))
    assert set(report.fp8) == {f"experts.{name}" for name in want}
    assert report.rounded == {}
    for name, x in want.items():
        assert torch.equal(getattr(model.experts, name).dequantize(), x)


def test_gpt_oss(tmp_path: Path) -> None:
    """Stacks that its module holds transposed; as transformers dequantizes them."""
    transformers = pytest.importorskip("transformers")
    mxfp4 = pytest.importorskip("transformers.integrations.mxfp4")
    sizes = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 32, "vocab_size": 50}
    counts = {"num_local_experts": 2, "num_experts_per_tok": 2, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    config = transformers.GptOssConfig(**sizes, **counts, **heads)
    model = transformers.GptOssForCausalLM(config)
    tensors, want = dict(model.state_dict()), {}
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, k, n = tensors.pop(name).shape
        made = [codes_of(n, k, seed=e) for e in range(experts)]
        codes, exponents = (torch.stack([each[i] for each in made]) for i in (0, 1))
        blocks = packed(codes).view(experts, n, k // 32, 16)
        tensors |= {f"{name}_blocks": blocks, f"{name}_scales": biased(exponents)}
        want[name] = mxfp4.convert_moe_packed_tensors(
            blocks, biased(exponents), dtype=torch.float32
        )
    report = load_fp8(model, stored(tmp_path, tensors))
    assert {*want} == {*report.fp8} and report.rounded == {}
    for name, x in want.items():
        assert torch.equal(model.get_parameter(name).dequantize(torch.float32), x)
    assert model(torch.arange(4)[None]).logits.isfinite().all()


def test_scales_that_are_no_numbers(tmp_path: Path) -> None:
    codes, exponents = codes_of(128, 64)
    exponents[3, 1] = 128  # NaN in e8m0
    with pytest.raises(CheckpointError, match=r"the scale of block \[0, 0\] is nan"):
        load_fp8(linear(128, 64), stored(tmp_path, as_deepseek(codes, exponents)))


def test_other_bytes_stay_bytes(tmp_path: Path) -> None:
    """A buffer of int8 and 4-bit numbers with other scales are no MXFP4."""
    codes, exponents = codes_of(128, 64)
    tensors = as_deepseek(codes, exponents)
    tensors["0.scale"] = torch.ones(128, 4)  # groups of 16
    with pytest.raises(CheckpointError, match=r"0\.weight' has shape \[128, 32\]"):
        load_fp8(linear(128, 64), stored(tmp_path, tensors), strict=False)
    module = nn.Module()
    module.register_buffer("table_blocks", torch.zeros(4, 16, dtype=torch.uint8))
    with pytest.warns(UserWarning, match="no weight of this Module is in FP8"):
        report = load_fp8(module, stored(tmp_path, {"table_blocks": torch.ones(4, 16).byte()}))
    assert report.plain == ("table_blocks",) and module.table_blocks.all()
