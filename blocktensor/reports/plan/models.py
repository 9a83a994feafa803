"""Models by name, config or module: on the meta device, so that no weights are read."""

from __future__ import annotations

import difflib
import importlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

_LLAMA_3 = {"vocab_size": 128_256, "num_key_value_heads": 8}
_QWEN3 = {"vocab_size": 151_936, "head_dim": 128, "num_key_value_heads": 8}
_QWEN3_MOE = {
    **_QWEN3,
    "num_key_value_heads": 4,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "tie_word_embeddings": False,
}


def _sizes(hidden: int, inner: int, layers: int, heads: int, **more: Any) -> dict[str, Any]:
    return {
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        **more,
    }


_TIED, _UNTIED = {"tie_word_embeddings": True}, {"tie_word_embeddings": False}

KNOWN: dict[str, tuple[str, dict[str, Any]]] = {
    "meta-llama/Llama-3.2-1B": (
        "LlamaConfig",
        _sizes(2048, 8192, 16, 32, head_dim=64, **_LLAMA_3, **_TIED),
    ),
    "meta-llama/Llama-3.2-3B": (
        "LlamaConfig",
        _sizes(3072, 8192, 28, 24, head_dim=128, **_LLAMA_3, **_TIED),
    ),
    "meta-llama/Llama-3.1-8B": ("LlamaConfig", _sizes(4096, 14336, 32, 32, **_LLAMA_3)),
    "meta-llama/Llama-3.1-70B": ("LlamaConfig", _sizes(8192, 28672, 80, 64, **_LLAMA_3)),
    "meta-llama/Llama-3.1-405B": ("LlamaConfig", _sizes(16384, 53248, 126, 128, **_LLAMA_3)),
    "Qwen/Qwen3-0.6B": ("Qwen3Config", _sizes(1024, 3072, 28, 16, **_QWEN3, **_TIED)),
    "Qwen/Qwen3-1.7B": ("Qwen3Config", _sizes(2048, 6144, 28, 16, **_QWEN3, **_TIED)),
    "Qwen/Qwen3-4B": ("Qwen3Config", _sizes(2560, 9728, 36, 32, **_QWEN3, **_TIED)),
    "Qwen/Qwen3-8B": ("Qwen3Config", _sizes(4096, 12288, 36, 32, **_QWEN3, **_UNTIED)),
    "Qwen/Qwen3-14B": ("Qwen3Config", _sizes(5120, 17408, 40, 40, **_QWEN3, **_UNTIED)),
    "Qwen/Qwen3-32B": ("Qwen3Config", _sizes(5120, 25600, 64, 64, **_QWEN3, **_UNTIED)),
    "Qwen/Qwen3-30B-A3B": (
        "Qwen3MoeConfig",
        _sizes(2048, 6144, 48, 32, moe_intermediate_size=768, **_QWEN3_MOE),
    ),
    "Qwen/Qwen3-235B-A22B": (
        "Qwen3MoeConfig",
        _sizes(4096, 12288, 94, 64, moe_intermediate_size=1536, **_QWEN3_MOE),
    ),
    "mistralai/Mixtral-8x7B-v0.1": (
        "MixtralConfig",
        _sizes(4096, 14336, 32, 32, vocab_size=32_000, num_key_value_heads=8, num_local_experts=8),
    ),
    "deepseek-ai/DeepSeek-V3": ("DeepseekV3Config", {}),
}
"""The config class of transformers and the sizes of models, by their ids on the hub."""


def model_of(source: Any, sizes: Mapping[str, Any] | None = None) -> tuple[str, nn.Module]:
    """Return a name and the model on the meta device.

    Args:
        source: a module, as it is; a config of transformers; the name of a config class
            (``"LlamaConfig"``); an id of :data:`KNOWN`, or its last part; a folder with a
            ``config.json``, or that file.
        sizes: attributes of the config to change.

    Raises:
        ImportError: transformers is not installed.
        TypeError: another type; sizes of a module, which has them already.
        ValueError: an unknown name, a folder without a config, a size that the config does not
            have, or sizes of which transformers cannot build a model.
    """
    if isinstance(source, nn.Module):
        if sizes:
            raise TypeError(
                f"sizes={dict(sizes)} change a config: build the {type(source).__name__} with "
                f"them, or pass its config"
            )
        return type(source).__name__, source
    if isinstance(source, (str, os.PathLike)):
        name, config = _named(os.fspath(source))
    elif hasattr(source, "model_type") and hasattr(source, "to_dict"):
        name, config = type(source).__name__, type(source).from_dict(source.to_dict())
    else:
        raise TypeError(
            f"plan takes a module, a config of transformers, or the name of one: got a "
            f"{type(source).__name__}"
        )
    _change(config, sizes or {})
    config.quantization_config = None
    del config.quantization_config  # of an FP8 checkpoint, whose layers are not nn.Linear
    library = _transformers()
    try:
        with torch.device("meta"):
            model: nn.Module = library.AutoModelForCausalLM.from_config(
                config, dtype=torch.bfloat16
            )
    except Exception as error:  # whatever transformers raises for sizes that do not fit together
        raise ValueError(
            f"transformers cannot build a causal language model from this {type(config).__name__}: "
            f"{error}. Change its sizes, or pass a module on the meta device"
        ) from error
    return name, model


def _transformers() -> Any:
    try:
        return importlib.import_module("transformers")
    except ImportError as error:
        raise ImportError(
            "plan builds models from names and configs with transformers: pip install "
            "transformers, or pass a module on the meta device"
        ) from error


def _named(name: str) -> tuple[str, Any]:
    """Return a short name and the config of a known id, a class, or a folder."""
    short = {known.rpartition("/")[2].lower(): known for known in KNOWN}
    known = name if name in KNOWN else short.get(name.rpartition("/")[2].lower())
    path = Path(name)
    folder = path.parent if path.name == "config.json" else path
    if (folder / "config.json").is_file():
        library = _transformers()
        return folder.resolve().name, library.AutoConfig.from_pretrained(
            folder, local_files_only=True
        )
    if path.is_dir():
        raise ValueError(f"{name!r} has no config.json: expected the folder of a model")
    if known is not None:
        kind, sizes = KNOWN[known]
        return known.rpartition("/")[2], getattr(_transformers(), kind)(**sizes)
    if name.endswith("Config") and hasattr(_transformers(), name):
        return name, getattr(_transformers(), name)()
    near = difflib.get_close_matches(name.lower(), short, n=3, cutoff=0.5)
    likely = f"; did you mean {' or '.join(short[x] for x in near)}?" if near else ""
    raise ValueError(
        f"unknown model {name!r}{likely} Expected an id of {', '.join(map(repr, short.values()))}; "
        f"a config class of transformers, such as 'LlamaConfig'; or a folder with a config.json"
    )


def _change(config: Any, sizes: Mapping[str, Any]) -> None:
    for name, value in sizes.items():
        if not hasattr(config, name):
            near = difflib.get_close_matches(name, list(config.to_dict()), n=3, cutoff=0.5)
            likely = f": did you mean {' or '.join(near)}?" if near else ""
            raise ValueError(f"{type(config).__name__} has no {name!r}{likely}")
        if isinstance(value, int) and not isinstance(value, bool) and value < 1:
            raise ValueError(f"{name}={value}: expected 1 or more")
        setattr(config, name, value)
        kinds = getattr(config, "layer_types", None)
        if name == "num_hidden_layers" and kinds:  # one for each layer
            config.layer_types = [kinds[i % len(kinds)] for i in range(value)]
