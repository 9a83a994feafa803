"""Golden texts of errors."""

from __future__ import annotations

from collections.abc import Callable
from textwrap import wrap

import pytest

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
