"""Damage to the files of a checkpoint, drawn at random: bytes, headers, JSON, tensors, files."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

INDEX, CONFIG = "model.safetensors.index.json", "config.json"

Mutation = Callable[[random.Random, Path], None]
"""Changes a folder, or raises an Exception before if there is nothing that it could change."""


def shards(folder: Path) -> list[Path]:
    return sorted(path for path in folder.glob("*.safetensors") if path.is_file())


def json_files(folder: Path) -> list[Path]:
    return [folder / name for name in (INDEX, CONFIG) if (folder / name).is_file()]


def header_size(data: bytes) -> int:
    return min(8 + int.from_bytes(data[:8], "little"), len(data))


# Bytes


def _damage(draw: random.Random, file: Path, data: bytes, first: int, stop: int) -> None:
    """Write ``data`` with damage that begins at one of ``first`` to ``stop``."""
    at, size = draw.randrange(first, max(stop, first + 1)), draw.choice([1, 2, 7, 8, 64])
    before, part, after = data[:at], data[at : at + size], data[at + size :]
    bit, noise = 1 << draw.randrange(8), draw.randbytes(size)
    flipped = bytes(byte ^ bit for byte in part[:1]) + part[1:]
    middle = draw.choice([flipped, flipped, b"", noise + part, part + part, bytes(len(part))])
    file.write_bytes(draw.choice([*[before + middle + after] * 6, before, data + noise]))


def header_bytes(draw: random.Random, folder: Path) -> None:
    file = draw.choice(shards(folder))
    data = file.read_bytes()
    _damage(draw, file, data, 0, header_size(data))


def payload_bytes(draw: random.Random, folder: Path) -> None:
    file = draw.choice(shards(folder))
    data = file.read_bytes()
    _damage(draw, file, data, header_size(data), len(data))


def json_bytes(draw: random.Random, folder: Path) -> None:
    file = draw.choice(json_files(folder))
    data = file.read_bytes()
    _damage(draw, file, data, 0, len(data))


# JSON

RAW = {
    "@nines": "9" * 5000,
    "@large": "1e999",
    "@minus": "-0",
    "@twice": '{"a": 1, "a": 2}',
    **{f"@lists {n}": "[" * n + "]" * n for n in (10, 500, 990, 3000)},
    **{f"@objects {n}": '{"a":' * n + "1" + "}" * n for n in (10, 500, 990, 3000)},
}
"""Texts that json.dumps does not write, by what stands for them."""


def dump(content: Any) -> bytes:
    text = json.dumps(content)
    for name, raw in RAW.items():
        text = text.replace(f'"{name}"', raw)
    return text.encode()


def odd_value(draw: random.Random) -> Any:
    return draw.choice([
        None, True, 0, -1, 128, 2**63, 10**400, 1.5, float("nan"), float("inf"), "", "x", "\0",
        "\ud800", "x" * 5000, "../x", "..", "/etc/passwd", INDEX, CONFIG, [], {}, [1], [[1]],
        {"a": 1}, [128, 128], [64, 128], [128, 64], [128], ["128", 128], [None], {"weights": []},
        list(range(200)), *RAW,
    ])  # fmt: skip


def places(x: Any) -> Iterator[tuple[Any, Any]]:
    """Every container in a JSON value with each of its keys."""
    for key in x if isinstance(x, dict) else range(len(x)) if isinstance(x, list) else ():
        yield x, key
        yield from places(x[key])


def mutate_json(draw: random.Random, content: Any) -> None:
    """Change one place of a JSON value."""
    parent, key = draw.choice(list(places(content)))
    kind = draw.choice(["replace", "replace", "delete", "rename", "swap", "add", "wrap"])
    if kind == "delete":
        del parent[key]
    elif kind == "rename" and isinstance(parent, dict):
        parent[draw.choice([f"{key}x", "", "a", str(key)[:-1], "weight_map"])] = parent.pop(key)
    elif kind == "swap":
        other, place = draw.choice(list(places(content)))
        if isinstance(parent[key], (str, int)) and isinstance(other[place], (str, int)):
            parent[key], other[place] = other[place], parent[key]
    elif kind == "add" and isinstance(parent, dict):
        parent[draw.choice(["x", "more.weight", "\0", "", "weight_block_size"])] = odd_value(draw)
    elif kind == "wrap":
        parent[key] = [parent[key]]
    else:
        parent[key] = odd_value(draw)


def json_structure(draw: random.Random, folder: Path) -> None:
    file = draw.choice(json_files(folder))
    content = json.loads(file.read_bytes())
    mutate_json(draw, content)
    file.write_bytes(dump(content))


def json_whole(draw: random.Random, folder: Path) -> None:
    file = draw.choice(json_files(folder))
    if draw.random() < 0.3:
        text, encoding = file.read_text("utf-8", "replace"), draw.choice(["utf-16", "utf-8-sig"])
        file.write_text(text, encoding, "replace")
    else:
        file.write_bytes(dump(odd_value(draw)))


# Headers and tensors


def forge(folder: Path) -> None:
    """Make the digests of an index fit the headers, so that deeper checks are reached."""
    with contextlib.suppress(OSError, ValueError, TypeError, KeyError, RecursionError):
        index = json.loads((folder / INDEX).read_bytes())
        digests = index["metadata"]["header_sha256"]
        for file in shards(folder):
            data = file.read_bytes()
            if file.name in digests:
                digests[file.name] = hashlib.sha256(data[: header_size(data)]).hexdigest()
        (folder / INDEX).write_bytes(dump(index))


_DTYPES = (
    "F64", "F32", "F16", "BF16", "F8_E4M3", "F8_E5M2", "F8_E8M0", "I64", "I8", "U8", "BOOL", "F4",
    "C64", "X",
)  # fmt: skip


def header(draw: random.Random, folder: Path) -> None:
    """Another header that may be consistent, over the same data."""
    file = draw.choice(shards(folder))
    data = file.read_bytes()
    size = header_size(data)
    content = json.loads(data[8:size])
    entries = [name for name, entry in content.items() if isinstance(entry, dict)]
    name = draw.choice(entries)
    entry, other = content[name], content[draw.choice(entries)]
    shape = entry["shape"] if isinstance(entry.get("shape"), list) else [1]
    changes = {
        "dtype": draw.choice(_DTYPES),
        "shape": draw.choice([
            shape[::-1], [*shape, 1], [1, *shape], shape[:-1], [200, *shape[1:]], [*shape[:-1], 6],
            [-1], [2**63], [2**40, 2**40], [0], [1] * 200, [[1]], "x",
        ]),
        "data_offsets": draw.choice([
            other.get("data_offsets"), [0, 0], [0, 1], [-1, 1], [5, 1], [0, 2**63], [0, 2**64], [0],
            "x",
        ]),
    }  # fmt: skip
    kind = draw.choice([*changes, "rename", "delete", "copy", "any", "length"])
    if kind in changes:
        entry[kind] = changes[kind]
    elif kind == "rename":
        names = [f"{name}x", "", "\ud800", "up.weight", f"{name}_scale", "x" * 5000]
        content[draw.choice(names)] = content.pop(name)
    elif kind == "delete":
        del content[name]
    elif kind == "copy":
        content[draw.choice([f"{name}_scale", f"{name}_scale_inv", "more"])] = entry
    elif kind == "any":
        mutate_json(draw, content)
    text = dump(content)
    length = len(text)
    if kind == "length":
        length = draw.choice([0, 1, length - 1, 2**31, 2**63, 90 << 20])
    file.write_bytes(length.to_bytes(8, "little") + text + data[size:])


def forged_header(draw: random.Random, folder: Path) -> None:
    header(draw, folder)
    forge(folder)


def tensors(draw: random.Random, folder: Path) -> None:
    """Sound files with other tensors."""
    file = draw.choice(shards(folder))
    held = load_file(file)
    name = draw.choice(sorted(held))
    x, scale = held[name], draw.choice([n for n in sorted(held) if "scale" in n] or [name])
    kind = draw.choice(["cast", "view", "shape", "delete", "scale", "scale", "scale", "more"])
    if kind == "cast":
        casts = (torch.float64, torch.bfloat16, torch.float8_e4m3fn, torch.int8, torch.bool)
        held[name] = x.float().to(draw.choice(casts))
    elif kind == "view":
        views = (torch.uint8, torch.float8_e5m2, torch.float8_e4m3fn)
        held[name] = x.contiguous().view(draw.choice(views))
    elif kind == "shape":
        held[name] = draw.choice([x.flatten(), x.mT.contiguous() if x.ndim > 1 else x, x[None]])
    elif kind == "delete":
        del held[name]
    elif kind == "scale":
        wide = held[scale].float().clone()
        values = [0.0, -0.0, -1.0, float("nan"), float("inf"), 1e-45, 3e38, 3.0]
        wide.view(-1)[draw.randrange(wide.numel())] = draw.choice(values)
        scales = (torch.float32, torch.float16, torch.bfloat16, torch.float8_e8m0fnu)
        held[scale] = wide.to(draw.choice(scales))
    else:
        held[draw.choice([f"{scale}_inv", "more"])] = held[scale].clone()
    save_file(held, file, metadata={"format": "pt"})
    forge(folder)


# Files


def file_operation(draw: random.Random, folder: Path) -> None:
    files = sorted(path for path in folder.iterdir() if path.is_file())
    file, other = draw.choice(files), draw.choice(files)
    data, others = file.read_bytes(), other.read_bytes()
    contents = {"empty": b"", "other": others, "swap": others}
    kind = draw.choice([*contents, "delete", "rename", "copy", "folder", "link", "loop", "pipe"])
    if kind in ("copy", "rename"):
        names = ["model.safetensors", "more.safetensors", f"{file.name}x", INDEX]
        place = folder / draw.choice(names)
        if os.path.lexists(place) and not place.is_file():
            raise FileExistsError  # a pipe, which would wait for a reader for ever, or a folder
        place.write_bytes(data)
    if kind == "swap":
        other.write_bytes(data)
    if kind in contents:
        file.write_bytes(contents[kind])
    elif kind != "copy":
        file.unlink()
    if kind == "folder":
        file.mkdir()
    elif kind in ("link", "loop"):
        file.symlink_to(file if kind == "loop" else "gone")
    elif kind == "pipe":
        os.mkfifo(file)


OF_JSON: tuple[Mutation, ...] = (json_bytes, json_whole, *[json_structure] * 3)
"""They change no value: what loads is the original."""

OF_HEADERS: tuple[Mutation, ...] = (header_bytes, header)
"""They change no value where an index has digests of headers."""

OF_VALUES: tuple[Mutation, ...] = (payload_bytes, forged_header, tensors, file_operation)
"""They can make another sound checkpoint, with other values."""


def mutate(draw: random.Random, source: Path, target: Path) -> set[Mutation]:
    """Copy a checkpoint and damage the copy in one to three ways: by what."""
    shutil.copytree(source, target)
    used: set[Mutation] = set()
    for _ in range(draw.choice([1, 1, 1, 2, 3])):
        mutation = draw.choice(draw.choice([OF_JSON, OF_JSON, OF_HEADERS, OF_VALUES, OF_VALUES]))
        with contextlib.suppress(Exception):  # nothing that it could change is left
            mutation(draw, target)
            used.add(mutation)
    return used
