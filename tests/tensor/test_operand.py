"""Two forms of a matrix: one derived from the other, or from a file that may be damaged."""

from __future__ import annotations

import functools
import io
import pickle
from collections.abc import Callable
from textwrap import wrap
from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from torch import Tensor, nn

from blocktensor import BlockwiseFP8Tensor, BlockwiseFP8Weight, Recipe, convert, quantize
from blocktensor.ops.formats import BLOCKS_1X128, BLOCKS_128X128_POW2
from blocktensor.tensor.base import rebuilt
from tests.support.models import (
    POWER_OF_TWO,
    SQUARE,
    assert_same,
    assert_same_bytes,
    inner,
    quantized,
    randn,
)
from tests.support.refusals import refused
from tests.support.wgrad_inputs import HIGH, ROWS


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
    x = weight()
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


def test_scales_of_other_strides_are_laid_out() -> None:
    x, wanted = (quantized(200, 700, block=SQUARE) for _ in range(2))
    x.rowwise_scale = x.rowwise_scale.t().contiguous().t()
    loaded = through_a_file(x)
    assert (
        loaded.rowwise_scale.stride() == wanted.rowwise_scale.stride() != x.rowwise_scale.stride()
    )
    assert_same(loaded, wanted)


@pytest.mark.parametrize("weights_only", [False, True])
@pytest.mark.parametrize("recipe", [Recipe(), ROWS], ids=lambda recipe: recipe.wgrad_input)
def test_columnwise_data_without_zeros_load(recipe: Recipe, weights_only: bool) -> None:
    """As files have them that were written before casts ended in whole vectors."""
    x, cast = (quantize(randn(129, 40), recipe) for _ in range(2))
    x.columnwise_data = x.columnwise_data[:, :129].contiguous()
    loaded = through_a_file(x, weights_only=weights_only)
    assert_same(loaded, x)
    grad = quantized(129, 24).t()
    assert torch.equal(torch.mm(grad, loaded), torch.mm(grad, cast))


def e4m3(*shape: int) -> Tensor:
    return torch.zeros(shape).to(torch.float8_e4m3fn)


def with_parts(x: BlockwiseFP8Tensor, **parts: Any) -> BlockwiseFP8Tensor:
    vars(x).update(parts)
    return x


def weight(**parts: Any) -> BlockwiseFP8Tensor:
    return with_parts(quantized(256, 300, block=SQUARE), **parts)


def form(side: str, *shape: int) -> dict[str, Tensor]:
    """Return data of this shape, and scales that fit them."""
    *lead, rows, cols = shape
    scale = torch.ones(*lead, -(-rows // 128), -(-cols // 128))
    return {f"{side}_data": e4m3(*shape), f"{side}_scale": scale}


BROKEN: dict[str, BlockwiseFP8Tensor] = {
    "data of another size": weight(**form("rowwise", 16, 10)),
    "data of its transpose": weight(**form("rowwise", 300, 256)),
    "zeros after the columns of a weight": weight(rowwise_data=e4m3(256, 304)),
    "columnwise data untransposed": weight(**form("columnwise", 256, 300)),
    "data that share memory": weight(rowwise_data=e4m3(1, 1).expand(256, 300)),
    "matrices that share memory": with_parts(
        stack(), rowwise_data=e4m3(1, 256, 200).expand(3, 256, 200)
    ),
    "a stack for a matrix": weight(**form("rowwise", 1, 256, 300)),
    "data in another dtype": weight(rowwise_data=torch.zeros(256, 300, dtype=torch.uint8)),
    "a scale less": weight(rowwise_scale=torch.ones(2, 2)),
    "scales in another dtype": weight(rowwise_scale=torch.ones(2, 3, dtype=torch.float64)),
    "data without scales": weight(rowwise_scale=None),
    "data that are no tensor": weight(rowwise_data="w"),
    "another device": weight(
        **{name: x.to("meta") for name, x in form("columnwise", 300, 256).items()}
    ),
    "no form": weight(rowwise_data=None, rowwise_scale=None),
    "another format": weight(format=BLOCKS_1X128),
    "another rounding": weight(format=BLOCKS_128X128_POW2),
    "a recipe that is none": weight(recipe={"scale": "fp32"}),
    "another dtype to show": BlockwiseFP8Tensor(
        weight().rowwise(), None, shape=(256, 300), dtype=torch.float64
    ),
    "another source": with_parts(quantize(randn(300, 200), HIGH), source=randn(5, 200)),
}


@pytest.mark.parametrize("weights_only", [False, True])
def test_what_does_not_belong_together_is_refused(weights_only: bool) -> None:
    no_format = weight()
    del vars(no_format)["columnwise_format"]
    lines = []
    for x in (*BROKEN.values(), no_format):
        load = functools.partial(through_a_file, x, weights_only=weights_only)
        _, _, text = refused(load).replace("\n  ", " ").partition(" from a file")
        lines += wrap(text, 96)
    assert_expected_inline(
        "\n".join(lines),
        """\
 has rowwise data [16, 10] with strides [10, 1]: expected [256, 300], contiguous matrices
 has rowwise data [300, 256] with strides [256, 1]: expected [256, 300], contiguous matrices
 has rowwise data [256, 304] with strides [304, 1]: expected [256, 300], contiguous matrices
 has columnwise data [256, 300] with strides [300, 1]: expected [300, 256], contiguous matrices
 has rowwise data [256, 300] with strides [0, 0]: expected [256, 300], contiguous matrices
 has rowwise data [3, 256, 200] with strides [0, 200, 1]: expected [3, 256, 200], contiguous
matrices
 has rowwise data [1, 256, 300] with strides [76800, 300, 1]: expected [256, 300], contiguous
matrices
: its rowwise form does not fit: FP8 data has dtype torch.uint8: expected torch.float8_e4m3fn
: its rowwise form does not fit: scales have shape [2, 2] for data [256, 300] in blocks of (128,
128): expected [2, 3]
: its rowwise form does not fit: scales have dtype torch.float64: expected torch.float32
 has rowwise data and scales that are not both tensors
 has rowwise data and scales that are not both tensors
 is on cpu, its columnwise data on meta
 has neither a rowwise nor a columnwise form
: its rowwise form does not fit: scales have shape [2, 3] for data [256, 300] in blocks of (1,
128): expected [256, 3]
 has blocks 128x128_pow2 and scale='fp32'
 has format BlockFormat(name='128x128', block_shape=(128, 128), scale_rounding='fp32',
dtype=torch.float8_e4m3fn) and recipe {'scale': 'fp32'}: expected a BlockFormat and a Recipe;
the file is damaged or was not written by blocktensor
: its rowwise form does not fit: output dtype torch.float64: expected torch.bfloat16,
torch.float16 or torch.float32
 has a source that is no torch.bfloat16 [300, 200] on cpu
 has format None and recipe Recipe(scale='fp32', cache_weight='backward', wgrad_input='128x128',
batch_invariant=False): expected a BlockFormat and a Recipe; the file is damaged or was not
written by blocktensor""",
    )
