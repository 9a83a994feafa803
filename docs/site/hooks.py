"""Pages of the site that are no Markdown in docs/: examples, notebooks, two files of the root.

Links in the Markdown files are paths of the repository, so that they work where it is browsed.
"""

from __future__ import annotations

import json
import posixpath
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[2]
LINK = re.compile(r"(?<=\]\()([^)\s#]+)(#[^)\s]*)?(?=\))")
# What search finds first: pages for users before scripts and pages for developers.
SEARCH_BOOST = {
    "guides": 2.0,
    "examples": 0.5,
    "design": 0.5,
    "experiments": 0.5,
    "changelog.md": 0.1,
}
ROLE = re.compile(r":(?:attr|class|data|exc|func|meth|mod):(?=<code>)")


def notebook(path: Path) -> str:
    """Return a notebook as Markdown: its texts, its code, and what the code printed."""
    parts = []
    for cell in json.loads(path.read_text("utf-8"))["cells"]:
        source = "".join(cell["source"])
        parts.append(source if cell["cell_type"] == "markdown" else f"```python\n{source}\n```")
        parts += [f"```\n{''.join(output['text'])}```" for output in cell.get("outputs", ())]
    return "\n\n".join(parts)


def outside() -> dict[str, tuple[str, str]]:
    """Return page and text of the files that are no Markdown in docs/, by their paths."""
    files = {
        "CONTRIBUTING.md": "contributing.md",
        "CHANGELOG.md": "changelog.md",
        "examples/README.md": "examples/index.md",
    }
    pages = {name: (page, (ROOT / name).read_text("utf-8")) for name, page in files.items()}
    for path in sorted((ROOT / "examples").glob("*.py")):
        name = f"examples/{path.name}"
        text = f"# {path.name}\n\n````python\n{path.read_text('utf-8')}````\n"
        pages[name] = (f"examples/{path.stem}.md", text)
    for path in (ROOT / "docs/notebooks").glob("*.ipynb"):
        pages[f"docs/notebooks/{path.name}"] = (f"notebooks/{path.stem}.md", notebook(path))
    return pages


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages of :func:`outside`."""
    for page, text in outside().values():
        files.append(File.generated(config, page, content=text))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Point links to files outside of docs/, and links in such files, to their pages.

    Also say how high search ranks the page.
    """
    at = page.file.src_uri
    page.meta["search"] = {"boost": SEARCH_BOOST.get(at.partition("/")[0], 1.0)}
    pages = {source: target for source, (target, _) in outside().items()}
    sources = {target: source for source, target in pages.items()}
    folder = posixpath.dirname(sources.get(at, f"docs/{at}"))

    def moved(link: re.Match[str]) -> str:
        target, anchor = link[1], link[2] or ""
        if ":" in target:
            return link[0]
        in_repository = posixpath.normpath(posixpath.join(folder, target))
        page = pages.get(in_repository) or in_repository.removeprefix("docs/")
        return posixpath.relpath(page, posixpath.dirname(at) or ".") + anchor

    return LINK.sub(moved, markdown)


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Docstrings mark names by roles of Sphinx, which Markdown shows as they are."""
    return ROLE.sub("", html)
