"""Define the settings of a training run that its memory and speed depend on."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal, get_args, get_origin, get_type_hints

from ...ops.checks import is_integer
from ...recipe import DEFAULT_RECIPE, Recipe, check_recipe

CardName = Literal["H100", "H200"]
Sharding = Literal["none", "fsdp2"]
Gather = Literal["fp8", "bf16"]
Optimizer = Literal["adamw", "adamw_8bit", "sgd", "sgd_momentum", "none"]
Master = Literal["fp32", "bf16"]
Checkpointing = Literal["none", "blocks"]
Compile = Literal["none", "blocks", "model"]
Loss = Literal["logits", "chunks"]

CAPACITY = {"H100": 79.1 * 2**30, "H200": 139.8 * 2**30}
"""Bytes that ``torch.cuda.get_device_properties`` reports for the cards with 80 GB and 141 GB."""

USABLE = 0.95
"""The share of a card that a run may take: CUDA's context, NCCL's buffers and fragments of freed
memory take the rest. An assumption: results/*.json hold allocated bytes only."""

NODE = 8
"""GPUs that NVLink connects. No communication between nodes has been measured."""


@dataclass(frozen=True)
class Setup:
    """A training run. Fields: see :func:`blocktensor.plan`, whose arguments they are."""

    gpus: int = 1
    card: CardName = "H100"
    batch: int = 1
    sequence: int = 4096
    sharding: Sharding = "none"
    gather: Gather = "fp8"
    reshard: bool = True
    optimizer: Optimizer = "adamw"
    master: Master = "fp32"
    checkpointing: Checkpointing = "none"
    lora: int | None = None
    lora_experts: bool = False
    expert_parallel: bool = False
    fuse: bool = False
    recompute: bool = False
    share_inputs: bool = False
    saved_tensors_in_fp8: bool = False
    compile: Compile = "none"
    convert_head: bool = False
    loss: Loss = "logits"
    microbatches: int = 1
    clip: bool = True
    skip_small: bool = True
    recipe: Recipe = DEFAULT_RECIPE

    def __post_init__(self) -> None:
        for name in ("gpus", "batch", "sequence", "microbatches"):
            _check_count(name, getattr(self, name))
        if self.lora is not None:
            _check_count("lora", self.lora)
        for name, choices in CHOICES.items():
            value = getattr(self, name)
            if value not in choices:
                raise ValueError(
                    f"{name}={value!r}: expected one of {', '.join(map(repr, choices))}"
                )
        check_recipe(self.recipe)
        if self.sharding == "fsdp2" and self.gpus == 1:
            raise ValueError(
                "sharding='fsdp2' with gpus=1 shards nothing: pass sharding='none', or more GPUs"
            )
        if self.loss == "chunks" and not self.convert_head:
            raise ValueError(
                "loss='chunks' is the loss of a head in FP8: pass convert_head=True too"
            )
        if self.lora is None and (self.lora_experts or self.expert_parallel):
            name = "lora_experts" if self.lora_experts else "expert_parallel"
            raise ValueError(f"{name}=True is counted for adapters alone: pass lora=rank too")
        if self.expert_parallel and self.sharding != "fsdp2":
            raise ValueError(
                f"expert_parallel=True with sharding={self.sharding!r}: FSDP2 shards all but the "
                f"experts: pass sharding='fsdp2', and several GPUs"
            )
        if self.recompute and not self.fuse:
            raise ValueError("recompute=True is an option of fuse: pass fuse=True too")

    @property
    def tokens(self) -> int:
        """Tokens of a microbatch on one GPU."""
        return self.batch * self.sequence

    @property
    def is_sharded(self) -> bool:
        """True if FSDP2 shards the parameters."""
        return self.sharding == "fsdp2"

    @property
    def autocasts(self) -> bool:
        """True if layers run in bf16 by autocast: masters in fp32 that nothing casts otherwise."""
        return self.master == "fp32" and not self.is_sharded and self.lora is None

    @property
    def residual_bytes(self) -> int:
        """Bytes of a feature between blocks; under autocast embeddings and sums are in fp32."""
        return 4 if self.autocasts else 2

    @property
    def shards(self) -> int:
        """Parts that parameters, gradients and optimizer states are cut into."""
        return self.gpus if self.is_sharded else 1

    @property
    def is_eager(self) -> bool:
        """True if blocks are not compiled."""
        return self.compile == "none"

    @property
    def shares_casts(self) -> bool:
        """True if linear layers that read one tensor share its cast."""
        return self.fuse or self.share_inputs or not self.is_eager

    @property
    def master_bytes(self) -> int:
        """Bytes of a trainable parameter."""
        return 4 if self.master == "fp32" else 2

    @property
    def input_bytes(self) -> float:
        """Bytes that an FP8 linear layer saves for an element of its input."""
        form = self.recipe.saved_input_format
        return 2.0 if form is None else form_bytes(*form.block_shape)

    def changed(self, **changes: Any) -> Setup:
        """Return this setup with other settings."""
        return replace(self, **changes)


CHOICES: dict[str, tuple[Any, ...]] = {
    name: (True, False) if kind is bool else get_args(kind)
    for name, kind in get_type_hints(Setup).items()
    if kind is bool or get_origin(kind) is Literal
}
"""The values of each setting that has only a few, from its type."""


def form_bytes(rows: int, columns: int) -> float:
    """Return bytes of an element in FP8 and its share of the fp32 scale of a block."""
    return 1 + 4 / (rows * columns)


def _check_count(name: str, value: object) -> None:
    if not is_integer(value):
        raise TypeError(f"{name}={value!r} is a {type(value).__name__}: expected an integer")
    if value < 1:
        raise ValueError(f"{name}={value}: expected 1 or more")
