"""Writing FP8 checkpoints: shard by shard, and none of them counts before all are written."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor, nn

from ..model.names import is_module
from ..model.weights import stacks_of
from ..ops.cast.ops import quantize_rowwise
from ..ops.formats import BLOCKS_128X128, BlockFormat
from ..tensor.base import TORCH_FUNCTIONS, implements
from ..tensor.fp8_tensor import BlockwiseFP8Tensor
from ..tensor.weight import BlockwiseFP8Weight
from .in_place import flush, holds_nothing, naming, put_in_place, staging, umask, write_json
from .names import EXPERT_NAMES, Names, module_names, names_to_write, possible_names
from .on_disk import (
    CONFIG,
    HASHING_THREADS,
    HEADERS,
    INDEX,
    SCALE_SUFFIXES,
    SINGLE,
    TENSORS,
    bad_scale,
    header_digest,
    refuse_sharded,
    require_safetensors,
    tensor_digest,
)

_DEFAULT_SHARD = 5 << 30
_FP8_TYPES = (BlockwiseFP8Tensor, BlockwiseFP8Weight)


class _Part(NamedTuple):
    """A part that is written at once: a tensor of the model, or an expert of a stack.

    Attributes:
        x: the tensor or the stack.
        expert: which one of a stack; None for all of ``x``.
        names: of the matrices that it is written as, one below the other.
        label: how messages call it.
    """

    x: Tensor
    expert: int | None
    names: tuple[str, ...]
    label: str

    @property
    def nbytes(self) -> int:
        """Bytes in the file, with the scales."""
        shape = self.x.shape if self.expert is None else self.x.shape[1:]
        if isinstance(self.x, _FP8_TYPES):
            return self.x.format.nbytes(shape)
        return shape.numel() * self.x.element_size()


def save_fp8(
    model: nn.Module,
    path: str | os.PathLike[str],
    *,
    format: str = "deepseek",
    expert_names: str = "auto",
    config: Mapping[str, Any] | None = None,
    max_shard_bytes: int = _DEFAULT_SHARD,
    overwrite: bool = False,
) -> Path:
    """Write a converted model in FP8: 1 byte a weight, in the layout of DeepSeek-V3.

    Weights of either FP8 type are written as e4m3 data and scales, other tensors unchanged. A
    trainable weight is written as its next forward would cast it; its high-precision master, which
    ``state_dict`` holds, is not. Tied tensors are written once, under their first name.

    A model of transformers gets the names that its ``save_pretrained`` writes: of most mixtures of
    experts a matrix for each expert, ``experts.3.gate_proj.weight``, in the bytes of the stack.

    On GPUs, transformers reads weights of any size as FP8 layers. Where it dequantizes at load (on
    CPUs), weights must be whole 128x128 blocks: for others it raises, or scales them wrongly
    without an error (seen in 5.17 and 5.23); :func:`load_fp8` with ``dequantize`` does not. Of
    stacks of experts that are stored whole it then leaves out the scales, without an error.

    Nothing of it counts before all is written and on the disk: a killed process leaves the previous
    checkpoint or the new one. ``overwrite`` replaces the index, the config and the files that the
    index names, and ``model.safetensors``, which would hide the index from transformers; every
    other file in the folder stays. A link to a folder is followed.

    Args:
        model: any module, converted.
        path: the folder to make.
        format: ``"deepseek"``, with scales named ``weight_scale_inv``, as in DeepSeek-V3 and
            transformers' "fp8"; ``"compressed-tensors"``, with ``weight_scale``.
        expert_names: ``"auto"`` for the names of transformers' ``save_pretrained``, and the
            model's own for other models and for experts whose gate and up share blocks (their rows
            are no multiple of 128); ``"separate"`` for a matrix of each expert in any model;
            ``"fused"`` for the model's own names: ``experts.gate_up_proj`` and
            ``experts.gate_up_proj_scale_inv``.
        config: further entries of ``config.json``; default: ``model.config.to_dict()`` if present.
        max_shard_bytes: size limit of a file; a larger tensor or expert gets a file of its own.
        overwrite: replace an existing checkpoint, of :func:`save_fp8` or another library.

    Returns:
        ``path``.

    Raises:
        ImportError: safetensors or NumPy is not installed.
        ValueError: another format; a shard size below 1; no FP8 weight; a tensor on meta; an FP8
            weight that holds NaN or Inf, which :func:`load_fp8` refuses; ``"separate"`` for a stack
            ``[E, K, N]``, one of another name, or one whose matrices share blocks.
        NotImplementedError: a sharded model.
        FileExistsError: ``path`` exists, and ``overwrite`` is not set or it is no checkpoint.
        OSError: it cannot be written: the disk is full, say. Nothing has changed then.
        TimeoutError: other processes kept on replacing the same checkpoint for a minute.
    """
    require_safetensors()
    is_module(model, "save_fp8")
    choices = (("format", format, SCALE_SUFFIXES), ("expert_names", expert_names, EXPERT_NAMES))
    for name, chosen, known in choices:
        if chosen not in known:
            raise ValueError(f"{name}={chosen!r}: expected one of {', '.join(known)}")
    if max_shard_bytes < 1:
        raise ValueError(f"max_shard_bytes={max_shard_bytes}: expected at least 1")
    folder = Path(os.path.realpath(path))
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
    names = names_to_write(tensors, possible_names(model), expert_names)

    folder.parent.mkdir(parents=True, exist_ok=True)
    with staging(folder) as made:
        with naming(folder):
            _write_parts(made, _parts(tensors, names), format, max_shard_bytes)
            formats = [x.format for x in fp8.values()]
            plain = module_names(names, _plain_weights(model, fp8))
            described = _quantization_config(format, plain, formats)
            entries = _config_of(model) if config is None else dict(config)
            write_json(made / CONFIG, {**entries, "quantization_config": described})
        put_in_place(made, folder)
    return Path(path)


def _check_target(folder: Path, overwrite: bool) -> None:
    if not folder.exists() or (folder.is_dir() and holds_nothing(folder)):
        return
    if not overwrite:
        raise FileExistsError(f"{folder} is there already: pass overwrite=True to replace it")
    if not any((folder / name).exists() for name in (INDEX, SINGLE)):
        raise FileExistsError(
            f"{folder} is there and is no checkpoint (neither {INDEX} nor {SINGLE} in it): remove "
            f"it, or choose another path"
        )


def _unique_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return parameters and persistent buffers by their names in ``state_dict``, each once."""
    unique: dict[object, tuple[str, Tensor]] = {}
    for name, x in model.state_dict(keep_vars=True).items():
        if isinstance(x, Tensor):  # not extra state, which safetensors cannot hold
            has_memory = not (isinstance(x, _FP8_TYPES) or x.is_meta or x.numel() == 0)
            memory = (x.data_ptr(), x.shape, x.stride(), x.dtype) if has_memory else id(x)
            unique.setdefault(memory, (name, x))
    return dict(unique.values())


def _plain_weights(model: nn.Module, fp8: Mapping[str, Tensor]) -> Iterator[str]:
    """List the names of weights of linear layers and experts that are not FP8."""
    known = {id(x) for x in fp8.values()}
    for prefix, module in model.named_modules():
        keys = ("weight",) if isinstance(module, nn.Linear) else stacks_of(module)
        for key in keys:
            if id(getattr(module, key)) not in known:
                yield f"{prefix}.{key}" if prefix else key


def _config_of(model: nn.Module) -> dict[str, Any]:
    to_dict = getattr(getattr(model, "config", None), "to_dict", None)
    return dict(to_dict()) if callable(to_dict) else {}


def _quantization_config(
    layout: str, unconverted: Iterable[str], formats: Iterable[BlockFormat]
) -> dict[str, Any]:
    """Describe FP8 weights for ``config.json``, by which other libraries load them.

    ``unconverted``: names of linear layers that are not in FP8. ``formats``: of all FP8 weights.
    """
    left = sorted(unconverted)
    block = list(BLOCKS_128X128.block_shape)
    if layout == "deepseek":
        # As in DeepSeek-V3.1: transformers then keeps the fp32 scales as e8m0, without loss.
        powers = all(format.power_of_two for format in formats)
        return {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": block,
            "modules_to_not_convert": left,
        } | ({"scale_fmt": "ue8m0"} if powers else {})
    numbers = {"num_bits": 8, "type": "float", "symmetric": True}
    weights = {"strategy": "block", "block_structure": block, "dynamic": False}
    inputs = {"strategy": "group", "group_size": BLOCKS_128X128.cols, "dynamic": True}
    group = {
        "targets": ["Linear"],
        "weights": numbers | weights,
        "input_activations": numbers | inputs,
    }
    return {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "quantization_status": "compressed",
        "ignore": left,
        "config_groups": {"group_0": group},
    }


def _parts(tensors: Mapping[str, Tensor], names: Mapping[str, Names]) -> Iterator[_Part]:
    """List all tensors, in the order of the model."""
    for name, x in tensors.items():
        way = names[name]
        if way.experts is None:
            yield _Part(x, None, way.templates, name)
        else:
            for expert in range(way.experts):
                yield _Part(x, expert, way.of_expert(expert), f"{name}[{expert}]")


def _stored(part: _Part, suffix: str) -> dict[str, Tensor]:
    """Return the tensors to write for a part, by name, on the CPU and contiguous."""
    x: Any = part.x.master if isinstance(part.x, BlockwiseFP8Weight) else part.x
    with torch.no_grad():
        x = x.detach() if part.expert is None else x.detach()[part.expert]
        if not isinstance(part.x, _FP8_TYPES):
            return _named(part.names, x)
        is_fp8 = isinstance(x, BlockwiseFP8Tensor)
        form = x.rowwise() if is_fp8 else quantize_rowwise(x, part.x.format)
    scale = form.scale.cpu()
    problem = bad_scale(scale, form.format)
    if problem is not None:
        raise ValueError(
            f"{part.label} has a block that FP8 cannot hold, {problem}; a NaN or Inf in the weight "
            f"makes such a scale: find it with torch.isfinite, or save the masters (state_dict)"
        )
    scales = [f"{name}{suffix}" for name in part.names]
    return _named(part.names, form.data) | _named(scales, scale)


def _named(names: Sequence[str], x: Tensor) -> dict[str, Tensor]:
    """Name a tensor, or with several names its rows, in as many equal parts."""
    x = x.cpu().contiguous()
    parts = [x] if len(names) == 1 else x.chunk(len(names))
    return dict(zip(names, parts, strict=True))


def _shards(parts: Iterable[_Part], limit: int) -> list[list[_Part]]:
    shards: list[list[_Part]] = [[]]
    size = 0
    for part in parts:
        if shards[-1] and size + part.nbytes > limit:
            shards.append([])
            size = 0
        shards[-1].append(part)
        size += part.nbytes
    return shards


def _write_parts(folder: Path, written: Iterable[_Part], layout: str, max_shard_bytes: int) -> None:
    from safetensors.torch import save_file

    suffix = SCALE_SUFFIXES[layout]
    shards = _shards(written, max_shard_bytes)
    places: dict[str, str] = {}
    headers: dict[str, str] = {}
    digests: dict[str, str] = {}
    total = 0
    for number, parts in enumerate(shards, 1):
        file = f"model-{number:05}-of-{len(shards):05}.safetensors"
        stored = {k: v for part in parts for k, v in _stored(part, suffix).items()}
        with ThreadPoolExecutor(HASHING_THREADS) as pool:  # while the file is written
            found = pool.map(tensor_digest, stored.values())
            save_file(stored, folder / file, metadata={"format": "pt"})
            digests |= zip(stored, found, strict=True)
        os.chmod(folder / file, 0o666 & ~umask())  # safetensors 0.8 lets its owner alone read it
        flush(folder / file)
        places |= dict.fromkeys(stored, file)
        headers[file] = header_digest(folder / file)
        total += sum(x.nbytes for x in stored.values())
    metadata = {"total_size": total, HEADERS: headers, TENSORS: dict(sorted(digests.items()))}
    write_json(folder / INDEX, {"metadata": metadata, "weight_map": dict(sorted(places.items()))})


@implements(TORCH_FUNCTIONS, Tensor.storage)
def _no_storage(x: Tensor) -> NoReturn:
    """Name save_fp8 to other writers: safetensors fails with "invalid python storage" otherwise."""
    raise RuntimeError(
        f"this {type(x).__name__} {list(x.shape)} has no storage of its own, so that safetensors "
        f"cannot write it: blocktensor.save_fp8(model, path) writes the model in FP8; in high "
        f"precision write .dequantize() of a frozen weight, and state_dict() of trainable ones, "
        f"which holds plain tensors"
    )
