"""The passes of an RMS norm: autograd's gradients of eager ops, and kernels with their bits."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from blocktensor.ops.norm import ops, reference
from tests.support.models import randn
from tests.support.numeric import DTYPES, assert_same

KINDS = ["llama", "gemma"]
SHAPES = [(0, 64), (1, 1), (5, 127), (127, 129), (129, 576), (3, 10944), (70, 4096)]
LIST = [*SHAPES, (2, 35, 192), (192,)]


def operands(
    shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | str = "cpu"
) -> tuple[Tensor, Tensor, Tensor]:
    """An x of rows from tiny to huge, the weight, and the gradient of the norm."""
    x = randn(*shape, seed=1)
    for i, size in enumerate((1e-30, 1e-12, 1e-4, 1.0, 300.0, 0.0)):
        x.view(-1, shape[-1])[i::7] *= size
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
    got = ops.gradients(grad, x, rstd, weight, kind, True, True)
    for a, b in zip(got, wanted, strict=True):
        assert a is not None
        assert_same(a, b)
    for needs in ((True, False), (False, True)):
        one = ops.gradients(grad, x, rstd, weight, kind, *needs)
        assert [t is not None for t in one] == list(needs)
        for a, b in zip(one, wanted, strict=True):
            if a is not None:
                assert_same(a, b)
    assert ops.gradients(grad, x, rstd, weight, kind, False, False) == (None, None)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", LIST)
def test_gradients_are_those_of_autograd(
    shape: tuple[int, ...], kind: Any, dtype: torch.dtype, device: torch.device
) -> None:
    assert_autograds(*operands(shape, dtype, device), kind)


@pytest.mark.parametrize("kind", KINDS)
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


@pytest.mark.parametrize("kind", KINDS)
def test_nan_and_inf(kind: Any, device: torch.device) -> None:
    x, weight, grad = operands((40, 200), torch.bfloat16, device)
    x[3, 5], x[4, 6], grad[5, 7] = float("nan"), float("inf"), float("inf")
    assert_autograds(x, weight, grad, kind)


def same(got: Tensor, want: Tensor) -> None:
    """The same bits, in the interpreter of this process."""
    assert (got.dtype, got.shape) == (want.dtype, want.shape)
    bits = {2: torch.int16, 4: torch.int32}[got.itemsize]
    assert torch.equal(got.view(bits), want.view(bits))


def check_kernels(device: str) -> int:
    """Compare the kernels with the reference; how many results were compared."""
    from blocktensor.ops.norm import triton_passes

    count = 0
    of_interpreter = [(1, 1), (5, 127), (37, 129), (18, 576), (3, 10944), (2, 4096)]
    for shape in of_interpreter if device == "cpu" else [*SHAPES, (4099, 8192)]:
        # the interpreter does not round to bf16, but cuts
        for dtype in DTYPES if device == "cuda" else [torch.float16, torch.float32]:
            x, weight, grad = operands(shape, dtype, device)
            rstd, of_mean = (randn(shape[0], 1, seed=i).to(device).abs() for i in (5, 6))
            same(triton_passes.squares(x), reference.squares(x))
            for kind in ("llama", "gemma"):
                for wanted in (True, False):
                    args: Any = grad, x, rstd, weight, kind, wanted
                    got, want = triton_passes.gradient_terms(*args), reference.gradient_terms(*args)
                    assert (got[1] is None) == (want[1] is None) == (not wanted)
                    for a, b in zip(got, want, strict=True):
                        if a is not None and b is not None:
                            same(a, b)
                args = x, rstd, weight, kind
                same(triton_passes.normalize(*args), reference.normalize(*args))
                args = grad, x, rstd, of_mean, weight, kind
                same(triton_passes.input_gradient(*args), reference.input_gradient(*args))
                count += 6
    return count


def test_kernels_in_triton_s_interpreter() -> None:
    pytest.importorskip("triton")
    code = (
        "from blocktensor.ops.runtime.launch import Launch\n"
        "Launch.__call__ = lambda self: self.kernel[self.grid](*self.args, **self.constants)\n"
        "from tests.ops.norm.test_norm_passes import check_kernels\n"
        "print(check_kernels('cpu'))"
    )
    root = Path(__file__).parents[3]
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=root,
        env={**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(root)},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) == 144


@pytest.mark.gpu
def test_kernels_on_a_gpu() -> None:
    assert ops._backend(torch.empty(1, device="cuda")).launches
    assert check_kernels("cuda") == 288
