"""LoRA of linear layers in FP8: thin matmuls beside the FP8 one, or peft's own forward."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

pytest.importorskip("peft")

from peft import LoraConfig, PeftModel, get_peft_model
from peft.tuners.lora.layer import Linear as LoraLinear

import blocktensor.integrations.peft
from blocktensor import (
    BlockwiseFP8Tensor,
    BlockwiseFP8Weight,
    convert,
    freeze,
    fuse,
    share_inputs,
    unfreeze,
)
from blocktensor.conversion import linear_adapters
from blocktensor.patches import LINEAR_ADAPTERS
from tests.support.asserts import assert_no_marked_product
from tests.support.compiling import fresh, graphs, instantiates
from tests.support.models import randn
from tests.support.numeric import assert_same, relative_error

K, N, RANK = 320, 192, 5


class Two(nn.Module):
    """Two linear layers of one input; the second has a bias."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(K, N, bias=False)
        self.second = nn.Linear(K, N)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.first(x) + self.second(x)
        return y


def base(frozen: bool = True, dtype: torch.dtype = torch.bfloat16) -> nn.Module:
    torch.manual_seed(0)
    model = Two().to(dtype)
    convert(model, skip_small=False)
    if frozen:
        freeze(model)
    return model


def adapted(model: nn.Module, **options: Any) -> PeftModel:
    """Adapters on both layers, none of which is zero."""
    torch.manual_seed(1)
    options = {"r": RANK, "lora_alpha": 10, "target_modules": ["first", "second"], **options}
    autocast = options.pop("autocast_adapter_dtype", True)
    made = get_peft_model(model, LoraConfig(**options), autocast_adapter_dtype=autocast)
    for name, parameter in made.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.1)
    return made


def peft_alone() -> AbstractContextManager[Any]:
    assert LINEAR_ADAPTERS.apply()
    return mock.patch.object(LoraLinear, "forward", LoraLinear.forward.__wrapped__)


def results(model: Any, x: Tensor) -> list[Tensor]:
    """The output and the gradients of x and of what is trained."""
    model.zero_grad()
    leaf = x.detach().requires_grad_()
    torch.manual_seed(2)
    y = model(leaf)
    y.backward(randn(*y.shape, seed=9, dtype=y.dtype))
    trained = [p.grad for p in model.parameters() if p.requires_grad]
    return [y.detach(), leaf.grad, *trained]  # type: ignore[list-item]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of terms of each call of the function that our forward uses."""
    made: list[int] = []
    theirs = linear_adapters.with_terms

    def counted(x: Tensor, w: Tensor, terms: Any, *args: Any, **kwargs: Any) -> Tensor:
        made.append(len(terms))
        return theirs(x, w, terms, *args, **kwargs)

    monkeypatch.setattr(linear_adapters, "with_terms", counted)
    return made


@pytest.mark.parametrize("adapters", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("frozen", [True, False], ids=["frozen", "with masters"])
@pytest.mark.parametrize("shape", [(7,), (2, 3), ()], ids=["a matrix", "a batch", "a vector"])
def test_as_peft_computes_it_up_to_the_rounding_of_adapters(
    shape: tuple[int, ...], frozen: bool, adapters: torch.dtype, calls: list[int]
) -> None:
    model = adapted(base(frozen), autocast_adapter_dtype=adapters == torch.float32)
    x = randn(*shape, K, seed=3)
    got = results(model, x)
    assert calls == [1, 1]
    with peft_alone():
        want = results(model, x)
    assert len(got) == 2 + 2 * 2
    for ours, theirs in zip(got, want, strict=True):
        assert (ours.shape, ours.dtype) == (theirs.shape, theirs.dtype)
        assert relative_error(ours, theirs) <= 2**-7


def test_one_weight_is_a_stack_of_one_expert() -> None:
    """Bit for bit, forward and backward, with a bias and ragged sizes."""
    x, model = randn(130, K, seed=3), adapted(base())
    leaf = x.clone().requires_grad_()
    y = model.base_model.model.second(leaf)
    y.backward(randn(*y.shape, seed=9))
    layer: Any = model.base_model.model.second
    weight, bias = layer.base_layer.weight, layer.base_layer.bias
    a, b = layer.lora_A["default"].weight, layer.lora_B["default"].weight
    stack = BlockwiseFP8Tensor.from_values(weight.dequantize()[None], (128, 128))
    stacked = [t.detach()[None].requires_grad_() for t in (a, b)]
    x2 = x.clone().requires_grad_()
    ends = torch.tensor([len(x)], dtype=torch.int32)
    made = blocktensor.functional.grouped_linear(
        x2,
        torch.baddbmm(stack, stacked[1], stacked[0], alpha=layer.scaling["default"]),
        ends,
        bias[None],
    )
    made.backward(randn(*y.shape, seed=9))
    assert_same(stack.rowwise()[0][0], weight.rowwise()[0])
    assert_same(y, made)
    assert_same(leaf.grad, x2.grad)
    assert_same(a.grad, stacked[0].grad[0])  # type: ignore[index]
    assert_same(b.grad, stacked[1].grad[0])  # type: ignore[index]


Change = Callable[[Any], object]


def _first(model: Any) -> Any:
    return model.base_model.model.first


def _part(model: Any, of: str) -> Any:
    layer = _first(model)
    return layer.base_layer if of == "base" else getattr(layer, of)["default"]


def _hooked(of: str) -> Change:
    return lambda model: _part(model, of).register_forward_hook(lambda *_: None)


def _own_forward(of: str) -> Change:
    def change(model: Any) -> None:
        part = _part(model, of)
        part.forward = lambda x: 3 * nn.functional.linear(x, part.weight)

    return change


def _tensor_as_scaling(model: Any) -> None:
    _first(model).scaling["default"] = torch.tensor(2.0, requires_grad=True)


def _other_rank(model: Any) -> None:
    _part(model, "lora_B").weight = nn.Parameter(torch.randn(N, 8))


PLAIN: dict[str, Callable[[], Any]] = {
    "DoRA": lambda: adapted(base(), use_dora=True),
    "a bias": lambda: adapted(base(), lora_bias=True, target_modules=["second"]),
    "plain weights": lambda: adapted(Two().bfloat16()),
    "fp16": lambda: adapted(base(dtype=torch.float16)),
}


@pytest.mark.parametrize("kind", PLAIN)
def test_what_is_no_plain_adapter_keeps_the_forward_of_peft(kind: str, calls: list[int]) -> None:
    model = PLAIN[kind]()
    x = randn(6, K, seed=3).to(torch.float16 if kind == "fp16" else torch.bfloat16)
    got = results(model, x)
    assert calls == []
    with peft_alone():
        for ours, theirs in zip(got, results(model, x), strict=True):
            assert_same(ours, theirs)


CHANGES: dict[str, Change] = {
    **{f"a hook on {of}": _hooked(of) for of in ("base", "lora_A", "lora_B")},
    **{f"another forward of {of}": _own_forward(of) for of in ("base", "lora_A", "lora_B")},
    "a tensor as scaling": _tensor_as_scaling,
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_layer_that_is_changed_or_watched_keeps_the_forward_of_peft(
    change: str, calls: list[int]
) -> None:
    model, x = adapted(base()), randn(6, K, seed=3)
    CHANGES[change](model)
    y = model(x)
    assert calls == [1], "the other layer"
    with peft_alone():
        assert relative_error(y, model(x)) <= 2**-7


def test_matrices_that_do_not_fit_raise_as_in_peft() -> None:
    model, x = adapted(base()), randn(6, K, seed=3)
    _other_rank(model)
    with pytest.raises(RuntimeError, match="cannot be multiplied"):
        model(x)


def test_hooks_for_all_modules_see_each(calls: list[int]) -> None:
    model, x, seen = adapted(base()), randn(6, K, seed=3), list[str]()
    hook = nn.modules.module.register_module_forward_hook(
        lambda m, *_: seen.append(type(m).__name__)
    )
    try:
        model(x)
    finally:
        hook.remove()
    assert calls == []
    assert seen.count("Linear") == 2 * 4, "peft's layers, bases, A and B"


class Always(nn.Dropout):
    """Dropout in eval too, as for Monte Carlo estimates."""

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.dropout(x, self.p, True)


def test_a_dropout_of_ones_own_runs(calls: list[int]) -> None:
    model, x = adapted(base()).eval(), randn(6, K, seed=3)
    for layer in (model.base_model.model.first, model.base_model.model.second):
        layer.lora_dropout["default"] = Always(0.5)
    assert not torch.equal(model(x), model(x))
    model.base_model.model.first.lora_dropout["default"] = nn.Identity()
    first, identity = _first(model), nn.Identity()
    plain = first(x)
    first.lora_dropout["default"] = identity
    identity.register_forward_hook(lambda _, args, y: 3 * y)
    base_alone = first.base_layer(x)
    assert relative_error(first(x) - base_alone, 3 * (plain - base_alone)) <= 0.05


def test_a_bias_that_is_computed_is_read() -> None:
    model, x = adapted(base()), randn(6, K, seed=3)
    layer = model.base_model.model.second
    nn.utils.parametrize.register_parametrization(layer.base_layer, "bias", nn.Tanh())
    y = layer(x)
    with peft_alone():
        assert relative_error(y, layer(x)) <= 2**-7


def test_an_error_names_the_layer() -> None:
    model = adapted(base())
    with pytest.raises(TypeError) as caught:
        model(randn(6, K, seed=3, dtype=torch.float32))
    assert str(caught.value).endswith("; in 'base_model.model.first', a Linear")


def test_adapters_for_each_sample_keep_the_forward_of_peft(calls: list[int]) -> None:
    model, x = adapted(base()).eval(), randn(2, K, seed=3)
    plain = model(x)
    assert calls == [1, 1]
    with model.disable_adapter():
        without = model(x)
    assert calls == [1, 1]
    mixed = model(x, adapter_names=["default", "__base__"])
    assert calls == [1, 1]
    assert relative_error(mixed[:1], plain[:1]) <= 2**-7
    assert_same(mixed[1:], without[1:])


def test_several_adapters_are_added_in_their_order(calls: list[int]) -> None:
    model, x = adapted(base()), randn(6, K, seed=3)
    model.add_adapter("other", LoraConfig(r=3, target_modules=["first"], use_rslora=True))
    model.base_model.set_adapter(["default", "other"])
    for name, parameter in model.named_parameters():
        if "lora_B.other" in name:
            nn.init.normal_(parameter, std=0.1)
    got = results(model, x)
    assert calls == [2, 1]
    with peft_alone():
        want = results(model, x)
    assert len(got) == 2 + 2 * 3
    assert all(relative_error(*pair) <= 2**-7 for pair in zip(got, want, strict=True))


def test_dropout_is_applied_to_the_input_of_the_adapter_alone(calls: list[int]) -> None:
    model, x = adapted(base(), lora_dropout=0.5), randn(600, K, seed=3)
    dropped = results(model, x)
    assert calls == []
    with peft_alone():
        want = results(model, x.clone())
    whole = results(model.eval(), x)
    assert calls == [1, 1]
    for ours, theirs in zip(dropped, want, strict=True):
        assert 0.9 < float(ours.float().norm() / theirs.float().norm()) < 1.1
    with model.disable_adapter():
        plain = model(x)
    assert_same(results(model.train(), x)[0], dropped[0])
    noise, term = (dropped[0] - whole[0]).float(), (whole[0] - plain).float()
    assert 0.5 < float(noise.norm() / term.norm()) < 2, "as large as the term itself"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_under_autocast(dtype: torch.dtype, calls: list[int]) -> None:
    model, x = adapted(base(dtype=dtype)), randn(6, K, seed=3).to(dtype)
    with torch.autocast("cpu", torch.bfloat16):
        got = results(model, x)
    assert calls == [1, 1]
    assert got[0].dtype == torch.bfloat16
    with peft_alone(), torch.autocast("cpu", torch.bfloat16):
        want = results(model, x)
    for ours, theirs in zip(got, want, strict=True):
        assert ours.dtype == theirs.dtype
        assert relative_error(ours, theirs) <= 2**-6


def test_no_copy_of_an_input_is_saved() -> None:
    """X itself, once for both layers, in its dtype; and thin matrices."""
    model, x = adapted(base()), randn(256, K, seed=3)

    def saved() -> dict[torch.dtype, int]:
        storages: dict[int, Tensor] = {}
        with saved_tensors_hooks(lambda t: storages.setdefault(t.data_ptr(), t), lambda t: t):
            model(x.clone().requires_grad_())
        found: dict[torch.dtype, int] = {}
        for t in storages.values():
            if t.shape[:1] == x.shape[:1]:
                found[t.dtype] = found.get(t.dtype, 0) + t.numel()
        return found

    rank = 8  # padded to whole vectors
    assert saved() == {torch.bfloat16: x.numel() + 2 * len(x) * rank}
    with peft_alone():
        assert saved()[torch.float32] >= x.numel()


def test_layers_share_the_cast_of_their_input(calls: list[int]) -> None:
    model, x = adapted(base()), randn(6, K, seed=3)
    want = results(model, x)
    share_inputs(model)
    for got, each in zip(results(model, x), want, strict=True):
        assert_same(got, each)
    assert calls == [1] * 4


def test_audit_finds_what_runs(calls: list[int]) -> None:
    model, x = adapted(base()), randn(6, K, seed=3, grad=True)
    report = assert_no_marked_product(model, x)
    assert calls == [1, 1]
    found = {(entry.kind, entry.precision) for entry in report.entries}
    assert found == {("forward", "bf16"), ("backward", "bf16"), ("fprop", "FP8"), ("dgrad", "FP8")}
    thin = [entry for entry in report.entries if entry.precision == "bf16"]
    assert {"lora_A" in e.weight for e in thin if e.n == K or e.k == K} == {True}
    assert all("adapter of peft" in e.remedy for e in thin if "lora_A" in e.weight)


@instantiates
@pytest.mark.filterwarnings("ignore:Dynamo detected a call to a `functools.lru_cache`")
@pytest.mark.parametrize("kind", ["one adapter", "two adapters", "dropout", "masters"])
def test_a_compiled_model_has_one_graph_and_the_same_bits(kind: str) -> None:
    """A dropout that drops nothing: terms are added to the output, one by one, as second ones."""
    model = adapted(base(frozen=kind != "masters"), lora_dropout=1e-9 * (kind == "dropout"))
    if kind == "two adapters":
        both = LoraConfig(r=3, target_modules=["first", "second"], init_lora_weights=False)
        model.add_adapter("other", both)
        model.base_model.set_adapter(["default", "other"])
    x = randn(2, 3, K, seed=3)
    want = results(model, x)
    assert all(grad.any() for grad in want)
    with fresh():
        compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
        found = results(compiled, x)
        for got, each in zip(found, want, strict=True):
            assert_same(got, each)
        assert graphs() == 1


@instantiates
@pytest.mark.filterwarnings("ignore:Dynamo detected a call to a `functools.lru_cache`")
@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("rank", [RANK, 80])
def test_an_exported_program_drops_no_gradient(rank: int, strict: bool) -> None:
    """A strict program would run the layers without gradients, those of A and B too."""
    model, x = adapted(base(), r=rank), randn(6, K, seed=3)
    with pytest.raises(Exception, match=r"with an adapter, of which a gradient .*no_grad"):
        torch.export.export(model, (x,), strict=strict)
    with torch.no_grad():
        program = torch.export.export(model, (x,), strict=strict).module()
        assert_same(program(x), model(x))


def test_unfreezing_moves_no_more_than_the_rounding() -> None:
    model, x = adapted(base()), randn(6, K, seed=3)
    frozen = results(model, x)[0]
    assert len(unfreeze(model)) == 2
    weight: Any = model.base_model.model.first.base_layer.weight
    assert isinstance(weight, BlockwiseFP8Weight)
    assert relative_error(results(model, x)[0], frozen) <= 2**-7


def test_fused_and_copied_models_keep_the_adapters() -> None:
    model, x = adapted(base()), randn(6, K, seed=3)
    want = results(model, x)
    fuse(model)
    for got, each in zip(results(copy.deepcopy(model), x), want, strict=True):
        assert_same(got, each)
