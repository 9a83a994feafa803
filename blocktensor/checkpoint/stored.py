"""Decide which tensors a checkpoint holds, and of which parts of the model they consist."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from torch import Tensor, nn

from ..ops.formats import BLOCKS_128X128
from .names import NAMES_OF_STACKS, Names, module_of, possible_names
from .parts import Part, cover, entire, sizes_of
from .pretrained import pretrained_models, saved, skeleton
from .traced import TracedTensor, traced


class Stored(NamedTuple):
    """A tensor of a checkpoint.

    Attributes:
        name: its name in the checkpoint.
        shape: of the tensor.
        of: the names of the tensors of the model from which it is made.
        parts: the parts that it consists of; None if transformers computes it in
            ``save_pretrained``.
    """

    name: str
    shape: tuple[int, ...]
    of: tuple[str, ...]
    parts: tuple[Part, ...] | None

    @property
    def expert(self) -> int | None:
        """The number of the expert that it is a part of; None if it is not part of one expert."""
        if self.parts is None or len(self.parts) != 1:
            return None
        there = self.parts[0].there
        is_one = len(there) == 3 and len(self.shape) == 2 and there[0].stop - there[0].start == 1
        return there[0].start if is_one else None

    @property
    def module(self) -> str:
        """The name of its module in the checkpoint; for an expert, of the module of all experts."""
        words = self.name.split(".")
        places = [i for i, word in enumerate(words) if word == str(self.expert)]
        return ".".join(words[: places[-1]] if places else words[:-1])


Group = list[Stored]
"""The stored tensors that are computed from the same tensors of the model."""


def whole(name: str, shape: Sequence[int]) -> Stored:
    """Describe a tensor that is stored whole, under the model's name."""
    return Stored(name, tuple(shape), (name,), (entire(name, shape),))


def groups_of(model: nn.Module) -> list[Group]:
    """Return the tensors that ``save_pretrained`` writes; other tensors keep the model's names.

    If transformers' function fails or is missing, tensors of its models keep their names, too.
    """
    shapes = shapes_of(model)
    groups: list[Group] = []
    for prefix, inner in pretrained_models(model):
        groups += _joined([_prefixed(prefix, stored) for stored in _saved(inner)])
    known = {name for group in groups for stored in group for name in stored.of}
    return groups + [[whole(name, shape)] for name, shape in shapes.items() if name not in known]


def shapes_of(model: nn.Module) -> dict[str, tuple[int, ...]]:
    """Return the shapes of parameters and persistent buffers, by their names in ``state_dict``."""
    return {name: tuple(x.shape) for name, x in _tensors(model)}


def _tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for name, x in model.state_dict(keep_vars=True).items():
        if isinstance(x, Tensor):
            yield name, x


def _saved(model: nn.Module) -> Iterator[Stored]:
    twin = skeleton(model)
    tensors = {name: traced(name, x.shape, x.dtype) for name, x in _tensors(twin)}
    try:
        made = saved(twin, tensors)
    except Exception:
        return
    for name, x in made.items():
        if isinstance(x, TracedTensor):
            yield Stored(name, tuple(x.shape), tuple(sorted(x.origins)), x.parts)


def _prefixed(prefix: str, stored: Stored) -> Stored:
    parts = stored.parts and tuple(x._replace(name=prefix + x.name) for x in stored.parts)
    of = tuple(prefix + name for name in stored.of)
    return Stored(prefix + stored.name, stored.shape, of, parts)


def _joined(tensors: Iterable[Stored]) -> list[Group]:
    """Divide stored tensors into groups."""
    above: dict[str, str] = {}

    def top(name: str) -> str:
        while (higher := above.setdefault(name, name)) != name:
            name = higher
        return name

    listed = list(tensors)
    for stored in listed:
        for name in stored.of:
            above[top(name)] = top(stored.of[0])
    groups: dict[str, Group] = defaultdict(list)
    for stored in listed:
        groups[top(stored.of[0])].append(stored)
    return list(groups.values())


def stored_as(
    groups: Iterable[Group],
    shapes: Mapping[str, tuple[int, ...]],
    fp8: Collection[str],
    own: Collection[str] = (),
) -> list[Group]:
    """Choose between the tensors that ``save_pretrained`` writes and the model's own.

    A group keeps the model's own tensors if a block of an FP8 weight would be cut, or if
    transformers does not compute a tensor by joining and splitting alone. If one stack of experts
    of a module does so, all do.

    Args:
        groups: the result of :func:`groups_of`.
        shapes: the shapes of the model's tensors, by name.
        fp8: the names of the tensors to store in FP8.
        own: the names of the tensors that keep their names in any case.
    """
    chosen: list[Group] = []
    left: list[Group] = []
    for group in groups:
        members = members_of(group)
        fits = _fits(group, shapes, fp8) and not any(name in own for name in members)
        (chosen if fits else left).append(group)
    cut = {
        module_of(name) for group in left for name in members_of(group) if len(shapes[name]) == 3
    }
    for group in [x for x in chosen if _of_stacks(x, shapes, cut)]:
        chosen.remove(group)
        left.append(group)
    plain = [[whole(name, shapes[name])] for group in left for name in members_of(group)]
    return chosen + plain


def members_of(group: Group) -> list[str]:
    """Return the names of the model's tensors from which a group is computed."""
    return list(dict.fromkeys(name for stored in group for name in stored.of))


def _of_stacks(
    group: Group, shapes: Mapping[str, tuple[int, ...]], modules: Collection[str]
) -> bool:
    return any(len(shapes[x]) == 3 and module_of(x) in modules for x in members_of(group))


def _fits(group: Group, shapes: Mapping[str, tuple[int, ...]], fp8: Collection[str]) -> bool:
    """Return True if a group loses no values and cuts no block."""
    in_fp8 = any(name in fp8 for name in members_of(group))
    if any(stored.parts is None for stored in group):
        return not in_fp8
    parts = [(stored, part) for stored in group for part in stored.parts or ()]
    for name in members_of(group):
        there = [part.of(stored.name) for stored, part in parts if part.name == name]
        if not cover(there, shapes[name]):
            return False
    return not in_fp8 or all(
        part.name in fp8 and part.in_blocks(stored.shape) is not None for stored, part in parts
    )


def separated(model: nn.Module, groups: list[Group], fp8: Collection[str]) -> list[Group]:
    """Return groups in which every stack of experts is stored as matrices.

    Raises:
        ValueError: a stack has no separate names, or blocks that lie in two of its matrices.
    """
    known, separate = possible_names(model), []
    for group in groups:
        (stored, *others) = group
        if others or len(stored.shape) != 3 or stored.parts is None:
            separate.append(group)
            continue
        (name,) = stored.of
        ways = [
            found
            for way in known[name]
            if way.experts is not None
            if _fits(found := _as_matrices(way, name, stored.shape), {name: stored.shape}, fp8)
        ]
        if not ways and name in fp8:
            raise ValueError(
                f"{name} {list(stored.shape)} cannot be stored as matrices of single experts: "
                f"expected a stack [E, N, K] named {NAMES_OF_STACKS}, whose gate and up have a "
                f"multiple of {BLOCKS_128X128.rows} rows each; separate_experts=False writes such "
                f"a stack whole"
            )
        separate.append(ways[0] if ways else group)
    return separate


def _as_matrices(way: Names, name: str, shape: Sequence[int]) -> Group:
    return [
        Stored(part.name, sizes_of(part.there), (name,), (part.of(name),))
        for part in way.parts(shape)
    ]
