"""Predicted memory against what autograd saves on a CPU, and against sums by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import blocktensor as bt
from benchmarks import llama
from benchmarks.memory import saved_bytes as saved_by_autograd
from blocktensor.reports.plan import memory
from blocktensor.reports.plan.describe import describe
from blocktensor.reports.plan.memory import Run, peak
from blocktensor.reports.plan.setup import CAPACITY, Setup

SHAPE = llama.Shape(dim=512, hidden=1536, heads=4, kv_heads=2)
BLOCKS = {"master": "bf16", "optimizer": "none", "skip_small": False, "batch": 2, "sequence": 256}


def run_of(model: nn.Module, fp8: bool = True, **settings: Any) -> Run:
    setup = Setup(**{**BLOCKS, **settings})
    return Run(describe(model, setup), setup, fp8)


VARIANTS: dict[str, dict[str, Any]] = {
    "bf16": {},
    "fp8": {},
    "fp8, 1x128": {"recipe": bt.Recipe(wgrad_input="1x128")},
    "fp8, high precision": {"recipe": bt.Recipe(wgrad_input="high_precision")},
    "fp8, shared": {"share_inputs": True},
    "fp8, fused": {"fuse": True},
    "fp8, packed": {"saved_tensors_in_fp8": True},
    "fp8, high precision, packed": {
        "saved_tensors_in_fp8": True,
        "recipe": bt.Recipe(wgrad_input="high_precision"),
    },
    "fp8, fused, packed": {"fuse": True, "saved_tensors_in_fp8": True},
    "bf16, frozen": {},
    "fp8, frozen": {},
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_activations_are_what_autograd_saves(variant: str) -> None:
    """Of MLPs: other modules save other tensors on a CPU."""
    torch.manual_seed(0)
    model = nn.Sequential(llama.MLP(SHAPE), llama.MLP(SHAPE)).bfloat16()
    model.requires_grad_("frozen" not in variant)
    settings = VARIANTS[variant]
    run = run_of(model, "fp8" in variant, **settings)
    if "fp8" in variant:
        bt.convert(model, run.setup.recipe, skip_small=False)
    if "shared" in variant:
        bt.share_inputs(model)
    if "fused" in variant:
        assert bt.fuse(model).fused
    x = torch.randn(2, 256, SHAPE.dim, dtype=torch.bfloat16, requires_grad=True)
    if "packed" in variant:
        with bt.saved_tensors_in_fp8() as packed:
            model(x * 1)
        saved = packed.bytes_after
    else:
        saved = saved_by_autograd(model, model, x)
    counted = run.setup.tokens * sum(memory.saved_bytes(b, run) for b in run.model.blocks)
    assert counted == pytest.approx(saved, rel=0.005)


def test_states_and_masters_by_hand() -> None:
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(1024, 1024, bias=False) for _ in range(4)))
    count = 4 * 1024**2

    def parts(**settings: Any) -> dict[str, float]:
        found = run_of(model, **settings)
        return {"weights": found.weight_bytes(), "states": found.state_bytes()}

    assert parts(optimizer="adamw", master="fp32") == {"weights": 4 * count, "states": 8 * count}
    assert parts(optimizer="adamw", master="bf16") == {"weights": 2 * count, "states": 4 * count}
    assert parts(optimizer="adamw_8bit", master="fp32")["states"] == 2 * count
    assert parts(optimizer="sgd")["states"] == 0
    assert parts(optimizer="sgd_momentum")["states"] == 2 * count
    sharded = parts(optimizer="adamw", master="fp32", gpus=8, sharding="fsdp2")
    assert sharded == {"weights": count / 2, "states": count}
    lora = parts(optimizer="adamw", master="fp32", lora=8)
    adapters = 4 * 8 * 2048
    assert lora["states"] == 8 * adapters
    assert lora["weights"] == pytest.approx(count + 4 * adapters, rel=1e-3)


def test_what_lowers_memory_does() -> None:
    model = llama.stack(llama.Shape(), 8, "meta")

    def total(fp8: bool = True, **settings: Any) -> float:
        return peak(run_of(model, fp8, batch=1, sequence=8192, **settings)).total

    plain = total()
    assert total(fuse=True, recompute=True) < total(fuse=True) < total(share_inputs=True) < plain
    packed = [total(saved_tensors_in_fp8=True, checkpointing=c) for c in ("none", "blocks")]
    assert packed[0] < 0.85 * plain
    assert packed[1] < total(checkpointing="blocks") < 0.6 * plain
    assert total(fp8=False, saved_tensors_in_fp8=True) == total(fp8=False)
    assert total(lora=16) < plain
    assert total(microbatches=2) > plain
    of_gpus = [total(gpus=gpus, sharding="fsdp2", master="fp32") for gpus in (2, 4, 8)]
    assert of_gpus == sorted(of_gpus, reverse=True)
    once = total(gpus=8, sharding="fsdp2", master="fp32", reshard=False)
    assert once > of_gpus[-1]
    assert total(gpus=8, sharding="fsdp2", gather="bf16") > total(gpus=8, sharding="fsdp2")


def test_cards_are_those_of_their_names() -> None:
    assert CAPACITY["H100"] < 80e9 * 1.1
    assert 140e9 < CAPACITY["H200"] < 141e9 * 1.1


@pytest.mark.parametrize("master", ["fp32", "bf16"])
def test_adapters_of_linear_layers_save_what_is_counted(master: Any) -> None:
    """On frozen MLPs: inputs once for each group of layers, thin rows, and A and B in bf16."""
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    model = nn.Sequential(llama.MLP(SHAPE), llama.MLP(SHAPE)).bfloat16().requires_grad_(False)
    run = run_of(model, lora=8, master=master)
    bt.convert(model, skip_small=False)
    names = [name for name, x in model.named_modules() if isinstance(x, nn.Linear)]
    adapted = peft.get_peft_model(
        model,
        peft.LoraConfig(r=8, target_modules=names),
        autocast_adapter_dtype=master == "fp32",
    )
    x = torch.randn(2, 256, SHAPE.dim, dtype=torch.bfloat16, requires_grad=True)
    saved = saved_by_autograd(adapted, adapted, x)
    counted = run.setup.tokens * sum(memory.saved_bytes(b, run) for b in run.model.blocks)
    counted += sum(run.thin_bytes(block) for block in run.model.blocks)
    assert counted == pytest.approx(saved, rel=0.01)


@pytest.mark.parametrize("master", ["fp32", "bf16"])
def test_adapters_of_experts_save_what_is_counted(master: Any) -> None:
    """Beyond what the frozen model saves without them."""
    peft = pytest.importorskip("peft")
    pytest.importorskip("transformers")
    from tests.support.moe_models import TOKENS, transformers_moe

    tokens = TOKENS.repeat(8, 4)

    def saved_with(lora: bool) -> tuple[int, Any]:
        model = transformers_moe("qwen3").bfloat16().requires_grad_(False)
        settings = {"lora": 16, "lora_experts": True} if lora else {}
        run = run_of(model, batch=1, sequence=tokens.numel(), master=master, **settings)
        bt.convert(model, skip_small=False)
        if lora:
            stacks = ["experts.gate_up_proj", "experts.down_proj"]
            config = peft.LoraConfig(r=16, target_modules=[], target_parameters=stacks)
            made = peft.get_peft_model(model, config, autocast_adapter_dtype=master == "fp32")
        else:
            made = model
        model.get_input_embeddings().register_forward_hook(lambda *x: x[-1].requires_grad_())
        return saved_by_autograd(made, lambda x: made(x).logits, tokens), run

    (less, _), (more, run) = saved_with(False), saved_with(True)
    counted = 0.0
    for block in run.model.blocks:
        counted += 2 * run.adapters(block, of_experts=True)  # in bf16
        for readers in block.groups().values():
            if readers[0].experts > 1:
                counted += run.setup.tokens * memory._read_by_adapters(readers, run, False)
    assert counted == pytest.approx(more - less, rel=0.02)
