"""The report of a conversion: its text, its reasons, and the bytes that it counts."""

from __future__ import annotations

import pytest
import torch
from expecttest import assert_expected_inline
from torch import nn

import blocktensor
from blocktensor import SmallKN, convert
from tests.support.models import DIM, Model, converted_names, reasons


def test_the_report_of_a_small_model() -> None:
    model = Model()
    report = convert(model, skip=["blocks.1.*"], auto_filter_small_kn=SmallKN(n=DIM, k=100, size=0))
    assert converted_names(model) == ["blocks.0.down"]
    assert_expected_inline(
        str(report),
        """\
parameter      shape   dtype    share  runs in  why
-------------  ------  -------  -----  -------  -------------------------------------------
embed          50x64   float32  5.7%   -        embedding
blocks.0.up    192x64  float32  21.9%  -        small: K=64 < 100 (auto_filter_small_kn)
blocks.0.down  64x192  float32  21.9%  fp8      trainable
blocks.1.up    192x64  float32  21.9%  -        skip pattern 'blocks.1.*'
blocks.1.down  64x192  float32  21.9%  -        skip pattern 'blocks.1.*'
lm_head        50x64   float32  5.7%   -        lm head: 50 outputs, the entries of 'embed'
1 converted, 5 skipped; 21.9% of 56,192 parameters in FP8; 217.0 KiB before, 229.0 KiB after""",
    )


def test_the_report_of_frozen_and_tied_weights() -> None:
    model = Model(tied=True)
    model.blocks[0].requires_grad_(False)
    report = convert(model, auto_filter_small_kn=False)
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
    again = convert(model, auto_filter_small_kn=False)
    assert {e.reason for e in again.converted} == {"already converted"}
    assert again.bytes_before == again.bytes_after == report.bytes_after


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
    assert reasons(report)["narrow"] == "small: K=1023 < 1024 (auto_filter_small_kn)"
    assert reasons(report)["small"] == "small: N K=4192256 < 4194304 (auto_filter_small_kn)"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("cache", [False, True])
def test_bytes_are_those_of_the_tensors(cache: bool, frozen: bool, dtype: torch.dtype) -> None:
    module = nn.Linear(300, 200, dtype=dtype).requires_grad_(not frozen)
    before = module.weight.nbytes
    recipe = blocktensor.Recipe(cache_weight=cache)
    report = convert(nn.Sequential(module), recipe, auto_filter_small_kn=False)
    fp8 = 200 * 300 + 4 * 2 * 3
    assert report.bytes_before == before
    wanted = fp8 if frozen else before + (fp8 if cache else 0)
    assert report.bytes_after == wanted
