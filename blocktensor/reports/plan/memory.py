"""Predict the memory of a training run on one GPU, by part, at the moment when most is allocated.

The terms are counted from what autograd saves and what our functions hold
(docs/design/autograd_and_memory.md). No constant is fitted; docs/guides/plan.md compares the sums
with measured peaks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ...autograd.linear_cross_entropy import CHUNK_BYTES
from ...ops.formats import BLOCK
from .describe import Block, Description, Matmul, Mlp, Norm
from .setup import Setup, form_bytes

Parts = Mapping[str, float]

WEIGHTS = "weights"
FORMS = "FP8 forms of weights"
COPIES = "autocast's bf16 weights"
GATHERED = "gathered weights"
GRADIENTS = "gradients"
STATES = "optimizer states"
ACTIVATIONS = "activations"
HEAD = "head and logits"
WORKSPACE = "backward of a block"
LIBRARIES = "cuBLAS workspaces"
PARTS = (
    WEIGHTS,
    FORMS,
    COPIES,
    GATHERED,
    GRADIENTS,
    STATES,
    ACTIVATIONS,
    HEAD,
    WORKSPACE,
    LIBRARIES,
)
"""The parts, in the order of reports."""

CUBLAS_BYTES = 2 * 32 * 2**20
"""Workspaces of cuBLAS on Hopper: 32 MiB each for the threads of forward and backward."""

STATE_BYTES = {"adamw": (2, None), "adamw_8bit": (2, 1), "sgd_momentum": (1, None)}
"""States of optimizers, and their bytes; None: as many as the parameter has."""

_BF16, _FP32 = 2, 4


@dataclass(frozen=True)
class Memory:
    """Peak bytes of a run on one GPU.

    Attributes:
        moment: what runs when most is allocated.
        parts: bytes by part.
    """

    moment: str
    parts: Parts

    @property
    def total(self) -> float:
        """All bytes."""
        return sum(self.parts.values())


class Run:
    """A model in a setup, in FP8 or in bf16."""

    def __init__(self, model: Description, setup: Setup, fp8: bool) -> None:
        self.model, self.setup, self.fp8 = model, setup, fp8
        self.trains = setup.lora is None and not model.is_frozen

    def in_fp8(self, matmul: Matmul) -> bool:
        """Return True if a matmul runs in FP8."""
        return self.fp8 and matmul.in_fp8

    def is_fused(self, mlp: Mlp, block: Block) -> bool:
        """Return True if ``fuse`` runs an MLP, whose weights are all in FP8."""
        members = [m for m in block.matmuls if m.parent == mlp.parent]
        in_fp8 = all(self.in_fp8(m) for m in members)
        return self.setup.fuse and mlp.is_gated and in_fp8 and self.trains

    def is_fused_norm(self, norm: Norm) -> bool:
        """Return True if ``fuse`` runs a norm."""
        return self.setup.fuse and self.fp8 and norm.feeds_fp8

    @property
    def packs(self) -> bool:
        """True if activations are saved in FP8; with checkpointing, inputs of blocks alone."""
        return self.fp8 and self.setup.saved_tensors_in_fp8

    def saved_size(self, size: float) -> float:
        """Return bytes of a saved element that attention does not read, and has ``size`` bytes."""
        packs = self.packs and self.setup.checkpointing == "none"
        return form_bytes(1, BLOCK) if packs else size

    def fp8_elements(self, block: Block) -> int:
        """Return values of the block's weights that run in FP8."""
        return block.fp8_elements if self.fp8 else 0

    def is_adapted(self, matmul: Matmul) -> bool:
        """Return True if a linear layer, or a stack of experts, has an adapter."""
        return self.setup.lora is not None and (matmul.experts == 1 or self.setup.lora_experts)

    def adapters(self, block: Block, of_experts: bool | None = None) -> int:
        """Return values of a block's adapters: all, the experts' alone, or the others."""
        if block is self.model.head:
            return 0
        rank = self.setup.lora or 0
        adapted = (m for m in block.matmuls if self.is_adapted(m))
        counted = (m for m in adapted if of_experts in (None, m.experts > 1))
        return sum(rank * (m.n + m.k) * m.experts for m in counted)

    def thin_bytes(self, block: Block) -> float:
        """Return bytes of adapters, as our matmuls read them, that wait for a backward."""
        parts = self.setup.gpus if self.setup.expert_parallel else 1
        others = self.adapters(block, of_experts=False) if self.fp8 else 0
        return _BF16 * (self.adapters(block, of_experts=True) / parts + others)

    def own_elements(self, matmul: Matmul) -> float:
        """Return values of a weight that one GPU multiplies by."""
        is_cut = self.setup.expert_parallel and matmul.experts > 1
        return matmul.elements / (self.setup.gpus if is_cut else 1)

    @property
    def trainable(self) -> int:
        """Values of all trainable parameters."""
        if self.trains:
            return self.model.parameters
        return sum(map(self.adapters, self.model.blocks))

    @property
    def reduced(self) -> int:
        """Values whose gradients are reduced between GPUs."""
        if not self.setup.expert_parallel:
            return self.trainable
        return sum(self.adapters(block, of_experts=False) for block in self.model.blocks)

    @property
    def blocks(self) -> tuple[Block, ...]:
        """Blocks of the model, the head too."""
        head = self.model.head
        return (*self.model.blocks, *(() if head is None else (head,)))

    def weight_bytes(self) -> float:
        """Return bytes of parameters on one GPU: masters, or a frozen base and adapters."""
        master = self.setup.master_bytes
        if self.trains:
            return self.model.parameters * master / self.setup.shards
        frozen = sum(self.fp8_elements(block) for block in self.blocks)
        base = frozen * form_bytes(BLOCK, BLOCK) + (self.model.parameters - frozen) * _BF16
        return (base + self.trainable * master) / self.setup.shards

    def state_bytes(self) -> float:
        """Return bytes of the optimizer's states on one GPU."""
        count, size = STATE_BYTES.get(self.setup.optimizer, (0, 0))
        size = self.setup.master_bytes if size is None else size
        return count * size * self.trainable / self.setup.shards

    def gathered_bytes(self, block: Block) -> float:
        """Return bytes of a block's weights that FSDP2 has gathered."""
        parameters, fp8 = block.parameters, self.fp8_elements(block)
        adapters = self.adapters(block)
        if self.setup.expert_parallel:
            stacks = [m for m in block.matmuls if m.experts > 1]
            parameters -= sum(m.elements for m in stacks)
            fp8 -= sum(m.elements for m in stacks if self.in_fp8(m))
            adapters = self.adapters(block, of_experts=False)
        if self.setup.gather == "bf16" and self.trains:
            fp8 = 0
        return fp8 + _BF16 * (parameters - fp8) + self.setup.master_bytes * adapters

    def copied_bytes(self) -> float:
        """Return bytes of the bf16 weights that autocast keeps for matmuls until backward."""
        if not self.setup.autocasts or not self.trains:
            return 0.0
        matmuls = (m for block in self.blocks for m in block.matmuls)
        return float(sum(_BF16 * m.elements for m in matmuls if not self.in_fp8(m)))

    def form_bytes(self, block: Block) -> float:
        """Return bytes of the FP8 forms of a block that wait for its backward.

        Gathered FP8 weights are the forms themselves. Compiled backwards cast again.
        """
        setup = self.setup
        is_gathered = setup.is_sharded and setup.gather == "fp8"
        if not self.trains or is_gathered or setup.recipe.cache_weight is False:
            return 0.0
        if not setup.is_eager and not setup.is_sharded:
            return 0.0
        return self.fp8_elements(block) * form_bytes(BLOCK, BLOCK)


def saved_bytes(block: Block, run: Run) -> float:
    """Return bytes that a forward of a block saves for its backward, for one token."""
    total = sum(_of_norm(norm, run) for norm in block.norms)
    if (a := block.attention) is not None:  # log-sum-exp of each head in fp32
        total += _BF16 * (a.queries + a.keys + a.values + a.output) + _FP32 * a.heads
    fused = {mlp.parent for mlp in block.mlps if run.is_fused(mlp, block)}
    for (parent, role, _), readers in block.groups().items():
        if role == "down" and parent in fused:
            is_stack = readers[0].experts > 1  # h is made again where no groups cut it
            total += 0 if not is_stack or run.setup.recompute else _input_bytes(readers, run)
        else:
            total += _input_bytes(readers, run, in_attention=role == "attention output")
    return total + sum(_of_mlp(mlp, mlp.parent in fused, run) for mlp in block.mlps)


def _of_norm(norm: Norm, run: Run) -> float:
    """Return bytes that a norm saves: x and 1 / rms; written out, x in fp32 and x / rms."""
    size = run.saved_size(run.setup.residual_bytes)
    if norm.is_written_out and run.setup.is_eager and not run.is_fused_norm(norm):
        return norm.width * (run.saved_size(_FP32) + (size if run.trains else 0)) + _FP32
    return norm.width * size + _FP32


def _input_bytes(readers: list[Matmul], run: Run, in_attention: bool = False) -> float:
    """Return bytes saved of one tensor for the linear layers that read it.

    ``in_attention``: attention saves it in bf16 already.
    """
    elements, setup = readers[0].k * readers[0].rows, run.setup
    size = run.saved_size(_BF16)
    if not run.trains:
        return _read_by_adapters(readers, run, in_attention)
    fp8 = [m for m in readers if run.in_fp8(m)]
    total = 0.0
    keeps_input = len(fp8) < len(readers) or (fp8 and setup.recipe.saved_input_format is None)
    if keeps_input and not in_attention:
        total += size * elements
    if fp8 and setup.recipe.saved_input_format is not None:
        total += setup.input_bytes * elements * (1 if setup.shares_casts else len(fp8))
    return total


def _read_by_adapters(readers: list[Matmul], run: Run, in_attention: bool) -> float:
    """Return bytes saved of one tensor, and of its products with A, for adapters.

    Adapters of experts and of FP8 layers read x in bf16. For other linear layers peft converts x
    to the dtype of the adapter, fp32 or bf16.
    """
    adapted, rank = [m for m in readers if run.is_adapted(m)], run.setup.lora or 0
    elements, rows = readers[0].k * readers[0].rows, readers[0].rows
    if run.setup.master == "fp32":
        converted = [m for m in adapted if m.experts == 1 and not run.in_fp8(m)]
    else:
        converted = []
    total = run.saved_size(_FP32) * (elements + rank) * len(converted)
    if len(converted) < len(adapted):
        size = run.saved_size(_BF16)
        total += 0.0 if in_attention else size * elements
        total += size * rank * rows * (len(adapted) - len(converted))
    return total


def _of_mlp(mlp: Mlp, is_fused: bool, run: Run) -> float:
    """Return bytes saved between the linear layers of an MLP; routed rows too."""
    features, size = mlp.hidden * mlp.rows, run.saved_size(_BF16)
    if not mlp.is_gated:
        total = size * features  # the activation's input; the matmul saves its output
    else:
        in_eager = 0 if is_fused or not run.setup.is_eager else 1  # silu(gate)
        total = size * features * (2 + in_eager)
    if mlp.is_stack:  # the output, for the gradients of the router's weights
        total += size * mlp.width * mlp.rows
    return total


def backward_bytes(block: Block, run: Run) -> float:
    """Return bytes that the backward of a block allocates, less those that it has freed.

    Most is allocated in an MLP: the gradients of h, gate and up.
    """
    tokens = run.setup.tokens
    return max((_backward_of(mlp, block, run) * 1.0 for mlp in block.mlps), default=0.0) or (
        2.0 * _BF16 * tokens * max(m.n * m.rows for m in block.matmuls)
    )


def _backward_of(mlp: Mlp, block: Block, run: Run) -> float:
    setup = run.setup
    tokens, features = setup.tokens, setup.tokens * mlp.hidden * mlp.rows
    down = next(m for m in block.matmuls if m.role == "down" and m.parent == mlp.parent)
    is_fp8 = run.in_fp8(down)
    gradient = 0.0
    if run.trains:
        gradient = down.elements * (_BF16 if setup.is_sharded else setup.master_bytes)
    routed = _BF16 * tokens * mlp.width * mlp.rows if mlp.is_stack else 0.0
    form = down.elements if run.trains and is_fp8 and run.form_bytes(block) else 0
    # gate and up exist in bf16 while an op reads them
    is_packed = run.saved_size(_BF16) < _BF16
    unpacked = features * _BF16 * (2 if mlp.is_gated else 1) if is_packed else 0.0
    if run.is_fused(mlp, block):
        forms = 2 if setup.recompute else 4
        of_forms = forms * form_bytes(1, BLOCK)
        return features * (_BF16 + of_forms) + unpacked + gradient - form + routed
    if not mlp.is_gated:
        return features * 2 * _BF16 + unpacked + gradient - form + routed
    freed = 0.0  # the input of down; compilers keep one in bf16 until the weight gradient is done
    keeps_form = is_fp8 and setup.recipe.saved_input_format is not None
    if run.trains and (keeps_form or setup.is_eager):
        freed = features * (setup.input_bytes if is_fp8 else _BF16)
    gradients = 3 if setup.is_eager else 2
    return features * gradients * _BF16 + unpacked + gradient - freed - form + routed


def head_bytes(run: Run) -> float:
    """Return bytes of the head's loss: logits, their gradients, and what its input takes."""
    head, setup = run.model.head, run.setup
    tokens = setup.tokens
    if head is None:  # the output of the model and its gradient
        return 2.0 * _BF16 * tokens * run.model.width
    total = sum(_of_norm(norm, run) for norm in head.norms) * tokens
    for matmul in head.matmuls:
        logits = tokens * matmul.n
        is_fp8 = run.in_fp8(matmul)
        of_input = setup.input_bytes if is_fp8 else _BF16
        total += tokens * matmul.k * (of_input + _BF16)  # and the gradient of the last block
        if setup.loss == "chunks":
            # each logit, and the 2 bytes that its loss takes
            rows = min(tokens, max(BLOCK, CHUNK_BYTES // (2 * _BF16 * matmul.n) // BLOCK * BLOCK))
            total += rows * matmul.n * 2 * _BF16
            if run.trains:
                total += matmul.elements * (_FP32 if rows < tokens else _BF16)
        elif setup.compile == "model":  # logits, and their gradient in fp32 and in bf16
            total += logits * (_BF16 + _FP32 + _BF16)
        else:  # log-softmax, its gradient and the gradient of logits, all in fp32
            total += logits * 3 * _FP32
    return total


def peak(run: Run) -> Memory:
    """Return the memory at the moment of a step when most is allocated."""
    moments = (_loss(run), _block(run, last=True), _block(run, last=False), _update(run))
    return max(moments, key=lambda memory: memory.total)


def _static(run: Run) -> dict[str, float]:
    parts = dict.fromkeys(PARTS, 0.0)
    parts[WEIGHTS], parts[STATES] = run.weight_bytes(), run.state_bytes()
    parts[LIBRARIES], parts[COPIES] = CUBLAS_BYTES, run.copied_bytes()
    if run.setup.microbatches > 1:  # of earlier microbatches; not reduced yet, so in fp32
        size = _FP32 if run.setup.is_sharded else run.setup.master_bytes
        parts[GRADIENTS] = float(run.trainable * size)
    return parts


def _activations(run: Run, held: tuple[Block, ...]) -> float:
    """Return bytes saved by these blocks, with checkpointing only the input of each."""
    tokens = run.setup.tokens
    if run.setup.checkpointing == "blocks":
        size = form_bytes(1, BLOCK) if run.packs else run.setup.residual_bytes
        return float(sum(size * tokens * block.width for block in held))
    return sum(tokens * saved_bytes(block, run) + run.thin_bytes(block) for block in held)


def _forms(run: Run, held: tuple[Block, ...]) -> float:
    if run.setup.checkpointing == "blocks":
        return 0.0
    return sum(run.form_bytes(block) for block in held)


def _gathered(run: Run, blocks: int) -> float:
    """Return bytes of gathered weights while ``blocks`` blocks and the head are gathered."""
    if not run.setup.is_sharded:
        return 0.0
    model = run.model
    head = 0.0 if model.head is None else run.gathered_bytes(model.head)
    head += _BF16 * model.embedding if model.is_tied else 0
    of_blocks = [run.gathered_bytes(block) for block in model.blocks]
    if not run.setup.reshard:
        embedding = 0 if model.is_tied else model.embedding
        return head + sum(of_blocks) + _BF16 * (embedding + model.others)
    return head + sum(sorted(of_blocks)[-blocks:])


def _loss(run: Run) -> Memory:
    parts, model = _static(run), run.model
    head = () if model.head is None else (model.head,)
    parts[FORMS] = _forms(run, model.blocks) + sum(run.form_bytes(x) for x in head)
    parts[GATHERED] = _gathered(run, 1)
    parts[ACTIVATIONS] = _activations(run, model.blocks)
    parts[HEAD] = head_bytes(run)
    return Memory("the backward of the loss", parts)


def _block(run: Run, last: bool) -> Memory:
    """Return the memory in the backward of the last block, or of the first."""
    parts, model, setup = _static(run), run.model, run.setup
    block = model.blocks[-1 if last else 0]
    waiting = model.blocks if last else (block,)
    parts[FORMS], parts[ACTIVATIONS] = _forms(run, waiting), _activations(run, waiting)
    if setup.checkpointing == "blocks":
        parts[FORMS] += run.form_bytes(block)
        parts[ACTIVATIONS] += setup.tokens * saved_bytes(block, run) + run.thin_bytes(block)
    parts[GATHERED] = _gathered(run, 2)
    # the gradient of the block's output, and of a model without a head the output
    parts[HEAD] = _BF16 * setup.tokens * block.width * (1.0 if model.head is not None else 2.0)
    parts[WORKSPACE] = backward_bytes(block, run)
    if setup.is_sharded and run.trains:  # gradients of a block, and the input of their reduction
        parts[WORKSPACE] += block.parameters * (_BF16 + _FP32)
    if setup.microbatches == 1 and run.trains:
        embedding = 0 if model.is_tied else model.embedding
        of_head = model.embedding if model.is_tied else 0
        of_head += 0 if model.head is None else model.head.parameters
        done = of_head if last else model.parameters - block.parameters - embedding
        parts[GRADIENTS] = done * setup.master_bytes / setup.shards
    if not (run.trains or last):  # of all adapters
        parts[GRADIENTS] = run.trainable * setup.master_bytes / setup.shards
    return Memory(f"the backward of the {'last' if last else 'first'} block", parts)


def _update(run: Run) -> Memory:
    parts, setup = _static(run), run.setup
    parts[COPIES] = 0.0  # freed with autocast's context
    parts[GRADIENTS] = run.trainable * setup.master_bytes / setup.shards
    if setup.gpus > 1 and not setup.is_sharded:  # DistributedDataParallel's buckets
        parts[GRADIENTS] *= 2
    return Memory("the optimizer's step", parts)
