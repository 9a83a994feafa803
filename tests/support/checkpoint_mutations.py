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

Mutation = Callable[[random.Random, Path], bool]
"""Changes a folder; False if there is nothing that it could change."""


def shards(folder: Path) -> list[Path]:
    return sorted(path for path in folder.glob("*.safetensors") if path.is_file())


def json_files(folder: Path) -> list[Path]:
    return [folder / name for name in (INDEX, CONFIG) if (folder / name).is_file()]


def header_size(data: bytes) -> int:
    return min(8 + int.from_bytes(data[:8], "little"), len(data))


# Bytes


def _damaged(draw: random.Random, data: bytes, first: int, stop: int) -> bytes:
    """``data`` with damage that begins at one of ``first`` to ``stop``."""
    at = draw.randrange(first, max(stop, first + 1))
    size = draw.choice([1, 2, 7, 8, 64])
    noise = draw.randbytes(size)
    kind = draw.choice(["flip", "flip", "cut", "insert", "delete", "zero", "repeat", "append"])
    if kind == "flip" and at < len(data):
        changed = bytearray(data)
        changed[at] ^= 1 << draw.randrange(8)
        return bytes(changed)
    made = {
        "cut": data[:at],
        "insert": data[:at] + noise + data[at:],
        "delete": data[:at] + data[at + size :],
        "zero": data[:at] + bytes(len(data[at : at + size])) + data[at + size :],
        "repeat": data[:at] + data[at : at + size] + data[at:],
    }.get(kind, data + noise)
    return made


def _damage(
    draw: random.Random, files: list[Path], part: Callable[[bytes], tuple[int, int]]
) -> bool:
    """Damage one of ``files`` within the ``part`` of its bytes."""
    if not files:
        return False
    file = draw.choice(files)
    data = file.read_bytes()
    file.write_bytes(_damaged(draw, data, *part(data)))
    return True


def header_bytes(draw: random.Random, folder: Path) -> bool:
    return _damage(draw, shards(folder), lambda data: (0, header_size(data)))


def payload_bytes(draw: random.Random, folder: Path) -> bool:
    return _damage(draw, shards(folder), lambda data: (header_size(data), len(data)))


def json_bytes(draw: random.Random, folder: Path) -> bool:
    return _damage(draw, json_files(folder), lambda data: (0, len(data)))


# JSON


def odd_value(draw: random.Random) -> Any:
    depth = draw.choice([10, 500, 990, 3000])
    nested = (_Raw("[" * depth + "]" * depth), _Raw('{"a":' * depth + "1" + "}" * depth))
    return draw.choice([
        None, True, 0, -1, 128, 2**63, 10**400, 1.5, float("nan"), float("inf"), "", "x", "\0",
        "\ud800", "x" * 5000, "../x", "..", "/etc/passwd", INDEX, CONFIG, [], {}, [1], [[1]],
        {"a": 1}, [128, 128], [64, 128], [128, 64], [128], ["128", 128], [None], {"weights": []},
        list(range(200)), _Raw("9" * 5000), _Raw("1e999"), _Raw("-0"), _Raw('{"a": 1, "a": 2}'),
        *nested,
    ])  # fmt: skip


class _Raw(str):
    """Text to put into JSON as it is."""


def dump(content: Any) -> bytes:
    raws: list[_Raw] = []

    def prepared(x: Any) -> Any:
        if isinstance(x, _Raw):
            raws.append(x)
            return f"@raw{len(raws) - 1}@"
        if isinstance(x, dict):
            return {key: prepared(value) for key, value in x.items()}
        return [prepared(value) for value in x] if isinstance(x, list) else x

    text = json.dumps(prepared(content))
    for i, raw in enumerate(raws):
        text = text.replace(f'"@raw{i}@"', raw)
    return text.encode()


def places(x: Any) -> Iterator[tuple[Any, Any]]:
    """Every container in a JSON value with each of its keys."""
    for key in x if isinstance(x, dict) else range(len(x)) if isinstance(x, list) else ():
        yield x, key
        yield from places(x[key])


def mutate_json(draw: random.Random, content: Any) -> None:
    """Change one place of a JSON value."""
    parent, key = draw.choice(list(places(content)) or [({}, "")])
    kind = draw.choice(["replace", "replace", "delete", "rename", "swap", "add", "wrap"])
    if not parent and kind != "add":
        return
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


def json_structure(draw: random.Random, folder: Path) -> bool:
    files = [file for file in json_files(folder) if _parsed(file) is not None]
    if not files:
        return False
    file = draw.choice(files)
    content = _parsed(file)
    mutate_json(draw, content)
    file.write_bytes(dump(content))
    return True


def json_whole(draw: random.Random, folder: Path) -> bool:
    if not json_files(folder):
        return False
    file = draw.choice(json_files(folder))
    if draw.random() < 0.3:
        file.write_text(
            file.read_text("utf-8", "replace"), draw.choice(["utf-16", "utf-8-sig"]), "replace"
        )
        return True
    file.write_bytes(dump(odd_value(draw)))
    return True


def _parsed(file: Path) -> Any:
    try:
        return json.loads(file.read_bytes())
    except (ValueError, RecursionError):
        return None


# Headers and tensors


def forge(folder: Path) -> None:
    """Make the digests of an index fit the headers, so that deeper checks are reached."""
    index = _parsed(folder / INDEX) if (folder / INDEX).is_file() else None
    try:
        digests = index["metadata"]["header_sha256"]
        for file in shards(folder):
            data = file.read_bytes()
            if file.name in digests:
                digests[file.name] = hashlib.sha256(data[: header_size(data)]).hexdigest()
    except (TypeError, KeyError):
        return
    (folder / INDEX).write_bytes(dump(index))


_DTYPES = (
    "F64", "F32", "F16", "BF16", "F8_E4M3", "F8_E5M2", "F8_E8M0", "I64", "I8", "U8", "BOOL", "F4",
    "C64", "X",
)  # fmt: skip


def header(draw: random.Random, folder: Path) -> bool:
    """Another header that may be consistent, over the same data."""
    if not shards(folder):
        return False
    file = draw.choice(shards(folder))
    data = file.read_bytes()
    size = header_size(data)
    try:
        content = json.loads(data[8:size])
    except (ValueError, RecursionError):
        return False
    if not isinstance(content, dict):
        return False
    entries = [name for name, entry in content.items() if isinstance(entry, dict)]
    name = draw.choice(entries or [""])
    entry = content.get(name, {})
    kind = draw.choice(
        ["dtype", "shape", "offsets", "rename", "delete", "copy", "any", "any", "length"]
    )
    if kind == "dtype":
        entry["dtype"] = draw.choice(_DTYPES)
    elif kind == "shape":
        shape = entry.get("shape")
        shape = shape if isinstance(shape, list) else [1]
        entry["shape"] = draw.choice([
            shape[::-1], [*shape, 1], [1, *shape], shape[:-1], [200, *shape[1:]], [*shape[:-1], 6],
            [-1], [2**63], [2**40, 2**40], [0], [1] * 200, [[1]], "x",
        ])  # fmt: skip
    elif kind == "offsets":
        other = content.get(draw.choice(entries or [""]), {})
        entry["data_offsets"] = draw.choice([
            other.get("data_offsets"), [0, 0], [0, 1], [-1, 1], [5, 1], [0, 2**63], [0, 2**64], [0],
            "x",
        ])  # fmt: skip
    elif kind == "rename":
        content[
            draw.choice([f"{name}x", "", "\ud800", "up.weight", f"{name}_scale", "x" * 5000])
        ] = entry
        content.pop(name, None)
    elif kind == "delete":
        content.pop(name, None)
    elif kind == "copy":
        content[draw.choice([f"{name}_scale", f"{name}_scale_inv", "more"])] = entry
    elif kind == "any":
        mutate_json(draw, content)
    text = dump(content)
    length = (
        len(text)
        if kind != "length"
        else draw.choice([0, 1, len(text) - 1, 2**31, 2**63, 90 << 20])
    )
    file.write_bytes(length.to_bytes(8, "little") + text + data[size:])
    return True


def forged_header(draw: random.Random, folder: Path) -> bool:
    changed = header(draw, folder)
    forge(folder)
    return changed


def tensors(draw: random.Random, folder: Path) -> bool:
    """Sound files with other tensors."""
    if not shards(folder):
        return False
    file = draw.choice(shards(folder))
    try:
        held = load_file(file)
    except Exception:
        return False
    if not held:
        return False
    name = draw.choice(sorted(held))
    x = held[name]
    scale = draw.choice([n for n in sorted(held) if "scale" in n] or [name])
    kind = draw.choice(
        ["cast", "view", "reshape", "delete", "scale", "scale", "scale", "more", "two"]
    )
    if kind == "cast":
        dtypes = (torch.float64, torch.bfloat16, torch.float8_e4m3fn, torch.int8, torch.bool)
        held[name] = x.float().to(draw.choice(dtypes))
    elif kind == "view" and x.ndim:
        dtypes = (torch.uint8, torch.float8_e5m2, torch.float8_e4m3fn)
        held[name] = x.contiguous().view(draw.choice(dtypes))
    elif kind == "reshape":
        held[name] = draw.choice(
            [x.flatten(), x.mT.contiguous() if x.ndim > 1 else x[None], x[None]]
        )
    elif kind == "delete":
        del held[name]
    elif kind == "scale":
        wide = held[scale].float().clone()
        if wide.numel():
            wide.view(-1)[draw.randrange(wide.numel())] = draw.choice(
                [0.0, -0.0, -1.0, float("nan"), float("inf"), 1e-45, 3e38, 3.0]
            )
        held[scale] = wide.to(
            draw.choice([torch.float32, torch.float16, torch.bfloat16, torch.float8_e8m0fnu])
        )
    else:
        held[f"{scale}_inv" if kind == "two" else "more"] = held[scale].clone()
    save_file(held, file, metadata={"format": "pt"})
    forge(folder)
    return True


# Files


def file_operation(draw: random.Random, folder: Path) -> bool:
    names = sorted(os.listdir(folder))
    if not names:
        return False
    file, other = folder / draw.choice(names), folder / draw.choice(names)
    kind = draw.choice(
        ["delete", "rename", "copy", "swap", "folder", "link", "loop", "pipe", "empty", "other"]
    )
    if not file.is_file() or not other.is_file():
        return False
    data, others = file.read_bytes(), other.read_bytes()
    if kind in ("copy", "rename"):
        places = {"copy": ["more.safetensors"], "rename": [f"{file.name}x", INDEX]}[kind]
        place = folder / draw.choice(["model.safetensors", *places])
        if os.path.lexists(place) and not place.is_file():
            return False  # a pipe, which would wait for a reader for ever, or a folder
        if kind == "copy":
            place.write_bytes(data)
        else:
            file.rename(place)
    elif kind == "empty":
        file.write_bytes(b"")
    elif kind == "other":
        file.write_bytes(others)
    elif kind == "swap":
        file.write_bytes(others)
        other.write_bytes(data)
    else:
        file.unlink()
        if kind == "folder":
            file.mkdir()
        elif kind in ("link", "loop"):
            file.symlink_to(file if kind == "loop" else "gone")
        elif kind == "pipe":
            os.mkfifo(file)
    return True


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
        # JSON that is nested deeply already is too deep for what changes it
        with contextlib.suppress(RecursionError):
            if mutation(draw, target):
                used.add(mutation)
    return used
