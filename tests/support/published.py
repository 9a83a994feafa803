"""Tiny models of published families: their FP8 checkpoints, and their cuts between ranks."""

from __future__ import annotations

import copy
import functools
import importlib.util
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import parallelize_module

from blocktensor import convert, save_fp8
from blocktensor.distributed import ColwiseParallel, RowwiseParallel
from blocktensor.sharding.dtensor import own_part
from tests.support.moe_models import transformers_moe
from tests.support.ranks import shared_mesh

TOKENS = torch.arange(24).view(2, 12) * 7 % 64
SIZES: dict[str, Any] = {
    **{"hidden_size": 256, "intermediate_size": 256, "moe_intermediate_size": 256},
    **{"num_attention_heads": 4, "num_key_value_heads": 4},
}
LATENT = {
    **{"q_lora_rank": 128, "kv_lora_rank": 128, "v_head_dim": 64},
    **{"qk_rope_head_dim": 64, "qk_nope_head_dim": 64},
}


def _dense() -> Any:
    import transformers

    sizes = {**SIZES, "head_dim": 64, "num_hidden_layers": 2, "vocab_size": 64}
    del sizes["moe_intermediate_size"]
    return transformers.Qwen3ForCausalLM(
        transformers.Qwen3Config(**sizes | {"intermediate_size": 512}, max_position_embeddings=64)
    )


MODELS: dict[str, Callable[[], Any]] = {
    "DeepSeek-V3": lambda: transformers_moe("deepseek", **SIZES | LATENT),
    "Qwen3-MoE": lambda: transformers_moe("qwen3", **SIZES),
    "GLM-MoE": lambda: transformers_moe("glm4", **SIZES),
    "Qwen3": _dense,
}


def _minimax() -> Any:
    import transformers

    sizes = {**SIZES, "head_dim": 64, "rotary_dim": 64, "num_local_experts": 4}
    config = transformers.MiniMaxM2Config(
        **sizes, num_experts_per_tok=2, num_hidden_layers=2, vocab_size=64
    )
    made = transformers.MiniMaxM2ForCausalLM(config)
    made.set_experts_implementation("grouped_mm")
    return made


MORE_MODELS: dict[str, Callable[[], Any]] = {
    "MiniMax-M2": _minimax,
    "gpt-oss": lambda: transformers_moe("gpt_oss", **SIZES),
}
"""Models that only long runs of tests cut in every way."""


def written(kind: str, folder: Path) -> Path:
    """Write an FP8 checkpoint in the published layout: e4m3 matrices, one for each expert."""
    folder.mkdir()
    for name, content in _files(kind).items():
        (folder / name).write_bytes(content)
    return folder


@functools.cache
def _files(kind: str) -> dict[str, bytes]:
    """The files of a checkpoint, which a process makes once."""
    model = (MODELS | MORE_MODELS)[kind]().bfloat16()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for x in model.parameters():
            noise = torch.randn(x.shape, generator=generator)
            x.copy_(1 + noise / 8 if x.ndim == 1 else noise / 16)
    convert(model, skip_small=False)
    with tempfile.TemporaryDirectory() as parent:
        folder = save_fp8(model, Path(parent, "fp8"), all_in_fp8=True, max_shard_bytes=1 << 19)
        return {file.name: file.read_bytes() for file in folder.iterdir()}


def empty(kind: str, device: str = "cpu", *, converted: bool = True) -> Any:
    """Return a model whose parameters are on meta; its buffers have values, on ``device``."""
    model = copy.deepcopy(_empty(kind, device))
    torch.manual_seed(0)  # what is drawn next is the same after each call
    if converted:
        convert(model, skip_small=False)
    return model


@functools.cache
def _empty(kind: str, device: str) -> Any:
    """The model before its conversion: to make one takes three times as long as to copy it."""
    model = (MODELS | MORE_MODELS)[kind]().bfloat16().to(device)
    for module in model.modules():
        for name, x in module._parameters.items():
            if x is not None:
                module._parameters[name] = nn.Parameter(x.to("meta"))
    return model


def fsdp(model: Any, mesh: DeviceMesh) -> None:
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)


def tensor_parallel(model: Any, mesh: DeviceMesh) -> None:
    """Cut attention and dense MLPs."""
    colwise = ("q_proj", "k_proj", "v_proj", "q_b_proj", "kv_b_proj", "gate_proj", "up_proj")
    for layer in model.model.layers:
        plan = {
            name: ColwiseParallel()
            if name.endswith(colwise)
            else RowwiseParallel(reduce_dtype=torch.float32)
            for name, x in layer.named_modules()
            if isinstance(x, nn.Linear) and name.endswith((*colwise, "o_proj", "down_proj"))
        }
        parallelize_module(layer, mesh, plan)


_OF_5_17 = {
    "model.layers.*.mlp.gate": "ep_router",
    "model.layers.*.mlp.experts.gate_up_proj": "grouped_gemm",
    "model.layers.*.mlp.experts.down_proj": "grouped_gemm",
    "model.layers.*.mlp.experts": "moe_tp_experts",
}
"""The ``base_model_ep_plan`` of Qwen3-MoE in transformers 5.17."""


def expert_parallel(model: Any, mesh: DeviceMesh) -> None:
    """Cut the experts of a model by transformers' own function, which moved between versions."""
    if importlib.util.find_spec("transformers.distributed.expert_parallel") is None:
        from transformers.distributed.tensor_parallel import apply_tensor_parallelism

        model.tp_plan = _OF_5_17
        apply_tensor_parallelism(model, mesh)
    else:
        from transformers.distributed.expert_parallel import apply_expert_parallelism

        plan = model._expand_parallel_plan(model.ep_plan)
        apply_expert_parallelism(model, mesh, mesh, plan, ep_implementation="all_reduce")


CUTS: dict[str, Callable[[Any, DeviceMesh], None]] = {
    "FSDP": fsdp,
    "TP": tensor_parallel,
    "EP": expert_parallel,
}
LAYOUTS = (*CUTS, "FSDP over TP", "FSDP over EP")


def arrange(model: Any, layout: str, world: int, device: str) -> None:
    """Cut a model between all ranks; over two dimensions of a mesh for "FSDP over"."""
    if layout in CUTS:
        CUTS[layout](model, shared_mesh(device, world, names=("all",)))
        return
    square = shared_mesh(device, 2, world // 2, names=("a", "b"))
    CUTS[layout.removeprefix("FSDP over ")](model, square["b"])
    fsdp(model, square["a"])


def local_bytes(model: nn.Module) -> dict[str, Tensor]:
    """Return the bytes of what this rank holds, by name and part."""
    found = {}
    for name, x in model.state_dict(keep_vars=True).items():
        local = own_part(x).detach()
        inner = local.__tensor_flatten__()[0] if hasattr(local, "__tensor_flatten__") else []
        parts = {f"{name}.{key}": getattr(local, key) for key in inner} or {name: local}
        found |= {key: y.contiguous().view(-1).view(torch.uint8) for key, y in parts.items()}
    return found
