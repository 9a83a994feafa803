"""The site builds without a warning, has every page and public name, and no dead link."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from functools import cache
from pathlib import Path
from urllib.parse import unquote

import pytest

import blocktensor
from tests.docs.code_blocks import ROOT

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("mkdocs") is None,
    reason="mkdocs is not installed; the extras docs and test have it",
)

PUBLIC = [
    *(f"blocktensor.{name}" for name in blocktensor.__all__ if name != "functional"),
    *(f"blocktensor.functional.{name}" for name in blocktensor.functional.__all__),
    *(f"blocktensor.distributed.{name}" for name in blocktensor.distributed.__all__),
]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, built as ``make docs`` does; a warning is an error."""
    folder = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return folder


def test_every_page_is_in_the_navigation(site: Path) -> None:
    navigation = (site / "index.html").read_text("utf-8").partition("<article")[0]
    linked = set(re.findall(r'href="([\w/]+)\.html"', navigation)) | {"index"}
    docs = ROOT / "docs"
    assert {str(p.relative_to(docs).with_suffix("")) for p in docs.rglob("*.md")} - linked == set()


def test_every_public_name_is_in_the_reference(site: Path) -> None:
    reference = "".join(page.read_text("utf-8") for page in (site / "api").glob("*.html"))
    missing = [name for name in PUBLIC if f'id="{name}"' not in reference]
    assert missing == [], "each needs a line `::: name` on a page of docs/api/"
    assert not re.search(r":(func|class|meth|attr|data|mod):", reference)


@cache
def _anchors(page: Path) -> set[str]:
    return set(re.findall(r'\bid="([^"]+)"', page.read_text("utf-8")))


def test_no_link_is_dead(site: Path) -> None:
    dead = []
    for page in set(site.rglob("*.html")) - {site / "404.html"}:  # whose links are absolute
        for link in re.findall(r'\b(?:href|src)="([^"]*)"', page.read_text("utf-8")):
            target, _, anchor = unquote(link).partition("#")
            path = page.parent / target if target else page
            if ":" in target or (path.is_dir() and not anchor):
                continue
            if not path.is_file() or (anchor and anchor not in _anchors(path.resolve())):
                dead.append(f"{page.relative_to(site)}: {link}")
    assert dead == []


def test_the_site_loads_nothing_from_other_hosts(site: Path) -> None:
    for page in site.rglob("*.html"):
        loaded = re.findall(
            r'<(?:script|img|link)\b[^>]*(?:src|href)="(https?:[^"]*)"', page.read_text("utf-8")
        )
        assert loaded == [], page
