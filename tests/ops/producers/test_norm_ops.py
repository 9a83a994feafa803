"""The op of norms: what it refuses, its schema and fake, and its bytes here and on a GPU."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from torch import Tensor
from torch._subclasses import FakeTensorMode

from blocktensor.ops import reference as casts
from blocktensor.ops.formats import (
    BLOCKS_1X128,
    BLOCKS_1X128_POW2,
    BLOCKS_128X128,
    BLOCKS_128X128_POW2,
    BlockFormat,
)
from blocktensor.ops.producers import norm_ops, norm_reference
from blocktensor.ops.producers.choose_backend import PRODUCER_BACKENDS, ProducerProblem
from tests.support.models import complaint
from tests.support.numeric import DTYPES, KINDS, values
from tests.support.producers import assert_same_forms

BF16, FP16, FP32 = DTYPES
NORMS: Any = ["llama", "gemma"]
Formats = tuple[BlockFormat | None, BlockFormat | None]
FORMATS: tuple[Formats, ...] = (
    (BLOCKS_1X128, BLOCKS_1X128),
    (BLOCKS_1X128, BLOCKS_128X128),
    (None, BLOCKS_1X128),
    (None, BLOCKS_128X128),
    (BLOCKS_1X128, None),
    (BLOCKS_1X128_POW2, BLOCKS_1X128_POW2),
    (BLOCKS_1X128_POW2, BLOCKS_128X128_POW2),
)
SIZES = (0, 1, 127, 128, 129, 130, 136, 256, 300, 512, 576, 1096, 4096)


def inputs(
    rows: int, cols: int, dtype: torch.dtype = BF16, kind: str = "normal", seed: int = 0
) -> tuple[Tensor, Tensor, Tensor]:
    """Rows, 1 / rms and the weight."""
    rng = torch.Generator().manual_seed(seed)
    x = values(kind, rows, cols, dtype, rng)
    weight = values("normal", 1, cols, dtype, rng)[0]
    return x, torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + 1e-6), weight


def by_casts(n: Tensor, formats: Formats) -> tuple[Any, Any]:
    row, col = formats
    return (
        None if row is None else casts.quantize_rowwise(n, row),
        None if col is None else casts.quantize_columnwise(n, col),
    )


@pytest.mark.parametrize("formats", FORMATS, ids=range(len(FORMATS)))
@pytest.mark.parametrize("kind", NORMS)
def test_bytes_here(kind: Any, formats: Formats) -> None:
    for shape in ((130, 300), (5, 7), (0, 64), (3, 0)):
        x, rstd, weight = inputs(*shape)
        got = norm_ops.normalized(x, rstd, weight, kind, *formats)
        wanted = by_casts(norm_reference.normalize(x, rstd, weight, kind), formats)
        assert_same_forms(got, wanted)


@pytest.mark.parametrize("kind", NORMS)
def test_opcheck_and_fakes(kind: Any) -> None:
    sources = inputs(130, 300)
    for formats in FORMATS[:5]:
        names = [None if format is None else format.name for format in formats]
        op = torch.ops.blocktensor.normalized.default
        torch.library.opcheck(op, (*sources, kind, *names))
        real = norm_ops.normalized(*sources, kind, *formats)
        with FakeTensorMode() as mode:
            fakes = [mode.from_tensor(x) for x in sources]
            made = norm_ops.normalized(*fakes, kind, *formats)  # type: ignore[arg-type]
        for ours, theirs in zip(made, real, strict=True):
            if theirs is not None and ours is not None:
                for a, b in zip(ours[:2], theirs[:2], strict=True):
                    assert (a.shape, a.stride(), a.dtype) == (b.shape, b.stride(), b.dtype)


def test_bad_input() -> None:
    x, rstd, weight = inputs(130, 300)
    rest: Any = ("llama", BLOCKS_1X128, None)

    def refused(*args: Any) -> str:
        try:
            return complaint(ValueError, lambda: norm_ops.normalized(*args))
        except TypeError:
            return complaint(TypeError, lambda: norm_ops.normalized(*args))

    calls = (
        refused(x, rstd, weight, "layer", BLOCKS_1X128, None),
        refused(x, rstd, weight, "llama", None, None),
        refused(x[None], rstd, weight, *rest),
        refused(x, rstd[:5], weight, *rest),
        refused(x, rstd, weight[:5], *rest),
        refused(x, rstd.bfloat16(), weight, *rest),
        refused(x, rstd, weight.float(), *rest),
        refused(x, rstd, weight.to("meta"), *rest),
    )
    assert_expected_inline(
        "\n".join(calls),
        """\
kind 'layer': expected one of llama, gemma
neither a rowwise nor a columnwise format was given: pass one or both
x has 3 dimensions, shape [1, 130, 300]: expected 2; flatten tokens to [T, K]
rstd has shape [5, 1]: expected [130, 1]
the weight has shape [5]: expected [300]
rstd has dtype torch.bfloat16: expected torch.float32
the weight has dtype torch.float32: expected torch.bfloat16
the weight is on meta and x on cpu: move them to one device""",
    )


def takes(name: str, sources: tuple[Tensor, ...], formats: Formats) -> Any:
    backend = next(backend for backend in PRODUCER_BACKENDS if backend.name == name)
    if backend.declines(ProducerProblem(sources, *formats)) is None:
        return backend.load().normalized
    return None


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", NORMS)
@pytest.mark.parametrize("name", ["triton", "gluon"])
def test_bytes_on_a_gpu(name: str, kind: Any, dtype: torch.dtype) -> None:
    draw, ran = random.Random(0), 0
    while ran < 200:
        rows, cols = draw.choice(SIZES), draw.choice(SIZES)
        formats, of = draw.choice(FORMATS), draw.choice(KINDS)
        if rows * cols > 1_500_000 or (name == "gluon" and formats[1] is None):
            continue
        x, rstd, weight = (t.cuda() for t in inputs(rows, cols, dtype, of, ran))
        if ran % 3 == 1:  # rows apart
            x = x.new_zeros((rows, cols + 16))[:, 8:-8].copy_(x)
        run = takes(name, (x, weight.expand(x.shape)), formats)
        if run is None:
            assert not x.numel() or cols % 8 or x.stride(0) % 8
            continue
        got = run(x, rstd, weight, kind, *formats)
        n = norm_reference.normalize(x, rstd, weight, kind)
        assert_same_forms(got, by_casts(n, formats))
        ran += 1


@pytest.mark.gpu
@pytest.mark.parametrize("kind", NORMS)
def test_recorded_launches_on_a_gpu(kind: Any) -> None:
    for seed in range(3):
        sources = [t.cuda() for t in inputs(256, 576, seed=seed)]
        formats = BLOCKS_1X128, BLOCKS_1X128
        got = norm_ops.normalized(*sources, kind, *formats)  # type: ignore[arg-type]
        assert_same_forms(got, norm_reference.normalized(*sources, kind, *formats))  # type: ignore
