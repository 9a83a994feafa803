"""Tiny models of transformers for images and text, with the text model below another name."""

from __future__ import annotations

from typing import Any

import torch
import transformers

TEXT = {
    **{"hidden_size": 128, "intermediate_size": 256, "head_dim": 64, "vocab_size": 64},
    **{"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2},
    **{f"linear_{kind}": 2 for kind in ("num_key_heads", "num_value_heads")},
    **{f"linear_{kind}": 64 for kind in ("key_head_dim", "value_head_dim")},
    "layer_types": ["linear_attention", "full_attention"],
    "tie_word_embeddings": False,
}
EXPERTS = {
    **{"num_experts": 4, "num_experts_per_tok": 2},
    **{"moe_intermediate_size": 128, "shared_expert_intermediate_size": 128},
}
VISION = {"depth": 1, "hidden_size": 64, "intermediate_size": 128, "num_heads": 2}


def qwen(kind: str) -> Any:
    """Qwen3.5 for images and text, whose text model is below ``model.language_model``."""
    torch.manual_seed(0)
    text = {**TEXT, **(EXPERTS if kind == "Qwen3_5Moe" else {})}
    config = getattr(transformers, f"{kind}Config")(
        text_config=text,
        vision_config={**VISION, "out_hidden_size": 128},
        tie_word_embeddings=False,
    )
    return getattr(transformers, f"{kind}ForConditionalGeneration")(config)
