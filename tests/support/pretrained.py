"""Tiny models of transformers in folders, and what ``from_pretrained`` makes of them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel, LlamaConfig

from blocktensor import BlockwiseFP8Tensor, BlockwiseFP8Weight
from blocktensor.integrations.transformers import BlockwiseFP8Config
from tests.support.moe_models import transformers_moe

VOCABULARY = 64
TOKENS = torch.arange(VOCABULARY).view(4, -1) * 7 % VOCABULARY


@contextmanager
def quiet() -> Iterator[None]:
    """No progress bars, and no more than errors in the log."""
    before = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    yield
    transformers.logging.enable_progress_bar()
    transformers.logging.set_verbosity(before)


@pytest.fixture(autouse=True)
def silent() -> Iterator[None]:
    """:func:`quiet`, for every test of a file that imports it."""
    with quiet():
        yield


def llama(
    seed: int = 0, hidden: int = 128, intermediate: int = 256, tied: bool = False, **options: Any
) -> Any:
    """Two layers in fp32."""
    torch.manual_seed(seed)
    options |= {"hidden_size": hidden, "intermediate_size": intermediate}
    options |= {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2}
    config = LlamaConfig(vocab_size=VOCABULARY, tie_word_embeddings=tied, **options)
    return transformers.LlamaForCausalLM(config)


def gpt2(seed: int = 0) -> Any:
    """Two layers of Conv1D, the head tied, without dropout."""
    torch.manual_seed(seed)
    none = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    sizes = {"n_embd": 128, "n_layer": 2, "n_head": 2, "n_positions": 64}
    ends = {"bos_token_id": 0, "eos_token_id": 0}
    return GPT2LMHeadModel(GPT2Config(vocab_size=VOCABULARY, **sizes, **none, **ends))


SIZES = ("hidden_size", "intermediate_size", "moe_intermediate_size")
LATENT = {
    "q_lora_rank": 128,
    "kv_lora_rank": 128,
    "v_head_dim": 64,
    "qk_rope_head_dim": 128,
    "qk_nope_head_dim": 64,
}
"""Ranks and sizes of DeepSeek's attention with which its weights are whole blocks."""


MODELS: dict[str, Any] = {
    "llama": llama,
    "tied": lambda: llama(tied=True),
    "gpt2": gpt2,
    "qwen3": lambda: transformers_moe("qwen3"),
    "deepseek": lambda: transformers_moe("deepseek", **dict.fromkeys(SIZES, 256), **LATENT),
}


UNREADABLE = ("gpt2",)
"""Models of which transformers reads no weight in FP8: GPT-2's Conv1D."""


def values(model: nn.Module) -> dict[str, Tensor]:
    """All parameters in high precision, by name."""
    return {name: value_of(x) for name, x in model.named_parameters()}


def value_of(x: Any) -> Tensor:
    """A parameter in high precision."""
    if isinstance(x, BlockwiseFP8Tensor):
        return x.dequantize()
    held: Tensor = x.master if isinstance(x, BlockwiseFP8Weight) else x
    return held.detach().clone()


def fp8_names(model: nn.Module) -> set[str]:
    kinds = (BlockwiseFP8Tensor, BlockwiseFP8Weight)
    return {name for name, x in model.named_parameters() if isinstance(x, kinds)}


def saved(folder: Path, model: Any) -> Path:
    """The folder, with a checkpoint of ``model``."""
    model.save_pretrained(folder)
    return folder


def choices(**options: Any) -> BlockwiseFP8Config:
    """A config that converts small weights, too."""
    return BlockwiseFP8Config(**{"skip_small": False, **options})


def loaded(folder: Path, config: Any = None, **options: Any) -> Any:
    """What ``from_pretrained`` makes of a checkpoint; ``config``: by default that of choices()."""
    return AutoModelForCausalLM.from_pretrained(
        folder, quantization_config=choices() if config is None else config, **options
    )


def logits(model: Any) -> torch.Tensor:
    """Without gradient."""
    with torch.no_grad():
        made: torch.Tensor = model(TOKENS).logits
    return made


TEXT = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "head_dim": 64,
    "vocab_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    **{f"linear_{kind}": 2 for kind in ("num_key_heads", "num_value_heads")},
    **{f"linear_{kind}": 64 for kind in ("key_head_dim", "value_head_dim")},
    "layer_types": ["linear_attention", "full_attention"],
    "tie_word_embeddings": False,
}
EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 128,
    "shared_expert_intermediate_size": 128,
}
VISION = {"depth": 1, "hidden_size": 128, "intermediate_size": 128, "num_heads": 2}


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
