"""The runs of ``long_run.py`` that decide: list them, make those that are left, report.

    python examples/evidence.py list
    python examples/evidence.py make runs/kernel_text --group 320m --stop-after 500
    python examples/evidence.py report --out docs/evidence.md

``make`` makes the runs that have no result yet, one or more on each GPU at a time, each in its own
process.
Results are in two tables in benchmarks/results/evidence (common/curves.py). A run that was stopped
goes on from ``--work``.

The rule was fixed before the runs. A run is compared by its last held-out loss with the bf16 run of
the same seed, in per cent; a variant by the mean of its seeds and the 95% interval of that mean
(Student's t). ``wgrad_input="128x128"`` becomes the default if, at 320M parameters, the upper end
of its interval is at most +0.30%, and its mean is within 0.15% of the default's.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from common.curves import add_result, read_results

RESULTS = Path(__file__).parents[1] / "benchmarks" / "results" / "evidence"

SHORTEST = 80
"""Seconds below which no run begins."""

SMALL = "--dim 1024 --layers 7 --heads 8 --steps 1500 --evaluate-every 750 --convert-small"
"""120M parameters, 24.6M tokens."""

LARGE = "--dim 2048 --layers 5 --heads 16 --steps 3000 --evaluate-every 500 --convert-small"
"""320M parameters, 98.3M tokens."""

EXPERTS = (
    "--dim 2048 --layers 2 --heads 16 --experts 16 --steps 3000 --evaluate-every 500 "
    "--convert-small"
)
"""642M parameters, 98.3M tokens."""

LARGEST = "--dim 2048 --layers 20 --heads 16 --steps 3060 --evaluate-every 510 --convert-small"
"""1.1B parameters, 100.3M tokens (``kernel_text.py --tokens 100500000``)."""

SIZES = {"120m": SMALL, "320m": LARGE, "experts": EXPERTS, "1100m": LARGEST}

CALM = {
    "120m": "--batch 64 --seq 256 --warmup 300 --embedding-std 1 --qk-norm --lr 6e-4",
    "320m": "--batch 128 --seq 256 --warmup 300 --embedding-std 1 --qk-norm --lr 3e-4",
    "experts": "--batch 128 --seq 256 --warmup 300 --embedding-std 1 --qk-norm --lr 3e-4",
    "1100m": "--batch 128 --seq 256 --warmup 300 --embedding-std 1 --qk-norm --lr 3e-4",
}
"""The set-ups that were chosen. Windows of 256 tokens bring eight times as many files into a step
as windows of 2048 do."""

TRIED = {
    "warmup": ("120m", "--batch 8 --warmup 300"),
    "embedding": ("120m", "--batch 8 --warmup 300 --embedding-std 1"),
    "qk": ("120m", "--batch 8 --warmup 300 --embedding-std 1 --qk-norm"),
    "slow": ("120m", "--batch 8 --warmup 300 --embedding-std 1 --qk-norm --lr 3e-4"),
    "between": ("120m", "--batch 8 --warmup 300 --embedding-std 1 --qk-norm --lr 4.5e-4"),
    "long_warmup": ("120m", "--batch 8 --warmup 500 --embedding-std 1 --qk-norm"),
    "smear": ("120m", "--batch 8 --warmup 300 --embedding-std 1 --qk-norm --smear"),
    "smear_fast": ("120m", "--batch 8 --warmup 300 --embedding-std 1 --qk-norm --smear --lr 1e-3"),
    "seq512": ("120m", "--batch 32 --seq 512 --warmup 300 --embedding-std 1 --qk-norm"),
    "fast": ("320m", "--batch 128 --seq 256 --warmup 300 --embedding-std 1 --qk-norm --lr 6e-4"),
}
"""Set-ups that were tried before, each with its size; where no others stand, with --lr 6e-4 and
windows of 2048 tokens. See docs/evidence.md."""

VARIANTS = {
    "bf16": "--variant bf16",
    "bf16_moved": "--variant bf16 --move 1e-6",
    "fp8_1x128": "--variant 'fp8, wgrad_input=1x128'",
    "fp8_128x128": "--variant 'fp8, wgrad_input=128x128'",
    "fp8_power_of_two": "--variant 'fp8, scale=power_of_two, wgrad_input=1x128'",
    "fp8_high_precision": "--variant 'fp8, wgrad_input=high_precision'",
    "fp8_activations_power_of_two": "--variant 'fp8, activations in powers of two'",
    "fp8_saved": "--variant 'fp8, wgrad_input=128x128' --saved-in-fp8",
}

VARIANTS_TRIED = (
    "bf16",
    "bf16_moved",
    "fp8_1x128",
    "fp8_128x128",
    "fp8_power_of_two",
    "fp8_high_precision",
)

SEEDS = {
    "120m": dict.fromkeys(VARIANTS, 8) | {"fp8_activations_power_of_two": 4, "fp8_saved": 4},
    "320m": {
        "bf16": 4,
        "fp8_1x128": 4,
        "fp8_128x128": 4,
        "bf16_moved": 2,
        "fp8_power_of_two": 2,
        "fp8_saved": 4,
    },
    "experts": dict.fromkeys(("bf16", "fp8_1x128", "fp8_128x128"), 6),
    "1100m": dict.fromkeys(("bf16", "fp8_128x128"), 4),
}
"""How many seeds of each variant run at each size.

Experts part more than dense models do: differences of 5 and 6 seeds have standard deviations of
0.10% and 0.13%, of 4 seeds at 1.1B one of 0.05%.
"""


@dataclass(frozen=True)
class Run:
    """One run: its name, its group, and its arguments."""

    name: str
    group: str
    arguments: tuple[str, ...]


def queue() -> list[Run]:
    """Return all runs in the order in which they are made."""
    moves = [("", "0"), ("_moved", "1e-6"), ("_moved_more", "2e-6")]
    pairs = ("bf16", "fp8_1x128")
    tried = [
        (name, f"bf16{suffix}", 0, f"--move {move}")
        for name in ("warmup", "embedding", "qk", "slow", "between")
        for suffix, move in moves
    ]
    tried += [
        (name, variant, seed, f"{VARIANTS[variant]} --seed {seed}")
        for name, variants, seeds in [
            ("between", VARIANTS_TRIED, 4),
            ("long_warmup", pairs, 2),
            ("smear", pairs, 2),
            ("smear_fast", pairs, 2),
            ("seq512", pairs, 2),
            ("fast", ("bf16", "bf16_moved", "fp8_1x128", "fp8_128x128"), 1),
        ]
        for seed in range(seeds)
        for variant in variants
    ]
    runs = [
        run(f"tried_{name}_{variant}_{seed}", "tried", SIZES[size], options, own)
        for name, variant, seed, own in tried
        for size, options in [TRIED[name]]
    ]
    runs.append(run("120m_bf16_moved_more_0", "120m", SMALL, CALM["120m"], "--move 2e-6"))
    runs += [
        run(
            f"{size}_{variant}_{seed}",
            size,
            SIZES[size],
            CALM[size],
            VARIANTS[variant],
            f"--seed {seed}",
        )
        for size, counts in SEEDS.items()
        for seed in range(max(counts.values()))
        for variant, count in counts.items()
        if seed < count
    ]
    return list({run.name: run for run in runs}.values())


def chosen(group: str | None, names: Sequence[str] | None) -> list[Run]:
    """Return the runs of a group, or of these names in this order; all if None is given."""
    runs = {run.name: run for run in queue() if group in (None, run.group)}
    unknown = [name for name in names or () if name not in runs]
    if unknown:
        sys.exit(f"evidence.py: error: no run {unknown[0]!r}: `evidence.py list` shows all names")
    return [runs[name] for name in (runs if names is None else names)]


def run(name: str, group: str, *options: str) -> Run:
    """Return the run with these options of long_run.py."""
    return Run(name, group, tuple(shlex.split(" ".join(options))))


def command(run: Run, data: Path, work: Path, stop_after: float) -> list[str]:
    """Return the command of a run, or of the next part of it."""
    script = str(Path(__file__).with_name("long_run.py"))
    where = ["--out", str(work / run.name), "--stop-after", f"{stop_after:.0f}"]
    return [sys.executable, script, str(data), *run.arguments, "--save-every", "100000", *where]


def make(
    runs: Sequence[Run], data: Path, work: Path, devices: int, until: float, at_once: int = 1
) -> None:
    """Make ``runs`` until the clock shows ``until``, ``at_once`` of them on each device."""
    waiting, running = list(runs), dict[tuple[int, int], tuple[Run, subprocess.Popen[bytes]]]()
    work.mkdir(parents=True, exist_ok=True)
    places = [(device, place) for place in range(at_once) for device in range(devices)]
    while waiting or running:
        for place in places:
            left = until - time.monotonic()
            if place not in running and waiting and left > SHORTEST:
                run = waiting.pop(0)
                log = (work / f"{run.name}.log").open("ab")
                process = subprocess.Popen(
                    command(run, data, work, left - 10),
                    env={
                        **os.environ,
                        "CUDA_VISIBLE_DEVICES": str(place[0]),
                        "OMP_NUM_THREADS": "8",  # more of them wait for each other
                    },
                    stdout=log,
                    stderr=subprocess.STDOUT,
                )
                running[place] = run, process
            elif place in running and running[place][1].poll() is not None:
                run, process = running.pop(place)
                collect(run, work, process.returncode, is_timed=at_once == 1)
        if waiting and not running and until - time.monotonic() <= SHORTEST:
            break
        time.sleep(0.2)
    print(f"{len(waiting)} runs are left")


def collect(run: Run, work: Path, status: int, is_timed: bool = True) -> None:
    """Keep the result of a run that is whole; without its speed if it shared the GPU."""
    made, log = work / run.name / "result.json", work / f"{run.name}.log"
    last = log.read_text().strip().splitlines()[-1:] or [""]
    print(f"{run.name}: exit {status}; {last[0]}", flush=True)
    steps = int(run.arguments[run.arguments.index("--steps") + 1])
    if made.exists() and f"step {steps}:" in last[0]:
        result = json.loads(made.read_text())
        if not is_timed:
            result["tokens_per_second"] = None
        add_result(RESULTS, run.name, result)


def main(argv: Sequence[str] | None = None) -> None:
    """List the runs, make them, or write the page."""
    parser = argparse.ArgumentParser(
        prog="evidence.py",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    verbs = parser.add_subparsers(dest="verb", required=True)
    verbs.add_parser("list", help="runs that are done, and runs that are left")
    making = verbs.add_parser("make", help="make the runs that are left")
    making.add_argument("data", type=Path, help="folder that kernel_text.py has written")
    making.add_argument("--group", help="only this group")
    making.add_argument("--runs", nargs="+", metavar="NAME", help="only these, in this order")
    making.add_argument(
        "--at-once", type=int, default=1, help="runs on each GPU; more than 1 are not timed"
    )
    making.add_argument("--stop-after", type=float, default=1e9, help="seconds")
    making.add_argument("--work", type=Path, default=Path("runs/evidence"), help="checkpoints")
    reporting = verbs.add_parser("report", help="write the page and its figures from the results")
    reporting.add_argument("--out", type=Path, required=True, help="the page")
    options = parser.parse_args(argv)
    done = read_results(RESULTS)
    if options.verb == "list":
        for run in queue():
            print(f"{'done' if run.name in done else '    '}  {run.name}")
    elif options.verb == "make":
        import torch

        left = [run for run in chosen(options.group, options.runs) if run.name not in done]
        until = time.monotonic() + options.stop_after
        make(left, options.data, options.work, torch.cuda.device_count(), until, options.at_once)
    else:
        from evidence_report import write

        write(RESULTS, options.out, TRIED, CALM, tuple(VARIANTS), [run.name for run in queue()])


if __name__ == "__main__":
    main()
