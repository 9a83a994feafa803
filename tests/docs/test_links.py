"""Markdown files: links lead to files and headings, README is short, the index has real speeds.

The site's own links are tested in ``test_site.py``.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.docs.code_blocks import FENCE, ROOT

LINK = re.compile(r"\]\(([^)\s#]*)(?:#([^)\s]*))?\)")
ROW = re.compile(r"^\| (\d+) x \((\d+) x (\d+)\) \| ([\d.]+)x \| ([\d.]+)x \|$", re.MULTILINE)
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])


def anchors_of(text: str) -> set[str]:
    """The anchors that GitHub gives the headings of a page."""
    headings = re.findall(r"^#+ (.*)$", FENCE.sub("", text), re.MULTILINE)
    return {
        re.sub(r"[^\w\- ]", "", heading).strip().lower().replace(" ", "-") for heading in headings
    }


def dead_links(page: Path) -> list[str]:
    """Links of a page, relative ones, whose file or heading does not exist."""
    dead = []
    for target, anchor in LINK.findall(FENCE.sub("", page.read_text("utf-8"))):
        if ":" in target:
            continue
        path = page.parent / target if target else page
        if not path.exists() or (anchor and anchor not in anchors_of(path.read_text("utf-8"))):
            dead.append(f"{target}#{anchor}" if anchor else target)
    return dead


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    assert dead_links(page) == []


def test_dead_links_are_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# A `b` c\n[x](#a-b-c) [y](#d) [z](other.md) [w](page.md#no) [v](https://a)\n")
    assert dead_links(page) == ["#d", "other.md", "page.md#no"]


def test_the_index_leads_to_every_page() -> None:
    docs = ROOT / "docs"
    linked = {target for target, _ in LINK.findall((docs / "index.md").read_text("utf-8"))}
    linked |= {f"results/{path.name}" for path in (docs / "results").iterdir()}  # from results.md
    pages = {str(path.relative_to(docs)) for path in docs.rglob("*.md")} - {"index.md"}
    assert pages - linked == set()


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text("utf-8").splitlines()) <= 120


def test_the_speeds_of_the_index_are_measured() -> None:
    speeds = ("eager_speedup", "graph_speedup")
    rows = json.loads((ROOT / "benchmarks/results/linear.json").read_text("utf-8"))["rows"]
    measured = {
        (*(str(row[size]) for size in "mnk"), *(f"{row[how]:.2f}" for how in speeds))
        for row in rows
    }
    shown = ROW.findall((ROOT / "docs/index.md").read_text("utf-8"))
    assert len(shown) == 4
    assert set(shown) <= measured
