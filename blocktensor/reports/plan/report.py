"""Report a plan: memory and time by part in bf16 and in FP8, and changes that make it fit."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ...text_table import Report, Table
from .setup import CAPACITY, USABLE, Setup

_GIB = 2**30
_WIDTH = 80


@dataclass(frozen=True)
class Part:
    """A part of a sum: bytes of memory, or microseconds of a step."""

    name: str
    value: float


@dataclass(frozen=True)
class Estimate:
    """Predicted memory and time of one GPU, in bf16 or in FP8.

    Attributes:
        moment: what runs when most memory is allocated.
        memory: bytes at that moment, by part.
        time: microseconds of a step, by part.
        tokens: of a step of one GPU.
        flops: of a microbatch of one GPU, forward + backward.
        fp8_flops: the part of them in FP8.
    """

    moment: str
    memory: tuple[Part, ...]
    time: tuple[Part, ...]
    tokens: int
    flops: float
    fp8_flops: float

    @property
    def peak_bytes(self) -> float:
        """The most bytes that are allocated at once."""
        return sum(part.value for part in self.memory)

    @property
    def step_us(self) -> float:
        """Microseconds of a step."""
        return sum(part.value for part in self.time)

    @property
    def tokens_per_second(self) -> float:
        """Tokens of one GPU in a second."""
        return self.tokens / self.step_us * 1e6

    def fits(self, card: str) -> bool:
        """Return True if the memory fits on a card, of which a part is kept free."""
        return self.peak_bytes <= USABLE * CAPACITY[card]


@dataclass(frozen=True)
class Alternative:
    """Another setup that fits.

    Attributes:
        change: what to change, in words.
        fp8: its estimate in FP8.
    """

    change: str
    fp8: Estimate


@dataclass(frozen=True)
class TrainingPlan(Report):
    """The memory and the speed of a training run; ``print`` shows tables.

    Attributes:
        model: its name.
        parameters: values of all parameters.
        setup: the run.
        bf16, fp8: the estimates.
        longest_bf16, longest_fp8: the most tokens of a sequence, a multiple of 1,024, with which
            this many sequences fit; 0 if none does.
        alternatives: changes that make it fit; empty if it fits in FP8, or if none does.
        notes: what the estimates leave out.
    """

    model: str
    parameters: int
    setup: Setup
    bf16: Estimate
    fp8: Estimate
    longest_bf16: int = 0
    longest_fp8: int = 0
    alternatives: tuple[Alternative, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def fits(self) -> bool:
        """True if the run fits in FP8."""
        return self.fp8.fits(self.setup.card)

    @property
    def speedup(self) -> float:
        """The time of a step in bf16 over its time in FP8."""
        return self.bf16.step_us / self.fp8.step_us

    @property
    def fp8_share(self) -> float:
        """The share of FLOPs in FP8."""
        return self.fp8.fp8_flops / self.fp8.flops

    def _parts(self) -> list[Table | str]:
        parts: list[Table | str] = [*self._title(), "", self._memory(), "", self._time(), ""]
        parts.append(
            f"{100 * self.fp8_share:.0f}% of the FLOPs run in FP8; a step is {self.speedup:.2f}x "
            f"as fast as in bf16"
        )
        bf16 = "" if self.bf16.moment == self.fp8.moment else f" (bf16: {self.bf16.moment})"
        parts.append(f"most memory is allocated in {self.fp8.moment}{bf16}")
        if self.fits:
            parts.append(f"fits: the peak is below {100 * USABLE:.0f}% of the card's memory")
        elif self.alternatives:
            parts += ["does not fit in FP8; what would fit:", "", self._alternatives()]
        else:
            parts.append("does not fit in FP8, and no change that was tried makes it fit")
        return [*parts, *(textwrap.fill(f"note: {note}", _WIDTH) for note in self.notes)]

    def _title(self) -> list[str]:
        setup = self.setup
        how = {"fsdp2": "FSDP2", "none": "one GPU" if setup.gpus == 1 else "DDP"}[setup.sharding]
        how += " and expert parallelism" if setup.expert_parallel else ""
        lora = f", LoRA of rank {setup.lora} on a frozen base" if setup.lora is not None else ""
        lora += ", experts too" if setup.lora_experts else ""
        times = f", {setup.microbatches} microbatches" if setup.microbatches > 1 else ""
        return [
            f"{self.model}: {self.parameters / 1e9:.2f}B parameters{lora}",
            f"{setup.gpus} x {setup.card}, {how}: "
            f"{setup.batch} x {setup.sequence} tokens a GPU{times}",
            ", ".join((f"{setup.optimizer}, masters {setup.master}", *_chosen(setup))),
        ]

    def _memory(self) -> Table:
        capacity = CAPACITY[self.setup.card]
        rows = _rows(self.bf16.memory, self.fp8.memory, lambda x: f"{x / _GIB:.2f}")
        peaks = [x.peak_bytes for x in (self.bf16, self.fp8)]
        rows.append(("peak", *(f"{x / _GIB:.2f}" for x in peaks)))
        share = f"of {self.setup.card}'s {capacity / _GIB:.1f} GiB"
        rows.append((share, *(f"{100 * x / capacity:.0f}%" for x in peaks)))
        longest = (self.longest_bf16, self.longest_fp8)
        rows.append(("longest sequence", *(f"{x:,}" if x else "none" for x in longest)))
        return Table(("memory of a GPU, GiB", "bf16", "FP8"), rows)

    def _time(self) -> Table:
        rows = _rows(self.bf16.time, self.fp8.time, lambda x: f"{x / 1e3:.1f}")
        both = self.bf16, self.fp8
        rows.append(("step", *(f"{x.step_us / 1e3:.1f}" for x in both)))
        rows.append(("tokens/s a GPU", *(f"{x.tokens_per_second:,.0f}" for x in both)))
        return Table(("time of a step, ms", "bf16", "FP8"), rows)

    def _alternatives(self) -> Table:
        rows = [
            (x.change, f"{x.fp8.peak_bytes / _GIB:.1f}", f"{x.fp8.tokens_per_second:,.0f}")
            for x in self.alternatives
        ]
        return Table(("change", "peak, GiB", "tokens/s a GPU"), rows)


def _chosen(setup: Setup) -> list[str]:
    """Return the settings that are not the default, in words."""
    chosen = {
        "fuse": setup.fuse,
        "share_inputs": setup.share_inputs,
        "saved tensors in FP8": setup.saved_tensors_in_fp8,
        "head in FP8": setup.convert_head,
        "loss in chunks": setup.loss == "chunks",
        "checkpointing": setup.checkpointing == "blocks",
        f"compiled {setup.compile}": setup.compile != "none",
        "gathered in bf16": setup.gather == "bf16",
        "gathered once": not setup.reshard,
    }
    return [name for name, holds in chosen.items() if holds]


def _rows(
    bf16: Sequence[Part], fp8: Sequence[Part], text: Callable[[float], str]
) -> list[tuple[str, ...]]:
    """Return a row for each part that is not zero in both."""
    pairs = zip(bf16, fp8, strict=True)
    return [(a.name, text(a.value), text(b.value)) for a, b in pairs if a.value or b.value]
