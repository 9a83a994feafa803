"""Generated parts of the pages about whole blocks and models, on one GPU and on several."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from .page_parts import Content, image, on_cards, section, source, table, times
from .popular import MODELS
from .profiled import SHOWN
from .results import Row, columns, select
from .timing import MODES

_BOTH = "eager", "compiled"
_MODES = {"eager": "eager", "compiled": "torch.compile", "graphs": "CUDA graphs"}
_PARTS = ("gemms", "attention", "casts", "norms", "swiglu", "rest", "idle")
_KERNELS = {
    "gemms": "GEMMs",
    "activation_casts": "activation casts",
    "weight_casts": "weight casts",
    "weight_transposes": "weight transposes",
    "elementwise": "elementwise",
    "copies": "copies",
}
_DRY = "; a dry run is rank 0 of a fake process group: nothing is sent, memory is a real rank's"


def speeds(rows: Sequence[Row], *names: str) -> tuple[Sequence[str], list[Any]]:
    """Return the header and the rows of a table: columns ``names``, then the speed in each mode."""
    modes = [mode for mode in MODES if f"{mode}_ms" in rows[0]]
    titles = (title for mode in modes for title in (f"{_MODES[mode]}, ms", "over bf16"))
    cells = [
        (
            *(row[name] for name in names),
            *(x for m in modes for x in (row[f"{m}_ms"] or "–", times(row[f"{m}_speedup"]))),
        )
        for row in rows
    ]
    return (*[""] * len(names), *titles), cells


def block(content: Content, page: Path) -> list[str]:
    """The Llama-8B-shaped stack."""
    layers, tokens = content["rows"][0]["layers"], content["rows"][0]["tokens"]
    return section(
        f"**{layers} Llama-8B-shaped blocks, {tokens} tokens**, forward + backward with attention "
        f"and norms, every weight cast as after an optimizer step:",
        *speeds(content["rows"], "variant"),
        content,
        "; torch.compile merges equal casts, so inputs are not shared there",
        more=image("block_speedup.svg", "speed-up of Llama blocks", page),
    )


_WAYS = {
    "fp8": "`convert`",
    "fp8, fused": "`convert` and `fuse`",
    "fp8, fused, wgrad_input=1x128": "the same with `Recipe.deepseek()`",
    "torchao tensorwise": "torchao, tensorwise",
    "torchao rowwise": "torchao, rowwise",
}


def block_on_cards(content: Content, page: Path) -> list[str]:
    """The stack's speed-ups on every card, beside those of peers."""
    by_card = on_cards("block", content)
    header = ["", *(f"{card}, {_MODES[mode]}" for card in by_card for mode in _BOTH)]
    rows = []
    for variant, name in _WAYS.items():
        found: list[Row] = [
            next((r for r in c["rows"] if r["variant"] == variant), {}) for c in by_card.values()
        ]
        if any(found):
            rows.append((name, *(times(r.get(f"{m}_speedup")) for r in found for m in _BOTH)))
    first = content["rows"][0]
    return [
        f"**{first['layers']} Llama-8B-shaped blocks**, {first['tokens']} tokens, forward + "
        f"backward, speed over bf16 in the same mode:",
        "",
        *table(header, rows),
        "",
        " ".join(source(found) for found in by_card.values()),
    ]


def layer(content: Content, page: Path) -> list[str]:
    """Where the time of a block goes."""
    columns = [f"{part}_us" for part in (*_PARTS, "step")]
    rows = [
        (r["variant"], r["mode"], *(f"{r[column]:.0f}" for column in columns))
        for r in content["rows"]
    ]
    return section(
        "**Where the time of one of these blocks goes**, microseconds of a forward + backward by "
        "kinds of kernels:",
        ("", "mode", *_PARTS, "in all"),
        rows,
        content,
        "; kernels of fused modules count as casts",
    )


def memory(content: Content, page: Path) -> list[str]:
    """Memory by policy."""
    columns_of = ("weights_mib", "saved_mib", "peak_mib", "peak_of_bf16", "two_microbatches_mib")
    rows = [(r["policy"], r["mode"], *(r[c] for c in columns_of)) for r in content["rows"]]
    header = (
        "policy",
        "mode",
        "weights at rest",
        "saved activations",
        "peak",
        "peak over bf16",
        "peak of two microbatches",
    )
    return section(
        "**Memory of that stack by policy** (MiB; the peak of a forward + backward holds weights, "
        "gradients, input and all activations):",
        header,
        rows,
        content,
        more=image("memory_peak.svg", "peak memory by policy", page),
    )


def saved(content: Content, page: Path) -> list[str]:
    """Memory and time of steps that save activations in FP8."""
    rows = [
        (
            r["variant"],
            r["mode"],
            r["tokens"],
            f"{r['held_mib'] / 1024:.2f}",
            times(r["held_of_bf16"]),
            f"{r['peak_mib'] / 1024:.2f}",
            times(r["peak_of_bf16"]),
            times(r["speedup"]),
            times(r["of_own"]),
        )
        for r in content["rows"]
    ]
    header = (
        "",
        "mode",
        "tokens",
        "waits for backward, GiB",
        "over bf16",
        "peak, GiB",
        "over bf16",
        "speed over bf16",
        "over the same, saved in high precision",
    )
    return section(
        f"**Activations saved in FP8** ({content['rows'][0]['layers']} layers of transformers' "
        "Llama-8B, forward + backward; attention without a mask):",
        header,
        rows,
        content,
    )


def _times_and_peaks(row: Row) -> Iterator[Any]:
    """Yield the cells of :data:`_TIMES_AND_PEAKS`."""
    for mode in _BOTH:
        yield row[f"{mode}_ms"]
        yield times(row[f"{mode}_speedup"])
        yield f"{row[f'{mode}_peak_mib'] / 1024:.1f}"
        yield times(row[f"{mode}_peak_of_bf16"])


_TIMES_AND_PEAKS = tuple(
    title
    for mode in _BOTH
    for title in (f"{_MODES[mode]}, ms", "over bf16", "peak, GiB", "over bf16")
)


def hf_llama(content: Content, page: Path) -> list[str]:
    """Training steps of transformers' Llama."""
    first = content["rows"][0]
    return section(
        f"**transformers' Llama**, {first['layers']} layers of 8B's, vocabulary 32,000, "
        f"{first['tokens']} tokens: whole training steps with AdamW:",
        ("", *_TIMES_AND_PEAKS),
        [(row["variant"], *_times_and_peaks(row)) for row in content["rows"]],
        content,
    )


def lora(content: Content, page: Path) -> list[str]:
    """Training steps of adapters on a frozen base."""
    return section(
        f"**LoRA**, {content['rows'][0]['layers']} layers of transformers' Llama-8B, peft's "
        "adapters of rank 16 on all linear layers, the FP8 base frozen and fused: whole training "
        "steps with AdamW:",
        ("", "", "tokens", *_TIMES_AND_PEAKS),
        [
            (
                row["adapters"],
                row["variant"],
                f"{row['sequences']} x {row['length']:,}",
                *_times_and_peaks(row),
            )
            for row in content["rows"]
        ],
        content,
    )


_IN_BRIEF = (
    "Qwen3-0.6B",
    "Llama-3.2-1B",
    "Qwen3-4B",
    "Llama-3.1-8B",
    "Llama-3.1-70B",
    "Qwen3-30B-A3B",
)
_POPULAR = {"fp8": "`convert`", "fp8, fused": "and `fuse`"}


def _not_measured(content: Content) -> str:
    """Return a remark that names the models of which a run that was stopped has no rows."""
    measured = {row["model"] for row in content["rows"]}
    missing = [model for model in MODELS if model not in measured]
    return f"; not measured: {', '.join(missing)}" if missing else ""


def popular(content: Content, page: Path) -> list[str]:
    """Layers of popular models: a row for each model and number of tokens."""
    modes = "eager", "graphs"
    made = []
    for model, tokens in dict.fromkeys((row["model"], row["tokens"]) for row in content["rows"]):
        of = {r["variant"]: r for r in select(content["rows"], {"model": model, "tokens": tokens})}
        speeds = (times(of[v].get(f"{mode}_speedup")) for v in _POPULAR for mode in modes)
        made.append((model, f"{tokens:,}", *speeds))
    titles = (f"{name}, {_MODES[mode]}" for name in _POPULAR.values() for mode in modes)
    return section(
        "**Layers of popular models** of transformers, forward + backward, speed over bf16 in the "
        "same mode; linear layers of every size converted (`skip_small=False`):",
        ("", "tokens", *titles),
        made,
        content,
        _not_measured(content),
    )


def popular_in_brief(content: Content, page: Path) -> list[str]:
    """Layers of some of the models, in eager mode: a row for each model."""
    counts = 1024, 4096
    rows = []
    measured = {row["model"] for row in content["rows"]}
    for model in filter(measured.__contains__, _IN_BRIEF):
        of = {(r["tokens"], r["variant"]): r for r in select(content["rows"], {"model": model})}
        found = (of.get((count, variant)) for count in counts for variant in _POPULAR)
        rows.append((model, *(times(None if r is None else r["eager_speedup"]) for r in found)))
    titles = (f"{count:,} tokens, {how}" for count in counts for how in _POPULAR.values())
    return section(
        "**Layers of popular models** of transformers, forward + backward, eager, over bf16; "
        "linear layers of every size converted (`skip_small=False`):",
        ("", *titles),
        rows,
        content,
        _not_measured(content),
    )


def head(content: Content, page: Path) -> list[str]:
    """A head and its loss."""
    rows = [
        (
            f"{r['words']:,} x {r['dim']}",
            r["variant"],
            r["ms"],
            times(r["speedup"]),
            f"{r['peak_mib'] / 1024:.2f}",
            times(r["peak_of_bf16"]),
        )
        for r in content["rows"]
    ]
    tokens = content["rows"][0]["tokens"]
    return section(
        f"**A head and its loss**, {tokens} tokens, forward + backward, the weight cast every "
        f"time; in chunks: `functional.linear_cross_entropy`; the peak without inputs and weights:",
        ("words x features", "", "ms", "over bf16", "peak, GiB", "over bf16"),
        rows,
        content,
    )


def experts(content: Content, page: Path) -> list[str]:
    """Times and memory of layers and models, and where the time of layers goes."""
    small = select(content["rows"], {"what": "small layer"})
    rows = [row for row in content["rows"] if row["what"] != "small layer"]
    layers = select(rows, {"what": "layer"})
    body = [
        (
            f"{_layer_name(r)} each" if r["what"] == "layer" else f"{r['what']}: {_layer_name(r)}",
            r["variant"],
            r["ms"],
            times(r["speedup"]),
            r["peak_mib"],
            times(r["peak_of_bf16"]),
            times(r.get("saved_of_bf16")),
        )
        for r in rows
    ]
    shown = [part for part in _KERNELS if f"{part}_us" in columns(layers)]
    spent = [(_layer_name(r), r["variant"], *(r[f"{part}_us"] for part in shown)) for r in layers]
    parts = [
        "Where the time of these layers goes, microseconds a step by kinds of kernels:",
        "",
        *table(("", "", *(_KERNELS[part] for part in shown)), spent),
        "",
    ]
    return section(
        "**Experts with SwiGLU, forward + backward**, weights cast every step, in groups of uneven "
        "sizes; and training steps of whole models of transformers, AdamW included:",
        ("", "", "ms", "over bf16", "peak, MiB", "over bf16", "saved over bf16"),
        body,
        content,
        more=[
            *(parts if shown else []),
            *image("experts_time.svg", "where the time of experts goes", page),
            *_small(small),
        ],
    )


def _small(rows: Sequence[Row]) -> list[str]:
    if not rows:
        return []
    body = [
        (f"{_layer_name(r)} each", times(r["speedup"]), times(r["device_speedup"])) for r in rows
    ]
    return [
        "Small experts, FP8 with inputs shared over bf16:",
        "",
        *table(("", "eager mode", "time of the kernels"), body),
        "",
    ]


def _layer_name(row: Row) -> str:
    return f"{row['experts']} experts of {row['dim']} x {row['hidden']}, {row['tokens']} tokens"


def fsdp2(content: Content, page: Path) -> list[str]:
    """Llama under FSDP2: speeds and memory, then where the time of a step goes."""
    rows = content["rows"]
    header = (
        "",
        "GPUs",
        "microbatches",
        "tokens/s a GPU",
        "over bf16",
        "MFU (of bf16's peak)",
        "peak, GiB",
        "over bf16",
    )
    columns = (*SHOWN, "step")
    parts = [
        (r["variant"], *(f"{r[f'{part}_ms']:.1f}" for part in columns))
        for r in rows
        if f"{SHOWN[0]}_ms" in r
    ]
    shown = [
        "Where the time of a step goes, milliseconds by kinds of kernels. Collectives overlap with "
        "other kernels, except in the exposed time:",
        "",
        *table(("", *columns), parts),
        "",
    ]
    return section(
        f"**Llama-shaped training under FSDP2, {rows[0]['parameters'] / 1e9:.1f}B parameters**:",
        header,
        [_fsdp2_row(row) for row in rows],
        content,
        _DRY,
        more=shown if parts else [],
    )


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
    """Llama under FSDP2: the runs with the library's defaults, in a table."""
    runs = [r for r in select(content["rows"], {"mode": "run"}) if "wgrad" not in r["variant"]]
    rows = [
        (r["variant"], r["microbatches"], f"{r['tokens_per_second_per_gpu']:,.0f}",
         times(r["speed_of_bf16"]), times(r["peak_of_bf16"]))
        for r in runs
    ]  # fmt: skip
    where = content["environment"]
    date = where["date"].replace("with wgrad_input=1x128 and ", "")  # of rows that are left out
    return section(
        f"**Llama-shaped, {runs[0]['parameters'] / 1e9:.1f}B parameters, FSDP2** on "
        f"{runs[0]['ranks']} GPUs, sequence 8,192, compiled:",
        ("", "microbatches", "tokens/s a GPU", "over bf16", "peak memory over bf16"),
        rows,
        {**content, "environment": {**where, "date": date}},
    )


def shards(content: Content, page: Path) -> list[str]:
    """Linear layers of one tensor parallel rank."""
    return section(
        f"**Linear layers of one of 8 tensor parallel ranks**, {content['rows'][0]['tokens']} "
        f"tokens, forward + backward without collectives:",
        *speeds(content["rows"], "model", "variant"),
        content,
        "; host time limits the small linear layers of 8B outside CUDA graphs, which "
        "torch.compile(mode='reduce-overhead') makes",
    )


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
    header = (
        "",
        "ms",
        "over bf16",
        "gathers, us",
        "overlapped",
        "reduce-scatters, us",
        "overlapped",
    )
    return section(
        f"**A Llama-70B block over {content['rows'][0]['ranks']} GPUs**, tensor and sequence "
        f"parallel, forward + backward; overlapped: while another kernel ran:",
        header,
        rows,
        content,
        "; bf16: torch's parallel styles",
    )


def expert_parallel(content: Content, page: Path) -> list[str]:
    """Blocks with experts over several GPUs."""
    rows = content["rows"]
    first = rows[0]
    parts = ("gemms", "casts", "rest", "collectives", "exposed", "idle")
    body = [
        (r["variant"], r["ms"], times(r["speed_of_bf16"]), *(f"{r[f'{p}_ms']:.1f}" for p in parts))
        for r in rows
    ]
    return section(
        f"**{first['layers']} DeepSeek-16B-shaped blocks on {first['ranks']} GPUs**, "
        f"{first['tokens']} tokens each, forward + backward; where the time goes in milliseconds:",
        ("", "ms", "over bf16", *parts),
        body,
        content,
        "; gathered: by FSDP2, no expert parallelism; sent in fp8: tokens, as e4m3 and scales",
    )


def training(content: Content, page: Path) -> list[str]:
    """Losses of the demo."""
    by_seed: dict[int, dict[str, Any]] = {}
    for run in content["runs"]:
        by_seed.setdefault(run["seed"], {})[run["precision"]] = run
    rows = []
    for seed, runs in by_seed.items():
        losses = [runs[p]["heldout_loss"] for p in ("bf16", "fp8")]
        rows.append((seed, *(f"{x:.4f}" for x in losses), f"{losses[1] / losses[0] - 1:+.2%}"))
    config = content["config"]
    size, experts = config["parameters"] / 1e6, config["model"].get("experts", 0)
    model, flag = ("mixture of experts", f"--experts {experts} ") if experts else ("model", "")
    return [
        f"**The demo's {model}, {size:.0f}M parameters, {config['steps']} steps**, loss on "
        f"held-out text:",
        "",
        *table(("seed", "bf16", "FP8", "difference"), rows),
        "",
        f"(`python examples/train_lm.py {flag}--seeds {len(rows)}`, {content['device']['name']}, "
        f"{content['date'][:10]})",
    ]
