"""fuse finds gated MLPs, keeps every bit, and can be undone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from torch import nn

from blocktensor import Recipe, convert, fuse, share_inputs, unfuse, unshare_inputs
from blocktensor.fusion.fused_class import fused_modules
from blocktensor.overrides import dynamo
from tests.support import fused_experts
from tests.support.gated import assert_bits
from tests.support.mlps import (
    MLP,
    K,
    Model,
    Torchtitan,
    converted,
    fused_in,
    planted,
    results,
)
from tests.support.models import Trace, complaint
from tests.support.norms import blocks, runs_fused

transformers = pytest.importorskip("transformers")

FAMILIES = ["Llama", "Mistral", "Qwen2", "Qwen3", "Gemma", "Gemma2", "DeepseekV3", "Olmo2", "Phi3"]
NORMS = {
    "": ("input_layernorm", "post_attention_layernorm"),
    "Gemma2": ("input_layernorm", "pre_feedforward_layernorm"),
    "DeepseekV3": (
        "self_attn.q_a_layernorm",
        "self_attn.kv_a_layernorm",
        "input_layernorm",
        "post_attention_layernorm",
    ),
    "Olmo2": (),  # its norms are added to the residual stream
}
OPS = {
    "silu": ("gated silu 1x128", "gated_backward_with_h silu 1x128 1x128 128x128"),
    "gelu_tanh": ("gated gelu_tanh 1x128 128x128", "gated_backward gelu_tanh 1x128 1x128"),
    "Phi3": ("gated silu 1x128 128x128", "joint_gated_backward silu 1x128 1x128"),
}
TOKENS = torch.arange(24).view(2, 12)


def language_model(family: str, recipe: Recipe | None = None) -> nn.Module:
    options: dict[str, Any] = {
        **{"hidden_size": 64, "intermediate_size": 144, "num_hidden_layers": 2},
        **{"num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 16, "vocab_size": 100},
        **{"eos_token_id": 1, "pad_token_id": 0},
    }
    if family == "DeepseekV3":
        options |= {"first_k_dense_replace": 2, "q_lora_rank": 32, "kv_lora_rank": 32}
        options |= {"qk_rope_head_dim": 16, "qk_nope_head_dim": 16, "v_head_dim": 16}
    torch.manual_seed(0)
    model = getattr(transformers, f"{family}ForCausalLM")(
        getattr(transformers, f"{family}Config")(**options)
    )
    return converted(model, recipe or Recipe())


def loss(model: nn.Module) -> Any:
    return lambda _: model(input_ids=TOKENS, labels=TOKENS).loss


@pytest.mark.parametrize("family", FAMILIES)
def test_transformers(family: str) -> None:
    model = language_model(family)
    wanted = results(model, run=loss(model))
    report = fuse(model)
    act = "gelu_tanh" if family.startswith("Gemma") else "silu"
    formula = f"down_proj({act}(gate_proj(x)) * up_proj(x))"
    if family == "Phi3":
        formula = f"down_proj({act}(gate) * up), both of gate_up_proj(x)"
    assert [entry.computes for entry in report.fused[:2]] == [formula] * 2
    names = [entry.name for entry in report.fused]
    assert names[:2] == fused_in(model) == [f"model.layers.{i}.mlp" for i in range(2)]
    norms = [f"model.layers.{i}.{name}" for i in range(2) for name in NORMS.get(family, NORMS[""])]
    assert names[2:] == norms
    assert report.left_alone == ()
    assert_bits(results(model, run=loss(model)), wanted)
    with Trace() as trace:
        results(model, run=loss(model))
    for op in OPS.get(family, OPS[act]):
        assert trace.count(f"blocktensor.{op}") == 2
    assert runs_fused(model, run=loss(model)) == len(norms)


def renamed(*names: str) -> nn.Module:
    class Renamed(MLP):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            gate, up, down = (getattr(self, name) for name in names)
            return down(self.act_fn(gate(x)) * up(x))

    Renamed.names = names  # type: ignore[assignment]
    return Renamed()


@pytest.mark.parametrize("make", [Torchtitan, lambda: renamed("gate", "up", "down")])
def test_known_names(make: Any) -> None:
    model = converted(Model(make))
    wanted = results(model)
    fuse(model)
    assert fused_in(model) == ["layers.0.mlp", "layers.1.mlp"]
    assert_bits(results(model), wanted)


def test_the_report() -> None:
    model = converted(Model(layers=3))
    model.layers[1]["mlp"].up_proj.register_forward_hook(lambda *_: None)
    assert_expected_inline(
        str(fuse(model)),
        """\
module            class  computes                                    result
----------------  -----  ------------------------------------------  -----------------
layers.*.mlp (2)  MLP    down_proj(silu(gate_proj(x)) * up_proj(x))  fused
layers.1.mlp      MLP    down_proj(silu(gate_proj(x)) * up_proj(x))  up_proj has hooks
2 fused, 1 left alone""",
    )
    assert_expected_inline(
        str(fuse(converted(nn.Sequential(nn.Linear(K, K))))),
        """\
no gated MLP was found, and no norm that linears read; give other names by hand:
fuse(model, mlp={pattern: (gate, up, down, activation)}, norm={pattern: linears})""",
    )


@pytest.mark.parametrize("act", ["silu", "act_fn", None])
def test_other_names(act: str | None) -> None:
    model = converted(Model(lambda: renamed("a", "b", "c")))
    assert fuse(model).entries == ()
    wanted = results(model)
    assert len(fuse(model, mlp={"*.0.mlp": ("a", "b", "c", act)}).fused) == 1
    assert fused_in(model) == ["layers.0.mlp"]
    assert_bits(results(model), wanted)
    swapped = fuse(model, mlp={"*.1.mlp": ("b", "a", "c", act)})
    assert "differs in its output" in swapped.left_alone[0].reason
    assert fused_in(model) == ["layers.0.mlp"]


BAD_NAMES: list[dict[str, Any]] = [
    {"mlp": {"*.MLP": ("w1", "w3", "w2", None)}},
    {"norm": {"nothing": ("a",)}},
    {"experts": {"none": ("w1", "w3", "w2", "silu")}},
    {"mlp": {"*.mlp": ("w1", "w3", "w2", None)}},
    {"norm": {"layers.0.input_layernorm": ("mlp.no",)}},
    {"experts": {"experts": ("w1", "w3", "w4", None)}},
    {"mlp": {"*.mlp": ("gate_proj", "up_proj", "down_proj", "acts")}},
    {"experts": {"experts": ("w1", "w3", "w2", "tanh")}},
    {"mlp": {"*.mlp": ("gate_proj", "up_proj", "down_proj")}},
    {"experts": {"experts": ("w1", "w3", "w2")}},
    {"mlp": {"*.mlp": ("gate_proj", "up_proj", "gate_proj", "silu")}},
    {"experts": {"experts": ("w1", "w2", "w2", None)}},
]


def test_bad_input() -> None:
    models = {
        "mlp": converted(Model()),
        "norm": blocks(),
        "experts": nn.ModuleDict({"experts": fused_experts.converted(fused_experts.Sizes())}),
    }
    messages = [complaint(ValueError, lambda: fuse(Model()))]
    for options in BAD_NAMES:
        (kind,) = options
        messages.append(complaint(ValueError, lambda: fuse(models[kind], **options)))  # noqa: B023
    norm = {"layers.0.input_layernorm": "mlp"}
    messages.append(complaint(TypeError, lambda: fuse(models["norm"], norm=norm)))  # type: ignore
    assert not any(dict(fused_modules(model)) for model in models.values())
    assert_expected_inline(
        "\n\n".join(messages),
        """\
no linear of this Model is in FP8, so there is no cast to fuse: convert it first
with blocktensor.convert(model)

mlp pattern '*.MLP' matches no module of this Model: expected a pattern of module
names, e.g. '*.mlp'

norm pattern 'nothing' matches no module of this Blocks: expected a pattern of
module names, e.g. '*.attention_norm'

experts pattern 'none' matches no module of this ModuleDict: expected a pattern of
module names, e.g. '*.experts'

mlp pattern '*.mlp' names 'layers.0.mlp', a MLP without 'w1'; it has 'gate_proj',
'up_proj', 'down_proj', 'act_fn'

norm pattern 'layers.0.input_layernorm' names 'layers.0.input_layernorm', whose
parent, a Block, lacks a linear: MLP has no attribute `no`

experts pattern 'experts' names 'experts', a Sizes without a stack 'w4'; it has
'w1', 'w3', 'w2'

mlp pattern '*.mlp': 'layers.0.mlp' has no attribute 'acts', and no activation is
called so: expected one of silu, gelu_tanh

experts pattern 'experts': 'experts' has no attribute 'tanh', and no activation is
called so: expected one of silu, gelu_tanh

mlp={'*.mlp': ('gate_proj', 'up_proj', 'down_proj')}: expected (gate, up, down,
activation), e.g. ('w1', 'w3', 'w2', 'silu')

experts={'experts': ('w1', 'w3', 'w2')}: expected (gate, up, down, activation), e.g.
('w1', 'w3', 'w2', 'silu')

mlp pattern '*.mlp': down is 'gate_proj', as gate is: expected another; gate and up
alone may be one

experts pattern 'experts': down is 'w2', as up is: expected another; gate and up
alone may be one

norm={'layers.0.input_layernorm': 'mlp'}: expected patterns of module names, each
with names in a tuple, e.g. {'*.norm': ('attn.q', 'attn.k', 'attn.v')}""",
    )


@pytest.mark.parametrize(
    "options",
    [
        {"mlp": 5},
        {"norm": ["*.norm"]},
        {"experts": "*"},
        {"mlp": {"*": 5}},
        {"mlp": {"*": "gate_proj"}},
        {"norm": {3: ("q",)}},
        {"experts": {"*": ("a", 1, "b", None)}},
        {"recompute": "yes"},
    ],
    ids=str,
)
def test_options_of_other_types(options: Any) -> None:
    model = converted(Model())
    (name,) = options
    with pytest.raises(TypeError, match=rf"^{name}=.*: expected "):
        fuse(model, **options)
    assert fused_in(model) == []
    with pytest.raises(TypeError, match=r"fuse takes a model, an nn\.Module: got a NoneType"):
        fuse(None)  # type: ignore[arg-type]


@pytest.mark.parametrize("first", ["fuse", "share"])
def test_with_shared_inputs(first: str) -> None:
    model = language_model("Llama")
    wanted = results(model, run=loss(model))
    if first == "share":
        share_inputs(model)
    assert fuse(model).left_alone == ()
    sharing = share_inputs(model)
    for _ in range(2):
        assert_bits(results(model, run=loss(model)), wanted)
    with Trace() as trace:
        model(input_ids=TOKENS)
    assert trace.count("blocktensor.gated") == 2
    assert (sharing.casts, sharing.saved) == (8, 8)  # q, k, v share one; and o
    unshare_inputs(model)
    assert_bits(results(model, run=loss(model)), wanted)


def test_compilers_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a fused model may be compiled before its first eager call."""
    monkeypatch.setattr(dynamo, "_announced", False)
    monkeypatch.setattr(dynamo, "announce_if_loaded", lambda: None)
    fuse(converted(planted("an epsilon")))
    assert not dynamo._announced
    fuse(converted(MLP()))
    assert dynamo._announced


def test_what_no_longer_fits_is_unfused_by_the_next_call() -> None:
    model = nn.Sequential(MLP())
    convert(model, skip_small=False)
    assert len(fuse(model).fused) == 1
    convert(model, Recipe(wgrad_input="high_precision"), skip_small=False)
    assert len(fuse(model).left_alone) == 1
    assert unfuse(model) == []
