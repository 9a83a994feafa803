"""Plan a training run: its memory, its speed, and what would make it fit."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn

from ...recipe import DEFAULT_RECIPE, Recipe
from .describe import Description, describe
from .memory import Run, peak
from .models import model_of
from .report import Alternative, Estimate, Part, TrainingPlan
from .setup import (
    CAPACITY,
    NODE,
    USABLE,
    CardName,
    Checkpointing,
    Compile,
    Gather,
    Loss,
    Master,
    Optimizer,
    Setup,
    Sharding,
)
from .speed import flops, step

MOST_GPUS = 64
"""The most GPUs that are tried."""

MOST_THOUSANDS = 2**14
"""The longest sequence that is tried, in 1,024 tokens."""


def plan(
    model: nn.Module | str | os.PathLike[str] | Any,
    *,
    sizes: Mapping[str, Any] | None = None,
    gpus: int = 1,
    card: CardName = "H100",
    batch: int = 1,
    sequence: int = 4096,
    sharding: Sharding | None = None,
    gather: Gather = "fp8",
    reshard: bool = True,
    optimizer: Optimizer = "adamw",
    master: Master = "fp32",
    checkpointing: Checkpointing = "none",
    lora: int | None = None,
    lora_experts: bool = False,
    expert_parallel: bool = False,
    fuse: bool = False,
    recompute: bool = False,
    share_inputs: bool = False,
    saved_tensors_in_fp8: bool = False,
    compile: Compile = "none",
    convert_head: bool = False,
    loss: Loss = "logits",
    microbatches: int = 1,
    clip: bool = True,
    skip_small: bool = True,
    recipe: Recipe | None = None,
) -> TrainingPlan:
    """Return the memory and the speed that a training run will have, in bf16 and in FP8.

    Nothing runs and no GPU is needed: both are computed from the sizes of the model's layers and
    from measured rates (docs/guides/plan.md, which compares them with measured runs).

    Args:
        model: a module, best on the meta device, converted or not; it is not changed. Or a config
            of transformers, the name of its class, the id of a model whose sizes are known, or a
            folder with a ``config.json``.
        sizes: attributes of the config to change, such as ``{"num_hidden_layers": 4}``.
        gpus: the number of GPUs. Communication is counted for up to 8, which NVLink connects.
        card: ``"H100"`` (80 GB) or ``"H200"`` (141 GB).
        batch: sequences of a microbatch on one GPU.
        sequence: tokens of a sequence.
        sharding: ``"none"`` (one GPU, or DDP) or ``"fsdp2"`` (each block, the embedding and the
            head by itself). Default: FSDP2 for several GPUs.
        gather: what FSDP2 gathers of FP8 weights: ``"fp8"``, or ``"bf16"`` as without ``convert``
            before ``fully_shard``.
        reshard: FSDP2's ``reshard_after_forward``, of blocks.
        optimizer: ``"adamw"``, whose states have the dtype of the masters; ``"adamw_8bit"``, a
            byte for each; ``"sgd"``; ``"sgd_momentum"``; or ``"none"``, no step at all.
        master: dtype of the trainable parameters.
        checkpointing: ``"blocks"``: blocks run again in the backward.
        lora: rank of adapters on all linear layers of blocks. The base is frozen, in FP8 or bf16.
            ``master`` is their dtype.
        lora_experts: stacks of experts have adapters of this rank, too.
        expert_parallel: with ``lora`` and FSDP2, each GPU holds some experts of each layer, to
            which tokens are sent; FSDP2 shards the rest.
        fuse: the run calls ``blocktensor.fuse``.
        recompute: it calls ``fuse(model, recompute=True)``.
        share_inputs: it calls ``blocktensor.share_inputs``.
        saved_tensors_in_fp8: blocks run in ``blocktensor.saved_tensors_in_fp8``; in bf16 they do
            not.
        compile: ``"blocks"`` or ``"model"``: what ``torch.compile`` compiles.
        convert_head: the head runs in FP8, too.
        loss: ``"logits"``: all logits, their loss in fp32. ``"chunks"``: of the head in FP8 by
            ``functional.linear_cross_entropy``.
        microbatches: the number of forwards and backwards in a step. FSDP2 reduces gradients in the
            last.
        clip: the step calls ``clip_grad_norm_``.
        skip_small: as in ``convert``.
        recipe: numeric choices; default ``Recipe()``.

    Returns:
        The report, in bytes and microseconds; ``print`` it.

    Raises:
        ImportError: a name or a config without transformers.
        NotImplementedError: only some parameters of the module train.
        TypeError: arguments of another type.
        ValueError: counts below 1, other choices, an unknown model, a model without linear layers.

    Examples:
        >>> model = nn.Sequential(*(nn.Linear(4096, 4096, device="meta") for _ in range(4)))
        >>> report = blocktensor.plan(model, batch=8)
        >>> report.fits, report.speedup > 1
        (True, True)
    """
    several: Any = gpus  # Setup checks it
    by_default: Sharding = "fsdp2" if isinstance(several, int) and several > 1 else "none"
    setup = Setup(
        gpus=gpus,
        card=card,
        batch=batch,
        sequence=sequence,
        sharding=by_default if sharding is None else sharding,
        gather=gather,
        reshard=reshard,
        optimizer=optimizer,
        master=master,
        checkpointing=checkpointing,
        lora=lora,
        lora_experts=lora_experts,
        expert_parallel=expert_parallel,
        fuse=fuse,
        recompute=recompute,
        share_inputs=share_inputs,
        saved_tensors_in_fp8=saved_tensors_in_fp8,
        compile=compile,
        convert_head=convert_head,
        loss=loss,
        microbatches=microbatches,
        clip=clip,
        skip_small=skip_small,
        recipe=DEFAULT_RECIPE if recipe is None else recipe,
    )
    name, module = model_of(model, sizes)
    described = describe(module, setup)
    fp8 = estimate(described, setup, fp8=True)
    others = () if fp8.fits(setup.card) else tuple(_alternatives(module, setup))
    return TrainingPlan(
        name,
        described.parameters,
        setup,
        estimate(described, setup, fp8=False),
        fp8,
        longest_sequence(described, setup, fp8=False),
        longest_sequence(described, setup, fp8=True),
        others,
        (*described.notes, *_notes(described, setup)),
    )


def estimate(model: Description, setup: Setup, fp8: bool) -> Estimate:
    """Return the memory and the time of a run in FP8 or in bf16."""
    run = Run(model, setup, fp8)
    memory = peak(run)
    return Estimate(
        memory.moment,
        tuple(Part(name, float(value)) for name, value in memory.parts.items()),
        tuple(Part(name, float(value)) for name, value in step(run).items()),
        setup.tokens * setup.microbatches,
        *flops(run),
    )


def longest_sequence(model: Description, setup: Setup, fp8: bool) -> int:
    """Return the most tokens of a sequence, a multiple of 1,024, with which a run fits; or 0."""

    def fits(thousands: int) -> bool:
        changed = setup.changed(sequence=1024 * thousands)
        return peak(Run(model, changed, fp8)).total <= USABLE * CAPACITY[setup.card]

    if not fits(1):
        return 0
    low = 1
    while low < MOST_THOUSANDS and fits(2 * low):
        low *= 2
    step = low // 2
    while step:
        low += step if fits(low + step) else 0
        step //= 2
    return 1024 * low


def _notes(model: Description, setup: Setup) -> Iterator[str]:
    if setup.gpus > NODE:
        yield f"communication between nodes of {NODE} GPUs is not counted"
    elif setup.gpus > 2:
        yield "communication is counted at the rate that was measured on two GPUs"
    stacks = any(m.experts > 1 for block in model.blocks for m in block.matmuls)
    if setup.lora is not None and stacks and not setup.lora_experts:
        yield "experts get no adapters"
    if setup.expert_parallel:
        yield "tokens are counted as spread evenly over the GPUs, and no run of many was measured"
    if setup.optimizer == "adamw" and setup.master == "bf16":
        yield "the states of AdamW are in bf16, as its parameters"
    if setup.autocasts:
        yield "as under autocast, which has not been compared with measured runs"


# Changes that would make it fit

Changes = dict[str, Any]


def _changes(setup: Setup) -> Iterator[tuple[str, Changes]]:
    """Yield changes of a setup with their names: those that cost least first."""
    if not setup.fuse:
        yield "fuse", {"fuse": True}
    chunks: Changes = {"loss": "chunks", "convert_head": True}
    if setup.loss == "logits":
        yield "head in FP8, loss in chunks", chunks
    again: Changes = {"checkpointing": "blocks"}
    if setup.checkpointing == "none":
        yield "checkpointing of blocks", again
    if setup.checkpointing == "none" and setup.loss == "logits":
        yield "checkpointing, loss in chunks", again | chunks
    if setup.batch > 1:
        yield "a batch of 1", {"batch": 1}
    if setup.optimizer == "adamw":
        yield "8-bit AdamW", {"optimizer": "adamw_8bit"}
    if setup.master == "fp32" and setup.lora is None:
        yield "masters in bf16", {"master": "bf16"}
    if setup.lora is None:
        lora: Changes = {"lora": 16, "recompute": False}
        yield "LoRA of rank 16", lora
        yield "LoRA of rank 16, checkpointing, loss in chunks", lora | again | chunks
    if setup.card == "H100":
        yield "H200", {"card": "H200"}


def _alternatives(module: nn.Module, setup: Setup) -> Iterator[Alternative]:
    """Yield changes that make a run fit in FP8, and the fewest GPUs that do."""
    by_head: dict[bool, Description] = {}

    def in_fp8(changed: Setup) -> Estimate:
        head = changed.convert_head
        if head not in by_head:
            by_head[head] = describe(module, changed)
        return estimate(by_head[head], changed, fp8=True)

    for name, changes in _changes(setup):
        changed = setup.changed(**changes)
        if (found := in_fp8(changed)).fits(changed.card):
            yield Alternative(name, found)
    again: Changes = {"checkpointing": "blocks", "loss": "chunks", "convert_head": True}
    both: tuple[tuple[str, Changes], ...] = ("", {}), (", checkpointing, loss in chunks", again)
    for name, more in both:
        gpus = 2 * setup.gpus
        while gpus <= MOST_GPUS:
            changed = setup.changed(gpus=gpus, sharding="fsdp2", **more)
            if (found := in_fp8(changed)).fits(changed.card):
                yield Alternative(f"{gpus} GPUs, FSDP2{name}", found)
                break
            gpus *= 2
