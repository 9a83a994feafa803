"""The names of a model's tensors in checkpoints: stacks of experts have several.

transformers 5 stacks the experts of a model as it loads, and renames some modules. As it saves it
reverts both. Which models it does this to, and how, only its own function knows: it gets probes
here in place of tensors, and the names under which they come out are the answer.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Container, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..model.weights import is_transposed
from ..ops.formats import BLOCKS_128X128
from ..sharding.dtensor import fp8_part

_GATE, _UP, _DOWN = ("gate_proj", "w1"), ("up_proj", "w3"), ("down_proj", "w2")
"""Names of an expert's matrices: those of DeepSeek and Qwen first, then Mixtral's."""

_MATRICES: dict[str, tuple[tuple[str, ...], ...]] = {
    "gate_up_proj": tuple(zip(_GATE, _UP, strict=True)),
    "gate_proj": tuple((name,) for name in _GATE),
    "up_proj": tuple((name,) for name in _UP),
    "down_proj": tuple((name,) for name in _DOWN),
    **dict.fromkeys(("w1", "w1_EFD"), tuple((name,) for name in reversed(_GATE))),
    **dict.fromkeys(("w2", "w2_EDF"), tuple((name,) for name in reversed(_DOWN))),
    **dict.fromkeys(("w3", "w3_EFD"), tuple((name,) for name in reversed(_UP))),
}
"""The matrices of an expert by the names of stacks, those of transformers and of torchtitan."""


class Names(NamedTuple):
    """The name of a tensor in a checkpoint, or the names of the matrices a stack is stored in.

    Attributes:
        templates: the name; of matrices, names with ``{}`` for the expert, one for each part of its
            rows, in order.
        experts: how many experts are stored one by one; None for a tensor that is stored whole.
    """

    templates: tuple[str, ...]
    experts: int | None = None

    @property
    def all(self) -> list[str]:
        """All names, those of an expert after each other."""
        if self.experts is None:
            return list(self.templates)
        return [name for expert in range(self.experts) for name in self.of_expert(expert)]

    def of_expert(self, expert: int) -> tuple[str, ...]:
        """Return the names of an expert's parts."""
        return tuple(template.format(expert) for template in self.templates)

    @property
    def module(self) -> str:
        """The name of the module in the checkpoint; of experts, the module of all."""
        first = self.templates[0]
        if self.experts is None:
            return first.rpartition(".")[0]
        return first.partition("{}")[0].rstrip(".")

    def split(self, x: Tensor) -> bool:
        """Return whether ``x`` can be stored so: no block of an FP8 weight lies in two matrices."""
        parts = len(self.templates)
        return fp8_part(x) is None or aligned(x.shape[1] // parts, parts)


def whole(name: str) -> Names:
    """Return the names of a tensor that is stored whole."""
    return Names((name,))


def aligned(rows: int, parts: int) -> bool:
    """Return whether the blocks of ``parts`` matrices, below each other, are those of all."""
    return parts == 1 or rows % BLOCKS_128X128.rows == 0


def possible_names(model: nn.Module) -> dict[str, list[Names]]:
    """Return all names under which each tensor of a model may be found, by its own name.

    The first are those of transformers' ``save_pretrained`` if the model is one of transformers,
    else the model's own. Nobody stores a stack ``[E, K, N]`` as matrices of experts.
    """
    stacks = _stacks(model)
    pretrained = pretrained_names(model, stacks)
    found: dict[str, list[Names]] = {}
    for name in model.state_dict(keep_vars=True):
        ways = [whole(name)]
        if name in pretrained:
            first = pretrained[name]
            ways.insert(0, first)
            if first.experts is not None:
                ways.append(whole(f"{first.module}.{name.rpartition('.')[2]}"))
        if name in stacks:
            ways += _matrices(name, stacks[name])
        found[name] = list(dict.fromkeys(ways))
    return found


def names_to_write(
    tensors: Mapping[str, Tensor], known: Mapping[str, list[Names]], separate_experts: bool
) -> dict[str, Names]:
    """Choose the names to write, by those in the model, of tied tensors too.

    Args:
        tensors: what is written, by name.
        known: of :func:`possible_names`.
        separate_experts: store every stack as matrices of single experts.

    Raises:
        ValueError: a stack has no separate names, or blocks that lie in two of its matrices.
    """
    chosen = {name: ways[0] for name, ways in known.items()}
    unsplit = set()  # all stacks of a module alike: where one stays whole its others do, too
    for name, x in tensors.items():
        separate = [way for way in known[name] if way.experts is not None and way.split(x)]
        if separate_experts and separate:
            chosen[name] = separate[0]
        elif separate_experts and fp8_part(x) is not None and x.ndim == 3:
            raise ValueError(
                f"{name} {list(x.shape)} cannot be stored as matrices of single experts: expected "
                f"a stack [E, N, K] named {', '.join(_MATRICES)}, whose gate and up have a "
                f"multiple of {BLOCKS_128X128.rows} rows each; separate_experts=False writes such "
                f"a stack whole"
            )
        if chosen[name].experts is not None and not chosen[name].split(x):
            unsplit.add(name.rpartition(".")[0])
    for name, way in chosen.items():
        if way.experts is not None and name.rpartition(".")[0] in unsplit:
            chosen[name] = whole(name)
    return chosen


def _stacks(model: nn.Module) -> dict[str, Tensor]:
    """Find the parameters that may be stacks of experts ``[E, N, K]``, by name."""
    return {
        f"{prefix}.{key}" if prefix else key: x
        for prefix, module in model.named_modules(remove_duplicate=False)
        for key, x in module._parameters.items()
        if key in _MATRICES and x is not None and x.ndim == 3 and len(x) > 0
        if not is_transposed(module, key)
    }


def _matrices(name: str, stack: Tensor) -> Iterator[Names]:
    prefix, _, key = name.rpartition(".")
    for parts in _MATRICES[key]:
        if stack.shape[1] % len(parts) == 0:
            templates = (f"{prefix}.{{}}.{part}.weight".lstrip(".") for part in parts)
            yield Names(tuple(templates), len(stack))


def module_names(known: Mapping[str, Names], names: Iterable[str]) -> set[str]:
    """Return the modules of tensors as a checkpoint names them.

    A tensor that is computed from others, as a parametrized weight is, is not ``known``.
    """
    return {known.get(name, whole(name)).module for name in names}


# The names of transformers

_PARTS = 2
"""Parts of an expert that a probe tells from each other: those of gate and up."""

_MARKS = 1 << 32
"""More than the parts of any stack."""


def pretrained_names(model: nn.Module, stacks: Container[str]) -> dict[str, Names]:
    """Return the names that ``save_pretrained`` writes, of the tensors for which it has others.

    Args:
        model: any module; models of transformers inside of it count, too.
        stacks: the names of the model's stacks of experts ``[E, N, K]``.
    """
    found = {}
    for prefix, inner in _pretrained(model):
        state = inner.state_dict(keep_vars=True)
        experts = {name: len(x) for name, x in state.items() if prefix + name in stacks}
        for name, other in _reverted(inner, list(state), experts).items():
            templates = tuple(prefix + template for template in other.templates)
            found[prefix + name] = other._replace(templates=templates)
    return found


def _pretrained(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Find the outermost models of transformers in a module, each with the prefix of its names."""
    library = sys.modules.get("transformers.modeling_utils")
    if library is None:
        return
    inside: list[str] = []
    for name, module in model.named_modules():
        prefix = f"{name}." if name else ""
        if isinstance(module, library.PreTrainedModel) and not prefix.startswith(tuple(inside)):
            inside.append(prefix)
            yield prefix, module


def _reverted(model: nn.Module, names: list[str], experts: Mapping[str, int]) -> dict[str, Names]:
    """Return the other names of tensors, by those in the model. ``experts``: of each stack."""
    probes = {name: _probe(number, experts.get(name)) for number, name in enumerate(names)}
    # An operation on other tensors may fail, which asks for their shape: such models keep those
    # names.
    made = _revert(model, probes) or _revert(model, {name: probes[name] for name in experts})
    written: dict[str, dict[tuple[int, ...], str]] = {name: {} for name in names}
    for other, value in made.items():
        tensor = value[0] if isinstance(value, (list, tuple)) else value
        marks: list[int] = tensor.reshape(-1).tolist()
        if len(numbers := {mark // _MARKS for mark in marks}) == 1:
            name = names[numbers.pop()]
            written[name][tuple(mark % _MARKS for mark in marks)] = other
    found = {}
    for name, others in written.items():
        entire = tuple(range(experts.get(name, 0) * _PARTS)) or (0,)
        separate = _separate(others, experts[name]) if name in experts else None
        if others.get(entire) != name and (separate or list(others) == [entire]):
            found[name] = separate or whole(others[entire])
    if any(other.experts is None and other.templates[0] in probes for other in found.values()):
        # One tensor's name in a file is another's in the model: a file would have two readings.
        return {name: other for name, other in found.items() if other.experts is not None}
    return found


def _revert(model: nn.Module, probes: Mapping[str, Tensor]) -> dict[str, Any]:
    """Rename and split tensors as ``save_pretrained`` does; nothing if it cannot.

    transformers before version 5 stacks no experts.
    """
    # What a model was loaded from changes what its own save_pretrained reverts: the names of an FP8
    # checkpoint that it dequantized would be lost, and those of one model would not be another's.
    # Not copy.copy: fully_shard and replicate give a root a class whose copies run its constructor.
    renamed = object.__new__(type(model))
    vars(renamed).update(vars(model))
    vars(renamed).pop("_weight_conversions", None)
    try:
        library = importlib.import_module("transformers.core_model_loading")
        made: dict[str, Any] = library.revert_weight_conversion(renamed, dict(probes))
    except Exception:
        return {}
    return made


def _probe(number: int, experts: int | None) -> Tensor:
    """Make integers that say which tensor they are of, and of a stack which expert and part."""
    if experts is None:
        return torch.tensor([number * _MARKS])
    return number * _MARKS + torch.arange(experts * _PARTS).view(experts, _PARTS, 1)


def _separate(others: Mapping[tuple[int, ...], str], experts: int) -> Names | None:
    """Return the names in which a probe of a stack came out; None if not those of experts."""
    for size in (_PARTS, _PARTS // 2):
        templates = []
        for first in range(0, _PARTS, size):
            starts = range(first, experts * _PARTS, _PARTS)
            found = [others.get(tuple(range(start, start + size))) for start in starts]
            templates.append(_template(found))
        if len(others) == experts * len(templates) and None not in templates:
            return Names(tuple(filter(None, templates)), experts)
    return None


def _template(names: list[str | None]) -> str | None:
    """Return the name of which ``names`` are those of experts 0, 1, …, with ``{}`` for these."""
    words = (names[0] or "").split(".")
    for place in reversed(range(len(words))):
        template = ".".join((*words[:place], "{}", *words[place + 1 :]))
        if words[place] == "0" and names == [template.format(e) for e in range(len(names))]:
            return template
    return None
