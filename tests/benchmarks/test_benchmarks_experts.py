"""Layers and models of experts, small enough for a CPU, and what their rows say."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks import experts, hf_models, layer, profiled, qwen3
from benchmarks.experts import LAYERS, VARIANTS, Shape
from blocktensor import BlockwiseFP8Weight, share_inputs
from tests.support.models import randn

TINY = Shape(experts=3, tokens=40, dim=128, hidden=256)
TINY_MODEL = qwen3.Shape(
    128, 4, 128, layers=1, top_k=2, vocab=64, batch=2, time=16, filter_small=False
)
ROWS = TINY.experts * TINY.tokens


def test_all_variants_compute_alike_and_cast_weights_once_a_step() -> None:
    x, grad = randn(ROWS, TINY.dim, grad=True), randn(ROWS, TINY.dim, seed=1)
    offs = experts.ends(TINY, "cpu")
    assert offs[-1] == ROWS
    results: dict[str, list[Tensor]] = {}
    for name in VARIANTS:
        layer = experts.variant(name, TINY, "cpu")
        weights = [w for w in layer.parameters() if isinstance(w, BlockwiseFP8Weight)]
        assert len(weights) == (0 if name == "bf16" else 3)
        call = experts.step(layer, x, grad, offs)
        call()
        call()
        twice = "cache_weight=False" in name
        assert all(weight.cache.casts == (4 if twice else 2) for weight in weights)
        assert x.grad is not None
        results[name] = [x.grad, *[w.grad for w in layer.parameters() if w.grad is not None]]
        if "shared" in name:
            (hooked,) = share_inputs(layer).groups
            assert (hooked.casts, hooked.saved) == (4, 2), "of two inputs in two steps"
    assert [len(found) for found in results.values()] == [4] * len(VARIANTS)
    for found, wanted in zip(results["fp8"], results["bf16"], strict=True):
        assert 0 < (found - wanted).norm() < 0.1 * wanted.norm()
    for name in VARIANTS[2:]:
        for found, wanted in zip(results[name], results["fp8"], strict=True):
            assert torch.equal(found, wanted)


@pytest.mark.parametrize("name", VARIANTS)
def test_the_step_whose_peak_is_measured_makes_its_input(name: str) -> None:
    layer = experts.variant(name, TINY, "cpu")
    row = randn(1, TINY.dim, grad=True)
    offs = experts.ends(TINY, "cpu")
    experts.step_of_model(layer, ROWS, row, offs)()
    assert row.grad is not None
    assert all(w.grad is not None and w.grad.any() for w in layer.parameters())
    x = row.detach().expand(ROWS, -1).contiguous().requires_grad_()
    experts.step(layer, x, torch.ones_like(x), offs)()
    assert x.grad is not None
    torch.testing.assert_close(row.grad, x.grad.float().sum(0, True).bfloat16(), rtol=2**-6, atol=1)


def test_a_row_says_what_bounds_the_layer() -> None:
    ms, peaks = {"bf16": 3.0, "fp8": 2.0}, {"bf16": 2**22, "fp8": 3 * 2**20}
    saved = {"bf16": 2**21, "fp8": 2**20}
    row = experts.layer_row("fp8", LAYERS[0], ms, peaks, saved, {"gemms": 1500.04, "copies": 0.0})
    assert row == {
        **{"what": "layer", "experts": 8, "tokens": 8192, "dim": 7168, "hidden": 2048},
        **{"variant": "fp8", "ms": 2.0, "speedup": 1.5, "peak_mib": 3.0, "peak_of_bf16": 0.75},
        **{"saved_mib": 1.0, "saved_of_bf16": 0.5, "gemms_us": 1500.0, "copies_us": 0.0},
    }
    model = qwen3.row("bf16", qwen3.SHAPES[0], ms, peaks)
    assert model["tokens"] == 16384
    assert (model["speedup"], model["peak_of_bf16"]) == (1.0, 1.0)


@pytest.mark.parametrize(
    ("kernel", "kind"),
    [
        ("grouped_kernel", "gemms"),
        ("void cutlass::device_kernel<at::cuda::detail::enable_3x<cutlass::gemm", "gemms"),
        ("void at::cuda::detail::prepare_grouped_gemm_data<cutlass::bfloat16_t>", "gemms"),
        ("nvjet_sm90_tst_256x128_64x4_1x2_h_bz_coopA_NTN", "gemms"),
        ("void at::native::vectorized_elementwise_kernel<4, at::native::silu>", "elementwise"),
        ("void at::native::reduce_kernel<512, 1, at::native::sum_kernel>", "elementwise"),
        ("cast_columnwise_kernel", "activation_casts"),
        ("cast_ahead_kernel", "activation_casts"),
        ("cast_128x128_kernel", "weight_casts"),
        ("cast_with_transpose_kernel", "weight_casts"),
        ("transpose_128x128_kernel", "weight_transposes"),
        ("Memcpy DtoD (Device -> Device)", "copies"),
    ],
)  # fmt: skip
def test_kernels_are_told_apart_by_their_names(kernel: str, kind: str) -> None:
    assert profiled.kind_of(kernel) == kind


def test_every_kernel_of_the_package_has_a_kind() -> None:
    ops = Path(__file__).parents[2] / "blocktensor" / "ops"
    source = "".join(path.read_text() for path in ops.rglob("*.py"))
    kernels = set(re.findall(r"^def (\w*kernel)\(", source, re.MULTILINE)) - {"raw_kernel"}
    passes = "squares", "values", "terms", "input"
    norms = {f"norm_{name}_kernel" for name in passes}
    other = {k for k in kernels if profiled.kind_of(k) == profiled.OTHER}
    losses = {"cross_entropy_kernel", "sum_losses_kernel"}
    assert other == {"dequantize_kernel", *norms, *losses}
    assert all(layer.part_of(k) == "norms" for k in norms)
    assert len(kernels) >= 10


def test_a_profile_is_summed_by_kind() -> None:
    events = [
        SimpleNamespace(key=key, self_device_time_total=us)
        for key, us in (("grouped_kernel", 5.0), ("gemm_kernel", 2.0), ("cudaLaunchKernel", 0.0))
    ]
    assert profiled.by_kind(events) == {"gemms": 7.0}


def test_every_layer_and_model_is_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hf_models, "absent", dict)
    assert experts.total() == 42
    assert experts.total(**experts.QUICK) == 12
    reason = {"transformers": "ModuleNotFoundError: none"}
    monkeypatch.setattr(hf_models, "absent", lambda: reason)
    assert experts.total() == 30
    assert experts.facts() == {"absent": reason}
    assert list(experts.measure(layers=(), small=())) == []


def test_a_model_trains_in_both_variants() -> None:
    pytest.importorskip("transformers")
    tokens = torch.randint(TINY_MODEL.vocab, (TINY_MODEL.batch, TINY_MODEL.time))
    for name in qwen3.VARIANTS:
        model: Any = qwen3.make_model(name, TINY_MODEL, "cpu")
        stacks = [p for p in model.parameters() if p.ndim == 3]
        assert [isinstance(p, BlockwiseFP8Weight) for p in stacks] == [name != "bf16"] * 2
        assert isinstance(model.lm_head.weight, BlockwiseFP8Weight) == ("head" in name)
        before = [p.detach().clone() for p in model.parameters()]
        qwen3.step(model, qwen3.adamw(model), tokens)()
        # of bf16, some weights round to what they were
        moved = [(p != old).any().item() for p, old in zip(model.parameters(), before, strict=True)]
        assert sum(moved) > len(moved) // 2
        assert all(p.grad is None for p in model.parameters())
