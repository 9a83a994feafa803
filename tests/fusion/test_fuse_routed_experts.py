"""transformers' experts and gated MLPs, whose gate and up are one weight, run as one function."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from expecttest import assert_expected_inline
from torch import Tensor, nn

from blocktensor import Recipe, convert, fuse, unfuse
from blocktensor.fusion.experts import why_other_routing
from tests.support.fused_experts import fused_in
from tests.support.models import Trace, randn
from tests.support.moe_models import TOKENS, transformers_moe

transformers: Any = pytest.importorskip("transformers")

EXPERTS = "model.layers.0.mlp.experts"


def both(kind: str = "qwen3", recipe: Recipe | None = None, **options: Any) -> tuple[Any, Any]:
    """A model whose experts are fused, and its twin that is not; in bf16."""
    model = transformers_moe(kind).bfloat16()
    convert(model, recipe or Recipe(), skip_small=False)
    twin = copy.deepcopy(model)
    assert fuse(model, **options).left_alone == ()
    return model, twin


def step(model: nn.Module) -> dict[str, Tensor | None]:
    """The loss and all gradients."""
    model.zero_grad()
    loss = model(TOKENS, labels=TOKENS).loss
    loss.backward()
    return {"loss": loss.detach(), **{name: p.grad for name, p in model.named_parameters()}}


def assert_same_step(model: nn.Module, twin: nn.Module) -> None:
    ours, theirs = step(model), step(twin)
    assert ours.keys() == theirs.keys()
    for name, wanted in theirs.items():
        assert wanted is not None and torch.equal(ours[name], wanted), name  # type: ignore[arg-type]


def fused_calls(model: nn.Module) -> int:
    """How many MLPs and experts one forward computes as one function."""
    with Trace() as trace, torch.no_grad():
        model(TOKENS.to(model.device))
    return trace.count("blocktensor.gated ")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("kind", ["qwen3", "mixtral", "deepseek"])
def test_bits(kind: str, dtype: torch.dtype) -> None:
    model = transformers_moe(kind).to(dtype)
    convert(model, Recipe(wgrad_input="128x128"), skip_small=False)
    twin = copy.deepcopy(model)
    report = fuse(model, recompute=kind == "mixtral")
    assert report.left_alone == ()
    formula = "down_proj(silu(gate) * up), both of gate_up_proj(x) by expert"
    assert formula in [x.computes for x in report.fused]
    assert fused_calls(model) == (3 if kind == "deepseek" else 2)  # an MLP and shared experts
    for autocast in (False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            assert_same_step(model, twin)
    unfuse(model)
    assert fused_calls(model) == 0
    assert_same_step(model, twin)


def test_what_changes_later() -> None:
    model, twin = both()
    assert fused_calls(model) == 2
    experts = model.get_submodule(EXPERTS)
    for m in (model, twin):
        m.set_experts_implementation("batched_mm")
    assert_expected_inline(
        str(why_other_routing(experts, "down_proj")),
        """its experts_implementation is 'batched_mm': expected 'grouped_mm'""",
    )
    for m in (model, twin):
        m.set_experts_implementation("grouped_mm")
        m.get_submodule(EXPERTS)._is_expert_parallel = True
    assert why_other_routing(experts, "down_proj") == "its experts are spread over ranks"
    assert fused_calls(model) == 1
    assert_same_step(model, twin)


def test_other_arguments() -> None:
    experts, twin = (m.get_submodule(EXPERTS) for m in both())
    x, weights = randn(5, 128), randn(5, 2, seed=1).abs()
    wanted = twin(x, ROUTING, weights)
    assert torch.equal(experts(x, ROUTING, weights), wanted)
    assert torch.equal(experts(x, ROUTING, top_k_weights=weights), wanted)
    assert torch.equal(experts(x[:0], ROUTING[:0], weights[:0]), wanted[:0])
    wanted = twin(x, ROUTING, weights.float())
    assert torch.equal(experts(x, ROUTING, weights.float()), wanted)


ROUTING = torch.tensor([[0, 1], [3, 2], [1, 3], [0, 2], [1, 0]])


def experts_step(model: nn.Module, dtype: torch.dtype) -> dict[str, Tensor | None]:
    """The output of one module of experts for tokens of this dtype, and all gradients."""
    experts = model.get_submodule(EXPERTS)
    experts.zero_grad()
    x, weights = randn(5, 128, dtype=dtype, grad=True), randn(5, 2, seed=1, dtype=dtype).abs()
    y = experts(x, ROUTING, weights)
    y.backward(randn(*y.shape, seed=2, dtype=y.dtype))
    grads = {name: p.grad for name, p in experts.named_parameters()}
    return {"y": y.detach(), "x": x.grad, **grads}


def assert_same_experts(model: nn.Module, twin: nn.Module, dtype: torch.dtype) -> None:
    ours, theirs = experts_step(model, dtype), experts_step(twin, dtype)
    for name, wanted in theirs.items():
        got = ours[name]
        assert wanted is not None and got is not None and got.dtype == wanted.dtype, name
        assert torch.equal(got, wanted), name


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_autocast_to_another_dtype(dtype: torch.dtype) -> None:
    """The module's own forward rounds h to the dtype of the stacks."""
    model = transformers_moe("qwen3").to(dtype)
    convert(model, skip_small=False)
    twin = copy.deepcopy(model)
    assert EXPERTS in [x.name for x in fuse(model).fused]
    for autocast in (torch.bfloat16, torch.float16):
        with torch.autocast("cpu", autocast):
            assert_same_experts(model, twin, dtype)
    assert_same_experts(model, twin, dtype)


def test_another_dtype_later() -> None:
    """The module's own forward raises or converts; as one function, experts do neither."""
    model, twin = both()
    for m in (model, twin):
        m.float()
    for dtype in (torch.bfloat16, torch.float32):
        assert_same_experts(model, twin, dtype)
    model, twin = both()
    for m in (model, twin):
        experts = m.get_submodule(EXPERTS)
        experts.down_proj = nn.Parameter(experts.down_proj.detach().float())
    assert_same_experts(model, twin, torch.bfloat16)


def test_another_number_of_experts() -> None:
    model, twin = both()
    for m in (model, twin):
        m.get_submodule(EXPERTS).num_experts = 2
    for m in (model, twin):
        with pytest.raises(ValueError, match="4 experts"):
            experts_step(m, torch.bfloat16)
    unfuse(model)
    entry = next(x for x in fuse(model).left_alone if x.name == EXPERTS)
    assert entry.reason == "its num_experts is not the length of its stacks"


class Flagged(nn.Module):
    """Rows sorted by expert, as ``tests.support``'s; two flags of transformers' classes."""

    def __init__(self) -> None:
        super().__init__()
        self.has_gate, self.is_transposed = True, False
        self.gate_up_proj = nn.Parameter(randn(4, 256, 128) / 12)
        self.down_proj = nn.Parameter(randn(4, 128, 128) / 12)

    def forward(self, x: Tensor, sizes: Tensor) -> Tensor:
        offs = sizes.cumsum(0, dtype=torch.int32)
        both = torch._grouped_mm(x, self.gate_up_proj.transpose(1, 2), offs)
        gate, up = both.chunk(2, -1)
        return torch._grouped_mm(F.silu(gate) * up, self.down_proj.transpose(1, 2), offs)


def test_flags_of_another_class() -> None:
    model = nn.Sequential(Flagged())
    convert(model, stacks={"0": ["gate_up_proj", "down_proj"]}, skip_small=False)
    (entry,) = fuse(model).entries
    assert entry.reason == ""
    twin = copy.deepcopy(model)
    unfuse(twin)
    x, sizes = randn(30, 128), torch.tensor([10, 0, 13, 7])
    assert torch.equal(model[0](x, sizes), twin[0](x, sizes))


class Swapped(nn.Module):
    def _apply_gate(self, gate_up: Tensor) -> Tensor:
        up, gate = gate_up.chunk(2, -1)
        return F.silu(gate) * up


class Interleaved(nn.Module):
    def _apply_gate(self, gate_up: Tensor) -> Tensor:
        return F.silu(gate_up[:, ::2]) * gate_up[:, 1::2]


class Weighted(nn.Module):
    def forward(self, x: Tensor, index: Tensor, weights: Tensor) -> Any:
        return super().forward(x, index, weights * 0.5)  # type: ignore[misc]


class Once(nn.Module):
    """Leaves out the second expert of each token."""

    def forward(self, x: Tensor, index: Tensor, weights: Tensor) -> Any:
        return super().forward(x, index[:, :1], weights[:, :1])  # type: ignore[misc]


PLANTED = [Swapped, Interleaved, Weighted, Once]


def test_planted_differences() -> None:
    reasons = []
    for other in PLANTED:
        model = transformers_moe("qwen3").bfloat16()
        convert(model, skip_small=False)
        experts = model.get_submodule(EXPERTS)
        count = experts.num_experts
        experts.__class__ = type("Own", (other, type(experts)), {})
        (entry,) = fuse(model).left_alone
        assert entry.name == EXPERTS and EXPERTS not in fused_in(model)
        assert experts.num_experts == count
        reasons.append(f"{other.__name__}: {entry.reason}")
    model = transformers_moe("qwen3", "batched_mm").bfloat16()
    convert(model, skip_small=False)
    reasons += [f"batched_mm: {x.reason}" for x in fuse(model).left_alone[:1]]
    assert_expected_inline(
        "\n".join(reasons),
        """\
Swapped: differs in its output
Interleaved: differs in its output
Weighted: differs in its output
Once: differs in its output
batched_mm: its experts_implementation is 'batched_mm': expected 'grouped_mm'""",
    )


def test_gate_and_up_of_one_linear() -> None:
    """Phi's MLPs."""
    config = transformers.Phi3Config(
        hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, vocab_size=64, max_position_embeddings=64, pad_token_id=0,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.Phi3ForCausalLM(config).bfloat16()
    convert(model, skip_small=False)
    twin = copy.deepcopy(model)
    report = fuse(model)
    assert_expected_inline(
        str(next(x for x in report.fused if x.name.endswith("mlp")).computes),
        """down_proj(silu(gate) * up), both of gate_up_proj(x)""",
    )
    assert fused_calls(model) == 2
    assert_same_step(model, twin)
    model.model.layers[0].mlp.gate_up_proj.register_forward_hook(lambda *_: None)
    assert fused_calls(model) == 1
    assert_same_step(model, twin)
