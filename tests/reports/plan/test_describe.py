"""What models are described as: their matmuls, attention, MLPs and norms."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from blocktensor.fusion.layer_names import GATED_MLPS
from blocktensor.reports.plan.describe import Attention, Mlp, describe
from blocktensor.reports.plan.setup import Setup

transformers = pytest.importorskip("transformers")

SMALL = Setup(skip_small=False)


def build(kind: str, **sizes: Any) -> nn.Module:
    config = getattr(transformers, f"{kind}Config")(**sizes)
    with torch.device("meta"):
        model: nn.Module = transformers.AutoModelForCausalLM.from_config(config)
    return model


def llama(**more: Any) -> nn.Module:
    return build(
        "Llama",
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=1000,
        **more,
    )


@pytest.mark.parametrize("tied", [False, True])
def test_a_llama(tied: bool) -> None:
    model = llama(tie_word_embeddings=tied)
    found = describe(model, SMALL)
    assert found.parameters == sum(p.numel() for p in model.parameters())
    assert len(found.blocks) == 3
    assert len(set(found.blocks)) == 1
    block = found.blocks[0]
    assert block.attention == Attention(256, 128, 128, 256, heads=4)
    assert block.mlps == (Mlp("mlp", 512, 256, 1.0, is_gated=True, is_stack=False),)
    assert [(m.name, m.role, m.n, m.k, m.in_fp8) for m in block.matmuls] == [
        ("self_attn.q_proj", "input", 256, 256, True),
        ("self_attn.k_proj", "input", 128, 256, True),
        ("self_attn.v_proj", "input", 128, 256, True),
        ("self_attn.o_proj", "attention output", 256, 256, True),
        ("mlp.gate_proj", "input", 512, 256, True),
        ("mlp.up_proj", "input", 512, 256, True),
        ("mlp.down_proj", "down", 256, 512, True),
    ]
    assert [(n.width, n.is_written_out, n.feeds_fp8) for n in block.norms] == [
        (256, True, True)
    ] * 2
    assert found.head is not None
    assert [m.n for m in found.head.matmuls] == [1000]
    assert (found.is_tied, found.embedding) == (tied, 256_000)
    assert found.notes == ()


def test_latent_attention_and_experts() -> None:
    model = build(
        "DeepseekV3",
        hidden_size=256,
        intermediate_size=512,
        moe_intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        q_lora_rank=64,
        kv_lora_rank=32,
        qk_rope_head_dim=16,
        qk_nope_head_dim=32,
        v_head_dim=48,
        n_routed_experts=8,
        n_group=2,
        topk_group=1,
        num_experts_per_tok=2,
        first_k_dense_replace=1,
        vocab_size=1000,
    )
    dense, routed = describe(model, SMALL).blocks
    assert dense.attention == Attention(192, 192, 192, 192, heads=4)
    assert [mlp.is_stack for mlp in dense.mlps] == [False]
    assert {(m.hidden, m.rows, m.is_stack) for m in routed.mlps} == {
        (128, 2.0, True),
        (128, 1.0, False),
    }
    stack = next(m for m in routed.matmuls if m.experts > 1 and m.role == "down")
    assert (stack.experts, stack.n, stack.k, stack.rows) == (8, 256, 128, 2.0)


def test_transposed_linear_layers() -> None:
    found = describe(build("GPT2", n_layer=1, n_embd=256, n_head=4, vocab_size=1000), SMALL)
    (block,) = found.blocks
    assert block.attention == Attention(256, 256, 256, 256, heads=4)
    assert block.mlps == (Mlp("mlp", 1024, 256, 1.0, is_gated=False, is_stack=False),)


def test_experts_in_a_list_get_their_share_of_tokens() -> None:
    class Routed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.top_k = 2
            self.experts = nn.ModuleList(
                nn.ModuleDict({name: nn.Linear(256, 256) for name in ("w1", "w2", "w3")})
                for _ in range(8)
            )

    with torch.device("meta"):
        model = nn.ModuleDict({"layers": nn.ModuleList([nn.ModuleDict({"mlp": Routed()})])})
    (block,) = describe(model, SMALL).blocks
    assert {m.rows for m in block.matmuls} == {0.25}
    assert len(block.mlps) == 8


@pytest.mark.parametrize("names", GATED_MLPS)
def test_mlps_have_the_names_that_fuse_knows(names: tuple[str, str, str]) -> None:
    gate, up, down = names
    with torch.device("meta"):
        layers = {name: nn.Linear(256, 512 * (1 + (gate == up))) for name in (gate, up)}
        mlp = nn.ModuleDict(layers | {down: nn.Linear(512, 256)})
        model = nn.ModuleDict({"layers": nn.ModuleList([nn.ModuleDict({"mlp": mlp})])})
    (block,) = describe(model, SMALL).blocks
    assert block.mlps == (Mlp("mlp", 512, 256, 1.0, is_gated=True, is_stack=False),)


def test_a_model_is_not_changed() -> None:
    model = llama()
    before = {name: type(p) for name, p in model.named_parameters()}
    describe(model, SMALL)
    assert {name: type(p) for name, p in model.named_parameters()} == before


@pytest.mark.parametrize(
    ("model", "error", "message"),
    [
        (lambda: nn.Sequential(nn.Conv2d(3, 3, 3)), ValueError, "has no linear layers and no exp"),
        (lambda: nn.LazyLinear(8), ValueError, "has layers without sizes yet: run it once"),
        (
            lambda: nn.Sequential(nn.Linear(8, 8).requires_grad_(False), nn.Linear(8, 8)),
            NotImplementedError,
            r"some parameters train and others do not \('0.weight'\).*model.requires_grad_\(True\)",
        ),
    ],
)
def test_models_that_cannot_be_described(model: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        describe(model(), SMALL)


def test_more_experts_for_a_token_than_there_are() -> None:
    sizes = {"hidden_size": 256, "moe_intermediate_size": 128, "vocab_size": 512}
    model = build("Qwen3Moe", **sizes, num_hidden_layers=1, num_experts=4, num_experts_per_tok=8)
    with pytest.raises(ValueError, match="8 experts for each token, of 4: set num_experts_per_tok"):
        describe(model, SMALL)


def test_state_space_models_have_no_attention() -> None:
    found = describe(build("Mamba", num_hidden_layers=1, hidden_size=256, vocab_size=512), SMALL)
    assert found.blocks[0].attention is None
    assert "no attention found by the names of its linear layers: none is counted" in found.notes


def test_unknown_names_are_told() -> None:
    model = nn.Sequential(nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 256))
    (note,) = describe(model, SMALL).notes
    assert note == "no attention found by the names of its linear layers: none is counted"
