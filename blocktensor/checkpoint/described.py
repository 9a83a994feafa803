"""Describe FP8 weights in ``config.json``, and store those in FP8 that transformers can read."""

from __future__ import annotations

import enum
import warnings
from collections.abc import Collection, Iterator, Mapping
from typing import Any, NamedTuple

from torch import nn

from ..model.weights import full_name, kind_of, stacks_of
from ..ops.formats import BLOCKS_128X128
from ..sharding.dtensor import fp8_part
from .export import Exported
from .fp8_readers import Checkpoint, Misread, misread
from .match import some
from .names import module_of
from .pretrained import pretrained_models


class Described(NamedTuple):
    """An export, and the config with which transformers reads it.

    Attributes:
        found: the export that is described.
        further: names of modules that are not in FP8, besides linear layers and known experts.
    """

    found: Exported
    further: Collection[str]

    @property
    def config(self) -> dict[str, Any]:
        """The ``quantization_config``, by which other libraries load the FP8 weights."""
        found, modules = self.found, self.found.modules
        formats = [fp8_part(found.tensors[name]).format for name in found.fp8]
        plain = {modules.get(name, module_of(name)) for name in _plain_weights(found)}
        # As in DeepSeek-V3.1: transformers then keeps the fp32 scales as e8m0, without loss.
        powers = all(format.power_of_two for format in formats)
        return {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": list(BLOCKS_128X128.block_shape),
            "modules_to_not_convert": sorted(plain.union(self.further)),
        } | ({"scale_fmt": "ue8m0"} if powers else {})

    @property
    def checkpoint(self) -> Checkpoint:
        """The checkpoint as its readers see it."""
        found = self.found
        stored = [x for group in found.written for x in group]
        dtypes = {name: x.dtype for name, x in found.tensors.items()}
        return Checkpoint(stored, found.fp8, self.config, dtypes)


def _plain_weights(found: Exported) -> Iterator[str]:
    """List the names of weights of linear layers and experts that are not stored in FP8.

    Weights that are computed from others, such as parametrized ones, are in no checkpoint.
    """
    fp8 = {id(found.tensors[name]) for name in found.fp8}
    for prefix, module in found.model.named_modules():
        keys = ("weight",) if isinstance(module, nn.Linear) else stacks_of(module)
        for key in keys:
            if id(getattr(module, key)) not in fp8:
                yield full_name(prefix, key)


def readable(described: Described) -> Described:
    """Store those weights in high precision that transformers would misread in FP8.

    Raises:
        ValueError: transformers would misread all FP8 weights, or tensors in high precision.
        RuntimeError: the functions of this version of transformers are not the known ones.

    Warns:
        UserWarning: for weights that are stored in high precision.
    """
    model, asked = described.found.model, frozenset(described.found.fp8)
    if not any(prefix == "" for prefix, _ in pretrained_models(model)):
        return described
    ways: dict[str, _Way] = {name: _Way.FP8 for name in asked}
    reasons: dict[str, str] = {}
    while wrong := _misread(described):
        found, modules = described.found, described.found.modules
        listed = frozenset(described.further)
        for name, why in wrong.items():
            of_module = {why.module} if why.module else set[str]()
            if why.module == module_of(name):
                of_module.add(modules[name])
            if name in found.fp8:
                reasons[name] = why.why
            elif not of_module <= listed:
                described = described._replace(further={*described.further, *of_module})
                continue  # transformers may read the next way
            ways[name] = _next_way(found, name, ways.get(name, _Way.PLAIN))
            if ways[name] is _Way.NONE:
                raise ValueError(
                    f"{name} of this {kind_of(model)} cannot be stored for transformers: "
                    f"{why.why}; all_in_fp8=True stores the model for other readers"
                )
            if ways[name] not in _IN_FP8:
                described = described._replace(further={*described.further, *of_module})
        fp8 = frozenset(name for name in asked if ways[name] in _IN_FP8)
        own = frozenset(name for name, way in ways.items() if way in _UNDER_OWN_NAMES)
        described = described._replace(found=found.with_fp8(fp8, own))
    reasons = {name: why for name, why in reasons.items() if name not in described.found.fp8}
    if reasons:
        _report(model, asked, reasons)
    return described


class _Way(enum.IntEnum):
    """The ways to store a tensor, in the order in which they are tried.

    In FP8 or in high precision, under the names of ``save_pretrained`` or its own.
    """

    FP8 = 0
    FP8_OWN_NAME = 1
    PLAIN = 2
    PLAIN_OWN_NAME = 3
    NONE = 4


_IN_FP8 = _Way.FP8, _Way.FP8_OWN_NAME
_UNDER_OWN_NAMES = _Way.FP8_OWN_NAME, _Way.PLAIN_OWN_NAME


def _next_way(found: Exported, name: str, way: _Way) -> _Way:
    """Return the next way to store a tensor that transformers would misread in this one."""
    following = _Way(way + 1)
    has_own_name = any(len(group) == 1 and group[0].name == name for group in found.groups)
    return _Way(following + 1) if following in _UNDER_OWN_NAMES and has_own_name else following


def _misread(described: Described) -> dict[str, Misread]:
    try:
        return misread(described.found.model, described.checkpoint)
    except Exception as error:
        raise RuntimeError(
            f"transformers could not be asked how it would read this "
            f"{kind_of(described.found.model)} ({type(error).__name__}: {error}): "
            f"all_in_fp8=True writes without asking it"
        ) from error


def _report(model: nn.Module, asked: Collection[str], reasons: Mapping[str, str]) -> None:
    """Warn of weights that are stored in high precision; raise if no weight is left in FP8."""
    groups: dict[str, list[str]] = {}
    for name, why in reasons.items():
        groups.setdefault(why, []).append(name)
    text = "; ".join(f"{why}: {some(names)}" for why, names in groups.items())
    remedy = (
        "all_in_fp8=True stores all in FP8, for load_fp8 and inference engines, and transformers "
        "then reads these without their scales"
    )
    if len(reasons) == len(asked):
        raise ValueError(
            f"no FP8 weight of this {kind_of(model)} can be stored so that transformers reads its "
            f"scales ({text}): model.save_pretrained stores it in high precision; {remedy}"
        )
    warnings.warn(
        f"{len(reasons)} of {len(asked)} FP8 weights are stored in high precision, because "
        f"transformers would not read their scales ({text}); {remedy}",
        stacklevel=4,
    )
