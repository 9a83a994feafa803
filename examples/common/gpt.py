"""A small GPT-like language model in plain torch modules, so that nothing here is about FP8."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moe import GroupedExperts, MoE


@dataclass(frozen=True)
class ModelConfig:
    """The shape of the model. ``seq`` is the longest context it can read.

    With ``experts``, each layer has that many in place of its MLP, and a token goes to ``top_k``.
    ``qk_norm`` normalizes the queries and keys of each head. The first norm divides by the standard
    deviation of the embeddings, ``embedding_std``: the smaller it is, the larger their gradient.
    ``smear`` adds a learned share of the previous token's embedding to each token's, so that one
    layer finds where the present token stood before; without it, that takes two layers, which
    learn it late and at a step that chance decides.
    """

    dim: int = 256
    layers: int = 4
    heads: int = 4
    seq: int = 128
    vocab: int = 256
    rope_base: float = 10_000.0
    experts: int = 0
    top_k: int = 2
    qk_norm: bool = False
    embedding_std: float = 0.02
    smear: bool = False

    def __post_init__(self) -> None:
        for name in ("dim", "layers", "heads", "seq", "vocab"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.dim % self.heads:
            raise ValueError(f"heads must divide dim: {self.dim} is not a multiple of {self.heads}")
        if self.head_dim % 2:
            raise ValueError(
                f"dim / heads must be even, since RoPE rotates pairs: "
                f"{self.dim} / {self.heads} = {self.head_dim}"
            )
        if self.experts and not 1 <= self.top_k <= self.experts:
            raise ValueError(
                f"top-k must be from 1 to the number of experts, {self.experts}: got {self.top_k}"
            )
        if self.experts and self.dim % 8:
            raise ValueError(
                f"dim must be a multiple of 8 for experts, whose rows begin at multiples of "
                f"16 bytes: got {self.dim}"
            )

    @property
    def head_dim(self) -> int:
        return self.dim // self.heads

    @property
    def hidden(self) -> int:
        """SwiGLU's width: 8/3 of ``dim`` (what keeps the usual 8 dim² weights), in steps of 64."""
        return math.ceil(self.dim * 8 / 3 / 64) * 64

    @property
    def expert_hidden(self) -> int:
        """An expert's width: the experts of one token together weigh what the MLP would."""
        return math.ceil(self.dim * 8 / 3 / self.top_k / 64) * 64

    @property
    def widths(self) -> dict[str, int]:
        """Return the widths of the MLP or the experts."""
        return {"expert_hidden": self.expert_hidden} if self.experts else {"hidden": self.hidden}

    @property
    def kind(self) -> str:
        """In words."""
        return f"GPT with {self.top_k} of {self.experts} experts" if self.experts else "GPT"


class RMSNorm(nn.Module):
    """Root-mean-square norm in fp32, whatever autocast is doing around it."""

    def __init__(self, dim: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x.float(), self.weight.shape, self.weight, self.eps)


class RoPE(nn.Module):
    """Rotary position embedding: rotates the two halves of every head by position."""

    cos: Tensor
    sin: Tensor

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        half = config.head_dim // 2
        frequency = config.rope_base ** (-torch.arange(half, dtype=torch.float32) / half)
        angle = torch.outer(torch.arange(config.seq, dtype=torch.float32), frequency)
        self.register_buffer("cos", angle.cos(), persistent=False)
        self.register_buffer("sin", angle.sin(), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """``x`` is [batch, heads, time, head_dim]; the rotation is done in fp32."""
        cos, sin = self.cos[: x.shape[-2]], self.sin[: x.shape[-2]]
        a, b = x.float().chunk(2, dim=-1)
        return torch.cat((a * cos - b * sin, a * sin + b * cos), dim=-1).type_as(x)


class Attention(nn.Module):
    """Causal multi-head self-attention."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.q = nn.Linear(config.dim, config.dim, bias=False)
        self.k = nn.Linear(config.dim, config.dim, bias=False)
        self.v = nn.Linear(config.dim, config.dim, bias=False)
        self.o = nn.Linear(config.dim, config.dim, bias=False)
        self.q_norm = RMSNorm(config.head_dim) if config.qk_norm else nn.Identity()
        self.k_norm = RMSNorm(config.head_dim) if config.qk_norm else nn.Identity()

    def _split_heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.heads, -1)).transpose(1, 2)

    def forward(self, x: Tensor, rope: RoPE) -> Tensor:
        q, k, v = (self._split_heads(linear(x)) for linear in (self.q, self.k, self.v))
        q, k = rope(self.q_norm(q)).type_as(v), rope(self.k_norm(k)).type_as(v)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o(y.transpose(1, 2).flatten(-2))


class MLP(nn.Module):
    """SwiGLU."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gate = nn.Linear(config.dim, config.hidden, bias=False)
        self.up = nn.Linear(config.dim, config.hidden, bias=False)
        self.down = nn.Linear(config.hidden, config.dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


def mlp(config: ModelConfig) -> nn.Module:
    """Return the MLP of one layer: one for all tokens, or experts."""
    if not config.experts:
        return MLP(config)
    return MoE(config.dim, config.expert_hidden, config.experts, config.top_k)


class Block(nn.Module):
    """One pre-norm transformer layer."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(config.dim)
        self.attention = Attention(config)
        self.mlp_norm = RMSNorm(config.dim)
        self.mlp = mlp(config)

    def forward(self, x: Tensor, rope: RoPE) -> Tensor:
        x = x + self.attention(self.attention_norm(x), rope)
        return x + self.mlp(self.mlp_norm(x))


class GPT(nn.Module):
    """Tokens [batch, time] in, logits [batch, time, vocab] out."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocab, config.dim)
        self.smear = nn.Parameter(torch.full((config.dim,), 0.5)) if config.smear else None
        self.rope = RoPE(config)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = RMSNorm(config.dim)
        self.lm_head = nn.Linear(config.dim, config.vocab, bias=False)
        self._initialise()

    def _initialise(self) -> None:
        # Every block adds two branches to the residual stream; shrinking their last matrices keeps
        # the variance of the sum independent of depth.
        residual = 1 / math.sqrt(2 * self.config.layers)
        for name, module in self.named_modules():
            if isinstance(module, nn.Embedding):
                nn.init.normal_(module.weight, std=self.config.embedding_std)
            elif isinstance(module, nn.Linear):
                scale = residual if name.endswith((".o", ".down")) else 1.0
                nn.init.normal_(module.weight, std=scale / math.sqrt(module.in_features))
            elif isinstance(module, GroupedExperts):
                for key, stack in module.named_parameters():
                    scale = residual if key == "w2" else 1.0
                    nn.init.normal_(stack, std=scale / math.sqrt(stack.shape[-1]))

    @staticmethod
    def count_parameters(config: ModelConfig) -> int:
        """Without allocating or initialising them."""
        with torch.device("meta"):
            return sum(parameter.numel() for parameter in GPT(config).parameters())

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        if self.smear is not None:
            x = x + self.smear * F.pad(x[:, :-1], (0, 0, 1, 0))
        for block in self.blocks:
            x = block(x, self.rope)
        return self.lm_head(self.norm(x))


@torch.no_grad()
def generate(
    model: GPT,
    prompt: bytes,
    *,
    length: int,
    samples: int = 1,
    temperature: float = 0.8,
    seed: int = 0,
) -> list[bytes]:
    """Continue ``prompt`` by ``length`` bytes, ``samples`` times; returns prompt and continuation.

    The random numbers come from a CPU generator, so two models given the same seed are offered the
    same ones and differ only where their probabilities do.
    """
    if not prompt:
        raise ValueError("the prompt must hold at least one byte")
    device = model.lm_head.weight.device
    random = torch.Generator().manual_seed(seed)
    tokens = torch.tensor([list(prompt)] * samples, dtype=torch.long).view(samples, len(prompt))
    for _ in range(length):
        context = tokens[:, -model.config.seq :].to(device)
        probabilities = (model(context)[:, -1].float().cpu() / temperature).softmax(-1)
        tokens = torch.cat((tokens, torch.multinomial(probabilities, 1, generator=random)), dim=1)
    return [bytes(row) for row in tokens.tolist()]
