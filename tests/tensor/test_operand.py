"""Two forms of a matrix: one derived from the other, or read from a file."""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from blocktensor import BlockwiseFP8Tensor, BlockwiseFP8Weight, convert, quantize
from blocktensor.tensor.base import rebuilt
from tests.support.linear_ways import HIGH
from tests.support.models import (
    POWER_OF_TWO,
    SQUARE,
    assert_same,
    assert_same_bytes,
    inner,
    quantized,
    randn,
)


@pytest.mark.parametrize("shape", [(200, 300), (3, 200, 130)])
def test_columnwise_of_128x128_is_the_exact_transpose(shape: Any, device: torch.device) -> None:
    fp8 = quantized(*shape, block=SQUARE, device=device)
    first, second = fp8.columnwise(), fp8.columnwise()
    for derived in (first, second):
        assert derived.data.is_contiguous()
        assert_same_bytes(derived.data, fp8.rowwise_data.mT)
        assert_same_bytes(derived.scale, fp8.rowwise_scale.mT)
    recast = BlockwiseFP8Tensor.from_values(randn(*shape, device=device).mT.contiguous(), SQUARE)
    assert_same_bytes(first.data, recast.rowwise_data)
    assert_same_bytes(first.scale, recast.rowwise_scale)
    assert first.data.data_ptr() != second.data.data_ptr()  # it is not kept
    assert inner(fp8).keys() == {"rowwise_data", "rowwise_scale"}


def test_rowwise_of_a_transpose_is_derived_too() -> None:
    fp8 = quantized(200, 300, block=SQUARE).t()
    assert_same_bytes(fp8.rowwise().data, fp8.columnwise_data.t())
    assert inner(fp8).keys() == {"columnwise_data", "columnwise_scale"}


def through_a_file(what: Any, **options: Any) -> Any:
    file = io.BytesIO()
    torch.save(what, file)
    file.seek(0)
    return torch.load(file, **options)


def stack() -> BlockwiseFP8Tensor:
    return quantized(3, 256, 200, block=SQUARE)


def with_both_forms(x: BlockwiseFP8Tensor) -> BlockwiseFP8Tensor:
    return BlockwiseFP8Tensor(x.rowwise(), x.columnwise(), shape=x.shape, recipe=x.recipe)


SOUND: dict[str, Callable[[], BlockwiseFP8Tensor]] = {
    "activations": lambda: quantized(2, 3, 200),
    "one row": lambda: quantized(7),
    "one form": lambda: quantized(5, 200, rowwise=False),
    "transposed activations": lambda: quantized(200, 300).t(),
    "activations in two formats": lambda: quantize(randn(2, 3, 200)),
    "their transpose": lambda: quantize(randn(300, 200)).t(),
    "activations with their source": lambda: quantize(randn(300, 200), HIGH),
    "weight": lambda: quantized(200, 300, block=SQUARE),
    "transposed weight": lambda: quantized(200, 300, block=SQUARE).t(),
    "both forms": lambda: with_both_forms(quantized(200, 300, block=SQUARE, recipe=POWER_OF_TWO)),
    "nothing": lambda: quantized(0, 200, block=SQUARE),
    "stack": stack,
    "transposed stack": lambda: stack().mT,
    "rows of a stack": lambda: stack()[:, 128:],
    "rows of a weight": lambda: quantized(300, 700, block=SQUARE)[128:],
    "columns of a weight": lambda: quantized(300, 700, block=SQUARE)[:, 128:],
    "rows of activations": lambda: quantized(300, 200)[128:],
}


LOADS: dict[str, Callable[[Any], Any]] = {
    "weights_only": through_a_file,
    "trusted": lambda x: through_a_file(x, weights_only=False),
    # As `broadcast_object_list` sends it; torch cannot load one of a tensor in e4m3.
    "pickle": lambda x: pickle.loads(pickle.dumps(x)),
}


@pytest.mark.parametrize("load", LOADS.values(), ids=LOADS)
@pytest.mark.parametrize("kind", SOUND)
def test_what_belongs_together_loads(kind: str, load: Callable[[Any], Any]) -> None:
    x = SOUND[kind]()
    loaded = load(x)
    assert_same(loaded, x)
    assert (loaded.formats, loaded.stride()) == (x.formats, x.stride())
    assert vars(loaded).keys() - {"source_version"} == vars(x).keys() - {"source_version"}
    assert x.source is None or torch.equal(loaded.source, x.source)
    assert loaded.source_version is None  # it holds in the process that cast x


PLACES: dict[str, Any] = {
    "function": lambda storage, location: storage,
    "function of none": lambda storage, location: None,
    "dict": {"cuda:0": "cpu"},
    "device": torch.device("cpu"),
    "name": "cpu",
    "meta": "meta",
}


@pytest.mark.parametrize("weights_only", [False, True])
@pytest.mark.parametrize("place", PLACES)
def test_every_kind_of_map_location(place: str, weights_only: bool) -> None:
    """Lightning resumes with a function."""
    model = nn.Sequential(nn.Linear(200, 300), nn.Linear(300, 200)).bfloat16()
    model[0].requires_grad_(False)
    convert(model, skip_small=False)
    loaded = through_a_file(
        {"state": model.state_dict(), "x": list(model.parameters())},
        map_location=PLACES[place],
        weights_only=weights_only,
    )
    device = "meta" if place == "meta" else "cpu"
    frozen, bias, trained, _ = loaded["x"]
    assert isinstance(frozen, BlockwiseFP8Tensor) and isinstance(trained, BlockwiseFP8Weight)
    tensors = frozen, *frozen.rowwise()[:2], trained, trained.master
    assert {x.device.type for x in tensors} == {device}
    if device == "cpu":
        assert_same(frozen, model[0].weight)
        assert_same(loaded["state"]["0.weight"], model[0].weight)
        assert torch.equal(trained.master, model[1].weight.master)
        model[0].load_state_dict({"weight": frozen, "bias": bias})


def test_the_device_is_that_of_the_parts() -> None:
    x = quantized(256, 300, block=SQUARE)
    function, (wrapper, *_) = x.__reduce_ex__(2)
    assert function is rebuilt
    on_gpu = (torch.device("cuda") if isinstance(x, torch.device) else x for x in wrapper)
    assert_same(rebuilt(tuple(on_gpu), vars(x)), x)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_scales_of_nan_and_inf_blocks_are_kept(bad: float) -> None:
    values = randn(200, 300)
    values[3, 4] = bad
    x = BlockwiseFP8Tensor.from_values(values, SQUARE)
    assert not torch.isfinite(x.rowwise_scale).all()
    loaded = through_a_file(x)
    assert torch.equal(loaded.rowwise_scale.view(torch.int32), x.rowwise_scale.view(torch.int32))
