"""Show how far a long call is, with tqdm where it is installed."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist

VARIABLE = "BLOCKTENSOR_PROGRESS"
"""Environment variable: 1 shows bars in logs too, 0 shows none. Read in every call."""

SECONDS = 2.0
"""Calls that take less time show no bar, unless they are asked to."""

_WORDS: dict[str, bool | None] = {"": None, "0": False, "1": True}


def check_progress(progress: bool | None) -> None:
    """Raise if an argument ``progress``, or the environment variable, is none of its values.

    Raises:
        TypeError: it is neither a bool nor None.
        ValueError: the environment variable is set to anything but 0 and 1.

    Warns:
        UserWarning: a bar is asked for, and tqdm is not installed. The warning points to the caller
            of the function that calls this one.
    """
    if progress is not None and not isinstance(progress, bool):
        raise TypeError(f"progress={progress!r}: expected True, False or None (in terminals)")
    _by_variable()
    if progress and _tqdm() is None:
        warnings.warn(
            "progress=True shows nothing: tqdm is not installed (pip install tqdm)", stacklevel=3
        )


def _by_variable() -> bool | None:
    word = os.environ.get(VARIABLE, "")
    if word not in _WORDS:
        raise ValueError(f"{VARIABLE}={word!r}: expected 0, 1 or nothing")
    return _WORDS[word]


@contextmanager
def progress_bar(
    what: str, total: int, progress: bool | None, *, unit: str = "B"
) -> Iterator[Callable[[int], object]]:
    """Show a bar on stderr, on rank 0 alone; yield a function that adds to what is done.

    Args:
        what: the call, in front of the bar.
        total: all there is to do, in ``unit``.
        progress: True shows a bar, False none. By default ``BLOCKTENSOR_PROGRESS`` decides, and
            without it a bar appears if stderr is a terminal and the call takes two seconds.
        unit: ``"B"`` for bytes, or a noun.
    """
    is_shown = _by_variable() if progress is None else progress
    if is_shown is None:
        is_shown, delay = sys.stderr is not None and sys.stderr.isatty(), SECONDS
    else:
        delay = 0.0
    tqdm = _tqdm() if is_shown and _is_first_rank() else None
    if tqdm is None:
        yield lambda done: None
        return
    with tqdm(
        total=total,
        desc=what,
        unit=unit if unit == "B" else f" {unit}",
        unit_scale=unit == "B",
        unit_divisor=1024 if unit == "B" else 1000,
        delay=delay,
        dynamic_ncols=True,
        file=sys.stderr,
    ) as bar:
        yield bar.update


def _is_first_rank() -> bool:
    return not (dist.is_available() and dist.is_initialized()) or dist.get_rank() == 0


def _tqdm() -> Any:
    """Return tqdm's class, or None where it is not installed."""
    try:
        from tqdm import tqdm
    except ImportError:
        return None
    return tqdm
