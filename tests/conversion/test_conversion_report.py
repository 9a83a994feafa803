"""The report of a conversion: its text, its reasons, and the bytes that it counts."""

from __future__ import annotations

import textwrap
from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from torch import nn

import blocktensor
from blocktensor import MinSizes, convert
from tests.support.conv1d import Conv1D
from tests.support.models import DIM, Model, converted_names, reasons


def test_the_report_of_a_small_model() -> None:
    model = Model()
    report = convert(model, skip=["blocks.1.*"], skip_small=MinSizes(n=DIM, k=100, size=0))
    assert converted_names(model) == ["blocks.0.down"]
    assert_expected_inline(
        str(report),
        """\
parameter      shape   dtype    share  runs in  why
-------------  ------  -------  -----  -------  -------------------------------------------
embed          50x64   float32  5.7%   -        embedding
blocks.0.up    192x64  float32  21.9%  -        small: K=64 < 100 (skip_small)
blocks.0.down  64x192  float32  21.9%  fp8      trainable
blocks.1.up    192x64  float32  21.9%  -        skip pattern 'blocks.1.*'
blocks.1.down  64x192  float32  21.9%  -        skip pattern 'blocks.1.*'
lm_head        50x64   float32  5.7%   -        lm head: 50 outputs, the entries of 'embed'
1 converted, 5 skipped; 21.9% of 56,192 parameters in FP8; 217.0 KiB before, 229.0 KiB after""",
    )


def test_the_report_of_frozen_and_tied_weights() -> None:
    model = Model(tied=True)
    model.blocks[0].requires_grad_(False)
    report = convert(model, skip_small=False)
    assert_expected_inline(
        str(report),
        """\
parameter      shape   dtype    share  runs in  why
-------------  ------  -------  -----  -------  -----------------------------------
embed          50x64   float32  6.0%   -        embedding
blocks.0.up    192x64  float32  23.2%  fp8      frozen: high-precision copy dropped
blocks.0.down  64x192  float32  23.2%  fp8      frozen: high-precision copy dropped
blocks.1.up    192x64  float32  23.2%  fp8      trainable
blocks.1.down  64x192  float32  23.2%  fp8      trainable
lm_head        50x64   float32  -      -        tied to embedding 'embed'
4 converted, 2 skipped; 92.8% of 52,992 parameters in FP8; 204.5 KiB before, 156.5 KiB after""",
    )
    again = convert(model, skip_small=False)
    assert {e.reason for e in again.converted} == {"already converted"}
    assert again.bytes_before == again.bytes_after == report.bytes_after


class Experts(nn.Module):
    """Of a mixture: stacks, and a router held directly."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.zeros(4, 2 * DIM, DIM))
        self.down_proj = nn.Parameter(torch.zeros(4, DIM, DIM))
        self.router = nn.Parameter(torch.zeros(4, DIM))
        self.scale = nn.Parameter(torch.zeros(DIM))


class Mixed(nn.Linear):
    """A linear with another matrix."""

    def __init__(self) -> None:
        super().__init__(DIM, DIM)
        self.lora_a = nn.Parameter(torch.zeros(4, DIM))


def every_kind() -> nn.Module:
    """Matrices of all kinds, some of them tied."""
    model = nn.ModuleDict(
        {
            "embed": nn.Embedding(50, DIM),
            "same": nn.Embedding(50, DIM),
            "bag": nn.EmbeddingBag(10, DIM),
            "layers": nn.ModuleList(
                nn.ModuleDict({"fc1": nn.Linear(DIM, DIM), "experts": Experts()}) for _ in range(2)
            ),
            "attention": nn.MultiheadAttention(DIM, 2),
            "conv1d": Conv1D(3 * DIM, DIM),
            "conv": nn.Conv2d(3, DIM, 4),
            "mixed": Mixed(),
            "norm": nn.utils.parametrizations.weight_norm(nn.Linear(DIM, DIM)),
            "tied": nn.Linear(DIM, DIM),
            "rnn": nn.LSTM(DIM, DIM),
            "lazy": nn.LazyConv2d(DIM, 4),
            "wide": nn.Linear(DIM, DIM, dtype=torch.float64),
            "lm_head": nn.Linear(DIM, 50, bias=False),
        }
    )
    model["same"].weight = model["lm_head"].weight = model["embed"].weight
    model["tied"].weight = model["mixed"].weight
    model["alias"] = nn.Module()
    model["alias"].positions = nn.Parameter(torch.zeros(1, 5, DIM))
    model["alias"].of_tied = model["tied"].weight
    return model


def test_every_matrix_has_a_row() -> None:
    report = convert(every_kind(), skip_small=False)
    assert_expected_inline(
        str(report),
        """\
parameter                               shape     dtype    share  runs in  why
--------------------------------------  --------  -------  -----  -------  ---------------------------------------------------------------
embed                                   50x64     float32  1.7%   -        embedding
same                                    50x64     float32  -      -        tied to 'embed'
bag                                     10x64     float32  0.3%   -        embedding
layers.*.fc1 (2)                        64x64     float32  4.3%   fp8      trainable
layers.*.experts.gate_up_proj (2)       4x128x64  float32  34.5%  -        stack of matrices: in Experts; stacks={...} would name it
layers.*.experts.down_proj (2)          4x64x64   float32  17.3%  -        stack of matrices: in Experts; stacks={...} would name it
layers.*.experts.router (2)             4x64      float32  0.3%   -        not the weight of a linear: in Experts
attention.in_proj_weight                192x64    float32  6.5%   -        nn.MultiheadAttention multiplies by it without calling a linear
attention.out_proj                      64x64     float32  2.2%   -        nn.MultiheadAttention multiplies by it without calling it
conv1d                                  64x192    float32  6.5%   fp8      trainable (Conv1D)
conv                                    64x3x4x4  float32  1.6%   -        convolution
mixed                                   64x64     float32  2.2%   fp8      trainable (subclass Mixed)
mixed.lora_a                            4x64      float32  0.1%   -        not the weight of a linear: in Mixed
norm.parametrizations.weight.original0  64x1      float32  <0.1%  -        parametrized: a weight is computed from it
norm.parametrizations.weight.original1  64x64     float32  2.2%   -        parametrized: a weight is computed from it
tied                                    64x64     float32  -      fp8      tied to 'mixed'
rnn.weight_ih_l0                        256x64    float32  8.6%   -        not the weight of a linear: in LSTM
rnn.weight_hh_l0                        256x64    float32  8.6%   -        not the weight of a linear: in LSTM
lazy                                    ?         float32  -      -        convolution
wide                                    64x64     float64  2.2%   -        dtype torch.float64
lm_head                                 50x64     float32  -      -        tied to embedding 'embed'
alias.positions                         1x5x64    float32  0.2%   -        not the weight of a linear: in Module
alias.of_tied                           64x64     float32  -      fp8      tied to 'mixed'
6 converted, 21 skipped; 12.9% of 189,824 parameters in FP8; 751.5 KiB before, 775.5 KiB after""",  # noqa: E501
    )


def test_the_default_thresholds_keep_large_layers() -> None:
    with torch.device("meta"):
        model = nn.ModuleDict(
            {
                "large": nn.Linear(2048, 2048),
                "wide": nn.Linear(1024, 4096),
                "flat": nn.Linear(4096, 1024),
                "narrow": nn.Linear(1023, 8192),
                "small": nn.Linear(2047, 2048),
            }
        )
    report = convert(model)
    assert [e.name for e in report.converted] == ["large", "wide", "flat"]
    assert reasons(report)["narrow"] == "small: K=1023 < 1024 (skip_small)"
    assert reasons(report)["small"] == "small: N K=4192256 < 4194304 (skip_small)"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("cache", [False, "backward", "step"])
def test_bytes_are_those_of_the_tensors(cache: Any, frozen: bool, dtype: torch.dtype) -> None:
    module = nn.Linear(300, 200, dtype=dtype).requires_grad_(not frozen)
    before = module.weight.nbytes
    recipe = blocktensor.Recipe(cache_weight=cache)
    report = convert(nn.Sequential(module), recipe, skip_small=False)
    fp8 = 200 * 300 + 4 * 2 * 3
    assert report.bytes_before == before
    wanted = fp8 if frozen else before + (fp8 if cache else 0)
    assert report.bytes_after == wanted


def test_a_model_that_is_one_linear() -> None:
    report = convert(nn.Linear(DIM, DIM), skip_small=False)
    assert report.entries[0].name == ""
    assert str(report).splitlines()[2].split()[:2] == ["(model)", "64x64"]


def warning(model: nn.Module, **options: object) -> str:
    with pytest.warns(UserWarning, match="^no weight of this") as warned:
        report = convert(model, **options)
    assert report.converted == ()
    assert report.fp8_share == 0
    assert [w.filename for w in warned] == [__file__]
    return textwrap.fill(str(warned[0].message), 84)


def test_a_conversion_of_nothing_warns() -> None:
    assert_expected_inline(
        warning(Model()),
        """\
no weight of this Model is in FP8: skip_small=False converts small weights too.
Matrices left alone: embedding (1), small (4), lm head (1)""",
    )
    assert_expected_inline(
        warning(Model(), filter=lambda m, name: False, skip_small=False),
        """\
no weight of this Model is in FP8: print the report for the reasons. Matrices left
alone: embedding (1), filter (4), lm head (1)""",
    )
    assert_expected_inline(
        warning(nn.Sequential(nn.Embedding(50, DIM), Experts())),
        """\
no weight of this Sequential is in FP8: it has no nn.Linear, no Conv1D and no
experts that convert knows. Matrices left alone: embedding (1), stack of matrices
(2), not the weight of a linear (1)""",
    )
    assert_expected_inline(
        warning(nn.Sequential()),
        """\
no weight of this Sequential is in FP8: it has no nn.Linear, no Conv1D and no
experts that convert knows. Matrices left alone: none""",
    )
    assert convert(Model(), skip=["*.up"], skip_small=False).converted
