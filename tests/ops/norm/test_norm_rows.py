"""RMS norms: autograd's gradients of eager ops, and kernels with their bits."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from torch import Tensor, nn

from blocktensor.ops.norm import ops, reference
from blocktensor.ops.norm.row_sums import VECTOR, threads_of
from tests.support.interpreter import interpreted
from tests.support.models import randn
from tests.support.numeric import DTYPES, assert_same

every_kind = pytest.mark.parametrize("kind", ["llama", "gemma"])
SHAPES = [(0, 128), (1, 1), (5, 127), (127, 132), (129, 576), (3, 10944), (70, 4096), (33, 8192)]


def operands(
    shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | str = "cpu"
) -> tuple[Tensor, Tensor, Tensor]:
    """An x of rows from tiny to huge, the weight, and the gradient of the norm."""
    x = randn(*shape, seed=1)
    for i, size in enumerate((1e-30, 1e-12, 1e-4, 1.0, 300.0, 0.0)):
        x.view(x.shape[:-1].numel(), shape[-1])[i::7] *= size
    grad = randn(*shape, seed=2)
    weight = randn(shape[-1], seed=3)
    return tuple(t.to(device, dtype) for t in (x, weight, grad))  # type: ignore[return-value]


def assert_autograds(x: Tensor, weight: Tensor, grad: Tensor, kind: Any) -> None:
    """The gradients are those that autograd makes of the eager ops."""
    leaf, gain = x.detach().requires_grad_(), nn.Parameter(weight)
    y = reference.rms_norm(leaf, gain, 1e-6, kind)
    wanted = torch.autograd.grad(y, (leaf, gain), grad)
    made, rstd = ops.normalized(x, weight, 1e-6, kind)
    assert_same(rstd, torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + 1e-6))
    assert_same(made, y.detach())
    for needs in itertools.product([True, False], repeat=2):
        got = ops.gradients(grad, x, rstd, weight, kind, *needs)
        assert [t is not None for t in got] == list(needs)
        for a, b in zip(got, wanted, strict=True):
            if a is not None:
                assert_same(a, b)


@pytest.mark.parametrize("dtype", DTYPES)
@every_kind
@pytest.mark.parametrize("shape", [*SHAPES, (2, 35, 192), (192,), (3, 0)])
def test_gradients_are_those_of_autograd(
    shape: tuple[int, ...], kind: Any, dtype: torch.dtype, device: torch.device
) -> None:
    assert_autograds(*operands(shape, dtype, device), kind)


@every_kind
def test_strides(kind: Any, device: torch.device) -> None:
    x, weight, grad = operands((130, 257), torch.bfloat16, device)
    wide = torch.stack([x, x.neg()], 1).flatten(0, 1)[::2]  # rows apart
    assert wide.stride(0) == 2 * 257
    assert_autograds(wide, weight, grad, kind)
    assert_autograds(x.t().contiguous().t(), weight, grad, kind)  # no row of unit stride
    assert_autograds(x, weight.repeat_interleave(2)[::2], grad[:1].expand_as(x), kind)
    assert_autograds(x, weight, grad.t().contiguous().t(), kind)
    three = x.view(13, 10, 257).transpose(0, 1)  # rows in another order than in memory
    assert_autograds(three, weight, grad.view(10, 13, 257), kind)
    assert_autograds(three.contiguous(), weight, grad.view(13, 10, 257).transpose(0, 1), kind)


@every_kind
def test_nan_and_inf(kind: Any, device: torch.device) -> None:
    x, weight, grad = operands((40, 200), torch.bfloat16, device)
    x[3, 5], x[4, 6], grad[5, 7] = float("nan"), float("inf"), float("inf")
    assert_autograds(x, weight, grad, kind)


def row_sum(values: Tensor) -> Tensor:
    """Add the fp32 rows of ``[T, K]`` in the order of torch's CUDA kernels; ``[T, 1]``."""
    rows, cols = values.shape
    threads = threads_of(rows, cols)
    assert threads is not None
    lanes = threads.groups * threads.width
    steps = -(-cols // (lanes * VECTOR))
    padded = torch.nn.functional.pad(values, (0, steps * lanes * VECTOR - cols))
    parts = torch.zeros(rows, lanes, VECTOR, device=values.device)
    for step in padded.view(rows, steps, lanes, VECTOR).unbind(1):
        parts = parts + step
    sums, *others = parts.unbind(2)
    for each in others:
        sums = sums + each
    return halved(halved(sums.view(rows * threads.groups, -1)).view(rows, -1))


def halved(sums: Tensor) -> Tensor:
    """Add the upper half of each row to the lower half until one number is left."""
    while sums.shape[1] > 1:
        lower, upper = sums.chunk(2, 1)
        sums = lower + upper
    return sums


def test_threads() -> None:
    shapes = [(1, 4096), (7, 4096), (8, 4096), (16, 4096), (10_000, 4096), (10_000, 128)]
    shapes += [(16, 8188), (16, 8192), (3, 8192), (16, 500_000), (1, 524_288), (1, 127), (1, 130)]
    assert_expected_inline(
        "\n".join(f"{rows} x {cols}: {threads_of(rows, cols)}" for rows, cols in shapes),
        """\
1 x 4096: Threads(groups=1, width=512)
7 x 4096: Threads(groups=1, width=128)
8 x 4096: Threads(groups=1, width=64)
16 x 4096: Threads(groups=1, width=32)
10000 x 4096: Threads(groups=1, width=32)
10000 x 128: Threads(groups=1, width=32)
16 x 8188: Threads(groups=16, width=32)
16 x 8192: Threads(groups=16, width=32)
3 x 8192: Threads(groups=2, width=256)
16 x 500000: None
1 x 524288: None
1 x 127: None
1 x 130: None""",
    )


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 3, 8, 15, 16, 31, 1000, 4099])
@pytest.mark.parametrize("cols", [128, 192, 576, 2048, 4096, 5120, 8192, 10944, 16384])
def test_torchs_order_of_sums(rows: int, cols: int) -> None:
    values = randn(rows, cols, dtype=torch.float32, device="cuda")
    assert_same(values.sum(-1, keepdim=True), row_sum(values))
    count = torch.tensor(rows * cols, dtype=torch.float32)
    factor = float(torch.tensor(rows, dtype=torch.float32) / count)
    assert_same(values.mean(-1, keepdim=True), row_sum(values) * factor)


FORMS = [*itertools.product([(17, 132)], DTYPES, ["llama", "gemma"])]
LENGTHS = [
    ((1, 128), torch.bfloat16, "gemma"),
    ((5, 576), torch.float16, "llama"),
    ((2, 2052), torch.float32, "gemma"),
    ((16, 8192), torch.bfloat16, "llama"),
]
"""Shapes whose rows are added by 32 to 512 threads, some of which have less than others.

Each takes seconds; no step of a kernel depends on the shape and also on the dtype, the kind or on
which gradients are asked for.
"""


@interpreted
def test_kernels_in_the_interpreter() -> None:
    """With sums in the order of CUDA, which differs from a CPU's."""
    from blocktensor.ops.norm import triton_norm

    for shape, dtype, kind in [*FORMS, *LENGTHS]:
        x, weight, grad = operands(shape, dtype)
        x, grad = (t.repeat_interleave(n, 0)[::n] for t, n in ((x, 2), (grad, 3)))  # rows apart
        values = x.float()
        mean = row_sum(values * values) * float(torch.tensor(1.0) / shape[1])
        rstd = (mean + 1e-6).double().rsqrt().float()
        y, made = triton_norm.normalized(x, weight, 1e-6, kind)
        assert_same(made, rstd)
        assert_same(y, reference._weighted(values * rstd, weight, kind, dtype))
        scaled = reference._of_scaled(grad, weight, kind)
        of_mean = -0.5 * row_sum(scaled * values) * rstd.pow(3) * (1 / shape[1])
        of_x = (scaled * rstd + of_mean * (2 * values)).to(dtype)
        of_weight = reference.row_gradients(grad, x, rstd, weight, kind, False, True)[1]
        every = (shape, dtype) == ((17, 132), torch.float16)
        for wants in itertools.product([True, False], repeat=2) if every else [(True, True)]:
            got = triton_norm.row_gradients(grad, x, rstd, weight, kind, *wants)
            assert [t is not None for t in got] == list(wants)
            for a, b in zip(got, (of_x, of_weight), strict=True):
                if a is not None:
                    assert_same(a, b)


@pytest.mark.gpu
def test_kernels_run_on_a_gpu() -> None:
    of_rows = torch.empty(33, 4096, device="cuda")
    assert ops._backend(of_rows, of_rows[0]).launches
    assert ops._backend(of_rows, of_rows, of_rows[0]).launches
    assert not ops._backend(of_rows.t(), of_rows[:, 0]).launches
