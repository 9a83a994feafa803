"""The page of ``evidence.py``: paired differences with their intervals, and curves."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean, stdev
from typing import Any, NamedTuple

from matplotlib.figure import Figure

from common.curves import AFTER, EVERY, read_results, steps_of
from common.records import smooth
from long_run_report import SMOOTHED, ablation, heldout, page, save

Result = dict[str, Any]

MODELS = {
    "120m": "120M parameters",
    "320m": "320M parameters",
    "experts": "642M, 16 experts",
    "1100m": "1.1B parameters",
}
"""Models of runs in the calm set-up, by the first part of a result's name."""

RECIPES = {
    "bf16_moved": "bf16, weights moved by 1e-6",
    "fp8_128x128": "`Recipe()`",
    "fp8_1x128": "`Recipe.deepseek()`",
    "fp8_power_of_two": '`Recipe(scale="power_of_two", wgrad_input="1x128")`',
    "fp8_high_precision": "`Recipe.accurate()`",
    "fp8_activations_power_of_two": '`Recipe(scale=Scales(activations="power_of_two"))`',
    "fp8_saved": "`Recipe()` in `saved_tensors_in_fp8()`",
}
"""What users call the variants. Chance alone moves a loss as far as the first."""

AGAINST = (
    ("fp8_128x128", "fp8_1x128"),
    ("fp8_activations_power_of_two", "fp8_128x128"),
    ("fp8_saved", "fp8_128x128"),
)
"""FP8 variants that the page compares with each other."""

T_975 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)
"""Student's t for a two-sided interval of 95%, by degrees of freedom from 1 on."""

WINDOW = 200
"""Steps of a mean by which two runs are compared on the way."""


class Difference(NamedTuple):
    """Differences of a variant to another, in per cent, by seed."""

    variant: str
    by_seed: Mapping[int, float]

    @property
    def mean(self) -> float:
        return mean(self.by_seed.values())

    @property
    def half_width(self) -> float:
        """Half of the 95% interval of the mean (Student's t); infinite for one seed."""
        count = len(self.by_seed)
        if count < 2:
            return math.inf
        return T_975[count - 2] * stdev(self.by_seed.values()) / math.sqrt(count)


def differences(
    results: Mapping[str, Result], model: str, variants: Sequence[str], base: str = "bf16"
) -> list[Difference]:
    """Return the differences of the last held-out losses to ``base``, paired by seed."""
    found = []
    for variant in variants:
        if variant == base:
            continue
        pairs = {
            seed: (results[name], results[reference])
            for seed in range(len(T_975) + 1)
            if (name := f"{model}_{variant}_{seed}") in results
            and (reference := f"{model}_{base}_{seed}") in results
        }
        by_seed = {seed: 100 * (heldout(a) / heldout(b) - 1) for seed, (a, b) in pairs.items()}
        if by_seed:
            found.append(Difference(variant, by_seed))
    return found


def spread(runs: Sequence[Result]) -> tuple[float, float, float]:
    """Return how far runs part that differ by rounding, and how large gradients become.

    Returns:
        The spread of the last held-out losses and the largest difference of means of
        :data:`WINDOW` steps, both in per cent; the largest gradient norm after :data:`AFTER` steps,
        as a multiple of the median.
    """
    last = [heldout(run) for run in runs]
    points = WINDOW // EVERY
    starts = range(len(runs[0]["loss"]) - points + 1)
    means = [[mean(run["loss"][at : at + points]) for run in runs] for at in starts]
    parted = max(max(each) / min(each) - 1 for each in means)
    largest = max(max(run["norm"][AFTER // EVERY :]) / run["median_norm"] for run in runs)
    return 100 * (max(last) / min(last) - 1), 100 * parted, largest


def interval(difference: Difference) -> str:
    """Return the mean and its interval in words."""
    seeds = len(difference.by_seed)
    if seeds < 2:
        return f"{difference.mean:+.2f}%, one seed"
    return f"{difference.mean:+.2f}% ± {difference.half_width:.2f}%, {seeds} seeds"


def label_of(variant: str) -> str:
    """Return the name of a variant in figures."""
    return RECIPES.get(variant, variant).replace("`", "")


def answer(found: Mapping[str, Sequence[Difference]]) -> list[str]:
    """Return the table of all recipes and sizes."""
    sizes = [model for model in MODELS if model in found]
    lines = [
        f"| held-out loss over bf16's | {' | '.join(MODELS[size] for size in sizes)} |",
        "|---" * (1 + len(sizes)) + "|",
    ]
    by_size = {size: {each.variant: each for each in found[size]} for size in sizes}
    for variant, name in RECIPES.items():
        of_size = [by_size[size].get(variant) for size in sizes]
        if any(of_size):
            cells = ["–" if each is None else interval(each) for each in of_size]
            lines.append(f"| {name} | {' | '.join(cells)} |")
    return lines


class EqualTime(NamedTuple):
    """A run and the bf16 run of its seed on the same card, compared when the faster one ends.

    Attributes:
        card: the GPU.
        bf16: tokens/s.
        speed: tokens/s of the run.
        difference: of the mean training losses of the last :data:`WINDOW` steps, in per cent.
    """

    card: str
    bf16: float
    speed: float
    difference: float


def at_equal_time(results: Mapping[str, Result], model: str, variant: str) -> list[EqualTime]:
    """Return the runs of a variant that were timed on the card of their bf16 run."""
    found = []
    for seed in range(len(T_975) + 1):
        run, bf16 = (results.get(f"{model}_{each}_{seed}") for each in (variant, "bf16"))
        if run is None or bf16 is None or run["device"] != bf16["device"]:
            continue
        bf16_speed, speed = bf16["tokens_per_second"], run["tokens_per_second"]
        if None in (bf16_speed, speed):
            continue
        # each run comes as far as its speed allows until the faster one ends
        fastest = max(bf16_speed, speed)
        bf16_loss = last_loss(bf16["loss"], bf16_speed / fastest)
        difference = 100 * (last_loss(run["loss"], speed / fastest) / bf16_loss - 1)
        found.append(EqualTime(run["device"], bf16_speed, speed, difference))
    return found


def last_loss(loss: Sequence[float], share: float) -> float:
    """Return the mean of the last :data:`WINDOW` steps of this share of a condensed curve."""
    end = round(len(loss) * share)
    return mean(loss[max(0, end - WINDOW // EVERY) : end])


def equal_time_table(results: Mapping[str, Result], variant: str) -> list[str]:
    """Return the table of models and cards."""
    lines = [
        "| | card | bf16, tokens/s | FP8, tokens/s | | training loss over bf16's at that time |",
        "|---|---|---|---|---|---|",
    ]
    for model, name in MODELS.items():
        runs = at_equal_time(results, model, variant)
        for card in dict.fromkeys(run.card for run in runs):
            some = [run for run in runs if run.card == card]
            bf16, speed, difference = (
                mean(getattr(run, what) for run in some) for what in ("bf16", "speed", "difference")
            )
            cells = f"{bf16:,.0f} | {speed:,.0f} | {speed / bf16:.2f}x | {difference:+.1f}%"
            lines.append(f"| {name}, seeds: {len(some)} | {card} | {cells} |")
    return lines


def draw_time(results: Mapping[str, Result], model: str, variant: str, path: Path) -> None:
    """Draw the training losses of bf16 and a variant against time, where both were timed."""
    figure = Figure(figsize=(9, 4), layout="constrained")
    (axes,) = figure.subplots(1, 1, squeeze=False)[0]
    for each in ("bf16", variant):
        run = results[f"{model}_{each}_0"]
        a_step = run["tokens_a_step"] / run["tokens_per_second"] / 60
        minutes = [a_step * step for step in steps_of(run)]
        losses = smooth(run["loss"], SMOOTHED // EVERY)
        axes.plot(minutes, losses, COLOURS[each], linewidth=0.9, label=label_of(each))
    axes.set_xlabel(f"minutes on one {results[f'{model}_bf16_0']['device']}")
    axes.set_ylabel(f"training loss, mean of {SMOOTHED} steps")
    axes.legend()
    save(figure, path)


COLOURS = {
    "bf16": "#666666",
    "bf16_moved": "#bbbbbb",
    "fp8_128x128": "#ee6677",
    "fp8_1x128": "#4477aa",
    "fp8_power_of_two": "#ccbb44",
    "fp8_high_precision": "#228833",
    "fp8_activations_power_of_two": "#66ccee",
    "fp8_saved": "#aa3377",
}
"""Red is the default of the library, in every figure."""


def draw_differences(found: Mapping[str, Sequence[Difference]], path: Path) -> None:
    """Draw every paired difference, the means and their intervals."""
    figure = Figure(figsize=(11, 1 + 0.4 * sum(map(len, found.values()))), layout="constrained")
    (axes,) = figure.subplots(1, 1, squeeze=False)[0]
    labels: list[str] = []
    for model, each in found.items():
        for difference in each:
            y = -len(labels)
            labels.append(f"{label_of(difference.variant)}, {MODELS[model]}")
            places = [y] * len(difference.by_seed)
            colour = COLOURS.get(difference.variant, "black")
            axes.plot([*difference.by_seed.values()], places, "o", color=colour, alpha=0.6)
            if len(difference.by_seed) > 1:
                axes.errorbar(difference.mean, y, xerr=difference.half_width, fmt="k|", capsize=4)
    axes.axvline(0, color="gray", linewidth=0.8)
    axes.set_yticks([-i for i in range(len(labels))], labels)
    axes.set_xlabel("held-out loss over bf16's, %: seeds, mean, 95% interval")
    save(figure, path)


def draw_curves(results: Mapping[str, Result], model: str, path: Path) -> None:
    """Draw the training loss of the runs of one model, and the difference to bf16."""
    figure = Figure(figsize=(9, 7), layout="constrained")
    losses, parts = figure.subplots(2, 1, sharex=True)
    named: set[str] = set()
    for name, result in results.items():
        kind, _, rest = name.partition("_")
        variant, _, seed = rest.rpartition("_")
        reference = results.get(f"{model}_bf16_{seed}")
        if kind != model or reference is None:
            continue
        colour = COLOURS.get(variant, "black")
        steps = steps_of(result)
        losses.plot(steps, smooth(result["loss"], SMOOTHED // EVERY), colour, linewidth=0.6)
        if reference is not result:
            pairs = zip(result["loss"], reference["loss"], strict=True)
            difference = smooth([100 * (a / b - 1) for a, b in pairs], SMOOTHED // EVERY)
            label = None if variant in named else label_of(variant)
            named.add(variant)
            parts.plot(steps, difference, colour, label=label, linewidth=0.8)
    parts.legend()
    losses.set_ylabel(f"training loss, mean of {SMOOTHED} steps")
    parts.axhline(0, color="gray", linewidth=0.8)
    parts.set_ylabel("against bf16 of the same seed, %")
    parts.set_xlabel("step")
    save(figure, path)


def set_up_row(
    name: str, size: str, options: str, results: Mapping[str, Result], prefix: str
) -> str:
    """Return one row of the table of set-ups, whose runs are named ``prefix``."""
    moved = [f"{prefix}_bf16_0", f"{prefix}_bf16_moved_0", f"{prefix}_bf16_moved_more_0"]
    cells = ["–", "–"]
    runs = [results[run] for run in moved if run in results]
    last, parted, largest = spread(runs)
    if len(runs) > 1:
        cells = [f"{last:.2f}%", f"{parted:.2f}%"]
    fp8 = differences(results, prefix, ("fp8_1x128",))
    cells += [f"{largest:.1f}x", interval(fp8[0]) if fp8 else "–"]
    return f"| {name} | {MODELS[size]} | `{options}` | {' | '.join(cells)} |"


def write(
    folder: Path,
    out: Path,
    tried: Mapping[str, tuple[str, str]],
    chosen: Mapping[str, str],
    variants: Sequence[str],
    queue: Sequence[str],
) -> None:
    """Write the page ``out`` and its figures from the results in ``folder``.

    Args:
        tried: The sizes and options of the set-ups that were not chosen, by name.
        chosen: The options of those that were, by size.
        variants: The variants to compare, bf16 first.
        queue: The names of all runs, also of those without a result.
    """
    results = read_results(folder)
    left = ", ".join(name for name in queue if name not in results)
    of_queue = ["", f"Runs that are left: {left}."] if left else []
    plots = out.parent / "plots"
    plots.mkdir(parents=True, exist_ok=True)
    found = {model: each for model in MODELS if (each := differences(results, model, variants))}
    largest, default = [*found][-1], "fp8_128x128"
    draw_differences(found, plots / "evidence_differences.svg")
    lines = [
        "# Evidence",
        "",
        "Does a model that trains in FP8 end where it would in bf16? Nearly: with the defaults,",
        "`Recipe()`, its held-out loss ends about 0.1 to 0.2% higher.",
        "",
        *answer(found),
        "",
        "Means of the seeds with their 95% interval (Student's t). Each run is compared with the",
        "bf16 run of the same seed: the same initial weights, the same text in the same order.",
        "Models of 120M read 25M tokens, the others 100M. These are small models and short runs;",
        "we have no larger or longer ones.",
        "",
        "![Paired differences and their intervals](plots/evidence_differences.svg)",
        "",
        f"{MODELS[largest]}, training losses and their differences to bf16, means of {SMOOTHED}",
        "steps ([the other models](#curves)):",
        "",
        f"![Curves](plots/evidence_{largest}.svg)",
        "",
        "## The rule",
        "",
        "It was fixed before the runs. A run is compared by its last held-out loss with the bf16",
        "run of the same seed; a variant by the mean of its seeds, with the 95% interval of that",
        'mean. `wgrad_input="128x128"` becomes the default if, at 320M parameters, the upper end',
        "of its interval is at most +0.30%, and its mean is within 0.15% of the default's. The",
        "default was `Recipe.deepseek()` then. The rule held: the default changed on 2026-11-26.",
        "",
        "`python examples/evidence.py list` shows the runs that are made and those that are left,",
        "`make` makes them, `report` writes this page from their results. The runs of 1.1B",
        "parameters read more text: `kernel_text.py --tokens 100500000`.",
        *of_queue,
        "",
        "## A calm set-up",
        "",
        "How much of a difference is chance? For each set-up the table compares two or three bf16",
        "runs whose initial weights differ by 1e-6 of themselves. *Spread* is the range of their",
        f"last losses, *parted by* the largest difference of two means of {WINDOW} steps. *Largest",
        f"norm* is the largest gradient norm after step {AFTER}, over the median. In most of these",
        "set-ups the interval of FP8's difference to bf16 contains 0 (FP8 is `Recipe.deepseek()`",
        "here). More files in a step help most: 16,384 tokens in windows of 2,048 come from 8",
        "files, in windows of 256 from 64. The model then learns faster, too.",
        "",
        "| set-up | model | arguments | spread | parted by | largest norm | FP8 over bf16 |",
        "|---|---|---|---|---|---|---|",
        *(set_up_row(name, *each, results, f"tried_{name}") for name, each in tried.items()),
        *(
            set_up_row("**chosen**", size, options, results, size)
            for size, options in chosen.items()
            if f"{size}_bf16_0" in results
        ),
        "",
        "## Curves",
        "",
        f"Training losses, and their differences to bf16, means of {SMOOTHED} steps. Last held-out",
        "losses of FP8 variants relative to each other, paired by seed:",
        "",
    ]
    for model in found:
        for variant, base in AGAINST:
            for direct in differences(results, model, (variant,), base):
                names = f"{RECIPES[variant]} over {RECIPES[base]}"
                lines.append(f"- {MODELS[model]}, {names}: {interval(direct)}")
    for model in found:
        draw_curves(results, model, plots / f"evidence_{model}.svg")
        if model != largest:
            lines += ["", f"{MODELS[model]}:", "", f"![Curves](plots/evidence_{model}.svg)"]
    draw_time(results, largest, default, plots / "evidence_time.svg")
    lines += [
        "",
        "## Loss at equal time",
        "",
        "Pairs of one seed on cards of one type, without time for evaluation, compared when the",
        "faster run of a pair ends: means of its seeds. The slower one has read less by then, and",
        f"its learning rate has not come down; losses are of the last {WINDOW} steps.",
        "`--convert-small` converts all layers, to compare losses: by default, `convert` leaves",
        "the whole model of 120M in bf16, since FP8 is slower at its sizes.",
        "",
        *equal_time_table(results, default),
        "",
        f"{MODELS[largest]}:",
        "",
        "![Training loss against time](plots/evidence_time.svg)",
        "",
    ]
    older = [result for name, result in results.items() if name.startswith(("dense", "moe"))]
    ablations = [result for name, result in results.items() if name.startswith("ablation")]
    text = "\n".join(lines)
    if older:
        text += "\n" + page(older, plots, "## Earlier runs, in a chaotic set-up")
    if ablations:
        text += "\n" + ablation(ablations)
    out.write_text(text)
