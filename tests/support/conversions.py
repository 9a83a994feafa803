"""Conversions that are refused and change nothing."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import nn

from blocktensor import convert
from tests.support.models import LINEARS, complaint

LAST = LINEARS[-1]
everything = partial(convert, skip_small=False)


def refused(
    model: nn.Module,
    kind: type[Exception],
    run: Callable[[nn.Module], Any] | None = None,
    **options: Any,
) -> str:
    """The complaint of ``run``, which leaves the model as it was; without it, of ``convert``.

    A dry run of ``convert`` has the same complaint.
    """

    def state() -> list[Any]:
        hooks = [len(m._state_dict_hooks) for m in model.modules()]
        parameters = [(n, id(p), type(p), p.requires_grad) for n, p in model.named_parameters()]
        return [hooks, parameters, [getattr(p, "recipe", None) for p in model.parameters()]]

    before = state()
    runs = [run or partial(everything, dry_run=dry, **options) for dry in (False, True)]
    text, again = (complaint(kind, lambda run=run: run(model)) for run in runs)
    assert text == again
    assert state() == before
    return " ".join(text.split())
