"""Benchmarks of GEMMs without a GPU: operands, rows, peers, and the tiles that they choose."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks import gemm, grouped, peers, shapes, tiles
from benchmarks.grouped import GROUPS, KINDS, Case
from benchmarks.roofline import roofline
from blocktensor.ops import devices
from blocktensor.ops.cast.ops import dequantize, quantize_rowwise
from blocktensor.ops.devices import Card
from blocktensor.ops.formats import BLOCKS_1X128, BLOCKS_128X128, Quantized
from blocktensor.ops.gemm import choose_backend
from blocktensor.ops.gemm.hopper.tiles import FILE
from blocktensor.ops.runtime.specialize import GEMM_VARIABLE

EXPERTS, TOKENS, N, K = 3, 1280, 144, 160


def decibels(got: Tensor, wanted: Tensor) -> float:
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


def computed(kind: str) -> tuple[grouped.Inputs, dict[str, Any]]:
    """The operands of a case, and what each candidate makes of them."""
    torch.manual_seed(0)
    inputs = grouped.make_inputs(case(kind), "cpu")
    makers = {**grouped.ours(case(kind)), **grouped.others(case(kind))}
    return inputs, {name: maker(inputs)() for name, maker in makers.items()}


@pytest.mark.parametrize("kind", [kind for kind in KINDS if "cast" not in kind])
def test_all_candidates_of_a_product_compute_it(kind: str) -> None:
    inputs, found = computed(kind)
    assert set(found) >= {"blocktensor", "dense", "bf16"}
    assert found["blocktensor"].dtype == torch.bfloat16
    assert decibels(found["blocktensor"], found["bf16"]) > 25
    if kind == "fprop":
        first = slice(0, inputs.offs[0])
        assert torch.equal(found["dense"][first], found["blocktensor"][first])
        assert found["dense"].shape == found["blocktensor"].shape, "as much work"
    else:
        assert decibels(found["dense"], found["blocktensor"].float().sum(0)) > 25


@pytest.mark.parametrize("kind", ["cast", "square_cast"])
def test_casts_are_of_the_same_rows(kind: str) -> None:
    _, found = computed(kind)
    assert found.keys() == {"blocktensor", "dense"}
    (rows, columns), (dense_rows, dense_columns) = found["blocktensor"], found["dense"]
    same = rows.data[: len(dense_rows.data)]  # the others belong to no group
    assert torch.equal(same.view(torch.uint8), dense_rows.data.view(torch.uint8))
    assert columns.data.shape[0] == dense_columns.data.shape[0] == K
    assert columns.format is dense_columns.format is case(kind).x_columnwise
    assert columns.format.transposes == (kind == "square_cast")


def test_amounts_of_work() -> None:
    assert case("fprop").work == case("wgrad").work == 2 * TOKENS * N * K
    assert case("cast").work == 4 * TOKENS * K
    assert case("fprop").read == TOKENS * K + EXPERTS * N * K
    assert gemm.Case("fprop", 3, 5, 7).read == (3 + 5) * 7
    assert gemm.Case("wgrad", 3, 5, 7).read == 3 * (5 + 7)


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


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """A library in place of every peer: the name, arguments and options of its calls."""
    calls: list[Any] = []

    class Recorder:
        def __getattr__(self, name: str) -> Any:
            return lambda *args, **options: calls.append((name, args, options))

    monkeypatch.setattr(peers, "_load", lambda name: Recorder())
    return calls


def test_deepgemm_gets_the_group_of_each_row(library: list[Any]) -> None:
    aligned = case("fprop", "aligned")
    inputs = grouped.make_inputs(aligned, "cpu")
    grouped.others(aligned)["deepgemm"](inputs)()
    ((name, (a, b, out, groups), _),) = library
    assert name == "m_grouped_fp8_gemm_nt_contiguous"
    assert a[0] is inputs.a.data
    assert b[0] is inputs.b.data
    assert out is inputs.out
    assert groups.dtype == torch.int32
    assert groups.bincount().tolist() == aligned.sizes
    assert (groups.diff() >= 0).all()


def test_deepgemm_is_not_asked_for_what_it_does_not_take(library: list[Any]) -> None:
    assert set(grouped.others(case("fprop"))) == {"bf16"}
    assert set(grouped.others(case("wgrad", "aligned"))) == {"bf16"}


def test_operands_of_wgrad_are_cast_by_group() -> None:
    inputs = grouped.make_inputs(case("wgrad"), "cpu")
    first = case("wgrad").sizes[0]
    assert first % 128, "the blocks of the second group begin anew"
    form = Quantized(inputs.b.data[:, :128], inputs.b.scale[:, :1], inputs.b.format)
    assert decibels(dequantize(form, torch.bfloat16), inputs.right[:128].t()) > 25
    end = inputs.b.data[:, first : -(-first // 128) * 128]
    assert not end.float().any()


def test_absent_peers_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "MODULES", {"torchao": "json", "deepgemm": "no_such_module"})
    monkeypatch.setattr(peers, "_load", peers._load.__wrapped__)  # without its cache
    reason = "ModuleNotFoundError: No module named 'no_such_module'"
    assert peers.absent() == gemm.facts()["absent"] == {"deepgemm": reason}
    assert peers.present("torchao")
    assert not peers.present("deepgemm")


def test_torchao_gets_b_and_its_scales_transposed(library: list[Any]) -> None:
    x, w = torch.randn(256, 384), torch.randn(512, 384)
    a, square = quantize_rowwise(x, BLOCKS_1X128), quantize_rowwise(w, BLOCKS_128X128)
    peers.torchao_gemm(a, square, torch.bfloat16)()
    peers.torchao_gemm(a, quantize_rowwise(w, BLOCKS_1X128), torch.float32)()
    names = ["triton_fp8_gemm_1x128_128x128", "triton_fp8_gemm_1x128_128x1"]
    assert [name for name, _, _ in library] == names
    for (_, operands, options), b_scale in zip(library, [(3, 4), (3, 512)], strict=True):
        assert [tuple(t.shape) for t in operands] == [(256, 384), (384, 512), (256, 3), b_scale]
        a_data, b_data, a_scale, _ = operands
        assert (a_data.stride(1), b_data.stride(0), a_scale.stride(0)) == (1, 1, 1)
        assert options.keys() == {"out_dtype"}
    assert library[0][1][3].stride(0) == 1, "column-major"
    assert library[1][1][3].stride(1) == 1, "row-major"


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
    odd = gemm.ours(gemm.Case(kind, 4098, 2048, 7168))  # cuBLAS declines the sizes of its fprop
    assert "triton" in odd
    assert kind != "fprop" or "cublas" not in odd


@pytest.mark.usefixtures("hopper")
def test_a_row_of_one_matrix_has_rates_and_ratios() -> None:
    rates = {"blocktensor": 1100.04, "cublas": 1000.0, "tensorwise": 1200.0}
    row = gemm._row(gemm.Case("fprop", 4096, 2048, 7168), rates, "why")
    assert row["blocktensor"] == 1100.0
    assert (row["vs_cublas"], row["of_limit"]) == (1.1, 0.917)
    assert "vs_bf16" not in row
    assert row["note"] == "why"


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize(
    ("kind", "sizes"),
    [
        ("fprop", (4096, 2048, 7168, BLOCKS_128X128)),
        ("wgrad", (2048, 7168, 4096, BLOCKS_1X128)),  # contracts tokens
    ],
)
def test_flops_and_problems(kind: str, sizes: tuple[Any, ...]) -> None:
    made = gemm.Case(kind, 4096, 2048, 7168)
    assert made.flops == 2 * 4096 * 2048 * 7168
    problem = made.problem()
    assert (problem.m, problem.n, problem.k, problem.b_format) == sizes


def test_a_card_writes_its_part_alone_and_a_kernel_has_a_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = tmp_path / "tiles.json"
    copy.write_text(FILE.read_text())
    monkeypatch.setattr(tiles, "FILE", copy)
    monkeypatch.setattr(tiles, "card", lambda device: Card("H100", 132))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H100 80GB HBM3")
    before = json.loads(copy.read_text())
    speeds = before["H100"]["speeds"]
    measured = {"block_us": 0.5, "mean_error": 0.1}
    tiles.publish([{"kernel": name, **speed, **measured} for name, speed in speeds.items()])
    after = json.loads(copy.read_text())
    assert list(after) == list(before)
    assert after["H200"] == before["H200"]
    assert after["H100"]["gpu"] == "NVIDIA H100 80GB HBM3"
    assert after["H100"]["command"] == "python -m benchmarks tiles"
    wanted = {name: {**speed, "block_us": 0.5} for name, speed in speeds.items()}
    assert after["H100"]["speeds"] == wanted
    lines = [line for line in copy.read_text().splitlines() if "block_us" in line]
    assert len(lines) == sum(len(part["speeds"]) for part in after.values())


@pytest.mark.parametrize(
    ("card", "two_reads_ms", "one_read_ms"), [("h200", 0.2735, 0.1824), ("h100", 0.3919, 0.2613)]
)
def test_the_roofline_by_hand(card: str, two_reads_ms: float, one_read_ms: float) -> None:
    """Three matmuls of 2 * 8192^3 FLOPs take 4.2759 ms in bf16 and 2.1369 ms in FP8.

    Casts move 6 or 4 bytes for each of the 3 * 8192^2 elements of x, w and g.
    """
    limit = roofline((8192, 8192, 8192), card)
    assert limit.two_reads == pytest.approx(4.2759 / (2.1369 + two_reads_ms), rel=1e-4)
    assert limit.one_read == pytest.approx(4.2759 / (2.1369 + one_read_ms), rel=1e-4)
