"""Writing FP8 checkpoints: shard by shard, into a folder that appears only when complete."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..ops.cast.ops import quantize_rowwise
from ..tensor.fp8_tensor import BlockwiseFP8Tensor
from ..tensor.weight import BlockwiseFP8Weight
from .on_disk import (
    CONFIG,
    HEADERS,
    INDEX,
    SCALE_SUFFIXES,
    SINGLE,
    header_digest,
    quantization_config,
    refuse_sharded,
    require_safetensors,
    shard_name,
)

_DEFAULT_SHARD = 5 << 30
_FP8_TYPES = (BlockwiseFP8Tensor, BlockwiseFP8Weight)


def save_fp8(
    model: nn.Module,
    path: str | os.PathLike[str],
    *,
    spelling: str = "deepseek",
    config: Mapping[str, Any] | None = None,
    max_shard_bytes: int = _DEFAULT_SHARD,
    overwrite: bool = False,
) -> Path:
    """Write a converted model in FP8: 1 byte a weight, in the layout of DeepSeek-V3.

    Weights of either FP8 type are written as e4m3 data and scales, other tensors unchanged. A
    trainable weight is written as its next forward would cast it; its high-precision master, which
    ``state_dict`` holds, is not. Tied tensors are written once, under their first name.

    On GPUs, transformers reads weights of any size as FP8 layers. Where it dequantizes at load (on
    CPUs), weights must be whole 128x128 blocks: for others it raises, or scales them wrongly
    without an error (seen in 5.17 and 5.23); :func:`load_fp8` with ``dequantize`` does not.

    The checkpoint is made beside ``path`` and renamed when it is complete: a killed process leaves
    the previous content.

    Args:
        model: any module, converted.
        path: the folder to make.
        spelling: name of the scales: ``"deepseek"`` for ``weight_scale_inv``, as in DeepSeek-V3 and
            transformers' "fp8"; ``"compressed-tensors"`` for ``weight_scale``.
        config: further entries of ``config.json``; default: ``model.config.to_dict()`` if present.
        max_shard_bytes: size limit of a file; a larger tensor gets a file of its own.
        overwrite: replace an existing checkpoint; other files in its folder are kept.

    Returns:
        ``path``.

    Raises:
        ImportError: safetensors is not installed.
        ValueError: another spelling; a shard size below 1; no FP8 weight; a tensor on meta.
        NotImplementedError: a sharded model.
        FileExistsError: ``path`` exists, and ``overwrite`` is not set or it is no checkpoint.
    """
    require_safetensors()
    if spelling not in SCALE_SUFFIXES:
        raise ValueError(f"spelling={spelling!r}: expected one of {', '.join(SCALE_SUFFIXES)}")
    if max_shard_bytes < 1:
        raise ValueError(f"max_shard_bytes={max_shard_bytes}: expected at least 1")
    folder = Path(path)
    _check_target(folder, overwrite)
    tensors = _unique_tensors(model)
    for name, x in tensors.items():
        refuse_sharded(name, x)
    fp8 = {name: x for name, x in tensors.items() if isinstance(x, _FP8_TYPES)}
    if not fp8:
        raise ValueError("the model has no FP8 weight: convert it first (blocktensor.convert)")
    for name, x in tensors.items():
        if x.is_meta:
            raise ValueError(f"{name} is on the meta device, it has no values: initialise it first")

    folder.parent.mkdir(parents=True, exist_ok=True)
    made = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    try:
        _write_tensors(made, tensors, spelling, max_shard_bytes)
        formats = [x.format for x in fp8.values()]
        described = quantization_config(spelling, _plain_linears(model, fp8), formats)
        known = _config_of(model) if config is None else dict(config)
        _write_json(made / CONFIG, {**known, "quantization_config": described})
        _put_in_place(made, folder)
    finally:
        shutil.rmtree(made, ignore_errors=True)
    return folder


def _check_target(folder: Path, overwrite: bool) -> None:
    if not folder.exists() or (folder.is_dir() and not any(folder.iterdir())):
        return
    if not overwrite:
        raise FileExistsError(f"{folder} is there already: pass overwrite=True to replace it")
    if not any((folder / name).exists() for name in (INDEX, SINGLE)):
        raise FileExistsError(
            f"{folder} is there and is no checkpoint (neither {INDEX} nor {SINGLE} in it): remove "
            f"it, or choose another path"
        )


def _unique_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and persistent buffers by their names in ``state_dict``, each once."""
    kept = dict(model.state_dict(keep_vars=True))
    seen: set[object] = set()
    unique: dict[str, Tensor] = {}
    for name, x in kept.items():
        if not isinstance(x, Tensor):
            continue  # extra state, which safetensors cannot hold
        identity = id(x) if isinstance(x, _FP8_TYPES) or x.is_meta else _memory(x)
        if identity not in seen:
            seen.add(identity)
            unique[name] = x
    return unique


def _memory(x: Tensor) -> object:
    return id(x) if x.numel() == 0 else (x.data_ptr(), x.shape, x.stride(), x.dtype)


def _plain_linears(model: nn.Module, fp8: Mapping[str, Tensor]) -> Iterator[str]:
    known = {id(x) for x in fp8.values()}
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and id(module.weight) not in known:
            yield name


def _config_of(model: nn.Module) -> dict[str, Any]:
    to_dict = getattr(getattr(model, "config", None), "to_dict", None)
    return dict(to_dict()) if callable(to_dict) else {}


def _stored(name: str, x: Tensor, suffix: str) -> dict[str, Tensor]:
    """The tensors to write for one tensor, by name, on the CPU and contiguous."""
    with torch.no_grad():
        if isinstance(x, BlockwiseFP8Weight):
            form = quantize_rowwise(x.master.detach(), x.format)
        elif isinstance(x, BlockwiseFP8Tensor):
            form = x.rowwise()
        else:
            return {name: x.detach().cpu().contiguous()}
        data, scale, _ = form
        return {name: data.cpu().contiguous(), f"{name}{suffix}": scale.cpu().contiguous()}


def _bytes(x: Tensor) -> int:
    return x.format.nbytes(x.shape) if isinstance(x, _FP8_TYPES) else x.nbytes


def _shards(tensors: Mapping[str, Tensor], limit: int) -> list[list[str]]:
    shards: list[list[str]] = [[]]
    size = 0
    for name, x in tensors.items():
        if shards[-1] and size + _bytes(x) > limit:
            shards.append([])
            size = 0
        shards[-1].append(name)
        size += _bytes(x)
    return shards


def _write_tensors(
    folder: Path, tensors: Mapping[str, Tensor], spelling: str, max_shard_bytes: int
) -> None:
    from safetensors.torch import save_file

    suffix = SCALE_SUFFIXES[spelling]
    shards = _shards(tensors, max_shard_bytes)
    places: dict[str, str] = {}
    headers: dict[str, str] = {}
    total = 0
    for number, names in enumerate(shards, 1):
        file = shard_name(number, len(shards))
        stored = {k: v for name in names for k, v in _stored(name, tensors[name], suffix).items()}
        save_file(stored, folder / file, metadata={"format": "pt"})
        _flush(folder / file)
        places |= dict.fromkeys(stored, file)
        headers[file] = header_digest(folder / file)
        total += sum(x.nbytes for x in stored.values())
    metadata = {"total_size": total, HEADERS: headers}
    _write_json(folder / INDEX, {"metadata": metadata, "weight_map": dict(sorted(places.items()))})


def _write_json(file: Path, content: Mapping[str, Any]) -> None:
    file.write_text(json.dumps(content, indent=2) + "\n")
    _flush(file)


def _flush(path: Path) -> None:
    """Write a file, or the names in a folder, to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _put_in_place(made: Path, folder: Path) -> None:
    """Rename ``made`` to ``folder``; files that are not of the old checkpoint are kept."""
    made.chmod(0o777 & ~_umask())
    if folder.exists():
        for file in folder.iterdir():
            if file.suffix != ".safetensors" and not (made / file.name).exists():
                (shutil.copytree if file.is_dir() else shutil.copy2)(file, made / file.name)
    _flush(made)
    if not folder.exists():
        made.rename(folder)
    else:
        # A folder cannot be replaced in one rename. A kill between the two leaves both folders
        # complete, under names that begin with a dot.
        old = Path(tempfile.mkdtemp(prefix=f".{folder.name}.old.", dir=folder.parent))
        folder.rename(old / folder.name)
        made.rename(folder)
        shutil.rmtree(old)
    _flush(folder.parent)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
