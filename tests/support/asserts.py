"""Checks that tests of several folders make: audits, golden texts of errors, waits for a GPU."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from textwrap import wrap
from typing import Any

import pytest
import torch
from torch import nn

from blocktensor import audit
from blocktensor.reports import AuditReport


def assert_no_marked_product(model: nn.Module, *args: Any, **kwargs: Any) -> AuditReport:
    """Every product that should be FP8 is, in a forward and a backward; some product is FP8."""
    report = audit(model, *args, **kwargs)
    assert report.marked == (), f"\n{report}"
    assert report.fp8_share > 0, f"\n{report}"
    return report


Call = Callable[[], object]


def refused(*calls: Call) -> str:
    """The errors of calls, each made twice: a refusal is not remembered as a decision."""
    lines = []
    for call in calls:
        texts = set()
        for _ in range(2):
            with pytest.raises((TypeError, ValueError, NotImplementedError)) as error:
                call()
            texts.add(f"{error.type.__name__}: {error.value}")
        (text,) = texts
        lines += wrap(text, 96, subsequent_indent="  ")
    return "\n".join(lines)


@contextlib.contextmanager
def no_synchronization() -> Iterator[None]:
    """Raises where the host waits for the GPU."""
    torch.cuda.synchronize()
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Synchronization debug mode")
            torch.cuda.set_sync_debug_mode("error")
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")
