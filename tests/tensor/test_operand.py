"""Two forms of a matrix: one derived from the other, or from a file that may be damaged."""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from blocktensor import BlockwiseFP8Tensor, BlockwiseFP8Weight, Recipe, convert, quantize
from blocktensor.ops.formats import BLOCKS_1X128, BLOCKS_128X128_POW2
from blocktensor.tensor.base import rebuilt
from tests.support.models import (
    POWER_OF_TWO,
    ROW,
    SQUARE,
    assert_same,
    assert_same_bytes,
    inner,
    quantized,
    randn,
)
from tests.support.wgrad_inputs import HIGH, SQUARES


@pytest.mark.parametrize("shape", [(200, 300), (3, 200, 130)])
def test_columnwise_of_128x128_is_the_exact_transpose(
    shape: tuple[int, ...], device: torch.device
) -> None:
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
    assert inner(fp8).keys() == {"columnwise_data", "columnwise_scale"}
    assert_same_bytes(fp8.rowwise().data, fp8.columnwise_data.t())
    assert fp8.rowwise_data is None


# From files


Change = Callable[[BlockwiseFP8Tensor], Any]


def through_a_file(x: BlockwiseFP8Tensor, weights_only: bool = True) -> BlockwiseFP8Tensor:
    file = io.BytesIO()
    torch.save({"w": x}, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=weights_only)["w"]
    assert isinstance(loaded, BlockwiseFP8Tensor)
    return loaded


def stack() -> BlockwiseFP8Tensor:
    return BlockwiseFP8Tensor.from_values(randn(3, 256, 200), SQUARE)


def with_both_forms(x: BlockwiseFP8Tensor) -> BlockwiseFP8Tensor:
    return BlockwiseFP8Tensor(x.rowwise(), x.columnwise(), shape=x.shape, recipe=x.recipe)


SOUND: dict[str, Callable[[], BlockwiseFP8Tensor]] = {
    "activations": lambda: BlockwiseFP8Tensor.from_values(randn(2, 3, 200), ROW),
    "one row": lambda: BlockwiseFP8Tensor.from_values(randn(7), ROW),
    "one form": lambda: quantized(5, 200, rowwise=False),
    "transposed activations": lambda: quantized(200, 300).t(),
    "activations in two formats": lambda: quantize(randn(2, 3, 200), SQUARES),
    "their transpose": lambda: quantize(randn(300, 200), SQUARES).t(),
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


def pickled(x: BlockwiseFP8Tensor) -> Any:
    """As ``broadcast_object_list`` sends it; torch cannot load one of a tensor in e4m3."""
    return pickle.loads(pickle.dumps(x))


def trusted(x: BlockwiseFP8Tensor) -> Any:
    return through_a_file(x, weights_only=False)


@pytest.mark.parametrize("load", [through_a_file, trusted, pickled])
@pytest.mark.parametrize("kind", SOUND)
def test_what_belongs_together_loads(kind: str, load: Callable[..., Any]) -> None:
    x = SOUND[kind]()
    loaded = load(x)
    assert_same(loaded, x)
    assert (loaded.formats, loaded.stride()) == (x.formats, x.stride())
    assert vars(loaded).keys() - {"source_version"} == vars(x).keys() - {"source_version"}
    assert x.source is None or torch.equal(loaded.source, x.source)


def stays(storage: Any, location: str) -> Any:
    return storage


PLACES: dict[str, Any] = {
    "function": stays,
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
    file = io.BytesIO()
    torch.save({"state": model.state_dict(), "x": list(model.parameters())}, file)
    file.seek(0)
    loaded = torch.load(file, map_location=PLACES[place], weights_only=weights_only)
    device = "meta" if place == "meta" else "cpu"
    frozen, trained = loaded["x"][0], loaded["x"][2]
    assert isinstance(frozen, BlockwiseFP8Tensor) and isinstance(trained, BlockwiseFP8Weight)
    assert {x.device.type for x in (frozen, *frozen.rowwise()[:2], trained)} == {device}
    assert trained.master.device.type == device
    if device == "cpu":
        assert_same(frozen, model[0].weight)
        assert_same(loaded["state"]["0.weight"], model[0].weight)
        assert torch.equal(trained.master, model[1].weight.master)
        model[0].load_state_dict({"weight": frozen, "bias": loaded["x"][1]})


def test_the_device_is_that_of_the_parts() -> None:
    """Of a file from a GPU, read where there is none."""
    x = SOUND["weight"]()
    reduced = x.__reduce_ex__(2)
    assert reduced[0] is rebuilt
    wrapper = [torch.device("cuda") if isinstance(part, torch.device) else part
               for part in reduced[1][0]]  # fmt: skip
    assert_same(rebuilt(tuple(wrapper), vars(x)), x)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_scales_of_nan_and_inf_blocks_are_kept(bad: float) -> None:
    values = randn(200, 300)
    values[3, 4] = bad
    x = BlockwiseFP8Tensor.from_values(values, SQUARE)
    assert not torch.isfinite(x.rowwise_scale).all()
    loaded = through_a_file(x)
    assert loaded.rowwise_scale is not None and x.rowwise_scale is not None
    assert torch.equal(loaded.rowwise_scale.view(torch.int32), x.rowwise_scale.view(torch.int32))


def test_scales_of_other_strides_are_laid_out() -> None:
    x = quantized(200, 700, block=SQUARE)
    wanted = x.rowwise_scale
    assert wanted is not None
    x.rowwise_scale = wanted.t().contiguous().t()
    loaded = through_a_file(x)
    assert loaded.rowwise_scale is not None
    assert loaded.rowwise_scale.stride() == wanted.stride() != x.rowwise_scale.stride()
    assert torch.equal(loaded.rowwise_scale, wanted)


@pytest.mark.parametrize("weights_only", [False, True])
@pytest.mark.parametrize("recipe", [Recipe(), SQUARES], ids=lambda recipe: recipe.wgrad_input)
def test_columnwise_data_without_zeros_load(recipe: Recipe, weights_only: bool) -> None:
    """As files have them that were written before casts ended in whole vectors."""
    x, grad = quantize(randn(129, 40), recipe), quantized(129, 24)
    assert x.columnwise_data is not None
    x.columnwise_data = x.columnwise_data[:, :129].contiguous()
    loaded = through_a_file(x, weights_only)
    assert_same(loaded, x)
    product = torch.mm(grad.t(), loaded)
    assert torch.equal(product, torch.mm(grad.t(), quantize(randn(129, 40), recipe)))


def test_weights_with_such_zeros_are_refused() -> None:
    """Their transpose would have rows of zeros."""
    x = quantized(256, 300, block=SQUARE)
    x.rowwise_data = torch.cat([x.rowwise_data, e4m3(256, 4)], dim=1)
    with pytest.raises(ValueError, match=r"rowwise data \[256, 304\] .* expected \[256, 300\]"):
        through_a_file(x)


def part(**changes: Any) -> Change:
    return lambda x: vars(x).update(changes)


def e4m3(*shape: int) -> Tensor:
    return torch.zeros(shape).to(torch.float8_e4m3fn)


BROKEN: dict[str, tuple[Change, str]] = {
    "data of another size": (
        part(rowwise_data=e4m3(16, 10), rowwise_scale=torch.ones(1, 1)),
        r"a BlockwiseFP8Tensor \[256, 300\] from a file has rowwise data \[16, 10\] .* expected "
        r"\[256, 300\]",
    ),
    "data of its transpose": (
        part(rowwise_data=e4m3(300, 256), rowwise_scale=torch.ones(3, 2)),
        r"rowwise data \[300, 256\] .* expected \[256, 300\]",
    ),
    "columnwise data untransposed": (
        part(columnwise_data=e4m3(256, 300), columnwise_scale=torch.ones(2, 3)),
        r"columnwise data \[256, 300\] .* expected \[300, 256\]",
    ),
    "data that share memory": (
        part(rowwise_data=e4m3(1, 1).expand(256, 300)),
        r"rowwise data \[256, 300\] with strides \[0, 0\]: expected .* contiguous",
    ),
    "a stack for a matrix": (
        part(rowwise_data=e4m3(1, 256, 300), rowwise_scale=torch.ones(1, 2, 3)),
        r"rowwise data \[1, 256, 300\] .* expected \[256, 300\]",
    ),
    "data in another dtype": (
        part(rowwise_data=torch.zeros(256, 300, dtype=torch.uint8)),
        r"its rowwise form does not fit: FP8 data has dtype torch.uint8",
    ),
    "a scale less": (
        part(rowwise_scale=torch.ones(2, 2)),
        r"its rowwise form does not fit: scales have shape \[2, 2\]",
    ),
    "scales in another dtype": (
        part(rowwise_scale=torch.ones(2, 3, dtype=torch.float64)),
        "its rowwise form does not fit: scales have dtype torch.float64",
    ),
    "data without scales": (part(rowwise_scale=None), "rowwise data and scales that are not both"),
    "data that are no tensor": (part(rowwise_data="w"), "rowwise data and scales that are not"),
    "another device": (
        part(
            columnwise_data=e4m3(300, 256).to("meta"),
            columnwise_scale=torch.ones(3, 2, device="meta"),
        ),
        "is on cpu, its columnwise data on meta",
    ),
    "no form": (
        part(rowwise_data=None, rowwise_scale=None),
        "has neither a rowwise nor a columnwise form",
    ),
    "another format": (
        part(format=BLOCKS_1X128),
        r"its rowwise form does not fit: scales have shape \[2, 3\] .* \(1, 128\)",
    ),
    "another rounding": (
        part(format=BLOCKS_128X128_POW2),
        "has blocks 128x128_pow2 and scale='fp32'",
    ),
    "no format": (lambda x: vars(x).pop("columnwise_format"), "has format None and recipe Recipe"),
    "a recipe that is none": (part(recipe={"scale": "fp32"}), "recipe {'scale': 'fp32'}: expected"),
}


@pytest.mark.parametrize("weights_only", [False, True])
@pytest.mark.parametrize("change", BROKEN)
def test_what_does_not_belong_together_is_refused(change: str, weights_only: bool) -> None:
    x = quantized(256, 300, block=SQUARE)
    mutate, message = BROKEN[change]
    mutate(x)
    with pytest.raises(ValueError, match=message):
        through_a_file(x, weights_only)


def test_a_stack_whose_matrices_share_memory_is_refused() -> None:
    x = stack()
    assert x.rowwise_data is not None
    x.rowwise_data = x.rowwise_data[:1].expand(3, 256, 200)
    with pytest.raises(ValueError, match=r"strides \[0, 200, 1\]"):
        through_a_file(x)


def test_another_source_is_refused() -> None:
    x = quantize(randn(300, 200), HIGH)
    vars(x)["source"] = x.source[:5]
    with pytest.raises(ValueError, match="has a source that is no"):
        through_a_file(x)


def test_another_dtype_to_show_is_refused() -> None:
    x = quantized(256, 300, block=SQUARE)
    row = x.rowwise()
    wide = BlockwiseFP8Tensor(row, None, shape=x.shape, dtype=torch.float64)
    with pytest.raises(ValueError, match=r"does not fit: output dtype torch.float64"):
        through_a_file(wide)
