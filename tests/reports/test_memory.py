"""What a memory report counts: bytes held now, by kind, each piece of memory once."""

from __future__ import annotations

import pytest
import torch
from expecttest import assert_expected_inline
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate

from blocktensor import BlockwiseFP8Weight, convert, memory_report, to_blockwise_fp8_weights
from blocktensor.reports.memory import Held
from tests.support.models import TOKENS, Model, linear, randn

N, K = 300, 200
SCALES = 4 * 3 * 2  # fp32, of 128x128 blocks


def test_a_frozen_weight() -> None:
    module = linear(N, K, frozen=True)
    at_rest = Held(N * K, data=N * K, scales=SCALES)
    assert memory_report(module).frozen == memory_report(module).total == at_rest
    module.weight.columnwise()
    after = memory_report(module).total  # the derived form is not kept
    assert after == at_rest
    assert after.fp8 == after.total == N * K + SCALES


@pytest.mark.parametrize("shape", [(4096, 1024), (4096, 1100), (1088, 2048)])
def test_a_frozen_model_takes_a_byte_a_parameter(shape: tuple[int, int]) -> None:
    n, k = shape
    model = nn.Sequential(nn.Linear(k, n), nn.Linear(n, k)).to(torch.bfloat16)
    model.requires_grad_(False)
    assert memory_report(model).plain.total == 2 * (2 * n * k + n + k)
    convert(model, skip_small=False)
    report = memory_report(model)
    assert report.frozen.elements == 2 * n * k
    assert 1 < report.fp8_bytes_per_parameter <= 1.01
    assert report.fp8_bytes_per_parameter == report.frozen.total / report.frozen.elements
    assert report.plain.total == 2 * (n + k)  # the biases


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_trainable_weight_holds_fp8_from_forward_to_backward(dtype: torch.dtype) -> None:
    module = linear(N, K, dtype=dtype)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    master = N * K * dtype.itemsize
    at_rest = Held(N * K, high_precision=master)
    for _ in range(3):
        report = memory_report(module)
        assert (report.total, report.fp8_bytes_per_parameter) == (at_rest, 0)
        loss = module(randn(5, K, dtype=dtype, grad=True)).sum()
        report = memory_report(module)
        assert report.trainable == at_rest + Held(columnwise=N * K + SCALES)  # which dgrad reads
        assert report.trainable.fp8 == module.weight.cache.nbytes()
        assert report.fp8_bytes_per_parameter == (N * K + SCALES) / (N * K)
        loss.backward()
        assert memory_report(module).trainable == at_rest + Held(gradients=master)
        optimizer.step()
        optimizer.zero_grad()


def test_a_report_casts_and_derives_nothing() -> None:
    trainable, frozen = linear(N, K), linear(N, K, frozen=True)
    model = nn.Sequential(trainable, frozen)
    assert str(memory_report(model)) == str(memory_report(model))
    assert trainable.weight.cache.casts == 0
    assert frozen.weight.columnwise_data is None


def test_shared_memory_counts_once() -> None:
    a, b = linear(N, K), nn.Linear(K, N, bias=False)
    b.weight = weight = a.weight
    other = nn.Parameter(BlockwiseFP8Weight(weight.master))  # another parameter on one master
    plain, view = nn.Parameter(torch.zeros(6, 4)), nn.Linear(4, 6, bias=False)
    view.weight = nn.Parameter(plain.detach())
    model = nn.Module()
    model.tied = nn.ModuleList([a, b, view])
    model.other, model.plain = other, plain
    model.register_buffer("same", plain.detach())
    model.register_buffer("expanded", torch.zeros(1).expand(50))
    model.register_buffer("rows", plain.detach()[:3])
    a(randn(5, K, grad=True)).sum().backward()
    other.grad = a.weight.grad
    report = memory_report(model)
    assert report.trainable == Held(N * K, high_precision=2 * N * K, gradients=2 * N * K)
    assert report.plain == Held(24, high_precision=96)
    assert report.buffers == Held(62, high_precision=4 + 48)
    a, b = linear(N, K, frozen=True), nn.Linear(N, K, bias=False)
    b.weight = nn.Parameter(a.weight.detach().t(), requires_grad=False)
    assert memory_report(nn.ModuleList([a, b])).total == memory_report(a).total


def test_the_meta_device_holds_nothing() -> None:
    with torch.device("meta"):
        module, tied = nn.Linear(K, N, dtype=torch.bfloat16), Model(tied=True)
        model = nn.Sequential(module, nn.BatchNorm1d(N))
    module.weight.grad = torch.empty_like(module.weight)
    model.apply(to_blockwise_fp8_weights)
    report = memory_report(model)
    assert report.trainable == Held(N * K, would_take=2 * 2 * N * K)
    assert report.plain == Held(3 * N, would_take=(2 + 4 + 4) * N)
    assert report.buffers == Held(2 * N + 1, would_take=8 * N + 8)
    assert report.total.total == 0
    assert str(report).endswith("\non the meta device: nothing held, would take 239.7 KiB")
    held = memory_report(Model(tied=True)).plain.total  # tied tensors count once
    assert memory_report(tied).plain.would_take == held


def test_freed_storage_and_an_empty_model_hold_nothing() -> None:
    module = nn.Linear(K, N, bias=False)
    module.weight.untyped_storage().resize_(0)  # as FSDP does between uses
    assert memory_report(module).plain == Held(N * K)
    report = memory_report(nn.Module())
    assert (report.total, report.fp8_bytes_per_parameter) == (Held(), 0)


@pytest.mark.usefixtures("group")
def test_of_a_dtensor_the_local_part_counts() -> None:
    def placed(local: torch.Tensor) -> nn.Parameter:
        mesh = init_device_mesh("cpu", (1,))
        whole = DTensor.from_local(local, mesh, [Replicate()], run_check=False)
        return nn.Parameter(whole, requires_grad=local.requires_grad)

    frozen = linear(N, K, frozen=True)
    report = memory_report(nn.ParameterList([placed(frozen.weight), placed(torch.zeros(3, 4))]))
    assert report.frozen == memory_report(frozen).frozen
    assert report.plain == Held(12, high_precision=48)


def test_the_text() -> None:
    model = Model()
    model.register_buffer("positions", torch.zeros(6, dtype=torch.int64))
    model.blocks[0].requires_grad_(False)
    convert(model, skip_small=False)
    model(TOKENS).sum().backward()
    waiting = model(TOKENS)
    assert_expected_inline(
        str(memory_report(model)),
        """\
kind           elements  not FP8    FP8 data  scales  columnwise  gradients  held       each
-------------  --------  ---------  --------  ------  ----------  ---------  ---------  ------
trainable FP8  24,576    96.0 KiB   -         -       24.0 KiB    96.0 KiB   216.0 KiB  9.0007
frozen FP8     24,576    -          24.0 KiB  16 B    -           -          24.0 KiB   1.0007
plain          7,040     27.5 KiB   -         -       -           26.2 KiB   53.8 KiB   7.8182
buffers        6         48 B       -         -       -           -          48 B       8.0000
total          56,198    123.5 KiB  24.0 KiB  16 B    24.0 KiB    122.2 KiB  293.8 KiB  5.3539""",
    )
    del waiting
