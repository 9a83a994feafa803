"""Train one small GPT in bf16 and in blockwise FP8, and compare. See ``--help``."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Sequence

from common.needs import needs

INTERRUPTED = 130

ON_A_CPU = """\
No GPU: FP8 is emulated here in plain torch. Compare the losses. Times would say nothing about FP8.
The default run takes 2 to 4 minutes, with --experts 8 up to 10; --steps 50 gives a quick look.
"""

# Read when torch is loaded. The CPU reference of FP8 is thousands of small parallel loops a step;
# threads that spin at the end of each, on cores that others use too, make it 30 times slower.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

try:
    # blocktensor itself needs neither rich nor matplotlib: they come with its `demo` extra.
    with needs("rich", "matplotlib", "blocktensor", install="'.[demo]'"):
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            MofNCompleteColumn,
            Progress,
            TaskID,
            TextColumn,
            TimeRemainingColumn,
        )
        from rich.table import Table

        from common.options import Options, parse_options
        from common.records import Comparison, ignoring_interrupts
        from common.text import Corpus, load_corpus
        from common.training import PRECISIONS, Run, perform, tail
except KeyboardInterrupt:
    # Importing torch takes seconds.
    sys.exit(INTERRUPTED)


def progress_bar(console: Console) -> Progress:
    """A bar with the loss and the speed."""
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(bar_width=None),
        MofNCompleteColumn(),
        TextColumn("loss {task.fields[loss]:.3f}"),
        TextColumn("{task.fields[speed]:,.0f} tokens/s"),
        TimeRemainingColumn(),
        console=console,
        expand=True,
    )


def perform_all(comparison: Comparison, console: Console) -> None:
    """Make every run, saving after each."""
    options = comparison.options
    with progress_bar(console) as progress:
        for seed in range(options.seed, options.seed + options.seeds):
            for precision in PRECISIONS:
                # Listed before it starts: an interrupt in the middle must find it.
                run = Run(seed, precision)
                comparison.runs.append(run)
                prefix = f"seed {seed}, " if options.seeds > 1 else ""
                task = progress.add_task(
                    f"{prefix}{run.label:<4}", total=options.steps, loss=float("nan"), speed=0.0
                )

                def on_progress(done: int, loss: float, speed: float, task: TaskID = task) -> None:
                    progress.update(task, completed=done, loss=loss, speed=speed)

                perform(run, comparison.corpus, options, on_progress)
                comparison.save()


def show(value: float | None, form: str, unit: str = "") -> str:
    return "-" if value is None else f"{value:{form}}{unit}"


def result_table(bf16: Run, fp8: Run, options: Options) -> Table:
    """The final numbers of one pair of runs; on a CPU, where FP8 is emulated, without times."""
    scales = options.recipe.replace("_", " ")
    title = f"seed {bf16.seed}, scales in FP8: {scales}"
    table = Table("", bf16.label, fp8.label, "FP8 against bf16", title=title, title_justify="left")
    for column in table.columns[1:]:
        column.justify = "right"

    def row(name: str, attribute: str, form: str, *, scale: float = 1.0, unit: str = "") -> None:
        values = [getattr(run, attribute) for run in (bf16, fp8)]
        if None in values:
            return
        change = (values[1] / values[0] - 1) * 100
        table.add_row(name, *(show(v * scale, form, unit) for v in values), f"{change:+.2f} %")

    row(f"train loss, mean of last {tail(options.steps)} steps", "train_loss", ".4f")
    row("held-out loss", "heldout_loss", ".4f")
    if options.device.type != "cpu":
        row("time, training", "seconds", ".1f", unit=" s")
        row("tokens/s, first steps aside", "tokens_per_second", ",.0f")
    row("peak memory, training", "peak_memory_bytes", ".2f", scale=2**-30, unit=" GiB")
    table.add_row("GEMM", "torch (bf16)", ", ".join(fp8.backends) or "-", "")
    return table


def seeds_table(comparison: Comparison) -> Table:
    """The differences seed by seed, and whether their mean stands out of their spread."""
    table = Table("seed", "train loss", "held-out loss", title="FP8 against bf16, by seed")
    for column in table.columns[1:]:
        column.justify = "right"
    for difference in comparison.differences():
        percents = (difference.train_percent, difference.heldout_percent)
        table.add_row(str(difference.seed), *(show(value, "+.2f", " %") for value in percents))
    table.add_section()
    summary = comparison.summary()
    for name, form in (("mean", "+.2f"), ("std", ".2f")):
        numbers = (summary[key][name] for key in ("train_percent", "heldout_percent"))
        table.add_row(name, *(show(number, form, " %") for number in numbers))
    return table


def print_results(comparison: Comparison, console: Console) -> None:
    """Tables, what was converted and what ran it, where the files are, and samples."""
    bf16, fp8 = comparison.pairs()[0]
    console.print()
    console.print(result_table(bf16, fp8, comparison.options))
    if comparison.options.seeds > 1:
        console.print(seeds_table(comparison))
    # Plain print: these are laid out already, and rich would wrap them and take [...] for markup.
    for text in (fp8.conversion, fp8.explanation):
        print(f"\n{text}", flush=True)
    print(f"\nwrote {comparison.json_path} and {comparison.png_path}", flush=True)
    for run in (bf16, fp8):
        for number, sample in enumerate(run.samples, start=1):
            console.print()
            console.rule(f"{run.label}, sample {number}", align="left")
            print(sample.strip("\n"), flush=True)


def keep_partial(comparison: Comparison, status: str) -> None:
    """Save what was done before the comparison was cut short, and say what and where."""
    if comparison.status == "complete":
        # Everything is on disk already; only printing was cut short.
        return
    with ignoring_interrupts():
        comparison.status = status
        paths = comparison.save()
        if not paths:
            print(f"\n{status} before the first step: nothing written")
            return
        done = ", ".join(f"{run.label} {len(run.losses)}" for run in comparison.runs)
        print(f"\n{status} with these steps done: {done} of {comparison.options.steps} each")
        print(f"wrote {' and '.join(map(str, paths))}", flush=True)


def read_corpus(options: Options) -> Corpus:
    """The corpus on the device, or the end of the program with the reason."""
    try:
        corpus = load_corpus()
    except ValueError as error:
        sys.exit(f"train_lm.py: error: {error}")
    if options.model.seq >= corpus.heldout.numel():
        sys.exit(
            f"train_lm.py: error: --seq {options.model.seq} is longer than the held-out text "
            f"({corpus.heldout.numel()} bytes)"
        )
    return corpus.to(options.device)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the comparison; returns the exit status."""
    options = parse_options(argv)
    arguments = sys.argv[1:] if argv is None else list(argv)
    command = shlex.join(["python", "examples/train_lm.py", *arguments])
    console = Console()
    comparison = None
    try:
        if options.device.type == "cpu":
            print(ON_A_CPU)
        comparison = Comparison(options, read_corpus(options), command)
        perform_all(comparison, console)
        comparison.status = "complete"
        comparison.save()
        print_results(comparison, console)
    except KeyboardInterrupt:
        if comparison is None:
            print("\ninterrupted before the first step: nothing written")
        else:
            keep_partial(comparison, "interrupted")
        return INTERRUPTED
    except Exception:
        # Out of memory, a full disk, a kernel that failed: the curves so far still tell something.
        if comparison is not None:
            keep_partial(comparison, "failed")
        raise
    return 0


if __name__ == "__main__":
    sys.exit(main())
