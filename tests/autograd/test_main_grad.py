"""Weight gradients added to an fp32 buffer by the GEMM that makes them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from expecttest import assert_expected_inline
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from blocktensor import Recipe
from blocktensor.autograd import main_grad, pipelining
from blocktensor.ops import reference
from blocktensor.ops.gemm.ops import gemm_add_
from tests.support.compiling import instantiates
from tests.support.experts import stack
from tests.support.models import linear, randn
from tests.support.numeric import relative_error
from tests.support.refusals import refused
from tests.support.split_backward import backward, needs_halves
from tests.support.wgrad_inputs import HIGH, RECIPES

N, K, M = 200, 300, 40
USUAL = Recipe()


def summed(x: Tensor, grads: list[Tensor], start: Tensor, recipe: Recipe = USUAL) -> Tensor:
    total = start.clone()
    x_col = reference.quantize_columnwise(x, recipe.wgrad_input_format)
    for grad in grads:
        gemm_add_(total, reference.quantize_columnwise(grad, recipe.activation_format), x_col)
    return total


@pytest.mark.parametrize("recipe", [USUAL, *RECIPES], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_microbatches_are_summed_in_fp32(
    dtype: torch.dtype, recipe: Recipe, device: torch.device
) -> None:
    module = linear(N, K, dtype=dtype, device=device, recipe=recipe)
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
    added = module.weight.main_grad
    if recipe is HIGH:
        exact = start + sum(grad.double().t() @ x.double() for grad in grads)
        assert relative_error(added, exact) <= (1e-6 if device.type == "cpu" else 2e-4)
    else:
        assert torch.equal(added, summed(x, grads, start, recipe))
    assert relative_error((added - start).to(dtype), plain.weight.grad) <= 1e-2


def test_without_an_input_gradient_and_with_leading_dimensions() -> None:
    module, x, grad = linear(N, K, bias=True), randn(2, 3, K), randn(2, 3, N, seed=4)
    module.weight.main_grad = torch.zeros(N, K)
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


def test_gradients_through_a_view_arrive_as_always() -> None:
    module, x = linear(N, K), randn(5, N)
    module.weight.main_grad = torch.zeros(N, K)
    (x @ module.weight).sum().backward()
    assert module.weight.grad.shape == (N, K)
    assert not module.weight.main_grad.any()


def test_other_buffers_are_refused() -> None:
    w, experts = linear(N, K).weight, stack(2)
    buffers = (
        torch.zeros(N, K, dtype=torch.bfloat16),
        torch.zeros(K, N),
        torch.zeros(N, K, device="meta"),
        torch.zeros(K, N).t(),
    )
    stacks = (
        torch.zeros(2, 144, 192, dtype=torch.bfloat16),
        torch.zeros(2, 192, 144),
        torch.zeros(2, 192, 144).mT,
    )
    calls = [partial(setattr, w, "main_grad", buffer) for buffer in buffers]
    calls += [partial(setattr, experts, "main_grad", buffer) for buffer in stacks]
    assert_expected_inline(
        refused(*calls),
        """\
TypeError: main_grad is torch.bfloat16: expected torch.float32
ValueError: main_grad is [300, 200] on cpu: expected the weight's [200, 300] on cpu
ValueError: main_grad is [200, 300] on meta: expected the weight's [200, 300] on cpu
ValueError: main_grad has strides (1, 200): expected contiguous rows
TypeError: main_grad is torch.bfloat16: expected torch.float32
ValueError: main_grad is [2, 192, 144] on cpu: expected the weight's [2, 144, 192] on cpu
ValueError: main_grad has strides (27648, 1, 144): expected a contiguous stack [2, 144, 192]""",
    )
    assert w.main_grad is experts.main_grad is None


@instantiates
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


@pytest.mark.usefixtures("group")
def test_fsdp_refuses_it_before_and_after_sharding() -> None:
    mesh, message = init_device_mesh("cpu", (1,)), r"weight\.main_grad with FSDP2.* set it to None"
    module = nn.Sequential(linear(N, K))
    module[0].weight.main_grad = torch.zeros(N, K)
    with pytest.raises(NotImplementedError, match=message):
        fully_shard(module, mesh=mesh)
    module = fully_shard(nn.Sequential(linear(N, K)), mesh=mesh)
    module(randn(5, K)).sum().backward()
    module[0].weight.main_grad = torch.zeros(N, K)
    with pytest.raises(NotImplementedError, match=message):
        module(randn(5, K))


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


@needs_halves
@pytest.mark.parametrize("recipe", [USUAL, HIGH], ids=str)
@pytest.mark.parametrize("use", USES)
def test_a_split_backward_adds_to_grad_what_a_whole_one_does(use: str, recipe: Recipe) -> None:
    """The gradients that no buffer takes."""
    found = []
    for split in (False, True):
        module, x = linear(K, K, bias=True, recipe=recipe), randn(M, K, grad=True)
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

    for wrapper, running in (
        (main_grad._noticed, main_grad._running),
        (pipelining._watched, pipelining._input_halves),
    ):
        with pytest.raises(RuntimeError, match="in the middle"):
            wrapper(original)([])
        assert not running
