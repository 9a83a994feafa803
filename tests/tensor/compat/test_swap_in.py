"""A parameter that becomes FP8 stays the same object, with all that hangs on it."""

from __future__ import annotations

import copy
import io
import pickle
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from blocktensor import (
    BlockwiseFP8Tensor,
    BlockwiseFP8Weight,
    convert,
    freeze,
    to_blockwise_fp8_weights,
    unfreeze,
)
from blocktensor.tensor.compat.swap_in import take_content
from tests.support.models import DIM, POWER_OF_TWO, TOKENS, Model, linear, plain, randn


def test_apply_preserves_all_that_hangs_on_the_model() -> None:
    model = Model().eval()
    seen: list[str] = []
    up = model.blocks[0].up
    up.register_forward_hook(lambda *_: seen.append("forward"))
    up.register_forward_pre_hook(lambda *_: seen.append("pre"))
    up.weight.register_hook(lambda g: seen.append("grad"))
    up.weight.register_post_accumulate_grad_hook(lambda p: seen.append("accumulated"))
    up.weight.grad = ones = torch.ones_like(up.weight)

    def identities() -> list[Any]:
        named = [(name, id(p)) for name, p in model.named_parameters()]
        return [named, [type(m) for m in model.modules()]]

    before, values = identities(), [plain(p) for p in model.parameters()]
    model.apply(to_blockwise_fp8_weights)
    assert identities() == before
    for p, value in zip(model.parameters(), values, strict=True):
        assert isinstance(p, nn.Parameter) and torch.equal(plain(p), value)
    assert not model.training
    assert torch.equal(up.weight.grad, ones)
    model(TOKENS).sum().backward()
    assert seen == ["pre", "forward", "grad", "accumulated"]
    assert up.weight.grad.max() > 1.0001  # and accumulates


def test_an_optimizer_made_before_conversion_keeps_working() -> None:
    models = Model(), Model()
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.01) for m in models]
    for module in (models[1], *models):  # one optimizer has state already
        module(TOKENS).sum().backward()
    models[0].apply(to_blockwise_fp8_weights)
    for model, optimizer in zip(models, optimizers, strict=True):
        for i, p in enumerate(model.parameters()):
            p.grad = randn(*p.shape, seed=i, dtype=p.dtype)
        optimizer.step()
    for a, b in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert torch.equal(plain(a), plain(b))
    assert set(optimizers[0].param_groups[0]["params"]) == set(models[0].parameters())


MOVES: dict[str, Any] = {
    "to": lambda m: m.to(),
    "float": lambda m: m.float(),
    "to its dtype and device": lambda m: m.to("cpu", torch.float32),
    "half": lambda m: m.half(),
    "bfloat16": lambda m: m.bfloat16(),
}


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("move", MOVES)
def test_a_weight_with_weak_references_is_moved(move: str, frozen: bool) -> None:
    """An EMA of the parameters and torch.export hold such."""
    module = linear(DIM, DIM, dtype=torch.float32, frozen=frozen)
    twins, x = (module, copy.deepcopy(module)), randn(3, DIM, dtype=torch.float32)
    weight, reference = module.weight, weakref.ref(module.weight)
    if not frozen:
        for each in twins:
            each(x).sum().backward()
    waiting = [each(x).sum() for each in twins]
    for each in twins:
        MOVES[move](each)
    torch.utils.swap_tensors(weight, weight)  # changes nothing
    assert module.weight is weight is reference()
    dtype = weight.dtype
    assert dtype == twins[1].weight.dtype
    assert torch.equal(*(each(x.to(dtype)) for each in twins))
    if not frozen:
        for loss in waiting:
            loss.backward()
        assert torch.equal(weight.grad, twins[1].weight.grad)
        assert weight.grad.dtype == dtype


def test_a_move_under_inference_mode() -> None:
    for module in (linear(DIM, DIM, dtype=torch.float32), nn.Linear(DIM, DIM)):
        weight = module.weight
        with torch.inference_mode():
            module.half()
            module(randn(3, DIM, dtype=torch.float16))
        assert module.weight is weight
        assert weight.is_inference()
        assert weight.dtype == torch.float16


HANGS = {
    **MOVES,
    "to_empty": lambda m: nn.init.ones_(m.to("meta").to_empty(device="cpu").weight),
    "convert": lambda m: convert(m, POWER_OF_TWO, skip_small=False),
    "freeze and unfreeze": lambda m: (freeze(m), unfreeze(m)),
}


@pytest.mark.parametrize("change", HANGS)
def test_what_hangs_on_a_weight_stays_as_in_plain_pytorch(change: str) -> None:
    module, seen = nn.Linear(DIM, DIM), list[str]()
    weight: Any = module.weight
    weight.tag = "mine"
    for register in (weight.register_hook, weight.register_post_accumulate_grad_hook):
        register(seen.append).remove()  # a hook that is gone leaves room for others
    convert(module, skip_small=False)
    weight.register_hook(lambda g: seen.append("grad"))
    weight.register_post_accumulate_grad_hook(lambda p: seen.append("accumulated"))
    HANGS[change](module)
    assert module.weight is weight
    assert isinstance(weight, BlockwiseFP8Weight)
    assert not hasattr(weight, "rowwise_data")
    module(randn(3, DIM, dtype=weight.dtype)).sum().backward()
    assert weight.grad is not None
    assert seen == ["grad", "accumulated"]
    assert weight.tag == "mine"


def test_pickles_keep_attributes() -> None:
    module, file = linear(DIM, DIM), io.BytesIO()
    module.weight.tag = "mine"
    torch.save(module, file)
    file.seek(0)
    on_meta = pickle.loads(pickle.dumps(module.to("meta")))  # torch reduces it in another way
    for twin in (torch.load(file, weights_only=False), copy.deepcopy(module), on_meta):
        assert twin.weight.tag == "mine"
        assert isinstance(twin.weight, BlockwiseFP8Weight)


def test_weights_with_weak_references_are_frozen_and_unfrozen() -> None:
    module = linear(DIM, DIM, dtype=torch.float32)
    reference, x = weakref.ref(module.weight), randn(3, DIM, dtype=torch.float32)
    wanted = module(x).detach()
    for change, kind in ((freeze, BlockwiseFP8Tensor), (unfreeze, BlockwiseFP8Weight)):
        change(module)
        assert module.weight is reference()
        assert isinstance(module.weight, kind)
        with torch.no_grad():
            assert torch.equal(module(x), wanted)


@pytest.mark.parametrize("frozen", [False, True])
def test_a_weight_that_takes_another_content_stays_a_parameter(frozen: bool) -> None:
    module = linear(128, 192, frozen=frozen)
    weight = module.weight
    changes: list[Callable[[nn.Module], Any]] = [
        lambda m: frozen or convert(m, POWER_OF_TWO, skip_small=False),
        lambda m: m.float(),
        lambda m: m.double().bfloat16(),
        unfreeze if frozen else freeze,
        freeze if frozen else unfreeze,
    ]
    for change in changes:
        change(module)
        assert module.weight is weight and isinstance(weight, nn.Parameter)
    assert take_content(weight, linear(128, 192, frozen=not frozen).weight.detach())
    assert isinstance(weight, nn.Parameter)


class Unchanged(nn.Module):
    """A parametrization that stores a weight as it is, or an alias of it."""

    def __init__(self, is_alias: bool) -> None:
        super().__init__()
        self.is_alias = is_alias

    def forward(self, weight: Tensor) -> Tensor:
        return weight

    def right_inverse(self, weight: Tensor) -> Tensor:
        return weight.detach() if self.is_alias else weight


@pytest.mark.parametrize("is_alias", [False, True])
@pytest.mark.parametrize("frozen", [False, True])
def test_a_parametrization_that_keeps_a_weight_in_fp8(frozen: bool, is_alias: bool) -> None:
    module, x = linear(128, 192, frozen=frozen), randn(4, 192)
    kind, want = type(module.weight), module(x)
    parametrize.register_parametrization(module, "weight", Unchanged(is_alias))
    held = module.parametrizations.weight.original
    assert type(held) is type(module.weight) is kind and isinstance(held, nn.Parameter)
    assert torch.equal(module(x), want)


class Scaled(nn.Module):
    """A parametrization that is registered and computes values."""

    def forward(self, weight: Tensor) -> Tensor:
        return weight * 1.5


def test_a_parametrization_that_is_removed_leaves_its_values_in_fp8() -> None:
    module, plain = linear(128, 192), nn.Linear(192, 128, bias=False).bfloat16()
    with torch.no_grad():
        plain.weight.copy_(module.weight.master)
    optimizer = torch.optim.SGD(module.parameters(), lr=1.0)
    weight = module.weight
    for each in (module, plain):
        parametrize.register_parametrization(each, "weight", Scaled())
        parametrize.remove_parametrizations(each, "weight")
    assert module.weight is weight and isinstance(weight, BlockwiseFP8Weight)
    assert torch.equal(weight.master, plain.weight)
    x = randn(4, 192)
    fresh = linear(128, 192)
    with torch.no_grad():
        fresh.weight.copy_(plain.weight)
    assert torch.equal(module(x), fresh(x))
    module(x).sum().backward()
    optimizer.step()
    assert not torch.equal(weight.master, plain.weight)


class Dequantized(nn.Module):
    """A parametrization of frozen and of trainable weights, with plain results."""

    def forward(self, weight: Any) -> Tensor:
        return 2 * weight.dequantize()  # exact


def test_a_parametrization_of_a_frozen_weight_is_removed_as_the_error_says() -> None:
    model = nn.Sequential(linear(128, 192, frozen=True))
    module, weight = model[0], model[0].weight
    parametrize.register_parametrization(module, "weight", Dequantized())
    wanted = module.weight
    with pytest.raises(TypeError, match="leave_parametrized=False, which keeps"):
        parametrize.remove_parametrizations(module, "weight")
    assert torch.equal(module.weight, wanted)
    parametrize.remove_parametrizations(module, "weight", leave_parametrized=False)
    assert module.weight is weight and isinstance(weight, BlockwiseFP8Tensor)
    unfreeze(model)
    parametrize.register_parametrization(module, "weight", Dequantized())
    parametrize.remove_parametrizations(module, "weight")
    freeze(model)
    assert isinstance(module.weight, BlockwiseFP8Tensor)
    assert torch.equal(module.weight.dequantize(), wanted)


def test_a_swap_is_refused_as_in_plain_pytorch() -> None:
    one, other = nn.Parameter(torch.ones(2)), nn.Parameter(torch.zeros(2))
    reference = weakref.ref(one)
    with pytest.raises(RuntimeError, match="weakref"):
        torch.utils.swap_tensors(one, other)
    assert reference() is one and one.all()
    for module in (linear(DIM, DIM), nn.Linear(DIM, DIM).bfloat16()):
        waiting = module(randn(3, DIM, grad=True)).sum()  # a graph holds the weight
        other = nn.Parameter(torch.ones(DIM, DIM, dtype=torch.bfloat16))
        assert not take_content(module.weight, other)
        with pytest.raises(RuntimeError, match="use_count"):
            torch.utils.swap_tensors(module.weight, other)
        waiting.backward()
        assert module.weight.grad is not None
