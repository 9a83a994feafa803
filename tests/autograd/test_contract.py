"""The contract of every differentiable FP8 function: each holds for all kinds, bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import chain, combinations
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from blocktensor import BlockwiseFP8Weight, Recipe, functional
from blocktensor.autograd.norm import normed
from tests.support.gated import assert_bits, results
from tests.support.groups import ends
from tests.support.models import plain, randn

K, HIDDEN, N, T, E = 192, 160, 136, 70, 3
FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
OFFS = ends(30, 0, 35)  # the last five rows belong to no group
TARGET = torch.arange(T).mul(7).remainder(N).index_fill(0, torch.arange(0, T, 5), -100)
Run = Callable[..., Tensor]


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    return F.silu(gate) * up


def grouped(x: Tensor, w: Tensor, bias: Tensor | None = None) -> Tensor:
    return functional.grouped_linear(x, w, OFFS.to(x.device), bias)


def one_by_one(x: Tensor, w: Tensor, bias: Tensor) -> Tensor:
    """Group by group, with torch's own sum of a bias."""
    begins = [0, *OFFS.tolist()]
    rows = [F.linear(x[begins[e] : begins[e + 1]], w[e], bias[e]) for e in range(E)]
    return torch.cat([*rows, rows[0].new_zeros(T - begins[-1], N)])


def gated(x: Tensor, gate: Tensor, up: Tensor, down: Tensor, bias: Tensor | None = None) -> Tensor:
    return F.linear(swiglu(F.linear(x, gate), F.linear(x, up)), down, bias)


def gated_with_bias(x: Tensor, *ws: Tensor) -> Tensor:
    return functional.gated_mlp(x, *ws[:3], bias_down=ws[3])


def joint(x: Tensor, both: Tensor, down: Tensor) -> Tensor:
    return F.linear(swiglu(*F.linear(x, both).chunk(2, -1)), down)


def experts(x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    return grouped(swiglu(grouped(x, gate), grouped(x, up)), down)


def joint_mlp(x: Tensor, both: Tensor, down: Tensor, **options: Any) -> Tensor:
    return functional.gated_mlp(x, both, None, down, **options)


def gated_experts(x: Tensor, *ws: Tensor, **options: Any) -> Tensor:
    return functional.gated_experts(x, *ws, OFFS.to(x.device), **options)


def loss(x: Tensor, w: Tensor) -> Tensor:
    return functional.linear_cross_entropy(x, w, TARGET.to(x.device))


def loss_of_all_logits(x: Tensor, w: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(x, w).float(), TARGET.to(x.device))


STACKS = ((E, HIDDEN, K), (E, HIDDEN, K), (E, N, HIDDEN))
MATRICES = tuple(shape[1:] for shape in STACKS)
BOTH = ((2 * HIDDEN, K), (N, HIDDEN))

# name: the function; the same by simpler functions; the shapes of weights, and of biases as lists
KINDS: dict[str, tuple[Run, Run, tuple[Any, ...]]] = {
    "linear": (functional.linear, F.linear, ((N, K),)),
    "linear with bias": (functional.linear, F.linear, ((N, K), [N])),
    "grouped linear": (
        grouped,
        lambda x, w: torch._grouped_mm(x, w.transpose(1, 2), OFFS.to(x.device)),
        ((E, N, K),),
    ),
    "grouped linear of a transpose": (
        lambda x, w: grouped(x, w.mT),
        lambda x, w: torch._grouped_mm(x, w, OFFS.to(x.device)),
        ((E, K, N),),
    ),
    "grouped linear with bias": (grouped, one_by_one, ((E, N, K), [E, N])),
    "gated MLP": (functional.gated_mlp, gated, MATRICES),
    "gated MLP with bias": (gated_with_bias, gated, (*MATRICES, [N])),
    "gated MLP, recompute": (partial(functional.gated_mlp, recompute=True), gated, MATRICES),
    "joint MLP": (joint_mlp, joint, BOTH),
    "experts": (gated_experts, experts, STACKS),
    "experts, recompute": (partial(gated_experts, recompute=True), experts, STACKS),
    "loss of a head": (loss, loss_of_all_logits, ((N, K),)),
}
every_kind = pytest.mark.parametrize("kind", KINDS)
# the forward of a loss computes the gradients, which backward scales
every_matmul = pytest.mark.parametrize("kind", [name for name in KINDS if name != "loss of a head"])


@pytest.fixture
def run(kind: str) -> Run:
    return KINDS[kind][0]


def inputs(grad: bool = True, **options: Any) -> Tensor:
    return randn(T, K, seed=5, grad=grad, **options)


def weights(kind: str, frozen: tuple[int, ...] = (), **options: Any) -> list[Any]:
    made: list[Any] = []
    for i, shape in enumerate(KINDS[kind][2]):
        values = randn(*shape, seed=i, **options) / 14
        w = BlockwiseFP8Weight(values) if isinstance(shape, tuple) else values
        made.append(nn.Parameter(w, i not in frozen))
    return made


def is_fp8(w: Tensor) -> bool:
    return isinstance(w, BlockwiseFP8Weight)


def caches(operands: list[Any]) -> list[Any]:
    return [w.cache for w in operands if is_fp8(w)]


def places(kind: str) -> range:
    """Of the weights: biases come last."""
    return range(sum(isinstance(shape, tuple) for shape in KINDS[kind][2]))


@every_kind
@pytest.mark.parametrize("of_x", [False, True])
def test_gradients_of_some(kind: str, of_x: bool) -> None:
    run, simple, _ = KINDS[kind]
    every = range(len(KINDS[kind][2]))
    some = chain.from_iterable(combinations(every, n) for n in range(len(every) + 1))
    for frozen in some:
        operands = weights(kind, frozen)
        wanted = results(simple, inputs(of_x), operands)
        assert_bits(results(run, inputs(of_x), operands), wanted)


@every_kind
@pytest.mark.parametrize(("of_x", "of_w"), [(FP32, FP32), (BF16, FP32), (FP32, BF16)])
@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_autocast(kind: str, dtype: torch.dtype, of_x: torch.dtype, of_w: torch.dtype) -> None:
    run, simple, _ = KINDS[kind]
    operands = weights(kind, dtype=of_w)
    with torch.autocast("cpu", dtype):
        wanted = results(simple, inputs(dtype=of_x), operands)
        got = results(run, inputs(dtype=of_x), operands)
    if run is loss and dtype == FP16:  # which keeps gradients larger: another rounding
        assert_bits(got[:1], wanted[:1])
    else:
        assert_bits(got, wanted)
    of_y = FP32 if run is loss else dtype
    assert [t.dtype for t in got if t is not None] == [of_y, of_x, *[of_w] * len(operands)]


@every_kind
def test_frozen_weights_in_fp8_alone(kind: str, run: Run, device: torch.device) -> None:
    operands = weights(kind, tuple(places(kind)), device=device)
    alone = [w._quantized() if is_fp8(w) else w for w in operands]
    wanted = results(run, inputs(device=device), operands)
    assert_bits(results(run, inputs(device=device), alone)[:2], wanted[:2])
    with torch.inference_mode():
        assert torch.equal(run(inputs(device=device), *alone), wanted[0])


@every_kind
def test_plain_weights_and_weights_without_a_cache(kind: str, run: Run) -> None:
    operands, uncached = weights(kind), Recipe(cache_weight=False)
    wanted = results(run, inputs(), operands)
    for cast in (plain, lambda w: BlockwiseFP8Weight(plain(w), uncached)):
        others = [nn.Parameter(cast(w) if is_fp8(w) else plain(w)) for w in operands]
        assert_bits(results(run, inputs(), others), wanted)


@every_kind
def test_fp8_weights_that_require_gradients(kind: str, run: Run, device: torch.device) -> None:
    operands = weights(kind, device=device)
    gathered = [nn.Parameter(w._quantized()) if is_fp8(w) else w for w in operands]
    for _ in range(3):  # a later call may be a recorded one
        wanted = results(run, inputs(device=device), operands)
        assert_bits(results(run, inputs(device=device), gathered), wanted)


@every_kind
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_gradients(kind: str, run: Run, mode: Any, device: torch.device) -> None:
    operands = weights(kind, device=device)
    wanted = run(inputs(device=device), *operands)
    with mode():
        y = run(randn(T, K, seed=5, device=device), *operands)
    assert torch.equal(y, wanted)
    assert not y.requires_grad
    # and training goes on
    assert all(t is not None for t in results(run, inputs(device=device), operands))


@every_kind
@pytest.mark.parametrize("way", ["reentrant", "checkpoint", "offload"])
def test_checkpointing_and_offloading(kind: str, run: Run, way: str, device: torch.device) -> None:
    operands = weights(kind, device=device)
    wanted = results(run, inputs(device=device), operands)
    if way == "offload":
        with torch.autograd.graph.save_on_cpu():
            got = results(run, inputs(device=device), operands)
    else:
        again = partial(checkpoint, run, use_reentrant=way == "reentrant")
        before = [cache.casts for cache in caches(operands)]
        got = results(again, inputs(device=device), operands)
        assert [cache.casts for cache in caches(operands)] == [n + 2 for n in before]
    assert_bits(got, wanted)
    assert all(cache.nbytes() == 0 for cache in caches(operands))


@every_kind
def test_a_retained_graph_and_sums(kind: str, run: Run, device: torch.device) -> None:
    options: Any = {"dtype": torch.float32, "device": device}
    x, operands = inputs(**options), weights(kind, **options)
    y = run(x, *operands)
    leaves, grad = [x, *operands], randn(*y.shape, **options)
    first = torch.autograd.grad(y, leaves, grad, retain_graph=True)
    assert_bits([*torch.autograd.grad(y, leaves, grad)], [*first])
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(y, leaves, grad)
    for _ in range(2):
        run(x, *operands).backward(grad)
    assert_bits([t.grad for t in leaves], [dt + dt for dt in first])


class Ends(torch.autograd.Function):
    """The identity, whose gradient is None."""

    @staticmethod
    def forward(ctx: Any, y: Tensor) -> Tensor:
        return y.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> None:
        return None


@every_matmul
def test_where_no_gradient_arrives_none_leaves(kind: str, run: Run) -> None:
    x, operands = inputs(), weights(kind)
    Ends.apply(run(x, *operands)).sum().backward()
    assert [t.grad for t in (x, *operands)] == [None] * (1 + len(operands))
    assert all(cache.nbytes() == 0 for cache in caches(operands))
    scale = torch.ones(K, dtype=x.dtype, requires_grad=True)
    Ends.apply(normed(x, scale, 1e-6, "llama")).sum().backward()
    assert x.grad is scale.grad is None


@every_matmul
def test_a_gradient_of_one_operand_releases_all_casts(kind: str, run: Run) -> None:
    x, operands = inputs(), weights(kind)
    for each in (x, *operands):
        y = run(x, *operands)
        assert all(cache.nbytes() for cache in caches(operands))
        y.sum().backward(inputs=[each])
        assert all(cache.nbytes() == 0 for cache in caches(operands))


@every_kind
def test_the_output_may_be_changed_in_place(kind: str, run: Run, device: torch.device) -> None:
    operands, rows = weights(kind, device=device), inputs(device=device)
    takes_more = len(KINDS[kind][2][0]) == 2 and run is not loss  # leading dimensions
    for x in (rows, rows.view(2, -1, K)) if takes_more else (rows,):
        changed = results(lambda *args: run(*args).mul_(2).relu_(), x, operands)
        assert_bits(changed, results(lambda *args: (run(*args) * 2).relu(), x, operands))


@every_kind
def test_an_expanded_gradient(kind: str, run: Run, device: torch.device) -> None:
    x, operands = inputs(device=device), weights(kind, device=device)
    y = run(x, *operands)
    wanted = torch.autograd.grad(y, [x, *operands], torch.ones_like(y), retain_graph=True)
    y.sum().backward()
    assert_bits([t.grad for t in (x, *operands)], [*wanted])


@every_matmul
def test_a_weight_that_changes_before_backward_raises(kind: str, run: Run) -> None:
    for place in places(kind):
        for written in (lambda w: w, lambda w: w.master):
            operands = weights(kind)
            y = run(inputs(), *operands)
            with torch.no_grad():
                written(operands[place]).mul_(2)
            with pytest.raises(RuntimeError, match=r"modified by an in-?place operation"):
                y.sum().backward()


@every_kind
def test_every_forward_reads_the_weight_of_then(kind: str) -> None:
    run, simple, _ = KINDS[kind]
    operands = weights(kind)
    run(inputs(), *operands)
    for w in operands:
        w.data.view(-1).mul_(2)
    assert torch.equal(run(inputs(), *operands), simple(inputs(), *operands))
