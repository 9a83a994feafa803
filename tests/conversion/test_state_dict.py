"""What a converted module saves and loads: the plain tensors of an unconverted one."""

from __future__ import annotations

import copy
import io
import pickle
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, prune

from blocktensor import (
    BlockwiseFP8Tensor,
    BlockwiseFP8Weight,
    convert,
    freeze,
    functional,
    to_blockwise_fp8_weights,
    unfreeze,
)
from tests.support.models import POWER_OF_TWO, Model, linear, plain, randn

N, K = 128, 192
X = randn(5, K, dtype=torch.float32)


@pytest.mark.parametrize("use", ["apply", "convert", "both"])
def test_a_state_dict_holds_plain_tensors(use: str) -> None:
    model = Model()
    keys = list(model.state_dict())
    if use in ("apply", "both"):
        model.apply(to_blockwise_fp8_weights)
    if use in ("convert", "both"):
        convert(model, skip_small=False)
    state = model.state_dict()
    assert list(state) == keys
    assert {type(value) for value in state.values()} == {Tensor}
    up = model.blocks[1].up.weight
    assert state["blocks.1.up.weight"].data_ptr() == up.master.data_ptr()
    state["blocks.1.up.weight"].requires_grad_()  # of a tensor of its own, over the same memory
    assert not up.master.requires_grad
    assert model.state_dict(keep_vars=True)["blocks.1.up.weight"] is up
    assert model.blocks[1].up.state_dict().keys() == {"weight", "bias"}
    twin = copy.deepcopy(model)
    mine = twin.state_dict()["blocks.1.up.weight"]
    assert mine.data_ptr() == twin.blocks[1].up.weight.master.data_ptr() != up.master.data_ptr()


@pytest.mark.parametrize("frozen", [False, True])
def test_a_linear_that_takes_over_an_fp8_weight_keeps_it_fp8(frozen: bool) -> None:
    source, target = linear(N, K, frozen=frozen), nn.Linear(K, N, bias=False)
    target.weight = source.weight
    state = {"weight": randn(N, K)}
    for assign in (False, True):
        target.load_state_dict(state, assign=assign)
        source.load_state_dict(state, assign=assign)
        assert type(target.weight) is type(source.weight)
        assert torch.equal(target(randn(5, K)), source(randn(5, K)))


def test_assigning_a_converted_models_weights() -> None:
    source, target = (linear(N, K, dtype=torch.float32) for _ in range(2))
    target.load_state_dict(source.state_dict(keep_vars=True), assign=True)
    assert isinstance(target.weight, BlockwiseFP8Weight)
    assert target.weight.master is source.weight.master


@pytest.mark.parametrize("weights_only", [True, False])
def test_saving_and_loading_a_state_dict(weights_only: bool) -> None:
    module, fresh = (linear(N, K, bias=True, dtype=torch.float32) for _ in range(2))
    with torch.no_grad():
        module.weight.mul_(3)
    module(X)
    file = io.BytesIO()
    torch.save(module.state_dict(), file)
    assert file.tell() < 4 * N * K + 5000  # no FP8 form in the file
    file.seek(0)
    fresh.load_state_dict(torch.load(file, weights_only=weights_only))
    assert torch.equal(fresh.weight.master, module.weight.master)


def test_a_module_that_has_run_can_be_pickled() -> None:
    module = linear(N, K, bias=True, dtype=torch.float32)
    y = module(X)
    again = pickle.loads(pickle.dumps(module))
    assert again.weight.cache.master.data_ptr() == again.weight.master.data_ptr()
    assert again.weight.cache.nbytes() == 0
    assert torch.equal(again(X), y)


def test_whichever_module_holds_a_weight_its_state_is_plain() -> None:
    """Also in modules that were made from converted ones later."""
    model = Model(tied=True)
    model.alias = model.lm_head.weight
    model.register_buffer("table", torch.ones(3))
    model.apply(to_blockwise_fp8_weights)
    assert isinstance(model.alias, BlockwiseFP8Weight)
    assert isinstance(model.embed.weight, BlockwiseFP8Weight)
    prune.l1_unstructured(model.lm_head, "weight", 0.5)
    later = nn.Module()
    later.register_parameter("taken", model.alias)
    later.register_buffer("kept", model.alias.detach())
    parametrized = parametrizations.weight_norm(linear(N, K))
    for module in (model, later, parametrized, nn.ParameterList([model.alias])):
        state = module.state_dict()
        assert {type(value) for value in state.values()} == {Tensor}
        for name, value in module.state_dict(keep_vars=True).items():
            assert state[name].data_ptr() == value.data_ptr()
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    assert b"BlockwiseFP8" not in file.getvalue()


def of_kind(kind: str, seed: int = 3) -> nn.Linear:
    """A weight of 200x192 in one of its forms."""
    module = nn.Linear(192, 200, bias=False, dtype=torch.float32)
    nn.init.normal_(module.weight, generator=torch.Generator().manual_seed(seed))
    module.requires_grad_(kind != "frozen")
    if kind != "plain":
        to_blockwise_fp8_weights(module, POWER_OF_TWO)
    return module


def values(weight: Tensor) -> Tensor:
    return weight.dequantize() if isinstance(weight, BlockwiseFP8Tensor) else plain(weight)


KINDS = ("plain", "trainable", "frozen")


@pytest.mark.parametrize("assign", [False, True], ids=["copy", "assign"])
@pytest.mark.parametrize("target", KINDS)
@pytest.mark.parametrize("kind", KINDS)
def test_the_state_of_each_kind_loads_into_each(kind: str, target: str, assign: bool) -> None:
    made, given = of_kind(target), of_kind(kind, seed=4)
    wanted, kept, before = values(given.weight).clone(), made.weight, type(made.weight)
    state, x = given.state_dict(), randn(5, 192, dtype=torch.float32)
    of_state = state["weight"]
    made(x)  # fills the caches
    takes_type = assign and (kind, target) == ("frozen", "plain")
    with pytest.warns(match="they stay frozen") if takes_type else nullcontext():
        made.load_state_dict(state, assign=assign)
    assert state["weight"] is of_state
    if assign and target == "trainable" and kind != "frozen":
        assert made.weight.master.data_ptr() == of_state.data_ptr()
    if target == "frozen":
        wanted = BlockwiseFP8Tensor.from_values(wanted, (128, 128), POWER_OF_TWO).dequantize()
    assert torch.equal(values(made.weight), wanted)
    assert type(made.weight) is (BlockwiseFP8Tensor if takes_type else before)
    assert made.weight is kept or assign
    assert made.weight.requires_grad == (target != "frozen" and not takes_type)
    if target != "plain" or takes_type:
        assert torch.equal(made(x), functional.linear(x, wanted, recipe=POWER_OF_TWO))


@pytest.mark.parametrize(
    ("kind", "frozen"), [("frozen", False), ("frozen", True), ("plain", False)]
)
def test_a_state_is_assigned_to_a_model_on_meta(kind: str, frozen: bool) -> None:
    given = of_kind(kind)
    with torch.device("meta"):
        made = nn.Linear(192, 200, bias=False).requires_grad_(not frozen)
        to_blockwise_fp8_weights(made, POWER_OF_TWO)
    made.load_state_dict(given.state_dict(), assign=True)
    assert torch.equal(values(made.weight), values(given.weight))
    assert type(made.weight) is (BlockwiseFP8Tensor if frozen else BlockwiseFP8Weight)
    assert isinstance(made.weight, nn.Parameter)
    assert made.weight.requires_grad is not frozen
    x = randn(5, 192, dtype=torch.float32).requires_grad_()
    made(x).sum().backward()
    assert (made.weight.grad is None) == frozen and x.grad is not None
    assert torch.equal(made(x), functional.linear(x, values(given.weight), recipe=POWER_OF_TWO))


def test_a_frozen_state_is_assigned_to_a_plain_model_that_requires_no_gradient() -> None:
    model, given = nn.Linear(192, 200, bias=False).requires_grad_(False), of_kind("frozen")
    model.load_state_dict(given.state_dict(keep_vars=True), assign=True)
    assert model.weight is given.weight and not given.weight.requires_grad


def test_a_frozen_parameter_that_is_assigned_keeps_its_flag() -> None:
    """The hook of ``load_state_dict`` does not touch what a user writes."""
    model = nn.Linear(192, 200)
    model.weight = nn.Parameter(of_kind("frozen").weight.detach())
    assert model.weight.requires_grad


class OwnState(nn.Linear):
    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        destination[f"{prefix}mine"] = self.weight.detach()


def test_a_module_that_saves_its_state_itself_saves_plain_tensors() -> None:
    module = OwnState(K, N)
    to_blockwise_fp8_weights(module)
    assert type(module.state_dict()["mine"]) is Tensor


def test_hooks_are_registered_once() -> None:
    model = nn.Sequential(linear(N, K), nn.GELU(), linear(K, N))
    for _ in range(2):
        freeze(model), unfreeze(model)
        convert(model, POWER_OF_TWO, skip_small=False)
        model.apply(to_blockwise_fp8_weights)
    for module in (model[0], model[2]):
        assert len(module._state_dict_hooks) == len(module._load_state_dict_pre_hooks) == 1


def test_what_is_copied_is_no_weight() -> None:
    module, ordinary = linear(N, K), nn.Linear(K, N, bias=False, dtype=torch.bfloat16)
    for target in (module, ordinary):
        target.load_state_dict({"weight": torch.arange(N * K).view(N, K)})
        with pytest.raises(RuntimeError, match="size mismatch for weight"):
            target.load_state_dict({"weight": torch.ones(3)})
    assert torch.equal(plain(module.weight), ordinary.weight)
    with pytest.raises(RuntimeError, match="size mismatch for weight"):
        linear(N, K, frozen=True).load_state_dict({"weight": torch.ones(3)})
    with pytest.raises(RuntimeError, match=r"expected torch.Tensor .* but received .*list"):
        linear(N, K, frozen=True).load_state_dict({"weight": [1.0]})


def test_a_tied_layer_takes_a_plain_weight_and_stays_in_fp8() -> None:
    model = nn.Sequential(nn.Linear(K, K, bias=False), nn.Linear(K, K, bias=False))
    model[1].weight = model[0].weight
    convert(model, skip_small=False)
    model[1].load_state_dict({"weight": torch.randn(K, K)}, assign=True)
    assert isinstance(model[1].weight, BlockwiseFP8Weight)


def test_a_whole_model_loads_with_its_classes_alone() -> None:
    model, file = nn.Sequential(linear(N, K)), io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    named = torch.serialization.get_unsafe_globals_in_checkpoint(file)
    assert not [name for name in named if name.startswith("blocktensor")]
    file.seek(0)
    with torch.serialization.safe_globals(
        [nn.Sequential, nn.Linear, nn.modules.module._WrappedHook]
    ):
        loaded = torch.load(file, weights_only=True)
    x = X.bfloat16()
    assert torch.equal(loaded(x), model(x))
    assert type(loaded[0].weight) is BlockwiseFP8Weight
    assert type(loaded.state_dict()["0.weight"]) is Tensor
