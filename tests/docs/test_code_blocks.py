"""Every page of README.md and docs/ is a program: its Python blocks run, literally, in order.

A block that cannot run here has ``<!-- not run: reason -->`` above it, and its page an entry in
``NOT_RUN``.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import MagicMock

import pytest
import torch
import torch.distributed as dist

from tests.docs.code_blocks import FENCE, ROOT, blocks_of, pages, run_blocks

PAGES = pages()
WITH_CODE = [name for name, blocks in PAGES.items() if any(b.language == "python" for b in blocks)]

NOT_RUN: dict[str, int] = {
    "docs/design/kernels.md": 1,
    "docs/guides/context_parallel.md": 1,
    "docs/guides/diffusion.md": 1,
    "docs/guides/migrating.md": 2,
    "docs/guides/rl.md": 1,
    "docs/guides/torch_compile.md": 1,
    "docs/guides/torchtitan.md": 1,
}
"""How many blocks of each page do not run."""

LANGUAGES = {"", "console", "python"}


TORCHRUN = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
"""Variables that torchrun sets in the only process of a run. Port 0: any free port."""


@pytest.fixture
def fresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """An empty folder, the environment of torchrun, and a TensorBoard that writes nothing."""
    monkeypatch.chdir(tmp_path)
    for name, value in TORCHRUN.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", MagicMock())
    torch.manual_seed(0)
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.mark.parametrize("page", WITH_CODE)
def test_the_blocks_of_a_page_run(page: str, fresh: None) -> None:
    run_blocks(PAGES[page], page)


def test_blocks_that_do_not_run_are_counted() -> None:
    found = {page: sum(b.not_run is not None for b in blocks) for page, blocks in PAGES.items()}
    assert {page: count for page, count in found.items() if count} == NOT_RUN


def test_notebooks_hold_what_their_cells_print() -> None:
    """The site shows a notebook as it was saved."""
    for path in (ROOT / "docs").rglob("*.ipynb"):
        cells = json.loads(path.read_text("utf-8"))["cells"]
        for cell in cells:
            if any(line.startswith("print(") for line in cell["source"]):
                assert cell["outputs"][0]["name"] == "stdout", cell["source"]


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
    with pytest.raises(AssertionError):  # y is not what the block above prints
        run_blocks(blocks, "page.md")
    assert run_blocks(blocks[:-1], "page.md")["y"] == 2


def test_an_output_below_a_block_is_compared() -> None:
    page = "```python\nprint(1)\nprint({})\n```\n\n```\n2\n```\n"
    run_blocks(blocks_of(page.format(2)), "page.md")
    with pytest.raises(AssertionError, match=r"page\.md"):
        run_blocks(blocks_of(page.format(3)), "page.md")
