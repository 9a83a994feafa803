"""A small model of each architecture of transformers, from its default config, made generically."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import transformers
from transformers import CONFIG_MAPPING, PreTrainedConfig
from transformers.models.auto import modeling_auto

_MAPPINGS = (
    "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
    "MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES",
    "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES",
    "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES",
    "MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES",
    "MODEL_FOR_MASKED_LM_MAPPING_NAMES",
    "MODEL_MAPPING_NAMES",
)
"""Of model types to classes: the first that knows a type gives its class."""

MOST_PARAMETERS = 150_000_000


def architectures() -> dict[str, str]:
    """Return the class of each model type."""
    found: dict[str, str] = {}
    for mapping in _MAPPINGS:
        for model_type, kinds in getattr(modeling_auto, mapping).items():
            found.setdefault(model_type, kinds if isinstance(kinds, str) else kinds[0])
    return found


def other_classes() -> list[str]:
    """Return the names of all further classes of models: with other heads, or without."""
    named = set(architectures().values())
    return [
        name
        for name in dir(transformers)
        if not name.endswith("PreTrainedModel") and name not in named
        if isinstance(kind := getattr(transformers, name, None), type)
        if issubclass(kind, transformers.PreTrainedModel)
    ]


# Entries of configs, by what they say of a model. Sizes are whole blocks of 128.

_WIDTHS = """
    hidden_size d_model n_embd embed_dim hidden_dim dim encoder_hidden_size decoder_hidden_size
    out_hidden_size text_hidden_size output_hidden_size projector_hidden_size embedding_size
    projection_dim encoder_hidden_dim word_embed_proj_dim embedding_dim emb_dim
    attention_hidden_size audio_hidden_size output_dim
"""
_INNER_WIDTHS = """
    intermediate_size d_ff ffn_dim encoder_ffn_dim decoder_ffn_dim mlp_dim shared_intermediate_size
    ffn_hidden_size n_inner intermediate_size_mlp feed_forward_proj_dim dense_intermediate_size
"""
_EXPERT_WIDTHS = """
    moe_intermediate_size shared_expert_intermediate_size moe_shared_expert_intermediate_size
    expert_ffn_hidden_size expert_dim
"""
_HEADS = """
    num_attention_heads n_head n_heads num_heads encoder_attention_heads decoder_attention_heads
    attention_heads decoder_num_attention_heads encoder_num_attention_heads swa_num_attention_heads
"""
_KEY_HEADS = """
    num_key_value_heads num_kv_heads swa_num_key_value_heads num_key_value_attention_heads
"""
_LAYERS = """
    num_hidden_layers n_layer num_layers encoder_layers decoder_layers depth n_layers
    num_decoder_layers encoder_num_hidden_layers decoder_num_hidden_layers num_encoder_layers
"""
_EXPERTS = "num_experts num_local_experts n_routed_experts moe_num_experts"
_CHOSEN = "num_experts_per_tok moe_topk moe_k num_experts_per_token top_k_experts"
_VOCABULARIES = """
    vocab_size vocab_size_per_layer_input input_vocab_size output_vocab_size text_vocab_size
"""

_SIZES = {
    **dict.fromkeys(_WIDTHS.split(), 256),
    **dict.fromkeys(_INNER_WIDTHS.split(), 384),
    **dict.fromkeys(_EXPERT_WIDTHS.split(), 128),
    **dict.fromkeys(_HEADS.split(), 4),
    **dict.fromkeys(_KEY_HEADS.split(), 2),
}
_OTHER_SIZES = {
    **dict.fromkeys(("head_dim", "d_kv", "v_head_dim", "swa_head_dim", "global_head_dim"), 64),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank", "o_lora_rank", "qk_head_dim"), 128),
    **dict.fromkeys(("qk_nope_head_dim", "qk_rope_head_dim", "index_head_dim"), 64),
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim"), 64),
    **dict.fromkeys(("linear_num_key_heads", "index_n_heads"), 2),
    **dict.fromkeys(("max_position_embeddings", "n_positions"), 256),
    "linear_num_value_heads": 4,
    "index_topk": 4,
    "hidden_size_per_layer_input": 64,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "image_size": 56,
    "patch_size": 14,
}
_AT_MOST = {
    **dict.fromkeys(_EXPERTS.split(), 4),
    **dict.fromkeys(_CHOSEN.split(), 2),
    **dict.fromkeys(_VOCABULARIES.split(), 320),
}
_PER_LAYER = ("layer_types", "layers_block_type", "mlp_layer_types", "indexer_types", "block_types")
_FURTHER: dict[str, dict[str, Any]] = {
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2, "num_hidden_layers": 4},
    "qwen4_exp_text": {
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 64,
        "indexer_budget": 8,
        "indexer_compress_ratio": 4,
    },
    "mamba2": {"num_heads": 8},
    "reformer": {"is_decoder": True},
    "autoformer": {"prediction_length": 8},
    "informer": {"prediction_length": 8},
    "time_series_transformer": {"prediction_length": 8},
}
"""What the default config of a model type leaves open."""


def _smaller(config: PreTrainedConfig, level: str) -> dict[str, Any]:
    """Return arguments for a smaller config of the same class."""
    entries, made = vars(config), dict[str, Any]()
    layers = 4 if any(name in entries for name in _PER_LAYER) else 2
    sizes = {
        "all": _SIZES | _OTHER_SIZES,
        "all, and what is not set": _SIZES | _OTHER_SIZES,
        "widths": {**_SIZES, "num_key_value_heads": 4},
        "numbers": {},
    }[level]
    for name, value in entries.items():
        if isinstance(value, PreTrainedConfig):
            made[name] = {**_smaller(value, level), "model_type": value.model_type}
        elif value is None and name in sizes | _AT_MOST and "not set" in level:
            made[name] = (sizes | _AT_MOST)[name]
        elif not isinstance(value, int) or isinstance(value, bool) or value <= 0:
            continue
        elif name in _LAYERS.split():
            made[name] = min(value, layers)
        elif name in _AT_MOST:
            made[name] = min(value, _AT_MOST[name])
        elif name in sizes:
            made[name] = sizes[name]
        elif name.endswith(("_token_id", "_token_index")) and value >= 300:
            made[name] = 300 + sum(map(ord, name)) % 19
    count = next((made[name] for name in _LAYERS.split() if name in made), 0)
    for name in _PER_LAYER:
        value = entries.get(name)
        if isinstance(value, (list, tuple)) and len(value) >= count > 0:
            made[name] = _with_each_kind(list(value), count)
    return made


def _with_each_kind(kinds: list[Any], count: int) -> list[Any]:
    """Return the first kinds of layers, some of them replaced by kinds that come later."""
    first = kinds[:count]
    for kind in dict.fromkeys(kinds[count:]):
        places = [i for i in reversed(range(count)) if first.count(first[i]) > 1]
        if kind not in first and places:
            first[places[0]] = kind
    return first


def _configs(kind: Any, model_type: str) -> Iterator[Any]:
    """Yield smaller and smaller changes of a default config, and the config itself."""
    config = kind.config_class or CONFIG_MAPPING[model_type]
    further = _FURTHER.get(config.model_type, {})
    for level in ("all", "all, and what is not set", "widths", "numbers"):
        yield lambda level=level: config(**{**_smaller(config(), level), **further})
    yield lambda: config(**further)


def small(model_type: str, seed: int) -> Any:
    """Return a small model in bf16, all of whose parameters have values that follow from a seed.

    Args:
        model_type: a model type, or the name of a class.
        seed: of the values.

    Raises:
        RuntimeError: no config gives one, with the reasons.
    """
    name = architectures().get(model_type, model_type)
    kind, errors = getattr(transformers, name, None), list[str]()
    if not (isinstance(kind, type) and issubclass(kind, transformers.PreTrainedModel)):
        raise RuntimeError(f"transformers lacks {name}, or what that requires is not installed")
    for make in _configs(kind, model_type):
        try:
            config = make()
            with torch.device("meta"):
                count = sum(x.numel() for x in kind(config).parameters())
            if count > MOST_PARAMETERS:
                errors.append(f"{count >> 20}M parameters")
                continue
            model = kind(config).to(torch.bfloat16)
        except Exception as error:
            errors.append(f"{type(error).__name__}: {' '.join(str(error).split())[:150]}")
            continue
        _fill(model, seed)
        return model
    raise RuntimeError("; ".join(dict.fromkeys(errors)))


@torch.no_grad()
def _fill(model: Any, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    filled = set[int]()
    for x in model.state_dict(keep_vars=True).values():
        if isinstance(x, torch.Tensor) and x.is_floating_point() and id(x) not in filled:
            x.copy_(torch.randn(x.shape, generator=generator) / 8 + 0.5 * (x.ndim == 1))
            filled.add(id(x))
