"""docs/one_call.md says what a linear does, and a reader visits few files to follow it."""

from __future__ import annotations

import re
from itertools import groupby
from pathlib import Path

import pytest

from tests.support.call_path import CallPath, linear_paths

DOCUMENT = Path(__file__).parents[1] / "docs" / "one_call.md"
LINE = re.compile(r"^\d+\. `([^`]+)` `([^`]+)`:", re.MULTILINE)


@pytest.fixture(scope="module")
def paths() -> dict[str, CallPath]:
    forward, backward = linear_paths()
    return {"Forward": forward, "Backward": backward}


@pytest.mark.parametrize("section", ["Forward", "Backward"])
def test_the_document_has_every_change_of_file(paths: dict[str, CallPath], section: str) -> None:
    text = DOCUMENT.read_text().partition(f"\n## {section}\n")[2].partition("\n## ")[0]
    entered = [next(calls) for _, calls in groupby(paths[section].calls, key=lambda c: c[0])]
    assert LINE.findall(text) == entered


@pytest.mark.parametrize("section", ["Forward", "Backward"])
def test_the_path_is_short(paths: dict[str, CallPath], section: str) -> None:
    assert len(paths[section].files) <= 9
    assert paths[section].switches <= 14


def test_the_document_names_files_and_functions_that_exist() -> None:
    package = DOCUMENT.parents[1] / "blocktensor"
    text = DOCUMENT.read_text()
    for file in set(re.findall(r"`([\w/]+\.py)`", text)):
        assert (package / file).exists() or (package.parent / file).exists(), file
    sources = "".join(path.read_text() for path in package.rglob("*.py"))
    for name in set(re.findall(r"`(_?[a-z]+_[a-z_]+)`", text)):
        assert re.search(rf"\b{name}\b", sources), name
