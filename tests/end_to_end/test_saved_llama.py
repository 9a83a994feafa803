"""Blocks of Llama whose activations wait for backward in FP8: bytes, and what it costs."""

from __future__ import annotations

import copy
import math
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaModel

from blocktensor import convert, fuse, saved_tensors_in_fp8
from tests.support.models import randn

TOKENS, HIDDEN = 128, 512


def llama() -> LlamaModel:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=8,
        hidden_size=HIDDEN,
        intermediate_size=1792,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=2,
        attn_implementation="sdpa",
    )
    return LlamaModel(config)


def gradients(model: Any, context: Any) -> list[Tensor]:
    """Gradients of the input and of all weights that are used, of tokens of different sizes."""
    model.zero_grad()
    dtype = next(model.parameters()).dtype
    sizes = torch.exp(randn(1, TOKENS, 1, seed=1, dtype=torch.float32) / 2)
    x = (randn(1, TOKENS, HIDDEN, dtype=torch.float32) * sizes).to(dtype).requires_grad_()
    with context:
        y = model(inputs_embeds=x * 1).last_hidden_state
    y.backward(randn(*y.shape, seed=2, dtype=torch.float32).to(dtype))
    leaves = [x, *model.parameters()]
    return [leaf.grad.float() for leaf in leaves if leaf.grad is not None]


def sqnr(made: list[Tensor], wanted: list[Tensor]) -> float:
    """Signal to noise of all gradients together, in dB."""
    pairs = [*zip(made, wanted, strict=True)]
    signal = sum(float(b.square().sum()) for _, b in pairs)
    return 10 * math.log10(signal / sum(float((a - b).square().sum()) for a, b in pairs))


@pytest.fixture(scope="module")
def models() -> dict[str, Any]:
    exact = llama()
    bf16 = copy.deepcopy(exact).bfloat16()
    fp8 = copy.deepcopy(bf16)
    convert(fp8, skip_small=False)
    fused = copy.deepcopy(fp8)
    fuse(fused, recompute=True)
    return {"exact": gradients(exact, nullcontext()), "bf16": bf16, "fp8": fp8, "fused": fused}


@pytest.mark.parametrize(("kind", "ratio", "loss"), [("fp8", 0.6, 0.6), ("fused", 0.37, 0.9)])
def test_bytes_and_gradients(models: dict[str, Any], kind: str, ratio: float, loss: float) -> None:
    """``ratio``: of the bytes that bf16 saves. ``loss``: dB of the SQNR of all gradients."""
    model, exact = models[kind], models["exact"]
    bf16, watch, saved = (saved_tensors_in_fp8(enabled) for enabled in (False, False, True))
    gradients(models["bf16"], bf16)
    plain = sqnr(gradients(model, watch), exact)
    packed = sqnr(gradients(model, saved), exact)
    assert saved.bytes_before == watch.bytes_after < bf16.bytes_after
    assert 0.9 * ratio < saved.bytes_after / bf16.bytes_after < ratio
    assert 0 < plain - packed < loss
    assert 22 < packed < 24


def test_bf16_alone(models: dict[str, Any]) -> None:
    model, exact = models["bf16"], models["exact"]
    saved = saved_tensors_in_fp8()
    assert 29 < sqnr(gradients(model, saved), exact) < 31
    assert saved.bytes_after < 0.53 * saved.bytes_before
    watch = saved_tensors_in_fp8(enabled=False)
    gradients(model, watch)
    assert watch.bytes_after == saved.bytes_before  # no memory is packed twice


@pytest.mark.parametrize("reentrant", [True, False])
def test_gradient_checkpointing(models: dict[str, Any], reentrant: bool) -> None:
    """All that waits is the input of each block."""
    model = copy.deepcopy(models["fused"])
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    model.train()
    exact = models["exact"]
    saved = saved_tensors_in_fp8()
    packed = sqnr(gradients(model, saved), exact)
    inputs = next(kind for kind in saved.kinds if kind.kept_as == "FP8")
    assert inputs.tensors == 3  # and the input of the last norm
    assert saved.bytes_after < 0.65 * saved.bytes_before
    assert 22 < packed < 24
