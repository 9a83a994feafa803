"""``BLOCKTENSOR_CHECK_RECORDINGS=1``: also run every recorded call op by op, and compare bytes.

It checks that recordings are valid for the calls that repeat them. Each repeated call first runs
its function with Triton's ordinary launches, then the recording, on the same arguments, and
compares all results and all arguments. New memory is filled with the same values in both. A plan of
a linear layer is compared with a new plan. Training takes several times as long.

Nothing is compared while a CUDA graph is captured.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from .launch import watch_launches

VARIABLE = "BLOCKTENSOR_CHECK_RECORDINGS"

ENABLED = os.environ.get(VARIABLE, "0") not in ("", "0")
"""Set by the environment variable when blocktensor is imported."""

compared = {"recordings": 0, "plans": 0}
"""The numbers of repeated calls and of plans compared so far, by all threads."""


def checked(function: Callable[..., Any], player: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``player``, which repeats a recording of ``function``, with a check in every call.

    The returned function raises RuntimeError where a call gives other bytes than ``function``.
    """

    def play(*args: Any) -> Any:
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            return player(*args)
        given = _tensors(args)
        before = [x.detach().clone() for x in given]
        with torch.no_grad(), _disable_current_modes(), _filled_memory():
            with watch_launches():  # the ops of the function must not repeat recordings either
                want = function(*args)
            written = [x.detach().clone() for x in given]
            for x, y in zip(given, before, strict=True):
                if not _same_bytes(x, y):
                    x.copy_(y)
            got = player(*args)
        _compare(function, args, _tensors((got,)), _tensors((want,)), "result")
        _compare(function, args, given, written, "argument")
        compared["recordings"] += 1
        return got

    return play


def check_plan(found: Any, anew: Any) -> None:
    """Check that a remembered plan equals a new plan for the same call.

    Raises:
        RuntimeError: they differ.
    """
    compared["plans"] += 1
    of_found, of_anew = _facts(found), _facts(anew)
    names = [name for name in of_found if of_found[name] != of_anew[name]]
    if names:
        differences = [f"{name}: {of_found[name]}, anew {of_anew[name]}" for name in names]
        raise RuntimeError(_report("a plan that is repeated", "; ".join(differences)))


def _facts(plan: Any) -> dict[str, Any]:
    """Return the attributes of a plan by name, and the attributes of the plans that it holds."""
    if not isinstance(plan, tuple):
        return vars(plan)
    made: dict[str, Any] = {}
    for name, x in plan._asdict().items():  # type: ignore[attr-defined]
        inner = vars(x) if hasattr(x, "__dict__") else None  # a plan, or a format
        made |= {name: x} if inner is None else {f"{name}.{k}": v for k, v in inner.items()}
    return made


@contextmanager
def _filled_memory() -> Iterator[None]:
    """Fill all new memory, as torch's deterministic mode does."""
    was = torch.are_deterministic_algorithms_enabled()
    torch._C._set_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch._C._set_deterministic_algorithms(was)


def _compare(
    function: Callable[..., Any], args: Any, got: list[Tensor], want: list[Tensor], what: str
) -> None:
    layouts = [_layout(x) for x in got], [_layout(x) for x in want]
    differ = f"{len(got)} and {len(want)}" if len(got) != len(want) else ""
    for i, (x, y) in enumerate(zip(got, want, strict=False)):
        if layouts[0][i] != layouts[1][i] and what == "result":
            differ = f"{what} {i}: {layouts[0][i]} and {layouts[1][i]}"
        elif not _same_bytes(x, y):
            bytes_of_x, bytes_of_y = _bytes(x), _bytes(y)
            number = int((bytes_of_x != bytes_of_y).sum())
            differ = f"{what} {i}, {layouts[0][i]}: {number} of {len(bytes_of_x)} bytes"
        if differ:
            given = ", ".join(_layout(x) for x in _tensors(args))
            name = f"{function.__module__}.{function.__qualname__}"
            raise RuntimeError(
                _report(f"a recorded call of {name}", f"{differ}; arguments {given}")
            )


def _report(what: str, differences: str) -> str:
    return (
        f"{what} differs from a plain one in {differences}. This is a fault of blocktensor: please "
        f"report this message with what `python -m blocktensor` prints"
    )


def _layout(x: Tensor) -> str:
    dtype = str(x.dtype).removeprefix("torch.")
    return f"{dtype} {list(x.shape)} strides {list(x.stride())} address % 16 = {x.data_ptr() & 15}"


def _tensors(values: Any) -> list[Tensor]:
    if isinstance(values, Tensor):
        return [values]
    if isinstance(values, (tuple, list)):
        return [x for value in values for x in _tensors(value)]
    return []


def _bytes(x: Tensor) -> Tensor:
    flat = x.detach().clone(memory_format=torch.contiguous_format).reshape(-1)
    return flat.view(torch.uint8)


def _same_bytes(x: Tensor, y: Tensor) -> bool:
    return x.shape == y.shape and torch.equal(_bytes(x), _bytes(y))
