"""How the tensors of a model are named in checkpoints: stacks of experts have several ways."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from torch import Tensor, nn

from ..model.experts import is_transposed_stack
from ..ops.formats import BLOCKS_128X128
from ..tensor.base import FP8Base
from .pretrained_names import Pieces, pretrained_names

Spelling = str | Pieces
"""The name of a tensor in a checkpoint, or the names of the matrices that a stack is stored in."""

EXPERT_NAMES = ("auto", "separate", "fused")

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
"""The matrices of an expert by the names of stacks: that of transformers and of torchtitan."""


def spellings(model: nn.Module) -> dict[str, list[Spelling]]:
    """All names under which each tensor of a model may be found, by its own name.

    The first are those of transformers' ``save_pretrained`` if the model is one of transformers,
    else the model's own. Of a stack ``[E, K, N]`` nobody has matrices of experts.
    """
    stacks = _stacks(model)
    pretrained = pretrained_names(model, set(stacks))
    found: dict[str, list[Spelling]] = {}
    for name in model.state_dict(keep_vars=True):
        ways: list[Spelling] = [name]
        first = pretrained.get(name)
        if first is not None:
            ways.insert(0, first)
        if isinstance(first, Pieces):
            ways.append(f"{_home(first)}.{name.rpartition('.')[2]}")
        if name in stacks:
            ways += _matrices(name, stacks[name])
        found[name] = list(dict.fromkeys(ways))
    return found


def chosen(
    tensors: Mapping[str, Tensor], known: Mapping[str, list[Spelling]], expert_names: str
) -> dict[str, Spelling]:
    """The names to write, by those in the model, of tied tensors too.

    Args:
        tensors: what is written, by name.
        known: of :func:`spellings`.
        expert_names: one of ``EXPERT_NAMES``.

    Raises:
        ValueError: a stack has no separate names, or blocks that lie in two of its matrices.
    """
    if expert_names == "fused":
        return {name: name for name in known}
    first = {name: ways[0] for name, ways in known.items()}
    for name, x in tensors.items():
        pieces = [way for way in known[name] if isinstance(way, Pieces)]
        if expert_names == "separate" and (pieces or _is_stack(x)):
            _check_separable(name, x, pieces)
            first[name] = pieces[0]
    # All stacks of a module alike: where one stays whole its others do, too.
    whole = {
        name.rpartition(".")[0]
        for name, x in tensors.items()
        if isinstance(way := first[name], Pieces) and not splits(x, way)
    }
    for name, way in first.items():
        if isinstance(way, Pieces) and name.rpartition(".")[0] in whole:
            first[name] = name
    return first


def _is_stack(x: Tensor) -> bool:
    return isinstance(x, FP8Base) and x.ndim == 3


def _check_separable(name: str, x: Tensor, pieces: list[Pieces]) -> None:
    remedy = "expert_names='auto' writes such a stack whole"
    if not pieces:
        raise ValueError(
            f"{name} {list(x.shape)} has no names for single experts: expected a stack [E, N, K] "
            f"named {', '.join(_MATRICES)}; {remedy}"
        )
    if not splits(x, pieces[0]):
        rows = x.shape[1] // len(pieces[0].templates)
        raise ValueError(
            f"{name} {list(x.shape)} cannot be split in FP8: the matrices of an expert have {rows} "
            f"rows, no multiple of {BLOCKS_128X128.rows}, and share blocks; {remedy}"
        )


def splits(x: Tensor, pieces: Pieces) -> bool:
    """Whether a stack can be split: no block of an FP8 weight lies in two matrices."""
    parts = len(pieces.templates)
    return not isinstance(x, FP8Base) or aligned(x.shape[1] // parts, parts)


def aligned(rows: int, parts: int) -> bool:
    """Whether the blocks of ``parts`` matrices, one below the other, are those of all together."""
    return parts == 1 or rows % BLOCKS_128X128.rows == 0


def _stacks(model: nn.Module) -> dict[str, Tensor]:
    """The parameters that may be stacks of experts ``[E, N, K]``, by name."""
    return {
        f"{prefix}.{key}" if prefix else key: x
        for prefix, module in model.named_modules(remove_duplicate=False)
        for key, x in module._parameters.items()
        if key in _MATRICES and x is not None and x.ndim == 3 and len(x) > 0
        if not is_transposed_stack(module, key)
    }


def _matrices(name: str, stack: Tensor) -> Iterator[Pieces]:
    prefix, _, key = name.rpartition(".")
    for parts in _MATRICES[key]:
        if stack.shape[1] % len(parts) == 0:
            templates = (f"{prefix}.{{}}.{part}.weight".lstrip(".") for part in parts)
            yield Pieces(tuple(templates), len(stack))


def transformers_stacks(pieces: Pieces) -> Iterator[tuple[str, int, int]]:
    """The stacks in which transformers has the matrix, if it is one an expert, of ``pieces``.

    Yields the name of the stack, which part of its rows the matrix is, and of how many.
    """
    if len(pieces.templates) > 1:
        return
    home, _, matrix = pieces.templates[0].partition("{}.")
    for key in ("gate_up_proj", "up_proj", "down_proj"):
        for parts in _MATRICES[key]:
            names = [f"{part}.weight" for part in parts]
            if matrix in names:
                yield home + key, names.index(matrix), len(names)


def module_names(known: Mapping[str, Spelling], names: Iterable[str]) -> set[str]:
    """The modules of tensors as a checkpoint names them; of experts, the module of all.

    A tensor that is computed from others, as a parametrized weight is, is not ``known``.
    """
    ways = (known.get(name, name) for name in names)
    return {_home(way) if isinstance(way, Pieces) else way.rpartition(".")[0] for way in ways}


def _home(pieces: Pieces) -> str:
    """The name of the module of all experts, as a checkpoint has it."""
    return pieces.templates[0].partition("{}")[0].rstrip(".")
