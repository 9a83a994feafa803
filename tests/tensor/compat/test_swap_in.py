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
from expecttest import assert_expected_inline
from torch import Tensor, nn
from torch.nn.utils import parametrize

from blocktensor import (
    BlockwiseFP8Tensor,
    BlockwiseFP8Weight,
    Recipe,
    convert,
    freeze,
    functional,
    to_blockwise_fp8_weights,
    unfreeze,
)
from blocktensor.tensor.compat.swap_in import swap_in, take_content
from tests.support.models import (
    DIM,
    FP32_SCALES,
    POWER_OF_TWO,
    TOKENS,
    Model,
    complaint,
    linear,
    plain,
    randn,
)


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


def test_new_data_of_another_dtype_leaves_the_gradient_as_plain_pytorch_does() -> None:
    for module in (linear(DIM, DIM, dtype=torch.float32), nn.Linear(DIM, DIM)):
        module.weight.grad = grad = torch.ones(DIM, DIM)
        module.weight.data = module.weight.data.half()
        assert module.weight.grad is grad


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


@pytest.mark.parametrize("recipe", [FP32_SCALES, POWER_OF_TWO], ids=lambda r: r.scale)
def test_new_data_of_another_dtype_as_accelerate_sets_it(recipe: Recipe) -> None:
    module, x = linear(DIM, DIM, recipe=recipe), randn(3, DIM, dtype=torch.float32)
    optimizer = torch.optim.AdamW(module.parameters())
    values = plain(module.weight).float()
    for parameter in module.parameters():
        parameter.data = parameter.data.to(torch.float32)
    weight = module.weight
    assert optimizer.param_groups[0]["params"][0] is weight
    assert (weight.dtype, weight.recipe) == (torch.float32, recipe)
    assert torch.equal(weight.master, values)
    assert torch.equal(module(x), functional.linear(x, values, recipe=recipe))


def test_new_data_without_high_precision_values_is_refused() -> None:
    module, frozen = linear(DIM, DIM), linear(DIM, DIM, frozen=True)
    x, master = randn(3, DIM), module.weight.master
    wanted = module(x)
    for new, message in (
        (frozen.weight, r"is .*\.dequantize\(\)"),
        (frozen.weight.detach().to(torch.float32), r"is .*\.dequantize\(\)"),
        (torch.ones(DIM, DIM, dtype=torch.int64), r"has dtype torch\.int64"),
    ):
        with pytest.raises(TypeError, match=rf"new \.data of an FP8 weight {message}"):
            module.weight.data = new
    with pytest.raises(NotImplementedError, match=r"cannot set \.data of .* shape \[3, 4\]"):
        module.weight.data = randn(3, 4)
    for new in (frozen.weight, module.weight):
        with pytest.raises(TypeError, match="master of a BlockwiseFP8Weight must be plain"):
            BlockwiseFP8Weight(new)
    assert module.weight.master is master
    assert torch.equal(module(x), wanted)
    module.weight.data = frozen.weight.dequantize().t().contiguous().t()
    assert torch.equal(module(x), frozen(x)) and module.weight.stride() == (1, DIM)
    module.weight.data = master.to("meta")
    assert module.weight.device == module.weight.master.device == torch.device("meta")


# Weights stay FP8 weights, whatever dtype they are given


def build(frozen: bool) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(nn.LayerNorm(192), nn.Linear(192, 256), nn.Linear(256, 128, bias=False))
    model[1].weight.requires_grad_(not frozen)
    convert(model, skip_small=False)
    return model


def types(model: nn.Module) -> list[type]:
    return [type(p) for p in model.parameters()]


@pytest.mark.filterwarnings("ignore:Complex modules are a new feature")
@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.complex64, torch.float8_e4m3fn])
def test_a_dtype_that_products_cannot_cast(dtype: torch.dtype, frozen: bool) -> None:
    model = build(frozen)
    before = types(model)
    assert (BlockwiseFP8Tensor if frozen else BlockwiseFP8Weight) in before
    model.to(dtype)
    assert types(model) == before
    assert {p.dtype for p in model.parameters()} == {dtype}
    for module in model[1:]:
        with pytest.raises(TypeError, match=str(dtype)):
            module(randn(3, module.in_features, dtype=torch.float32).to(dtype))
        with pytest.raises(TypeError, match=f"the weight .* has dtype {dtype}"):
            module(randn(3, module.in_features, dtype=torch.float32))


@pytest.mark.parametrize("frozen", [False, True])
def test_there_and_back(frozen: bool) -> None:
    model, other = build(frozen), build(frozen)
    x, grad = randn(5, 192, dtype=torch.float32, grad=True), randn(5, 128, dtype=torch.float32)
    for each in (model, other):
        each(x).backward(grad)
    model.double()
    model.float()
    assert types(model) == types(other)
    for each in (model, other):  # adds to the first gradients, which moved along
        each(x).backward(grad)
    assert torch.equal(model(x), other(x))
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        assert (p.grad is None) == (not p.requires_grad)
        assert p.grad is None or torch.equal(p.grad, q.grad)


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
