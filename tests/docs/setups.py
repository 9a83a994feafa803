"""The names that code blocks of the documentation take for granted, on tiny models on a CPU.

Every page has :func:`common`. A page that needs more, or other models, has an entry in ``SETUPS``.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import blocktensor
from tests.support.models import randn
from tests.support.moe_models import TitanMoE

DIM, HIDDEN, VOCABULARY = 1024, 4096, 50
"""The smallest sizes that ``convert`` does not leave alone."""


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(DIM, DIM, bias=False) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            each(x).unflatten(-1, (-1, 128)).transpose(1, 2) for each in (self.q, self.k, self.v)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        made: Tensor = self.o(y.transpose(1, 2).flatten(-2))
        return made


class MLP(nn.Module):
    def __init__(self, *names: str) -> None:
        super().__init__()
        self.names = names or ("gate_proj", "up_proj", "down_proj")
        for name, (n, k) in zip(self.names, [(HIDDEN, DIM)] * 2 + [(DIM, HIDDEN)], strict=True):
            self.add_module(name, nn.Linear(k, n, bias=False))

    def forward(self, x: Tensor) -> Tensor:
        gate, up, down = (self.get_submodule(name) for name in self.names)
        made: Tensor = down(F.silu(gate(x)) * up(x))
        return made


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wg, self.wu = (nn.Parameter(torch.randn(2, HIDDEN, DIM)) for _ in range(2))
        self.wd = nn.Parameter(torch.randn(2, DIM, HIDDEN))

    def forward(self, x: Tensor, offs: Tensor) -> Tensor:
        gate, up = (F.grouped_mm(x, w.transpose(1, 2), offs=offs) for w in (self.wg, self.wu))
        return F.grouped_mm(F.silu(gate) * up, self.wd.transpose(1, 2), offs=offs)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention_norm, self.mlp_norm = nn.RMSNorm(DIM), nn.RMSNorm(DIM)
        self.attention, self.mlp = Attention(), MLP()
        self.router = nn.Linear(DIM, 2, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        y = self.mlp_norm(x)
        made: Tensor = x + self.mlp(y) * self.router(y).softmax(-1)[..., :1]
        return made


class MyTransformer(nn.Module):
    """A language model of one block, whose MLP is just large enough for FP8."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, DIM)
        self.blocks = nn.ModuleList([Block()])
        self.lm_head = nn.Linear(DIM, VOCABULARY, bias=False)

    def cuda(self, device: Any = None) -> MyTransformer:
        """Pages move models to a GPU; the tests have none."""
        return self

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> SimpleNamespace:
        x = self.embed(input_ids)
        for block in self.blocks:
            x = block(x)
        logits = self.lm_head(x).float()
        labels = input_ids if labels is None else labels
        loss = F.cross_entropy(logits.flatten(0, -2), labels.flatten())
        return SimpleNamespace(loss=loss, logits=logits)


class MyMixtureOfExperts(nn.Module):
    """A block with experts in stacks, as torchtitan holds them."""

    def __init__(self) -> None:
        super().__init__()
        block = nn.Module()
        block.moe = TitanMoE(2, DIM, 2 * DIM)
        self.blocks = nn.ModuleList([block])


def common() -> dict[str, object]:
    """What every page has."""
    torch.manual_seed(0)
    return {
        **{"torch": torch, "nn": nn, "F": F, "blocktensor": blocktensor},
        **{"MyTransformer": MyTransformer, "MyMixtureOfExperts": MyMixtureOfExperts},
        "fully_shard": fully_shard,
        "model": MyTransformer().bfloat16(),
        "tokens": torch.arange(16).view(2, 8),
    }


def _converted() -> dict[str, object]:
    """``model`` is converted."""
    names = common()
    blocktensor.convert(names["model"])  # type: ignore[arg-type]
    return names


def _head() -> dict[str, object]:
    return {**common(), "hidden": randn(16, DIM, grad=True), "targets": torch.arange(16)}


def _checkpoint() -> dict[str, object]:
    """A checkpoint of a converted model lies in the current folder."""
    blocktensor.save_fp8(_converted()["model"], "model-fp8")  # type: ignore[arg-type]
    return common()


def _meshes() -> dict[str, object]:
    return {**common(), "expert_mesh": init_device_mesh("cpu", (1,))}


def _experts() -> dict[str, object]:
    """A model of experts, and the tensors of a layer of one's own."""
    stacks = {
        name: randn(4, 128, 128, seed=i, grad=True) for i, name in enumerate(("w1", "w3", "w2"))
    }
    tokens = {"x": randn(24, 128), "chosen": torch.arange(48).view(24, 2) % 4}
    return {**common(), "model": TitanMoE(2, DIM, 2 * DIM), **stacks, **tokens, "E": 4, "top_k": 2}


def _mlps() -> dict[str, object]:
    """A model with MLPs by two kinds of names, experts, and a norm that three linears read."""
    names, model = common(), MyTransformer()
    attn = nn.ModuleDict({name: nn.Linear(DIM, DIM, bias=False) for name in ("wq", "wk", "wv")})
    layer = {"ffn": MLP("wg", "wu", "wd"), "before": nn.RMSNorm(DIM), "attn": attn}
    layer["experts"] = Experts()
    model.layers = nn.ModuleList([nn.ModuleDict(layer)])
    return {**names, "model": model.bfloat16()}


def _two_dims() -> dict[str, object]:
    """A mesh of two dimensions, and a model whose MLP has short names."""
    names, model = common(), MyTransformer()
    model.blocks[0].mlp = MLP("gate", "up", "down")
    mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=("data", "tensor"))
    return {**names, "model": model.bfloat16(), "mesh": mesh}


def _migrated() -> dict[str, object]:
    """An input, and the state of a model of TransformerEngine: it has entries of its own."""
    layers = {"up": nn.Linear(DIM, HIDDEN), "down": nn.Linear(HIDDEN, DIM)}
    state = dict(nn.ModuleDict(layers).state_dict())
    state["up._extra_state"] = torch.empty(0, dtype=torch.uint8)
    return {**common(), "x": torch.randn(8, DIM), "state": state}


def _pretrained() -> dict[str, object]:
    """Models of transformers in folders, and a Trainer of one step."""
    from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

    from blocktensor.integrations.transformers import save_pretrained_fp8

    sizes = {"hidden_size": DIM, "intermediate_size": HIDDEN, "num_attention_heads": 8}
    config = LlamaConfig(num_hidden_layers=1, vocab_size=VOCABULARY, **sizes)
    made = LlamaForCausalLM(config).bfloat16()
    made.save_pretrained("path/to/model")
    blocktensor.convert(made)
    save_pretrained_fp8(made, "path/to/fp8")
    tokens = torch.arange(VOCABULARY).view(5, 10)
    few = {"max_steps": 1, "use_cpu": True, "report_to": [], "disable_tqdm": True}
    return {
        **common(),
        "data": [{"input_ids": x, "labels": x} for x in tokens],
        "Trainer": Trainer,
        "TrainingArguments": lambda folder, **kwargs: TrainingArguments(folder, **kwargs, **few),
    }


SETUPS: dict[str, Callable[[], dict[str, object]]] = {
    "docs/faq.md": _converted,
    "docs/guides/audit.md": _converted,
    "docs/guides/backends.md": _converted,
    "docs/guides/checkpoints.md": _converted,
    "docs/guides/converting.md": _head,
    "docs/guides/fsdp2.md": _meshes,
    "docs/guides/fusing.md": _mlps,
    "docs/guides/lora.md": _checkpoint,
    "docs/guides/migrating.md": _migrated,
    "docs/guides/moe.md": _experts,
    "docs/guides/monitor.md": _converted,
    "docs/guides/rl.md": _converted,
    "docs/guides/tensor_parallel.md": _two_dims,
    "docs/guides/transformers.md": _pretrained,
}
"""By the page's path; :func:`common` for all others."""
