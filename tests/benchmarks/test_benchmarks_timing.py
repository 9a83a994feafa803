"""Timing, with a clock in place of a GPU."""

from __future__ import annotations

from collections import Counter
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks import gemm, timing


class Clock:
    """Stands for ``torch.cuda``: time passes when a call says so."""

    def __init__(self) -> None:
        self.now = 0.0  # of the host
        self.idle = 0.0  # when the GPU has done what it was given

    def event(self, enable_timing: bool) -> Any:
        recorded = SimpleNamespace(at=0.0, synchronize=self.synchronize)
        recorded.record = lambda: setattr(recorded, "at", max(self.now, self.idle))
        recorded.elapsed_time = lambda end: end.at - recorded.at
        return recorded

    def spend(self, ms: float, on_gpu: float = 0.0) -> None:
        self.now += ms
        self.idle = max(self.now, self.idle) + on_gpu

    def synchronize(self) -> None:
        self.now = max(self.now, self.idle)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(torch.cuda, "Event", clock.event)
    monkeypatch.setattr(torch.cuda, "synchronize", clock.synchronize)
    return clock


def test_round_robin_gives_milliseconds_a_call(clock: Clock) -> None:
    spend = partial(partial, clock.spend)
    calls: Any = {"fast": [spend(0.5), spend(1.5)], "slow": [spend(40.0)]}
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
    # once each, three to estimate, then six blocks of 12 ms, each after one call
    assert seen == {"a0": 1 + 2 + 36, "a1": 1 + 1 + 36 + 6, "b": 1 + 3 + 18 + 6}


def test_no_work_of_another_candidate_hides_host_time(clock: Clock) -> None:
    calls: Any = {
        "of the GPU": [partial(clock.spend, 0.1, 30.0)],
        "of the host": [partial(clock.spend, 4.0, 1.0)],
    }
    assert timing.round_robin(calls, rounds=6, block_ms=12.0) == pytest.approx(
        {"of the GPU": 30.0, "of the host": 4.0}, rel=0.01
    )


def test_warm_up_rounds_do_not_count_and_outliers_do_not_show(clock: Clock) -> None:
    # 1 call, 3 to estimate, then a round has one before and one that is timed: two rounds warm up,
    # and one of five that count is slow
    rounds = [100.0] * 2 + [10.0] * 2 + [100.0] + [10.0] * 2
    ms = iter([10.0] * 4 + [each for timed in rounds for each in (10.0, timed)])
    calls = {"x": [lambda: clock.spend(next(ms))]}
    assert timing.round_robin(calls, rounds=5, block_ms=10.0) == {"x": 10.0}


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
    assert happened[happened.index("pause") + 1 :] == ["flush", "call"] * 20


@pytest.mark.parametrize(("flops", "repeats"), [(1e12, 1), (5e12, 1), (0.4e12, 3), (3.4e10, 30)])
def test_a_graph_is_about_a_millisecond_long(flops: float, repeats: int) -> None:
    assert timing.graph_repeats(flops) == repeats


def test_candidates_that_fail_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def graphed(*calls: Any, repeats: int) -> Any:
        if any(call() is NotImplemented or seen[-1] == "eager" for call in calls):
            raise RuntimeError
        return lambda: None

    def maker(name: str) -> timing.Maker:
        return lambda i: lambda: seen.append(name)

    def broken(i: Any) -> Any:
        raise ValueError("no such shape")

    seen: list[str] = []
    monkeypatch.setattr(timing, "graphed", graphed)
    monkeypatch.setattr(timing, "round_robin", lambda calls, **_: dict.fromkeys(calls, 12.0))
    options: dict[str, Any] = {"repeats": 2, "rounds": 1}
    ms, note = timing.times(
        [1, 2, 3], {"ours": maker("ours")}, {"eager": maker("eager"), "x": broken}, **options
    )
    assert ms == {"ours": 2.0, "eager": 12.0}
    assert note == "eager eager: cannot be captured; x declines: ValueError no such shape"
    with pytest.raises(ValueError, match="no such shape"):
        timing.times([1], {"x": broken}, {}, **options)
    with pytest.raises(RuntimeError):
        timing.times([1], {"eager": maker("eager")}, {}, **options)


def test_sets_of_inputs_of_a_case_rotate(monkeypatch: pytest.MonkeyPatch) -> None:
    makers: Any = [partial(dict.fromkeys, [name]) for name in ("set", "ours", "others")]
    monkeypatch.setattr(timing, "times", lambda *args, **options: (args, options))
    case = gemm.Case("fprop", 4096, 4096, 8192)  # 64 MiB are read: four sets rotate
    operands = [{"set": case}] * 4, {"ours": case}, {"others": case}
    assert timing.times_of(case, *makers, 5) == (operands, {"repeats": 1, "rounds": 5})
    assert [timing.sets_of(read) for read in (1, 100 * 2**20, 2**40)] == [8, 2, 1]


def test_columns_by_mode() -> None:
    ms = {"bf16/eager": 3.0, "bf16/compiled": 2.0, "shared/eager": 1.5}
    columns = "eager_ms", "eager_speedup", "compiled_ms", "compiled_speedup"
    assert timing.by_mode(ms, "bf16") == dict(zip(columns, (3.0, 1.0, 2.0, 1.0), strict=True))
    assert list(timing.by_mode(ms, "shared").values()) == [1.5, 2.0, None, None]
    graphs = timing.by_mode(ms | {"bf16/graphs": 1.0, "shared/graphs": 0.5}, "shared")
    assert (graphs["graphs_ms"], graphs["graphs_speedup"]) == (0.5, 2.0)
    peaks = {"bf16/eager": 2**22, "fp8/eager": 2**20}
    assert timing.peaks_by_mode(peaks, "fp8") == {"eager_peak_mib": 1.0, "eager_peak_of_bf16": 0.25}
