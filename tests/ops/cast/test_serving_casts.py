"""The casts of inference engines beside ours, from the formulas in their sources.

vLLM's ``per_token_group_quant_8bit`` (csrc/quantization/fp8/per_token_group_quant.cu), which SGLang
has too: ``amax = max(eps, |x|)`` with ``eps = 1e-10``; ``scale = amax / 448``; with ``scale_ue8m0``
``exp2(ceil(log2(max(scale, 1e-10))))``; ``x / scale``, saturated, to e4m3.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from blocktensor.ops import reference
from blocktensor.ops.formats import BLOCK, BLOCKS_1X128, BLOCKS_1X128_POW2

FLOOR = 1e-10


def engine_cast(x: Tensor, ue8m0: bool) -> tuple[Tensor, Tensor]:
    """Data and scales ``[T, K / 128]``."""
    groups = x.float().unflatten(-1, (-1, BLOCK))
    scale = groups.abs().amax(-1).clamp(min=FLOOR) / torch.tensor(448.0)
    if ue8m0:
        exponents = torch.ceil(torch.log2(scale.clamp(min=FLOOR)))
        scale = torch.ldexp(torch.ones_like(scale), exponents.int())
    data = (groups / scale[..., None]).clamp(-448, 448).to(torch.float8_e4m3fn)
    return data.flatten(-2), scale


@pytest.mark.parametrize("ue8m0", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_activations_have_the_bits_of_vllm(dtype: torch.dtype, ue8m0: bool) -> None:
    torch.manual_seed(0)
    x = (torch.randn(512, 1024) * 2.0 ** torch.randint(-36, 13, (512, 1))).to(dtype)
    data, scale = engine_cast(x, ue8m0)
    ours = reference.quantize_rowwise(x, BLOCKS_1X128_POW2 if ue8m0 else BLOCKS_1X128)
    # below this amax the engine's scale no longer falls
    same = x.float().unflatten(-1, (-1, BLOCK)).abs().amax(-1) >= FLOOR * (448 if ue8m0 else 1)
    assert same.sum() > 2000
    assert torch.equal(scale[same], ours.scale[same])
    rows = same.repeat_interleave(BLOCK, -1)
    assert torch.equal(data[rows].view(torch.uint8), ours.data[rows].view(torch.uint8))
    assert not torch.equal(scale[~same], ours.scale[~same])


def test_where_powers_of_two_differ() -> None:
    """The logarithm of a number an ulp above a power of two is rounded to that power's."""
    exact = 448 * 2.0 ** torch.arange(-20, 20)
    for ulps, differ in ((-1, 0), (0, 0), (1, 32)):
        x = torch.zeros(40, BLOCK)
        x[:, 0] = exact * (1 + ulps * 2**-23)
        ours = reference.quantize_rowwise(x, BLOCKS_1X128_POW2)
        assert (engine_cast(x, True)[1] != ours.scale).sum() == differ, ulps


def test_zeros() -> None:
    """The engine divides by the floor, we by 1: the bytes agree, the scales do not."""
    x = torch.zeros(1, BLOCK)
    data, scale = engine_cast(x, False)
    ours = reference.quantize_rowwise(x, BLOCKS_1X128)
    assert torch.equal(data.view(torch.uint8), ours.data.view(torch.uint8))
    assert (scale.item(), ours.scale.item()) == (pytest.approx(FLOOR / 448), 1)
