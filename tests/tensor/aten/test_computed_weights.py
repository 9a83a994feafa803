"""What is computed of a BlockwiseFP8Weight: a weight, or plain values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from blocktensor import BlockwiseFP8Weight, functional
from tests.support.models import POWER_OF_TWO, RECIPES, Rounded, linear, plain, randn

EVERY = torch.arange(256)


PLAIN: dict[str, Callable[[Tensor], Tensor]] = {
    "embedding": lambda w: F.embedding(EVERY, w),
    "index": lambda w: w[EVERY],
    "index_select": lambda w: w.index_select(0, EVERY),
    "gather": lambda w: w.gather(0, EVERY.expand(256, 256)),
    "take": lambda w: w.take(EVERY.expand(256, 256)),
    **{
        name: lambda w, name=name: getattr(torch, name)(w)
        for name in ("zeros_like", "ones_like", "rand_like", "randn_like")
    },
    "full_like": lambda w: torch.full_like(w, 2),
    "new_empty": lambda w: w.new_empty(256, 256),
    "new_zeros": lambda w: w.new_zeros(256, 256),
    "new_ones": lambda w: w.new_ones(256, 256),
    "new_full": lambda w: w.new_full((256, 256), 2),
    "new_empty_strided": lambda w: w.new_empty_strided((256, 256), (1, 256)),
}


@pytest.mark.parametrize("name", PLAIN)
def test_activations_as_large_as_the_weight_are_plain(name: str) -> None:
    """A matmul of two of them (attention, say) is one of activations."""
    w, run = linear(256, 256).weight, PLAIN[name]
    torch.manual_seed(0)
    made = run(w)
    torch.manual_seed(0)
    wanted = run(plain(w))
    assert type(made) is Tensor
    assert (made.dtype, made.stride()) == (wanted.dtype, wanted.stride())
    assert torch.equal(made, wanted) or "empty" in name


@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr, torch.sparse_csc], ids=str)
@pytest.mark.filterwarnings("ignore:Sparse C:UserWarning")
def test_sparse_values_of_a_weight_are_plain(layout: torch.layout) -> None:
    """A penalty or a count of its entries, say."""
    w = linear(256, 256, dtype=torch.float32).weight
    made = (w * (w > 0)).to_sparse(layout=layout)
    assert type(made) is Tensor and made.layout == layout
    assert torch.equal(made.to_dense(), plain(w).relu())


COMPUTED: list[Callable[[Tensor], Tensor]] = [
    lambda w: w + 1,
    lambda w: 1 - w,
    lambda w: w * (w > 0),
    lambda w: w.tril(),
    lambda w: torch.where(w > 0, w, 0.0),
    F.normalize,
    lambda w: w.flip(0),
    lambda w: torch.sort(w, 1).values,
    lambda w: torch.cat([w[:100], w[100:]]),
    lambda w: torch.stack([w, w])[1],
]


@pytest.mark.parametrize("compute", COMPUTED)
def test_what_autograd_computes_of_a_weight_is_a_weight(compute: Callable[..., Tensor]) -> None:
    w, x = linear(256, 256, dtype=torch.float32).weight, randn(3, 256, dtype=torch.float32)
    leaf = plain(w).requires_grad_()
    ours, theirs = compute(w), compute(leaf)
    assert type(ours) is BlockwiseFP8Weight
    assert ours.recipe == w.recipe
    y, wanted = F.linear(x, ours), functional.linear(x, theirs)
    assert torch.equal(y, wanted)
    y.square().sum().backward(), wanted.square().sum().backward()
    torch.testing.assert_close(w.grad, leaf.grad)


class WithSetup(Rounded):
    """The same without a ctx in its forward."""

    @staticmethod
    def forward(w: Tensor) -> Any:  # type: ignore[override]
        return Rounded.forward(None, w)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None: ...


class Pair(torch.autograd.Function):
    """Two weights, one of them with an adapter, and values of another shape."""

    @staticmethod
    @torch.amp.custom_fwd(device_type="cpu")
    def forward(ctx: Any, w: Tensor, b: Tensor, a: Tensor) -> Any:
        ctx.save_for_backward(b, a)
        return w * 2, torch.addmm(w, b, a), w.sum(0)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        double, both, of_sum = grads
        b, a = ctx.saved_tensors
        return 2 * double + both + of_sum, both @ a.t(), b.t() @ both


@torch.library.custom_op("tests_of_computed_weights::tripled", mutates_args=())
def tripled(w: Tensor) -> Tensor:
    return w * 3


tripled.register_fake(torch.empty_like)
tripled.register_autograd(lambda ctx, grad: grad * 3)
B, A = randn(256, 4, seed=1, dtype=torch.float32), randn(4, 256, seed=2, dtype=torch.float32)


def of_pair(w: Tensor) -> Tensor:
    double, both, _ = Pair.apply(w, B.requires_grad_(), A)
    return double + both


def in_first_pass(w: Tensor) -> Tensor:
    made: Tensor = checkpoint(lambda w: (w * 2).flip(0), w, use_reentrant=True)
    return made


OF_FUNCTIONS: list[Callable[[Tensor], Tensor]] = [
    Rounded.apply,
    WithSetup.apply,
    of_pair,
    tripled,
    in_first_pass,
    lambda w: checkpoint(Rounded.apply, w, use_reentrant=False),
]


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # by Dynamo
@pytest.mark.parametrize("way", ["eager", "compiled"])
@pytest.mark.parametrize("compute", OF_FUNCTIONS)
def test_what_an_autograd_function_computes_of_a_weight_is_a_weight(
    compute: Callable[..., Tensor], way: str
) -> None:
    """Gradients are off in its forward, and autograd records its result."""
    w, x = linear(256, 256, dtype=torch.float32).weight, randn(3, 256, dtype=torch.float32)
    leaf = plain(w).requires_grad_()

    def run(w: Tensor) -> Tensor:
        return F.linear(x, compute(w))

    if way == "eager":
        assert type(compute(w)) is BlockwiseFP8Weight
    torch._dynamo.reset()
    made = run(w) if way == "eager" else torch.compile(run, backend="aot_eager")(w)
    wanted = functional.linear(x, compute(leaf))
    assert torch.equal(made, wanted)
    made.square().sum().backward(), wanted.square().sum().backward()
    assert torch.equal(w.grad, leaf.grad)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_an_average_that_a_module_computes_without_gradients_is_plain(mode: Any) -> None:
    """MoCo updates its keys so: an FP8 weight in ``plain.data`` would have no memory."""
    w, key = linear(256, 256, dtype=torch.float32).weight, randn(256, 256, dtype=torch.float32)
    wanted = key * 0.9 + plain(w) * 0.1

    class Average(nn.Module):
        def forward(self) -> None:
            key.data = key.data * 0.9 + w * 0.1

    with mode():
        Average()()
    assert torch.equal(key, wanted)


def test_a_gradient_that_autograd_computes_of_a_weight_is_plain() -> None:
    """A forward that calls backward (Lightning's ``training_step``) does not compute it."""
    w, d = linear(256, 256, dtype=torch.float32).weight, randn(256, 256, dtype=torch.float32)
    leaf, of_hook = plain(w).requires_grad_(), []
    w.register_hook(lambda grad: of_hook.append(grad * w))

    def forward(w: Tensor) -> None:
        (w * w * d).square().sum().backward()

    forward(w), forward(leaf)
    assert torch.equal(w.grad, leaf.grad)
    assert [type(x) for x in (w.grad, *of_hook)] == [Tensor, Tensor]


class Product(torch.autograd.Function):
    """An elementwise product, whose gradients are products of gradients and factors."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor) -> Tensor:
        ctx.save_for_backward(a, b)
        return a * b

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        a, b = ctx.saved_tensors
        return grads[0] * b.tanh(), grads[0] * a


class Matmul(torch.autograd.Function):
    """A matmul of plain tensors, whose backward multiplies by the gradient."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor) -> Tensor:
        ctx.save_for_backward(a, b)
        return a @ b

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        a, b = ctx.saved_tensors
        return grads[0] @ b.t(), a.t() @ grads[0]


def test_a_gradient_that_an_autograd_function_computes_of_a_weight_is_plain() -> None:
    """Matmuls in the backward of plain layers read these gradients, in high precision."""
    w, d = linear(256, 256, dtype=torch.float32).weight, randn(256, 256, dtype=torch.float32)
    leaf, made = plain(w).requires_grad_(), []
    for each in (w, leaf):
        d = d.detach().requires_grad_()
        y = Product.apply(each, Product.apply(Matmul.apply(d, d), each))
        made += torch.autograd.grad(y.sum(), [each, d])
    assert [type(x) for x in made] == [Tensor] * 4
    assert torch.equal(made[0], made[2])
    assert torch.equal(made[1], made[3])


def test_what_an_optimizer_computes_in_an_autograd_function_is_plain() -> None:
    w = linear(256, 256, dtype=torch.float32).weight
    made: list[Any] = []

    class Decay(torch.optim.Optimizer):
        def step(self, closure: Any = None) -> None:
            made.append(w * 0.5)

    class Steps(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            made.append(w * 2)
            Decay([w], {}).step()
            return x * 2

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:
            made.append(w * 3)
            return grads[0]

    y = Steps.apply(randn(3, dtype=torch.float32, grad=True))
    y.sum().backward()
    Steps.apply(randn(3))
    kinds = [BlockwiseFP8Weight, Tensor, Tensor]  # forward, its optimizer, backward
    assert [type(x) for x in made] == [*kinds, *kinds[:2]]


class Momentum(torch.optim.Optimizer):
    """SGD breaks graphs before its step, this does not."""

    def __init__(self, weights: Any, **defaults: Any) -> None:
        super().__init__(weights, defaults)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for w in self.param_groups[0]["params"]:
            self.state[w]["momentum_buffer"] = w * 0.5 + w.grad
            w.add_(self.state[w]["momentum_buffer"], alpha=-0.1)


@pytest.mark.parametrize("kind", [torch.optim.SGD, Momentum])
@pytest.mark.parametrize("in_forward", [False, True])
def test_what_a_compiled_optimizer_computes_is_plain(kind: Any, in_forward: bool) -> None:
    """SGD keeps ``grad + weight_decay * w`` as its momentum."""
    made: dict[str, Any] = {}
    for way in ("eager", "compiled"):
        torch._dynamo.reset()
        w = linear(256, 256, dtype=torch.float32).weight
        optimizer = kind([w], lr=0.1, momentum=0.9, weight_decay=0.1)

        def forward(optimizer: Any = optimizer) -> None:
            optimizer.step()

        step = forward if in_forward else optimizer.step
        step = torch.compile(step, backend="aot_eager") if way == "compiled" else step
        for _ in range(2):
            w.grad = randn(256, 256, seed=1, dtype=torch.float32)
            step()
        made[way] = [optimizer.state[w]["momentum_buffer"], w.detach().master]
        assert [type(x) for x in made[way]] == [Tensor, Tensor]
    torch.testing.assert_close(made["eager"], made["compiled"])


def test_what_is_computed_without_gradients_or_in_another_shape_is_plain() -> None:
    w, other = (
        linear(256, 256, dtype=torch.float32, recipe=recipe).weight for recipe in RECIPES[:2]
    )
    ids, zeros, double = torch.arange(256), torch.zeros_like, linear(64, 64).double().weight
    made = [
        w.sum(0),
        w.square().mean(),
        w > 0,
        w.detach() * 2,
        torch.cat([w, torch.ones(1, 256)]),
        zeros(w),
        zeros(w.detach()),
        w.new_zeros(w.shape),
        w.new_ones(w.shape),
        F.embedding(ids, w),
        w[ids],
        w[ids > -1],
        torch.cat([double, double]),
        torch.stack([w[None], w[None]]),
        *torch.histogram(plain(w).requires_grad_(), 4, weight=w),
    ]
    with torch.no_grad():
        made += [w * 2, w.detach().add(1), torch.cat([w, other]), torch.stack([w[0], w[1]])]
        assert type(torch.cat([w, w.t()])) is BlockwiseFP8Weight
    optimizer = torch.optim.SGD([w], lr=1.0, momentum=0.9, weight_decay=0.1)
    w.square().sum().backward()
    optimizer.step()
    assert {type(x) for x in (*made, w.grad, optimizer.state[w]["momentum_buffer"])} == {Tensor}
    assert linear(128, 256).weight.new_zeros(2).dtype == torch.bfloat16


def test_high_precision_passes_the_gradient_on() -> None:
    w, x = linear(256, 256, dtype=torch.float32).weight, randn(3, 256, dtype=torch.float32)
    leaf, values = plain(w).requires_grad_(), w.high_precision()
    assert type(values) is Tensor
    assert values.data_ptr() == w.master.data_ptr()
    F.linear(x, values).sum().backward(), F.linear(x, leaf).sum().backward()
    assert torch.equal(w.grad, leaf.grad)


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_bytes_of_a_checkpoint_are_no_values(dtype: torch.dtype, frozen: bool) -> None:
    module = linear(256, 256, frozen=frozen)
    before, state = module.weight.dequantize(), {"weight": randn(256, 256).to(dtype)}
    message = r"without the scales of a checkpoint in FP8: load that with blocktensor\.load_fp8"
    with pytest.raises(RuntimeError, match=message):
        module.load_state_dict(state)
    with pytest.raises(TypeError, match=rf"values, pass \.to\({torch.bfloat16}\)$"):
        module.weight.detach().copy_(state["weight"])
    assert torch.equal(module.weight.dequantize(), before)


def test_copies_and_casts_of_a_weight_are_weights() -> None:
    w = linear(128, 192, dtype=torch.float32, recipe=POWER_OF_TWO).weight
    x = randn(5, 192, dtype=torch.float32)
    for copied in (w.clone(), w.detach().clone(), w.bfloat16(), torch.empty_like(w), w.t().clone()):
        assert type(copied) is BlockwiseFP8Weight
        assert copied.recipe == POWER_OF_TWO
        assert "cache" not in vars(copied) or copied.cache is not w.cache
    assert torch.equal(x @ w.t().clone(), F.linear(x, w))
    assert type(w.double()) is type(w.detach() + 1) is Tensor


@pytest.mark.parametrize(
    "penalty",
    [
        lambda w: torch.linalg.svdvals(w).sum(),
        lambda w: torch.linalg.matrix_norm(w, "nuc"),
        lambda w: torch.linalg.inv(w[:, :128]).sum(),
        lambda w: torch.linalg.qr(w)[1].square().sum(),
    ],
)
def test_derivatives_of_decompositions_are_in_high_precision(penalty: Any) -> None:
    w = linear(128, 192, dtype=torch.float32).weight
    leaf = plain(w).requires_grad_()
    penalty(w).backward(), penalty(leaf).backward()
    torch.testing.assert_close(w.grad, leaf.grad)
