"""peft's adapters of FP8 experts that ranks have cut: injection, saving, loading, refusals."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

pytest.importorskip("transformers", minversion="5.23")
pytest.importorskip("peft")

from peft import LoraConfig, PeftModel, get_peft_model
from peft.tuners.lora.layer import ParamWrapper

from blocktensor import convert
from tests.support.moe_models import TOKENS, transformers_moe
from tests.support.published import expert_parallel
from tests.support.ranks import on_ranks

STACKS = ["experts.gate_up_proj", "experts.down_proj"]
LORA: dict[str, Any] = {"r": 4, "target_modules": [], "target_parameters": STACKS}


def base(frozen: bool = True) -> Any:
    torch.manual_seed(0)
    model = transformers_moe("qwen3").bfloat16()
    convert(model.requires_grad_(not frozen), skip_small=False)
    return model


def adapted(model: nn.Module, seed: int = 1) -> PeftModel:
    torch.manual_seed(seed)
    return get_peft_model(model, LoraConfig(**LORA, init_lora_weights=False))


def whole(x: Any) -> Tensor:
    made: Tensor = x.full_tensor() if isinstance(x, DTensor) else x
    return made.detach()


def trained(model: nn.Module) -> dict[str, Any]:
    return {name: x for name, x in model.named_parameters() if x.requires_grad}


def steps(model: Any) -> list[Tensor]:
    """Two losses, with a step of SGD between."""
    losses = []
    for _ in range(2):
        loss = model(input_ids=TOKENS, labels=TOKENS).loss
        loss.backward()
        losses.append(loss.detach())
        with torch.no_grad():
            for x in trained(model).values():
                x.sub_(x.grad)
                x.grad = None
    return losses


@on_ranks(2, gpus=())
def test_ranks_train_the_adapters_of_their_experts(mesh: DeviceMesh) -> None:
    """They begin with the values of the first rank, and are whole after training."""
    single, model = adapted(base()), base()
    expert_parallel(model, mesh)
    model = adapted(model, seed=1 + dist.get_rank())
    found = trained(model)
    assert found.keys() == trained(single).keys()
    for name, x in trained(single).items():
        assert isinstance(found[name], DTensor)
        assert found[name].dtype == x.dtype == torch.float32
        assert 2 * found[name].to_local().numel() == x.numel()
        assert torch.equal(whole(found[name]), x)
    before = {name: whole(x).clone() for name, x in found.items()}
    got, want = steps(model), steps(single)
    torch.testing.assert_close(torch.stack(got), torch.stack(want), rtol=5e-3, atol=0)
    for name, x in trained(single).items():
        moved = whole(found[name])
        assert (moved - x).norm() < 0.05 * x.norm()
        assert not torch.equal(moved, before[name])


@on_ranks(2, gpus=())
def test_adapters_are_written_whole_and_read_by_cut_models(
    mesh: DeviceMesh, tmp_path: Path
) -> None:
    model = base()
    expert_parallel(model, mesh)
    model = adapted(model)
    want = model(input_ids=TOKENS, labels=TOKENS).loss.detach()
    state = {name: whole(x) for name, x in trained(model).items()}
    if dist.get_rank() == 0:
        model.save_pretrained(tmp_path, state_dict=state)
    dist.barrier()
    single = PeftModel.from_pretrained(base(), tmp_path)
    for name, x in single.named_parameters():
        if ".lora_" in name:
            assert torch.equal(x, state[name])
    again = base()
    expert_parallel(again, mesh)
    again = PeftModel.from_pretrained(again, tmp_path)
    assert torch.equal(again(input_ids=TOKENS, labels=TOKENS).loss.detach(), want)


@on_ranks(2, gpus=())
def test_masters_of_cut_experts_train_with_an_adapter(mesh: DeviceMesh) -> None:
    """Masters of experts and adapters get gradients on the ranks that hold them."""
    single, model = base(frozen=False), base(frozen=False)
    expert_parallel(model, mesh)
    pair = [adapted(x) for x in (model, single)]
    for each in pair:
        for name, x in each.named_parameters():
            x.requires_grad_("lora_" in name or name.endswith(".down_proj"))
        each(input_ids=TOKENS, labels=TOKENS).loss.backward()
    grads = [{n: whole(x.grad) for n, x in trained(each).items()} for each in pair]
    assert grads[0].keys() == grads[1].keys()
    assert any(name.endswith(".down_proj") for name in grads[0])
    for name, x in grads[1].items():
        assert (grads[0][name] - x).norm() < 0.05 * x.norm(), name


@on_ranks(2, gpus=())
def test_a_stack_that_fsdp_has_cut_is_refused(mesh: DeviceMesh) -> None:
    """In any unit: peft would make adapters that FSDP2 neither shards nor reduces."""
    for where in ("Qwen3MoeExperts", "Qwen3MoeDecoderLayer"):
        model = base()
        for module in list(model.modules()):
            if type(module).__name__ == where:
                fully_shard(module, mesh=mesh)
        with pytest.raises(NotImplementedError, match=r"get_peft_model on a new model before"):
            adapted(model)


@on_ranks(2, gpus=())
def test_cuts_inside_of_experts_are_refused(mesh: DeviceMesh) -> None:
    model = base()
    for module in model.modules():
        if type(module).__name__ == "Qwen3MoeExperts":
            cut = distribute_tensor(module.gate_up_proj, mesh, [Shard(1)])
            module.gate_up_proj = nn.Parameter(cut, requires_grad=False)
    with pytest.raises(NotImplementedError, match=r"expected whole experts, equally many"):
        adapted(model)


@on_ranks(2, gpus=())
def test_experts_that_are_cut_after_their_adapters_are_refused(mesh: DeviceMesh) -> None:
    model = adapted(base())
    for module in model.modules():
        if isinstance(module, ParamWrapper):
            experts, name = module.get_base_layer(), module.parameter_name
            cut = distribute_tensor(getattr(experts, name), mesh, [Shard(0)])
            setattr(experts, name, nn.Parameter(cut, requires_grad=False))
    with pytest.raises(NotImplementedError, match=r"Cut the experts before get_peft_model"):
        model(input_ids=TOKENS, labels=TOKENS)


@on_ranks(3, gpus=())
def test_unequal_numbers_of_experts_are_refused(mesh: DeviceMesh) -> None:
    model = base()
    experts = next(x for x in model.modules() if type(x).__name__ == "Qwen3MoeExperts")
    cut = distribute_tensor(experts.down_proj, mesh, [Shard(0)])
    experts.down_proj = nn.Parameter(cut, requires_grad=False)
    with pytest.raises(NotImplementedError, match=r"\[4, 128, 128\], FP8 experts that \[3\] ranks"):
        adapted(model)
