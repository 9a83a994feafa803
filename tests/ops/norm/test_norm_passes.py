"""The passes of an RMS norm: autograd's gradients of eager ops, and kernels with their bits."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from blocktensor.ops.norm import ops, reference
from tests.support.interpreter import interpreted
from tests.support.models import randn
from tests.support.numeric import DTYPES, assert_same

every_kind = pytest.mark.parametrize("kind", ["llama", "gemma"])
SHAPES = [(0, 64), (1, 1), (5, 127), (127, 129), (129, 576), (3, 10944), (70, 4096)]


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
    """Gradients of the passes are those that autograd makes of the eager ops."""
    leaf, gain = x.detach().requires_grad_(), nn.Parameter(weight)
    y = reference.rms_norm(leaf, gain, 1e-6, kind)
    wanted = torch.autograd.grad(y, (leaf, gain), grad)
    rstd = ops.rstd_of(x, 1e-6)
    assert_same(rstd, torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + 1e-6))
    assert_same(ops.normalize(x, rstd, weight, kind), y.detach())
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


def check_kernels(device: str) -> int:
    """Compare the kernels with the reference; how many results were compared."""
    from blocktensor.ops.norm import triton_passes

    def check(name: str, *args: Any) -> None:
        got, want = (getattr(module, name)(*args) for module in (triton_passes, reference))
        for a, b in zip(tree_leaves(got), tree_leaves(want), strict=True):
            assert (a is None) == (b is None)
            if b is not None:
                assert_same(a, b)

    count = 0
    of_interpreter = [(1, 1), (5, 127), (9, 1025), (2, 2048)]  # around tiles of 4x1024
    shapes = of_interpreter if device == "cpu" else [*SHAPES, (4099, 8192)]
    for shape, dtype in itertools.product(shapes, DTYPES):
        x, weight, grad = operands(shape, dtype, device)
        x, grad = (t.repeat_interleave(n, 0)[::n] for t, n in ((x, 2), (grad, 3)))  # rows apart
        rstd, of_mean = (randn(shape[0], 1, seed=i).to(device).abs() for i in (5, 6))
        check("squares", x)
        for kind in ("llama", "gemma"):
            for wanted in (True, False):
                check("gradient_terms", grad, x, rstd, weight, kind, wanted)
            check("normalize", x, rstd, weight, kind)
            check("input_gradient", grad, x, rstd, of_mean, weight, kind)
            count += 4
    return count


@interpreted
def test_kernels_in_the_interpreter() -> None:
    assert check_kernels("cpu") == 4 * 3 * 8


@pytest.mark.gpu
def test_kernels_on_a_gpu() -> None:
    assert ops._backend(torch.empty(1, device="cuda")).launches
    assert check_kernels("cuda") == 8 * 3 * 8
