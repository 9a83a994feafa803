"""``functional.rms_norm``: torch's norm, and the norms of transformers with their bits."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from expecttest import assert_expected_inline
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, init_device_mesh

from blocktensor import BlockwiseFP8Weight, functional
from tests.support.asserts import refused
from tests.support.linear_ways import saved_by
from tests.support.models import randn
from tests.support.numeric import DTYPES, assert_same, relative_error

K = 192
EPS = 2.0**-23
BF16, FP32 = torch.bfloat16, torch.float32


def llama(x: Tensor, weight: Tensor, eps: float = EPS) -> Tensor:
    """As transformers' LlamaRMSNorm writes it."""
    y = x.float()
    y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + eps)
    return weight * y.to(x.dtype)


def gemma(x: Tensor, weight: Tensor, eps: float = EPS) -> Tensor:
    """As transformers' GemmaRMSNorm writes it."""
    y = x.float()
    y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + eps)
    return (y * (1.0 + weight.float())).type_as(x)


WRITTEN_OUT: Any = {"llama": llama, "gemma": gemma}
every_kind = pytest.mark.parametrize("kind", WRITTEN_OUT)


def gradients(run: Callable[..., Tensor], *operands: Tensor) -> list[Tensor]:
    """The norm, and the gradients of its operands."""
    y = run(*operands)
    grad = randn(*y.shape, seed=9).to(y)
    return [y.detach(), *torch.autograd.grad(y, operands, grad)]


def operands(dtype: torch.dtype = BF16, device: Any = "cpu") -> tuple[Tensor, Tensor]:
    """Rows of several sizes, where the epsilon counts and where it does not; and a weight."""
    x = randn(3, 50, K, dtype=FP32, device=device)
    x[:, ::2] *= 1e-3
    weight = randn(K, seed=1, dtype=dtype, device=device, grad=True)
    return x.to(dtype).requires_grad_(), weight


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("eps", [None, 1e-6, 0])
def test_torchs_norm(eps: float | None, dtype: torch.dtype, device: torch.device) -> None:
    x, weight = operands(dtype, device)
    assert torch.equal(functional.rms_norm(x, eps=eps), F.rms_norm(x, (K,), None, eps))
    got = gradients(lambda x, w: functional.rms_norm(x, w, eps), x, weight)
    want = gradients(lambda x, w: F.rms_norm(x, (K,), w, eps), x, weight)
    assert all(map(torch.equal, got, want))


@every_kind
@pytest.mark.parametrize("dtype", DTYPES)
def test_bits_of_transformers(dtype: torch.dtype, kind: Any, device: torch.device) -> None:
    """With torch's default epsilon; without a weight, and with one."""
    x, weight = operands(dtype, device)
    got = gradients(lambda x, w: functional.rms_norm(x, w, kind=kind), x, weight)
    for a, b in zip(got, gradients(WRITTEN_OUT[kind], x, weight), strict=True):
        assert_same(a, b)
    nothing = weight.new_full((K,), kind == "llama")
    torch.testing.assert_close(
        functional.rms_norm(x, kind=kind), WRITTEN_OUT[kind](x, nothing), rtol=2**-7, atol=0
    )


@every_kind
def test_a_norm_saves_its_input_and_a_number_for_each_row(kind: Any) -> None:
    x, weight = operands()
    saved = saved_by(lambda: functional.rms_norm(x, weight, kind=kind))
    assert [(t.shape, t.dtype) for t in saved] == [
        (x.shape, BF16),
        ((150, 1), FP32),
        (weight.shape, BF16),
    ]


@pytest.mark.parametrize("kind", ["torch", "llama", "gemma"])
def test_linear_layers_share_one_cast(kind: Any) -> None:
    x, weight = operands()
    ws = [randn(64, K, seed=seed, grad=True) for seed in (3, 4)]

    def apart(x: Tensor, weight: Tensor, *ws: Tensor) -> Tensor:
        y = functional.rms_norm(x, weight, kind=kind)
        return sum(functional.linear(y, w) for w in ws)  # type: ignore[return-value]

    def shared(x: Tensor, weight: Tensor, *ws: Tensor) -> Tensor:
        y = functional.quantize(functional.rms_norm(x, weight, kind=kind))
        return sum(functional.linear(y, w) for w in ws)  # type: ignore[return-value]

    want, got = (gradients(run, x, weight, *ws) for run in (apart, shared))
    assert all(map(torch.equal, got, want))
    saved = saved_by(lambda: shared(x, weight, *ws))
    casts = {t.data_ptr() for t in saved if t.dtype == torch.float8_e4m3fn and len(t) == K}
    assert len(casts) == 1


@every_kind
def test_compiled(kind: Any) -> None:
    x, weight = operands()
    run = torch.compile(
        lambda x, w: functional.rms_norm(x, w, kind=kind), backend="aot_eager", fullgraph=True
    )
    assert all(map(torch.equal, gradients(run, x, weight), gradients(WRITTEN_OUT[kind], x, weight)))


@every_kind
@pytest.mark.usefixtures("group")
def test_tensors_that_run_as_written_out(kind: Any) -> None:
    """Under torch.func, of a DTensor, and of an FP8 weight as input."""
    x, weight = (t.detach() for t in operands())
    want = WRITTEN_OUT[kind](x, weight)
    assert torch.equal(
        torch.func.vmap(lambda x: functional.rms_norm(x, weight, kind=kind))(x), want
    )
    mesh = init_device_mesh("cpu", (1,))
    d, w = (DTensor.from_local(t, mesh, [Replicate()]) for t in (x, weight))
    made: Any = functional.rms_norm(d, w, kind=kind)
    assert torch.equal(made.to_local(), want)
    of_master = functional.rms_norm(BlockwiseFP8Weight(x[0]), weight, kind=kind)
    assert torch.equal(of_master, want[0])


@every_kind
def test_second_derivatives_raise(kind: Any) -> None:
    x, weight = operands()
    y = functional.rms_norm(x, weight, kind=kind).sum()
    with pytest.raises(NotImplementedError, match="create_graph"):
        torch.autograd.grad(y, x, create_graph=True)


def test_a_weight_of_another_dtype_is_torchs() -> None:
    x, weight = operands()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Mismatch dtype")  # once a process
        made = functional.rms_norm(x, weight.float())
    assert made.dtype == BF16
    assert relative_error(made, functional.rms_norm(x, weight)) <= 2**-8


def test_bad_input() -> None:
    x, w = randn(5, K), randn(K)
    other: Any = "rms"
    assert_expected_inline(
        refused(
            lambda: functional.rms_norm(x, w, kind=other),
            lambda: functional.rms_norm(x, (K,), w),  # type: ignore[arg-type]
            lambda: functional.rms_norm([1.0], w),  # type: ignore[arg-type]
            lambda: functional.rms_norm(x, w, w),  # type: ignore[arg-type]
            lambda: functional.rms_norm(x.double(), w),
            lambda: functional.rms_norm(torch.tensor(1.0), w),
            lambda: functional.rms_norm(x, w[1:]),
            lambda: functional.rms_norm(x, w.to("meta")),
            lambda: functional.rms_norm(x, w.float(), kind="llama"),
            lambda: functional.rms_norm(functional.quantize(x), w, kind="llama"),
            lambda: functional.rms_norm(functional.quantize(x), w),
        ),
        """\
ValueError: kind='rms': expected one of torch, llama, gemma
TypeError: weight is a tuple: expected a tensor
TypeError: x is a list: expected a tensor
TypeError: eps is a Tensor: expected a number or None
TypeError: the input of rms_norm has dtype torch.float64: blocktensor casts torch.bfloat16,
  torch.float16 and torch.float32 to FP8; convert it first, e.g. .to(torch.bfloat16)
ValueError: the input of rms_norm is a scalar: expected shape [..., K]
ValueError: the weight of rms_norm has shape [191]: expected [192], a number for each feature of
  the input
ValueError: the input of rms_norm is on cpu and the weight on meta: move them to one device
TypeError: the input of rms_norm is torch.bfloat16 and the weight torch.float32: convert one of
  them; kind='torch' alone takes both
NotImplementedError: aten.pow.Tensor_Scalar is not implemented for BlockwiseFP8Tensor, which
  keeps its values in FP8: call .dequantize() first to work on a plain tensor
NotImplementedError: aten.pow.Tensor_Scalar is not implemented for BlockwiseFP8Tensor, which
  keeps its values in FP8: call .dequantize() first to work on a plain tensor""",
    )
