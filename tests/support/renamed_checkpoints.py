"""FP8 checkpoints of transformers' models whose names, files and configs a random history changes.

Beside each lies the same checkpoint with plain values in place of bytes and scales, which tells
what a load must give: that of the same names by transformers, or by ``load_fp8``.
"""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from blocktensor import BlockwiseFP8Tensor
from blocktensor.ops.formats import BLOCKS_128X128

Tensors = dict[str, Tensor]
SUFFIXES = ("_scale_inv", "_scale")
ROOTS = ("model.", "language_model.", "model.language_model.", "transformer.", "module.")

PAIRS = (
    *(("gate_proj", "up_proj"), ("k_proj", "v_proj"), ("q_proj", "o_proj"), ("w1", "w3")),
    *(("up_proj", "down_proj"), ("layers.0.", "layers.1.")),
)


def read(folder: Path) -> Tensors:
    tensors: Tensors = {}
    for file in sorted(folder.glob("*.safetensors")):
        tensors |= load_file(file)
    return tensors


def write(folder: Path, tensors: Tensors) -> None:
    """One file, without an index."""
    for file in folder.glob("model*"):
        file.unlink()
    made = {name: x.contiguous() for name, x in tensors.items()}
    save_file(made, folder / "model.safetensors", metadata={"format": "pt"})


def plain(tensors: Tensors) -> Tensors:
    """FP8 weights as the values of bytes and scales; NaN where a weight has no scales."""
    made = {}
    for name, x in tensors.items():
        if any(name.endswith(s) and name.removesuffix(s) in tensors for s in SUFFIXES):
            continue
        if x.dtype == torch.float8_e4m3fn:
            scales = [tensors[name + s] for s in SUFFIXES if name + s in tensors]
            x = _values(x, scales[0]) if len(scales) == 1 else torch.full(x.shape, torch.nan)
        made[name] = x
    return made


def _values(data: Tensor, scale: Tensor) -> Tensor:
    shape = BLOCKS_128X128.block_shape
    return BlockwiseFP8Tensor.from_data(
        data, scale.float(), block_shape=shape, dtype=torch.float32
    ).dequantize()


def renamed(tensors: Tensors, name: Callable[[str], str]) -> Tensors:
    return {name(old): x for old, x in tensors.items()}


def rooted(draw: random.Random, tensors: Tensors) -> Tensors:
    root = draw.choice(ROOTS)
    return renamed(tensors, lambda name: root + name)


def unrooted(draw: random.Random, tensors: Tensors) -> Tensors:
    root = draw.choice(ROOTS)
    return renamed(tensors, lambda name: name.removeprefix(root))


def moved(draw: random.Random, tensors: Tensors) -> Tensors:
    old, new = draw.sample(ROOTS, 2)
    return renamed(tensors, lambda name: new + name[len(old) :] if name.startswith(old) else name)


def swapped(draw: random.Random, tensors: Tensors) -> Tensors:
    """Two kinds of weights change their names, of one shape or of two."""
    a, b = draw.choice(PAIRS)
    return renamed(tensors, lambda x: x.replace(a, "@").replace(b, a).replace("@", b))


def other_modules(draw: random.Random, tensors: Tensors) -> Tensors:
    pairs = [("mlp.", "block_sparse_moe."), ("mlp.", "ffn."), ("self_attn.", "attention.")]
    old, new = draw.choice(pairs)
    return renamed(tensors, lambda name: name.replace(old, new))


def other_suffix(draw: random.Random, tensors: Tensors) -> Tensors:
    new = draw.choice(["_scale", "_scale_inv", ".scale", "_scales"])
    return renamed(tensors, lambda name: name.replace("_scale_inv", new))


def lost(draw: random.Random, tensors: Tensors) -> Tensors:
    gone = draw.choice(sorted(tensors))
    return {name: x for name, x in tensors.items() if name != gone}


def no_scales(draw: random.Random, tensors: Tensors) -> Tensors:
    return {name: x for name, x in tensors.items() if not name.endswith(SUFFIXES)}


def doubled(draw: random.Random, tensors: Tensors) -> Tensors:
    """A part under a second root, with other values."""
    root, part = draw.choice(ROOTS), draw.choice(["layers.0.", "up_proj", "norm", "lm_head"])
    more = {root + name: x.flip(0) for name, x in tensors.items() if part in name}
    return {**more, **tensors}


HISTORY = (rooted, unrooted, moved, swapped, other_modules, other_suffix, lost, no_scales, doubled)


def forget(draw: random.Random, folder: Path) -> None:
    """Take entries out of a config; each changes nothing that the tensors do not say."""
    config = json.loads((folder / "config.json").read_text())
    for name in ("quantization_config", "architectures", "dtype"):
        if draw.random() < 0.6:
            config.pop(name, None)
    (folder / "config.json").write_text(json.dumps(config))


def pair(draw: random.Random, source: Path, folder: Path) -> tuple[Path, Path, list[str]]:
    """A changed copy of a checkpoint, the same in plain values, and what was changed."""
    fp8, wanted = folder / "fp8", folder / "plain"
    shutil.copytree(source, fp8)
    changes: Any = draw.choices(HISTORY, k=draw.choice([0, 1, 1, 1, 2, 3]))
    tensors = read(fp8)
    for change in changes:
        tensors = change(draw, tensors)
    if changes or draw.random() < 0.5:
        write(fp8, tensors)
    forget(draw, fp8)
    shutil.copytree(fp8, wanted)
    write(wanted, plain(tensors))
    config = json.loads((wanted / "config.json").read_text())
    config.pop("quantization_config", None)
    (wanted / "config.json").write_text(json.dumps(config))
    return fp8, wanted, [change.__name__ for change in changes]
