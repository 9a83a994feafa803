"""peft's adapters of a model that FSDP2 has sharded already."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

pytest.importorskip("peft")

from peft import LoraConfig, OFTConfig, get_peft_model

from blocktensor import convert, freeze
from tests.support.models import TOKENS, Model
from tests.support.ranks import on_ranks

KINDS: dict[str, Any] = {
    "LoRA": LoraConfig(r=4, target_modules=["up"]),
    "DoRA": LoraConfig(r=4, target_modules=["up"], use_dora=True),
    "OFT": OFTConfig(oft_block_size=32, target_modules=["up"]),
}
REFUSED = r"FSDP2 has cut \('blocks\.0\.up\.weight'\).*Call get_peft_model on a new model before"


def sharded(mesh: DeviceMesh, frozen: bool = True, blocks: bool = True, fp8: bool = True) -> Model:
    model = Model(256).bfloat16()
    if fp8:
        convert(model, skip_small=False)
    if fp8 and frozen:
        freeze(model)
    for block in model.blocks if blocks else ():
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def kinds_in(model: nn.Module) -> dict[str, type]:
    return {name: type(x) for name, x in model.named_modules()}


@on_ranks(2, gpus=())
@pytest.mark.parametrize("kind", KINDS)
def test_adapters_after_fully_shard_are_refused(mesh: DeviceMesh, kind: str) -> None:
    """FSDP2 would neither shard nor reduce them: each rank would train its own."""
    for frozen in (True, False):
        model = sharded(mesh, frozen)
        before = kinds_in(model)
        with pytest.raises(NotImplementedError, match=REFUSED):
            get_peft_model(model, KINDS[kind])
        assert kinds_in(model) == before


@on_ranks(2, gpus=())
def test_weights_that_stay_gathered_are_known(mesh: DeviceMesh) -> None:
    for frozen in (True, False):
        model = sharded(mesh, frozen, blocks=False)
        model(TOKENS)
        assert not hasattr(model.blocks[0].up.weight, "placements")
        with pytest.raises(NotImplementedError, match=REFUSED):
            get_peft_model(model, KINDS["LoRA"])


@on_ranks(2, gpus=())
def test_a_second_adapter_after_fully_shard_is_refused(mesh: DeviceMesh) -> None:
    base = Model(256).bfloat16()
    convert(base.requires_grad_(False), skip_small=False)
    model = get_peft_model(base, KINDS["LoRA"])
    fully_shard(model, mesh=mesh)
    with pytest.raises(NotImplementedError, match=r"FSDP2 has cut \('blocks\.0\.up\.base_layer\."):
        model.add_adapter("second", KINDS["LoRA"])


@on_ranks(2, gpus=())
def test_adapters_that_do_not_train_may_come_after(mesh: DeviceMesh) -> None:
    config = LoraConfig(r=4, target_modules=["up"], inference_mode=True)
    model = sharded(mesh)
    wanted = model(TOKENS)
    assert get_peft_model(model, config)(TOKENS).equal(wanted)


@on_ranks(2, gpus=())
def test_a_model_without_fp8_weights_is_left_to_peft(mesh: DeviceMesh) -> None:
    model = get_peft_model(sharded(mesh, fp8=False), KINDS["LoRA"])
    assert sum(p.requires_grad for p in model.parameters()) == 4
