"""The names under which transformers' ``save_pretrained`` writes the tensors of a model.

transformers 5 stacks the experts of a model as it loads, and renames some modules. As it saves it
reverts both. Which models it does this to, and how, only its own function knows: it gets probes
here in place of tensors, and the names under which they come out are the answer.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

_PARTS = 2
"""Parts of an expert that a probe tells from each other: those of gate and up."""

_MARKS = 1 << 32
"""More than the parts of any stack."""


class Pieces(NamedTuple):
    """A stack that is stored as a matrix, or as several, for each expert.

    Attributes:
        templates: names with ``{}`` for the expert, one for each part of its rows, in order.
        experts: how many there are.
    """

    templates: tuple[str, ...]
    experts: int

    def names(self, expert: int) -> tuple[str, ...]:
        """The names of an expert's parts."""
        return tuple(template.format(expert) for template in self.templates)


def pretrained_names(model: nn.Module, stacks: set[str]) -> dict[str, str | Pieces]:
    """The names that ``save_pretrained`` would write, of the tensors for which it has others.

    Args:
        model: any module; models of transformers inside of it count, too.
        stacks: the names of the model's stacks of experts ``[E, N, K]``.
    """
    found: dict[str, str | Pieces] = {}
    for prefix, inner in _pretrained(model):
        names = {
            name.removeprefix(prefix): x
            for name, x in model.state_dict(keep_vars=True).items()
            if name.startswith(prefix) and isinstance(x, Tensor)
        }
        experts = {
            name: len(x) for name, x in names.items() if f"{prefix}{name}" in stacks and x.ndim == 3
        }
        for name, other in _reverted(inner, list(names), experts).items():
            if isinstance(other, str):
                found[prefix + name] = prefix + other
            else:
                templates = tuple(prefix + template for template in other.templates)
                found[prefix + name] = other._replace(templates=templates)
    return found


def _pretrained(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The outermost models of transformers in a module, each with the prefix of its names."""
    library = sys.modules.get("transformers.modeling_utils")
    if library is None:
        return
    inside: list[str] = []
    for name, module in model.named_modules():
        prefix = f"{name}." if name else ""
        if isinstance(module, library.PreTrainedModel) and not prefix.startswith(tuple(inside)):
            inside.append(prefix)
            yield prefix, module


def _reverted(
    model: nn.Module, names: list[str], experts: Mapping[str, int]
) -> dict[str, str | Pieces]:
    """The other names of tensors, by those in the model. ``experts``: of each stack."""
    revert = _revert()
    if revert is None:
        return {}
    # What a model was loaded from changes what its own save_pretrained reverts: the names of an FP8
    # checkpoint that it dequantized would be lost, and those of one model would not be another's.
    model = copy.copy(model)
    vars(model).pop("_weight_conversions", None)
    numbers = {name: number for number, name in enumerate(names)}
    probes = {name: _probe(number, experts.get(name)) for name, number in numbers.items()}
    try:
        made = revert(model, probes)
    except Exception:
        # An operation on other tensors, which asks for their shape: such models keep those names.
        try:
            made = revert(model, {name: probes[name] for name in experts})
        except Exception:
            return {}
    written: dict[int, dict[tuple[int, ...], str]] = {}
    for name, value in made.items():
        tensor = value[0] if isinstance(value, (list, tuple)) else value
        marks: list[int] = tensor.reshape(-1).tolist()
        numbered = {mark // _MARKS for mark in marks}
        if len(numbered) == 1:
            labels = tuple(mark % _MARKS for mark in marks)
            written.setdefault(numbered.pop(), {})[labels] = name
    found: dict[str, str | Pieces] = {}
    for name, number in numbers.items():
        others = written.get(number, {})
        whole = tuple(range(experts.get(name, 0) * _PARTS)) or (0,)
        pieces = _pieces(others, experts[name]) if name in experts else None
        if others.get(whole) == name:
            continue
        if pieces is not None:
            found[name] = pieces
        elif list(others) == [whole]:
            found[name] = others[whole]
    if any(other in numbers for other in found.values() if isinstance(other, str)):
        # One tensor's name in a file is another's in the model: a file would have two readings.
        return {name: other for name, other in found.items() if isinstance(other, Pieces)}
    return found


def _revert() -> Callable[..., dict[str, Any]] | None:
    """The function that reverts names; None before version 5, which stacks no experts."""
    try:
        from transformers.core_model_loading import revert_weight_conversion
    except ImportError:
        return None
    function: Callable[..., dict[str, Any]] = revert_weight_conversion
    return function


def _probe(number: int, experts: int | None) -> Tensor:
    """Integers that say which tensor they are of, and of a stack which expert and part."""
    if experts is None:
        return torch.tensor([number * _MARKS])
    return number * _MARKS + torch.arange(experts * _PARTS).view(experts, _PARTS, 1)


def _pieces(others: Mapping[tuple[int, ...], str], experts: int) -> Pieces | None:
    """The pieces that a probe of a stack came out in; None if they are not those of experts."""
    for parts in (1, _PARTS):
        size = _PARTS // parts
        templates = []
        for part in range(parts):
            starts = [expert * _PARTS + part * size for expert in range(experts)]
            labels = [tuple(range(start, start + size)) for start in starts]
            templates.append(_template([others.get(label) for label in labels]))
        if len(others) == experts * parts and all(templates):
            return Pieces(tuple(x for x in templates if x is not None), experts)
    return None


def _template(names: list[str | None]) -> str | None:
    """The name of which ``names`` are those of experts 0, 1, …, with ``{}`` for the number."""
    words = (names[0] or "").split(".")
    for place in reversed(range(len(words))):
        template = ".".join((*words[:place], "{}", *words[place + 1 :]))
        if words[place] == "0" and names == [template.format(e) for e in range(len(names))]:
            return template
    return None
