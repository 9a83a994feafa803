"""Build models by name, config or module on the meta device, so that no weights are read."""

from __future__ import annotations

import difflib
import importlib
import json
import os
import textwrap
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

KNOWN: dict[str, dict[str, Any]] = json.loads(
    Path(__file__).with_suffix(".json").read_text("utf-8")
)
"""The config class of transformers and the sizes of models, by their ids on the hub."""

_LONGEST = 300
"""The most characters of an error of transformers that are shown; some list all its classes."""


def model_of(source: Any, sizes: Mapping[str, Any] | None = None) -> tuple[str, nn.Module]:
    """Return a name and the model on the meta device.

    Args:
        source: a module; a config of transformers; the name of a config class
            (``"LlamaConfig"``); an id of :data:`KNOWN`, or its last part; a folder with a
            ``config.json``, or that file.
        sizes: attributes of the config to change.

    Raises:
        ImportError: transformers is not installed.
        TypeError: another type; sizes of a module, which has them already.
        ValueError: an unknown name, a folder without a config or with one that transformers cannot
            read, a size that the config does not have, or values of which transformers cannot
            make a config or a model.
    """
    if isinstance(source, nn.Module):
        if sizes:
            raise TypeError(
                f"sizes={dict(sizes)} change a config: build the {type(source).__name__} with "
                f"them, or pass its config"
            )
        return type(source).__name__, source
    if isinstance(source, (str, os.PathLike)):
        name, config = _named(os.fspath(source), sizes or {})
    elif hasattr(source, "model_type") and hasattr(source, "to_dict"):
        name = type(source).__name__
        config = _changed(type(source).from_dict(source.to_dict()), sizes or {})
    else:
        raise TypeError(
            f"plan takes a module, a config of transformers, or the name of one: got a "
            f"{type(source).__name__}"
        )
    config.quantization_config = None
    del config.quantization_config  # of an FP8 checkpoint, whose layers are not nn.Linear
    if getattr(config, "is_encoder_decoder", False):
        raise ValueError(
            f"{type(config).__name__} describes an encoder and a decoder. transformers builds a "
            f"causal language model of the decoder alone: pass a module on the meta device, for "
            f"example of AutoModelForSeq2SeqLM.from_config(config)"
        )
    library = _transformers()
    what = f"build a causal language model from this {type(config).__name__}"
    with _by_transformers(what), torch.device("meta"):
        model: nn.Module = library.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    return name, model


@contextmanager
def _by_transformers(what: str) -> Iterator[None]:
    """Raise ValueError for whatever transformers raises for values that it does not take."""
    try:
        yield
    except Exception as error:
        said = textwrap.shorten(str(error), _LONGEST, placeholder=" …")
        raise ValueError(
            f"transformers cannot {what}: {said.rstrip('.')}. Change its values, or pass a module "
            f"on the meta device"
        ) from error


def _transformers() -> Any:
    try:
        return importlib.import_module("transformers")
    except ImportError as error:
        raise ImportError(
            "plan builds models from names and configs with transformers: pip install "
            "transformers, or pass a module on the meta device"
        ) from error


def _named(name: str, sizes: Mapping[str, Any]) -> tuple[str, Any]:
    """Return a short name and the config of a known id, a class, or a folder."""
    short = {known.rpartition("/")[2].lower(): known for known in KNOWN}
    known = name if name in KNOWN else short.get(name.rpartition("/")[2].lower())
    path = Path(name)
    folder = path.parent if path.name == "config.json" else path
    if (folder / "config.json").is_file():
        library = _transformers()
        with _by_transformers(f"read {str(folder / 'config.json')!r}"):
            config = library.AutoConfig.from_pretrained(folder, local_files_only=True)
        return folder.resolve().name, _changed(config, sizes)
    if path.is_dir():
        raise ValueError(f"{name!r} has no config.json: expected the folder of a model")
    if known is not None:
        kind = getattr(_transformers(), KNOWN[known]["config"])
        return known.rpartition("/")[2], _made(kind, KNOWN[known]["sizes"], sizes)
    if name.endswith("Config") and hasattr(_transformers(), name):
        return name, _made(getattr(_transformers(), name), {}, sizes)
    near = difflib.get_close_matches(name.lower(), short, n=3, cutoff=0.5)
    likely = f": did you mean {' or '.join(near)}?" if near else "."
    raise ValueError(
        f"unknown model {name!r}{likely} Expected an id of {', '.join(map(repr, short.values()))}; "
        f"a config class of transformers, such as 'LlamaConfig'; or a folder with a config.json"
    )


def _made(kind: Any, known: Mapping[str, Any], sizes: Mapping[str, Any]) -> Any:
    """Return a config of a class, which computes missing sizes from the given ones."""
    with _by_transformers(f"build {kind.__name__}()"):
        config = kind(**known)
    _check(config, sizes)
    with _by_transformers(f"build {kind.__name__}({_listed(sizes)})"):
        return kind(**{**known, **sizes})


def _changed(config: Any, sizes: Mapping[str, Any]) -> Any:
    """Return a config with other sizes; values that it computed from the former sizes stay."""
    _check(config, sizes)
    for name, value in sizes.items():
        with _by_transformers(f"build {type(config).__name__}({_listed({name: value})})"):
            setattr(config, name, value)
        kinds = getattr(config, "layer_types", None)
        if name == "num_hidden_layers" and kinds:  # one for each layer
            config.layer_types = [kinds[i % len(kinds)] for i in range(value)]
    return config


def _listed(sizes: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={value!r}" for name, value in sizes.items())


def _check(config: Any, sizes: Mapping[str, Any]) -> None:
    for name, value in sizes.items():
        if not hasattr(config, name):
            near = difflib.get_close_matches(name, list(config.to_dict()), n=3, cutoff=0.5)
            likely = f": did you mean {' or '.join(near)}?" if near else ""
            raise ValueError(f"{type(config).__name__} has no {name!r}{likely}")
        if isinstance(value, int) and not isinstance(value, bool) and value < 1:
            raise ValueError(f"{name}={value}: expected 1 or more")
