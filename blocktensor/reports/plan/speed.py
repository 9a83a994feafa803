"""Predict the time of a training step on one GPU, by part.

Times of linear layers' matmuls are the predictions of ``explain``. Everything else moves bytes or
multiplies at measured rates; the comment on each rate names its file in benchmarks/results.
"""

from __future__ import annotations

import math
from collections import Counter
from typing import NamedTuple

import torch

from ...ops.devices import CARDS
from ...ops.formats import BLOCK, BlockFormat
from ...ops.gemm.choose_backend import GemmProblem, predict_gemm
from ...ops.grouped_gemm.low_rank import is_fused
from ...ops.scale_layouts import columnwise_width
from ..predict import CAST_US, HOST_US, RATES, bf16_matmul_us
from .describe import Block, Matmul
from .memory import STATE_BYTES, Run, saved_bytes
from .setup import NODE, form_bytes

FPROP, DGRAD, WGRAD = "fprop", "dgrad", "wgrad"
CASTS, ATTENTION, ELEMENTWISE = "casts", "attention", "norms, activations, sums"
ROUTING, ADAPTERS, HEAD = "routing of tokens", "adapters", "head and loss"
SENT = "tokens sent to experts"
RECOMPUTED, OPTIMIZER, SHARDS = "forwards again", "optimizer", "copies of shards"
ACCUMULATED = "sums of microbatches"
EXPOSED, HOST = "waiting for other GPUs", "waiting for the host"
PARTS = (
    FPROP,
    DGRAD,
    WGRAD,
    CASTS,
    ATTENTION,
    ELEMENTWISE,
    ROUTING,
    SENT,
    ADAPTERS,
    HEAD,
    RECOMPUTED,
    ACCUMULATED,
    OPTIMIZER,
    SHARDS,
    EXPOSED,
    HOST,
)
"""The parts, in the order of reports."""

ATTENTION_FLOPS = ((2048, 132e6), (4096, 488e6), (8192, 475e6))
"""FLOPs a microsecond of causal attention, forward + backward, by the length of sequences.

8192: attention_us of layer.json and h100/layer.json (480e6), cuDNN's kernel. 4096: attention_ms of
expert_parallel.json, its bf16. 2048: the profile of a step of hf_llama in
docs/experiments/producers.md, in which cuDNN took 21.8 ms.
"""

STREAM_BYTES = {"H200": 2.47e6, "H100": 1.81e6}
"""Bytes a microsecond of AdamW, norms of gradients and FSDP2's copies: 40 bytes for each of 4.015e9
parameters in fsdp2.json's optimizer_ms. H100: as much less as its casts are slower (predict.py)."""

LINK_BYTES = 197e3
"""Bytes a microsecond of NCCL over NVLink during a step: the fastest of the runs with reshard in
fsdp2.json ("fp8, wgrad_input=1x128", 24.6 GB in its collectives_ms). Kernels wait for the other
rank, so the link is not slower than this."""

ROUTING_US = {"written out": 49e-6, "fused": 28e-6}
"""Microseconds for each feature of a routed row: sorts, gathers, weighted sums, and the backward of
gathers, which adds rows atomically. What Qwen3-MoE steps in experts.json and h100/experts.json take
longer than all other parts; the same on both cards."""


FP32_FLOPS = 60e6
"""FLOPs a microsecond of matmuls in fp32 without TF32; NVIDIA states 67e6 for both cards."""


class Grouped(NamedTuple):
    """Rates of a grouped matmul: FLOPs, and bytes of operands and output, a microsecond."""

    flops: float
    bytes: float


GROUPED = {
    ("bf16", FPROP): Grouped(697e6, 4.36e6),
    ("fp8", FPROP): Grouped(1309e6, 7.45e6),
    ("bf16", WGRAD): Grouped(732e6, 4.16e6),
    ("fp8", WGRAD): Grouped(1331e6, 5.27e6),
    ("fp8 1x128", WGRAD): Grouped(1058e6, 4.43e6),
}
"""Least squares of the rows with ragged groups of grouped.json, an H200; errors are below 12%.
gemms_us of h100/experts.json is within 6% of experts.json, so an H100 has the same."""

_BF16, _FP32 = 2, 4
_META = torch.device("meta")


def flops(run: Run) -> tuple[float, float]:
    """Return the FLOPs of a microbatch, forward + backward, and the part in FP8."""
    total = fp8 = 0.0
    for block in run.blocks:
        for matmul in block.matmuls:
            kinds = 3 if run.trains else 2
            of_matmul = 2.0 * kinds * run.setup.tokens * matmul.rows * matmul.n * matmul.k
            total += of_matmul
            fp8 += of_matmul if run.in_fp8(matmul) else 0.0
        total += _attention_flops(block, run)
    return total, fp8


def _attention_flops(block: Block, run: Run) -> float:
    """Return FLOPs of causal attention: half of two matmuls forward and five backward."""
    if block.attention is None:
        return 0.0
    setup, width = run.setup, block.attention.queries + block.attention.output
    return 3.5 * setup.batch * setup.sequence**2 * width


def attention_rate(sequence: int) -> float:
    """Return FLOPs a microsecond of attention: between measured lengths on a line of their logs."""
    lengths = [math.log(length) for length, _ in ATTENTION_FLOPS]
    rates = [rate for _, rate in ATTENTION_FLOPS]
    x = min(max(math.log(sequence), lengths[0]), lengths[-1])
    i = next(i for i in range(1, len(lengths)) if x <= lengths[i])
    share = (x - lengths[i - 1]) / (lengths[i] - lengths[i - 1])
    return rates[i - 1] + share * (rates[i] - rates[i - 1])


def step(run: Run) -> dict[str, float]:
    """Return predicted microseconds of a step of one GPU, by part."""
    setup = run.setup
    parts = dict.fromkeys(PARTS, 0.0)
    for block, count in Counter(run.model.blocks).items():
        for part, us in _block(block, run).items():
            parts[part] += us * count
    parts[HEAD] += _head(run)
    linears = sum(len(block.matmuls) for block in run.blocks)
    if setup.is_eager:
        host = HOST_US["fp8" if run.fp8 else "bf16"] * linears
        parts[HOST] = max(0.0, host - sum(parts.values()))
    computing = sum(parts.values()) * setup.microbatches
    parts = {part: us * setup.microbatches for part, us in parts.items()}
    parts[OPTIMIZER] = _optimizer(run)
    parts[ACCUMULATED] = _accumulated(run)
    parts[SHARDS] = _copies(run)
    parts[EXPOSED] = _exposed(run, computing)
    return parts


def _block(block: Block, run: Run) -> dict[str, float]:
    """Return microseconds of the forward and backward of a block."""
    setup, parts = run.setup, dict.fromkeys(PARTS, 0.0)
    for matmul in block.matmuls:
        for kind, us in _matmul(matmul, run).items():
            parts[kind] += us
    parts[CASTS] = _casts(block, run) + _packing(block, run)
    parts[ATTENTION] = _attention_flops(block, run) / attention_rate(setup.sequence)
    rate = RATES[setup.card].bytes
    parts[ELEMENTWISE] = setup.tokens * _elementwise(block, run) / rate
    parts[ROUTING] = setup.tokens * _routing(block, run)
    parts[SENT] = _sent(block, run)
    parts[ADAPTERS] = _adapters(block, run)
    if setup.checkpointing == "blocks":
        forward = parts[FPROP] + parts[ATTENTION] * 2 / 7
        forward += (parts[CASTS] + parts[ELEMENTWISE] + parts[ROUTING] + parts[ADAPTERS]) / 3
        parts[RECOMPUTED] = forward
    return parts


# Matmuls


def _matmul(matmul: Matmul, run: Run) -> dict[str, float]:
    """Return microseconds of a weight's matmuls by kind."""
    kinds = (FPROP, DGRAD, WGRAD) if run.trains else (FPROP, DGRAD)
    n, k, m = matmul.n, matmul.k, round(run.setup.tokens * matmul.rows)
    if matmul.experts > 1:
        return {kind: _grouped(kind, m, matmul, run) for kind in kinds}
    sizes = {FPROP: (m, n, k), DGRAD: (m, k, n), WGRAD: (n, k, m)}
    return {kind: _dense(kind, sizes[kind], run.in_fp8(matmul), run) for kind in kinds}


def _dense(kind: str, sizes: tuple[int, int, int], in_fp8: bool, run: Run) -> float:
    recipe, card = run.setup.recipe, CARDS[run.setup.card]
    b_format: BlockFormat | None = recipe.weight_format.stored
    a_format = recipe.activation_format if kind == FPROP else recipe.gradient_format
    if kind == WGRAD:
        b_format = recipe.wgrad_input_format
    is_plain = kind != FPROP and recipe.backward != "fp8"
    if not in_fp8 or is_plain or b_format is None:
        return bf16_matmul_us(*sizes, card)
    m, n, k = sizes
    k = columnwise_width(k, b_format) if kind == WGRAD else k
    problem = GemmProblem(m, n, k, a_format, b_format, torch.bfloat16, _META)
    return predict_gemm(problem, card)[2]


def _grouped(kind: str, rows: int, matmul: Matmul, run: Run) -> float:
    is_plain = kind != FPROP and run.setup.recipe.backward != "fp8"
    in_fp8 = run.in_fp8(matmul) and not is_plain
    size = 1 if in_fp8 else _BF16
    n, k, elements = matmul.n, matmul.k, run.own_elements(matmul)
    if kind == WGRAD:
        moved = rows * (n + k) * size + elements * _BF16
        slow = in_fp8 and run.setup.recipe.wgrad_input == "1x128"
        rates = GROUPED["fp8 1x128" if slow else "fp8" if in_fp8 else "bf16", WGRAD]
    else:
        n, k = (n, k) if kind == FPROP else (k, n)
        moved = rows * k * size + rows * n * _BF16 + elements * size
        rates = GROUPED["fp8" if in_fp8 else "bf16", FPROP]
    return 2 * rows * n * k / rates.flops + moved / rates.bytes


def _casts(block: Block, run: Run) -> float:
    """Return microseconds of a block's casts: of inputs, gradients and weights.

    A fused gated MLP reads gate and up three times: for h, for h again, and for their gradients,
    20 bytes for each feature of h in all. That replaces its activation, too.
    """
    setup = run.setup
    rate, tokens = RATES[setup.card].bytes, setup.tokens
    fused = {mlp.parent: mlp for mlp in block.mlps if run.is_fused(mlp, block)}
    written = 2 if run.trains and setup.recipe.wgrad_input_format is not None else 1
    moved, launches = 0.0, 0
    for (parent, role, k), readers in block.groups().items():
        fp8 = [m for m in readers if run.in_fp8(m)]
        if not fp8:
            continue
        rows = tokens * readers[0].rows
        is_fused = parent in fused
        inputs = 1 if setup.shares_casts else len(fp8)
        if not (is_fused and role == "down"):
            moved += inputs * rows * k * (_BF16 + written)
            launches += inputs
        if not is_fused or role == "down":
            moved += rows * sum(m.n for m in fp8) * (_BF16 + written)
            launches += len(fp8)
        moved += sum(_weight_cast(m, run) for m in fp8)
        launches += 2 * len(fp8) if run.trains else 0
    for mlp in fused.values():
        moved += 20 * tokens * mlp.rows * mlp.hidden
        launches += 3
    return moved / rate + CAST_US * launches


def _packing(block: Block, run: Run) -> float:
    """Return microseconds to pack saved tensors and to unpack each of them once."""
    setup = run.setup
    if not run.packs:
        return 0.0
    if setup.checkpointing == "blocks":
        elements = float(block.width)
    else:
        plain = Run(run.model, setup.changed(saved_tensors_in_fp8=False), run.fp8)
        less = saved_bytes(block, plain) - saved_bytes(block, run)
        elements = less / (_BF16 - form_bytes(1, BLOCK))
    return 2 * (_BF16 + 1) * elements * setup.tokens / RATES[setup.card].bytes


def _weight_cast(matmul: Matmul, run: Run) -> float:
    """Return bytes that the casts of a weight move in a microbatch: the cast and the transpose.

    Under FSDP2 each rank reads its rows twice, for the amax and for the cast, and casts again for
    the backward if the weight was resharded.
    """
    setup, elements = run.setup, run.own_elements(matmul)
    transposed = 2.0 * elements
    if not run.trains:
        return transposed
    if setup.is_sharded and setup.gather == "fp8":
        gathers = 2 if setup.reshard else 1 / setup.microbatches
        shard = elements / setup.shards
        return transposed + gathers * shard * (2 * setup.master_bytes + 1)
    return transposed + elements * ((_BF16 if setup.is_sharded else setup.master_bytes) + 1)


# All other parts of a block


def _elementwise(block: Block, run: Run) -> float:
    """Return bytes that norms, activations and sums of a token move, forward + backward.

    Tensors are counted as often as their kernels read and write them: one kernel for each op in
    eager mode, fused ones where a block is compiled.
    """
    setup = run.setup
    eager, total = setup.is_eager, 0.0
    wide = setup.residual_bytes / _BF16
    fused = {mlp.parent for mlp in block.mlps if run.is_fused(mlp, block)}
    for norm in block.norms:
        written_out = norm.is_written_out and eager and not run.is_fused_norm(norm)
        total += norm.width * (57 if written_out else 6 * wide)
    branches = len(block.mlps) + (block.attention is not None)
    total += branches * block.width * (6 if eager else 2) * wide  # residual sums, both directions
    for readers in block.groups().values():  # sums of their gradients of the input
        elements = readers[0].k * readers[0].rows
        total += 3 * elements * (len(readers) - 1) if eager else 0
    for mlp in block.mlps:
        features = mlp.hidden * mlp.rows
        if mlp.is_gated:
            total += 0 if mlp.parent in fused else features * (14 if eager else 9)
        else:
            total += features * 5
    if block.attention is not None and run.model.embedding:  # rotary positions
        total += (block.attention.queries + block.attention.keys) * (22 if eager else 4)
    return _BF16 * total


def _routing(block: Block, run: Run) -> float:
    """Return microseconds of routing for a token."""
    total = 0.0
    for mlp in block.mlps:
        if mlp.is_stack:
            how = "fused" if run.is_fused(mlp, block) else "written out"
            total += ROUTING_US[how] * mlp.width * mlp.rows
    return total


def _adapters(block: Block, run: Run) -> float:
    """Return microseconds of LoRA's matmuls and sums."""
    setup, rank = run.setup, run.setup.lora or 0
    card, rate, total = CARDS[setup.card], RATES[setup.card].bytes, 0.0
    for m in block.matmuls:
        if not run.is_adapted(m):
            continue
        rows = round(setup.tokens * m.rows)
        adds_term = is_fused(torch.bfloat16, rank) and setup.recipe.backward == "fp8"
        if m.experts == 1 and run.in_fp8(m) and adds_term:
            # x and g are read twice each (lora.json, 4,096 tokens: at 0.6 of the rate of casts)
            total += 7 * rows * (m.k + m.n) / rate
            continue
        if m.experts == 1 and setup.master == "fp32" and not run.in_fp8(m):
            # as peft's ops, or compiled kernels, read and write fp32 (lora.json)
            of_k, of_n = (40, 68) if setup.is_eager else (17, 28)
            total += rows * (of_k * m.k + of_n * m.n) / rate
            total += 6 * rows * rank * (m.n + m.k) / FP32_FLOPS
            continue
        for sizes in ((rows, rank, m.k), (rows, m.n, rank)):
            us = bf16_matmul_us(*sizes, card)
            moved = _BF16 * rows * (sizes[1] + sizes[2])
            total += 3 * max(us, moved / rate)
        if m.experts == 1:
            # the sums with the output of the base, and of gradients of the input
            total += _BF16 * rows * (7 if setup.is_eager else 3) * (m.n + m.k) / rate
    return total


def _sent(block: Block, run: Run) -> float:
    """Return microseconds in which tokens and outputs of experts travel between GPUs.

    A row for each expert of a token goes there and back, in bf16, and so does its gradient. Groups
    of GPUs are taken to get equally many.
    """
    setup = run.setup
    if not setup.expert_parallel or setup.gpus > NODE:
        return 0.0
    ways = 6 if setup.checkpointing == "blocks" else 4
    features = sum(mlp.width * mlp.rows for mlp in block.mlps if mlp.is_stack)
    others = (setup.gpus - 1) / setup.gpus
    return ways * _BF16 * setup.tokens * features * others / LINK_BYTES


def _head(run: Run) -> float:
    """Return microseconds of the head and its loss.

    Bytes for each logit: in fp32 by the ops of ``F.cross_entropy`` 36; compiled, or in chunks by
    ``linear_cross_entropy``, 10 (head.json: within 25% of the difference to the matmuls).
    """
    head, setup, total = run.model.head, run.setup, 0.0
    if head is None:
        return total
    rate = RATES[setup.card].bytes
    for matmul in head.matmuls:
        total += sum(_matmul(matmul, run).values())
        in_ops = setup.loss == "logits" and setup.compile != "model"
        total += setup.tokens * matmul.n * (36 if in_ops else 10) / rate
    total += _casts(head, run)
    total += setup.tokens * _elementwise(head, run) / rate
    # the embedding reads and writes rows, and adds gradients to them
    return total + setup.tokens * run.model.width * 5 * _BF16 / rate


# The step


def _optimizer(run: Run) -> float:
    setup = run.setup
    if setup.optimizer == "none":
        return 0.0
    master = setup.master_bytes
    count, size = STATE_BYTES.get(setup.optimizer, (0, 0))
    states = count * (master if size is None else size)
    moved = 2 * master + master + 2 * states + (3 * master if setup.clip else 0)
    return moved * run.trainable / setup.shards / STREAM_BYTES[setup.card]


def _gathers(run: Run) -> float:
    """Return how often FSDP2 gathers a block in a step."""
    setup = run.setup
    return 2.0 * setup.microbatches if setup.reshard else 1.0


def _copies(run: Run) -> float:
    """Return microseconds of FSDP2's copies into gathers, out of them, and into reductions."""
    setup = run.setup
    if not setup.is_sharded:
        return 0.0
    gathered = sum(run.gathered_bytes(block) for block in run.blocks)
    in_fp8 = sum(run.fp8_elements(x) for x in run.blocks) if setup.gather == "fp8" else 0
    plain = (run.model.parameters - in_fp8) / setup.shards
    moved = _gathers(run) * (2 * gathered + plain * (setup.master_bytes + _BF16))
    moved += run.reduced * (_BF16 + _FP32)
    return moved / STREAM_BYTES[setup.card]


def _accumulated(run: Run) -> float:
    """Return microseconds in which gradients of microbatches are added; in fp32 under FSDP2."""
    setup = run.setup
    sums = _FP32 if setup.is_sharded else setup.master_bytes
    gradients = _BF16 if setup.is_sharded else setup.master_bytes
    moved = (gradients + 2 * sums) * run.trainable * (setup.microbatches - 1)
    return moved / STREAM_BYTES[setup.card]


def _exposed(run: Run, computing: float) -> float:
    """Return microseconds of communication during which nothing else can run.

    The first gather and the last reduction, both of the embedding, and what is longer than the
    computation. Between nodes none is counted.
    """
    setup = run.setup
    if setup.gpus == 1 or setup.gpus > NODE:
        return 0.0
    fraction = (setup.gpus - 1) / setup.gpus
    embedding = run.model.embedding
    if not setup.is_sharded:  # an all-reduce of gradients sends each twice
        sent = 2 * fraction * run.reduced * setup.master_bytes / LINK_BYTES
        last = 2 * fraction * (embedding if run.trains else 0) * setup.master_bytes / LINK_BYTES
        return last + max(0.0, sent - last - computing)
    gathered = sum(run.gathered_bytes(block) for block in run.blocks)
    sent = _gathers(run) * gathered + _BF16 * embedding + _FP32 * run.reduced
    ends = _BF16 * embedding + (_FP32 * embedding if run.trains else 0)
    return (
        fraction * (ends + max(0.0, sent - ends - computing * LINK_BYTES / fraction)) / LINK_BYTES
    )
