"""A module is fused only if it computes the same bits; verification changes nothing."""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from expecttest import assert_expected_inline
from torch import Tensor, nn

from blocktensor import Recipe, convert, fuse
from blocktensor.fusion.fused_class import fused_modules
from tests.support.fused_kinds import KINDS, Kind, unchanged, why_left_alone
from tests.support.gated import WeightShapes, assert_bits
from tests.support.mlps import HIDDEN, MLP, PLANTED, K, X, converted, fused_in, planted, results

DTYPES = [torch.bfloat16, torch.float32]

CHANGES: dict[str, tuple[Callable[[Any, Tensor], Any], str]] = {
    "scaled": (lambda m, y: y * 1.01, "differs in its output"),
    "a constant": (lambda m, y: y + 1e-3, "differs in its output"),
    "dropout": (lambda m, y: F.dropout(y, 0.1, m.training), "differs in its output"),
    "another evaluation mode": (
        lambda m, y: y if m.training else y * 1.01,
        "differs in its output in evaluation mode",
    ),
    "a tuple": (lambda m, y: (y, None), "differs in the type of its output"),
}
"""Changes of the result of any forward, and the reasons for which it is left alone."""


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_a_changed_forward_of_every_kind(kind: Kind, change: str) -> None:
    model = kind.make(torch.bfloat16).train()
    module, (changed, reason) = model.get_submodule(kind.module), CHANGES[change]
    own: Any = type(module)

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        return changed(self, own.forward(self, *args, **kwargs))

    module.__class__ = type(own.__name__, (own,), {"forward": forward})
    assert why_left_alone(model, kind.module) == reason
    assert len(dict(fused_modules(model))) == kind.runs - 1


REASONS = {
    "a clamp far away": "differs in its output",
    "a gradient stopped at up": "differs in the gradient of its input",
    "two inputs": (
        "raised AttributeError on one tensor: 'Planted' object has no attribute 'missing'"
    ),
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_difference_is_found(name: str, dtype: torch.dtype) -> None:
    model = converted(planted(name), dtype=dtype)
    assert why_left_alone(model).startswith(REASONS.get(name, "differs in "))
    assert type(model).__name__ == "Planted"


def test_a_difference_that_weights_of_zeros_would_hide() -> None:
    model = converted(planted("GELU for SiLU"))
    with torch.no_grad():
        model.down_proj.weight.zero_()
    assert "its output" in why_left_alone(model)


@pytest.mark.parametrize("make", [MLP, lambda: planted("a clamp far away")])
def test_a_verified_model_is_as_it_was(make: Callable[[], nn.Module]) -> None:
    model: Any = converted(make())
    model(X.bfloat16()).sum().backward()
    model.up_proj.eval()
    with unchanged(model):
        fuse(model)
    assert [p.cache.casts for p in model.parameters()] == [1, 1, 1]


def with_(change: Callable[[Any], Any]) -> Any:
    model = converted(MLP())
    change(model)
    return model


def test_modules_that_are_no_gated_mlp_by_their_looks() -> None:
    plain_linear = nn.Linear(K, HIDDEN, bias=False, dtype=torch.bfloat16)
    other: Any = converted(MLP(), Recipe(scale="power_of_two"))
    models = [
        with_(lambda mlp: mlp.register_parameter("scale", nn.Parameter(torch.ones(())))),
        with_(lambda mlp: mlp.register_buffer("limit", torch.ones(()))),
        with_(lambda mlp: mlp.add_module("drop", nn.Dropout(0.0))),
        with_(lambda mlp: setattr(mlp, "act_fn", nn.PReLU(init=0.0))),
        converted(MLP(act=nn.Sequential(nn.SiLU()))),
        with_(lambda mlp: setattr(mlp, "up_proj", plain_linear)),
        with_(lambda mlp: setattr(mlp, "up_proj", nn.Identity())),
        with_(lambda mlp: setattr(mlp, "forward", lambda x: x)),
        with_(lambda mlp: setattr(mlp, "down_proj", other.down_proj)),
        converted(MLP(), Recipe(wgrad_input="high_precision")),
        with_(lambda mlp: mlp.gate_proj.register_forward_hook(lambda *_: None)),
        with_(lambda mlp: mlp.act_fn.register_forward_hook(lambda *_: None)),
        converted(MLP(act=nn.Tanh())),
        converted(MLP(act=torch.sigmoid)),
        converted(MLP(act=nn.GELU())),
    ]
    assert_expected_inline(
        "\n".join(why_left_alone(model) for model in models),
        """\
has more than linears and an activation: scale
has more than linears and an activation: limit
has more than linears and an activation: drop
has more than linears and an activation: act_fn
has more than linears and an activation: act_fn
up_proj is not in FP8
up_proj is a Identity, not an nn.Linear
its forward was replaced on the instance
its linears have scale='fp32' and 'power_of_two'
weight gradients read high precision (wgrad_input='high_precision')
gate_proj has hooks
act_fn has hooks
its act_fn, Tanh, is none of silu, gelu_tanh
its act_fn, sigmoid, is none of silu, gelu_tanh
its act_fn, GELU, is none of silu, gelu_tanh""",
    )


ACTIVATIONS = {"silu": (nn.SiLU(), nn.SiLU(inplace=True)), "gelu_tanh": (nn.GELU("tanh"),)}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("bias", [False, True])
def test_what_is_a_gated_mlp_passes(bias: bool, dtype: torch.dtype) -> None:
    for name, activations in ACTIVATIONS.items():
        for act in activations:
            model = converted(MLP(bias=bias, act=act), dtype=dtype)
            wanted = results(model)
            (entry,) = fuse(model).fused
            assert entry.computes == f"down_proj({name}(gate_proj(x)) * up_proj(x))"
            assert_bits(results(model), wanted)


class Wide(nn.Module):
    """A gated MLP of a large model, some of which read their own sizes."""

    def __init__(self, reads_sizes: bool, limit: float | None = None) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = (nn.Linear(704, 768, bias=False) for _ in range(2))
        self.down_proj = nn.Linear(768, 704, bias=False)
        self.act_fn, self.reads_sizes, self.limit = nn.SiLU(), reads_sizes, limit

    def forward(self, x: Tensor) -> Tensor:
        if self.reads_sizes:
            x = x.reshape(*x.shape[:-1], 704)
        h = self.act_fn(self.gate_proj(x)) * self.up_proj(x)
        return self.down_proj(h if self.limit is None else h.clamp(max=self.limit))


@pytest.mark.parametrize("limit", [None, 9.0])
@pytest.mark.parametrize("reads_sizes", [False, True])
def test_large_modules_are_verified_with_fewer_features(
    reads_sizes: bool, limit: float | None
) -> None:
    model = Wide(reads_sizes, limit).bfloat16()
    convert(model, skip_small=False)
    with WeightShapes() as weights:
        (entry,) = fuse(model).entries
    assert entry.reason == ("" if limit is None else "differs in its output")
    assert fused_in(model) == ([""] if limit is None else [])
    assert weights.seen == ({(768, 704), (704, 768)} if reads_sizes else {(656, 656)})


# Verification runs on copies, and tells which forwards change what they hold


class Tried(MLP):
    """Changes something in every forward."""

    amax = 0.0

    def __init__(self, held: Any, change: Callable[[Any, Tensor], Any]) -> None:
        super().__init__()
        self.held, self.change = held, change
        self.up_proj.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.change(self, x)
        return super().forward(x)


class Slots:
    __slots__ = ("calls", "later")

    def __init__(self) -> None:
        self.calls = [0]


class Case(NamedTuple):
    """What an MLP holds, how its forward changes that, what tells, and the name in the reason."""

    change: Callable[[Any, Tensor], Any]
    state: Callable[[Any], Any]
    held: Callable[[], Any] = lambda: None
    name: str = "held"


def shown(m: Any) -> str:
    return repr(m.held)


CASES = {
    "an attribute": Case(
        lambda m, x: setattr(m, "amax", max(m.amax, x.detach().abs().max().item())),
        lambda m: m.amax, name="amax"),
    "a new attribute": Case(
        lambda m, x: setattr(m, "latest", x), lambda m: "latest" in vars(m), name="latest"),
    "a tensor of an object": Case(
        lambda m, x: m.held[0].sum.add_(1), shown, lambda: (SimpleNamespace(sum=torch.zeros(())),)),
    "a list in a dictionary": Case(
        lambda m, x: m.held["rows"].append(len(x)), shown, lambda: {"rows": [0]}),
    "a deque": Case(lambda m, x: m.held.append(len(x)), shown, lambda: deque([0], 2)),
    "a set": Case(lambda m, x: m.held.add(len(m.held)), shown, lambda: {0}),
    "a counter": Case(lambda m, x: m.held.update(["forward"]), shown, Counter[str]),
    "a list in a slot": Case(lambda m, x: m.held.calls.append(1), lambda m: [*m.held.calls], Slots),
    "a new slot": Case(
        lambda m, x: setattr(m.held, "later", len(x)), lambda m: hasattr(m.held, "later"), Slots),
    "an array": Case(
        lambda m, x: np.add(m.held, 1, out=m.held), shown, lambda: np.zeros((2, 3))[:, ::2]),
    "generators": Case(  # its own and Python's
        lambda m, x: (torch.rand(3, generator=m.held), random.random()),
        lambda m: (m.held.get_state().tolist(), random.getstate()),
        lambda: torch.Generator().manual_seed(3)),
    "a weight": Case(
        lambda m, x: m.up_proj.weight.detach().clamp_(-0.1, 0.1),
        lambda m: m.up_proj.weight.detach().abs().max().item(), name="up_proj.weight"),
    "a buffer": Case(
        lambda m, x: m.up_proj.calls.add_(1), lambda m: m.up_proj.calls.item(),
        name="up_proj.calls"),
    "its activation": Case(
        lambda m, x: setattr(m.act_fn, "calls", 1 + vars(m.act_fn).get("calls", 0)),
        lambda m: vars(m.act_fn).get("calls"), name="act_fn.calls"),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_a_forward_with_state_is_left_alone_and_keeps_it(name: str) -> None:
    case = CASES[name]
    model: Any = converted(Tried(case.held(), case.change))
    before, keys = case.state(model), list(vars(model))
    (entry,) = fuse(model).entries
    assert entry.reason == f"its forward changes {case.name}"
    assert fused_in(model) == []
    assert case.state(model) == before
    assert list(vars(model)) == keys
    model(X.bfloat16())
    assert case.state(model) != before


def test_attributes_that_a_forward_reads_are_no_state() -> None:
    class Reads(MLP):
        def __init__(self) -> None:
            super().__init__()
            self.scale, self.table, self.parent = {"by": [1]}, torch.ones(3), [nn.Linear(2, 2)]

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x * self.scale["by"][0])

    assert fuse(converted(Reads())).left_alone == ()


class OfAutocast(MLP):
    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return y * 2 if torch.is_autocast_enabled("cpu") else y


def test_a_forward_of_another_kind_under_autocast() -> None:
    (left,) = fuse(converted(OfAutocast())).left_alone
    assert left.reason.endswith(" under autocast")
