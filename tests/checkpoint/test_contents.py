"""Files that are malformed or disagree: an error, before any data is read."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("safetensors")

import os
import random

import pytest
from safetensors.torch import load_file, save_file

from blocktensor import CheckpointError, load_fp8
from blocktensor.checkpoint.on_disk import read_json, require_safetensors
from blocktensor.ops.checks import bad_scale
from blocktensor.ops.formats import BLOCKS_128X128, BLOCKS_128X128_POW2
from tests.support.checkpoint_models import (
    INDEX,
    OLD,
    SINGLE,
    TARGETS,
    assert_refused,
    assert_same,
    bits,
    edit_json,
    folder,
    seed_in,
    state,
)

__all__ = ["folder"]

FIRST, SECOND = "model-00001-of-00003.safetensors", "model-00002-of-00003.safetensors"

NO_STRINGS, NO_FILE = "is no object of strings", f"is no file, but {INDEX} names it"
PLACES: list[tuple[dict[str, Any], str]] = [
    ({"up.weight": [SECOND]}, f"weight_map {NO_STRINGS}"),
    ({"a": "../secret"}, "'../secret' is no file of its folder"),
    *(({"a": name}, NO_FILE) for name in ("\0", "\ud800", "x" * 5000)),
    ({"a": ".."}, "'..' is no file"),
    ({"more": "gone.safetensors"}, f"'gone.safetensors' {NO_FILE}"),
    ({"more": INDEX}, f"{INDEX}: truncated or corrupted"),
    ({"more": FIRST}, f"{FIRST}: tensor 'more' is missing"),
    ({"up.bias": FIRST}, f"{SECOND}: has tensor 'up.bias': {INDEX} says that it is in {FIRST}"),
]
"""Files of tensors in the index."""

INDEXES: list[tuple[Callable[[dict[str, Any]], object], str]] = [
    *((lambda i, new=new: i["weight_map"].update(new), message) for new, message in PLACES),
    (lambda i: i.pop("weight_map"), f"weight_map {NO_STRINGS}"),
    (lambda i: i.update(weight_map=3), f"weight_map {NO_STRINGS}"),
    (
        lambda i: i["weight_map"].pop("up.bias"),
        f"{SECOND}: has tensor 'up.bias': {INDEX} does not name it",
    ),
    (lambda i: i.update(weight_map=dict.fromkeys(i["weight_map"], FIRST)), "is missing"),
]


@pytest.mark.parametrize(("change", "message"), INDEXES, ids=range(len(INDEXES)))
def test_an_index_that_does_not_fit(
    folder: Path, change: Callable[[dict[str, Any]], object], message: str
) -> None:
    edit_json(folder / INDEX, change)
    assert_refused(folder, TARGETS["plain"](), message)


@pytest.mark.parametrize("metadata", [None, [], "x", {}, {"total_size": -1}])
def test_the_rest_of_an_index_does_not_matter(folder: Path, metadata: object) -> None:
    edit_json(folder / INDEX, lambda index: index.update(metadata=metadata))
    assert seed_in(folder) == OLD


def test_a_tensor_in_two_files_is_refused(folder: Path) -> None:
    tensors = load_file(folder / FIRST)
    bias = torch.zeros(200, dtype=torch.bfloat16)
    save_file(tensors | {"up.bias": bias}, folder / FIRST, metadata={"format": "pt"})
    for place in (FIRST, SECOND):
        edit_json(folder / INDEX, lambda i, place=place: i["weight_map"].update({"up.bias": place}))
        assert_refused(folder, TARGETS["plain"](), r"has tensor 'up.bias': .* says that it is in")


def test_folders_that_are_no_checkpoint(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "links").mkdir()
    for name in (INDEX, "config.json"):
        (tmp_path / "links" / name).symlink_to("gone")
    (tmp_path / "folder" / SINGLE).mkdir(parents=True)
    (tmp_path / "empty").mkdir()
    for path, message in (
        (tmp_path / "nowhere", "no checkpoint: neither"),
        ("deepseek-ai/DeepSeek-V3", r"the path of a folder; .*snapshot_download"),
        (tmp_path / "empty", f"nor {SINGLE} is there$"),
        (tmp_path / ("x" * 5000), "no checkpoint: neither"),
        (tmp_path / "nul\0", "no checkpoint: neither"),
        (folder / FIRST, "no checkpoint: neither"),
        (tmp_path / "links", "No such file"),
        (tmp_path / "folder", "'model.safetensors' is no file"),
    ):
        with pytest.raises(CheckpointError, match=message):
            load_fp8(TARGETS["plain"](), path)


SIZES = [128, "128", [], [128], [128, "128"], [128, 64], [1, 128], [256, 256], {"rows": 128}]


@pytest.mark.parametrize("config", [None, {}, {"quant_method": "fp8"}, [128, 128], "fp8"])
def test_no_description_of_blocks(folder: Path, config: object) -> None:
    (folder / "config.json").write_text(json.dumps({"quantization_config": config}))
    assert seed_in(folder) == OLD


@pytest.mark.parametrize("size", SIZES)
def test_descriptions_of_other_blocks(folder: Path, size: object) -> None:
    described = {"quantization_config": {"weight_block_size": size}}
    (folder / "config.json").write_text(json.dumps(described))
    with pytest.raises(NotImplementedError, match=r"blocks of .*, expected \[128, 128\]"):
        load_fp8(TARGETS["plain"](), folder)


def test_malformed_json(tmp_path: Path) -> None:
    file, unreadable = tmp_path / "x.json", "not readable as JSON"
    other = "expected a JSON object, got"
    wrong = [(b"[]", f"{other} list"), (b"null", f"{other} NoneType")]
    for content, message in [(x, unreadable) for x in (b"", b"{", b"\xff\xff{}")] + wrong:
        file.write_bytes(content)
        with pytest.raises(CheckpointError, match=f"{file}: {message}"):
            read_json(file)
    for path in (tmp_path, tmp_path / "gone", tmp_path / ("x" * 5000)):
        with pytest.raises(CheckpointError, match=unreadable):
            read_json(path)


def test_safetensors_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    require_safetensors()
    monkeypatch.setitem(sys.modules, "safetensors", None)
    with pytest.raises(ImportError, match=r"^FP8 checkpoints need safetensors: pip install"):
        require_safetensors()


def test_the_smallest_and_largest_scales_are_sound() -> None:
    """For faults see test_load.py and test_save.py."""
    powers = torch.tensor([2.0**-130, 2.0**-126, 0.5, 1, 2.0**127])
    for format in (BLOCKS_128X128, BLOCKS_128X128_POW2):
        assert bad_scale(powers, format) is bad_scale(torch.ones(0, 3), format) is None


# Checkpoints damaged at random: an error and an unchanged model, or what the files say

CASES = int(os.environ.get("CHECKPOINT_FUZZ", "150"))


def damaged(draw: random.Random, name: str, data: bytes) -> bytes:
    """A file with other bytes at one place, in its header if it is one of tensors."""
    header = 8 + int.from_bytes(data[:8], "little") if name.endswith(".safetensors") else len(data)
    at, size = draw.randrange(draw.choice([header, len(data)])), draw.choice([1, 2, 7, 8, 64])
    part = data[at : at + size]
    flipped = bytes([part[0] ^ 1 << draw.randrange(8)]) + part[1:]
    middle = draw.choice([flipped, flipped, b"", part + part, bytes(size), draw.randbytes(size)])
    return data[:at] + middle + draw.choice([data[at + size :]] * 6 + [b""])


def test_damaged_files(folder: Path) -> None:
    draw, refused, files = random.Random(0), 0, sorted(path.name for path in folder.iterdir())
    for _ in range(CASES):
        name, model = draw.choice(files), TARGETS[draw.choice(["plain", "frozen"])]()
        before, data = state(model), (folder / name).read_bytes()
        (folder / name).write_bytes(damaged(draw, name, data))
        try:
            report = load_fp8(model, folder)
        except (CheckpointError, NotImplementedError):
            assert_same(state(model), before)
            refused += 1
        else:
            places = json.loads((folder / INDEX).read_bytes())["weight_map"].values()
            stored = {k: x for file in set(places) for k, x in load_file(folder / file).items()}
            for key in report.fp8:
                held, scales, _ = model.get_parameter(key).rowwise()
                assert torch.equal(bits(held), bits(stored[key]))
                assert torch.equal(scales, stored[f"{key}_scale_inv"].float())
                assert bool((scales > 0).all()) and bool(scales.isfinite().all())
        (folder / name).write_bytes(data)
    assert CASES // 4 < refused < CASES
