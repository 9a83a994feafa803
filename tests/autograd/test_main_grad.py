"""Weight gradients added to an fp32 buffer by the GEMM that makes them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from blocktensor import Recipe, functional
from blocktensor.autograd import main_grad
from blocktensor.ops.cast.ops import quantize_both
from blocktensor.ops.formats import BLOCKS_1X128
from blocktensor.ops.gemm.ops import gemm_add_
from tests.support.experts import sample, stack
from tests.support.models import complaint, linear, randn
from tests.support.numeric import assert_same, relative_error
from tests.support.ranks import on_ranks
from tests.support.split_backward import backward, needs_halves

N, K, M = 200, 300, 40


def summed(x: Tensor, grads: list[Tensor], start: Tensor) -> Tensor:
    total = start.clone()
    _, x_col = quantize_both(x, BLOCKS_1X128)
    for grad in grads:
        _, g_col = quantize_both(grad, BLOCKS_1X128)
        gemm_add_(total, g_col, x_col)
    return total


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_microbatches_are_summed_in_fp32(dtype: torch.dtype, device: torch.device) -> None:
    module = linear(N, K, dtype=dtype, device=device)
    plain = copy.deepcopy(module)
    start = randn(N, K, seed=9, dtype=torch.float32, device=device)
    module.weight.main_grad = start.clone()
    x = randn(M, K, dtype=dtype, device=device)
    grads = [randn(M, N, seed=i, dtype=dtype, device=device) for i in range(3)]
    for grad in grads:
        results = []
        for made in (module, plain):
            leaf = x.clone().requires_grad_()
            made(leaf).backward(grad)
            results.append(leaf.grad)
        assert torch.equal(*results)
    assert module.weight.grad is None
    assert torch.equal(module.weight.main_grad, summed(x, grads, start))
    rounded = (module.weight.main_grad - start).to(dtype)
    assert relative_error(rounded, plain.weight.grad) <= 1e-2


def test_without_an_input_gradient_and_with_leading_dimensions() -> None:
    module, grad = linear(N, K, bias=True), randn(2, 3, N, seed=4)
    module.weight.main_grad = torch.zeros(N, K)
    x = randn(2, 3, K)
    module(x).backward(grad)
    assert module.weight.grad is None
    assert module.bias.grad is not None
    flat = summed(x.flatten(0, 1), [grad.flatten(0, 1)], torch.zeros(N, K))
    assert torch.equal(module.weight.main_grad, flat)


def test_it_can_be_taken_away_and_follows_the_parameter() -> None:
    module, x = linear(N, K), randn(5, K)
    buffer = torch.zeros(N, K)
    module.weight.main_grad = buffer
    module.weight.data = randn(N, K, seed=3)
    assert module.weight.main_grad is buffer
    module(x).sum().backward()
    assert module.weight.grad is None
    assert buffer.abs().sum() > 0
    twin = copy.deepcopy(module)
    assert torch.equal(twin.weight.main_grad, buffer)
    assert twin.weight.main_grad is not buffer
    module.weight.main_grad = None
    module(x).sum().backward()
    assert module.weight.grad is not None


def test_only_what_is_asked_for() -> None:
    module = linear(N, K)
    module.weight.main_grad = torch.zeros(N, K)
    x = randn(5, K, grad=True)
    torch.autograd.grad(module(x).sum(), [x])
    module(x).sum().backward(inputs=[x])
    assert not module.weight.main_grad.any()
    (given,) = torch.autograd.grad(module(x).sum(), [module.weight])
    assert given.shape == (N, K)
    assert not module.weight.main_grad.any()
    module(x).sum().backward(inputs=[module.weight])
    assert module.weight.main_grad.any()
    frozen = module.weight.main_grad.clone()
    module.weight.requires_grad_(False)
    module(x).sum().backward()
    assert torch.equal(module.weight.main_grad, frozen)


def test_gradients_through_a_view_arrive_as_always() -> None:
    module, x = linear(N, K), randn(5, N)
    module.weight.main_grad = torch.zeros(N, K)
    (x @ module.weight).sum().backward()
    assert module.weight.grad.shape == (N, K)
    assert not module.weight.main_grad.any()


@pytest.mark.parametrize(
    ("buffer", "error", "message"),
    [
        (torch.zeros(N, K, dtype=torch.bfloat16), TypeError, "main_grad is torch.bfloat16"),
        (torch.zeros(K, N), ValueError, r"main_grad is \[300, 200\] on cpu: expected"),
        (torch.zeros(N, K, device="meta"), ValueError, "on meta: expected"),
        (torch.zeros(K, N).t(), ValueError, "expected contiguous rows"),
    ],
)
def test_other_buffers_are_refused(buffer: Tensor, error: type[Exception], message: str) -> None:
    module = linear(N, K)
    with pytest.raises(error, match=message):
        module.weight.main_grad = buffer
    assert module.weight.main_grad is None


# torch's own, as Dynamo looks for a place to break the graph
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("fullgraph", [True, False])
def test_compiled_modules_refuse_it(fullgraph: bool, when: str) -> None:
    module, x = linear(N, K), randn(5, K, grad=True)
    compiled = torch.compile(module, backend="aot_eager", fullgraph=fullgraph)
    if when == "after":
        compiled(x).sum().backward()
        assert module.weight.grad is not None
        module.weight.grad = None
    module.weight.main_grad = torch.zeros(N, K)
    with pytest.raises(Exception, match=r"weight\.main_grad under torch\.compile: .* = None"):
        compiled(x).sum().backward()
    assert not module.weight.main_grad.any()
    module(x).sum().backward()  # in eager mode
    assert module.weight.main_grad.any()
    module.weight.main_grad = None
    compiled(x).sum().backward()
    assert module.weight.grad is not None


@pytest.mark.usefixtures("group")
def test_ddp_refuses_it_unless_it_does_not_synchronise() -> None:
    module, x = linear(N, K), randn(5, K)
    ddp = nn.parallel.DistributedDataParallel(module)
    module.weight.main_grad = torch.zeros(N, K)
    with pytest.raises(NotImplementedError, match=r"main_grad under DistributedDataParallel: DDP"):
        ddp(x)
    with torch.no_grad():
        ddp(x)
    with ddp.no_sync():
        ddp(x).sum().backward()
    assert module.weight.main_grad.any()
    module(x)  # not through DDP: the caller reduces


@on_ranks(2, gpus=())
def test_fsdp_refuses_it_before_and_after_sharding(world: int, device: str) -> None:
    module = nn.Sequential(linear(N, K))
    module[0].weight.main_grad = torch.zeros(N, K)
    with pytest.raises(NotImplementedError, match=r"weight\.main_grad with FSDP2.* set it to None"):
        fully_shard(module, mesh=init_device_mesh(device, (world,)))
    module = fully_shard(nn.Sequential(linear(N, K)), mesh=init_device_mesh(device, (world,)))
    module(randn(5, K)).sum().backward()
    module[0].weight.main_grad = torch.zeros(N, K)
    with pytest.raises(NotImplementedError, match=r"weight\.main_grad with FSDP2.* set it to None"):
        module(randn(5, K))


# Stacks of experts


def test_other_buffers_of_a_stack_are_refused() -> None:
    w = stack(2)
    for buffer, kind, text in (
        (torch.zeros(2, 144, 192).bfloat16(), TypeError, "main_grad is torch.bfloat16"),
        (torch.zeros(2, 192, 144), ValueError, "expected the weight's [2, 144, 192] on cpu"),
        (torch.zeros(2, 192, 144).mT, ValueError, "expected a contiguous stack [2, 144, 192]"),
    ):
        assert text in complaint(kind, lambda b=buffer: setattr(w, "main_grad", b)).replace(
            "\n", " "
        )
    assert w.main_grad is None


# Split backwards


@needs_halves
@pytest.mark.parametrize(
    "kind", ["linear", "grouped", "transposed", "a transpose", "gated", "high_precision"]
)
def test_the_weight_half_of_a_split_backward_adds_too(kind: str) -> None:
    """As pipelining's zero-bubble schedules split it: the buffers are those of a whole backward."""
    x, _, offs = sample("ragged")
    leaf = x.nan_to_num().requires_grad_()
    recipe = Recipe(wgrad_input="high_precision")
    weights: list[Any] = [stack(len(offs), kn=kind == "transposed")]
    run: Callable[..., Tensor] = lambda x, w: functional.grouped_linear(x, w, offs)  # noqa: E731
    if kind == "transposed":
        run = lambda x, w: torch._grouped_mm(x, w, offs=offs)  # noqa: E731
    if kind == "a transpose":
        run = lambda x, w: F.grouped_mm(x, w.transpose(-2, -1), offs=offs)  # noqa: E731
    if kind in ("linear", "high_precision"):
        made = linear(N, leaf.shape[1], **({"recipe": recipe} if kind != "linear" else {}))
        weights, run = [made.weight], F.linear
    if kind == "gated":
        sizes = (N, leaf.shape[1]), (N, leaf.shape[1]), (leaf.shape[1], N)
        weights = [linear(*size).weight for size in sizes]
        run = functional.gated_mlp
    found = []
    for split in (False, True):
        for w in weights:
            w.main_grad = torch.ones(w.shape)
        for step in range(2):
            y = run(leaf, *weights)
            grad = randn(*y.shape, seed=step, dtype=y.dtype)
            backward(y, grad, leaf, weights, in_halves=split)
        assert all(w.grad is None for w in weights)
        found.append([w.main_grad for w in weights])
    for a, b in zip(*found, strict=True):
        assert_same(a, b)


USES: dict[str, Callable[[Tensor, Any, Tensor], Tensor]] = {
    "a linear": F.linear,
    "a view": lambda x, w, bias: x @ w + bias,
    "a linear and a view": lambda x, w, bias: F.linear(x, w, bias) @ w,
    "a linear and a penalty": lambda x, w, bias: (
        F.linear(x, w, bias) + w.high_precision().square().mean()
    ),
    "two linears": lambda x, w, bias: F.linear(torch.tanh(F.linear(x, w)), w, bias),
    "two linears of a copy": lambda x, w, bias: F.linear(
        F.linear(x.float(), w.float()), w.float(), bias.float()
    ),
}
"""Functions of a weight and a bias that have a ``main_grad``."""


@needs_halves
@pytest.mark.parametrize("use", USES)
def test_a_split_backward_adds_to_grad_what_a_whole_one_does(use: str) -> None:
    """The gradients that no buffer takes."""
    found = []
    for split in (False, True):
        module, x = linear(K, K, bias=True), randn(M, K, grad=True)
        parameters: list[Any] = [module.weight, module.bias]
        for p in parameters:
            p.main_grad = torch.zeros(p.shape)
        for step in range(2):
            y = USES[use](x, *parameters)
            grad = randn(M, K, seed=step, dtype=y.dtype)
            backward(y, grad, x, parameters, in_halves=split)
        found.append([x.grad, *(t for p in parameters for t in (p.grad, p.main_grad))])
    for whole, halves in zip(*found, strict=True):
        assert whole is halves is None or torch.equal(whole, halves)


@needs_halves
def test_a_hook_of_a_split_backward_gets_zeros() -> None:
    """The gradient itself went to the buffer."""
    module, x, seen = linear(N, K), randn(M, K, grad=True), []
    module.weight.main_grad = torch.zeros(N, K)
    module.weight.register_hook(lambda grad: seen.append(grad.abs().sum() + grad.numel()))
    y = module(x)
    backward(y, randn(*y.shape), x, [module.weight])
    assert seen == [N * K]
    assert module.weight.grad is None
    assert module.weight.main_grad.any()


def test_a_backward_that_raises_runs_no_more() -> None:
    def original(*_: Any) -> None:
        raise RuntimeError("in the middle")

    with pytest.raises(RuntimeError, match="in the middle"):
        main_grad._noticed(original)([])
    assert not main_grad._running
