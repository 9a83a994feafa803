"""A backward that waits while its model is converted or moved."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from torch import Tensor, nn

from blocktensor import BlockwiseFP8Weight, convert, to_blockwise_fp8_weights
from blocktensor.tensor.compat.swap_in import swap_in
from tests.support.models import DIM, POWER_OF_TWO, complaint, linear, plain, randn


def test_converting_between_forward_and_backward_is_an_error() -> None:
    module = nn.Linear(DIM, DIM)
    loss = module(randn(3, DIM, dtype=torch.float32, grad=True)).sum()
    new = BlockwiseFP8Weight(module.weight.data)
    complaint(RuntimeError, lambda: swap_in(module.weight, new))
    text = complaint(RuntimeError, lambda: to_blockwise_fp8_weights(module))
    assert text.startswith("cannot convert the weight [64, 64] in place: an autograd graph or")
    loss.backward()
    assert type(module.weight) is nn.Parameter
    assert module.weight.grad is not None


def test_a_backward_that_waited_while_its_first_layer_was_converted() -> None:
    """Nothing tells it from one that was kept for its value until it runs."""
    module, x = nn.Linear(DIM, DIM), randn(3, DIM, dtype=torch.float32)
    kept, waiting = module(x).sum(), module(x).sum()
    kept.backward()
    module.zero_grad()
    to_blockwise_fp8_weights(module)
    assert_expected_inline(
        complaint(RuntimeError, waiting.backward),
        """\
a parameter [64, 64] was converted between a forward and its backward, whose
gradient would reach what the parameter was before: run backward before converting,
or forward again after""",
    )
    assert module.weight.grad is None
    module(x).sum().backward()
    assert module.weight.grad is not None


CHANGED: dict[str, Callable[[nn.Module], Any]] = {
    "float": lambda m: m.float(),
    "cpu": lambda m: m.cpu(),
    "half and back": lambda m: m.half().float(),
    "data of the same dtype": lambda m: [setattr(p, "data", p.data + 1) for p in m.parameters()],
    "to dtype": lambda m: m.to(torch.bfloat16),
    "half": lambda m: m.half(),
    "_apply": lambda m: m._apply(lambda t: t.bfloat16()),
    "data": lambda m: [setattr(p, "data", p.data.half()) for p in m.parameters()],
}


def backwards(model: nn.Module, move: Callable[[nn.Module], Any], x: Tensor) -> list[Tensor | None]:
    kept = model(x).square().sum()
    kept.backward()
    waiting = model(x).square().sum()
    model.zero_grad()
    x.grad = None
    move(model)
    waiting.backward()
    return [x.grad, *(p.grad for p in model.parameters())]


@pytest.mark.parametrize("move", CHANGED)
@pytest.mark.parametrize("x_grad", [False, True])
@pytest.mark.parametrize("layers", [1, 2])
def test_a_backward_that_waits_while_its_model_is_moved(
    move: str, x_grad: bool, layers: int
) -> None:
    """As in plain PyTorch, the gradients are those of the forward, in its dtype."""
    for fp8 in (True, False):
        runs = []
        for change in (lambda m: None, CHANGED[move]):
            torch.manual_seed(0)
            model = nn.Sequential(*[nn.Linear(DIM, DIM) for _ in range(layers)])
            if fp8:
                convert(model, skip_small=False)
            identities = [id(p) for p in model.parameters()]
            runs.append(backwards(model, change, randn(3, DIM, dtype=torch.float32, grad=x_grad)))
            assert [id(p) for p in model.parameters()] == identities
        for moved, stayed in zip(*runs, strict=True):
            assert (moved is None) == (stayed is None)
            assert moved is None or torch.equal(moved, stayed)
        assert model[0].weight.grad.dtype == torch.float32
        stays = move in list(CHANGED)[:4]
        assert (model[0].weight.dtype == torch.float32) == stays
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer.zero_grad()
        before = [plain(p) for p in model.parameters()]
        model(randn(3, DIM, dtype=model[0].weight.dtype)).sum().backward()
        optimizer.step()
        assert not any(map(torch.equal, before, map(plain, model.parameters())))


def test_a_backward_that_waits_while_its_weight_takes_another_recipe() -> None:
    module, x = linear(DIM, DIM), randn(3, DIM)
    waiting = module(x).sum()
    (wanted,) = torch.autograd.grad(module(x).sum(), module.weight)
    convert(module, POWER_OF_TWO)
    waiting.backward()
    assert torch.equal(module.weight.grad, wanted)
    assert module.weight.recipe == POWER_OF_TWO


@pytest.mark.gpu
def test_a_move_to_the_gpu_between_forward_and_backward_loses_no_gradient() -> None:
    module, x = linear(DIM, DIM, dtype=torch.float32), randn(3, DIM, dtype=torch.float32)
    weight = module.weight
    waiting = module(x).sum()
    (wanted,) = torch.autograd.grad(module(x).sum(), weight)
    module.cuda()
    waiting.backward()
    assert weight.device.type == "cuda"
    assert torch.equal(weight.grad.cpu(), wanted)
    weight.grad = None
    module(x.cuda()).sum().backward()
    assert weight.grad.any()
