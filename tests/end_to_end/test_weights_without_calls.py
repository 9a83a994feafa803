"""Models of transformers that multiply by the weights of linears without calling them."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers")

import transformers

from blocktensor import convert
from tests.support.models import complaint
from tests.support.pretrained import quiet

SIZES = {"vocab_size": 64, "hidden_size": 128, "num_hidden_layers": 2}
ATTENTION = {"intermediate_size": 256, "num_attention_heads": 2, "num_key_value_heads": 2}
EXPERTS = {"num_experts": 2, "num_experts_per_tok": 1}
TOKENS = torch.arange(24).view(2, 12) * 7 % 64

STATE_SPACES: dict[str, Callable[[], Any]] = {
    "Mamba": lambda: transformers.MambaConfig(**SIZES),
    "FalconMamba": lambda: transformers.FalconMambaConfig(**SIZES),
    "Jamba": lambda: transformers.JambaConfig(
        **SIZES,
        **ATTENTION,
        **EXPERTS,
        use_mamba_kernels=False,
        mamba_dt_rank=8,
        attn_layer_period=2,
        attn_layer_offset=1,
        expert_layer_period=2,
        expert_layer_offset=1,
    ),
}


def trained(model: Any) -> dict[str, Tensor]:
    """The loss and all gradients."""
    loss = model(TOKENS, labels=TOKENS).loss
    loss.backward()
    return {"loss": loss.detach(), **{name: p.grad for name, p in model.named_parameters()}}


@pytest.mark.parametrize("kind", STATE_SPACES)
def test_state_spaces_train_in_fp8(kind: str) -> None:
    """Their step sizes are ``weight @ x``, of a batch."""
    models = []
    with quiet():
        for _ in range(2):
            torch.manual_seed(0)
            models.append(getattr(transformers, f"{kind}ForCausalLM")(STATE_SPACES[kind]()))
    made, plain = models
    report = convert(made, skip_small=False)
    assert any(entry.name.endswith("dt_proj") for entry in report.converted)
    got, want = trained(made), trained(plain)
    assert got["loss"].item() == pytest.approx(want["loss"].item(), rel=0.01)
    for name, gradient in want.items():
        if ".mixer." not in name and ".mamba." not in name:
            continue  # routers may choose other experts
        error = (got[name] - gradient).norm() / gradient.norm().clamp(min=1e-12)
        assert error < 0.5, name  # that of another product is above 1


def test_attention_of_torch_names_what_to_skip() -> None:
    """``F.multi_head_attention_forward`` takes the weights of four linears."""
    sizes: dict[str, Any] = {
        **{"vocab_size": 32, "hidden_size": 128, "num_hidden_layers": 2, "intermediate_size": 256},
        **{"num_attention_heads": 2, "num_conv_pos_embeddings": 16, "num_feat_extract_layers": 2},
        **{"conv_dim": (32, 32), "conv_stride": (5, 2), "conv_kernel": (10, 3)},
        "num_conv_pos_embedding_groups": 4,
    }

    def model(**options: Any) -> Any:
        torch.manual_seed(0)
        with quiet():
            made = transformers.WavLMForCTC(transformers.WavLMConfig(**sizes))
        convert(made, skip_small=False, **options)
        return made

    sound, labels = torch.randn(2, 1600), torch.arange(1, 11).view(2, 5)
    refused = complaint(NotImplementedError, lambda: model()(sound, labels=labels))
    found = re.search(r"skip=\[(.*)\]\)$", refused.replace("\n", " "))
    assert found is not None
    skip = re.findall(r"'([^']*)'", found[1])
    assert len(skip) == 4
    model(skip=skip)(sound, labels=labels).loss.backward()
