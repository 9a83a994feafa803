"""Phrases that CONTRIBUTING.md forbids stand nowhere in the package, the examples and the pages."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.docs.code_blocks import ROOT

PHRASES = ("that of", "those of", "beside")
"""The forbidden phrases that have no other use."""

PATTERN = re.compile(rf"\b({'|'.join(PHRASES)})\b".replace(" ", r"[\s#*/]+"), re.IGNORECASE)
FILES = [
    path
    for folder in ("blocktensor", "examples", "docs")
    for path in sorted((ROOT / folder).rglob("*"))
    if path.suffix in (".py", ".cpp", ".md", ".ipynb")
]


def forbidden(path: Path) -> list[str]:
    """The places of the phrases in a file. A phrase may go over the end of a line."""
    text = path.read_text("utf-8")
    return [
        f"{path.name}:{text[: each.start()].count(chr(10)) + 1}: {each.group()}"
        for each in PATTERN.finditer(text)
    ]


@pytest.mark.parametrize("folder", ["blocktensor", "examples", "docs"])
def test_no_file_has_a_forbidden_phrase(folder: str) -> None:
    files = [path for path in FILES if path.relative_to(ROOT).parts[0] == folder]
    assert len(files) > 10
    assert [place for path in files for place in forbidden(path)] == []


def test_a_forbidden_phrase_is_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("The thought of it.\nAs wide as that\n# of x, Beside\nit; besides.\n")
    assert forbidden(page) == ["page.md:2: that\n# of", "page.md:3: Beside"]
