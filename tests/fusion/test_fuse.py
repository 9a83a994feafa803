"""fuse finds gated MLPs, keeps every bit, and can be undone."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from expecttest import assert_expected_inline
from torch import nn

from blocktensor import Recipe, fuse, share_inputs, unshare_inputs
from blocktensor.fusion.layer_names import AFTER, GATED_EXPERTS, READERS, SIBLINGS
from blocktensor.overrides import dynamo
from tests.docs.code_blocks import ROOT
from tests.support.fused_kinds import count_runs
from tests.support.gated import assert_bits
from tests.support.mlps import MLP, K, Model, converted, fused_in, planted, results
from tests.support.models import Trace

transformers = pytest.importorskip("transformers")

FAMILIES = [
    "Llama",
    "Mistral",
    "Qwen2",
    "Qwen3",
    "Gemma",
    "Gemma2",
    "DeepseekV3",
    "Olmo2",
    "Phi3",
    "GraniteMoeHybrid",
]
JOINT = {
    "Phi3": "down_proj({act}(gate) * up), both of gate_up_proj(x)",
    "GraniteMoeHybrid": "output_linear({act}(gate) * up), both of input_linear(x)",
}
"""What an MLP computes whose gate and up are one linear layer."""
NORMS = {
    "": ("input_layernorm", "post_attention_layernorm"),
    "Gemma2": ("input_layernorm", "pre_feedforward_layernorm"),
    "DeepseekV3": (
        "self_attn.q_a_layernorm",
        "self_attn.kv_a_layernorm",
        "input_layernorm",
        "post_attention_layernorm",
    ),
    "Qwen3": (
        "self_attn.q_norm",
        "self_attn.k_norm",
        "input_layernorm",
        "post_attention_layernorm",
    ),
    "Olmo2": (),  # its norms are added to the residual stream
}
LEFT_ALONE = {"Olmo2": ("self_attn.q_norm", "self_attn.k_norm")}  # they round once
OPS = {
    "silu": ("gated silu 1x128", "gated silu 128x128", "gated_backward silu 1x128 1x128"),
    "gelu": ("gated gelu 1x128 128x128", "gated_backward gelu 1x128 1x128"),
    "gelu_tanh": ("gated gelu_tanh 1x128 128x128", "gated_backward gelu_tanh 1x128 1x128"),
    "relu2": ("gated relu2 1x128", "gated relu2 128x128", "gated_backward relu2 1x128 1x128"),
    "joint": ("gated silu 1x128 128x128", "joint_gated_backward silu 1x128 1x128"),
}
TOKENS = torch.arange(24).view(2, 12)


def language_model(family: str, recipe: Recipe | None = None, **more: Any) -> nn.Module:
    options: dict[str, Any] = {
        **{"hidden_size": 64, "intermediate_size": 144, "num_hidden_layers": 2},
        **{"num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 16, "vocab_size": 100},
        **{"eos_token_id": 1, "pad_token_id": 0},
    }
    if family == "DeepseekV3":
        options |= {"first_k_dense_replace": 2, "q_lora_rank": 32, "kv_lora_rank": 32}
        options |= {"qk_rope_head_dim": 16, "qk_nope_head_dim": 16, "v_head_dim": 16}
    if family == "GraniteMoeHybrid":  # without experts, as in most models of Granite 4
        options |= {"num_local_experts": 0, "shared_intermediate_size": 144}
        options |= {"layer_types": ["attention"] * 2}
    options |= more
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
    formula = JOINT[family].format(act=act) if family in JOINT else formula
    assert [entry.computes for entry in report.fused[:2]] == [formula] * 2
    names = [entry.name for entry in report.fused]
    mlp = "shared_mlp" if family == "GraniteMoeHybrid" else "mlp"
    assert names[:2] == fused_in(model) == [f"model.layers.{i}.{mlp}" for i in range(2)]
    norms = [f"model.layers.{i}.{name}" for i in range(2) for name in NORMS.get(family, NORMS[""])]
    assert names[2:] == norms
    others = [f"model.layers.{i}.{name}" for i in range(2) for name in LEFT_ALONE.get(family, ())]
    assert [entry.name for entry in report.left_alone] == others
    assert_bits(results(model, run=loss(model)), wanted)
    with Trace() as trace:
        results(model, run=loss(model))
    for op in OPS["joint" if family in JOINT else act]:
        assert trace.count(f"blocktensor.{op}") == 2
    assert count_runs(loss(model), None) == len(names)


@pytest.mark.parametrize("act", ["gelu", "relu2"])
def test_other_activations_of_transformers(act: str) -> None:
    model = language_model("Llama", hidden_act=act)
    wanted = results(model, run=loss(model))
    report = fuse(model)
    formula = f"down_proj({act}(gate_proj(x)) * up_proj(x))"
    assert [entry.computes for entry in report.fused[:2]] == [formula] * 2
    assert report.left_alone == ()
    with Trace() as trace:
        assert_bits(results(model, run=loss(model)), wanted)
    for op in OPS[act]:
        assert trace.count(f"blocktensor.{op}") == 2


class Torchtitan(MLP):
    """Compute in the way of torchtitan and Llama's own code."""

    names = ("w1", "w3", "w2")

    def __init__(self) -> None:
        super().__init__()
        del self.act_fn
        self.register_buffer("limit", None)
        self._modules |= dict.fromkeys(MLP.names)  # None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class Renamed(MLP):
    names = ("gate", "up", "down")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.act_fn(self.gate(x)) * self.up(x))


@pytest.mark.parametrize("make", [Torchtitan, Renamed])
def test_known_names(make: Any) -> None:
    model = converted(Model(make))
    wanted = results(model)
    fuse(model)
    assert fused_in(model) == ["layers.0.mlp", "layers.1.mlp"]
    assert_bits(results(model), wanted)


def test_the_page_lists_the_names() -> None:
    page = (ROOT / "docs/guides/fusing.md").read_text("utf-8")
    names = {*READERS, *SIBLINGS, *AFTER}.union(*GATED_EXPERTS)
    assert [name for name in sorted(names) if f"`{name}`" not in page] == []


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
no gated MLP of known names was found, and no norm that linear layers read: call
functional.gated_mlp, functional.gated_experts or quantize in your own forward""",
    )


def test_bad_input() -> None:
    why = r"^no linear layer of this Model is in FP8, .* convert it"
    with pytest.raises(ValueError, match=why):
        fuse(Model())
    model = converted(Model())
    with pytest.raises(TypeError, match=r"^recompute='yes': expected True or False"):
        fuse(model, recompute="yes")  # type: ignore[arg-type]
    with torch.inference_mode():
        assert "RuntimeError on one tensor: Inference tensors" in fuse(model).entries[0].reason
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


def test_nothing_delays_the_freeing_of_a_model() -> None:
    gc.collect()
    model = converted(MLP())
    fuse(model)
    references = [weakref.ref(x) for x in (*model.modules(), *model.parameters())]
    gc.disable()
    try:
        del model
        assert [x() for x in references] == [None] * len(references)
    finally:
        gc.enable()
