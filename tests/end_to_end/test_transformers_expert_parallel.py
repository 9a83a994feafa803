"""Expert parallelism of an unmodified transformers model: FP8 on every rank, as in one process."""

from __future__ import annotations

import copy
import importlib.util
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh

import blocktensor
from blocktensor import BlockwiseFP8Weight, convert
from tests.support.moe_models import TOKENS, transformers_moe
from tests.support.ranks import on_ranks
from tests.support.sharded import mesh_of

_OF_5_17 = {
    "model.layers.*.mlp.gate": "ep_router",
    "model.layers.*.mlp.experts.gate_up_proj": "grouped_gemm",
    "model.layers.*.mlp.experts.down_proj": "grouped_gemm",
    "model.layers.*.mlp.experts": "moe_tp_experts",
}
"""The ``base_model_ep_plan`` of Qwen3-MoE in transformers 5.17."""


def parallelize(model: Any, mesh: DeviceMesh) -> None:
    """As transformers does, whose functions for it moved."""
    if importlib.util.find_spec("transformers.distributed.expert_parallel") is None:
        from transformers.distributed.tensor_parallel import apply_tensor_parallelism

        model.tp_plan = _OF_5_17
        apply_tensor_parallelism(model, mesh)
    else:
        from transformers.distributed.expert_parallel import apply_expert_parallelism

        plan = model._expand_parallel_plan(model.ep_plan)
        apply_expert_parallelism(model, mesh, mesh, plan, ep_implementation="all_reduce")


@pytest.mark.skipif(not importlib.util.find_spec("transformers"), reason="needs transformers")
@on_ranks(2, gpus=())
def test_transformers_experts_on_two_ranks(world: int, device: str) -> None:
    mesh = mesh_of(world, device)
    single = transformers_moe("qwen3").bfloat16().to(device)
    models = [single, *(copy.deepcopy(single) for _ in range(2))]
    for before, model in zip((None, True, False), models, strict=True):
        if before is not False:
            convert(model, skip_small=False)
        if before is not None:
            parallelize(model, mesh)
            if not before:
                convert(model, skip_small=False)
        loss = model(input_ids=TOKENS, labels=TOKENS).loss
        loss.backward()
        if before is None:
            wanted = loss.detach()
            continue
        # a token's two experts are summed alike on one rank and over two
        assert torch.equal(loss.detach(), wanted)
        for (name, p), q in zip(model.named_parameters(), single.named_parameters(), strict=True):
            if "experts" in name:
                assert type(p._local_tensor) is BlockwiseFP8Weight
                assert torch.equal(p.grad.full_tensor(), q[1].grad), name
        assert not blocktensor.audit(model, input_ids=TOKENS, labels=TOKENS).marked
