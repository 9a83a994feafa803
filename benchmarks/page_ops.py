"""Generated parts of the pages about single ops and layers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from .page_parts import (
    Content,
    image,
    not_installed,
    section,
    shape_of,
    table,
    times,
    wrapped,
)
from .results import Row, columns, geometric_mean, ratios, select
from .roofline import BANDWIDTH, roofline
from .shapes import label_of_experts

_KINDS = {"fprop": "forward", "square": "weight gradient"}
_OTHER_PEERS = {"bf16": "bf16", "DeepGEMM": "deepgemm", "torchao's Triton kernels": "torchao"}
_PRECISIONS = {"bfloat16": ", bf16", "float32": ", fp32"}
_WITHOUT_FORMS = ("1 / rms", "RMS norm", "RMS norm backward")


def _peers(rows: Sequence[Row]) -> str:
    """Geometric means against the peers that have no column in the table."""
    found = {name: ratios(rows, "blocktensor", column) for name, column in _OTHER_PEERS.items()}
    means = {name: geometric_mean(values) for name, values in found.items() if values}
    return ", ".join(f"{times(mean)} {name}" for name, mean in means.items())


def _name(row: Row) -> str:
    return label_of_experts(row["experts"], row["tokens"], row["n"], row["k"])


def _mean(rows: Sequence[Row], over: str) -> str:
    values = ratios(rows, "blocktensor", over)
    return times(geometric_mean(values) if values else None)


def linear(content: Content, page: Path) -> list[str]:
    """Speed-ups of layers."""
    series = {
        "eager, sustained": "eager_speedup",
        "eager, one call": "flushed_speedup",
        "CUDA graph": "graph_speedup",
        "torchao, eager": "eager_torchao_speedup",
    }
    series = {name: c for name, c in series.items() if c in columns(content["rows"])}
    rows = [(shape_of(r), *(times(r.get(c)) for c in series.values())) for r in content["rows"]]
    return section(
        "**nn.Linear, forward + backward, FP8 against bf16**, the weight cast every step:",
        ("tokens x (out x in)", *series),
        rows,
        content,
        ". In eager mode host time limits small layers; CUDA graphs have none",
        more=[*image("linear_speedup.svg", "speed-up of linear layers", page), *_roofline(content)],
    )


def _roofline(content: Content) -> list[str]:
    """Speed-ups of layers over the ones that their matmuls and casts allow."""
    card = next(
        (card for card in BANDWIDTH if card.upper() in content["environment"]["device"]), None
    )
    if card is None:
        return []
    body = []
    for row in content["rows"]:
        limit = roofline((row["m"], row["n"], row["k"]), card)
        shares = [row[x] / limit.two_reads for x in ("graph_speedup", "eager_speedup")]
        strict = row["graph_speedup"] / limit.one_read
        body.append(
            (
                shape_of(row),
                times(limit.two_reads),
                *(f"{share:.0%}" for share in shares),
                times(limit.one_read),
                f"{strict:.0%}",
            )
        )
    return [
        wrapped(
            "**Over the roofline**: the speed-up that matmuls at 78% of the peak and casts at 92% "
            "of the bandwidth would have, by torchao's model (`roofline_utils.py`, with the "
            f"bandwidth of this card, {BANDWIDTH[card] / 1e12:.2f} TB/s). It reads x, w and g once "
            "for each of their two forms; the last columns read each once, as our casts of x and g "
            "do:"
        ),
        "",
        *table(
            (
                "tokens x (out x in)",
                "roofline",
                "of it, CUDA graph",
                "of it, eager",
                "roofline, one read",
                "of it, CUDA graph",
            ),
            body,
        ),
        "",
    ]


def gemm(content: Content, page: Path) -> list[str]:
    """Rates of GEMMs over their peers."""
    by_kind = {kind: select(content["rows"], {"kind": kind}) for kind in _KINDS}
    by_kind = {kind: rows for kind, rows in by_kind.items() if rows}
    header = ["tokens x (out x in)"]
    for kind in by_kind:
        header += [f"{_KINDS[kind]}, TFLOP/s", "cuBLAS", "limit"]
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
    against = {_KINDS[kind]: _peers(rows) for kind, rows in by_kind.items()}
    summary = "; ".join(f"{kind} {means}" for kind, means in against.items() if means)
    return section(
        "**GEMMs**, speed over cuBLAS's blockwise kernel, and over the limit, which is cuBLAS with "
        "one scale per tensor:",
        header,
        [*body, means],
        content,
        not_installed(content),
        more=[
            *([f"Against other peers, geometric means: {summary}.", ""] if summary else []),
            *image("gemm_fprop.svg", "forward GEMMs", page),
            *image("gemm_wgrad.svg", "weight gradient GEMMs", page),
        ],
    )


def grouped(content: Content, page: Path) -> list[str]:
    """Rates of grouped products, in ragged groups, and means of what else was measured."""
    every = content["rows"]
    by_kind = {kind: select(every, {"kind": kind, "groups": "ragged"}) for kind in _KINDS}
    by_kind = {kind: rows for kind, rows in by_kind.items() if rows}
    header = ["experts: tokens x (out x in)"]
    for kind in by_kind:
        header += [f"{_KINDS[kind]}, TFLOP/s", "over bf16", "over dense"]
    body = []
    for name in dict.fromkeys(map(_name, every)):
        cells = [name]
        for rows in by_kind.values():
            row = next((r for r in rows if _name(r) == name), {})
            cells.append("–" if not row else f"{row['blocktensor']:.0f}")
            cells += [times(row.get("vs_bf16")), times(row.get("of_dense"))]
        body.append(cells)
    means = ["geometric mean"]
    for rows in by_kind.values():
        means += ["", _mean(rows, "bf16"), _mean(rows, "dense")]
    aligned = {kind: select(every, {"kind": kind, "groups": "aligned"}) for kind in _KINDS}
    remarks = [
        f"{_KINDS[kind]} {_mean(rows, 'dense')} dense"
        + (f", {_mean(rows, 'deepgemm')} DeepGEMM" if ratios(rows, "deepgemm") else "")
        for kind, rows in aligned.items()
        if rows
    ]
    casts = select(every, {"kind": "cast"})
    if casts:
        remarks.append(f"casts of any groups {_mean(casts, 'dense')} dense")
    return section(
        "**Matmuls of experts**, in groups of uneven sizes, compared with bf16 `torch._grouped_mm` "
        "and our GEMM of one matrix and all tokens (dense):",
        header,
        [*body, means],
        content,
        not_installed(content),
        more=[
            *(
                [f"In groups of multiples of 128, geometric means: {'; '.join(remarks)}.", ""]
                if remarks
                else []
            ),
            *image("grouped_fprop.svg", "forward GEMMs of experts", page),
            *image("grouped_wgrad.svg", "weight gradient GEMMs of experts", page),
        ],
    )


def cast(content: Content, page: Path) -> list[str]:
    """Casts as shares of a copy."""
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
    return section(
        "**Casts, speed as a share of a plain copy's**, counting the bytes that must move:",
        ("cast", *(f"{m} x {k}" for m, k in shapes)),
        rows,
        content,
        more=image("cast_roofline.svg", "casts against a copy", page),
    )


def producers(content: Content, page: Path) -> list[str]:
    """Casts made where values are computed."""
    rows = []
    for r in content["rows"]:
        blocks = "–" if r["op"] in _WITHOUT_FORMS else r["columnwise"]
        ratios = times(r["over_apart"]), f"{r['share_of_copy']:.0%}"
        row = r["op"], f"{r['m']} x {r['k']}", blocks, r["us"], r["apart_us"], *ratios
        if blocks != "–" or r["columnwise"] == "1x128":
            rows.append(row)
    header = (
        "op",
        "shape",
        "columnwise blocks",
        "µs",
        "eager ops, then casts, µs",
        "over them",
        "of a copy's speed",
    )
    return section(
        "**Fused producers**, in bf16: one kernel computes and casts, rowwise and columnwise. "
        "Norms make no FP8 forms; their bits are eager mode's:",
        header,
        rows,
        content,
    )


def host(content: Content, page: Path) -> list[str]:
    """Host time of calls."""
    shown = columns(content["rows"])
    rows = [[r.get(column, "–") for column in shown] for r in content["rows"]]
    return section(
        "**Host time**, microseconds until a call returns, the GPU idle when it starts. The "
        "backward runs in the thread that calls it, unless the row says otherwise ([why]("
        "../experiments/host_time.md#the-thread-of-the-backward)):",
        [c.replace("_", " ") for c in shown],
        rows,
        content,
    )
