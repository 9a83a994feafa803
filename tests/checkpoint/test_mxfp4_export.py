"""Weights on the grid of MXFP4 are exported bit for bit: loaded ones unchanged, others as cast."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from blocktensor import (
    BlockwiseFP8Weight,
    Recipe,
    Scales,
    convert,
    freeze,
    iter_fp8,
    iter_mxfp4,
    load_fp8,
)
from blocktensor.checkpoint.mxfp4 import VALUES, encoded
from blocktensor.ops import reference
from tests.checkpoint.test_mxfp4 import as_deepseek, codes_of, linear, packed, stored, values_of
from tests.support.models import randn

GRID = Recipe(scale=Scales(weights="power_of_two"), weight_grid="mxfp4")


def any_codes(n: int, k: int, spread: int = 7, middle: int = 0) -> tuple[Tensor, Tensor]:
    """Codes whose groups often have another, canonical scale: any largest number, zeros, -0.0."""
    rng = torch.Generator().manual_seed(n + k)
    codes = torch.randint(16, (n, k), generator=rng, dtype=torch.uint8)
    largest = torch.randint(1, 8, (n, k // 32, 1), generator=rng, dtype=torch.uint8)
    groups = codes.view(n, k // 32, 32)
    groups = torch.minimum(groups & 7, largest) | groups & 8
    groups[0, 0], groups[-1, -1] = 0, 8  # zeros, and negative zeros
    groups[n // 2, 0, 1:] = 0  # one outlier
    exponents = torch.randint(middle - spread, middle + spread + 1, (n, k // 32), generator=rng)
    return groups.view(n, k), exponents


def same(made: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    assert made.keys() == wanted.keys()
    for name, x in wanted.items():
        assert (made[name].dtype, made[name].shape) == (x.dtype, x.shape), name
        assert torch.equal(made[name].view(torch.uint8), x.view(torch.uint8)), name


@pytest.mark.parametrize("trainable", [False, True])
@pytest.mark.parametrize("shape", [(256, 256), (200, 160), (1, 32), (130, 1024)], ids=str)
def test_a_loaded_matrix_has_its_bytes(
    shape: tuple[int, int], trainable: bool, tmp_path: Path
) -> None:
    tensors = as_deepseek(*any_codes(*shape))
    folder, model = stored(tmp_path, tensors), linear(*shape)
    if trainable:
        convert(model, GRID, skip_small=False)
        load_fp8(model, folder, trainable=True)
        assert type(model[0].weight) is BlockwiseFP8Weight
    else:
        load_fp8(model, folder, recipe=GRID)
    same(dict(iter_mxfp4(model, like=folder)), tensors)
    without = dict(iter_mxfp4(model))
    assert torch.equal(decoded(without), values_of(*any_codes(*shape)))
    again = linear(*shape)
    load_fp8(again, stored(folder, without), recipe=GRID)
    same(dict(iter_mxfp4(again)), without)  # canonical scales stay


def decoded(tensors: dict[str, Tensor]) -> Tensor:
    codes, scales = (tensors[f"0.{name}"].view(torch.uint8) for name in ("weight", "scale"))
    halves = torch.stack([codes & 0xF, codes >> 4], -1).flatten(-2)
    return values_of(halves, scales.int() - 127)


@pytest.mark.parametrize(
    ("spread", "middle"), [(0, -127), (0, 125), (6, -120), (6, 118), (0, 0)], ids=str
)
def test_scales_at_the_ends_of_their_range(spread: int, middle: int, tmp_path: Path) -> None:
    """The least scale, 2^-127; the largest with which the number 6 is finite in fp32, 2^125."""
    codes, exponents = any_codes(130, 96, spread, middle)
    exponents = exponents.clamp(-127, 125)
    tensors = as_deepseek(codes, exponents)
    model = linear(130, 96)
    report = load_fp8(model, stored(tmp_path, tensors), recipe=GRID)
    assert report.rounded == {}
    same(dict(iter_mxfp4(model, like=tmp_path)), tensors)


def test_gpt_oss(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 32, "vocab_size": 50}
    counts = {"num_local_experts": 2, "num_experts_per_tok": 2, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    config = transformers.GptOssConfig(**sizes, **counts, **heads)
    model = transformers.GptOssForCausalLM(config)
    tensors = dict(model.state_dict())
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, k, n = tensors.pop(name).shape
        made = [any_codes(n, k + 0) for _ in range(experts)]
        codes, exponents = (torch.stack([each[i] for each in made]) for i in (0, 1))
        tensors[f"{name}_blocks"] = packed(codes).view(experts, n, k // 32, 16)
        tensors[f"{name}_scales"] = (exponents + 127).to(torch.uint8)
    folder = stored(tmp_path, tensors)
    load_fp8(model, folder, recipe=GRID)
    same(dict(iter_mxfp4(model, like=folder)), tensors)
    without = dict(iter_mxfp4(model))
    assert without.keys() == tensors.keys()
    assert any(not torch.equal(without[name], x) for name, x in tensors.items())
    # trained: a forward on the grid, exported with the values of the forward
    trained = transformers.GptOssForCausalLM(config)
    convert(trained, GRID, skip_small=False, skip=["*.self_attn.*", "lm_head"])
    weight = trained.get_parameter("model.layers.0.mlp.experts.down_proj")
    assert weight.recipe.weight_grid == "mxfp4_kn"
    trained(torch.arange(4)[None]).logits.sum().backward()
    torch.optim.SGD(trained.parameters(), 0.1).step()
    load_fp8(model, stored(tmp_path, dict(iter_mxfp4(trained))), recipe=GRID)
    ids = torch.arange(4)[None]
    with torch.no_grad():
        assert torch.equal(model(ids).logits, trained(ids).logits)


def test_trained_weights_are_exported_as_the_forward_reads_them(tmp_path: Path) -> None:
    """Also where the scales of a block are too far apart for FP8, and after freezing."""
    model = linear(200, 160)
    convert(model, GRID, skip_small=False)
    with torch.no_grad():
        model[0].weight.mul_(torch.exp2(torch.linspace(-60, 0, 200))[:, None])
    on_grid = reference.on_mxfp4_grid(model[0].weight.master, (1, 32))
    values = model[0].weight.dequantize()
    assert not torch.equal(values, on_grid)
    made = dict(iter_mxfp4(model))
    assert torch.equal(decoded(made), values)
    freeze(model)
    same(dict(iter_mxfp4(model)), made)
    again = linear(200, 160)
    assert load_fp8(again, stored(tmp_path, made), recipe=GRID).rounded == {}
    x = randn(5, 160, dtype=torch.float32)
    with torch.no_grad():
        assert torch.equal(again(x), model(x))


def test_a_group_keeps_a_scale_only_if_it_holds_it() -> None:
    values = torch.zeros(1, 64)
    values[0, :3], values[0, 32] = torch.tensor([3.0, -1.5, -0.0]), 3.0
    canonical = encoded(values)
    assert canonical is not None
    assert canonical[1].tolist() == [[126, 126]]
    kept = encoded(values, torch.tensor([[127, 125]], dtype=torch.uint8))
    assert kept is not None and kept[1].tolist() == [[127, 126]]
    numbers = torch.tensor(VALUES)[torch.stack([kept[0] & 0xF, kept[0] >> 4], -1).flatten(-2).int()]
    assert torch.equal(numbers * torch.tensor([1.0, 0.5]).repeat_interleave(32), values)
    assert torch.equal(numbers.signbit(), values.signbit())
    nan = encoded(values, torch.full((1, 2), 255, dtype=torch.uint8))
    assert nan is not None and nan[1].tolist() == [[126, 126]]
    for bad in (0.3, torch.nan, torch.inf):
        values[0, 40] = bad
        assert encoded(values) is None


def test_other_tensors_are_exported_as_in_fp8() -> None:
    model = nn.Sequential(nn.Linear(64, 128), nn.Linear(128, 64, bias=False))
    convert(model, GRID, filter=lambda _, name: name == "0", skip_small=False)
    convert(model, Recipe(), filter=lambda _, name: name == "1", skip_small=False)
    made, in_fp8 = dict(iter_mxfp4(model)), dict(iter_fp8(model))
    assert [*made] == ["0.weight", "0.scale", "0.bias", "1.weight", "1.weight_scale_inv"]
    for name in ("0.bias", "1.weight", "1.weight_scale_inv"):
        assert torch.equal(made[name].float(), in_fp8[name].float())


def test_experts_are_matrices() -> None:
    module = nn.Module()
    module.experts = nn.Module()
    w = randn(2, 128, 64, dtype=torch.float32)
    module.experts.down_proj = nn.Parameter(BlockwiseFP8Weight(w, GRID))
    with pytest.raises(NotImplementedError, match="pass separate_experts=True"):
        iter_mxfp4(module)
    made = dict(iter_mxfp4(module, separate_experts=True))
    assert [*made] == [f"experts.{e}.down_proj.{x}" for e in range(2) for x in ("weight", "scale")]
    for e in range(2):
        pair = {f"0.{x}": made[f"experts.{e}.down_proj.{x}"] for x in ("weight", "scale")}
        assert torch.equal(decoded(pair), reference.on_mxfp4_grid(w[e], (1, 32)))


def test_what_is_refused(tmp_path: Path) -> None:
    plain, ragged, other = linear(64, 64), linear(64, 40), linear(64, 96)
    convert(plain, skip_small=False)
    with pytest.raises(ValueError, match="no weight of the model has a recipe with weight_grid"):
        iter_mxfp4(plain)
    for model in (ragged, other):
        convert(model, GRID, skip_small=False)
    with pytest.raises(ValueError, match=r"0\.weight has 40 inputs: MXFP4 stores multiples of 32"):
        iter_mxfp4(ragged)
    folder = stored(tmp_path, as_deepseek(*codes_of(64, 64)))
    with pytest.raises(ValueError, match=r"0\.weight is \[64, 96\] here and \[64, 64\] in"):
        iter_mxfp4(other, like=folder)  # before the first tensor
    frozen = linear(64, 64).requires_grad_(False)
    in_powers = Recipe(scale=Scales(weights="power_of_two"))
    convert(frozen, in_powers, skip_small=False)
    frozen[0].weight.recipe = GRID
    with pytest.raises(ValueError, match="values that are not on the grid of MXFP4"):
        list(iter_mxfp4(frozen))
