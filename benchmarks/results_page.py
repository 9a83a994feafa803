"""The generated parts of README.md and docs/results.md: ``python -m benchmarks page``."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from . import plots, results
from .results import Row
from .shapes import label
from .summary import columns, geometric_mean, ratios, select

ROOT = Path(__file__).parent.parent
START, END = "<!-- results: python -m benchmarks page -->", "<!-- end of results -->"
LINE_LENGTH = 120
"""Of text; rows of tables and links to plots are as long as they are."""

Content = dict[str, Any]
_OTHER_PEERS = {"bf16": "bf16", "DeepGEMM": "deepgemm", "torchao's Triton kernels": "torchao"}
_PRECISIONS = {"bfloat16": ", bf16", "float32": ", fp32"}


def _table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> list[str]:
    lines = ["| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
    return lines + ["| " + " | ".join(str(cell) for cell in row) + " |" for row in rows]


def _wrapped(line: str) -> str:
    """``line`` as lines of text, without a break inside of words."""
    if line.startswith(("|", "![")):
        return line
    return textwrap.fill(line, LINE_LENGTH, break_long_words=False, break_on_hyphens=False)


def _source(content: Content, remark: str = "") -> str:
    where = content["environment"]
    return (
        f"(`{where['command']}`, {where['device']}, torch {where['torch']}, "
        f"Triton {where['triton']}, {where['date']}{remark})"
    )


def _image(file: str, text: str, page: Path) -> list[str]:
    """A link from ``page`` to the plot, where it has been drawn."""
    if not (plots.FOLDER / file).exists():
        return []
    return [f"![{text}]({plots.FOLDER.relative_to(page.parent).as_posix()}/{file})", ""]


def _times(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}x"


def _shape(row: Row) -> str:
    return label(row["m"], row["n"], row["k"])


def _peers(rows: Sequence[Row]) -> str:
    """Geometric means against the peers that have no column in the table."""
    found = {name: ratios(rows, "blocktensor", column) for name, column in _OTHER_PEERS.items()}
    means = {name: geometric_mean(values) for name, values in found.items() if values}
    return ", ".join(f"{_times(mean)} {name}" for name, mean in means.items())


def _gemm(content: Content, page: Path) -> list[str]:
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
        "**GEMMs**, speed over cuBLAS's blockwise kernel, and over the limit, which is cuBLAS with "
        "one scale per tensor:",
        "",
        *_table(header, [*body, means]),
        "",
        *([f"Against other peers, geometric means: {summary}.", ""] if summary else []),
        *_image("gemm_fprop.png", "forward GEMMs", page),
        *_image("gemm_wgrad.png", "weight gradient GEMMs", page),
        _source(content, f"; not installed there: {absent}" if absent else ""),
    ]


def _linear(content: Content, page: Path) -> list[str]:
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
        *_image("linear_speedup.png", "speed-up of linears", page),
        _source(content, ". In eager mode host time limits small layers; CUDA graphs have none."),
    ]


def _block(content: Content, page: Path) -> list[str]:
    rows = [
        (r["variant"], r["eager_ms"], _times(r["eager_speedup"]), r["compiled_ms"] or "–",
         _times(r["compiled_speedup"]))
        for r in content["rows"]
    ]  # fmt: skip
    layers, tokens = content["rows"][0]["layers"], content["rows"][0]["tokens"]
    return [
        f"**{layers} Llama-8B-shaped blocks, {tokens} tokens**, forward + backward with attention "
        f"and norms, every weight cast as after an optimizer step:",
        "",
        *_table(("", "eager, ms", "over bf16", "torch.compile, ms", "over bf16"), rows),
        "",
        _source(content, "; torch.compile merges equal casts, so inputs are not shared there"),
    ]


def _microbatches(content: Content, page: Path) -> list[str]:
    rows = [
        (f"`{r['cache_weight']}`", r["step_ms"], f"{r['over_step']:.3f}x") for r in content["rows"]
    ]
    first = content["rows"][0]
    return [
        f"**{first['microbatches']} microbatches of {first['tokens']} tokens a step** through "
        f"{first['layers']} of these blocks in eager mode, by `Recipe(cache_weight=...)`: "
        f"`backward` casts the weights in every forward, `step` once:",
        "",
        *_table(("", "ms", "over `step`"), rows),
        "",
        _source(content),
    ]


def _memory(content: Content, page: Path) -> list[str]:
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
        *_image("memory_peak.png", "peak memory by policy", page),
        _source(content),
    ]


def _cast(content: Content, page: Path) -> list[str]:
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
        "**Casts, speed as a share of a plain copy's**, counting the bytes that must move:",
        "",
        *_table(("cast", *(f"{m} x {k}" for m, k in shapes)), rows),
        "",
        *_image("cast_roofline.png", "casts against a copy", page),
        _source(content),
    ]


def _host(content: Content, page: Path) -> list[str]:
    shown = columns(content["rows"])
    rows = [[r.get(column, "–") for column in shown] for r in content["rows"]]
    return [
        "**Host time**, microseconds until a call returns, the GPU idle when it starts:",
        "",
        *_table([c.replace("_", " ") for c in shown], rows),
        "",
        _source(content),
    ]


def _training(demo: Content, page: Path) -> list[str]:
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


def _fsdp2(content: Content, page: Path) -> list[str]:
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
    remark = (
        "; a dry run is rank 0 of a fake process group: nothing is sent, memory is a real rank's"
    )
    return [
        f"**Llama-shaped training under FSDP2, {rows[0]['parameters'] / 1e9:.1f}B parameters**:",
        "",
        *_table((*header, "peak, GiB", "over bf16"), body),
        "",
        _source(content, remark),
    ]


def _block_in_brief(content: Content, page: Path) -> list[str]:
    row = select(content["rows"], {"variant": "fp8"})[0]
    return [
        f"{row['layers']} Llama-8B-shaped blocks, forward + backward: "
        f"{_times(row['eager_speedup'])} bf16 in eager mode, {_times(row['compiled_speedup'])} "
        f"compiled (`{content['environment']['command']}`)."
    ]


def _fsdp2_in_brief(content: Content, page: Path) -> list[str]:
    row = select(content["rows"], {"variant": "fp8", "mode": "run"})[0]
    return [
        f"Llama-shaped, {row['parameters'] / 1e9:.1f}B parameters, FSDP2 on {row['ranks']} GPUs: "
        f"{_times(row['speed_of_bf16'])} bf16's speed, {_times(row['peak_of_bf16'])} its memory "
        f"(`{content['environment']['command']}`)."
    ]


Section = Callable[[Content, Path], list[str]]
"""Lines about one result, for the page at a path."""


@dataclass(frozen=True)
class Page:
    """A page with a generated part, between the marks :data:`START` and :data:`END`.

    Attributes:
        path: of the file.
        sections: by the name of their result, in the order of the page.
    """

    path: Path
    sections: dict[str, Section]

    def render(self, folder: Path = results.FOLDER) -> str:
        """The generated part, marks included. A result that is not on disk has no section."""
        contents = {name: results.load(name, folder) for name in self.sections}
        parts = [
            "\n".join(map(_wrapped, self.sections[name](content, self.path)))
            for name, content in contents.items()
            if content is not None
        ]
        return "\n\n".join([START, *parts, END])

    def update(self) -> bool:
        """Rewrite the generated part in place; whether anything changed.

        Raises:
            ValueError: the page lacks one of the marks.
        """
        text = self.path.read_text("utf-8")
        if START not in text or END not in text:
            raise ValueError(f"{self.path} needs the marks {START!r} and {END!r}")
        before, after = text[: text.index(START)], text[text.index(END) + len(END) :]
        new = before + self.render() + after
        self.path.write_text(new, "utf-8")
        return new != text


RESULTS = Page(
    ROOT / "docs" / "results.md",
    {
        "linear": _linear,
        "block": _block,
        "microbatches": _microbatches,
        "memory": _memory,
        "fsdp2": _fsdp2,
        "gemm": _gemm,
        "cast": _cast,
        "host": _host,
        "train_lm": _training,
    },
)
README = Page(
    ROOT / "README.md", {"linear": _linear, "block": _block_in_brief, "fsdp2": _fsdp2_in_brief}
)
PAGES = (README, RESULTS)
