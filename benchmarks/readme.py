"""The README's results, made from ``benchmarks/results``: ``python -m benchmarks readme``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from . import plots, results
from .results import Row
from .shapes import label
from .summary import columns, geometric_mean, ratios, select

README = Path(__file__).parent.parent / "README.md"
START, END = "<!-- results: python -m benchmarks readme -->", "<!-- end of results -->"

Content = dict[str, Any]
_OTHER_PEERS = {"bf16": "bf16", "DeepGEMM": "deepgemm", "torchao's Triton kernels": "torchao"}
_PRECISIONS = {"bfloat16": ", bf16", "float32": ", fp32"}


def _table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> list[str]:
    lines = ["| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
    return lines + ["| " + " | ".join(str(cell) for cell in row) + " |" for row in rows]


def _source(content: Content, remark: str = "") -> str:
    where = content["environment"]
    return (
        f"(`{where['command']}`, {where['device']}, torch {where['torch']}, "
        f"Triton {where['triton']}, {where['date']}{remark})"
    )


def _image(file: str, text: str) -> list[str]:
    """The plot, where it has been drawn."""
    if not (plots.FOLDER / file).exists():
        return []
    return [f"![{text}]({plots.FOLDER.relative_to(README.parent).as_posix()}/{file})", ""]


def _times(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}x"


def _shape(row: Row) -> str:
    return label(row["m"], row["n"], row["k"])


def _peers(rows: Sequence[Row]) -> str:
    """Geometric means against the peers that have no column in the table."""
    found = {name: ratios(rows, "blocktensor", column) for name, column in _OTHER_PEERS.items()}
    means = {name: geometric_mean(values) for name, values in found.items() if values}
    return ", ".join(f"{_times(mean)} {name}" for name, mean in means.items())


def _gemm(content: Content) -> list[str]:
    kinds = {"fprop": "forward", "wgrad": "weight gradient", "wgrad_add": "added to fp32"}
    by_kind = {kind: select(content["rows"], {"kind": kind}) for kind in kinds}
    by_kind = {kind: rows for kind, rows in by_kind.items() if rows}
    header = ["tokens x (out x in)"]
    for kind in by_kind:
        header += [f"{kinds[kind]}, TFLOP/s", "cuBLAS", "limit"]
    peers = ("cublas", "tensorwise")
    body = []
    for shape in dict.fromkeys(map(_shape, content["rows"])):
        cells: list[str] = [shape]
        for rows in by_kind.values():
            row = next((r for r in rows if _shape(r) == shape), {})
            cells.append("–" if not row else f"{row['blocktensor']:.0f}")
            for peer in peers:
                cells.append(_times(next(iter(ratios([row], "blocktensor", peer)), None)))
        body.append(cells)
    means = ["geometric mean"]
    for rows in by_kind.values():
        over = [ratios(rows, "blocktensor", peer) for peer in peers]
        means += ["", *(_times(geometric_mean(values) if values else None) for values in over)]
    against = {kinds[kind]: _peers(rows) for kind, rows in by_kind.items()}
    summary = "; ".join(f"{kind} {means}" for kind, means in against.items() if means)
    absent = ", ".join(sorted(content.get("absent", {})))
    return [
        "**GEMMs** against cuBLAS's blockwise kernel, and against the limit: cuBLAS with one scale "
        "a tensor:",
        "",
        *_table(header, [*body, means]),
        "",
        *([f"Against other peers, geometric means: {summary}.", ""] if summary else []),
        *_image("gemm_fprop.png", "forward GEMMs"),
        *_image("gemm_wgrad.png", "weight gradient GEMMs"),
        _source(content, f"; not installed there: {absent}" if absent else ""),
    ]


def _linear(content: Content) -> list[str]:
    series = {
        "eager, sustained": "eager_speedup",
        "eager, one call": "flushed_speedup",
        "CUDA graph": "graph_speedup",
        "torchao, eager": "eager_torchao_speedup",
    }
    series = {name: c for name, c in series.items() if c in columns(content["rows"])}
    rows = [(_shape(r), *(_times(r.get(c)) for c in series.values())) for r in content["rows"]]
    return [
        "**nn.Linear, forward + backward, FP8 against bf16**, the weight cast every step:",
        "",
        *_table(("tokens x (out x in)", *series), rows),
        "",
        *_image("linear_speedup.png", "speed-up of linears"),
        _source(content, ". Host time bounds small layers in eager mode: compare the graph."),
    ]


def _block(content: Content) -> list[str]:
    rows = [
        (r["variant"], r["eager_ms"], _times(r["eager_speedup"]), r["compiled_ms"] or "–",
         _times(r["compiled_speedup"]))
        for r in content["rows"]
    ]  # fmt: skip
    layers, tokens = content["rows"][0]["layers"], content["rows"][0]["tokens"]
    return [
        f"**{layers} Llama-8B-shaped blocks, {tokens} tokens**, forward + backward, attention, "
        f"norms and all, every weight cast as after an optimizer step:",
        "",
        *_table(("", "eager, ms", "over bf16", "torch.compile, ms", "over bf16"), rows),
        "",
        _source(content, "; sharing is off while compiling, where the compiler sees to it"),
    ]


def _memory(content: Content) -> list[str]:
    columns_of = ("weights_mib", "saved_mib", "peak_mib", "peak_of_bf16", "two_microbatches_mib")
    rows = [(r["policy"], r["mode"], *(r[c] for c in columns_of)) for r in content["rows"]]
    header = ("policy", "mode", "weights at rest", "saved activations", "peak", "peak over bf16",
              "peak of two microbatches")  # fmt: skip
    return [
        "**Memory of that stack by policy** (MiB; the peak of a forward + backward holds weights, "
        "gradients, input and all activations):",
        "",
        *_table(header, rows),
        "",
        *_image("memory_peak.png", "peak memory by policy"),
        _source(content),
    ]


def _cast(content: Content) -> list[str]:
    measured: dict[str, dict[tuple[int, int], float]] = {}
    for r in content["rows"]:
        name = r["op"]
        if name != "transpose":  # of FP8 bytes, whatever they were cast from
            name += _PRECISIONS.get(r["dtype"], "")
        measured.setdefault(name, {})[r["m"], r["k"]] = r["share_of_copy"]
    sizes = {size for shares in measured.values() for size in shares}
    shapes = sorted(sizes, key=lambda s: -s[0] * s[1])
    rows = [
        (name, *(f"{shares[s]:.0%}" if s in shares else "–" for s in shapes))
        for name, shares in measured.items()
    ]
    return [
        "**Casts, share of the speed of a plain copy** (bytes that must move):",
        "",
        *_table(("cast", *(f"{m} x {k}" for m, k in shapes)), rows),
        "",
        *_image("cast_roofline.png", "casts against a copy"),
        _source(content),
    ]


def _host(content: Content) -> list[str]:
    shown = columns(content["rows"])
    rows = [[r.get(column, "–") for column in shown] for r in content["rows"]]
    return [
        "**Host time**, what the CPU spends before the GPU has its work:",
        "",
        *_table([c.replace("_", " ") for c in shown], rows),
        "",
        _source(content),
    ]


def _training(demo: Content) -> list[str]:
    by_seed: dict[int, dict[str, Any]] = {}
    for run in demo["runs"]:
        by_seed.setdefault(run["seed"], {})[run["precision"]] = run
    rows = []
    for seed, runs in by_seed.items():
        losses = [runs[p]["heldout_loss"] for p in ("bf16", "fp8")]
        rows.append((seed, *(f"{x:.4f}" for x in losses), f"{losses[1] / losses[0] - 1:+.2%}"))
    size = demo["config"]["parameters"] / 1e6
    return [
        f"**The demo's model, {size:.0f}M parameters, {demo['config']['steps']} steps**, loss on "
        f"held-out text:",
        "",
        *_table(("seed", "bf16", "FP8", "difference"), rows),
        "",
        f"(`python examples/train_lm.py --seeds {len(rows)}`, {demo['device']['name']}, "
        f"{demo['date'][:10]})",
    ]


def _fsdp2(content: Content) -> list[str]:
    rows = content["rows"]
    body = []
    for row in rows:
        is_run = row["mode"] == "run"
        speed = (
            f"{row['tokens_per_second_per_gpu']:,.0f}",
            _times(row["speed_of_bf16"]),
            f"{row['mfu']:.1%}",
        )
        peak = f"{row['peak_mib'] / 1024:.1f}", _times(row["peak_of_bf16"])
        ranks = f"{row['ranks']}" if is_run else f"{row['ranks']}, dry run"
        body.append((row["variant"], ranks, *(speed if is_run else ("–",) * len(speed)), *peak))
    header = ("", "GPUs", "tokens/s a GPU", "over bf16", "MFU (of bf16's peak)")
    remark = "; a dry run is rank 0 of so many, with nothing sent: its memory is theirs"
    return [
        f"**Llama-shaped training under FSDP2, {rows[0]['parameters'] / 1e9:.1f}B parameters**:",
        "",
        *_table((*header, "peak, GiB", "over bf16"), body),
        "",
        _source(content, remark),
    ]


SECTIONS: dict[str, Callable[[Content], list[str]]] = {
    "linear": _linear,
    "block": _block,
    "memory": _memory,
    "fsdp2": _fsdp2,
    "gemm": _gemm,
    "cast": _cast,
    "host": _host,
    "train_lm": _training,
}
"""In the order of the README; a result that is not on disk has no section."""


def render(folder: Path = results.FOLDER) -> str:
    """The section between the two marks, marks included."""
    contents = {name: results.load(name, folder) for name in SECTIONS}
    parts = [
        "\n".join(SECTIONS[name](content))
        for name, content in contents.items()
        if content is not None
    ]
    return "\n\n".join([START, *parts, END])


def update(readme: Path = README) -> bool:
    """Rewrite the section in place; whether anything changed.

    Raises:
        ValueError: the README lacks one of the marks.
    """
    text = readme.read_text()
    if START not in text or END not in text:
        raise ValueError(f"{readme} needs the marks {START!r} and {END!r}")
    new = text[: text.index(START)] + render() + text[text.index(END) + len(END) :]
    readme.write_text(new)
    return new != text
