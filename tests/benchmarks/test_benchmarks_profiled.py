"""Where the time of a step goes: kinds of kernels, and the least that they could take."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace

import pytest

from benchmarks import layer, profiled
from benchmarks.llama import Shape
from benchmarks.profiled import Kernel

SPENT = {
    "gemm_kernel": 300.0,
    "nvjet_sm90_tst_256x128_64x4_1x2_h_bz_coopA_NTN": 100.0,
    "cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma_f16_knob_3_1x1x1": 60.0,
    "void pytorch_flash::flash_fwd_kernel<Traits<128>>(Params)": 90.0,
    "cast_columnwise_kernel": 10.0,
    "block_kernel": 4.0,
    "transpose_128x128_kernel": 2.0,
    "triton_red_fused__fused_rms_norm_add_3": 5.0,
    "void at::native::(anonymous namespace)::vectorized_layer_norm_kernel<float>": 3.0,
    "triton_poi_fused_mul_silu_2": 7.0,
    "void at::native::vectorized_elementwise_kernel<4, at::native::silu_kernel>": 1.0,
    "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add>": 8.0,
    "Memcpy DtoD (Device -> Device)": 6.0,
}
ATTENTION = "pytorch_flash::flash_fwd_kernel"


def test_kernels_belong_to_parts_and_none_is_lost() -> None:
    parts = profiled.by_part(SPENT)
    assert parts == {
        **{"gemms": 400.0, "attention": 150.0, "norms": 8.0, "swiglu": 8.0, "rest": 14.0},
        **{"activation_casts": 10.0, "weight_casts": 4.0, "weight_transposes": 2.0},
    }
    events = [SimpleNamespace(key=k, self_device_time_total=us) for k, us in SPENT.items()]
    kinds = profiled.by_kind(events)
    assert kinds["gemms"] == parts["gemms"]
    assert sum(kinds.values()) == sum(parts.values()) == sum(SPENT.values())


def test_a_row() -> None:
    busy = profiled.Busy(SPENT, wall=640.04, idle=44.0)
    row = layer.row_of("fp8", "compiled", 0.65, busy, {"gemms": 200.04})
    assert row == {
        **{"variant": "fp8", "mode": "compiled", "attention_kernel": ATTENTION},
        **{"step_us": 650.0, "wall_us": 640.0, "idle_us": 44.0, "gemms_limit_us": 200.0},
        **{"gemms_us": 400.0, "attention_us": 150.0, "casts_us": 16.0, "norms_us": 8.0},
        **{"swiglu_us": 8.0, "rest_us": 14.0},
    }
    assert profiled.attention_kernel({"gemm_kernel": 1.0}) == "none"


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


def test_every_kernel_of_the_package_has_a_kind() -> None:
    ops = Path(__file__).parents[2] / "blocktensor" / "ops"
    source = "".join(path.read_text() for path in ops.rglob("*.py"))
    kernels = set(re.findall(r"^def (\w*kernel)\(", source, re.MULTILINE)) - {"raw_kernel"}
    norms = {"norm_kernel", "norm_gradients_kernel"}
    other = {k for k in kernels if profiled.kind_of(k) == profiled.OTHER}
    assert other == {"dequantize_kernel", *norms, "cross_entropy_kernel", "sum_losses_kernel"}
    assert all(profiled.part_of(k) == "norms" for k in norms)
    assert len(kernels) >= 10


KINDS = {
    "grouped_kernel": "gemms",
    "void cutlass::device_kernel<at::cuda::detail::enable_3x<cutlass::gemm": "gemms",
    "void at::cuda::detail::prepare_grouped_gemm_data<cutlass::bfloat16_t>": "gemms",
    "nvjet_sm90_tst_256x128_64x4_1x2_h_bz_coopA_NTN": "gemms",
    "void at::native::vectorized_elementwise_kernel<4, at::native::silu>": "elementwise",
    "void at::native::reduce_kernel<512, 1, at::native::sum_kernel>": "elementwise",
    "cast_columnwise_kernel": "activation_casts",
    "block_kernel": "weight_casts",
    "cast_128x128_kernel": "weight_casts",
    "transpose_128x128_kernel": "weight_transposes",
    "Memcpy DtoD (Device -> Device)": "copies",
}
PARTS = {
    "ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)": "collectives",
    "void at::native::multi_tensor_apply_kernel<FusedAdamMathFunctor<float, 4>>": "optimizer",
    "void at::native::multi_tensor_apply_kernel<LpNormFunctor<float>>": "optimizer",
    "void at::native::multi_tensor_apply_kernel<CopyFunctor<float, float>>": "shards",
    "void at::native::detail::split_with_sizes_copy_out_kernel<char>": "shards",
    "void at::native::chunk_cat_cuda_kernel<float, c10::BFloat16>": "shards",
    "void cunn_SoftMaxForward<8, float>": "loss",
    "cross_entropy_kernel": "loss",
    "sum_losses_kernel": "loss",
    "nvjet_tst_128x256": "gemms",
    "block_kernel": "casts",
    "cudnn_generated_fort_native_sdpa": "attention",
    "void at::native::vectorized_elementwise_kernel": "rest",
}


def test_kernels_are_told_apart_by_their_names() -> None:
    assert {kernel: profiled.kind_of(kernel) for kernel in KINDS} == KINDS
    assert {kernel: profiled.part_in_step(kernel) for kernel in PARTS} == PARTS
    assert set(PARTS.values()) <= set(profiled.SHOWN)


def test_a_trace_is_summed(tmp_path: Path) -> None:
    def event(name: str, start: float, us: float, category: str = "kernel") -> dict[str, object]:
        return {"cat": category, "name": name, "ts": start, "dur": us}

    events = [
        event("ncclDevKernel_ReduceScatter", 3000, 2000),
        event("gemm", 0, 1000),
        event("ncclDevKernel_AllGather", 500, 1500),
        event("Memset", 2500, 1000, "gpu_memset"),
        event("cudaLaunchKernel", 0, 9000, "cuda_runtime"),
        {"name": "process_name", "ph": "M"},
    ]
    path = tmp_path / "trace.json"
    path.write_text(json.dumps({"traceEvents": events}))
    parts = profiled.parts_of(profiled.kernels(path))
    wanted = {"gemms": 1.0, "rest": 1.0, "collectives": 3.5, "exposed": 2.5, "idle": 0.5}
    assert parts == {part: wanted.get(part, 0.0) for part in profiled.SHOWN}


def test_the_last_step_begins_after_an_update() -> None:
    def adam(start: float) -> Kernel:
        return Kernel("multi_tensor_apply_kernel<FusedAdamMathFunctor<float, 4>>", start, start + 1)

    found = [
        Kernel("gemm", 0.0, 5.0),
        adam(6.0),
        adam(7.5),
        Kernel("ncclAllGather", 8.0, 30.0),
        Kernel("gemm", 9.0, 40.0),
        adam(41.0),
        adam(43.0),
    ]
    assert profiled.last_step(found) == found[4:]
    assert profiled.last_step(found[:1]) == found[:1]
    assert profiled.last_step(found[:2]) == found[:2]
    one = [Kernel("gemm", 0.0, 5.0), adam(6.0), adam(90.0), Kernel("fill", 95.0, 96.0)]
    assert profiled.last_step(one) == one
    begun = [adam(-9.0), *found]  # the first of two steps began while another one ended
    assert profiled.last_step(begun) == found[4:]


def test_what_runs_beside_another_kernel_counts_twice() -> None:
    kernels = [Kernel("gemm", 0.0, 2000.0), Kernel("cast_1x128_kernel", 0.0, 1000.0)]
    nothing = profiled.parts_of([])
    assert nothing == dict.fromkeys(profiled.SHOWN, 0.0)
    assert profiled.parts_of(kernels) == {**nothing, "gemms": 2.0, "casts": 1.0}
