"""transformers' expert parallelism with tokens that are sent in FP8."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

pytest.importorskip("transformers.distributed.expert_parallel")

from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM
from transformers.distributed.expert_parallel import apply_expert_parallelism

import blocktensor.integrations.transformers  # noqa: F401
from blocktensor import Recipe, convert
from tests.support.asserts import refused
from tests.support.models import X_IN_POWERS
from tests.support.ranks import on_ranks


def tiny(recipe: Recipe | None) -> Any:
    torch.manual_seed(0)
    sizes = dict.fromkeys(("hidden_size", "intermediate_size", "moe_intermediate_size"), 128)
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 64}
    others = {"num_hidden_layers": 1, "vocab_size": 64, "num_experts": 4, "num_experts_per_tok": 2}
    model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes, **heads, **others)).bfloat16()
    if recipe is not None:
        convert(model, recipe, skip_small=False)
    return model


def cut(model: Any, mesh: DeviceMesh, how: str) -> Any:
    model = copy.deepcopy(model)
    plan = model._expand_parallel_plan(model.ep_plan)
    apply_expert_parallelism(model, mesh["ep"], mesh["tp"], plan, ep_implementation=how)
    return model


def step(model: Any, tokens: Tensor) -> dict[str, Tensor]:
    loss = model(input_ids=tokens, labels=tokens).loss
    loss.backward()
    grads = {name: x.grad for name, x in model.named_parameters() if x.grad is not None}
    local = {name: g.to_local() if hasattr(g, "to_local") else g for name, g in grads.items()}
    return {"loss": loss.detach(), **local}


@on_ranks(2, gpus=())
def test_steps(world: int, device: str) -> None:
    """The losses of tokens sent in bf16, in bits, and their gradients but for one rounding."""
    mesh = init_device_mesh(device, (world, 1), mesh_dim_names=("ep", "tp"))
    rank = mesh["ep"].get_local_rank()
    model = tiny(X_IN_POWERS)
    for length in (33, 2):  # with few tokens, a rank may get none
        tokens = torch.arange(length)[None] * (7 if rank else 0) % 64
        want, got = (
            step(cut(model, mesh, how), tokens) for how in ("all_to_all", "all_to_all_fp8")
        )
        assert torch.equal(got["loss"], want["loss"])
        assert got.keys() == want.keys()
        for name, grad in want.items():
            close = (got[name] - grad).norm() <= 0.02 * grad.norm()
            assert close, name


@on_ranks(2, gpus=())
def test_what_is_refused(world: int, device: str) -> None:
    mesh = init_device_mesh(device, (world, 1), mesh_dim_names=("ep", "tp"))
    tokens = torch.arange(9)[None]
    high, fp32 = (cut(tiny(r), mesh, "all_to_all_fp8") for r in (None, Recipe()))
    said = refused(lambda: high(input_ids=tokens), lambda: fp32(input_ids=tokens))
    assert "whose stacks are in high precision" in said.replace("\n  ", " ")
    assert "scales are no powers of two" in said.replace("\n  ", " ")
