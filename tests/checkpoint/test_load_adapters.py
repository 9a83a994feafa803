"""``load_fp8`` by shard into a model that has peft's adapters already."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

pytest.importorskip("safetensors")
pytest.importorskip("transformers", minversion="5.17")
pytest.importorskip("peft")

import peft
from peft.tuners.lora import LoraLayer
from safetensors import SafetensorError

from blocktensor import CheckpointError, load_fp8
from tests.support.models import complaint
from tests.support.published import TOKENS, empty, fsdp, written
from tests.support.ranks import on_ranks


def adapted(model: Any, **options: Any) -> Any:
    """Give a model adapters of random values, the same on every rank."""
    config = peft.LoraConfig(r=8, target_modules="all-linear", **options)
    made = peft.get_peft_model(model, config)
    torch.manual_seed(0)
    for layer in made.modules():
        if isinstance(layer, LoraLayer):
            for part in (*layer.lora_A.values(), *layer.lora_B.values()):
                part.to_empty(device="cpu")
                nn.init.normal_(part.weight, std=0.05)
    return made


@pytest.mark.parametrize("kind", ["Qwen3", "DeepSeek-V3"])
@on_ranks(2, gpus=())
def test_adapters_train_on_a_base_that_is_read_by_shard(
    mesh: DeviceMesh, kind: str, tmp_path: Path
) -> None:
    folder = tmp_path / "fp8"
    if dist.get_rank() == 0:
        written(kind, folder)
    dist.barrier()
    plain = empty(kind, converted=False)
    load_fp8(plain, folder)
    model, single = adapted(empty(kind)), adapted(plain)  # before and after the load
    fsdp(model.get_base_model(), mesh)
    wrapped = [type(x) for x in model.modules()]
    report = load_fp8(model.get_base_model(), folder)
    assert report.fp8 and not report.missing
    assert [type(x) for x in model.modules()] == wrapped
    losses = [x(input_ids=TOKENS, labels=TOKENS).loss for x in (model, single)]
    assert torch.equal(*[loss.detach() for loss in losses])
    for loss in losses:
        loss.backward()
    trained = 0
    for (name, x), y in zip(model.named_parameters(), single.named_parameters(), strict=True):
        if ".lora_" in name:
            trained += 1
            assert torch.equal(x.grad.full_tensor(), y[1].grad), name
    assert trained == 2 * len([x for x in model.modules() if isinstance(x, LoraLayer)])


def test_what_adapters_would_not_notice_is_refused(tmp_path: Path) -> None:
    folder = written("Qwen3", tmp_path / "fp8")
    text = complaint(CheckpointError, lambda: load_fp8(adapted(empty("Qwen3")), folder))
    assert "'base_model.model' alone: load into that" in text.replace("\n", " ")
    model = empty("Qwen3", converted=False)
    load_fp8(model, folder)
    has_values = adapted(model, use_dora=True)  # computed from the present base
    with pytest.raises(CheckpointError, match=r"missing .*base_layer"):
        load_fp8(has_values.get_base_model(), folder)
    copies = adapted(empty("Qwen3"), modules_to_save=["lm_head"])
    with pytest.raises(CheckpointError, match=r"missing .*lm_head\.modules_to_save"):
        load_fp8(copies.get_base_model(), folder)


def test_half_an_adapter_file_is_refused(tmp_path: Path) -> None:
    """As a kill leaves it; the base and its adapters stay as they were."""
    written("Qwen3", tmp_path / "fp8")
    base = empty("Qwen3", converted=False)
    load_fp8(base, tmp_path / "fp8")
    model = adapted(base)
    model.save_pretrained(tmp_path / "adapters")
    file = tmp_path / "adapters" / "adapter_model.safetensors"
    whole = file.read_bytes()
    before = {name: x.clone() for name, x in model.named_parameters() if ".lora_" in name}
    for size in (0, 4, 100, len(whole) // 2, len(whole) - 1):
        file.write_bytes(whole[:size])
        with pytest.raises(SafetensorError):
            model.load_adapter(tmp_path / "adapters", "default", is_trainable=True)
        for name, x in model.named_parameters():
            assert ".lora_" not in name or torch.equal(x, before[name])
    file.write_bytes(whole)
    model.load_adapter(tmp_path / "adapters", "default", is_trainable=True)
