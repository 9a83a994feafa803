"""The audit of a model of transformers, with and without activation checkpointing."""

from __future__ import annotations

import pytest

from blocktensor import convert
from tests.support.audited import assert_no_marked_product
from tests.support.models import TOKENS


@pytest.mark.parametrize("reentrant", [None, False, True])
def test_llama_of_transformers(reentrant: bool | None) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=50,
        use_cache=reentrant is None,
    )
    model = transformers.LlamaForCausalLM(config).bfloat16()
    convert(model, skip_small=False)
    if reentrant is not None:
        names = "activation_checkpointing_enable", "gradient_checkpointing_enable"  # 5.23, older
        next(getattr(model, n) for n in names if hasattr(model, n))({"use_reentrant": reentrant})
        model.enable_input_require_grads()
        model.train()
    report = assert_no_marked_product(model, input_ids=TOKENS, labels=TOKENS)
    assert sum(e.recomputed for e in report.entries) == (0 if reentrant is None else 2 * 8)
    assert {e.precision for e in report.entries if ".layers." in e.module} == {"FP8", "bf16"}
    attention = {e.module for e in report.entries if e.attention}
    assert attention == {f"model.layers.{i}.self_attn" for i in range(2)}
    assert report.fp8_share > 0.9
