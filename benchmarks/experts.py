"""Experts, forward + backward: the layer of torchtitan, and a whole Qwen3-MoE; bf16 beside FP8.

"inputs shared": ``share_inputs`` lets the two weights that read x share its cast.
"cache_weight=False": the FP8 form of a weight is released after the forward and cast again.
"""

from __future__ import annotations

import functools
import gc
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import blocktensor as bt

from . import hf_llama, profiled
from .memory import peak, saved_bytes
from .shapes import group_sizes
from .timing import Call, round_robin


class Shape(NamedTuple):
    """A layer of ``experts``, to each of which go ``tokens`` on average."""

    experts: int
    tokens: int
    dim: int
    hidden: int


LAYERS = (Shape(8, 8192, 7168, 2048), Shape(16, 4096, 2048, 768), Shape(64, 768, 2048, 1408))
"""Layers of DeepSeek-V3 and Qwen3-30B on many GPUs, and of DeepSeek's 16B model."""

SMALL_LAYERS = tuple(
    Shape(experts, tokens, dim, hidden)
    for experts, tokens in ((16, 4096), (64, 512))
    for dim, hidden in (
        (512, 256),
        (1024, 256),
        (1024, 512),
        (2048, 256),
        (2048, 512),
        (1024, 1024),
    )
)
"""Layers around the size from which FP8 pays: of many tokens an expert, and of few."""

VARIANTS = (
    "bf16",
    "fp8",
    "fp8, inputs shared",
    "fp8, inputs shared, cache_weight=False",
    "fp8, fused",
    "fp8, fused, recompute, cache_weight=False",
)

MODEL_VARIANTS = (
    "bf16",
    "fp8",
    "fp8, inputs shared",
    "fp8, inputs shared, head too",
    "fp8, fused",
    "fp8, fused, head too",
)
HEAD_DIM = 128


@dataclass(frozen=True)
class Qwen3:
    """A Qwen3-MoE of transformers, and the tokens of a training step."""

    hidden: int
    experts: int
    expert_hidden: int
    layers: int = 2
    top_k: int = 8
    vocab: int = 32768
    batch: int = 4
    time: int = 4096
    filter_small: bool = True


MODELS = (Qwen3(4096, 32, 1536), Qwen3(2048, 64, 768))
"""Experts of Qwen3-235B, and those of Qwen3-30B, whose steps go elsewhere for the most part."""

QUICK: dict[str, Any] = {
    "layers": (Shape(4, 512, 1024, 512),),
    "small": (),
    "models": (Qwen3(512, experts=4, expert_hidden=256, top_k=2, time=512, filter_small=False),),
    "rounds": 3,
}
"""The arguments of a smoke run."""

_MIB = 2**20


class GroupedExperts(nn.Module):
    """SwiGLU experts as torchtitan has them, by whose name ``convert`` knows the stacks."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        experts, _, dim, hidden = shape
        self.w1 = nn.Parameter(torch.randn(experts, hidden, dim) * dim**-0.5)
        self.w2 = nn.Parameter(torch.randn(experts, dim, hidden) * hidden**-0.5)
        self.w3 = nn.Parameter(torch.randn(experts, hidden, dim) * dim**-0.5)

    def forward(self, x: Tensor, offs: Tensor) -> Tensor:
        """``x[rows, dim]`` in groups that end at ``offs``."""
        gate = torch._grouped_mm(x, self.w1.transpose(-2, -1), offs=offs)
        up = torch._grouped_mm(x, self.w3.transpose(-2, -1), offs=offs)
        return torch._grouped_mm(F.silu(gate) * up, self.w2.transpose(-2, -1), offs=offs)


def variant(name: str, shape: Shape, device: torch.device | str = "cuda") -> GroupedExperts:
    """The layer in bf16 as the variant has it, of the same values for every variant."""
    torch.manual_seed(0)
    with torch.device(device):
        experts = GroupedExperts(shape).to(torch.bfloat16)
    if name != "bf16":
        recipe = bt.Recipe(cache_weight=False if "False" in name else "backward")
        bt.convert(experts, recipe, skip_small=False)
    if "shared" in name:
        bt.share_inputs(experts)
    if "fused" in name:
        bt.fuse(experts, recompute="recompute" in name)
    return experts


def ends(shape: Shape, device: torch.device | str = "cuda") -> Tensor:
    """Ends of uneven groups of any sizes."""
    sizes = group_sizes(shape.experts, shape.experts * shape.tokens)
    return torch.tensor(list(accumulate(sizes)), dtype=torch.int32, device=device)


def step(experts: nn.Module, x: Tensor, grad: Tensor, offs: Tensor) -> Call:
    """A forward and backward of the layer alone."""

    def once() -> None:
        experts.zero_grad()
        x.grad = None
        experts(x, offs).backward(grad)

    return once


def step_of_model(experts: nn.Module, rows: int, seed_row: Tensor, offs: Tensor) -> Call:
    """Return a forward and backward that makes x and the gradient of the output, as a model does.

    They are freed as soon as the layer does not need them; a peak measured with an input that the
    caller holds would not show what is saved of it. Of times, this step is no measure.

    Args:
        experts: the layer.
        rows: tokens of all groups.
        seed_row: ``[1, dim]`` with a gradient, of which x is made.
        offs: ends of the groups.
    """
    weight = torch.ones_like(seed_row.detach())

    def once() -> None:
        experts.zero_grad()
        seed_row.grad = None
        # in one expression: a name would hold a tensor that the backward needs no more
        (experts(seed_row.expand(rows, -1).contiguous(), offs) * weight).sum().backward()

    return once


def measure_small(shape: Shape, rounds: int) -> dict[str, Any]:
    """One row: how much faster FP8 is in eager mode, and how much less its kernels take."""
    offs, rows = ends(shape), shape.experts * shape.tokens
    x = torch.randn(rows, shape.dim, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    grad = torch.randn_like(x.detach())
    names = ("bf16", "fp8, inputs shared")
    steps = {name: step(variant(name, shape), x, grad, offs) for name in names}
    ms = round_robin({name: [call] for name, call in steps.items()}, rounds, 12.0)
    device = {name: sum(profiled.parts(call).values()) for name, call in steps.items()}
    bf16, fp8 = names
    return {
        "what": "small layer",
        **shape._asdict(),
        "variant": fp8,
        "ms": round(ms[fp8], 3),
        "speedup": round(ms[bf16] / ms[fp8], 3),
        "device_speedup": round(device[bf16] / device[fp8], 3),
    }


def measure_layer(shape: Shape, rounds: int) -> Iterator[dict[str, Any]]:
    """One row a variant."""
    offs, rows = ends(shape), shape.experts * shape.tokens
    x = torch.randn(rows, shape.dim, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    grad = torch.randn_like(x.detach())
    steps = {name: step(variant(name, shape), x, grad, offs) for name in VARIANTS}
    ms = round_robin({name: [call] for name, call in steps.items()}, rounds, 30.0)
    spent = {name: profiled.parts(call) for name, call in steps.items()}
    del steps, x, grad
    peaks, saved = {}, {}
    for name in VARIANTS:
        gc.collect()
        torch.cuda.empty_cache()
        before = torch.cuda.memory_allocated()
        experts = variant(name, shape)
        row = torch.randn(1, shape.dim, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        peaks[name] = peak(step_of_model(experts, rows, row, offs)) - before
        x = row.expand(rows, -1).contiguous()
        saved[name] = saved_bytes(experts, lambda x, e=experts: e(x, offs), x)  # type: ignore[misc]
        del experts, row, x
    for name in VARIANTS:
        yield layer_row(name, shape, ms, peaks, saved, spent[name])


def layer_row(
    name: str,
    shape: Shape,
    ms: dict[str, float],
    peaks: dict[str, int],
    saved: dict[str, int],
    spent: dict[str, float],
) -> dict[str, Any]:
    """One row of the results: time, memory, and microseconds by kinds of kernels.

    ``saved_mib``: of activations, for the backward.
    """
    return {
        "what": "layer",
        **shape._asdict(),
        "variant": name,
        "ms": round(ms[name], 3),
        "speedup": round(ms["bf16"] / ms[name], 3),
        "peak_mib": round(peaks[name] / _MIB, 1),
        "peak_of_bf16": round(peaks[name] / peaks["bf16"], 3),
        "saved_mib": round(saved[name] / _MIB, 1),
        "saved_of_bf16": round(saved[name] / saved["bf16"], 3),
        **{f"{kind}_us": round(us, 1) for kind, us in spent.items()},
    }


def make_qwen3(name: str, shape: Qwen3, device: torch.device | str = "cuda") -> Any:
    """The model in bf16, or converted, of the same values for every variant."""
    import transformers

    sizes: dict[str, Any] = {
        "hidden_size": shape.hidden,
        "intermediate_size": shape.expert_hidden,
        "moe_intermediate_size": shape.expert_hidden,
        "num_experts": shape.experts,
        "num_experts_per_tok": shape.top_k,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": max(1, shape.hidden // HEAD_DIM),
        "num_key_value_heads": max(1, shape.hidden // HEAD_DIM // 8),
        "head_dim": HEAD_DIM,
        "vocab_size": shape.vocab,
        "max_position_embeddings": shape.time,
    }
    config = transformers.Qwen3MoeConfig(**sizes, use_cache=False)
    model = hf_llama.in_bf16(transformers.Qwen3MoeForCausalLM, config, device)
    model.set_experts_implementation("grouped_mm")
    if name != "bf16":
        bt.convert(model, skip_small=shape.filter_small)
    if "shared" in name:
        bt.share_inputs(model)
    if "fused" in name:
        bt.fuse(model)
    if "head" in name:
        bt.to_blockwise_fp8_weights(model.lm_head)
    return model


def measure_model(shape: Qwen3, rounds: int) -> Iterator[dict[str, Any]]:
    """One row a variant: milliseconds a step in eager mode, and peak memory of each model alone."""
    tokens = torch.randint(shape.vocab, (shape.batch, shape.time), device="cuda")
    make = functools.partial(make_qwen3, shape=shape)
    ms, peaks = hf_llama.times_and_peaks(MODEL_VARIANTS, make, tokens, rounds)
    for name in MODEL_VARIANTS:
        yield model_row(name, shape, ms, peaks)


def model_row(
    name: str, shape: Qwen3, ms: dict[str, float], peaks: dict[str, int]
) -> dict[str, Any]:
    """One row of the results."""
    return {
        "what": f"Qwen3-MoE, {shape.layers} layers",
        "experts": shape.experts,
        "tokens": shape.batch * shape.time,
        "dim": shape.hidden,
        "hidden": shape.expert_hidden,
        "variant": name,
        "ms": round(ms[f"{name}/eager"], 3),
        "speedup": round(ms["bf16/eager"] / ms[f"{name}/eager"], 3),
        "peak_mib": round(peaks[f"{name}/eager"] / 2**20, 1),
        "peak_of_bf16": round(peaks[f"{name}/eager"] / peaks["bf16/eager"], 3),
    }


def facts() -> dict[str, Any]:
    """Return facts to record with the rows."""
    return {"absent": hf_llama.absent()}


def measure(
    layers: tuple[Shape, ...] = LAYERS,
    small: tuple[Shape, ...] = SMALL_LAYERS,
    models: tuple[Qwen3, ...] = MODELS,
    rounds: int = 8,
) -> Iterator[dict[str, Any]]:
    """One row a layer and variant and one a small layer, then models if transformers is here."""
    for shape in layers:
        yield from measure_layer(shape, rounds)
    for shape in small:
        yield measure_small(shape, rounds)
    for model in () if hf_llama.absent() else models:
        yield from measure_model(model, rounds)
