"""SHA-256 of headers and tensors: what a file holds is what was written, or it is an error.

SHA-256 runs at 1 to 2 GB/s a core, slower than many disks. So large tensors are hashed in threads,
while others are read or written; hashlib releases the GIL.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import torch
from torch import Tensor

from .on_disk import INDEX, MAX_HEADER, TENSORS, CheckpointError

THREADS = min(8, os.cpu_count() or 1)
"""That hash at the same time: eight are faster than most disks."""

_AHEAD = 2 * THREADS
"""How many large tensors may wait: after too long their pages would have left the memory."""

_SMALL = 1 << 20
"""Bytes up to which the reading thread hashes itself: another gains nothing."""


def header_digest(file: Path) -> str:
    """SHA-256 of a file's header (length, names, dtypes, places); CheckpointError if truncated."""
    with file.open("rb") as opened:
        length = opened.read(8)
        size = int.from_bytes(length, "little")
        fits = len(length) == 8 and size <= min(MAX_HEADER, file.stat().st_size - 8)
        header = opened.read(size) if fits else b""
    if not fits or len(header) < size:
        raise CheckpointError(f"{file}: truncated: it ends before its header does")
    return hashlib.sha256(length + header).hexdigest()


def tensor_digest(x: Tensor) -> str:
    """SHA-256 of dtype, shape and bytes of a contiguous tensor on the CPU, which is not copied.

    The dtype and the shape come first, as in ``"torch.bfloat16 [200, 300]"``: the same bytes have
    other values in another dtype.
    """
    digest = hashlib.sha256(f"{x.dtype} {list(x.shape)}".encode())
    digest.update(x.view(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


Check = Callable[[str, Path, str, Tensor], None]
"""Takes a tensor's name, file, wanted digest, and the tensor as it was read."""


@contextlib.contextmanager
def checking() -> Iterator[Check]:
    """A function that compares tensors with their digests, the large ones in threads.

    A CheckpointError for any of them comes from that function or from the end of the context.
    """
    pool = ThreadPoolExecutor(THREADS)
    pending: deque[Future[None]] = deque()

    def check(name: str, file: Path, digest: str, x: Tensor) -> None:
        if x.nbytes <= _SMALL:
            _check(name, file, digest, x)
            return
        pending.append(pool.submit(_check, name, file, digest, x))
        if len(pending) > _AHEAD:
            pending.popleft().result()

    try:
        yield check
        for comparison in pending:
            comparison.result()
    finally:
        pool.shutdown(cancel_futures=True)


def _check(name: str, file: Path, digest: str, x: Tensor) -> None:
    if tensor_digest(x) != digest:
        raise CheckpointError(
            f"{file}: corrupted: tensor {name!r} is not the one that was written (SHA-256 in "
            f"{INDEX}): copy the file again from where it is intact; without {TENSORS} in the "
            f"index it loads unchecked"
        )
