"""A rounding of scales that the package does not know: one entry, and it runs everywhere."""

from __future__ import annotations

from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from torch import Tensor, nn

from blocktensor import (
    CheckpointError,
    Recipe,
    convert,
    explain,
    freeze,
    functional,
    load_fp8,
    quantize,
    save_fp8,
)
from blocktensor.ops import formats
from blocktensor.ops.cast.choose_backend import CAST_BACKENDS, CastProblem
from blocktensor.ops.checks import bad_scale
from blocktensor.ops.formats import BLOCK, ROUNDINGS, BlockFormat, Rounding, ScaleRounding
from blocktensor.ops.gemm.choose_backend import unknown_format
from blocktensor.ops.reference import quantize_rowwise
from tests.docs.code_blocks import ROOT
from tests.support import numeric
from tests.support.models import randn
from tests.support.numeric import ROUNDED

NEW: Any = "three_bits"


def up_to_three_bits(scale: Tensor) -> Tensor:
    """Round up to a number whose significand has three bits after the point."""
    return ((scale.view(torch.int32) + 0xFFFFF) & 0x7FF00000).view(torch.float32)


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    rounding = Rounding("_bits3", "a number of three bits", up_to_three_bits)
    monkeypatch.setitem(ROUNDINGS, NEW, rounding)
    monkeypatch.setattr(formats, "_FORMATS", dict(formats._FORMATS))
    for rows, table in ((1, formats.ACTIVATION_FORMATS), (BLOCK, formats.WEIGHT_FORMATS)):
        format = formats.register(BlockFormat(f"{rows}x128_bits3", (rows, BLOCK), NEW))
        monkeypatch.setitem(table, NEW, format)
    both = formats.ACTIVATION_FORMATS[NEW], formats.WEIGHT_FORMATS[NEW]
    known = (*formats.KERNEL_FORMATS, *both)
    monkeypatch.setattr("blocktensor.ops.gemm.choose_backend.KERNEL_FORMATS", known)


def test_casts_round_so() -> None:
    recipe, x = Recipe(scale=NEW), randn(130, 300, dtype=torch.float32)
    for format in (recipe.activation_format, recipe.weight_format):
        scale = quantize_rowwise(x, format).scale
        exact = quantize_rowwise(x, formats.with_block_shape(format.block_shape, "fp32")).scale
        significand, exponent = torch.frexp(exact)
        assert torch.equal(scale, torch.ldexp((significand * 16).ceil() / 16, exponent))
        assert bad_scale(scale, format) is None
        bad = bad_scale(exact, format)
        assert bad is not None
        assert "expected a number of three bits, as Recipe(scale='three_bits') has them;" in bad


def test_a_model_trains_and_is_stored(tmp_path: Path) -> None:
    def made(recipe: Recipe) -> nn.Module:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(256, 256, bias=False))
        convert(model, recipe, skip_small=False)
        return model

    model, x = made(Recipe(scale=NEW)), randn(130, 256, dtype=torch.float32, grad=True)
    w = model[0].weight.master.detach()
    y = model(x)
    assert torch.equal(y, functional.linear(x, w, recipe=Recipe(scale=NEW)))
    assert not torch.equal(y, functional.linear(x, w, recipe=Recipe()))
    y.sum().backward()
    assert model[0].weight.grad is not None
    assert model(quantize(x, Recipe(scale=NEW))).shape == y.shape
    save_fp8(model, tmp_path)
    again = made(Recipe(scale=NEW))
    freeze(again)
    load_fp8(again, tmp_path)
    assert torch.equal(again(x), y)
    save_fp8(made(Recipe()), tmp_path / "other")
    with pytest.raises(CheckpointError, match="expected a number of three bits, as Recipe"):
        load_fp8(again, tmp_path / "other")


def test_kernels_multiply_with_it_and_decline_casts() -> None:
    recipe = Recipe(scale=NEW)
    assert unknown_format(recipe.activation_format, recipe.weight_format) is None
    x = torch.empty((8, 128), dtype=torch.bfloat16, device="meta")
    for backend in CAST_BACKENDS[:-1]:
        why = backend.declines(CastProblem(x, recipe.activation_format))
        assert why == "no kernels for format 1x128_bits3"
    report = explain([(4, 128, 128)], recipe=recipe, device="H200")
    assert {each.backend for each in report.matmuls} == {"gluon"}


def test_every_rounding_is_a_choice_that_users_find(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(ROUNDINGS, NEW)
    assert (*ROUNDINGS,) == get_args(ScaleRounding), f"name it in {formats.__name__}, too"
    assert ROUNDED.keys() == ROUNDINGS.keys(), f"define it in {numeric.__name__}, too"
    page = (ROOT / "docs/guides/recipes.md").read_text("utf-8")
    for place, text in (("Recipe", str(Recipe.__doc__)), ("docs/guides/recipes.md", page)):
        missing = [name for name in ROUNDINGS if f'"{name}"' not in text]
        assert missing == [], f"{place} lists the roundings"
