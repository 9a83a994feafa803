"""Random histories of what is done to a model: converted, fused, shared, patched, hooked, copied.

A plain mirror gets the same changes, but is neither converted nor fused, and shares nothing. A
fresh conversion of a copy of it is what the model has to equal bit for bit: output, gradients,
``state_dict``, which weights are FP8. ``BLOCKTENSOR_HISTORIES=500`` runs more of them.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from blocktensor import BlockwiseFP8Tensor, BlockwiseFP8Weight
from tests.support.model_history import History, converted, copied, expected, weights
from tests.support.numeric import relative_error

HISTORIES = int(os.environ.get("BLOCKTENSOR_HISTORIES", "24"))
REFUSALS = (NotImplementedError, ValueError, TypeError, UserWarning)
EVENTS: dict[Callable[[History], Any], float] = {
    History.convert: 4, History.fuse: 5, History.unfuse: 1, History.share: 2, History.unshare: 1,
    History.freeze: 1, History.unfreeze: 1, History.change: 12, History.unhook: 1,
    History.class_forward: 0.3, History.requires_grad: 1, History.set_values: 2,
    History.exchange: 1, History.exchange_modules: 0.5, History.load: 2, History.duplicate: 1.5,
    History.step: 2, History.look: 1,
}  # fmt: skip
BETWEEN = History.say, History.share, History.unshare, History.look, History.fuse, History.unfuse
"""Events that may come between a forward and its backward."""


def differing(got: dict[str, Tensor], want: dict[str, Tensor]) -> list[str]:
    """The names of the results that differ."""
    found = [f"{name} alone" for name in got.keys() ^ want.keys()]
    for name in got.keys() & want.keys():
        a, b = (x[name].nan_to_num(7) for x in (got, want))
        if a.dtype != b.dtype or not torch.equal(a, b):
            found.append(f"{name}: {relative_error(a.float(), b.float()):.3g}")
    return found


def differing_run(history: History) -> list[str]:
    """Return what differs in a forward and a backward with an event between the two."""
    want = history.results(converted(copied(history.mirror)))
    # checkpoints compare what is saved
    event = history.draw.choice(BETWEEN[:4] if history.checkpointed else BETWEEN)

    def between() -> None:
        history.log.append(f"between: {event.__name__}")
        with suppress(*REFUSALS):
            event(history)

    return differing(history.results(history.model, between), want)


def differing_weights(history: History) -> list[str]:
    """The weights that are not FP8, or plain, or frozen, as they should be."""
    mirrored: dict[str, Any] = {
        name: module._parameters[key] for name, module, key in weights(history.mirror)
    }
    found = []
    for name, module, key in weights(history.model):
        weight: Any = module._parameters[key]
        wanted = expected(mirrored[name])
        kind: type[Tensor] = nn.Parameter
        if wanted:
            kind = BlockwiseFP8Tensor if wanted.frozen else BlockwiseFP8Weight
        held = type(weight), getattr(weight, "recipe", None)
        if held != (kind, wanted and wanted.recipe):
            found.append(f"{name} is a {type(weight).__name__}: expected {kind.__name__}, {wanted}")
        if weight.requires_grad != mirrored[name].requires_grad:
            found.append(f"{name} has requires_grad={weight.requires_grad}")
    return found


def differing_state(history: History, fresh: nn.Module) -> list[str]:
    """The entries of the ``state_dict`` that differ, and modules of another class or mode."""
    state, other = history.model.state_dict(), fresh.state_dict()
    found = [f"{name} alone in a state_dict" for name in state.keys() ^ other.keys()]
    for name in state.keys() & other.keys():
        pair = state[name], other[name]
        a, b = (x.dequantize() if isinstance(x, BlockwiseFP8Tensor) else x for x in pair)
        if type(pair[0]) is not type(pair[1]) or not torch.equal(a, b):
            found.append(f"{name} in the state_dict")
    modules = zip(history.model.named_modules(), history.mirror.modules(), strict=True)
    for (name, module), mirrored in modules:
        kinds = type(module).__name__, type(mirrored).__name__
        if module.training != mirrored.training or kinds[0] != kinds[1]:
            found.append(f"{name} is a {kinds[0]}, training={module.training}")
    return found


def differing_now(history: History) -> list[str]:
    """Return what differs from a fresh conversion of the mirror."""
    fresh = converted(copied(history.mirror))
    want, found = history.results(fresh), list[str]()
    for _ in range(2):  # the first run tells which linears share inputs
        found += found or differing(history.results(history.model), want)
    return found + differing_weights(history) + differing_state(history, fresh)


def found_in(history: History) -> list[str]:
    """Return what differs in a run, after an event that was refused, or at the end."""
    kinds: dict[Callable[[History], Any], float] = {**EVENTS, differing_run: 6}
    drawn = history.draw.choices(list(kinds), list(kinds.values()), k=history.draw.randint(2, 14))
    first = (History.convert, History.fuse) if history.seed % 3 else (History.convert,)
    for event in (*first, *drawn):
        history.log.append(event.__name__)
        try:
            found = event(history)
        except REFUSALS as error:
            history.log[-1] += f": {error!r}"
            found = differing_now(history)
        if found:
            return found
    return differing_now(history)


def differences(seed: int) -> list[str]:
    """Return what differs in one history, after the log of its events."""
    history = History(seed)
    try:
        with history.patches:
            found = found_in(history)
    except Exception as error:
        raise AssertionError("\n".join(history.log)) from error
    return found and [*history.log, *sorted(found)]


# Of a module that is given its input by name, and of one whose output is no tensor
@pytest.mark.filterwarnings("ignore:Full backward hook is firing:UserWarning")
@pytest.mark.filterwarnings("ignore:For backward hooks to be called:UserWarning")
@pytest.mark.parametrize("part", range(4))
def test_model_histories(part: int) -> None:
    wrong = [found for seed in range(part, HISTORIES, 4) if (found := differences(seed))]
    assert wrong == []
