"""Find out what ``from_pretrained`` would load into a transformers model."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from ..model.weights import kind_of
from ..patches import PROGRESS_BAR
from .contents import Entry
from .on_disk import CheckpointError
from .parts import Box, Part, all_of
from .pretrained import Loaded, Rules, has_rules, loaded, rules_of, skeleton
from .traced import TracedTensor, traced

_INTEGERS = {
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


class PretrainedReader:
    """Tells which stored tensors become which tensors of a model.

    All names of the model's tensors begin with its prefix in the model that it is a part of.

    Attributes:
        parts: by the name of a tensor of the model, the parts of stored tensors that it consists
            of.
        computed: the names of the stored tensors from which any other tensor is computed.
        failed: by the name of a tensor of the model, why it cannot be computed from stored ones.
        mismatched: by the name of a tensor of the model, a description of the stored tensors of
            another shape that would become it.
    """

    def __init__(
        self,
        prefix: str,
        model: nn.Module,
        entries: Mapping[str, Entry],
        rules: Rules | None = None,
    ) -> None:
        """Ask transformers which stored tensors it would load.

        Args:
            prefix, model: a model of transformers, and the prefix of its names.
            entries: the stored tensors, without scales, by name.
            rules: the rules to load by; default: the rules that transformers has for the model.

        Raises:
            CheckpointError: a function of transformers fails.
        """
        self._prefix, self._model, self._rules = prefix, model, rules
        self._entries = {
            name.removeprefix(prefix): entry
            for name, entry in entries.items()
            if name.startswith(prefix) and not name.endswith("._extra_state")
        }
        result = self._asked()
        self.parts: dict[str, tuple[Part, ...]] = {}
        self.computed: dict[str, frozenset[str]] = {}
        for name, x in result.tensors.items():
            if not isinstance(x, TracedTensor):
                continue
            if x.parts is None:
                self.computed[prefix + name] = frozenset(prefix + each for each in x.origins)
            else:
                renamed = (part._replace(name=prefix + part.name) for part in x.parts)
                self.parts[prefix + name] = tuple(renamed)
        self.failed = {prefix + name: why for name, why in result.errors.items()}
        self.mismatched = {
            prefix + name: f"a tensor {list(shape)} would be loaded"
            for name, shape in result.mismatched.items()
        }

    @property
    def names(self) -> dict[str, frozenset[str]]:
        """The names of the stored tensors from which each tensor of the model is computed."""
        joined = {
            name: frozenset(part.name for part in parts) for name, parts in self.parts.items()
        }
        return joined | self.computed

    @property
    def stored(self) -> list[str]:
        """The names of the stored tensors."""
        return [self._prefix + name for name in self._entries]

    def compute(self, read: Callable[[Entry, Box], Tensor]) -> dict[str, Tensor]:
        """Return the values of all tensors in :attr:`computed`; ``read`` reads stored ones."""
        needed = {name for names in self.computed.values() for name in names}
        stored = [name.removeprefix(self._prefix) for name in needed]
        entries = {name: self._entries[name] for name in stored}
        made = self._loaded({name: read(x, all_of(x.shape)) for name, x in entries.items()})
        return {name: made.tensors[name.removeprefix(self._prefix)] for name in self.computed}

    def _asked(self) -> Loaded:
        """Return what transformers would load; nothing if it has no rules, so that names decide."""
        if not has_rules():
            return Loaded({}, {}, {})
        try:
            return self._loaded({})
        except Exception as error:
            raise CheckpointError(
                f"transformers could not be asked what it would load into this "
                f"{kind_of(self._model)} ({type(error).__name__}: {error}): expected "
                f"{PROGRESS_BAR.versions}, whose functions blocktensor knows, and a class whose "
                f"own methods run on meta tensors"
            ) from error

    @torch.inference_mode(False)  # transformers fails on tensors made there
    def _loaded(self, values: Mapping[str, Tensor]) -> Loaded:
        """Load stored tensors into a skeleton: ``values``, or traced ones where there are none."""
        stored = {
            name: traced(name, entry.shape, _INTEGERS.get(entry.dtype, torch.bfloat16))
            for name, entry in self._entries.items()
            if name not in values
        }
        twin = skeleton(self._model)
        rules = rules_of(twin) if self._rules is None else self._rules
        return loaded(twin, {**stored, **values}, rules)
