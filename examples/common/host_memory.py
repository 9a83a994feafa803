"""The host memory of a process while something runs."""

from __future__ import annotations

import re
import threading
from pathlib import Path
from typing import Any


def anonymous_bytes() -> int:
    """Memory of this process that is no file's; mapped files are the kernel's to drop."""
    found = re.search(r"RssAnon:\s+(\d+) kB", Path("/proc/self/status").read_text())
    return int(found[1]) * 1024 if found else 0


class HostMemory:
    """Within a ``with``, watch how much host memory is taken beyond what was taken before.

    Attributes:
        peak_bytes: the most that was seen, every 5 ms.
    """

    def __init__(self) -> None:
        self.peak_bytes = 0

    def __enter__(self) -> HostMemory:
        self._before = anonymous_bytes()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self._ended.set()
        self._thread.join()
        self._look()

    def _watch(self) -> None:
        while not self._ended.wait(0.005):
            self._look()

    def _look(self) -> None:
        self.peak_bytes = max(self.peak_bytes, anonymous_bytes() - self._before)
