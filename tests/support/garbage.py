"""Python's garbage collector in processes that run tests: it runs seldom, and visits less."""

from __future__ import annotations

import gc


def collect_seldom() -> None:
    """Exempt all objects so far, such as torch's modules, which live as long as the process.

    With Python's defaults, the collector takes a tenth of the tests' time to walk them again and
    again. Tests that need a collection call ``gc.collect()``.
    """
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)
