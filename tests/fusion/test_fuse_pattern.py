"""A module is fused only if it computes the same bits; verification changes nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from expecttest import assert_expected_inline
from torch import Tensor, nn

from blocktensor import Recipe, convert, fuse
from blocktensor.fusion.fused_class import fused_modules
from tests.support.fused_kinds import KINDS, Kind, unchanged, why_left_alone
from tests.support.gated import EAGER, WeightShapes, assert_bits
from tests.support.mlps import HIDDEN, MLP, PLANTED, K, X, converted, fused_in, planted, results

DTYPES = [torch.bfloat16, torch.float32]

CHANGES: dict[str, tuple[Callable[[Any, Tensor], Any], str]] = {
    "scaled": (lambda m, y: y * 1.01, "differs in its output"),
    "a constant": (lambda m, y: y + 1e-3, "differs in its output"),
    "dropout": (
        lambda m, y: F.dropout(y, 0.1, m.training),
        "its forward draws random numbers",
    ),
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
    "dropout of few": "its forward draws random numbers",
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
    ]
    assert_expected_inline(
        "\n".join(why_left_alone(model) for model in models),
        """\
has more than linear layers and an activation: scale
has more than linear layers and an activation: limit
has more than linear layers and an activation: drop
has more than linear layers and an activation: act_fn
has more than linear layers and an activation: act_fn
up_proj is not in FP8
up_proj is a torch.nn.modules.linear.Identity, not an nn.Linear
its forward was replaced on the instance
its linear layers have scale='fp32' and 'power_of_two'
weight gradients read high precision (wgrad_input='high_precision')
gate_proj has hooks
act_fn has hooks
its act_fn, Tanh, is none of silu, gelu, gelu_tanh, relu2
its act_fn, sigmoid, is none of silu, gelu, gelu_tanh, relu2""",
    )


class ReLUSquared(nn.Module):
    """As transformers' ``relu2`` writes it."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.square(F.relu(x))


MODULES: dict[str, tuple[Callable[[Tensor], Tensor], ...]] = {
    "silu": (nn.SiLU(), nn.SiLU(inplace=True)),
    "gelu": (nn.GELU(),),
    "gelu_tanh": (nn.GELU("tanh"),),
    "relu2": (ReLUSquared(), lambda x: F.relu(x) ** 2),
}
"""Other ways in which models write an activation."""


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("bias", [False, True])
def test_what_is_a_gated_mlp_passes(bias: bool, dtype: torch.dtype) -> None:
    for name, eager in EAGER.items():
        for act in (eager, *MODULES.get(name, ())):
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


class Joint(nn.Module):
    """One linear layer makes gate and up."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_up_proj = nn.Linear(704, 2 * 768, bias=False)
        self.down_proj, self.act_fn = nn.Linear(768, 704, bias=False), nn.SiLU()

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up_proj(x).chunk(2, -1)
        return self.down_proj(self.act_fn(gate) * up)


def test_one_linear_for_gate_and_up_is_verified_with_fewer_features() -> None:
    model = Joint().bfloat16()
    convert(model, skip_small=False)
    with WeightShapes() as weights:
        assert fuse(model).left_alone == ()
    assert weights.seen == {(656, 656), (656, 328)}


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


def test_what_a_forward_does_not_read_is_no_state() -> None:
    class Holds(MLP):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.of_ones, self.parent = {"by": [1]}, torch.ones(3), [nn.Linear(2, 2)]

    assert fuse(converted(Holds())).left_alone == ()


class OfAutocast(MLP):
    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return y * 2 if torch.is_autocast_enabled("cpu") else y


def test_a_forward_of_another_kind_under_autocast() -> None:
    (left,) = fuse(converted(OfAutocast())).left_alone
    assert left.reason.endswith(" under autocast")
