"""Every spelling of a product with an FP8 operand: the ONE rule, or a loud refusal."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from blocktensor import (
    BlockwiseFP8Tensor,
    BlockwiseFP8Weight,
    functional,
    to_blockwise_fp8_weights,
)
from tests.support.models import (
    Trace,
    assert_matches,
    both_kinds,
    complaint,
    composed,
    linear,
    plain,
    randn,
)
from tests.support.numeric import relative_error

# Every spelling of a product

SPELLINGS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "F.linear": lambda x, w: F.linear(x, w),
    "F.linear with names": lambda x, w: F.linear(input=x, weight=w, bias=None),
    "functional.linear": lambda x, w: functional.linear(x, w),
    "mm": lambda x, w: torch.mm(x, w.t()),
    "Tensor.mm": lambda x, w: x.mm(w.t()),
    "matmul": lambda x, w: torch.matmul(x, w.T),
    "Tensor.matmul": lambda x, w: x.matmul(w.mT),
    "@": lambda x, w: x @ w.transpose(0, 1),
    "transpose(-1, -2)": lambda x, w: x @ w.transpose(-1, -2),
    "permute": lambda x, w: x @ w.permute(1, 0),
    "swapaxes": lambda x, w: x @ w.swapaxes(0, 1),
    "t().t().t()": lambda x, w: x @ w.t().t().t(),
    "contiguous": lambda x, w: F.linear(x, w.contiguous()),
    "detached bias": lambda x, w: torch.addmm(x.new_zeros(w.shape[0]), x, w.t()),
    "Tensor.addmm": lambda x, w: x.new_zeros(w.shape[0]).addmm(x, w.t()),
    "__rmatmul__": lambda x, w: w.t().__rmatmul__(x),
    "on the left": lambda x, w: (w @ x.t()).t(),
    "mm on the left": lambda x, w: torch.mm(w, x.t()).t(),
    "on the left of a batch": lambda x, w: (w @ x.t()[None])[0].t(),
    "alias": lambda x, w: F.linear(x, torch.ops.aten.alias(w)),
}


@pytest.mark.parametrize("kind", ["weight", "tensor"])
@pytest.mark.parametrize("spelling", SPELLINGS)
def test_every_spelling_of_x_wt(spelling: str, kind: str, device: torch.device) -> None:
    x, values = randn(5, 384, device=device, grad=True), randn(256, 384, seed=1, device=device)
    grad, w = randn(5, 256, seed=3, device=device), both_kinds(values)[kind]
    y = SPELLINGS[spelling](x, w)
    y.backward(grad)
    wanted_y, wanted_dx, wanted_dw = composed(x.detach(), values, grad)
    assert type(y) is Tensor
    assert_matches(y.detach(), wanted_y)
    assert_matches(x.grad, wanted_dx)
    if kind == "weight":
        assert_matches(w.grad, wanted_dw)


@pytest.mark.parametrize("kind", ["weight", "tensor"])
@pytest.mark.parametrize("lead", [(), (5,), (2, 5), (2, 1, 5)])
def test_x_w_reads_the_columnwise_weight(lead: tuple[int, ...], kind: str) -> None:
    x, values = randn(*lead, 256, grad=True), randn(256, 384, seed=1)
    grad, w = randn(*lead, 384, seed=3), both_kinds(values)[kind]
    y = x @ w
    y.backward(grad)
    rows = x.detach().reshape(-1, 256)
    wanted_y, wanted_dx, wanted_dw = composed(rows, values.t(), grad.reshape(-1, 384))
    assert torch.equal(y, wanted_y.view(*lead, 384))
    assert torch.equal(x.grad, wanted_dx.view(*lead, 256))
    assert kind == "tensor" or torch.equal(w.grad, wanted_dw.t())


def test_products_of_two_fp8_operands() -> None:
    x, values = randn(5, 384), randn(256, 384, seed=1)
    fp8 = BlockwiseFP8Tensor.from_values(x)
    wanted = composed(x, values, randn(5, 256))[0]
    for w in both_kinds(values).values():
        for spelling in ("F.linear", "mm", "@", "detached bias", "functional.linear"):
            if spelling == "detached bias":
                y = torch.addmm(torch.zeros(256, dtype=x.dtype), fp8, w.t())
            else:
                y = SPELLINGS[spelling](fp8, w)
            assert torch.equal(y, wanted)
        assert torch.equal(torch.mm(w, fp8.t()).t(), wanted)


@pytest.mark.parametrize("kind", ["weight", "tensor"])
@pytest.mark.parametrize("bias_shape", [(256,), (5, 256), (1, 256), (5, 1), ()])
@pytest.mark.parametrize(("beta", "alpha"), [(1, 1), (0.5, 1), (1, 2), (0, 3)])
def test_addmm(bias_shape: tuple[int, ...], beta: float, alpha: float, kind: str) -> None:
    x, values = (randn(*s, seed=s[0], dtype=torch.float32) for s in ((5, 384), (256, 384)))
    w, bias = both_kinds(values)[kind], randn(*bias_shape, seed=4, dtype=torch.float32, grad=True)
    x.requires_grad_()
    with Trace() as trace:
        y = torch.addmm(bias, x, w.t(), beta=beta, alpha=alpha)
    assert trace.count("blocktensor.gemm") == trace.count("aten.addmm") + trace.count("mm") == 1
    product, dx, dw = composed(x.detach(), values, alpha * torch.ones(5, 256))
    torch.testing.assert_close(y, alpha * product + beta * bias)
    y.sum().backward()
    torch.testing.assert_close(bias.grad, torch.full_like(bias, beta * 5 * 256 / bias.numel()))
    torch.testing.assert_close(x.grad, dx)
    assert kind == "tensor" or torch.equal(w.grad, dw)


@pytest.mark.parametrize("kind", ["weight", "tensor"])
@pytest.mark.parametrize("product", [torch.mv, torch.matmul, lambda w, v: w @ v, Tensor.mv])
def test_products_with_a_vector(product: Callable[..., Tensor], kind: str) -> None:
    """Of a row of activations, as linears multiply it."""
    values = randn(256, 384, dtype=torch.float32)
    w = both_kinds(values)[kind]
    for weight, size in ((w, 384), (w.t(), 256)):
        v = randn(size, seed=2, dtype=torch.float32, grad=True)
        y = product(weight, v)
        leaf = v.detach().requires_grad_()
        wanted = F.linear(leaf, weight)
        assert torch.equal(y, wanted)
        (dv,), (dleaf,) = torch.autograd.grad(y.sum(), v), torch.autograd.grad(wanted.sum(), leaf)
        assert torch.equal(dv, dleaf)


@pytest.mark.parametrize(
    "register",
    [torch.nn.utils.spectral_norm, torch.nn.utils.parametrizations.spectral_norm],
    ids=["hook", "parametrization"],
)
def test_spectral_norm_of_a_converted_linear(register: Callable[[nn.Module], nn.Module]) -> None:
    """Its power iteration multiplies the weight by vectors."""
    torch.manual_seed(0)
    module, twin = nn.Linear(384, 256, bias=False), nn.Linear(384, 256, bias=False)
    twin.load_state_dict(module.state_dict())
    to_blockwise_fp8_weights(module)
    x = randn(5, 384, dtype=torch.float32)
    for each in (module, twin):
        torch.manual_seed(1)
        register(each)
    with Trace() as trace:
        y = module(x)
    assert trace.count("blocktensor.gemm") > 2
    assert relative_error(y, twin(x)) < 0.08


# Refused: a product that would run in high precision, or lose the weight's FP8 gradient

V = randn(256, seed=5, dtype=torch.float32)
P = randn(4, 256, seed=6, dtype=torch.float32, grad=True)


def stack(w: Tensor) -> Tensor:
    return nn.Parameter(BlockwiseFP8Weight(plain(w)[None]))


PRODUCTS: dict[str, Callable[[Tensor], Any]] = {
    "addmv": lambda w: torch.addmv(V, w, V),
    "bmm": lambda w: torch.bmm(stack(w), stack(w)),
    "baddbmm": lambda w: torch.baddbmm(P[None], stack(w), stack(w)),
    "addbmm": lambda w: torch.addbmm(P, P[None], stack(w)),
    "einsum": lambda w: torch.einsum("ij,kj->ik", P, w),
    "tensordot": lambda w: torch.tensordot(P, w, 1),
    "inner": lambda w: torch.inner(P, w),
    "linalg.matmul": lambda w: torch.linalg.matmul(P, w),
    "multi_dot": lambda w: torch.linalg.multi_dot([P, w]),
    "addbmm_": lambda w: P.detach().clone().addbmm_(P.detach()[None], stack(w)),
    "@ stack": lambda w: w @ stack(w),
    "sparse.mm": lambda w: torch.sparse.mm(P, w),
    "bilinear": lambda w: F.bilinear(P, P, stack(w)),
    "conv1d": lambda w: F.conv1d(P[:, :, None], stack(w).mT),
    "a stack @": lambda w: P @ stack(w),
    "rnn cell": lambda w: torch.rnn_tanh_cell(P, P, w, w),
    "aten.linear": lambda w: torch.ops.aten.linear(P, w),
    "aten.mm": lambda w: torch.ops.aten.mm(P, w),
    "multihead": lambda w: F.multi_head_attention_forward(
        *[P[:, None]] * 3, 256, 4, torch.ones(768, 256), None, None, None, False, 0.0, w, None
    ),
    "grouped_mm": lambda w: F.grouped_mm(P.bfloat16(), w.bfloat16(), offs=torch.tensor([4])),
    "_grouped_mm": lambda w: torch._grouped_mm(P.bfloat16(), w.bfloat16(), offs=torch.tensor([4])),
}


@pytest.mark.parametrize("name", PRODUCTS)
def test_no_product_with_a_weight_is_silently_in_high_precision(name: str) -> None:
    w = nn.Parameter(BlockwiseFP8Weight(randn(256, 256, seed=1, dtype=torch.float32)))
    with pytest.raises(NotImplementedError):
        PRODUCTS[name](w)


def test_what_a_refused_product_says() -> None:
    w = linear(256, 256, dtype=torch.float32).weight
    for product in ("addmv", "aten.mm", "grouped_mm"):
        text = complaint(NotImplementedError, lambda product=product: PRODUCTS[product](w))
        assert "FP8" in text
        assert any(remedy in text for remedy in ("F.linear", ".high_precision()", "grouped"))


READS: dict[str, Callable[[Tensor], Any]] = {
    "from_dlpack": lambda t: torch.from_dlpack(t),
    "numpy": lambda t: torch.from_numpy(t.numpy()),
    "__array__": lambda t: torch.from_numpy(np.asarray(t)),
    "tolist": lambda t: torch.tensor(t.tolist()),
}


@pytest.mark.parametrize("read", READS)
def test_values_are_read_from_the_master(read: str) -> None:
    weight = linear(128, 256, dtype=torch.float32).weight
    for tensor in (weight.detach(), weight.data, weight.detach().t()):
        values = READS[read](tensor)
        assert type(values) is Tensor
        assert torch.equal(values, plain(tensor))
    if read != "tolist":
        with pytest.raises((RuntimeError, BufferError), match=r"requires? grad"):
            READS[read](weight)
    frozen = linear(128, 256, frozen=True).weight
    with pytest.raises(NotImplementedError, match=r"holds no high-precision .*dequantize"):
        READS[read](frozen)


@pytest.mark.parametrize("kind", ["trainable", "frozen"])
def test_what_reads_memory_in_c_raises(kind: str) -> None:
    """The pointer of a wrapper is null: a read would end the process."""
    tensor = linear(128, 256, frozen=kind == "frozen").weight.detach()
    for reader in (torch.utils.dlpack.to_dlpack, lambda t: t.apply_(float), torch.nn.Parameter):
        for made in (tensor, tensor.t(), tensor[:128]):
            if reader is torch.nn.Parameter:
                assert isinstance(reader(made), torch.nn.Parameter)
            else:
                with pytest.raises(RuntimeError, match="data pointer"):
                    reader(made)


def test_the_address_of_a_weight_is_that_of_its_master() -> None:
    weight = linear(128, 256).weight
    assert weight.data_ptr() == weight.master.data_ptr() != 0
    assert weight[3:].data_ptr() == weight.master[3:].data_ptr()
    with pytest.raises(NotImplementedError, match=r"no memory of its own: take \.rowwise_data"):
        linear(128, 256, frozen=True).weight.data_ptr()
