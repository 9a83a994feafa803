"""``from_pretrained`` of an FP8 checkpoint with a ``distributed_config``: read by shard."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

pytest.importorskip("safetensors")
pytest.importorskip("transformers.distributed.expert_parallel")

from transformers import AutoModelForCausalLM
from transformers.distributed import DistributedConfig

from blocktensor.integrations.transformers import BlockwiseFP8Config
from blocktensor.sharding.dtensor import fp8_part, own_part
from blocktensor.sharding.fsdp.shards import FP8Shard, FrozenShard
from tests.support.published import TOKENS, written
from tests.support.ranks import on_ranks

LAYOUTS = {"FSDP": {"fsdp_size": 2}, "FSDP and EP": {"fsdp_size": 2, "ep_size": 2}}


SKIPPED = "model.layers.0.self_attn.o_proj"


def loaded(folder: Path, frozen: bool, **options: Any) -> Any:
    config = BlockwiseFP8Config(frozen=frozen, skip_small=False, skip=[SKIPPED])
    return AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.bfloat16, quantization_config=config, **options
    )


def shared(kind: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name, value in {
        "RANK": dist.get_rank(),
        "LOCAL_RANK": dist.get_rank(),
        "WORLD_SIZE": 2,
    }.items():
        monkeypatch.setenv(name, str(value))
    if dist.get_rank() == 0:
        written(kind, folder)
    dist.barrier()
    return folder


@pytest.mark.parametrize("layout", LAYOUTS)
@on_ranks(2, gpus=())
def test_each_rank_reads_its_part(
    world: int, layout: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = shared("Qwen3-MoE", tmp_path / "fp8", monkeypatch)
    single = loaded(folder, frozen=True)
    wanted = single(input_ids=TOKENS, labels=TOKENS).loss
    assert fp8_part(single.get_submodule(SKIPPED).weight) is None
    fp8 = {name for name, x in single.named_parameters() if fp8_part(x) is not None}
    for frozen in (True, False):
        cut = DistributedConfig(**LAYOUTS[layout])
        model = loaded(folder, frozen, distributed_config=cut)
        kind = FrozenShard if frozen else FP8Shard
        parts = {name: own_part(x) for name, x in model.named_parameters()}
        assert {name for name, x in parts.items() if isinstance(x, kind)} >= {
            name for name in fp8 if "experts" not in name
        }
        assert {name for name, x in parts.items() if fp8_part(x) is not None} == fp8
        loss = model(input_ids=TOKENS, labels=TOKENS).loss
        assert torch.equal(loss.detach(), wanted.detach())
    loss.backward()
    assert all(x.grad is not None for x in model.parameters())


@on_ranks(2, gpus=())
def test_their_tensor_parallel_styles_are_refused(
    world: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = shared("Qwen3", tmp_path / "fp8", monkeypatch)
    cut = DistributedConfig(tp_size=2, tp_plan="auto")
    with pytest.raises(NotImplementedError, match=r"give ColwiseParallel or RowwiseParallel of bl"):
        loaded(folder, frozen=True, distributed_config=cut)
