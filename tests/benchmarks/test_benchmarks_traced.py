"""Where the time of a traced step goes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("rich")

from benchmarks import traced
from benchmarks.traced import Kernel


@pytest.mark.parametrize(
    ("kernel", "part"),
    [
        ("ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)", "collectives"),
        ("void at::native::multi_tensor_apply_kernel<FusedAdamMathFunctor<float, 4>>", "optimizer"),
        ("void at::native::multi_tensor_apply_kernel<LpNormFunctor<float>>", "optimizer"),
        ("void at::native::multi_tensor_apply_kernel<CopyFunctor<float, float>>", "shards"),
        ("void at::native::detail::split_with_sizes_copy_out_kernel<char>", "shards"),
        ("void at::native::chunk_cat_cuda_kernel<float, c10::BFloat16>", "shards"),
        ("void cunn_SoftMaxForward<8, float>", "loss"),
        ("cross_entropy_kernel", "loss"),
        ("sum_losses_kernel", "loss"),
        ("nvjet_tst_128x256", "gemms"),
        ("cast_128x128_kernel", "casts"),
        ("cudnn_generated_fort_native_sdpa", "attention"),
        ("void at::native::vectorized_elementwise_kernel", "rest"),
    ],
)
def test_kernels_belong_to_parts(kernel: str, part: str) -> None:
    assert traced.part_in_step(kernel) == part
    assert part in traced.SHOWN


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
    parts = traced.parts_of(traced.kernels(path))
    wanted = {"gemms": 1.0, "rest": 1.0, "collectives": 3.5, "exposed": 2.5, "idle": 0.5}
    assert parts == {part: wanted.get(part, 0.0) for part in traced.SHOWN}


def test_the_last_step_begins_after_an_update() -> None:
    def adam(start: float) -> Kernel:
        return Kernel("multi_tensor_apply_kernel<FusedAdamMathFunctor<float, 4>>", start, start + 1)

    found = [
        *(Kernel("gemm", 0.0, 5.0), adam(6.0), adam(7.5), Kernel("ncclAllGather", 8.0, 30.0)),
        *(Kernel("gemm", 9.0, 40.0), adam(41.0), adam(43.0)),
    ]
    assert traced.last_step(found) == found[4:]
    assert traced.last_step(found[:1]) == found[:1]
    assert traced.last_step(found[:2]) == found[:2]
    one = [Kernel("gemm", 0.0, 5.0), adam(6.0), adam(90.0), Kernel("fill", 95.0, 96.0)]
    assert traced.last_step(one) == one
    begun = [adam(-9.0), *found]  # the first of two steps began while another one ended
    assert traced.last_step(begun) == found[4:]


def test_nothing_ran() -> None:
    assert traced.parts_of([]) == dict.fromkeys(traced.SHOWN, 0.0)


def test_what_runs_beside_another_kernel_counts_twice() -> None:
    parts = traced.parts_of([Kernel("gemm", 0.0, 2000.0), Kernel("cast_1x128_kernel", 0.0, 1000.0)])
    assert (parts["gemms"], parts["casts"], parts["idle"]) == (2.0, 1.0, 0.0)
