"""Predict how transformers' FP8 reader would read a checkpoint that is not written yet.

The reader has two paths. On GPUs it replaces modules by FP8 modules, which hold bytes and scales;
which modules, it decides by classes, names, sizes and lists of its own. On CPUs and older GPUs it
dequantizes. Both run here on a skeleton of the model, with traced tensors in place of the stored
ones. So the prediction holds for the installed version of transformers and all of its models.
"""

from __future__ import annotations

import functools
import importlib
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from ..ops.formats import BLOCK, BLOCKS_128X128, num_blocks
from .names import module_of
from .on_disk import SCALE_SUFFIX
from .parts import Part
from .pretrained import Loaded, loaded, rules_of, skeleton
from .stored import Stored
from .traced import TracedTensor, traced


class Misread(NamedTuple):
    """An error that transformers would make when it reads one tensor of a model.

    Attributes:
        why: the reason, for messages.
        module: the name of the module that it replaces by an FP8 module; "" if it replaces none.
    """

    why: str
    module: str = ""


class Checkpoint(NamedTuple):
    """A checkpoint that is to be written.

    Attributes:
        stored: its groups of tensors.
        fp8: the names of the model's tensors that are stored in FP8, with scales.
        config: its ``quantization_config``.
        dtypes: the dtypes of the model's tensors.
    """

    stored: Sequence[Stored]
    fp8: Collection[str]
    config: Mapping[str, Any]
    dtypes: Mapping[str, torch.dtype]

    @property
    def tensors(self) -> dict[str, TracedTensor]:
        """The traced tensors of all files."""
        made = {}
        for name, shape, of, _ in self.stored:
            if of[0] in self.fp8:
                made[name] = traced(name, shape, BLOCKS_128X128.dtype)
                scale = name + SCALE_SUFFIX
                made[scale] = traced(scale, BLOCKS_128X128.scale_shape(shape), torch.float32)
            else:
                made[name] = traced(name, shape, self.dtypes[of[0]])
        return made

    @property
    def sources(self) -> dict[str, list[Stored]]:
        """The names of the stored tensors from which each tensor of the model must be read."""
        found: dict[str, list[Stored]] = defaultdict(list)
        for stored in self.stored:
            for name in stored.of:
                found[name].append(stored)
        return found


def misread(model: nn.Module, checkpoint: Checkpoint) -> dict[str, Misread]:
    """Return the tensors, by name, that transformers would read with wrong values.

    Tensors that it refuses with an error when it dequantizes are not among them.

    Args:
        model: a model of transformers.
        checkpoint: the checkpoint of the model.
    """
    return {**_where_it_dequantizes(model, checkpoint), **_on_gpus(model, checkpoint)}


@torch.inference_mode(False)  # transformers fails on tensors made there
def _read(model: nn.Module, checkpoint: Checkpoint, dequantize: bool) -> tuple[nn.Module, Loaded]:
    """Load a checkpoint into a skeleton of a model, as transformers does."""
    quantizer = _quantizer({**checkpoint.config, "dequantize": dequantize})
    twin = skeleton(model)
    quantizer._process_model_before_weight_loading(twin)
    # with fp16 transformers casts the most tensors to fp32
    dtypes: Any = twin._get_dtype_plan(torch.float16)  # type: ignore[operator]
    rules = rules_of(twin, quantizer)
    return twin, loaded(twin, checkpoint.tensors, rules, quantizer, dtypes)


def _quantizer(config: Mapping[str, Any]) -> Any:
    """Return transformers' reader of FP8 checkpoints of a ``quantization_config``."""
    configs = importlib.import_module("transformers.utils.quantization_config")
    module = importlib.import_module("transformers.quantizers.quantizer_finegrained_fp8")
    made = configs.FineGrainedFP8Config.from_dict(dict(config))
    return module.FineGrainedFP8HfQuantizer(made, pre_quantized=True)


def _on_gpus(model: nn.Module, checkpoint: Checkpoint) -> dict[str, Misread]:
    try:
        twin, result = _read(model, checkpoint, dequantize=False)
    except Exception as error:  # for example, the constructor of an FP8 module raises
        why = f"transformers fails as it makes FP8 modules: {error}"
        stacks = {name for x in checkpoint.stored if _is_of_stack(x) for name in x.of}
        wrong = stacks.intersection(checkpoint.fp8) or checkpoint.fp8
        return {name: Misread(why, module_of(name)) for name in wrong}
    state, modules = twin.state_dict(keep_vars=True), dict(twin.named_modules())
    misreads: dict[str, Misread] = {}
    for name, stored in checkpoint.sources.items():
        is_fp8, module = name in checkpoint.fp8, module_of(name)
        if name not in state:  # a module above it was replaced
            while module not in modules:
                module = module_of(module)
            misreads[name] = Misread("transformers' FP8 module lacks it", module)
        elif is_fp8 and name + SCALE_SUFFIX not in state:
            misreads[name] = Misread("transformers has no FP8 module for it")
        elif is_fp8 and not _bytes_are_read(name, stored, result):
            misreads[name] = Misread("transformers' FP8 module has another layout", module)
        elif not is_fp8 and name + SCALE_SUFFIX in state:
            misreads[name] = Misread("transformers has an FP8 module for it", module)
        elif not is_fp8 and not _is_read(name, stored, result):
            misreads[name] = _OTHER_VALUES
    for names in _tied(model):
        if len(names) > 1 and not names.isdisjoint(checkpoint.fp8):
            tied = Misread("transformers ties weights without their scales")
            misreads |= dict.fromkeys(names & checkpoint.sources.keys(), tied)
    return misreads


_OTHER_VALUES = Misread("transformers reads other values")


def _where_it_dequantizes(model: nn.Module, checkpoint: Checkpoint) -> dict[str, Misread]:
    try:
        _, result = _read(model, checkpoint, dequantize=True)
    except Exception:  # a real load would raise, too
        return {}
    misreads = {}
    for name, stored in checkpoint.sources.items():
        if name in result.errors or name in result.mismatched:
            continue  # the reader raises
        if name not in checkpoint.fp8:
            if not _is_read(name, stored, result):
                misreads[name] = _OTHER_VALUES
            continue
        tensor = result.tensors.get(name)
        names = {x.name + suffix for x in stored for suffix in ("", SCALE_SUFFIX)}
        if not isinstance(tensor, TracedTensor) or tensor.origins != names:
            misreads[name] = Misread("transformers leaves out its scales where it dequantizes")
        elif any(_scales_other_blocks(x.shape[-2:]) for x in stored):
            misreads[name] = Misread("transformers takes other blocks where it dequantizes")
    return misreads


def _is_of_stack(stored: Stored) -> bool:
    return any(len(part.there) == 3 for part in stored.parts or ())


def _is_read(name: str, stored: Sequence[Stored], made: Loaded) -> bool:
    """Return True if a tensor of the model gets its stored values."""
    tensor = made.tensors.get(name)
    if not isinstance(tensor, TracedTensor):
        return False
    if any(x.parts is None for x in stored):
        return tensor.origins <= {x.name for x in stored}
    return _same(
        tensor.parts, (p.of(x.name) for x in stored for p in x.parts or () if p.name == name)
    )


def _bytes_are_read(name: str, stored: Sequence[Stored], made: Loaded) -> bool:
    """Return True if a weight of an FP8 module gets its stored bytes and scales."""
    data, tensor = (made.tensors.get(name + suffix) for suffix in ("", SCALE_SUFFIX))
    if data is None or data.dtype != BLOCKS_128X128.dtype or not _is_read(name, stored, made):
        return False
    blocks = [
        block.of(x.name + SCALE_SUFFIX)
        for x in stored
        for part in x.parts or ()
        if part.name == name and (block := part.in_blocks(x.shape)) is not None
    ]
    return isinstance(tensor, TracedTensor) and _same(tensor.parts, blocks)


def _same(found: Sequence[Part] | None, wanted: Iterable[Part]) -> bool:
    """Return True if two lists have the same parts, ignoring the order of dimensions of size 1."""

    def places(parts: Iterable[Part]) -> set[Any]:
        return {
            (
                part.name,
                *((run.start, run.stop) for run in (*part.there, *part.here)),
                *(axis for axis, size in zip(part.axes, part.shape, strict=True) if size > 1),
            )
            for part in parts
        }

    return found is not None and places(found) == places(wanted)


def _tied(model: nn.Module) -> list[set[str]]:
    names: dict[int, set[str]] = defaultdict(set)
    for name, x in model.state_dict(keep_vars=True).items():
        names[id(x)].add(name)
    return list(names.values())


def _scales_other_blocks(shape: Sequence[int]) -> bool:
    """Return True if its dequantization silently assumes other blocks for a matrix.

    transformers computes the size of blocks from the number of scales.
    """
    outcomes = {_dequantizes(size) for size in shape}
    return False in outcomes and None not in outcomes


@functools.cache
def _dequantizes(size: int) -> bool | None:
    """Return True if a column of ``size`` elements gets the right scales; None if that raises."""
    data = torch.ones(size, 1, device="cpu").to(BLOCKS_128X128.dtype)
    scales = 1.0 + torch.arange(num_blocks(size), dtype=torch.float32, device="cpu")[:, None]
    (rule,) = _quantizer({"dequantize": True}).get_weight_conversions()
    given = {"weight": data, "weight_scale_inv": scales}
    tensors = {x: [given[x.rstrip("$")]] for x in rule.source_patterns if x.rstrip("$") in given}
    try:
        (made,) = rule.operations[0].convert(tensors).values()
    except Exception:
        return None
    values = made[0] if isinstance(made, list) else made
    return torch.equal(values, scales.repeat_interleave(BLOCK, 0)[:size])
