"""Every public function and class has an example in its docstring, which runs and prints this."""

from __future__ import annotations

import doctest
import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import blocktensor
from blocktensor import functional

GLOBALS = {"blocktensor": blocktensor, "nn": nn, "torch": torch}
"""What examples do not import."""


def public() -> Iterator[tuple[str, Any]]:
    """All public functions and classes, but errors."""
    for module in (blocktensor, functional):
        for name in module.__all__:
            found: Any = getattr(module, name)
            is_error = inspect.isclass(found) and issubclass(found, Exception)
            if not (inspect.ismodule(found) or is_error):
                yield f"{module.__name__}.{name}", found


PUBLIC = dict(public())


def examples_of(name: str) -> doctest.DocTest:
    (test,) = doctest.DocTestFinder(recurse=False).find(PUBLIC[name], name, globs=dict(GLOBALS))
    return test


@pytest.mark.parametrize("name", PUBLIC)
def test_examples_print_what_they_show(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    test, told = examples_of(name), list[str]()
    assert test.examples, f"{name} has no example (>>>) in its docstring"
    if any("transformers" in each.source for each in test.examples):
        pytest.importorskip("transformers")
    monkeypatch.chdir(tmp_path)
    doctest.DocTestRunner(verbose=False).run(test, out=told.append)
    assert told == []


def test_an_example_that_shows_something_else_is_found() -> None:
    test, told = examples_of("blocktensor.Recipe"), list[str]()
    test.examples[-1].want = "'fp32'\n"
    doctest.DocTestRunner(verbose=False).run(test, out=told.append)
    assert "Expected:\n    'fp32'\nGot:\n    'power_of_two'" in "".join(told)
