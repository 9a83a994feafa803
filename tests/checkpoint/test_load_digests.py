"""A damaged tensor is never loaded: it is compared with its digest, in threads if it is large."""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from textwrap import fill

import pytest
import torch
from expecttest import assert_expected_inline
from torch import Tensor, nn

pytest.importorskip("safetensors")

from blocktensor import CheckpointError, load_fp8
from blocktensor.checkpoint import load as module
from blocktensor.checkpoint.contents import Entry
from blocktensor.checkpoint.load import reading
from blocktensor.checkpoint.on_disk import tensor_digest
from tests.support.checkpoint_folders import INDEX, NEW, OLD, edit_json, folder, save
from tests.support.checkpoint_models import (
    Model,
    assert_refused,
    assert_same,
    filled,
    on_meta,
    state,
)

__all__ = ["folder"]


AHEAD = 3


@pytest.fixture(params=["small", "large"])
def size(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Whether tensors count as small, hashed at once, or as large, hashed in threads."""
    if request.param == "large":
        monkeypatch.setattr(module, "_SMALL", -1)
        monkeypatch.setattr(module, "_AHEAD", AHEAD)
    return str(request.param)


def place_of(folder: Path, name: str) -> tuple[Path, int, int]:
    """The file of a tensor, and where its bytes begin and end."""
    file = folder / json.loads((folder / INDEX).read_text())["weight_map"][name]
    data = file.read_bytes()
    size = 8 + int.from_bytes(data[:8], "little")
    first, stop = json.loads(data[8:size])[name]["data_offsets"]
    return file, size + first, size + stop


def flip(folder: Path, name: str, at: float, bit: int = 0) -> Path:
    """Flip a bit of the byte at a share of a tensor's bytes."""
    file, first, stop = place_of(folder, name)
    data = bytearray(file.read_bytes())
    data[min(int(first + at * (stop - first)), stop - 1)] ^= 1 << bit
    file.write_bytes(data)
    return file


KINDS = ("up.weight", "down.weight_scale_inv", "embed.weight", "up.bias", "norm.weight", "steps")
"""FP8 data, scales, and tensors that are loaded as they are, one without dimensions."""


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize(
    "make",
    [lambda: filled(NEW, convert=False), lambda: filled(NEW, frozen=True), on_meta],
    ids=["plain", "frozen", "meta"],
)
def test_a_flipped_bit_is_noticed(
    folder: Path, size: str, name: str, make: Callable[[], Model]
) -> None:
    model = make()
    for at in (0.0, 0.5, 1.0):
        file = flip(folder, name, at)
        message = rf"{re.escape(str(file))}: corrupted: tensor '{name}' is not the one that was"
        assert_refused(folder, model, message)
        flip(folder, name, at)
    load_fp8(model, folder)
    assert_same(state(model), state(filled(OLD, frozen=True)))


def test_damage_that_makes_a_scale_negative_is_called_damage(folder: Path) -> None:
    flip(folder, "up.weight_scale_inv", 1.0, bit=7)
    assert_refused(folder, filled(NEW, convert=False), "'up.weight_scale_inv' is not the one")


def test_the_error_names_file_tensor_and_remedy(folder: Path) -> None:
    flip(folder, "up.weight", 0.3)
    with pytest.raises(CheckpointError) as caught:
        load_fp8(filled(NEW, convert=False), folder)
    message = str(caught.value).replace(str(folder), "fp8")
    assert_expected_inline(
        fill(message, 100),
        """\
fp8/model-00002-of-00003.safetensors: corrupted: tensor 'up.weight' is not the one that was written
(SHA-256 in model.safetensors.index.json): copy the file again from where it is intact; without
tensor_sha256 in the index it loads unchecked""",
    )


def test_without_digests_the_damage_is_loaded_as_the_error_says(folder: Path) -> None:
    """And so are checkpoints of older versions."""
    flip(folder, "up.weight", 0.3)
    edit_json(folder / INDEX, lambda index: index["metadata"].pop("tensor_sha256"))
    model = filled(NEW, convert=False)
    load_fp8(model, folder)
    before, after = state(filled(OLD, frozen=True)), state(model)
    assert [name for name in before if not torch.equal(before[name], after[name])] == [
        "up.weight 0"
    ]


def test_only_what_is_loaded_is_checked(folder: Path, size: str) -> None:
    """The rest is not read."""
    flip(folder, "down.weight", 0.5)
    part = nn.ModuleDict({"up": nn.Linear(300, 200)}).bfloat16()
    load_fp8(part, folder, strict=False)
    assert torch.equal(
        part["up"].weight.dequantize(), filled(OLD, frozen=True).up.weight.dequantize()
    )
    flip(folder, "up.bias", 0.5)
    assert_refused(folder, part, "'up.bias' is not the one that was written", strict=False)


def test_a_save_over_another_keeps_digests(folder: Path) -> None:
    """Also where its shards have to keep the tags in their names."""
    (folder / "model-00001-of-00001.safetensors").symlink_to("gone")
    for size in (70_000, 1 << 30):
        save(NEW, folder, size=size)
        for name in ("up.weight", "norm.bias"):
            flip(folder, name, 0.5)
            assert_refused(folder, filled(5, convert=False), f"'{name}' is not the one")
            flip(folder, name, 0.5)
        load_fp8(filled(5, convert=False), folder)


# Checks in threads


def entry(name: str, digest: str = "0") -> Entry:
    return Entry(Path("f"), "F32", (3,), name, digest)


@pytest.fixture
def zeros(monkeypatch: pytest.MonkeyPatch) -> Tensor:
    """What is read of every entry."""
    x = torch.zeros(3)
    monkeypatch.setattr(module, "_tensor", lambda entry, files: x)
    return x


def read_all(entries: Iterable[Entry]) -> None:
    with reading() as read:
        for one in entries:
            read(one)


def test_checks_stay_few_tensors_behind(size: str, zeros: Tensor) -> None:
    """A bad tensor stops the reading soon, not after hundreds of others."""
    left = iter([entry("0"), *(entry(str(i), tensor_digest(zeros)) for i in range(1, 100))])
    with pytest.raises(CheckpointError, match="'0' is not"):
        read_all(left)
    assert 100 - len(list(left)) == (AHEAD + 1 if size == "large" else 1)


def test_the_last_tensor_is_checked_too(size: str, zeros: Tensor) -> None:
    with pytest.raises(CheckpointError, match="f: corrupted: tensor 'x'"):
        read_all([entry("y", tensor_digest(zeros)), entry("x")])


def test_an_error_of_the_reading_ends_the_checks(
    size: str, zeros: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that have not begun are dropped, and no thread is left."""
    hashed: list[Tensor] = []

    def slow(x: Tensor) -> str:
        time.sleep(0.02)
        hashed.append(x)
        return "0"

    monkeypatch.setattr(module, "tensor_digest", slow)
    monkeypatch.setattr(module, "HASHING_THREADS", 1)
    threads = threading.active_count()

    def entries() -> Iterator[Entry]:
        yield from map(entry, "abc")
        raise KeyError("of the reading")

    with pytest.raises(KeyError, match="of the reading"):
        read_all(entries())
    assert threading.active_count() == threads
    assert len(hashed) == 3 if size == "small" else len(hashed) <= 2


def test_large_tensors_are_hashed_at_once_by_several_threads(
    size: str, zeros: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two that wait for each other, beside the thread that reads; small ones in that thread."""
    met, threads = threading.Barrier(2, timeout=10), set[int]()

    def together(x: Tensor) -> str:
        threads.add(threading.get_ident())
        if size == "large":
            met.wait()
        return "0"

    monkeypatch.setattr(module, "tensor_digest", together)
    monkeypatch.setattr(module, "HASHING_THREADS", 2)
    read_all(map(entry, "ab"))
    here = threading.get_ident()
    assert len(threads - {here}) == 2 if size == "large" else threads == {here}
