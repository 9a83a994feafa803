"""The code blocks of Markdown pages and notebooks, and which of them do not run."""

from __future__ import annotations

import contextlib
import io
import json
import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FENCE = re.compile(r"^```(?P<language>\w*)[^\n]*\n(?P<code>.*?)^```$", re.MULTILINE | re.DOTALL)
NOT_RUN = re.compile(r"<!-- not run: (?P<reason>[^>]+?) -->\n+\Z")


@dataclass(frozen=True)
class Block:
    """A fenced block: what stands behind the opening fence, its lines, the number of the first.

    ``not_run``: the reason in the comment ``<!-- not run: reason -->`` above it, or None.
    """

    language: str
    code: str
    line: int
    not_run: str | None = None


def blocks_of(text: str) -> list[Block]:
    """All fenced blocks of a page, in order."""
    blocks = []
    for found in FENCE.finditer(text):
        marker = NOT_RUN.search(text, 0, found.start())
        line = text.count("\n", 0, found.start("code")) + 1
        reason = marker["reason"] if marker else None
        blocks.append(Block(found["language"], found["code"], line, reason))
    return blocks


def cells_of(text: str) -> list[Block]:
    """The code cells of a notebook, in order."""
    cells = [cell for cell in json.loads(text)["cells"] if cell["cell_type"] == "code"]
    return [Block("python", "".join(cell["source"]), 1) for cell in cells]


def pages(root: Path = ROOT) -> dict[str, list[Block]]:
    """The blocks of README.md, CONTRIBUTING.md and all pages and notebooks of docs/, by path."""
    files = [root / "README.md", root / "CONTRIBUTING.md", *sorted((root / "docs").rglob("*.md"))]
    found = {str(path.relative_to(root)): blocks_of(path.read_text("utf-8")) for path in files}
    for path in (root / "docs").rglob("*.ipynb"):
        found[str(path.relative_to(root))] = cells_of(path.read_text("utf-8"))
    return found


def output_below(block: Block, others: list[Block]) -> str | None:
    """The text of the block without a language that follows with nothing between but an empty line.

    Such a block shows what the block above it prints, up to its own last line.
    """
    first = block.line + block.code.count("\n") + 3
    texts = [each.code for each in others if not each.language and each.line == first]
    return texts[0] if texts else None


def run_blocks(blocks: list[Block], page: str) -> dict[str, object]:
    """Run the Python blocks of a page as one program. Tracebacks name the page's lines.

    What a block prints must hold the output that the page shows below it.
    """
    namespace: dict[str, object] = {"__name__": "__main__"}
    for block in blocks:
        if block.language == "python" and block.not_run is None:
            printed = io.StringIO()
            with contextlib.redirect_stdout(printed):
                exec(compile("\n" * (block.line - 1) + block.code, page, "exec"), namespace)
            shown = output_below(block, blocks)
            assert shown is None or shown in printed.getvalue(), (page, block.line)
    return namespace
