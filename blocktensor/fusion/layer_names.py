"""List the names by which layers of models are found.

``fuse`` finds MLPs, experts and norms by these names, and ``plan`` the sizes of MLPs. Names alone
never decide: ``fuse`` verifies every module. CONTRIBUTING.md explains how to add a family of
models.
"""

from __future__ import annotations

GATED_MLPS = (
    ("gate_proj", "up_proj", "down_proj"),  # transformers'
    ("w1", "w3", "w2"),  # Llama's and torchtitan's
    ("gate", "up", "down"),  # the examples'
    ("gate_up_proj", "gate_up_proj", "down_proj"),  # Phi's
    ("input_linear", "input_linear", "output_linear"),  # Granite's
)
"""Linear layers gate, up and down. Gate and up may be one layer, which computes gate, then up."""

GATED_EXPERTS = (("w1_EFD", "w3_EFD", "w2_EDF"), *GATED_MLPS)
"""Stacks gate, up and down of experts; the first are torchtitan's."""

ATTENTION = (
    ("q_proj", "k_proj", "v_proj"),
    ("qkv_proj",),
    ("q_a_proj", "kv_a_proj_with_mqa"),
    ("q_proj", "kv_a_proj_with_mqa"),
    ("wq", "wk", "wv"),
    ("wqkv",),
)
"""Linear layers that read the input of attention."""

READERS = {
    "input_layernorm": ("self_attn", "attention"),
    "post_attention_layernorm": ("mlp", "shared_mlp"),
    "pre_feedforward_layernorm": ("mlp",),
    "attention_norm": ("attention",),
    "ffn_norm": ("feed_forward",),
    "mlp_norm": ("mlp",),
}
"""Norms, and the modules that read them: transformers', torchtitan's, the examples'."""

SIBLINGS = {
    "q_a_layernorm": ("q_b_proj",),
    "kv_a_layernorm": ("kv_b_proj",),
    "attention_norm": ("q", "k", "v"),
}
"""Norms, and the sibling linear layers that read them, in DeepSeek and the examples."""

AFTER = {"q_norm": ("q_proj", "wq"), "k_norm": ("k_proj", "wk")}
"""Norms of queries and keys, and the sibling linear layers whose results they read."""
