"""Benchmarks of experts, as far as a CPU takes them: operands, shapes, rows, peers."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks import candidates, gemm, grouped, peers, shapes
from benchmarks.grouped import GROUPS, KINDS, Case
from blocktensor.ops.cast.ops import dequantize
from blocktensor.ops.formats import Quantized

EXPERTS, TOKENS, N, K = 3, 1280, 144, 160


def sqnr(got: Tensor, wanted: Tensor) -> float:
    """In decibels."""
    wanted = wanted.float()
    return (20 * torch.log10(wanted.norm() / (got.float() - wanted).norm())).item()


def case(kind: str, groups: str = "ragged") -> Case:
    return Case(kind, groups, EXPERTS, TOKENS, N, K)


@pytest.mark.parametrize("multiple", GROUPS.values())
@pytest.mark.parametrize("shape", shapes.GROUPED, ids=str)
def test_sizes_are_uneven_and_add_up(shape: shapes.GroupedShape, multiple: int) -> None:
    experts, tokens, *_ = shape
    sizes = shapes.group_sizes(experts, tokens, multiple)
    assert sizes == shapes.group_sizes(experts, tokens, multiple)
    assert (len(sizes), sum(sizes)) == (experts, tokens)
    assert all(size % multiple == 0 and size >= 128 for size in sizes)
    assert max(sizes) > 1.2 * min(sizes)
    assert multiple == 128 or any(size % 16 for size in sizes)


def test_sizes_that_cannot_add_up_are_an_error() -> None:
    with pytest.raises(ValueError, match="100 tokens do not make groups that are multiples of 128"):
        shapes.group_sizes(4, 100, 128)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if "cast" not in kind])
def test_all_candidates_of_a_product_compute_it(kind: str) -> None:
    torch.manual_seed(0)
    inputs = grouped.make_inputs(case(kind), "cpu")
    found: dict[str, Any] = {}
    for name, maker in {**grouped.ours(case(kind)), **grouped.others(case(kind))}.items():
        found[name] = maker(inputs)()
    assert set(found) >= {"blocktensor", "dense", "bf16"}
    assert found["blocktensor"].dtype == case(kind).out_dtype
    assert sqnr(found["blocktensor"], found["bf16"]) > 25
    if kind == "fprop":
        first = slice(0, inputs.offs[0])
        assert torch.equal(found["dense"][first], found["blocktensor"][first])
        assert found["dense"].shape == found["blocktensor"].shape, "as much work"
    else:
        assert sqnr(found["dense"], found["blocktensor"].float().sum(0)) > 25


def test_a_product_that_adds_adds_to_its_own_output() -> None:
    torch.manual_seed(0)
    inputs = grouped.make_inputs(case("wgrad_add"), "cpu")
    call = grouped.ours(case("wgrad_add"))["blocktensor"](inputs)
    call()
    once = inputs.out.clone()
    call()
    assert torch.equal(inputs.out, 2 * once)
    assert once.any()


@pytest.mark.parametrize("kind", ["cast", "square_cast"])
def test_casts_are_of_the_same_rows(kind: str) -> None:
    torch.manual_seed(0)
    inputs = grouped.make_inputs(case(kind), "cpu")
    found: dict[str, Any] = {
        name: maker(inputs)() for name, maker in grouped.ours(case(kind)).items()
    }
    (rows, columns), (dense_rows, dense_columns) = found["blocktensor"], found["dense"]
    assert torch.equal(rows.data.view(torch.uint8), dense_rows.data.view(torch.uint8))
    assert columns.data.shape[0] == dense_columns.data.shape[0] == K
    assert columns.format is dense_columns.format is case(kind).x_columnwise
    assert columns.format.transposes == (kind == "square_cast")
    assert grouped.others(case(kind)) == {}


def test_amounts_of_work() -> None:
    assert case("fprop").work == case("wgrad").work == 2 * TOKENS * N * K
    assert case("cast").work == 4 * TOKENS * K
    assert case("fprop").read == TOKENS * K + EXPERTS * N * K
    assert gemm.Case("fprop", 3, 5, 7).read == (3 + 5) * 7
    assert gemm.Case("wgrad", 3, 5, 7).read == gemm.Case("wgrad_add", 3, 5, 7).read == 3 * (5 + 7)
    assert candidates.sets_of(1) == 8
    assert candidates.sets_of(100 * 2**20) == 2
    assert candidates.sets_of(2**40) == 1


def test_a_row_has_rates_and_their_ratios() -> None:
    ms = {"blocktensor": 1.0, "dense": 0.9, "bf16": 2.0, "deepgemm": 1.1}
    wide = Case("fprop", "ragged", 4, 32640, 7168, 2048)
    row = grouped.row(wide, ms, "why", torch.device("cpu"))
    assert row == {
        **{"kind": "fprop", "groups": "ragged", "experts": 4, "tokens": 32640},
        **{"n": 7168, "k": 2048, "tokens_per_expert": 8160, "unit": "TFLOP/s"},
        **{"blocktensor": 958.3, "dense": 1064.8, "bf16": 479.2, "deepgemm": 871.2},
        **{"backend": "reference", "of_dense": 0.9, "vs_bf16": 2.0, "vs_deepgemm": 1.1},
        "note": "why",
    }
    row = grouped.row(Case("cast", "ragged", 4, 32640, 7168, 2048), ms, "", torch.device("cpu"))
    assert (row["unit"], row["blocktensor"]) == ("GB/s", 267.4)
    assert "backend" not in row


def test_every_shape_kind_and_groups_is_a_row() -> None:
    assert len(set(shapes.GROUPED)) == 12
    assert grouped.total() == 168
    assert grouped.total(**grouped.QUICK) == 14
    assert len({round(t / e) for e, t, *_ in shapes.GROUPED}) == 12, "which bars tell apart"
    for kind in KINDS:
        assert case(kind).problem(torch.device("cpu")).accumulate == (
            kind in ("wgrad_add", "square_add")
        )


@pytest.fixture
def deepgemm(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A library in the place of DeepGEMM that keeps what it is called with."""
    called: dict[str, Any] = {}

    def library(name: str) -> Any:
        return lambda *args, **options: called.update({name: (args, options)})

    module = SimpleNamespace(
        **{
            name: library(name)
            for name in ("m_grouped_fp8_gemm_nt_contiguous", "k_grouped_fp8_gemm_nt_contiguous")
        }
    )
    monkeypatch.setattr(peers, "_load", lambda name: module)
    return called


def test_deepgemm_gets_the_group_of_each_row(deepgemm: dict[str, Any]) -> None:
    aligned = case("fprop", "aligned")
    inputs = grouped.make_inputs(aligned, "cpu")
    grouped.others(aligned)["deepgemm"](inputs)()
    (a, b, out, groups), _ = deepgemm["m_grouped_fp8_gemm_nt_contiguous"]
    assert a[0] is inputs.a.data
    assert b[0] is inputs.b.data
    assert out is inputs.out
    assert groups.dtype == torch.int32
    assert groups.bincount().tolist() == aligned.sizes
    assert (groups.diff() >= 0).all()


def test_deepgemm_gets_the_matrices_of_groups_one_after_the_other(deepgemm: dict[str, Any]) -> None:
    aligned = case("wgrad_add", "aligned")
    inputs = grouped.make_inputs(aligned, "cpu")
    grouped.others(aligned)["deepgemm"](inputs)()
    (a, b, out, sizes, on_device, added), options = deepgemm["k_grouped_fp8_gemm_nt_contiguous"]
    assert out is added is inputs.out
    assert sizes == on_device.tolist() == aligned.sizes
    assert options == {"recipe": (1, 1, 128)}
    for given, form, rows in ((a, inputs.a, N), (b, inputs.b, K)):
        data, scale = given
        assert data.shape == (rows * TOKENS,)
        assert scale.shape == (rows, TOKENS // 128)
        first, second = aligned.sizes[:2]
        group = data[rows * first : rows * (first + second)].view(rows, second)
        columns = slice(first, first + second)
        assert torch.equal(group.view(torch.uint8), form.data[:, columns].view(torch.uint8))
        begin = first // 128
        assert torch.equal(scale[:, begin], form.scale[:, begin])


def test_deepgemm_is_not_asked_for_what_it_does_not_take(deepgemm: dict[str, Any]) -> None:
    assert set(grouped.others(case("fprop"))) == {"bf16"}
    assert set(grouped.others(case("wgrad", "aligned"))) == {"bf16"}


def test_operands_of_wgrad_are_cast_by_group() -> None:
    inputs = grouped.make_inputs(case("wgrad"), "cpu")
    first = case("wgrad").sizes[0]
    assert first % 128, "the blocks of the second group begin anew"
    form = Quantized(inputs.b.data[:, :128], inputs.b.scale[:, :1], inputs.b.format)
    back = dequantize(form, torch.bfloat16)
    assert sqnr(back, inputs.right[:128].t()) > 25
    end = inputs.b.data[:, first : -(-first // 128) * 128]
    assert not end.float().any()


def test_candidates_that_fail_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def graphed(*calls: Any, repeats: int, stream: Any) -> Any:
        if any(call() is NotImplemented or seen[-1] == "eager" for call in calls):
            raise RuntimeError
        return lambda: None

    def timed(calls: dict[str, Any], rounds: int, block_ms: float) -> dict[str, float]:
        return {name: 12.0 for name in calls}

    def maker(name: str) -> candidates.Maker:
        return lambda i: lambda: seen.append(name)

    def broken(i: Any) -> Any:
        raise ValueError("no such shape")

    seen: list[str] = []
    monkeypatch.setattr(candidates, "graphed", graphed)
    monkeypatch.setattr(candidates, "round_robin", timed)
    stream: Any = SimpleNamespace(synchronize=lambda: seen.append("waited"))
    options: dict[str, Any] = {"repeats": 2, "rounds": 1, "stream": stream}
    ms, note = candidates.times(
        [1, 2, 3], {"ours": maker("ours")}, {"eager": maker("eager"), "x": broken}, **options
    )
    assert ms == {"ours": 2.0, "eager": 12.0}
    assert note == "eager eager: cannot be captured; x declines: ValueError no such shape"
    assert seen[-1] == "waited"
    with pytest.raises(ValueError, match="no such shape"):
        candidates.times([1], {"x": broken}, {}, **options)
    with pytest.raises(RuntimeError):
        candidates.times([1], {"eager": maker("eager")}, {}, **options)


def test_all_that_a_case_is_measured_with_lives_on_one_stream(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    entered: list[object] = []
    stream = object()

    @contextlib.contextmanager
    def on(of: object) -> Iterator[None]:
        entered.append(of)
        yield
        entered.pop()

    def makers(name: str) -> Any:
        def make(case: gemm.Case) -> Any:
            assert entered == [stream]
            return {name: case}

        return make

    def times(sets: Any, ours: Any, others: Any, **options: Any) -> Any:
        assert entered == [stream]
        return (sets, ours, others, options), "a note"

    monkeypatch.setattr(torch.cuda, "Stream", lambda: stream)
    monkeypatch.setattr(torch.cuda, "stream", on)
    monkeypatch.setattr(candidates, "times", times)
    case = gemm.Case("fprop", 4096, 4096, 8192)  # 64 MiB are read: four sets rotate
    made: Any = candidates.times_of(case, makers("set"), makers("ours"), makers("others"), 5)
    options = {"repeats": 1, "rounds": 5, "stream": stream}
    assert made == (([{"set": case}] * 4, {"ours": case}, {"others": case}, options), "a note")
