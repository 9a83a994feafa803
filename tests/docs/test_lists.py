"""Lists on pages name all that the code has: registered ops, formats, variables, options."""

from __future__ import annotations

import ast
import dataclasses
import re

import pytest

from blocktensor.__main__ import VARIABLES
from blocktensor.ops.formats import CAST_FORMATS, KERNEL_FORMATS
from blocktensor.ops.op import OPS
from tests.docs.code_blocks import ROOT
from tests.docs.test_names_in_pages import spans
from tests.test_architecture import RANKS


def named_on(page: str) -> set[str]:
    """The names in backticks of a page, without arguments and values."""
    text = (ROOT / "docs" / page).read_text("utf-8")
    return {span.partition("=")[0] for span in spans(text)}


def test_the_architecture_names_all_registered_ops() -> None:
    ops = {name for name in OPS if not name.startswith("tried_")}
    assert ops - named_on("design/architecture.md") == set()


def test_the_architecture_names_all_formats() -> None:
    formats = {each.name for each in (*KERNEL_FORMATS, *CAST_FORMATS)}
    assert formats - named_on("design/architecture.md") == set()


def test_the_architecture_names_all_variables() -> None:
    variables = {name for name in VARIABLES if name.startswith("BLOCKTENSOR_")}
    assert variables - named_on("design/architecture.md") == set()


def test_a_folder_that_lists_its_files_lists_all() -> None:
    folders = [path.parent for path in sorted((ROOT / "blocktensor").rglob("README.md"))]
    assert folders
    for folder in folders:
        listed = set(spans((folder / "README.md").read_text("utf-8")))
        files = {path.name for path in folder.glob("*.py")} - {"__init__.py"}
        assert files - listed == set(), folder


def short(rank: str) -> str:
    """The name that the page gives a room."""
    names = {"blocktensor": "__init__", "blocktensor.ops": "the files of ops/ itself"}
    inside = rank.removeprefix("blocktensor.").removeprefix("ops.").replace(".", "/")
    return names.get(rank, inside)


def test_the_architecture_has_the_ranks_of_imports() -> None:
    """In order: the package with ``ops`` as one room, then the rooms of ``ops``."""
    in_ops = [rank for rank in RANKS if rank.startswith("blocktensor.ops")]
    above = RANKS[: RANKS.index(in_ops[0])]
    below = RANKS[RANKS.index(in_ops[-1]) + 1 :]
    wanted = [*map(short, above), "ops", *map(short, below), *map(short, in_ops)]
    text = (ROOT / "docs/design/architecture.md").read_text("utf-8")
    lines = re.findall(r"^    (?:> )?(\w.*)$", text, re.MULTILINE)
    found = [name.removesuffix(".py") for line in lines for name in line.split(" > ")]
    assert found == wanted


def test_the_guide_to_transformers_names_all_options() -> None:
    pytest.importorskip("transformers")
    from blocktensor.integrations.transformers import BlockwiseFP8Config

    options = {each.name for each in dataclasses.fields(BlockwiseFP8Config)}
    assert options - {"quant_method"} - named_on("guides/transformers.md") == set()


def messages() -> list[str]:
    """All texts of the package, with ``{}`` for values."""
    found = []
    for path in sorted((ROOT / "blocktensor").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.JoinedStr):
                parts = (x.value if isinstance(x, ast.Constant) else "{}" for x in node.values)
                found.append("".join(map(str, parts)))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
    return found


def test_the_messages_of_the_faq_exist() -> None:
    """The beginnings of their parts between dots; a value such as ``torch.bfloat16`` may differ."""
    page = (ROOT / "docs/faq.md").read_text("utf-8")
    rows = page.partition("## Errors and warnings")[2].splitlines()
    quoted = [text for row in rows for text in re.findall(r'"([^"]+)"', row.split(" | ")[0])]
    assert len(quoted) > 10
    texts = messages()
    for text in quoted:
        parts = [part.strip() for part in re.sub(r"torch\.\w+", "{}", text).split("...")]
        for part in filter(None, parts):
            assert any(part[:24] in known for known in texts), text
