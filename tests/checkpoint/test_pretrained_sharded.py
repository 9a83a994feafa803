"""Models of transformers that are sharded, the root too: files of one process, read by each."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

pytest.importorskip("safetensors")
pytest.importorskip("transformers", minversion="5.17")
if not dist.is_available():
    pytest.skip("needs torch.distributed", allow_module_level=True)

import transformers
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.fsdp import fully_shard

from blocktensor import convert, freeze, iter_fp8, load_fp8, save_fp8, unfreeze
from blocktensor.integrations.transformers import save_pretrained_fp8
from tests.support.arranged import same_bits
from tests.support.checkpoint_models import content, untagged
from tests.support.ranks import on_ranks, shared_mesh

SIZES: dict[str, Any] = {"hidden_size": 128, "intermediate_size": 256, "vocab_size": 160}
HEADS = {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 64}


def llama() -> Any:
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(num_hidden_layers=2, **SIZES, **HEADS)
    )


def t5() -> Any:
    """Transformers keeps ``wo`` in high precision."""
    return transformers.T5ForConditionalGeneration(
        transformers.T5Config(
            d_model=128, d_ff=256, d_kv=64, num_heads=2, num_layers=1, vocab_size=160
        )
    )


def bailing() -> Any:
    """Transformers joins three convolutions as it loads, and stacks experts."""
    return transformers.BailingHybridForCausalLM(
        transformers.BailingHybridConfig(
            **SIZES,
            **HEADS,
            q_lora_rank=128,
            kv_lora_rank=128,
            v_head_dim=64,
            qk_rope_head_dim=64,
            qk_nope_head_dim=64,
            moe_intermediate_size=128,
            num_experts=4,
            num_experts_per_tok=2,
            n_group=1,
            topk_group=1,
            num_hidden_layers=2,
            first_k_dense_replace=1,
            pad_token_id=0,
        )
    )


MODELS: dict[str, Callable[[], Any]] = {"llama": llama, "t5": t5, "bailing": bailing}


NEEDS_BAILING = pytest.mark.skipif(
    not hasattr(transformers, "BailingHybridConfig"),
    reason=f"transformers {transformers.__version__} does not have the model",
)


def made(kind: str, seed: int, frozen: bool) -> Any:
    torch.manual_seed(seed)
    model = MODELS[kind]().bfloat16()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for x in model.parameters():
            x.copy_(torch.randn(x.shape, generator=generator) / 8)
    convert(model, skip_small=False)
    if frozen:
        freeze(model)
    return model


def shard(model: nn.Module, how: Callable[..., Any], mesh: Any) -> None:
    """Every layer, and the root."""
    layers = (x for x in model.modules() if isinstance(x, nn.ModuleList))
    for layer in reversed([layer for each in layers for layer in each]):
        how(layer, mesh=mesh)
    how(model, mesh=mesh)


@pytest.mark.parametrize(
    ("kind", "how"),
    [
        ("llama", fully_shard),
        ("llama", replicate),
        ("t5", fully_shard),
        pytest.param("bailing", fully_shard, marks=NEEDS_BAILING),
    ],
)
@on_ranks(2, gpus=(2,))
def test_a_sharded_root(
    world: int, device: str, kind: str, how: Callable[..., Any], tmp_path: Path
) -> None:
    mesh = shared_mesh(device, world, names=("all",))
    for frozen in (False, True):
        single, model, other = (made(kind, seed, frozen).to(device) for seed in (0, 0, 1))
        shard(model, how, mesh)
        shard(other, how, mesh)
        same_bits(dict(iter_fp8(model)), dict(iter_fp8(single)))
        for all_in_fp8 in (False, True):
            folder = tmp_path / f"{frozen}, {all_in_fp8}"
            alone = tmp_path / f"{frozen}, {all_in_fp8}, alone"
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", r"\d of \d+ FP8 weights are stored in high pr")
                if dist.get_rank() == 0:
                    save_fp8(single, alone, all_in_fp8=all_in_fp8)
                dist.barrier()
                save_fp8(model, folder, all_in_fp8=all_in_fp8)
            dist.barrier()
            assert untagged(content(folder)) == content(alone)
        if frozen:  # the last one is in FP8 throughout
            load_fp8(other, folder)
            same_bits(dict(iter_fp8(other)), dict(iter_fp8(single)))
        dist.barrier()


@pytest.mark.parametrize("how", [fully_shard, replicate])
@on_ranks(2, gpus=())
def test_the_config_names_the_class_that_was_sharded(
    world: int, device: str, how: Callable[..., Any], tmp_path: Path
) -> None:
    model = made("llama", 0, frozen=True)
    shard(model, how, shared_mesh(device, world, names=("all",)))
    assert type(model) is not transformers.LlamaForCausalLM
    folder = save_pretrained_fp8(model, tmp_path / "fp8")
    assert json.loads((folder / "config.json").read_text())["architectures"] == ["LlamaForCausalLM"]
    dist.barrier()


@on_ranks(2, gpus=(2,))
def test_all_weights_of_an_fp8_checkpoint_train_in_shards(
    world: int, device: str, tmp_path: Path
) -> None:
    """The remedy of ``unfreeze``: it comes before ``fully_shard``."""
    source = made("llama", 0, frozen=True).to(device)
    if dist.get_rank() == 0:
        save_fp8(source, tmp_path / "fp8")
    dist.barrier()
    plain = llama().bfloat16().to(device)
    load_fp8(plain, tmp_path / "fp8")
    unfreeze(plain)
    shard(plain, fully_shard, shared_mesh(device, world, names=("all",)))
    tokens = torch.arange(16, device=device).view(2, 8)
    with torch.no_grad():
        wanted = source(tokens).logits
    logits = plain(tokens).logits
    assert (logits - wanted).norm() < 0.02 * wanted.norm()  # the masters are cast again
    logits.float().square().mean().backward()
    for name, x in plain.named_parameters():
        assert x.grad is not None and x.grad.full_tensor().abs().sum() > 0, name
