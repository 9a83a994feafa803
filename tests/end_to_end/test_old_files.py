"""Files saved with the names that modules had before they moved load as if saved today."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch
from torch import nn

from blocktensor import (
    BlockwiseFP8Tensor,
    BlockwiseFP8Weight,
    Recipe,
    convert,
    freeze,
    share_inputs,
)
from blocktensor.model import state_dict
from blocktensor.model.input_group import InputGroup
from blocktensor.tensor.weight_cache import FP8Cache
from tests.support.models import (
    POWER_OF_TWO,
    RECIPES,
    ROW,
    SQUARE,
    assert_same,
    plain,
    quantized,
    randn,
)

OLD_MODULES = {
    BlockwiseFP8Tensor: "blocktensor.tensor",
    BlockwiseFP8Weight: "blocktensor.weight",
    FP8Cache: "blocktensor.weight",
    InputGroup: "blocktensor.groups",
    state_dict._plain_weight: "blocktensor.state",
    state_dict._wrap_assigned_weight: "blocktensor.state",
}


def saved_as_before(what: Any, frozen: list[BlockwiseFP8Tensor]) -> io.BytesIO:
    """A file of ``what``, in which the tensors ``frozen`` are, as it was before the move."""
    formats, file = [x.format for x in frozen], io.BytesIO()
    with pytest.MonkeyPatch.context() as patched:
        for thing, module in OLD_MODULES.items():
            patched.setattr(thing, "__module__", module)
        for x, format in zip(frozen, formats, strict=True):
            del x.format
            x.__dict__["block_shape"] = format.block_shape
        torch.save(what, file)
    for x, format in zip(frozen, formats, strict=True):
        del x.__dict__["block_shape"]
        x.format = format
    assert b"blocktensor.tensor." not in file.getvalue()
    file.seek(0)
    return file


@pytest.mark.parametrize("weights_only", [False, True])
@pytest.mark.parametrize("recipe", [*RECIPES, Recipe(columnwise="keep")], ids=str)
@pytest.mark.parametrize("block", [ROW, SQUARE], ids=str)
def test_frozen_tensors(block: tuple[int, int], recipe: Recipe, weights_only: bool) -> None:
    x = quantized(200, 300, block=block, recipe=recipe)
    for saved in (x, x.t()):
        file = saved_as_before({"w": saved}, [saved])
        assert b"cblocktensor.tensor\nBlockwiseFP8Tensor\n" in file.getvalue()
        loaded = torch.load(file, weights_only=weights_only)["w"]
        assert_same(loaded, saved)
        assert loaded.format is saved.format
        assert vars(loaded).keys() == vars(saved).keys()


@pytest.mark.parametrize("weights_only", [False, True])
def test_trainable_weights(weights_only: bool) -> None:
    w = nn.Parameter(BlockwiseFP8Weight(randn(200, 300), POWER_OF_TWO))
    loaded = torch.load(saved_as_before(w, []), weights_only=weights_only)
    assert type(loaded) is BlockwiseFP8Weight
    assert isinstance(loaded, nn.Parameter)
    assert (loaded.recipe, loaded.requires_grad) == (POWER_OF_TWO, True)
    assert torch.equal(plain(loaded), plain(w))
    assert_same(loaded.quantized(), w.quantized())


@pytest.mark.parametrize("frozen", [False, True])
def test_whole_models(frozen: bool) -> None:
    model = nn.Sequential(nn.Linear(200, 300), nn.ReLU(), nn.Linear(300, 200)).bfloat16()
    convert(model, auto_filter_small_kn=False)
    if frozen:
        freeze(model)
    share_inputs(model)
    x = randn(5, 200)
    wanted = model(x)
    weights = [p for p in model.parameters() if isinstance(p, BlockwiseFP8Tensor)]
    loaded = torch.load(saved_as_before(model, weights), weights_only=False)
    assert torch.equal(loaded(x), wanted)
    assert len(share_inputs(loaded).groups) == 1
    assert [type(p) for p in loaded.parameters()] == [type(p) for p in model.parameters()]
    unlike = [n for n, v in loaded.state_dict().items() if type(v) is BlockwiseFP8Tensor]
    assert unlike == (["0.weight", "2.weight"] if frozen else [])
