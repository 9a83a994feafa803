"""The benchmark of transformers' Llama: its variants train, and fuse what they say."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

from benchmarks import hf_llama
from blocktensor import BlockwiseFP8Weight, SmallKN, convert
from tests.support.mlps import fused_in
from tests.support.norms import fused_norms

pytest.importorskip("transformers")

TINY = hf_llama.Shape(128, 192, heads=2, kv_heads=1, layers=2, vocab=64, batch=2, time=16)


def test_variants(monkeypatch: pytest.MonkeyPatch) -> None:
    every = partial(convert, auto_filter_small_kn=SmallKN(0, 0, 0))
    monkeypatch.setattr(hf_llama.bt, "convert", every)
    tokens = torch.arange(32).view(2, 16)
    losses = []
    for name in hf_llama.VARIANTS:
        model: Any = hf_llama.make_model(name, TINY, "cpu")
        assert len(fused_in(model)) == (2 if "fused" in name else 0)
        assert isinstance(model.lm_head.weight, BlockwiseFP8Weight) == ("head" in name)
        assert len(fused_norms(model)) == (4 if "fused" in name else 0)
        before = model.model.layers[0].mlp.up_proj.weight.detach().clone()
        hf_llama.step(model, hf_llama.adamw(model), tokens)()
        assert not torch.equal(model.model.layers[0].mlp.up_proj.weight.detach(), before)
        losses.append(model(input_ids=tokens, labels=tokens).loss.item())
    bf16, fp8, *fused = losses
    assert bf16 != fp8
    assert fused[:2] == [fp8, fp8]
    assert hf_llama.total() == len(hf_llama.VARIANTS)
