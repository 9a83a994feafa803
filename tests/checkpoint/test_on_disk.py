"""Malformed JSON, bad scales, and what digests cover."""

from __future__ import annotations

import hashlib
import json
import os
import sys
from pathlib import Path

import pytest
import torch

from blocktensor import CheckpointError
from blocktensor.checkpoint import on_disk
from blocktensor.checkpoint.contents import check_blocks
from blocktensor.checkpoint.on_disk import (
    bad_scale,
    header_digest,
    read_json,
    require_safetensors,
    tensor_digest,
)
from blocktensor.ops.formats import BLOCKS_128X128, BLOCKS_128X128_POW2


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "not readable as JSON"),
        (b"{", "not readable as JSON"),
        (b"\xff\xff{}", "not readable as JSON"),
        (b'{"a": ' + b"9" * 5000 + b"}", "not readable as JSON"),
        (b'{"a": ' + b"[" * 200_000 + b"]" * 200_000 + b"}", "not readable as JSON"),
        (b"[]", "expected a JSON object, got list"),
        (b"null", "expected a JSON object, got NoneType"),
    ],
    ids=range(7),
)
def test_malformed_json(tmp_path: Path, content: bytes, message: str) -> None:
    file = tmp_path / "x.json"
    file.write_bytes(content)
    with pytest.raises(CheckpointError, match=message) as caught:
        read_json(file)
    assert str(file) in str(caught.value)


def test_files_that_are_none(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no such file"):
        read_json(tmp_path / "gone")
    os.mkfifo(tmp_path / "pipe")
    for other in (tmp_path, tmp_path / "pipe", Path("/dev/zero")):
        with pytest.raises(CheckpointError, match="not readable as JSON"):
            read_json(other)
    with pytest.raises(CheckpointError, match="not readable as JSON"):
        read_json(tmp_path / ("x" * 5000))


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
    with pytest.raises(ImportError, match=rf"^FP8 checkpoints need {library}: pip install 'blo"):
        require_safetensors()


@pytest.mark.parametrize("value", [0.0, -0.0, -1.0, float("nan"), float("inf"), -float("inf")])
def test_scales_are_finite_and_above_0(value: float) -> None:
    for format in (BLOCKS_128X128, BLOCKS_128X128_POW2):
        assert bad_scale(torch.tensor([[0.5, 2.0**-126]]), format) is None
        found = bad_scale(torch.tensor([[0.5, 1.0], [0.5, value]]), format)
        assert found == f"the scale of block [1, 1] is {value}: expected a finite number above 0"
        assert bad_scale(torch.ones(0, 3), format) is None


def test_scales_of_a_power_of_two_recipe_are_powers_of_two() -> None:
    scale = torch.tensor([2.0**-130, 2.0**-126, 0.5, 1, 2.0**127])
    assert bad_scale(scale, BLOCKS_128X128_POW2) is None
    scale[2] = 0.75
    assert bad_scale(scale, BLOCKS_128X128) is None
    found = bad_scale(scale, BLOCKS_128X128_POW2)
    assert found is not None
    assert found.startswith("the scale of block [2] is 0.75: expected a power of two, as Recipe(")


# Digests


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


def test_the_digest_covers_dtype_and_shape() -> None:
    """Bytes that are the same have other values in another dtype."""
    x = torch.zeros(2, 3, dtype=torch.bfloat16)
    alike = [x, x.half(), x.view(3, 2), x.view(6), x.view(torch.uint8)]
    assert len({tensor_digest(y) for y in alike}) == len(alike)
