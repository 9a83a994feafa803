"""Every spelling of a product with an FP8 operand, and functions that answer by their caller."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from blocktensor import BlockwiseFP8Weight, functional, quantize
from tests.support.models import (
    Trace,
    assert_matches,
    both_kinds,
    complaint,
    composed,
    linear,
    pair,
    plain,
    randn,
)
from tests.support.numeric import relative_error
from tests.support.steps import assert_bits, step

kinds = pytest.mark.parametrize("kind", ["weight", "tensor"])


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


@kinds
@pytest.mark.parametrize("spelling", SPELLINGS)
def test_every_spelling_of_x_wt(spelling: str, kind: str, device: torch.device) -> None:
    x, values = randn(5, 384, device=device), randn(256, 384, seed=1, device=device)
    w = both_kinds(values)[kind]
    made = step(lambda x: SPELLINGS[spelling](x, w), x, of=[w])
    wanted = composed(x, values, randn(5, 256, seed=7, device=device))
    assert type(made[0]) is Tensor
    for got, want in zip(made[: 3 if kind == "weight" else 2], wanted, strict=False):
        assert_matches(got, want)


@kinds
@pytest.mark.parametrize("lead", [(), (5,), (2, 5), (2, 1, 5)])
def test_x_w_reads_the_columnwise_weight(lead: tuple[int, ...], kind: str) -> None:
    x, values, grad = randn(*lead, 256), randn(256, 384, seed=1), randn(*lead, 384, seed=7)
    w = both_kinds(values)[kind]
    y, dx, dw = composed(x.reshape(-1, 256), values.t(), grad.reshape(-1, 384))
    wanted = [y.view(*lead, 384), dx.view(*lead, 256), dw.t() if kind == "weight" else None]
    assert_bits(step(lambda x: x @ w, x, of=[w]), wanted)


@kinds
def test_products_of_two_fp8_operands(kind: str) -> None:
    x, values = randn(5, 384), randn(256, 384, seed=1)
    fp8, w = quantize(x), both_kinds(values)[kind]
    wanted, *_ = composed(x, values, randn(5, 256))
    products = [SPELLINGS[name](fp8, w) for name in ("F.linear", "mm", "@", "functional.linear")]
    sums = torch.addmm(x.new_zeros(256), fp8, w.t()), torch.addmm(x.new_zeros(5), w, fp8.t()).t()
    with torch.no_grad():  # not a weight by itself
        products += [fp8 @ w.t(), torch.mm(fp8, w.t())]
    assert all(torch.equal(y, wanted) for y in (*products, *sums, torch.mm(w, fp8.t()).t()))


@kinds
@pytest.mark.parametrize("bias_shape", [(256,), (5, 256), (1, 256), (5, 1), ()])
@pytest.mark.parametrize(("beta", "alpha"), [(1, 1), (0.5, 1), (1, 2), (0, 3)])
def test_addmm(bias_shape: tuple[int, ...], beta: float, alpha: float, kind: str) -> None:
    x, values = (randn(*s, seed=s[0], dtype=torch.float32) for s in ((5, 384), (256, 384)))
    w, bias = both_kinds(values)[kind], randn(*bias_shape, seed=4, dtype=torch.float32, grad=True)
    product, dx, dw = composed(x, values, alpha * torch.ones(5, 256))
    x.requires_grad_()
    with Trace() as trace:
        y = torch.addmm(bias, x, w.t(), beta=beta, alpha=alpha)
    assert trace.count("blocktensor.gemm") == trace.count("aten.addmm") + trace.count("mm") == 1
    torch.testing.assert_close(y, alpha * product + beta * bias)
    y.sum().backward()
    torch.testing.assert_close(bias.grad, torch.full_like(bias, beta * 5 * 256 / bias.numel()))
    torch.testing.assert_close(x.grad, dx)
    assert kind == "tensor" or torch.equal(w.grad, dw)


@kinds
@pytest.mark.parametrize("product", [torch.mv, torch.matmul, lambda w, v: w @ v, Tensor.mv])
def test_products_with_a_vector(product: Callable[..., Tensor], kind: str) -> None:
    w = both_kinds(randn(256, 384, dtype=torch.float32))[kind]
    for weight in (w, w.t()):
        v = randn(weight.shape[1], seed=2, dtype=torch.float32, grad=True)
        y, wanted = product(weight, v), F.linear(v, weight)
        assert torch.equal(y, wanted)
        assert torch.equal(*(torch.autograd.grad(each.sum(), v)[0] for each in (y, wanted)))


@pytest.mark.parametrize("module", ["torch.nn.utils", "torch.nn.utils.parametrizations"])
def test_spectral_norm_of_a_converted_linear(module: str) -> None:
    """Its power iteration multiplies the weight by vectors."""
    models, register = pair(256, 384), importlib.import_module(module).spectral_norm
    for model in models:
        torch.manual_seed(1)
        register(model)
    x = randn(5, 384, dtype=torch.float32)
    with Trace() as trace:
        wanted, y = (model(x) for model in models)
    assert trace.count("blocktensor.gemm") > 2
    assert relative_error(y, wanted) < 0.08


V = randn(256, seed=5, dtype=torch.float32)
P = randn(4, 256, seed=6, dtype=torch.float32, grad=True)


def stack(w: Tensor) -> Tensor:
    return nn.Parameter(BlockwiseFP8Weight(plain(w)[None]))


PRODUCTS: dict[str, Callable[[Tensor], Any]] = {
    "addmv": lambda w: torch.addmv(V, w, V),
    "tensordot": lambda w: torch.tensordot(P, w, 1),
    "inner": lambda w: torch.inner(P, w),
    "linalg.matmul": lambda w: torch.linalg.matmul(P, w),
    "multi_dot": lambda w: torch.linalg.multi_dot([P, w]),
    "addbmm_": lambda w: P.detach().clone().addbmm_(P.detach()[None], stack(w)),
    "@ stack": lambda w: w @ stack(w),
    "tokens @ a vector": lambda w: quantize(P) @ V,
    "tokens @ a batch": lambda w: quantize(P) @ V[None, :, None],
    "@ a scalar": lambda w: w @ V[0],
    "bmm of a matrix": lambda w: torch.bmm(P, stack(w)),
    "bmm by a matrix": lambda w: torch.bmm(stack(w), P.t()),
    "sparse.mm": lambda w: torch.sparse.mm(P, w),
    "bilinear": lambda w: F.bilinear(P, P, stack(w)),
    "conv1d": lambda w: F.conv1d(P[:, :, None], stack(w).mT),
    "conv_tbc": lambda w: torch.conv_tbc(P[None], stack(w), V),
    "rnn cell": lambda w: torch.rnn_tanh_cell(P, P, w, w),
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
    text = complaint(NotImplementedError, lambda: PRODUCTS[name](w))
    if name in ("addmv", "aten.mm", "grouped_mm"):
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
    weight, frozen = (linear(128, 256, dtype=torch.float32, frozen=f).weight for f in (False, True))
    for tensor in (weight.detach(), weight.data, weight.detach().t()):
        values = READS[read](tensor)
        assert type(values) is Tensor
        assert torch.equal(values, plain(tensor))
    if read != "tolist":
        with pytest.raises((RuntimeError, BufferError), match=r"requires? grad"):
            READS[read](weight)
    with pytest.raises(NotImplementedError, match=r"holds no high-precision .*dequantize"):
        READS[read](frozen)


@pytest.mark.parametrize("frozen", [False, True])
def test_what_reads_memory_in_c_raises(frozen: bool) -> None:
    """The pointer of a wrapper is null: a read would end the process."""
    tensor = linear(128, 256, frozen=frozen).weight.detach()
    for made in (tensor, tensor.t(), tensor[:128]):
        assert isinstance(nn.Parameter(made), nn.Parameter)
        for reader in (torch.utils.dlpack.to_dlpack, lambda t: t.apply_(float)):
            with pytest.raises(RuntimeError, match="data pointer"):
                reader(made)


def test_the_address_of_a_weight_is_that_of_its_master() -> None:
    weight = linear(128, 256).weight
    assert weight.data_ptr() == weight.master.data_ptr() != 0
    assert weight[3:].data_ptr() == weight.master[3:].data_ptr()
    with pytest.raises(NotImplementedError, match=r"no memory of its own: take \.rowwise_data"):
        linear(128, 256, frozen=True).weight.data_ptr()


N, K = 128, 192


@pytest.mark.parametrize("detached", [False, True])
def test_a_new_parameter_of_a_weight_has_nothing_that_hangs_on_it(detached: bool) -> None:
    weight, seen = linear(N, K).weight, []
    weight.register_post_accumulate_grad_hook(seen.append)
    weight.register_hook(seen.append)
    weight.tag = "mine"
    param = weight.detach() if detached else weight  # as ``nn.Module._apply`` calls its own
    made = nn.Parameter(param)
    assert not hasattr(made, "tag")
    nn.functional.linear(randn(3, K), made).sum().backward()
    assert made.grad is not None
    assert seen == []


DISTRIBUTED: dict[str, Callable[[nn.Linear, DeviceMesh], Any]] = {
    "rows": lambda m, mesh: distribute_tensor(m.weight, mesh, [Shard(0)]),
    "columns": lambda m, mesh: distribute_tensor(m.weight.detach(), mesh, [Shard(1)]),
    "replicas": lambda m, mesh: distribute_tensor(m.weight, mesh, [Replicate()]),
    "a module": lambda m, mesh: distribute_module(m, mesh),
    "column parallel": lambda m, mesh: parallelize_module(m, mesh, ColwiseParallel()),
    "row parallel": lambda m, mesh: parallelize_module(m, mesh, RowwiseParallel()),
    "from_local": lambda m, mesh: DTensor.from_local(
        m.weight, mesh, [Replicate()], run_check=True, shape=m.weight.shape, stride=(K, 1)
    ),
}


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("way", DISTRIBUTED)
def test_tensor_parallel_is_refused_and_changes_nothing(way: str, frozen: bool) -> None:
    module, mesh = linear(N, K, frozen=frozen), init_device_mesh("cpu", (1,))
    weight, wanted = module.weight, module(randn(3, K))
    with pytest.raises(NotImplementedError, match=r"^distribute_tensor of an FP8 weight \[128, 19"):
        DISTRIBUTED[way](module, mesh)
    assert module.weight is weight
    assert torch.equal(module(randn(3, K)), wanted)


@pytest.mark.usefixtures("group")
def test_a_cast_of_tokens_is_no_stack_that_distribute_tensor_takes() -> None:
    tokens, mesh = quantize(randn(2, 128, K)), init_device_mesh("cpu", (1,))
    said = r"^distribute_tensor of FP8 activations \[2, 128, 192\]: "
    with pytest.raises(NotImplementedError, match=said):
        distribute_tensor(tokens, mesh, [Shard(0)], src_data_rank=None)
    with pytest.raises(NotImplementedError, match=r"c10d\.broadcast_"):
        torch.distributed.broadcast(tokens, 0)


@pytest.mark.usefixtures("group")
def test_a_whole_stack_is_plain_on_one_rank_too() -> None:
    """Several ranks gather it so; its gradient reaches the stack."""
    stack, mesh = linear(N, K).weight[None].detach(), init_device_mesh("cpu", (1,))
    held = nn.Parameter(distribute_tensor(stack, mesh, [Shard(0)]))
    for frozen in (False, True):
        held.requires_grad_(not frozen)
        whole = held.full_tensor()
        assert type(whole) is Tensor
        assert torch.equal(whole, plain(stack))
        assert whole.requires_grad == (not frozen)
    held.requires_grad_().full_tensor().square().sum().backward()
    assert torch.equal(held.grad.to_local(), 2 * plain(stack))


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("evaluates", [False, True])
def test_copies_for_other_gpus_are_refused(evaluates: bool, frozen: bool) -> None:
    """``nn.DataParallel`` makes them in each forward; they would be plain."""
    device = "cpu" if evaluates else "meta"  # training, torch refuses the CPU itself
    module = linear(N, K, frozen=frozen, device=device)
    with pytest.raises(NotImplementedError, match=r"^nn\.DataParallel .*\(torchrun"):
        nn.parallel.replicate(module, [0, 1], detach=evaluates)
    assert not module.weight.is_complex()
