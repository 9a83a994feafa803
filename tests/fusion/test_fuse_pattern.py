"""A module is fused only if it computes the same bits; verification changes nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from expecttest import assert_expected_inline
from torch import Tensor, nn

from blocktensor import BlockwiseFP8Weight, Recipe, convert, fuse
from tests.support.fused_kinds import KINDS, Kind
from tests.support.gated import WeightShapes, assert_bits
from tests.support.mlps import HIDDEN, MLP, PLANTED, K, X, converted, fused_in, planted, results
from tests.support.models import plain

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
    before = {name: plain(p) for name, p in model.named_parameters()}
    torch.manual_seed(4)
    state = torch.get_rng_state()
    report = fuse(model)
    (entry,) = [x for x in report.left_alone if x.name == kind.module]
    assert entry.reason == reason
    assert len(report.fused) == kind.runs - 1
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(plain(p), before[name]) for name, p in model.named_parameters())
    assert all(each.training for each in model.modules())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_difference_is_found(name: str, dtype: torch.dtype) -> None:
    model = converted(planted(name), dtype=dtype)
    report = fuse(model, mlp={"": (*MLP.names, "silu")})
    (entry,) = report.entries
    assert entry.reason.startswith(("differs in ", "raised "))
    assert fused_in(model) == []
    assert type(model).__name__ == "Planted"
    if name in ("GELU for SiLU", "another beta"):  # beside an activation that is not called
        (entry,) = fuse(converted(planted(name), dtype=dtype)).entries
        assert "differs in " in entry.reason


def test_reasons() -> None:
    reasons = [
        fuse(converted(planted(name))).entries[0].reason
        for name in ("a clamp far away", "a gradient stopped at up", "two inputs")
    ]
    assert_expected_inline(
        "\n".join(reasons),
        """\
differs in its output
differs in the gradient of its input
raised AttributeError on one tensor: 'Planted' object has no attribute 'missing'""",
    )


def test_a_difference_that_weights_of_zeros_would_hide() -> None:
    model = converted(planted("GELU for SiLU"))
    with torch.no_grad():
        model.down_proj.weight.zero_()
    (entry,) = fuse(model).entries
    assert "its output" in entry.reason


@pytest.mark.parametrize("name", ["a clamp far away", None])
def test_a_verified_model_is_as_it_was(name: str | None) -> None:
    model = converted(MLP() if name is None else planted(name))
    x = X.bfloat16()
    model(x).sum().backward()
    model.up_proj.eval()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    grads = [p.grad.clone() for p in model.parameters()]  # type: ignore[union-attr]
    held = list(model.parameters())
    torch.manual_seed(7)
    state = torch.get_rng_state()
    fuse(model)
    assert torch.equal(torch.get_rng_state(), state)
    assert [each.training for each in model.modules()] == [True, True, False, True, True]
    for key, value in model.state_dict().items():
        assert torch.equal(value, before[key])
    for p, same, grad in zip(model.parameters(), held, grads, strict=True):
        assert p is same and isinstance(p, BlockwiseFP8Weight)
        assert p.grad is not None and torch.equal(p.grad, grad)
        assert p.cache.casts == 1


class Own(MLP):
    """Has more than its linears."""

    def __init__(self, what: str) -> None:
        super().__init__()
        if what == "parameter":
            self.scale = nn.Parameter(torch.ones(()))
        elif what == "buffer":
            self.register_buffer("limit", torch.ones(()))
        elif what == "activation":
            self.act_fn = nn.PReLU(init=0.0)
        else:
            self.drop = nn.Dropout(0.0)


def test_modules_that_are_no_gated_mlp_by_their_looks() -> None:
    def reason(model: nn.Module) -> str:
        (entry,) = fuse(model).entries
        assert fused_in(model) == []
        return entry.reason

    reasons = [reason(converted(Own(x))) for x in ("parameter", "buffer", "module", "activation")]
    model = converted(MLP())
    model.up_proj = nn.Linear(K, HIDDEN, bias=False, dtype=torch.bfloat16)
    reasons.append(reason(model))
    model = converted(MLP())
    model.up_proj = nn.Identity()
    reasons.append(reason(model))
    model = converted(MLP())
    model.forward = lambda x: x  # type: ignore[method-assign]
    reasons.append(reason(model))
    model = converted(MLP())
    other = converted(MLP(), Recipe(scale="power_of_two"))
    model.down_proj = other.down_proj
    reasons.append(reason(model))
    reasons.append(reason(converted(MLP(), Recipe(wgrad_input="high_precision"))))
    model = converted(MLP())
    model.gate_proj.register_forward_hook(lambda *_: None)
    reasons.append(reason(model))
    model = converted(MLP())
    model.act_fn.register_forward_hook(lambda *_: None)
    reasons.append(reason(model))
    reasons.append(reason(converted(MLP(act=nn.Tanh()))))
    reasons.append(reason(converted(MLP(act=torch.sigmoid))))
    assert_expected_inline(
        "\n".join(reasons),
        """\
has more than linears and an activation: scale
has more than linears and an activation: limit
has more than linears and an activation: drop
has more than linears and an activation: act_fn
up_proj is not in FP8
up_proj is a Identity, not an nn.Linear
its forward was replaced on the instance
its linears have scale='fp32' and 'power_of_two'
weight gradients read high precision (wgrad_input='high_precision')
gate_proj has hooks
act_fn has hooks
its act_fn, Tanh, is none of silu, gelu, gelu_tanh, relu2
its act_fn, sigmoid, is none of silu, gelu, gelu_tanh, relu2""",
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("bias", [False, True])
def test_what_is_a_gated_mlp_passes(bias: bool, dtype: torch.dtype) -> None:
    for act in (nn.SiLU(), nn.GELU(), nn.GELU("tanh"), nn.SiLU(inplace=True), torch.relu):
        model = converted(MLP(bias=bias, act=act), dtype=dtype)
        wanted = results(model)
        if act is torch.relu:
            assert "none of silu" in fuse(model).entries[0].reason
            continue
        assert fuse(model).left_alone == ()
        assert_bits(results(model), wanted)


def test_relu_squared() -> None:
    def relu2(x: Tensor) -> Tensor:
        return torch.relu(x).square()

    model = converted(MLP(act=relu2))
    wanted = results(model)
    assert fuse(model).fused[0].computes == "down_proj(relu2(gate_proj(x)) * up_proj(x))"
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
