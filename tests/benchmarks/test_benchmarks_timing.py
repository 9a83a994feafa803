"""Timing, with a clock in place of a GPU; peers and drafts, with modules made up for the test."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks import drafts, gemm, peers, timing
from blocktensor.ops import devices
from blocktensor.ops.cast.ops import quantize_rowwise
from blocktensor.ops.formats import BLOCKS_1X128, BLOCKS_128X128, Quantized
from blocktensor.ops.gemm import choose_backend
from blocktensor.ops.runtime.specialize import GEMM_VARIABLE


class Clock:
    """Stands for ``torch.cuda``'s events: time passes when a call says so."""

    def __init__(self) -> None:
        self.now = 0.0

    def event(self, enable_timing: bool) -> Any:
        recorded = SimpleNamespace(at=0.0, synchronize=lambda: None)
        recorded.record = lambda: setattr(recorded, "at", self.now)
        recorded.elapsed_time = lambda end: end.at - recorded.at
        return recorded

    def spend(self, ms: float) -> None:
        self.now += ms


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(torch.cuda, "Event", clock.event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    return clock


def test_round_robin_gives_milliseconds_a_call(clock: Clock) -> None:
    calls = {
        "fast": [lambda: clock.spend(0.5), lambda: clock.spend(1.5)],
        "slow": [lambda: clock.spend(40.0)],
    }
    times = timing.round_robin(calls, rounds=5, block_ms=12.0)
    assert times == pytest.approx({"fast": 1.0, "slow": 40.0})


def test_blocks_are_equally_long_and_inputs_rotate(clock: Clock) -> None:
    seen: Counter[str] = Counter()

    def call(name: str, ms: float) -> timing.Call:
        def run() -> None:
            seen[name] += 1
            clock.spend(ms)

        return run

    calls = {"a": [call("a0", 1.0), call("a1", 1.0)], "b": [call("b", 4.0)]}
    timing.round_robin(calls, rounds=4, block_ms=12.0)
    # once each, three to estimate, then six blocks of 12 ms
    assert seen == {"a0": 1 + 2 + 36, "a1": 1 + 1 + 36, "b": 1 + 3 + 18}


def test_warm_up_rounds_do_not_count_and_outliers_do_not_show(clock: Clock) -> None:
    calls_made = 0

    def call() -> None:
        nonlocal calls_made
        calls_made += 1
        clock.spend(100.0 if calls_made in (5, 6, 9) else 10.0)

    # 1 call, 3 to estimate, then one a round: calls 5 and 6 warm up, 9 is one of five that count
    assert timing.round_robin({"x": [call]}, rounds=5, block_ms=10.0) == {"x": 10.0}


def test_a_middle_mean_leaves_out_both_ends() -> None:
    assert timing.middle_mean([9.0, 1.0, 2.0, 4.0]) == 3.0
    assert timing.middle_mean([100.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 0.0]) == 3.5
    assert timing.middle_mean([7.0]) == 7.0


@pytest.mark.parametrize(
    ("count", "cut"), [(1, 0), (2, 0), (3, 0), (4, 1), (5, 1), (6, 1), (7, 1), (8, 2), (11, 2)]
)
def test_a_middle_mean_leaves_out_a_quarter_at_each_end_rounded_down(count: int, cut: int) -> None:
    values = [float(4**i) for i in range(count)]  # no two parts have one mean
    kept = values[cut : count - cut]
    assert timing.middle_mean(values[::-1]) == sum(kept) / len(kept)


def test_a_flushed_call_waits_until_all_are_queued(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    happened = []
    flush = SimpleNamespace(zero_=lambda: (happened.append("flush"), clock.spend(60.0)))
    monkeypatch.setattr(torch, "empty", lambda *_, **__: flush)
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: happened.append("pause"))

    def call() -> None:
        happened.append("call")
        clock.spend(0.25)

    assert timing.flushed_device(call, repeats=20) == 0.25
    assert happened.count("pause") == 1
    measured = happened[happened.index("pause") + 1 :]
    assert measured == ["flush", "call"] * 20


@pytest.mark.parametrize(("flops", "repeats"), [(1e12, 1), (5e12, 1), (0.4e12, 3), (3.4e10, 30)])
def test_a_graph_is_about_a_millisecond_long(flops: float, repeats: int) -> None:
    assert timing.graph_repeats(flops) == repeats


@pytest.fixture
def fake_peer(monkeypatch: pytest.MonkeyPatch) -> Any:
    """One module for torchao and DeepGEMM which records how it is called."""
    module: Any = ModuleType("fake_peer")
    module.calls = []

    def record(name: str) -> Any:
        return lambda *args, **options: module.calls.append((name, args, options))

    for name in ("fp8_gemm_nt", "triton_fp8_gemm_1x128_128x128", "triton_fp8_gemm_1x128_128x1"):
        setattr(module, name, record(name))
    monkeypatch.setitem(sys.modules, "fake_peer", module)
    monkeypatch.setattr(peers, "MODULES", {"torchao": "fake_peer", "deepgemm": "fake_peer"})
    peers._load.cache_clear()
    yield module
    peers._load.cache_clear()


def test_absent_peers_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "MODULES", {"torchao": "json", "deepgemm": "no_such_module"})
    peers._load.cache_clear()
    try:
        reason = "ModuleNotFoundError: No module named 'no_such_module'"
        assert peers.absent() == {"deepgemm": reason}
        assert peers.present("torchao")
        assert not peers.present("deepgemm")
        assert gemm.facts()["absent"] == {"deepgemm": reason}
    finally:
        peers._load.cache_clear()


def test_torchao_gets_b_and_its_scales_transposed(fake_peer: Any) -> None:
    x, w = torch.randn(256, 384), torch.randn(512, 384)
    a, square = quantize_rowwise(x, BLOCKS_1X128), quantize_rowwise(w, BLOCKS_128X128)
    peers.torchao_gemm(a, square, torch.bfloat16)()
    peers.torchao_gemm(a, quantize_rowwise(w, BLOCKS_1X128), torch.float32)()
    names = ["triton_fp8_gemm_1x128_128x128", "triton_fp8_gemm_1x128_128x1"]
    assert [name for name, _, _ in fake_peer.calls] == names
    for (_, operands, options), b_scale in zip(fake_peer.calls, [(3, 4), (3, 512)], strict=True):
        shapes = [tuple(t.shape) for t in operands]
        assert shapes == [(256, 384), (384, 512), (256, 3), b_scale]
        a_data, b_data, a_scale, _ = operands
        assert (a_data.stride(1), b_data.stride(0), a_scale.stride(0)) == (1, 1, 1)
        assert options.keys() == {"out_dtype"}
    assert fake_peer.calls[0][1][3].stride(0) == 1, "column-major"
    assert fake_peer.calls[1][1][3].stride(1) == 1, "row-major"


def test_deepgemm_adds_to_its_output(fake_peer: Any) -> None:
    form = quantize_rowwise(torch.randn(128, 256), BLOCKS_1X128)
    out = torch.zeros(128, 128)
    peers.deepgemm_add(form, form, out)()
    peers.deepgemm_fprop(form, form, out)()
    (_, operands, add), (_, _, fprop) = fake_peer.calls
    assert [len(pair) for pair in operands[:2]] == [2, 2], "data and scale"
    assert add["c"] is out
    assert (add["recipe"], fprop["recipe"]) == ((1, 1, 128), (1, 128, 128))
    assert "c" not in fprop


def test_drafts_need_their_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(drafts.VARIABLE, raising=False)
    assert drafts.variants("fprop") == ()
    monkeypatch.setenv(drafts.VARIABLE, "/somewhere")
    assert drafts.variants("fprop") == ("defer", "ring")


def test_a_draft_leaves_the_compiler_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    triton = pytest.importorskip("triton")
    (tmp_path / "gluon_wgrad_draft.py").write_text(
        "import triton\n"
        "def _hook(*args): pass\n"
        "triton.knobs.nvidia.ptxas = triton.__file__\n"
        "triton.knobs.runtime.add_stages_inspection_hook = _hook\n"
        "def prepared(name, a, sa, b, sb, out, accumulate):\n"
        "    hook = triton.knobs.runtime.add_stages_inspection_hook\n"
        "    return lambda: (name, accumulate, hook is _hook), True\n"
    )
    monkeypatch.setenv(drafts.VARIABLE, str(tmp_path))
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "gluon_wgrad_draft", raising=False)
    before = triton.knobs.nvidia.ptxas, triton.knobs.runtime.add_stages_inspection_hook
    form = Quantized(torch.zeros(1), torch.zeros(1), BLOCKS_1X128)
    call = drafts.prepare("wgrad_add", "dbl96a", form, form, torch.zeros(1))
    assert call() == ("dbl96a", True, True)
    after = triton.knobs.nvidia.ptxas, triton.knobs.runtime.add_stages_inspection_hook
    assert after == before
    sys.modules.pop("gluon_wgrad_draft")


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    """Backends believe that they are on an H200 with a recent CUDA."""
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(devices, "_capability", lambda index: (9, 0))
    monkeypatch.setattr(devices, "has_triton", lambda: True)
    monkeypatch.setattr(devices, "gluon_is_off", lambda: None)
    monkeypatch.setattr(choose_backend, "card", lambda device: devices.H200)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.delenv(GEMM_VARIABLE, raising=False)


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("kind", gemm.KINDS)
def test_every_backend_that_takes_a_shape_is_measured(kind: str) -> None:
    names = list(gemm.ours(gemm.Case(kind, 4096, 2048, 7168)))
    assert names[0] == "blocktensor"
    usable = set(choose_backend.usable_gemm_backends(torch.device("cuda", 0)))
    assert set(names[1:]) <= usable - {"reference"}
    assert {"gluon", "cublas", "triton"} <= set(names)


@pytest.mark.usefixtures("hopper")
def test_a_backend_that_declines_is_not_measured() -> None:
    names = gemm.ours(gemm.Case("fprop", 4098, 2048, 7168))
    assert "cublas" not in names
    assert "triton" in names


@pytest.mark.usefixtures("hopper")
def test_cublas_is_the_peer_of_what_it_cannot_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fp32 product without the addition."""
    asked = []

    def fake(*args: Any) -> Any:
        asked.append(args[-1])

    kernels = choose_backend.GemmKernels(fake, fake)
    monkeypatch.setattr(gemm, "loaded", lambda backend: kernels)
    maker = gemm.ours(gemm.Case("wgrad_add", 4096, 2048, 7168))["cublas"]
    form = Quantized(torch.zeros(1), torch.zeros(1), BLOCKS_1X128)
    maker(gemm.Inputs(form.data, form.data, form, form, form.data, form))()
    assert asked == [torch.float32]


@pytest.mark.usefixtures("hopper")
def test_a_row_has_rates_and_ratios() -> None:
    rates = {"blocktensor": 1100.04, "cublas": 1000.0, "tensorwise": 1200.0}
    drafted = {"draft_defer": 1090.0, "draft_ring": 1110.0}
    row = gemm._row(gemm.Case("fprop", 4096, 2048, 7168), rates | drafted, "why")
    assert row["blocktensor"] == 1100.0
    assert (row["vs_cublas"], row["of_limit"]) == (1.1, 0.917)
    assert row["best_draft"] == 1110.0
    assert "vs_bf16" not in row
    assert row["note"] == "why"


def test_flops_and_problems() -> None:
    case = gemm.Case("wgrad_add", 4096, 2048, 7168)
    assert case.flops == 2 * 4096 * 2048 * 7168
    assert case.out_dtype == torch.float32


@pytest.mark.usefixtures("hopper")
def test_a_weight_gradient_contracts_tokens() -> None:
    fprop = gemm.Case("fprop", 4096, 2048, 7168).problem(False)
    wgrad = gemm.Case("wgrad", 4096, 2048, 7168).problem(False)
    assert (fprop.m, fprop.n, fprop.k, fprop.b_format) == (4096, 2048, 7168, BLOCKS_128X128)
    assert (wgrad.m, wgrad.n, wgrad.k, wgrad.b_format) == (2048, 7168, 4096, BLOCKS_1X128)
