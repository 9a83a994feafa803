"""Mixtures of experts for tests: as torchtitan writes them, and tiny transformers models."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from tests.support.models import randn

TOKENS = torch.arange(24).view(2, 12) * 7 % 64


class GroupedExperts(nn.Module):
    """SwiGLU experts in three stacks, multiplied by group, as torchtitan's class of this name.

    ``before``: whether stacks are transposed before they are cast to bf16, as those of GPT-OSS.
    """

    def __init__(self, e: int, k: int, n: int, before: bool = False) -> None:
        super().__init__()
        self.before = before
        self.w1_EFD: Tensor
        self.w2_EDF: Tensor
        self.w3_EFD: Tensor
        for seed, (name, shape) in enumerate(
            {"w1_EFD": (e, n, k), "w2_EDF": (e, k, n), "w3_EFD": (e, n, k)}.items()
        ):
            values = randn(*shape, seed=seed, dtype=torch.float32) / math.sqrt(shape[2])
            self.register_parameter(name, nn.Parameter(values))

    def forward(self, x: Tensor, sizes: Tensor) -> Tensor:
        offs = sizes.cumsum(0, dtype=torch.int32)

        def by(x: Tensor, w: Tensor) -> Tensor:
            w = w.to_local() if isinstance(w, DTensor) else w
            stack = (
                w.transpose(-2, -1).bfloat16() if self.before else w.bfloat16().transpose(-2, -1)
            )
            y: Tensor = torch._grouped_mm(x.bfloat16(), stack, offs=offs)
            return y

        hidden = F.silu(by(x, self.w1_EFD)) * by(x, self.w3_EFD)
        return by(hidden, self.w2_EDF).type_as(x)


class TitanMoE(nn.Module):
    """A router and its experts: top 2 of ``e``."""

    def __init__(self, e: int = 4, k: int = 128, n: int = 256, before: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.gate = nn.Linear(k, e, bias=False)
        self.experts = GroupedExperts(e, k, n, before)

    def forward(self, x: Tensor) -> Tensor:
        scores, chosen = self.gate(x).softmax(-1).topk(2, dim=-1)
        order = chosen.view(-1).argsort(stable=True)
        sizes = torch.bincount(chosen.view(-1), minlength=len(self.gate.weight))
        y = self.experts(x[order // 2], sizes) * scores.view(-1)[order, None]
        return torch.zeros_like(x).index_add(0, order // 2, y)


class BatchedExperts(nn.Module):
    """Experts in stacks ``[E, K, N]``, each of which multiplies all tokens, as Llama 4 has them."""

    def __init__(self, e: int, k: int, n: int) -> None:
        super().__init__()
        self.up = nn.Parameter(randn(e, k, n, seed=1, dtype=torch.float32) / math.sqrt(k))
        self.down = nn.Parameter(randn(e, n, k, seed=2, dtype=torch.float32) / math.sqrt(n))

    def forward(self, x: Tensor) -> Tensor:
        each = x.bfloat16().expand(len(self.up), *x.shape)
        hidden = torch.bmm(each, self.up.bfloat16()).relu()
        return torch.bmm(hidden, self.down.bfloat16()).type_as(x)


class BatchedMoE(nn.Module):
    """Experts whose results are weighed by a router."""

    def __init__(self, e: int = 4, k: int = 128, n: int = 256) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.gate = nn.Linear(k, e, bias=False)
        self.experts = BatchedExperts(e, k, n)

    def forward(self, x: Tensor) -> Tensor:
        scores = self.gate(x).softmax(-1)
        return (self.experts(x) * scores.t()[:, :, None]).sum(0)


def transformers_moe(kind: str, implementation: str = "grouped_mm", **options: Any) -> Any:
    """A model of two layers: qwen3, mixtral, deepseek, glm4, gpt_oss or llama4."""
    import transformers

    transformers.logging.set_verbosity_error()
    routed = {"n_routed_experts": 4, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1}
    low_rank = {"q_lora_rank": 32, "kv_lora_rank": 32, "v_head_dim": 32}
    name, own = {
        "qwen3": ("Qwen3Moe", {"num_experts": 4, "head_dim": 64}),
        "mixtral": ("Mixtral", {"num_local_experts": 4}),
        "deepseek": (
            "DeepseekV3",
            {**routed, **low_rank, "qk_rope_head_dim": 16, "qk_nope_head_dim": 16},
        ),
        "glm4": ("Glm4Moe", {**routed, "head_dim": 64}),
        "gpt_oss": ("GptOss", {"num_local_experts": 4, "head_dim": 64}),
        "llama4": (
            "Llama4",
            {"num_local_experts": 4, "head_dim": 64, "intermediate_size_mlp": 128},
        ),
    }[kind]
    config = getattr(transformers, f"{name}TextConfig" if kind == "llama4" else f"{name}Config")
    common = {
        **{"hidden_size": 128, "intermediate_size": 128, "moe_intermediate_size": 128},
        **{"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2},
        **{"vocab_size": 64, "max_position_embeddings": 64},
        "num_experts_per_tok": 1 if kind == "llama4" else 2,
    }
    torch.manual_seed(0)
    made = getattr(transformers, f"{name}ForCausalLM")(config(**(common | own | options)))
    if kind != "llama4":
        made.set_experts_implementation(implementation)
    return made
