"""What the generated pages say of experts: products in groups, layers, whole models."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from .page_parts import Content, image, source, source_in_brief, table, times
from .results import Row
from .shapes import label_of_experts
from .summary import columns, geometric_mean, ratios, select

_KINDS = {"fprop": "forward", "wgrad": "weight gradient", "wgrad_add": "added to fp32"}
_PARTS = {
    "gemms": "GEMMs",
    "activation_casts": "activation casts",
    "weight_casts": "weight casts",
    "weight_transposes": "weight transposes",
    "elementwise": "elementwise",
    "copies": "copies",
}


def _name(row: Row) -> str:
    return label_of_experts(row["experts"], row["tokens"], row["n"], row["k"])


def _mean(rows: Sequence[Row], over: str) -> str:
    values = ratios(rows, "blocktensor", over)
    return times(geometric_mean(values) if values else None)


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
    absent = ", ".join(sorted(content.get("absent", {})))
    return [
        "**Products of experts**, in groups of uneven sizes, beside bf16 `torch._grouped_mm` and "
        "our GEMM of one matrix and all tokens (dense):",
        "",
        *table(header, [*body, means]),
        "",
        *([f"In groups of multiples of 128, geometric means: {'; '.join(remarks)}.", ""]
          if remarks else []),
        *image("grouped_fprop.png", "forward GEMMs of experts", page),
        *image("grouped_wgrad.png", "weight gradient GEMMs of experts", page),
        source(content, f"; not installed there: {absent}" if absent else ""),
    ]  # fmt: skip


def _layer(row: Row) -> str:
    return f"{row['experts']} experts of {row['dim']} x {row['hidden']}, {row['tokens']} tokens"


def _small(rows: Sequence[Row]) -> list[str]:
    if not rows:
        return []
    body = [(f"{_layer(r)} each", times(r["speedup"]), times(r["device_speedup"])) for r in rows]
    return [
        "Small experts, FP8 with inputs shared over bf16:",
        "",
        *table(("", "eager mode", "time of the kernels"), body),
        "",
    ]


def experts(content: Content, page: Path) -> list[str]:
    """Times and memory of layers and models, and where the time of layers goes."""
    small = select(content["rows"], {"what": "small layer"})
    rows = [row for row in content["rows"] if row["what"] != "small layer"]
    layers = select(rows, {"what": "layer"})
    body = [
        (f"{_layer(r)} each" if r["what"] == "layer" else f"{r['what']}: {_layer(r)}",
         r["variant"], r["ms"], times(r["speedup"]), r["peak_mib"], times(r["peak_of_bf16"]),
         times(r.get("saved_of_bf16")))
        for r in rows
    ]  # fmt: skip
    shown = [part for part in _PARTS if f"{part}_us" in columns(layers)]
    spent = [(_layer(r), r["variant"], *(r[f"{part}_us"] for part in shown)) for r in layers]
    parts = [
        "Where the time of these layers goes, microseconds a step by kinds of kernels:",
        "",
        *table(("", "", *(_PARTS[part] for part in shown)), spent),
        "",
    ]
    return [
        "**Experts with SwiGLU, forward + backward**, weights cast every step, in groups of uneven "
        "sizes; and training steps of whole models of transformers, AdamW included:",
        "",
        *table(("", "", "ms", "over bf16", "peak, MiB", "over bf16", "saved over bf16"), body),
        "",
        *(parts if shown else []),
        *image("experts_time.png", "where the time of experts goes", page),
        *_small(small),
        source(content),
    ]


def experts_in_brief(content: Content, page: Path) -> list[str]:
    """The speed-ups of the layers, and of the model with the widest experts, in a sentence."""
    rows = select(content["rows"], {"variant": "fp8, inputs shared"})
    layers = ", ".join(
        f"{times(r['speedup'])} ({r['experts']} of {r['dim']} x {r['hidden']})"
        for r in select(rows, {"what": "layer"})
    )
    fused = select(content["rows"], {"variant": "fp8, fused"})
    fused_layers = select(fused, {"what": "layer"})
    also = (
        f"; with `fuse` {', '.join(times(r['speedup']) for r in fused_layers)}"
        if fused_layers
        else ""
    )
    plain_step, fused_step = _widest_model(rows), _widest_model(fused)
    whole = "" if plain_step is None else f"; a Qwen3-MoE step {plain_step}"
    whole += "" if fused_step is None else f", fused {fused_step}"
    return [
        f"Experts with SwiGLU, forward + backward: {layers} bf16's speed{also}{whole} "
        f"{source_in_brief(content)}."
    ]


def _widest_model(rows: Sequence[Row]) -> str | None:
    """The speed-up of the training step of the model with the widest experts."""
    models = [r for r in rows if r["what"] not in ("layer", "small layer")]
    widest = max(models, key=lambda r: r["hidden"], default=None)
    return None if widest is None else times(widest["speedup"])
