"""Tensor parallel training of a Llama-shaped decoder, bf16 or FP8. See ``--help``."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections import Counter
from collections.abc import Sequence
from statistics import median
from typing import Any

# as in train_lm.py: read when torch is loaded
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch
import torch.distributed as dist
import torch.distributed.tensor.parallel as styles
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import parallelize_module
from torch.utils._python_dispatch import TorchDispatchMode

from common.needs import needs

with needs("rich", "blocktensor", install="'.[demo]'"):
    import blocktensor
    from blocktensor.distributed import ColwiseParallel, PrepareModuleInput, RowwiseParallel
    from common.llama import MLP, SHAPES, Shape, rope_tables, rotate, seed_of
    from common.parallel_runs import parsed, parser_of, report, written
    from fsdp2_llama import ranks

# FSDP2 besides takes cuts at multiples of 128 only: here with --tp 2
SIZES = {**SHAPES, "tiny": Shape(dim=256, layers=2, heads=4, kv_heads=4, hidden=512, vocab=256)}

DESCRIPTION = """\
Train a Llama-shaped decoder with tensor parallel linears, in bf16 or in blockwise FP8, on random
tokens. Ranks that --tp leaves over shard the model with FSDP2. The FP8 run differs by one line,
blocktensor.convert(model); gathers of activations and of their gradients are then e4m3.
"""

EPILOG = """\
examples:
  python examples/tp_llama.py --precision fp8                                 one process
  torchrun --nproc-per-node 2 examples/tp_llama.py --sp --precision fp8       tokens are cut, too
  torchrun --nproc-per-node 4 examples/tp_llama.py --tp 2 --sp --precision fp8     FSDP2 besides
"""


class Attention(nn.Module):
    """Grouped queries; each rank has some of the heads."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.head_dim = shape.head_dim
        kv = shape.kv_heads * shape.head_dim
        self.q = nn.Linear(shape.dim, shape.dim, bias=False)
        self.k = nn.Linear(shape.dim, kv, bias=False)
        self.v = nn.Linear(shape.dim, kv, bias=False)
        self.o = nn.Linear(shape.dim, shape.dim, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """``x[batch, time, dim]``."""
        q, k, v = (
            linear(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for linear in (self.q, self.k, self.v)
        )
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        mixed: Tensor = self.o(y.transpose(1, 2).flatten(-2))
        return mixed


class Block(nn.Module):
    """Attention, then SwiGLU: modules of their own, whose inputs are gathered once."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.attention_norm, self.mlp_norm = (nn.RMSNorm(shape.dim, eps=1e-5) for _ in range(2))
        self.attention, self.mlp = Attention(shape), MLP(shape)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """``x[batch, time, dim]``, of this rank's tokens with ``--sp``."""
        x = x + self.attention(self.attention_norm(x), cos, sin)
        mixed: Tensor = x + self.mlp(self.mlp_norm(x))
        return mixed


class Decoder(nn.Module):
    """Tokens and the tokens that follow in, mean loss out."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.embedding = nn.Embedding(shape.vocab, shape.dim)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = nn.RMSNorm(shape.dim, eps=1e-5)
        self.lm_head = nn.Linear(shape.dim, shape.vocab, bias=False)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Both ``[batch, time]``."""
        x = self.embedding(tokens)
        cos, sin = rope_tables(self.shape, tokens.shape[1], tokens.device)
        for block in self.blocks:
            x = block(x, cos, sin)
        logits = self.lm_head(self.norm(x)).float()
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def parallelize(model: Decoder, mesh: DeviceMesh, sequence: bool) -> None:
    """Cut linears between ranks, and tokens between linears if ``sequence`` is set."""
    tokens = Shard(1) if sequence else Replicate()
    whole, norm = Replicate(), styles.SequenceParallel(use_local_output=True)
    shared = PrepareModuleInput(input_layouts=tokens, desired_input_layouts=whole)
    # the positions' tables stay as they are
    attention = PrepareModuleInput(
        input_layouts=(tokens, None, None), desired_input_layouts=(whole, None, None)
    )
    norms = {"attention_norm": norm, "mlp_norm": norm} if sequence else {}
    for block in model.blocks:
        parallelize_module(
            block,
            mesh,
            {
                "attention": attention,
                **{f"attention.{name}": ColwiseParallel() for name in "qkv"},
                "attention.o": RowwiseParallel(output_layouts=tokens),
                "mlp": shared,
                **{f"mlp.{name}": ColwiseParallel() for name in ("gate", "up")},
                "mlp.down": RowwiseParallel(output_layouts=tokens),
                **norms,
            },
        )
    ends: dict[str, Any] = {
        "embedding": styles.RowwiseParallel(input_layouts=whole, output_layouts=tokens),
        "lm_head": ColwiseParallel(input_layouts=tokens, output_layouts=whole),
    }
    parallelize_module(model, mesh, ends | ({"norm": norm} if sequence else {}))


def build(options: argparse.Namespace, shape: Shape, mesh: DeviceMesh) -> tuple[Decoder, int]:
    """The model as every rank holds it, and how many of its linears are FP8."""
    torch.manual_seed(options.seed)  # one model, whatever the number of ranks
    model = Decoder(shape).to(torch.bfloat16).to(options.device)
    converted = 0
    if options.precision == "fp8":
        # tiny's are all too small for FP8 to pay, and are here to be tried
        report = blocktensor.convert(model, skip_small=options.model != "tiny")
        converted = len(report.converted)
    parallelize(model, mesh["tensor"], options.sp)
    if mesh["data"].size() > 1:
        for block in model.blocks:
            fully_shard(block, mesh=mesh["data"])
        fully_shard(model, mesh=mesh["data"])
    return model, converted


class Wire(TorchDispatchMode):
    """Bytes that this rank brings to collectives of tensor parallel linears, by their kind."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes: Counter[str] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = str(func)
        if name.startswith("_c10d_functional.") and ("all_" in name or "reduce_" in name):
            sent = args[0] if isinstance(args[0], list) else [args[0]]
            self.bytes[name.split(".")[1]] += sum(x.nbytes for x in sent)
        return func(*args, **(kwargs or {}))


def batch(options: argparse.Namespace, shape: Shape, rank: int, step: int) -> tuple[Tensor, Tensor]:
    """Tokens and those that follow, ``[batch, seq]`` each, the same for equal ``rank``."""
    generator = torch.Generator().manual_seed(seed_of(options.seed, "data", rank, step))
    random = torch.rand(options.batch, options.seq + 1, generator=generator)
    # small tokens are more frequent: there is something to learn
    tokens = random.pow(3).mul(shape.vocab).long().to(options.device)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def train(options: argparse.Namespace, shape: Shape, mesh: DeviceMesh) -> dict[str, Any]:
    """All steps; what is written down."""
    model, converted = build(options, shape, mesh)
    # foreach cannot mix them
    cut = [p for p in model.parameters() if isinstance(p, DTensor)]
    whole = [p for p in model.parameters() if not isinstance(p, DTensor)]
    groups = [{"params": group} for group in (cut, whole) if group]
    optimizer = torch.optim.AdamW(groups, lr=options.lr, foreach=True)
    rank, wire = mesh["data"].get_local_rank(), Wire()
    losses: list[float] = []
    seconds: list[float] = []
    for step in range(options.steps):
        inputs, targets = batch(options, shape, rank, step)
        begin = time.perf_counter()
        loss = model(inputs, targets)
        with torch.autograd.set_multithreading_enabled(False):  # less host time: docs/faq.md
            loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        mean = loss.detach()
        dist.all_reduce(mean)
        losses.append(mean.item() / dist.get_world_size())  # waits for the device
        seconds.append(time.perf_counter() - begin)
    with wire:  # a step that is not timed
        model(*batch(options, shape, rank, options.steps)).backward()
    timed = seconds[options.warmup_steps :]
    tokens = options.batch * options.seq * mesh["data"].size()
    return {
        "options": written(options),
        "world_size": dist.get_world_size(),
        "fp8_linears": converted,
        "losses": losses,
        "tokens_per_second": tokens / median(timed),
        "wire_bytes": dict(wire.bytes),
    }


def parse(argv: Sequence[str] | None) -> tuple[argparse.Namespace, Shape]:
    """The command line."""
    parser = parser_of("tp_llama.py", DESCRIPTION, EPILOG, SIZES, batch=2)
    add = parser.add_argument
    add("--tp", type=int, help="ranks that cut a linear (default: all)")
    add("--sp", action="store_true", help="cut tokens between linears (sequence parallel)")
    options = parsed(parser, argv)
    return options, SIZES[options.model]


def main(argv: Sequence[str] | None = None) -> int:
    """Train, report, write down."""
    options, shape = parse(argv)
    with ranks(options.device):
        world = dist.get_world_size()
        options.tp = options.tp or world
        if world % options.tp or shape.kv_heads % options.tp:
            sys.exit(
                f"--tp {options.tp} must divide the {world} ranks and the {shape.kv_heads} heads "
                f"of keys"
            )
        if options.sp and options.seq % options.tp:
            sys.exit(f"--sp cuts --seq {options.seq}: it must be a multiple of --tp {options.tp}")
        names = ("data", "tensor")
        mesh = init_device_mesh(
            options.device, (world // options.tp, options.tp), mesh_dim_names=names
        )
        result = train(options, shape, mesh)
        if dist.get_rank() == 0:
            cut = "outputs, inputs and tokens" if options.sp else "outputs and inputs"
            ranked = "ranks", f"{result['world_size']}, of which {options.tp} cut {cut}"
            sent = [
                (f"{name}, MB a rank and step", f"{count / 1e6:.3f}")
                for name, count in sorted(result["wire_bytes"].items())
            ]
            report(result, [ranked], options.out, sent)
        dist.barrier()
    return 0


if __name__ == "__main__":
    sys.exit(main())
