"""Find the names of a model's tensors in checkpoints, of which stacks of experts have several."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from torch import Tensor, nn

from ..model.weights import full_name, is_transposed
from .parts import Part, all_of, entire

_GATE, _UP, _DOWN = ("gate_proj", "w1"), ("up_proj", "w3"), ("down_proj", "w2")
"""Names of an expert's matrices in checkpoints of DeepSeek and Qwen, then in Mixtral's."""

_MATRICES: dict[str, tuple[tuple[str, ...], ...]] = {
    "gate_up_proj": tuple(zip(_GATE, _UP, strict=True)),
    "gate_proj": tuple((name,) for name in _GATE),
    "up_proj": tuple((name,) for name in _UP),
    "down_proj": tuple((name,) for name in _DOWN),
    **dict.fromkeys(("w1", "w1_EFD"), tuple((name,) for name in reversed(_GATE))),
    **dict.fromkeys(("w2", "w2_EDF"), tuple((name,) for name in reversed(_DOWN))),
    **dict.fromkeys(("w3", "w3_EFD"), tuple((name,) for name in reversed(_UP))),
}
"""The names of an expert's matrices, by the name of the stack in transformers or torchtitan."""

NAMES_OF_STACKS = ", ".join(_MATRICES)


class Names(NamedTuple):
    """The name of a stored tensor, or the names of the matrices that a stack is stored as.

    Attributes:
        templates: the name; or, for matrices of experts, a name with ``{}`` for the number of the
            expert for each part of its rows, in order.
        experts: how many experts are stored one by one; None for a tensor that is stored whole.
    """

    templates: tuple[str, ...]
    experts: int | None = None

    @property
    def all(self) -> list[str]:
        """All names, expert by expert."""
        if self.experts is None:
            return list(self.templates)
        return [name for expert in range(self.experts) for name in self.of_expert(expert)]

    def of_expert(self, expert: int) -> tuple[str, ...]:
        """Return the names of the matrices of one expert."""
        return tuple(template.format(expert) for template in self.templates)

    def parts(self, shape: Sequence[int]) -> list[Part]:
        """Return where the stored tensors of these names lie in a tensor of ``shape``."""
        if self.experts is None:
            return [entire(self.templates[0], shape)]
        _, rows, cols = shape
        each = rows // len(self.templates)
        return [
            Part(
                name,
                all_of((each, cols)),
                (slice(expert, expert + 1), slice(first, first + each), slice(0, cols)),
                (None, 0, 1),
            )
            for expert in range(self.experts)
            for name, first in zip(self.of_expert(expert), range(0, rows, each), strict=True)
        ]


def module_of(name: str) -> str:
    """Return the name of the module of a tensor."""
    return name.rpartition(".")[0]


def possible_names(model: nn.Module) -> dict[str, list[Names]]:
    """Return all names that each tensor of a model may have in a checkpoint.

    The model's own name is the first. No library stores a stack ``[E, K, N]`` as matrices of
    experts.
    """
    stacks = _stacks(model)
    return {
        name: [Names((name,)), *(_matrices(name, stacks[name]) if name in stacks else ())]
        for name in model.state_dict(keep_vars=True)
    }


def _stacks(model: nn.Module) -> dict[str, Tensor]:
    """Find the parameters that may be stacks of experts ``[E, N, K]``, by name."""
    return {
        full_name(prefix, key): x
        for prefix, module in model.named_modules(remove_duplicate=False)
        for key, x in module._parameters.items()
        if key in _MATRICES and x is not None and x.ndim == 3 and len(x) > 0
        if not is_transposed(module, key)
    }


def _matrices(name: str, stack: Tensor) -> Iterator[Names]:
    prefix, _, key = name.rpartition(".")
    for parts in _MATRICES[key]:
        if stack.shape[1] % len(parts) == 0:
            templates = (full_name(prefix, f"{{}}.{part}.weight") for part in parts)
            yield Names(tuple(templates), len(stack))
