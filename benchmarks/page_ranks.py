"""Generated parts of the results page about several ranks."""

from __future__ import annotations

from pathlib import Path

from .page_models import SPEEDS, speeds
from .page_parts import Content, source, table, times
from .results import Row
from .summary import select
from .traced import SHOWN

_DRY = "; a dry run is rank 0 of a fake process group: nothing is sent, memory is a real rank's"


def fsdp2(content: Content, page: Path) -> list[str]:
    """Llama under FSDP2: speeds and memory, then where the time of a step goes."""
    rows = content["rows"]
    header = ("", "GPUs", "microbatches", "tokens/s a GPU", "over bf16", "MFU (of bf16's peak)",
              "peak, GiB", "over bf16")  # fmt: skip
    columns = (*SHOWN, "step")
    parts = [
        (r["variant"], *(f"{r[f'{part}_ms']:.1f}" for part in columns))
        for r in rows
        if f"{SHOWN[0]}_ms" in r
    ]
    shown = [
        "",
        "Where the time of a step goes, milliseconds by kinds of kernels. Those of collectives run "
        "beside others, but for the exposed time:",
        "",
        *table(("", *columns), parts),
    ]
    return [
        f"**Llama-shaped training under FSDP2, {rows[0]['parameters'] / 1e9:.1f}B parameters**:",
        "",
        *table(header, [_fsdp2_row(row) for row in rows]),
        *(shown if parts else []),
        "",
        source(content, _DRY),
    ]


def _fsdp2_row(row: Row) -> tuple[object, ...]:
    is_run = row["mode"] == "run"
    speed = (
        f"{row['tokens_per_second_per_gpu']:,.0f}",
        times(row["speed_of_bf16"]),
        f"{row['mfu']:.1%}",
    )
    peak = f"{row['peak_mib'] / 1024:.1f}", times(row["peak_of_bf16"])
    ranks = f"{row['ranks']}" if is_run else f"{row['ranks']}, dry run"
    shown = speed if is_run else ("–",) * len(speed)
    return row["variant"], ranks, row["microbatches"], *shown, *peak


def fsdp2_in_brief(content: Content, page: Path) -> list[str]:
    """Llama under FSDP2: the default, and the fastest run for each number of microbatches."""
    runs = select(content["rows"], {"mode": "run"})
    row = select(runs, {"variant": "fp8", "microbatches": 1})[0]
    parts = [f"{times(row['speed_of_bf16'])} bf16's speed, {times(row['peak_of_bf16'])} its memory"]
    for count in sorted({run["microbatches"] for run in runs}):
        fastest = max(select(runs, {"microbatches": count}), key=lambda run: run["speed_of_bf16"])
        if fastest is row or fastest["variant"] == "bf16":
            continue
        microbatches = f" in {count} microbatches" if count > 1 else ""
        parts.append(
            f"{fastest['variant'].removeprefix('fp8, ')}{microbatches}: "
            f"{times(fastest['speed_of_bf16'])}, {fastest['tokens_per_second_per_gpu']:,.0f} "
            f"tokens/s a GPU"
        )
    return [
        f"Llama-shaped, {row['parameters'] / 1e9:.1f}B parameters, FSDP2 on {row['ranks']} GPUs: "
        f"{'; '.join(parts)} (`{content['environment']['command']}`)."
    ]


def shards(content: Content, page: Path) -> list[str]:
    """Linears of one tensor parallel rank."""
    rows = [(r["model"], r["variant"], *speeds(r)) for r in content["rows"]]
    return [
        f"**Linears of one of 8 tensor parallel ranks**, {content['rows'][0]['tokens']} tokens, "
        f"forward + backward without collectives:",
        "",
        *table(("", "", *SPEEDS), rows),
        "",
        source(content, "; the small linears of 8B are limited by host time"),
    ]


def tensor_parallel(content: Content, page: Path) -> list[str]:
    """A block over several GPUs."""
    parts = ("gathers_us", "gathers_beside_us", "scatters_us", "scatters_beside_us")
    rows = [
        (
            r["variant"],
            r["ms"],
            times(r["speed_of_bf16"]),
            *(f"{r[part]:.0f}" for part in parts),
        )
        for r in content["rows"]
    ]
    header = ("", "ms", "over bf16", "gathers, us", "beside", "reduce-scatters, us", "beside")
    return [
        f"**A Llama-70B block over {content['rows'][0]['ranks']} GPUs**, tensor and sequence "
        f"parallel, forward + backward; beside: while another kernel ran:",
        "",
        *table(header, rows),
        "",
        source(content, "; bf16: torch's parallel styles"),
    ]


def expert_parallel(content: Content, page: Path) -> list[str]:
    """Blocks with experts over several GPUs."""
    rows = content["rows"]
    first = rows[0]
    parts = ("gemms", "casts", "rest", "collectives", "exposed", "idle")
    body = [
        (r["variant"], r["ms"], times(r["speed_of_bf16"]), *(f"{r[f'{p}_ms']:.1f}" for p in parts))
        for r in rows
    ]
    return [
        f"**{first['layers']} DeepSeek-16B-shaped blocks on {first['ranks']} GPUs**, "
        f"{first['tokens']} tokens each, forward + backward; where the time goes in milliseconds:",
        "",
        *table(("", "ms", "over bf16", *parts), body),
        "",
        source(content, "; gathered: by FSDP2, no expert parallelism"),
    ]
