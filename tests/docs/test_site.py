"""The site builds without a warning, has every page and public name, and no dead link."""

from __future__ import annotations

import ast
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
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


def integrations() -> Iterator[str]:
    """The public names of integrations, which need other libraries to be imported."""
    for path in sorted((ROOT / "blocktensor/integrations").glob("*/__init__.py")):
        (names,) = re.findall(r"^__all__ = (\[.*?\])", path.read_text("utf-8"), re.M | re.S)
        for name in ast.literal_eval(names):
            yield f"blocktensor.integrations.{path.parent.name}.{name}"


PUBLIC = [
    *(f"blocktensor.{name}" for name in blocktensor.__all__ if name != "functional"),
    *(f"blocktensor.functional.{name}" for name in blocktensor.functional.__all__),
    *(f"blocktensor.distributed.{name}" for name in blocktensor.distributed.__all__),
    *integrations(),
]

# What users search for, and the page or section that answers.
ANSWERS = {
    "QLoRA": "faq.html#can-i-use-qlora-or-bitsandbytes",
    "A100": "faq.html#which-gpus-does-it-need",
    "OOM": "faq.html#it-runs-out-of-memory-oom-what-can-i-do",
    "ROCm": "faq.html#which-gpus-does-it-need",
    "B200": "faq.html#which-gpus-does-it-need",
    "GradScaler": "faq.html#do-i-need-a-gradscaler",
    "Docker": "faq.html#can-i-use-docker",
    "Liger": "faq.html#does-liger-work",
    "DeepSpeed": "faq.html#fsdp1-fsdp2-ddp-deepspeed",
    "slower than bf16": "faq.html#why-is-it-slower-than-bf16",
    "FSDP2": "guides/fsdp2.html",
    "LoRA": "guides/lora.html",
    "torch.compile": "guides/torch_compile.html",
    "CUDA graphs": "guides/torch_compile.html#cuda-graphs-without-torchcompile",
    "checkpoint": "guides/checkpoints.html",
    "MoE": "guides/moe.html",
    "gradient clipping": "faq.html#does-gradient-clipping-work",
    "8-bit optimizer": "faq.html#can-i-use-an-8-bit-optimizer",
    "vLLM": "faq.html#how-do-i-serve-the-model-with-vllm",
    "Windows": "faq.html#does-it-run-on-windows-or-macos",
}


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


@pytest.mark.skipif(shutil.which("node") is None, reason="the site's search is JavaScript")
def test_search_finds_the_answer_within_three_hits(site: Path) -> None:
    done = subprocess.run(
        ["node", str(Path(__file__).with_name("search.js")), str(site), *ANSWERS],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    found = json.loads(done.stdout)
    missed = {}
    for question, answer in ANSWERS.items():
        pages = found[question][:3]
        if not any(answer in sections[:3] for sections in pages):
            missed[question] = [sections[0] for sections in pages]
    assert missed == {}
