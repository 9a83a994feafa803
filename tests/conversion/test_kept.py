"""What FP8 keeps of changes since ``unfreeze``: rounding at random, and the warnings."""

from __future__ import annotations

import copy
import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from blocktensor import BlockwiseFP8Tensor, Recipe, convert, freeze, save_fp8, unfreeze
from tests.support.models import POWER_OF_TWO, Conv1D, assert_same, randn
from tests.support.moe_models import BatchedMoE

SMALL = 2e-5
"""A change of the weights below that is a hundredth of a step of FP8, or less."""

WITH_NOISE = "merged and unmerged"


def models() -> dict[str, nn.Module]:
    made = {
        "a linear": nn.Linear(384, 300),
        "Conv1D": Conv1D(300, 384),
        "experts": BatchedMoE(),
        "bf16": nn.Linear(384, 300).bfloat16(),
    }
    for model in made.values():
        for i, p in enumerate(model.parameters()):
            p.data = randn(*p.shape, seed=i, dtype=p.dtype) * 0.02
    return made


def frozen(model: nn.Module, recipe: Recipe | None = None) -> list[str]:
    stacks = {"experts": ["up", "down"]} if isinstance(model, BatchedMoE) else None
    convert(model, recipe, skip_small=False, stacks=stacks)
    return freeze(model)


def unfrozen(model: nn.Module) -> dict[str, Tensor]:
    """Convert, freeze and unfreeze; the values of the weights then."""
    names = frozen(model)
    assert unfreeze(model) == names
    return values(model)


@torch.no_grad()
def change(model: nn.Module, size: float) -> None:
    """Add something to every weight, as a merge does."""
    for i, p in enumerate(model.parameters()):
        p.data += (randn(*p.shape, seed=100 + i, dtype=torch.float32) * size).to(p.dtype)


def kept(model: nn.Module, old: dict[str, Tensor], new: dict[str, Tensor]) -> float:
    """The share of the change from ``old`` to ``new`` that the frozen weights hold."""
    of = square = 0.0
    for name, p in model.named_parameters():
        if isinstance(p, BlockwiseFP8Tensor):
            by = new[name] - old[name]
            of += float(((p.dequantize(torch.float32) - old[name]) * by).sum())
            square += float(by.square().sum())
    return of / square


def values(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.float().clone() for name, p in model.state_dict().items()}


@pytest.mark.parametrize("name", models())
def test_rounding_at_random_keeps_small_changes(name: str) -> None:
    model = models()[name]
    old = unfrozen(model)
    change(model, SMALL if name != "bf16" else 8 * SMALL)
    new, other = values(model), copy.deepcopy(model)
    with pytest.warns(UserWarning, match="freeze keeps"):
        freeze(model)
    lost = kept(model, old, new)
    freeze(other, rounding="stochastic", seed=3)
    assert lost < 0.7 < 0.8 < kept(other, old, new) < 1.2
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        assert type(p) is type(q)
        if isinstance(p, BlockwiseFP8Tensor):
            assert (p.shape, p.stride(), p.recipe) == (q.shape, q.stride(), q.recipe)


def test_changes_are_measured_with_any_default_device() -> None:
    """Places are drawn by a generator of the CPU, which ``set_default_device`` does not change."""
    model = models()["a linear"]
    frozen(model)
    with torch.device("meta"):
        unfreeze(model)
    change(model, SMALL)
    with torch.device("meta"), pytest.warns(UserWarning, match="freeze keeps"):
        freeze(model)


@pytest.mark.parametrize("recipe", [Recipe(), POWER_OF_TWO], ids=lambda r: r.scale)
@pytest.mark.parametrize("name", models())
def test_what_has_not_changed_keeps_its_bytes(name: str, recipe: Recipe) -> None:
    model = models()[name]
    frozen(model, recipe)
    before = [p for p in copy.deepcopy(model).parameters() if isinstance(p, BlockwiseFP8Tensor)]
    unfreeze(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        freeze(model, rounding="stochastic")
    after = [p for p in model.parameters() if isinstance(p, BlockwiseFP8Tensor)]
    for a, b in zip(after, before, strict=True):
        assert_same(a, b)


def test_the_seed_decides_and_weights_differ() -> None:
    made = []
    for seed in (0, 0, 1):
        model = nn.Sequential(nn.Linear(128, 128, bias=False), nn.Linear(128, 128, bias=False))
        for layer in model:
            layer.weight.data = randn(128, 128, dtype=torch.float32)
        convert(model, skip_small=False)
        freeze(model, rounding="stochastic", seed=seed)
        made.append([layer.weight.dequantize() for layer in model])
    assert all(map(torch.equal, made[0], made[1]))
    assert not torch.equal(made[0][0], made[2][0])
    assert not torch.equal(made[0][0], made[0][1])


def test_all_of_many_rows_are_rounded_by_scales_of_their_own() -> None:
    rows = 2 * 1024 + 128
    model = nn.Linear(256, rows, bias=False)
    powers = torch.arange(rows)[:, None].div(128, rounding_mode="floor") - 8
    model.weight.data = randn(rows, 256, dtype=torch.float32) * 2.0**powers
    wanted = model.weight.detach().clone()
    convert(model, skip_small=False)
    freeze(model, rounding="stochastic", seed=0)
    error = (model.weight.dequantize(torch.float32) - wanted).abs()
    assert (error <= wanted.abs() / 8 + 2.0**powers / 2**12).all()


def test_noise_is_not_that_of_the_initialization() -> None:
    """Values that were drawn from the same numbers would be rounded in one direction."""
    torch.manual_seed(0)
    model = nn.Linear(256, 256, bias=False)
    old = unfrozen(model)
    change(model, 5 * SMALL)
    new = values(model)
    freeze(model, rounding="stochastic", seed=0)
    assert 0.85 < kept(model, old, new) < 1.15


def test_another_recipe_takes_no_scales_of_the_first() -> None:
    model = nn.Linear(256, 256, bias=False)
    unfrozen(model)
    convert(model, POWER_OF_TWO, skip_small=False)
    change(model, SMALL)
    freeze(model, rounding="stochastic")
    scale = model.weight.rowwise_scale
    assert torch.equal(scale, torch.exp2(scale.log2().round()))


def test_a_warning_says_how_much_is_kept() -> None:
    """It is estimated from a sample, and near what all values give."""
    model = nn.Linear(1024, 1024, bias=False)
    old = unfrozen(model)
    change(model, 4 * SMALL)
    new = values(model)
    with pytest.warns(UserWarning, match="since unfreeze") as found:
        freeze(model)
    (text,) = [str(w.message) for w in found]
    keeps, same = map(int, re.findall(r"(\d+)%", text))
    assert found[0].filename == __file__
    assert abs(keeps / 100 - kept(model, old, new)) < 0.05
    unchanged = (model.weight.dequantize() - old["weight"]).abs() < old["weight"].abs() / 32
    assert abs(same / 100 - unchanged.float().mean()) < 0.05
    assert 'freeze(model, rounding="stochastic")' in text


def test_save_fp8_warns_of_trainable_weights(tmp_path: Path) -> None:
    model = nn.Linear(256, 256, bias=False)
    unfrozen(model)
    change(model, SMALL)
    with pytest.warns(UserWarning, match=r"save_fp8 keeps \d+% of what was added") as found:
        save_fp8(model, tmp_path / "a")
    assert found[0].filename == __file__
    with pytest.warns(UserWarning, match="freeze keeps"):
        freeze(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        save_fp8(model, tmp_path / "b")  # the bytes as they are


def test_what_is_not_finite_is_left_out() -> None:
    model = nn.Linear(256, 384, bias=False)
    unfrozen(model)
    change(model, SMALL)
    with torch.no_grad():
        model.weight[3] = torch.nan
        model.weight[200] = torch.inf
    with pytest.warns(UserWarning, match=r"freeze keeps \d+%"):
        freeze(model)


@pytest.mark.parametrize(
    "way", ["unchanged", "trained", "never frozen", "at random", "moved", WITH_NOISE]
)
def test_nothing_is_said_where_nothing_is_lost(way: str, tmp_path: Path) -> None:
    model = nn.Linear(256, 256, bias=False)
    if way == "never frozen":
        convert(model, skip_small=False)
    else:
        unfrozen(model)
    if way == "trained":
        change(model, 0.01)
    elif way == "moved":
        model.bfloat16().float()
    elif way == WITH_NOISE:
        old = model.weight.detach().clone()
        change(model, 0.02)
        with torch.no_grad():
            model.weight -= randn(256, 256, seed=100, dtype=torch.float32) * 0.02
        assert (model.weight.detach() != old).float().mean() > 0.1
    elif way != "unchanged":
        change(model, SMALL)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        if way != "at random":
            save_fp8(model, tmp_path)
        freeze(model, rounding="stochastic" if way == "at random" else "nearest")


def test_a_share_is_not_negative() -> None:
    model = nn.Linear(128, 128, bias=False)
    unfrozen(model)
    with torch.no_grad():
        is_largest = model.weight.abs() == model.weight.abs().max()
        # all grow; the scale, and with it all values in FP8, become smaller
        model.weight *= torch.where(is_largest, 1 - 2**-9, 1 + 2**-12)
    with pytest.warns(UserWarning, match="freeze keeps 0% of"):
        freeze(model)


@pytest.mark.parametrize("data", [False, True])
def test_a_merge_by_data_and_a_copy_are_noticed(data: bool) -> None:
    model = nn.Linear(256, 256, bias=False)
    unfrozen(model)
    if data:
        weight: Any = model.weight
        weight.data = weight.data + SMALL
    else:
        change(model, SMALL)
        model = copy.deepcopy(model)
    with pytest.warns(UserWarning, match="freeze keeps"):
        freeze(model)


def test_arguments() -> None:
    model = nn.Linear(256, 256)
    with pytest.raises(ValueError, match="rounding='up': expected one of nearest, stochastic"):
        freeze(model, rounding="up")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"seed=0\.5 is a float: expected an int"):
        freeze(model, rounding="stochastic", seed=0.5)  # type: ignore[arg-type]
