"""Every Python block of README.md and docs/ runs, page by page, in the order of the page.

A block that cannot run here has ``<!-- not run: reason -->`` above it, and its page an entry in
``NOT_RUN``.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from blocktensor import MinSizes
from tests.docs.code_blocks import FENCE, ROOT, blocks_of, pages, run_blocks
from tests.docs.setups import SETUPS, common

PAGES = pages()
WITH_CODE = [name for name, blocks in PAGES.items() if any(b.language == "python" for b in blocks)]

NOT_RUN: dict[str, int] = {
    "docs/guides/context_parallel.md": 1,
    "docs/guides/expert_parallel.md": 2,
    "docs/guides/migrating.md": 2,
    "docs/guides/pipeline.md": 1,
    "docs/guides/rl.md": 1,
    "docs/guides/monitor.md": 2,
    "docs/guides/torchtitan.md": 1,
}
"""How many blocks of each page do not run."""

LANGUAGES = {"", "console", "python"}


@pytest.mark.parametrize("page", WITH_CODE)
def test_the_blocks_of_a_page_run(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, group: None
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(MinSizes, "measured", MinSizes)  # their models are small on average
    run_blocks(PAGES[page], page, SETUPS.get(page, common)())


def test_blocks_that_do_not_run_are_counted() -> None:
    found = {page: sum(b.not_run is not None for b in blocks) for page, blocks in PAGES.items()}
    assert {page: count for page, count in found.items() if count} == NOT_RUN
    assert set(SETUPS) <= set(WITH_CODE)


def test_python_is_marked_as_python() -> None:
    """A block in another language, or in none, is not run; nor is one that is indented."""
    for page, blocks in PAGES.items():
        assert "```" not in FENCE.sub("", (ROOT / page).read_text("utf-8")), page
        for block in blocks:
            assert block.language in LANGUAGES, f"{page}:{block.line}"
            if not block.language:
                python = re.search(r"^(import|from) |blocktensor\.\w+\(", block.code, re.MULTILINE)
                assert not python, f"{page}:{block.line}"


# The reader itself, on made-up pages

PAGE = """\
# Page

```python
x = 1
```

Text.

<!-- not run: needs two GPUs -->
```python
x = 1 / 0
```

```python
assert x == 1
y = x + 1
```

```
y
```
"""


def test_blocks_are_read_and_share_a_namespace() -> None:
    blocks = blocks_of(PAGE)
    assert [(b.language, b.code, b.line, b.not_run) for b in blocks] == [
        ("python", "x = 1\n", 4, None),
        ("python", "x = 1 / 0\n", 11, "needs two GPUs"),
        ("python", "assert x == 1\ny = x + 1\n", 15, None),
        ("", "y\n", 20, None),
    ]
    namespace: dict[str, object] = {}
    run_blocks(blocks, "page.md", namespace)
    assert namespace["y"] == 2
