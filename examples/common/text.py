"""Real text that every machine has: the Python sources of the standard library, as bytes."""

from __future__ import annotations

import hashlib
import os
import sysconfig
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

# Tests and installed packages differ from machine to machine; ``encodings`` is code-page tables.
SKIPPED_DIRECTORIES = frozenset(
    {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__", "encodings"}
)

# One file in sixteen is held out.
HELDOUT_ONE_IN = 16

# Closes every file. Python source cannot hold a zero byte, so it means nothing else.
END_OF_FILE = b"\0"


@dataclass(frozen=True)
class Corpus:
    """Two disjoint streams of bytes (uint8, one dimension) and the files they came from."""

    train: Tensor
    heldout: Tensor
    train_files: tuple[str, ...]
    heldout_files: tuple[str, ...]
    digest: str

    def to(self, device: torch.device) -> Corpus:
        """Return the corpus with its bytes on ``device``, where batches are cut."""
        return replace(self, train=self.train.to(device), heldout=self.heldout.to(device))

    def summary(self) -> dict[str, str | int]:
        """Return facts to record with a result: the text depends on the Python version."""
        return {
            "train_files": len(self.train_files),
            "train_bytes": self.train.numel(),
            "heldout_files": len(self.heldout_files),
            "heldout_bytes": self.heldout.numel(),
            "sha256": self.digest,
        }


def is_heldout(name: str) -> bool:
    """Decided by the name alone, so that a file never changes sides when others come or go."""
    return zlib.crc32(name.encode()) % HELDOUT_ONE_IN == 0


def source_files(root: Path) -> list[tuple[str, Path]]:
    """The sources under ``root`` as (posix name, path), sorted by name."""
    found = []
    for folder, subfolders, files in os.walk(root):
        # In place, so that os.walk does not even enter site-packages.
        subfolders[:] = [name for name in subfolders if name not in SKIPPED_DIRECTORIES]
        for path in (Path(folder, file) for file in files if file.endswith(".py")):
            found.append((path.relative_to(root).as_posix(), path))
    return sorted(found)


def load_corpus(root: Path | None = None) -> Corpus:
    """Read the corpus from ``root``, by default the standard library of the running Python."""
    if root is None:
        root = Path(sysconfig.get_path("stdlib"))
    names: dict[bool, list[str]] = {False: [], True: []}
    streams: dict[bool, bytearray] = {False: bytearray(), True: bytearray()}
    for name, path in source_files(root):
        heldout = is_heldout(name)
        names[heldout].append(name)
        streams[heldout] += path.read_bytes() + END_OF_FILE
    if not streams[False] or not streams[True]:
        raise ValueError(f"too few Python sources under {root} to train on and hold some out")
    return Corpus(
        train=torch.frombuffer(streams[False], dtype=torch.uint8),
        heldout=torch.frombuffer(streams[True], dtype=torch.uint8),
        train_files=tuple(names[False]),
        heldout_files=tuple(names[True]),
        digest=hashlib.sha256(streams[False] + streams[True]).hexdigest(),
    )


def _windows(stream: Tensor, starts: Tensor, seq: int) -> tuple[Tensor, Tensor]:
    """Inputs and next-byte targets, both [len(starts), seq], on the stream's device."""
    offsets = torch.arange(seq + 1, device=stream.device)
    window = stream[starts.to(stream.device)[:, None] + offsets].long()
    return window[:, :-1], window[:, 1:]


def random_batches(
    stream: Tensor, *, batch: int, seq: int, seed: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """Endless random windows. The seed alone decides them, whatever the device or the model."""
    random = torch.Generator().manual_seed(seed)
    while True:
        starts = torch.randint(stream.numel() - seq, (batch,), generator=random)
        yield _windows(stream, starts, seq)


def even_batches(
    stream: Tensor, *, batch: int, seq: int, count: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """``count`` batches of windows spread evenly over the stream: the same for every model."""
    starts = torch.linspace(0, stream.numel() - seq - 1, batch * count, dtype=torch.float64).long()
    for chunk in starts.split(batch):
        yield _windows(stream, chunk, seq)
