"""Where the time of a layer goes: the parts of a profile, and the least that they could take."""

from __future__ import annotations

import pytest

from benchmarks import layer, profiled
from benchmarks.llama import Shape

SPENT = {
    "gemm_kernel": 300.0,
    "nvjet_sm90_tst_256x128_64x4_1x2_h_bz_coopA_NTN": 100.0,
    "cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma_f16_knob_3_1x1x1": 60.0,
    "void pytorch_flash::flash_fwd_kernel<Traits<128>>(Params)": 90.0,
    "cast_columnwise_kernel": 10.0,
    "cast_128x128_kernel": 4.0,
    "transpose_128x128_kernel": 2.0,
    "triton_red_fused__fused_rms_norm_add_3": 5.0,
    "void at::native::(anonymous namespace)::vectorized_layer_norm_kernel<float>": 3.0,
    "triton_poi_fused_mul_silu_2": 7.0,
    "void at::native::vectorized_elementwise_kernel<4, at::native::silu_kernel>": 1.0,
    "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add>": 8.0,
    "Memcpy DtoD (Device -> Device)": 6.0,
}


def test_kernels_belong_to_parts_and_none_is_lost() -> None:
    parts = layer.by_part(SPENT)
    assert parts == {
        "gemms": 400.0,
        "attention": 150.0,
        "activation_casts": 10.0,
        "weight_casts": 4.0,
        "weight_transposes": 2.0,
        "norms": 8.0,
        "swiglu": 8.0,
        "rest": 14.0,
    }
    assert sum(parts.values()) == sum(SPENT.values())


def test_a_row() -> None:
    busy = profiled.Busy(SPENT, wall=640.04, idle=44.0)
    row = layer.row_of("fp8", "compiled", 0.65, busy, {"gemms": 200.04})
    assert row == {
        "variant": "fp8",
        "mode": "compiled",
        "step_us": 650.0,
        "wall_us": 640.0,
        "gemms_us": 400.0,
        "attention_us": 150.0,
        "casts_us": 16.0,
        "norms_us": 8.0,
        "swiglu_us": 8.0,
        "rest_us": 14.0,
        "idle_us": 44.0,
        "gemms_limit_us": 200.0,
        "attention_kernel": "pytorch_flash::flash_fwd_kernel",
    }
    assert layer.attention_kernel({"gemm_kernel": 1.0}) == "none"


def test_wall_and_idle_of_overlapping_kernels() -> None:
    """Two calls; the second kernel starts while the first one runs."""
    spans = [(10.0, 20.0), (15.0, 18.0), (30.0, 50.0), (52.0, 60.0)]
    assert profiled._wall_and_idle(spans, 2) == (25.0, 6.0)
    assert profiled._wall_and_idle([], 2) == (0.0, 0.0)


def test_limits_of_llama_8b() -> None:
    """218 million parameters a layer, 8,192 tokens."""
    bf16, fp8 = (layer.limits(Shape(), 8192, fp8, "h200") for fp8 in (False, True))
    parameters = 4096 * (2 * 4096 + 2 * 1024 + 3 * 14336)
    assert bf16["gemms"] == pytest.approx(6 * parameters * 8192 / 989e12 * 1e6)
    assert fp8["gemms"] == pytest.approx(bf16["gemms"] * 989 / 1979)
    # per head and element: two products in forward, five in backward, half of each masked
    assert bf16["attention"] == pytest.approx(3.5 * 2 * 8192**2 * 4096 / 989e12 * 1e6)
    assert bf16["attention"] == fp8["attention"]
    assert bf16["casts"] == 0.0 < fp8["casts"] < 2000
