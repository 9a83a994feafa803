"""The generated parts of README.md and docs/results.md: ``python -m benchmarks page``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from . import page_experts, page_models, page_ranks, results
from .page_parts import Content, image, shape_of, source, table, times, wrapped
from .results import Row
from .summary import columns, geometric_mean, ratios, select

ROOT = Path(__file__).parent.parent
START, END = "<!-- results: python -m benchmarks page -->", "<!-- end of results -->"
_OTHER_PEERS = {"bf16": "bf16", "DeepGEMM": "deepgemm", "torchao's Triton kernels": "torchao"}
_PRECISIONS = {"bfloat16": ", bf16", "float32": ", fp32"}


def _peers(rows: Sequence[Row]) -> str:
    """Geometric means against the peers that have no column in the table."""
    found = {name: ratios(rows, "blocktensor", column) for name, column in _OTHER_PEERS.items()}
    means = {name: geometric_mean(values) for name, values in found.items() if values}
    return ", ".join(f"{times(mean)} {name}" for name, mean in means.items())


def _gemm(content: Content, page: Path) -> list[str]:
    kinds = {"fprop": "forward", "wgrad": "weight gradient", "wgrad_add": "added to fp32"}
    by_kind = {kind: select(content["rows"], {"kind": kind}) for kind in kinds}
    by_kind = {kind: rows for kind, rows in by_kind.items() if rows}
    header = ["tokens x (out x in)"]
    for kind in by_kind:
        header += [f"{kinds[kind]}, TFLOP/s", "cuBLAS", "limit"]
    peers = ("cublas", "tensorwise")
    body = []
    for shape in dict.fromkeys(map(shape_of, content["rows"])):
        cells: list[str] = [shape]
        for rows in by_kind.values():
            row = next((r for r in rows if shape_of(r) == shape), {})
            cells.append("–" if not row else f"{row['blocktensor']:.0f}")
            for peer in peers:
                cells.append(times(next(iter(ratios([row], "blocktensor", peer)), None)))
        body.append(cells)
    means = ["geometric mean"]
    for rows in by_kind.values():
        over = [ratios(rows, "blocktensor", peer) for peer in peers]
        means += ["", *(times(geometric_mean(values) if values else None) for values in over)]
    against = {kinds[kind]: _peers(rows) for kind, rows in by_kind.items()}
    summary = "; ".join(f"{kind} {means}" for kind, means in against.items() if means)
    absent = ", ".join(sorted(content.get("absent", {})))
    return [
        "**GEMMs**, speed over cuBLAS's blockwise kernel, and over the limit, which is cuBLAS with "
        "one scale per tensor:",
        "",
        *table(header, [*body, means]),
        "",
        *([f"Against other peers, geometric means: {summary}.", ""] if summary else []),
        *image("gemm_fprop.png", "forward GEMMs", page),
        *image("gemm_wgrad.png", "weight gradient GEMMs", page),
        source(content, f"; not installed there: {absent}" if absent else ""),
    ]


def _linear(content: Content, page: Path) -> list[str]:
    series = {
        "eager, sustained": "eager_speedup",
        "eager, one call": "flushed_speedup",
        "CUDA graph": "graph_speedup",
        "torchao, eager": "eager_torchao_speedup",
    }
    series = {name: c for name, c in series.items() if c in columns(content["rows"])}
    rows = [(shape_of(r), *(times(r.get(c)) for c in series.values())) for r in content["rows"]]
    return [
        "**nn.Linear, forward + backward, FP8 against bf16**, the weight cast every step:",
        "",
        *table(("tokens x (out x in)", *series), rows),
        "",
        *image("linear_speedup.png", "speed-up of linears", page),
        source(content, ". In eager mode host time limits small layers; CUDA graphs have none."),
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
        *table(("", "ms", "over `step`"), rows),
        "",
        source(content),
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
        *table(header, rows),
        "",
        *image("memory_peak.png", "peak memory by policy", page),
        source(content),
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
        *table(("cast", *(f"{m} x {k}" for m, k in shapes)), rows),
        "",
        *image("cast_roofline.png", "casts against a copy", page),
        source(content),
    ]


def _host(content: Content, page: Path) -> list[str]:
    shown = columns(content["rows"])
    rows = [[r.get(column, "–") for column in shown] for r in content["rows"]]
    return [
        "**Host time**, microseconds until a call returns, the GPU idle when it starts:",
        "",
        *table([c.replace("_", " ") for c in shown], rows),
        "",
        source(content),
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
    experts = demo["config"]["model"].get("experts", 0)
    model, flag = ("mixture of experts", f"--experts {experts} ") if experts else ("model", "")
    return [
        f"**The demo's {model}, {size:.0f}M parameters, {demo['config']['steps']} steps**, loss on "
        f"held-out text:",
        "",
        *table(("seed", "bf16", "FP8", "difference"), rows),
        "",
        f"(`python examples/train_lm.py {flag}--seeds {len(rows)}`, {demo['device']['name']}, "
        f"{demo['date'][:10]})",
    ]


def _of(card: str, lines: list[str]) -> list[str]:
    """The lines about a result of a card, without links to plots unless it is the first card."""
    if card == results.CARDS[0]:
        return lines
    images = [i for i, line in enumerate(lines) if line.startswith("![")]
    return [line for i, line in enumerate(lines) if i not in images and i - 1 not in images]


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
        """The generated part, marks included. A result that is not on disk has no section.

        Where several cards have a result, their sections follow each other; plots are those of the
        first card.
        """
        parts = []
        for name, section in self.sections.items():
            for card in results.CARDS:
                content = results.load(name, results.of_card(card, folder))
                if content is not None:
                    lines = section(content, self.path)
                    parts.append("\n".join(map(wrapped, _of(card, lines))))
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
        "block": page_models.block,
        "layer": page_models.layer,
        "microbatches": _microbatches,
        "memory": _memory,
        "hf_llama": page_models.hf_llama,
        "head": page_models.head,
        "experts": page_experts.experts,
        "grouped": page_experts.grouped,
        "fsdp2": page_ranks.fsdp2,
        "shards": page_ranks.shards,
        "tensor_parallel": page_ranks.tensor_parallel,
        "expert_parallel": page_ranks.expert_parallel,
        "gemm": _gemm,
        "cast": _cast,
        "producers": page_models.producers,
        "host": _host,
        "train_lm": _training,
        "train_moe": _training,
    },
)
README = Page(
    ROOT / "README.md",
    {
        "linear": _linear,
        "block": page_models.block_in_brief,
        "experts": page_experts.experts_in_brief,
        "fsdp2": page_ranks.fsdp2_in_brief,
    },
)
PAGES = (README, RESULTS)
