"""Report a conversion: one entry for every matrix of a model, with the reason."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..ops.checks import is_integer
from ..text_table import Report, Table, collapse, human_bytes

ALREADY = "already converted"
"""The reason of a weight that was in FP8 before the call."""

SMALL, HEAD, NO_FAST_PATH = "small", "lm head", "no fast path"
BY_FILTER, BY_PATTERN = "filter", "skip pattern"
"""Openings of the reasons that an argument of ``convert`` undoes; up to a colon if more follows."""

BY_SIZE = " (skip_small)"
"""The end of the reasons that ``skip_small=False`` undoes."""


@dataclass(frozen=True)
class MinSizes:
    """Sizes below which FP8 is slower: ``[N, K]`` is skipped if N < n, K < k or N K < size.

    A stack of experts ``[E, N, K]`` is skipped if N < expert_n, K < expert_k or N K < expert_size.

    The defaults come from ``python -m benchmarks popular`` and ``linear`` on an H200, 4096 tokens:
    in CUDA graphs, linear layers of these sizes are faster in FP8 (2048 x 2048: 1.20 times as fast
    as in bf16). In eager mode, models whose larger layers have these sizes are faster too, or break
    even on a slow host (docs/experiments/host_time.md). The defaults for experts come from
    ``python -m benchmarks experts``: from these sizes on, a layer's kernels take less time from 512
    tokens an expert on, and its eager steps from 65,536 tokens in all on. A conversion does not
    know the number of tokens.

    Attributes:
        n, k, size: of a linear layer: outputs, inputs, and the elements of its weight.
        expert_n, expert_k, expert_size: the same of one expert of a stack.

    Raises:
        TypeError, ValueError: a size that is no integer, or negative.

    Examples:
        >>> model = nn.Sequential(nn.Linear(256, 512), nn.Linear(512, 64), nn.ReLU())
        >>> sizes = blocktensor.MinSizes(n=128, k=128, size=128 * 128)
        >>> report = blocktensor.convert(model, skip_small=sizes)
        >>> report.entries[1].reason
        'small: N=64 < 128 (skip_small)'
    """

    n: int = 1024
    k: int = 1024
    size: int = 2048 * 2048
    expert_n: int = 256
    expert_k: int = 256
    expert_size: int = 2048 * 768

    def __post_init__(self) -> None:
        for name, size in vars(self).items():
            if not is_integer(size):
                raise TypeError(f"MinSizes({name}={size!r}): expected an integer, 0 or more")
            if size < 0:
                raise ValueError(f"MinSizes({name}={size}): expected 0 or more")

    @classmethod
    def portable(cls) -> MinSizes:
        """Return the sizes of linear layers where only the portable kernels run.

        Measured on an H100, 4096 tokens, in a CUDA graph: 2048 x 4096 runs at 0.98 of bf16's speed,
        7168 x 2048 at 1.07, 4096 x 4096 at 1.10; sizes that are no multiples of 128 are slower
        (10944 x 2048: 0.92).
        """
        return cls(size=3 * 2048 * 2048)

    def experts(self) -> MinSizes:
        """Return the sizes for stacks of experts, which grouped matmuls read."""
        return MinSizes(self.expert_n, self.expert_k, self.expert_size)

    def undercut(self, n: int, k: int) -> list[str]:
        """Describe the sizes of a weight ``[n, k]`` that are too small, with their thresholds."""
        sizes = (("N", n, self.n), ("K", k, self.k), ("N K", n * k, self.size))
        return [f"{what}={found} < {least}" for what, found, least in sizes if found < least]


@dataclass(frozen=True)
class Entry:
    """A parameter of two or more dimensions: ``converted`` or not, with the reason.

    Attributes:
        name: the name of the parameter in the model, without ``.weight``.
        shape: its sizes; empty if it is not initialized yet.
        bytes_before, bytes_after: see :class:`ConversionReport`; 0 if an earlier entry counts them.
        elements: number of values; 0 if an earlier entry has the same parameter.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    converted: bool
    reason: str
    bytes_before: int
    bytes_after: int
    elements: int


@dataclass(frozen=True)
class ConversionReport(Report):
    """The result of :func:`convert`; ``print(report)`` shows it as a table.

    ``bytes_after`` counts, for a trainable weight, the master and the FP8 form with scales (held
    from a forward to its backward), and for a frozen one the FP8 form only.

    Attributes:
        entries: one for each parameter of two or more dimensions and each module that holds it.
        parameters: number of values in all parameters of the model; tied ones count once.
        fast_path: says if the fast kernels run on the GPU, or why not; None without a GPU.
    """

    entries: tuple[Entry, ...]
    parameters: int
    fast_path: str | None = None

    @property
    def converted(self) -> tuple[Entry, ...]:
        """The weights that now run in FP8."""
        return tuple(e for e in self.entries if e.converted)

    @property
    def skipped(self) -> tuple[Entry, ...]:
        """The matrices that do not run in FP8, each with its reason."""
        return tuple(e for e in self.entries if not e.converted)

    @property
    def bytes_before(self) -> int:
        """Parameter bytes of all entries before conversion; tied weights count once."""
        return sum(e.bytes_before for e in self.entries)

    @property
    def bytes_after(self) -> int:
        """Parameter bytes of all entries after conversion; tied weights count once."""
        return sum(e.bytes_after for e in self.entries)

    @property
    def fp8_share(self) -> float:
        """The part of all parameters that runs in FP8, from 0 to 1."""
        return self._share(sum(e.elements for e in self.converted))

    def _share(self, elements: int) -> float:
        return elements / max(self.parameters, 1)

    def _parts(self) -> list[Table | str]:
        rows = collapse(
            (
                (
                    entry.name,
                    "x".join(str(s) for s in entry.shape) or "?",
                    str(entry.dtype).removeprefix("torch."),
                    entry.elements,
                    "fp8" if entry.converted else "-",
                    entry.reason,
                )
                for entry in self.entries
            ),
            add=3,
        )
        shown = [(*row[:3], self._percent(row[3]), *row[4:]) for row in rows]
        already = sum(entry.reason == ALREADY for entry in self.converted)
        summary = (
            f"{len(self.converted) - already} converted, "
            + (f"{already} already in FP8, " if already else "")
            + f"{len(self.skipped)} skipped; "
            f"{self.fp8_share:.1%} of {self.parameters:,} parameters in FP8; "
            f"{human_bytes(self.bytes_before)} before, "
            f"{human_bytes(self.bytes_after)} with FP8 forms"
        )
        header = ("parameter", "shape", "dtype", "share", "runs in", "why")
        return [Table(header, shown), summary, *filter(None, [self.fast_path])]

    def _percent(self, elements: int) -> str:
        if not elements:
            return "-"  # another row counts them
        percent = f"{self._share(elements):.1%}"
        return "<0.1%" if percent == "0.0%" else percent
