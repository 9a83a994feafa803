"""The table of patches, and what each is for."""

from __future__ import annotations

import re
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from blocktensor import BlockwiseFP8Weight, convert, patches
from blocktensor.patches import PATCHES, Patch

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "design" / "patches.md"


def documented() -> str:
    """The table of the page."""
    head = ("name", "changes", "why: the library …", "needed with", "applied at", "without it")
    rows = [
        (
            f"`{each.name}`",
            f"`{each.target.replace(':', '.')}` ({each.kind})",
            each.reason,
            each.versions,
            each.when,
            ("raises: " if each.is_required else "") + each.without,
        )
        for each in PATCHES
    ]
    lines = [" | ".join(row) for row in (head, ["---"] * len(head), *rows)]
    return "\n".join(f"| {line} |" for line in lines)


def test_the_page_has_the_table() -> None:
    """Copy what the failure prints."""
    assert documented() in PAGE.read_text("utf-8"), f"{PAGE} needs this table:\n\n{documented()}"


@pytest.mark.parametrize("each", PATCHES, ids=lambda each: each.name)
def test_every_patch_is_made_in_one_place_and_has_a_test(each: Patch) -> None:
    files = [x for x in (ROOT / "blocktensor").rglob("*.py") if x.name != "patches.py"]
    sources = [path.read_text("utf-8") for path in files]
    (variable,) = [name for name, value in vars(patches).items() if value is each]
    assert sum(len(re.findall(rf"{variable}\.(made_by|around)\b", x)) for x in sources) == 1
    used = rf"\b{variable}\.(apply|during|give_class)\("
    assert each.when.startswith("the first FP8 tensor") == each.for_fp8
    assert each.for_fp8 or any(re.search(used, source) for source in sources)
    file, _, name = each.test.partition("::")
    assert not name or f"def {name}(" in (ROOT / file).read_text("utf-8")
    assert (ROOT / file).is_file()
    assert len({other.name for other in PATCHES}) == len(PATCHES)


@pytest.mark.parametrize("each", PATCHES, ids=lambda each: each.name)
def test_the_target_exists(each: Patch) -> None:
    """Where the library is installed; of torch in every version, but for what it lacks."""
    module, _, path = each.target.partition(":")
    if module.partition(".")[0] == "torchtitan" and torch.__version__ < (2, 13):
        pytest.skip("torchtitan 0.3 needs torch 2.13")
    owner: Any = pytest.importorskip(module)
    for name in path.split("."):
        if each is not patches.SET_TIMEOUT:
            owner = getattr(owner, name)


def test_facts_are_those_of_the_table() -> None:
    facts = patches.facts()
    assert [each["name"] for each in facts] == [each.name for each in PATCHES]
    assert {each["state"] for each in facts} <= {"applied", "not applied"}
    assert str(patches.table()).count("\n") == len(PATCHES) + 1


# What a patch is for


@pytest.mark.parametrize("is_patched", [True, False])
def test_a_weight_that_is_assigned_brings_its_hooks(is_patched: bool) -> None:
    source, other = nn.Linear(64, 64), nn.Linear(64, 64)
    convert(source, skip_small=False)
    hooks = nn.modules.module._global_parameter_registration_hooks
    with nullcontext() if is_patched else mock.patch.dict(hooks, clear=True):
        other.weight = source.weight
        other.load_state_dict(nn.Linear(64, 64).state_dict(), assign=True)
    assert isinstance(other.weight, BlockwiseFP8Weight) == is_patched


def test_threads_make_the_first_tensor_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patches, "is_pending", True)
    ready = threading.Barrier(4)

    def make(_: int) -> bool:
        ready.wait(30)
        convert(nn.Linear(8, 8), skip_small=False)
        return patches.SWAP_TENSORS.is_applied

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(make, range(4)))
    assert not hasattr(torch.utils.swap_tensors.__wrapped__, "__wrapped__")  # type: ignore[attr-defined]
