"""Files that are malformed or disagree: a CheckpointError, before any data is read."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import sys
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("safetensors")

from safetensors.torch import load_file, save_file

from blocktensor import CheckpointError, load_fp8
from blocktensor.checkpoint import on_disk
from blocktensor.checkpoint.contents import check_blocks, entries_of, scales_of
from blocktensor.checkpoint.on_disk import (
    header_digest,
    read_json,
    require_safetensors,
    tensor_digest,
)
from blocktensor.ops.checks import bad_scale
from blocktensor.ops.formats import BLOCKS_128X128, BLOCKS_128X128_POW2
from tests.support.checkpoint_models import (
    INDEX,
    OLD,
    SINGLE,
    TARGETS,
    assert_refused,
    assert_same,
    edit_json,
    folder,
    seed_in,
    state,
    unchanged,
)

__all__ = ["folder"]

FIRST, SECOND = "model-00001-of-00003.safetensors", "model-00002-of-00003.safetensors"


def test_what_a_checkpoint_holds(folder: Path) -> None:
    entries = entries_of(folder)
    wanted = {name: tuple(x.shape) for name, x in unchanged(OLD).state_dict().items()}
    del wanted["head.weight"]
    wanted |= {"up.weight_scale_inv": (2, 3), "down.weight_scale_inv": (3, 2)}
    assert {name: entry.shape for name, entry in entries.items()} == wanted
    digests = json.loads((folder / INDEX).read_text())["metadata"]["tensor_sha256"]
    assert {name: entry.digest for name, entry in entries.items()} == digests
    assert entries["embed.weight"][:3] == (folder / FIRST, "BF16", (32, 300))
    assert entries["up.weight"][:3] == (folder / SECOND, "F8_E4M3", (200, 300))
    assert scales_of(entries) == {
        "up.weight": "up.weight_scale_inv",
        "down.weight": "down.weight_scale_inv",
    }


NO_STRINGS, NO_FILE = "is no object of strings", f"is no file, but {INDEX} names it"
PLACES: list[tuple[dict[str, Any], str]] = [
    ({"up.weight": [SECOND]}, f"weight_map {NO_STRINGS}"),
    ({"a": "../secret"}, "'../secret' is no file of its folder"),
    ({"a": "x" * 100_000}, r"'xxx.{,40}xxx' is no file of its folder$"),
    ({"a": "\0", "b": "\ud800"}, NO_FILE),
    ({"a": "ü" * 255}, NO_FILE),  # too long in bytes
    *(({"a": name}, f"'{name}' is no file") for name in ("", ".", "..")),
    ({"more": "gone.safetensors"}, f"'gone.safetensors' {NO_FILE}"),
    ({"more": INDEX}, f"{INDEX}: truncated or corrupted"),
    ({"more": FIRST}, f"{FIRST}: tensor 'more' is missing"),
    ({"up.bias": FIRST}, f"{SECOND}: has tensor 'up.bias': {INDEX} says that it is in {FIRST}"),
]
"""Files of tensors in the index."""

METADATA: list[tuple[str, Any, str]] = [
    ("header_sha256", [1], f"header_sha256 {NO_STRINGS}"),
    ("header_sha256", {SECOND: "0" * 64},
     f"{SECOND}: corrupted: its header is not the one that was written"),
    *(("tensor_sha256", value, f"{INDEX}: tensor_sha256 {NO_STRINGS}")
      for value in (None, [1], "x", {"up.weight": 1}, {"up.weight": None}, {"up.weight": ["x"]})),
    ("tensor_sha256", {}, "tensor 'down.weight' has no digest in tensor_sha256"),
]  # fmt: skip


def digest(change: Callable[[str], str]) -> Callable[[dict[str, Any]], object]:
    """Change that of a tensor."""

    def of_index(index: dict[str, Any]) -> None:
        digests = index["metadata"]["tensor_sha256"]
        digests["up.bias"] = change(digests["up.bias"])

    return of_index


CORRUPTED = f"{SECOND}: corrupted: tensor 'up.bias' is not the one that was written"
INDEXES: list[tuple[Callable[[dict[str, Any]], object], str]] = [
    *((lambda i, new=new: i["weight_map"].update(new), message) for new, message in PLACES),
    *((lambda i, key=key, value=value: i["metadata"].update({key: value}), message)
      for key, value, message in METADATA),
    (lambda i: i.pop("weight_map"), f"weight_map {NO_STRINGS}"),
    (lambda i: i.update(weight_map=3), f"weight_map {NO_STRINGS}"),
    (lambda i: i["weight_map"].pop("up.bias"),
     f"{SECOND}: has tensor 'up.bias': {INDEX} does not name it"),
    (lambda i: i.update(weight_map=dict.fromkeys(i["weight_map"], FIRST)), "is missing"),
    (lambda i: i["metadata"]["tensor_sha256"].pop("up.bias"),
     f"{INDEX}: tensor 'up.bias' has no digest in tensor_sha256, which has one for each tensor: "
     f"copy the index again from where it is intact; without tensor_sha256 all tensors load "
     f"unchecked$"),
    (lambda i: i["metadata"]["tensor_sha256"].pop("up.weight_scale_inv"),
     "tensor 'up.weight_scale_inv' has no digest in tensor_sha256"),
    (digest(lambda old: ""), CORRUPTED),
    (digest(lambda old: old[:-1]), CORRUPTED),
    (digest(lambda old: old[:-1] + ("1" if old[-1] == "0" else "0")), CORRUPTED),
]  # fmt: skip


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
    """Whichever of the two the index means."""
    tensors = load_file(folder / FIRST)
    bias = torch.zeros(200, dtype=torch.bfloat16)
    save_file(tensors | {"up.bias": bias}, folder / FIRST, metadata={"format": "pt"})
    edit_json(folder / INDEX, lambda index: index["metadata"].pop("header_sha256"))
    for place in (FIRST, SECOND):
        edit_json(folder / INDEX, lambda i, place=place: i["weight_map"].update({"up.bias": place}))
        message = r"has tensor 'up.bias': .* says that it is in"
        assert_refused(folder, TARGETS["plain"](), message)


def test_folders_that_are_no_checkpoint(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "links").mkdir()
    for name in (INDEX, "config.json"):
        (tmp_path / "links" / name).symlink_to("gone")
    (tmp_path / "folder" / SINGLE).mkdir(parents=True)
    for path, message in (
        (tmp_path / "nowhere", "no checkpoint: neither"),
        (tmp_path / ("x" * 5000), "no checkpoint: neither"),
        (tmp_path / "nul\0", "no checkpoint: neither"),
        (folder / FIRST, "no checkpoint: neither"),
        (tmp_path / "links", "no such file"),
        (tmp_path / "folder", "'model.safetensors' is no file"),
    ):
        with pytest.raises(CheckpointError, match=message):
            load_fp8(TARGETS["plain"](), path)


def sparse(file: Path, shape: list[int], dtype: str, size: int) -> None:
    """A safetensors file of one tensor that claims ``size`` bytes and takes none on the disk."""
    header = json.dumps({"x": {"dtype": dtype, "shape": shape, "data_offsets": [0, size]}}).encode()
    file.write_bytes(len(header).to_bytes(8, "little") + header)
    with file.open("r+b") as opened:
        opened.truncate(8 + len(header) + size)


def test_a_claim_to_be_huge_allocates_nothing(tmp_path: Path) -> None:
    """Of what is really there, as holes, nothing is read."""
    model = torch.nn.Module()
    model.x = torch.nn.Parameter(torch.zeros(4, 4))
    file = tmp_path / SINGLE
    tracemalloc.start()
    try:
        for shape, dtype, size in (
            ([1 << 20, 1 << 20], "U8", 1 << 40),
            ([1 << 40], "F8_E4M3", 1 << 40),
            ([1 << 19, 1 << 19], "F32", 1 << 40),
            ([1 << 62, 1 << 62], "F32", 1 << 40),
            ([1 << 63], "F32", 16),
            ([4, 4], "F32", 1 << 40),
            ([1 << 14, 1 << 14], "F32", 1 << 30),  # so small that it can be mapped
        ):
            sparse(file, shape, dtype, size)
            with pytest.raises(CheckpointError):
                load_fp8(model, tmp_path)
        file.write_bytes((90 << 20).to_bytes(8, "little") + b"{}")
        (tmp_path / INDEX).write_text(
            json.dumps({"weight_map": {"x": SINGLE}, "metadata": {"header_sha256": {SINGLE: "0"}}})
        )
        with pytest.raises(CheckpointError, match="truncated"):
            load_fp8(model, tmp_path)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 1 << 20
    assert not model.x.any()


def test_every_cut_is_noticed(folder: Path) -> None:
    model = TARGETS["plain"]()
    before = state(model)
    for file in folder.glob("*.safetensors"):
        whole = file.read_bytes()
        for length in (*range(0, len(whole), 1024), 7, 8, 9, len(whole) - 1):
            file.write_bytes(whole[:length])
            with pytest.raises(CheckpointError, match=file.name):
                load_fp8(model, folder)
        file.write_bytes(whole)
    assert_same(state(model), before)
    load_fp8(model, folder)


# Descriptions of blocks


def sizes(*found: object) -> list[Any]:
    return [{"weight_block_size": size} for size in found]


DESCRIPTIONS: dict[str, tuple[type[Exception] | None, str, list[Any]]] = {
    "blocks of 128": (None, "", [
        None, {}, {"quant_method": "fp8"}, *sizes([128, 128], None)]),
    "other blocks": (NotImplementedError, r"blocks of \[\d+, \d+\], expected \[128, 128\]",
        sizes([128, 64], [64, 128], [1, 128], [128, 1], [256, 256])),
    "no size": (CheckpointError, r"expected \[128, 128\]", [
        *sizes(128, "128", [], [128], [128, 128, 128], [128, "128"], [128, True], [0, 128]),
        *sizes([-128, 128], [128.0, 128.0], {"rows": 128}, [[128, 128]], True)]),
    "no object": (CheckpointError, r"'\w+' is .*: expected a JSON object",
        [[], "fp8", 8, True, [1, 2], ["fp8"]]),
}  # fmt: skip


@pytest.mark.parametrize(("error", "message", "described"), DESCRIPTIONS.values(), ids=DESCRIPTIONS)
def test_descriptions_of_blocks(
    folder: Path, error: type[Exception] | None, message: str, described: list[Any]
) -> None:
    file = folder / "config.json"
    for one in described:
        file.write_text(json.dumps({"quantization_config": one}))
        raises = contextlib.nullcontext()
        with pytest.raises(error, match=f"{file}: .*{message}") if error else raises:
            load_fp8(TARGETS["plain"](), folder)


# JSON, scales, digests


def test_malformed_json(tmp_path: Path) -> None:
    file, start = tmp_path / "x.json", b'{"a": '
    deep = b"[" * 200_000 + b"]" * 200_000
    for content in (b"", b"{", b"\xff\xff{}", start + b"9" * 5000 + b"}", start + deep + b"}"):
        file.write_bytes(content)
        with pytest.raises(CheckpointError, match=f"{file}: not readable as JSON"):
            read_json(file)
    for content, kind in ((b"[]", "list"), (b"null", "NoneType")):
        file.write_bytes(content)
        with pytest.raises(CheckpointError, match=f"{file}: expected a JSON object, got {kind}"):
            read_json(file)
    with pytest.raises(CheckpointError, match="no such file"):
        read_json(tmp_path / "gone")
    os.mkfifo(tmp_path / "pipe")
    for other in (tmp_path, tmp_path / "pipe", Path("/dev/zero"), tmp_path / ("x" * 5000)):
        with pytest.raises(CheckpointError, match="not readable as JSON"):
            read_json(other)


def test_huge_json_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "x.json"
    with file.open("wb") as opened:
        opened.truncate(on_disk.MAX_HEADER + 1)
    monkeypatch.setattr(Path, "read_bytes", lambda path: pytest.fail("it was read"))
    with pytest.raises(CheckpointError, match="larger than 104857600 bytes"):
        read_json(file)


def test_deep_json_at_any_depth(tmp_path: Path) -> None:
    """Also where the parser has frames to spare and what walks its result has not."""
    file = tmp_path / "x.json"
    for depth in (sys.getrecursionlimit() // 2, sys.getrecursionlimit() - 60, 5000):
        file.write_text('{"quantization_config": ' + "[" * depth + "]" * depth + "}")
        with pytest.raises(CheckpointError):
            check_blocks(read_json(file), file)
        file.write_text('{"weight_block_size": ' + '{"a":' * depth + "1" + "}" * depth + "}")
        with pytest.raises(CheckpointError):
            check_blocks({"quantization_config": read_json(file)}, file)


@pytest.mark.parametrize("library", ["numpy", "safetensors"])
def test_libraries_that_are_missing(library: str, monkeypatch: pytest.MonkeyPatch) -> None:
    require_safetensors()
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(
        ImportError, match=rf"^FP8 checkpoints need {library}: pip install {library}$"
    ):
        require_safetensors()


def test_scales_are_finite_and_above_0_and_of_some_recipes_powers_of_two() -> None:
    powers, odd = torch.tensor([2.0**-130, 2.0**-126, 0.5, 1, 2.0**127]), torch.tensor([1, 0.75])
    for format in (BLOCKS_128X128, BLOCKS_128X128_POW2):
        assert bad_scale(powers, format) is bad_scale(torch.ones(0, 3), format) is None
        for value in (0.0, -0.0, -1.0, float("nan"), float("inf"), -float("inf")):
            assert bad_scale(torch.tensor([[0.5, 1.0], [0.5, value]]), format) == (
                f"the scale of block [1, 1] is {value}: expected a finite number above 0"
            )
    assert bad_scale(odd, BLOCKS_128X128) is None
    message = "the scale of block [1] is 0.75: expected a power of two, as Recipe("
    assert (bad_scale(odd, BLOCKS_128X128_POW2) or "").startswith(message)


def test_the_digest_covers_length_and_header(tmp_path: Path) -> None:
    file = tmp_path / "x.safetensors"
    header = json.dumps({"a": 1}).encode()
    whole = len(header).to_bytes(8, "little") + header
    file.write_bytes(whole + b"data")
    assert header_digest(file) == hashlib.sha256(whole).hexdigest()
    for broken in (
        b"", whole[:7], whole[:8], whole[:-1], (2**63).to_bytes(8, "little") + header,
        (len(header) + 1).to_bytes(8, "little") + header,
    ):  # fmt: skip
        file.write_bytes(broken)
        with pytest.raises(CheckpointError, match="truncated"):
            header_digest(file)


DTYPES = (torch.float8_e4m3fn, torch.float8_e8m0fnu, torch.bfloat16, torch.float32, torch.bool)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(), (0,), (3, 0), (5,), (3, 2, 7)])
def test_the_digest_of_a_tensor(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    x = (torch.rand(shape) * 9).to(dtype)
    content = bytes(x.view(-1).view(torch.uint8).tolist())
    wanted = hashlib.sha256(f"{dtype} {list(shape)}".encode() + content).hexdigest()
    assert tensor_digest(x) == wanted
