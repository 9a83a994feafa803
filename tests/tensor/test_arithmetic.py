"""Products with weights: layers multiply in FP8, arithmetic on values is in high precision."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from blocktensor import BlockwiseFP8Weight, freeze, functional
from tests.support.compiling import afresh
from tests.support.models import Trace, in_a_layer, linear, plain, randn

__all__ = ["afresh"]
without_gradients = pytest.mark.parametrize("off", [torch.no_grad, torch.inference_mode])

OWN: dict[str, Callable[[Any], Any]] = {
    "p.detach() @ p.T": lambda p: p.detach() @ p.T,
    "in fp32": lambda p: p.data.float() @ p.data.float().T,
    "of a copy": lambda p: (lambda x: x @ x.T)(p.clone()),
    "of a normalised copy": lambda p: (lambda x: x @ x.T)(p / p.norm()),
    "mm": lambda p: torch.mm(p.t(), p),
    "addmm": lambda p: torch.addmm(torch.eye(256, dtype=p.dtype), p, p.t(), beta=-1),
    "F.linear": lambda p: F.linear(p, p),
    "F.linear of a part": lambda p: F.linear(p, p[:128], p[:128, 0]),
    "einsum": lambda p: torch.einsum("ij,ik->jk", p, p),
    "multi_dot": lambda p: torch.linalg.multi_dot([p, p.T, p]),
    "a part": lambda p: p[:128] @ p[:128].T,
    "stacks": lambda p: torch.bmm(p[None], p[None].mT),
    "matmul of stacks": lambda p: p[None].mT @ p[None],
    "matrix_power": lambda p: torch.linalg.matrix_power(p[:, :256].float(), 2),
    "svd_lowrank": lambda p: torch.svd_lowrank(p.float().clone(), 4, niter=1)[1],
}
"""Products of weights alone, as optimizers compute them."""


@without_gradients
@pytest.mark.parametrize("name", OWN)
def test_products_of_weights_alone_are_arithmetic_everywhere(name: str, off: Any) -> None:
    p = linear(256, 384).weight
    runs = [OWN[name], in_a_layer(OWN[name])]
    if off is torch.no_grad and name != "svd_lowrank":  # which draws random numbers
        runs.append(torch.compile(OWN[name], backend="aot_eager", fullgraph=True))
    with off():
        torch.manual_seed(0)
        wanted = OWN[name](plain(p))
        for run in runs:
            torch.manual_seed(0)
            got = run(p)
            assert torch.equal(got, wanted)
            assert type(got) is Tensor


ROTATION, VECTOR = randn(256, 256, seed=1), randn(256, seed=2)

PRODUCTS: dict[str, Callable[[Any, Tensor], Any]] = {
    "r @ p": lambda p, r: r @ p,
    "p @ r, of .data": lambda p, r: p.data @ r,
    "mm, of a transpose": lambda p, r: torch.mm(r, p.data.t()),
    "in fp32": lambda p, r: torch.mm(r.float(), p.data.to(torch.float32)),
    "of a detached part": lambda p, r: torch.matmul(p.detach()[:128], r),
    "addmm": lambda p, r: torch.addmm(p, p, r, alpha=0.5),
    "addmm to a plain tensor": lambda p, r: torch.addmm(r, r, p, beta=2),
    "Tensor.addmm": lambda p, r: r.addmm(p.data, r),
    "bmm": lambda p, r: torch.bmm(r[None], p[None]),
    "baddbmm": lambda p, r: torch.baddbmm(p[None], p[None], r[None]),
    "mv": lambda p, r: torch.mv(p.t(), r[0]),
    "vector @ matrix": lambda p, r: r[0] @ p,
    "F.linear": lambda p, r: F.linear(p, r[:128], r[0, :128]),
    "addmv": lambda p, r: torch.addmv(r[0], p, r[1]),
    "einsum": lambda p, r: torch.einsum("i,ij,j->", r[0], p, r[1]),
    "tensordot": lambda p, r: torch.tensordot(p.data, r, 1),
    "inner": lambda p, r: torch.inner(p, r),
    "multi_dot": lambda p, r: torch.linalg.multi_dot([r, p, r]),
    "out": lambda p, r: torch.mm(r, p, out=torch.empty_like(r)),
    "by names": lambda p, r: torch.mm(input=r, mat2=p),
    "cov": lambda p, r: torch.cov(p) @ r,
    "below autograd": lambda p, r: torch.ops.aten.mm(r, p),
}
"""Products of a weight and a plain tensor, as optimizers, merges and callbacks compute them."""


@without_gradients
@pytest.mark.parametrize("name", PRODUCTS)
def test_products_outside_of_layers_are_arithmetic(name: str, off: Any) -> None:
    p = linear(256, 256).weight
    master = plain(p).clone()
    with off():
        wanted = plain(PRODUCTS[name](plain(p), ROTATION))
        got = PRODUCTS[name](p, ROTATION)
    assert torch.equal(plain(got), wanted)
    assert torch.equal(plain(p), master)


def test_arithmetic_in_another_dtype() -> None:
    p = linear(256, 256).weight
    with torch.no_grad():
        got = torch.mm(ROTATION, p, out_dtype=torch.float32)
    assert torch.equal(got, ROTATION.float() @ plain(p).float())


@pytest.mark.parametrize("name", [x for x in PRODUCTS if x not in ("out", "below autograd")])
def test_a_merge_may_record_the_gradient_of_what_it_merges(name: str) -> None:
    """Peft merges without no_grad: its rotations come from parameters of adapters."""
    p, results = linear(256, 256).weight, []
    for w in (p.data, plain(p)):
        r = ROTATION.clone().requires_grad_()
        y = PRODUCTS[name](w, r)
        y.float().square().sum().backward()
        results.append((plain(y.detach()), r.grad))
    assert all(map(torch.equal, *results))


def test_a_merge_that_is_written_and_undone() -> None:
    p = nn.Parameter(BlockwiseFP8Weight(randn(256, 256, dtype=torch.float32)))
    before, rotation = plain(p).clone(), torch.linalg.qr(ROTATION.float())[0]
    p.data = rotation @ p.data
    assert torch.equal(plain(p), rotation @ before)
    p.data = (rotation.t() @ p.data).contiguous()
    torch.testing.assert_close(plain(p), before)
    assert isinstance(p, BlockwiseFP8Weight)


IN_PLACE: dict[str, Callable[[Any, Tensor], Any]] = {
    "addmm_": lambda p, r: p.addmm_(r, p.clone(), alpha=-0.1),
    "baddbmm_": lambda p, r: p[None].baddbmm_(r[None], p[None].clone()),
    "addbmm_": lambda p, r: p.addbmm_(r[None], p[None].clone()),
    "to a plain tensor": lambda p, r: r.clone().addmm_(p, r),
    "addmv_": lambda p, r: r[0].clone().addmv_(p, r[1]),
    "copy_": lambda p, r: p.copy_(r @ (r.t() @ p)),
}


@pytest.mark.parametrize("name", IN_PLACE)
def test_arithmetic_in_place(name: str) -> None:
    """A write to the master is counted: a backward that waits for the weight raises."""
    p = linear(256, 256).weight
    wanted = plain(p).clone()
    x = randn(5, 256, grad=True)
    loss = F.linear(x, p).sum()
    with torch.no_grad():
        of_plain, of_weight = (IN_PLACE[name](w, ROTATION) for w in (wanted, p))
    assert torch.equal(plain(of_weight), of_plain)
    assert torch.equal(plain(p), wanted)
    if name in ("to a plain tensor", "addmv_"):
        loss.backward()
    else:
        with pytest.raises(RuntimeError, match="modified"):
            loss.backward()


def gemms(run: Callable[..., Any], *args: Any) -> int:
    with Trace() as trace:
        run(*args)
    return trace.count("blocktensor.gemm")


class Direct(nn.Module):
    """Multiplies its weight in its forward, in a method that it calls, and in a hook."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = linear(256, 256).weight
        self.register_forward_hook(lambda module, x, y: y @ self.weight.detach())

    def forward(self, x: Tensor) -> Tensor:
        return self.called(x) @ self.weight

    def called(self, x: Tensor) -> Tensor:
        return x @ self.weight.data


class Function(torch.autograd.Function):
    """Multiplies without gradients, forward and backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(w)
        return x @ w

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0] @ ctx.saved_tensors[0].t(), None


@without_gradients
def test_layers_multiply_in_fp8(off: Any) -> None:
    module, x = Direct(), randn(5, 256)
    w = module.weight
    with off():
        assert gemms(module, x) == 3
        assert gemms(module.forward, x) == 2
        assert gemms(nn.Sequential(in_a_layer(lambda x: w @ x.t())), x) == 1
        assert gemms(Function.apply, x, w) == 1
        assert gemms(F.linear, x, w) == gemms(functional.linear, x, w) == 1
        assert gemms(F.linear, F.linear(x, w), w) == 1
        with pytest.raises(NotImplementedError, match="einsum has no FP8 path"):
            in_a_layer(torch.einsum)("ij,jk->ik", x, w)


def test_layers_multiply_in_fp8_in_backward_and_in_checkpoints() -> None:
    w = linear(256, 256).weight
    x = randn(5, 256, grad=True)
    y = Function.apply(x, w)
    assert gemms(y.sum().backward) == 1
    for reentrant in (True, False):
        run = partial(checkpoint, torch.matmul, use_reentrant=reentrant)
        y = run(x, w)
        assert gemms(run, x, w) == 1
        assert gemms(y.sum().backward) == 3  # the forward again, dgrad, wgrad
        assert torch.equal(y, F.linear(x, w.t()))


def test_compiled_layers_multiply_in_fp8() -> None:
    module, x = Direct(), randn(5, 256)
    with torch.no_grad():
        wanted = module(x)
        assert torch.equal(torch.compile(module, backend="aot_eager")(x), wanted)
        compiled = torch.compile(lambda x: module.called(x), backend="aot_eager")
        assert torch.equal(compiled(x), in_a_layer(module.called)(x))


def test_what_is_recorded_is_a_layers() -> None:
    p, x = linear(256, 256).weight, randn(5, 256)
    assert gemms(torch.matmul, x, p) == gemms(torch.matmul, p, p.t()) == 1
    with pytest.raises(NotImplementedError, match="no FP8 path"):
        torch.einsum("ij,jk->ik", x, p)
    with pytest.raises(NotImplementedError, match=r"below F\.linear"):
        torch.ops.aten.mm(x, p.detach())  # DTensor hides there that a weight has a gradient
    p.requires_grad_(False)
    assert gemms(torch.matmul, x, p) == 0
    assert gemms(in_a_layer(torch.matmul), x, p) == 1
    x.requires_grad_()  # adapters train, say
    assert gemms(torch.matmul, x, p) == gemms(torch.matmul, x, p[:, :128]) == 1
    assert gemms(torch.matmul, x, p.detach()) == 0


class Rotating(torch.optim.Optimizer):
    """Multiplies weights by a rotation."""

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        with torch.no_grad():
            for group in self.param_groups:
                for p in group["params"]:
                    p.copy_(ROTATION @ p)


def test_an_optimizer_is_no_layer_wherever_it_steps() -> None:
    """Some frameworks run a whole training step as the forward of a wrapper."""
    p = linear(256, 256).weight
    optimizer, wanted = Rotating([p], {}), ROTATION @ plain(p)
    assert gemms(in_a_layer(optimizer.step)) == 0
    assert torch.equal(plain(p), wanted)
    p.register_post_accumulate_grad_hook(lambda p: optimizer.step())
    F.linear(randn(5, 256), p).sum().backward()
    assert torch.equal(plain(p), ROTATION @ wanted)


def test_weights_without_masters_stay_in_fp8() -> None:
    module, x = linear(256, 256), randn(5, 256)
    w = module.weight
    quantized = functional.quantize(x)
    with torch.no_grad():
        assert gemms(torch.matmul, quantized, w) == 1  # the FP8 input has none
        freeze(module)
        assert (
            gemms(torch.matmul, x, module.weight) == gemms(torch.matmul, module.weight, x.t()) == 1
        )
        with pytest.raises(NotImplementedError, match=r"\.dequantize\(\)"):
            torch.einsum("ij,jk->ik", x, module.weight)


@without_gradients
def test_vmap_over_weights_is_no_arithmetic(off: Any) -> None:
    stack, x = BlockwiseFP8Weight(randn(2, 256, 256)), randn(4, 256)
    with off(), pytest.raises(NotImplementedError, match="a loop in place of vmap"):
        torch.vmap(lambda w: F.linear(x, w))(stack)


def test_a_backward_that_gets_a_list_is_a_layer() -> None:
    """``boxed_grads_call`` of torch 2.13 and later passes all gradients as one list."""

    class Boxed(torch.autograd.Function):
        boxed_grads_call = True

        @staticmethod
        def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
            ctx.save_for_backward(w)
            return F.linear(x, w)

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:
            grad = grads[0][0] if isinstance(grads[0], list) else grads[0]
            return grad @ ctx.saved_tensors[0], None

    w, x, grad = linear(256, 256).weight, randn(4, 256, grad=True), randn(4, 256, seed=1)
    Boxed.apply(x, w).backward(grad)
    assert torch.equal(x.grad, F.linear(grad, w.detach().t()))
