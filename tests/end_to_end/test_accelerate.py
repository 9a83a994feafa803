"""Accelerate: its helpers rebuild or move parameters, ``Accelerator.prepare`` shards with FSDP2."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("accelerate")
if not torch.distributed.is_available():
    pytest.skip("needs torch.distributed", allow_module_level=True)

from accelerate import (
    Accelerator,
    FullyShardedDataParallelPlugin,
    cpu_offload,
    disk_offload,
    dispatch_model,
    load_checkpoint_and_dispatch,
)
from accelerate.state import AcceleratorState
from accelerate.utils import DistributedType, set_module_tensor_to_device
from accelerate.utils.fsdp_utils import load_fsdp_model, save_fsdp_model
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from blocktensor import BlockwiseFP8Tensor, BlockwiseFP8Weight, Recipe, convert
from blocktensor.sharding.fsdp.shards import FrozenShard
from tests.support.models import Model, randn
from tests.support.ranks import on_ranks
from tests.support.sharded import K, mesh_of, reductions, whole

X = randn(4, 128)
RECIPE = Recipe(scale="power_of_two")


def model(frozen: bool) -> nn.Sequential:
    torch.manual_seed(0)
    made = nn.Sequential(nn.Linear(128, 256), nn.ReLU(), nn.Linear(256, 128)).bfloat16()
    made.requires_grad_(not frozen)
    convert(made, RECIPE, skip_small=False)
    return made


@pytest.mark.parametrize("frozen", [False, True])
def test_a_parameter_is_rebuilt_from_an_fp8_one(frozen: bool) -> None:
    made = model(frozen)
    with torch.no_grad():
        wanted = made(X)
    set_module_tensor_to_device(made, "0.weight", "cpu", value=made[0].weight.detach().clone())
    weight = made[0].weight
    assert type(weight) is (BlockwiseFP8Tensor if frozen else BlockwiseFP8Weight)
    assert weight.recipe == RECIPE
    assert weight.requires_grad is not frozen
    with torch.no_grad():
        assert torch.equal(made(X), wanted)
    if frozen:
        set_module_tensor_to_device(made, "0.weight", "meta")
        assert made[0].weight.is_meta


def test_frozen_weights_are_offloaded_to_the_cpu() -> None:
    made = model(frozen=True)
    with torch.no_grad():
        wanted = made(X)
        offloaded = cpu_offload(made, "cpu")
        assert made[0].weight.is_meta
        assert torch.equal(offloaded(X), wanted)


def load(made: nn.Module, folder: Path) -> None:
    torch.save(made.state_dict(), folder / "pytorch_model.bin")
    load_checkpoint_and_dispatch(made, str(folder / "pytorch_model.bin"), device_map={"": "cpu"})


HELPERS: dict[str, Callable[[nn.Module, Path], Any]] = {
    "cpu_offload": lambda m, folder: cpu_offload(m, "cpu")(X),
    "disk_offload": lambda m, folder: disk_offload(m, str(folder), "cpu")(X),
    "dispatch_model": lambda m, folder: dispatch_model(
        m, {"0": "cpu", "1": "cpu", "2": "disk"}, main_device="cpu", offload_dir=str(folder)
    )(X),
    "load_checkpoint_and_dispatch": load,
    "set a plain value": lambda m, folder: set_module_tensor_to_device(
        m, "0.weight", "cpu", value=randn(256, 128)
    ),
}


@pytest.mark.parametrize(
    ("helper", "frozen"),
    [*((name, False) for name in HELPERS), ("disk_offload", True), ("set a plain value", True)],
)
def test_helpers_that_would_lose_the_recipe_are_refused(
    helper: str, frozen: bool, tmp_path: Path
) -> None:
    words = r"cannot be rebuilt from plain values.*convert it then|dequantize"
    made = model(frozen)
    with pytest.raises(NotImplementedError, match=words):
        HELPERS[helper](made, tmp_path)
    assert frozen or not any(p.is_meta for p in made.parameters())


# Accelerator.prepare on two ranks

TOKENS = torch.arange(20).view(2, 10)


class LanguageModel(Model):
    """As those of transformers tell accelerate what to shard by itself."""

    _no_split_modules = ("Block",)

    def __init__(self) -> None:
        super().__init__(K)
        self.register_buffer("factor", torch.tensor(0.5), persistent=False)

    def get_input_embeddings(self) -> nn.Module:
        return self.embed

    def get_output_embeddings(self) -> nn.Module:
        return self.lm_head

    def forward(self, tokens: Tensor) -> Tensor:
        return super().forward(tokens) * self.factor


def built(dtype: torch.dtype, frozen: bool) -> nn.Module:
    """The same model on every rank: of bf16 values, its ``up`` linears frozen if asked."""
    model = LanguageModel().bfloat16()
    for layer in model.blocks:
        layer.up.requires_grad_(not frozen)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.to(dtype)
    assert len(convert(model, skip_small=False).converted) == 4
    return model


@contextmanager
def accelerator(world: int, precision: str, plugin: Any) -> Iterator[Accelerator]:
    """An Accelerator that shards on CPUs, too.

    accelerate ignores ``fsdp_plugin`` there: the state gets what it gets on GPUs.
    """
    rank = str(torch.distributed.get_rank())
    where = {
        "RANK": rank,
        "LOCAL_RANK": rank,
        "WORLD_SIZE": str(world),
        "MASTER_ADDR": "localhost",
        "LOCAL_WORLD_SIZE": str(world),
        "OMP_NUM_THREADS": "1",
    }
    with mock.patch.dict(os.environ, where):
        try:
            made = Accelerator(cpu=True, fsdp_plugin=plugin, mixed_precision=precision)
            if precision != "no":
                plugin.set_mixed_precision(precision)
            made.state.distributed_type, made.state.fsdp_plugin = DistributedType.FSDP, plugin
            yield made
        finally:
            AcceleratorState._reset_state(reset_partial_state=True)


def plugin_of(efficient: bool, **options: Any) -> FullyShardedDataParallelPlugin:
    return FullyShardedDataParallelPlugin(
        **options,
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        cpu_ram_efficient_loading=efficient,
    )


def sharded_as_accelerate_does(model: nn.Module, world: int, policy: Any) -> None:
    options = {"mesh": mesh_of(world, "cpu"), "mp_policy": policy or MixedPrecisionPolicy()}
    for part in (*model.blocks, model.embed):
        fully_shard(part, **options)
    fully_shard(model.lm_head, reshard_after_forward=False, **options)
    fully_shard(model, **options)


def parameters_of(optimizer: Any) -> list[int]:
    return [id(p) for group in optimizer.param_groups for p in group["params"]]


@pytest.mark.parametrize("frozen", [False, True], ids=["trainable", "some frozen"])
@pytest.mark.parametrize("efficient", [False, True], ids=["loaded on all", "loaded on one"])
@pytest.mark.parametrize("precision", ["no", "bf16"])
@on_ranks(2, gpus=())
def test_a_model_trains_as_one_that_fully_shard_has_sharded(
    world: int, device: str, precision: str, efficient: bool, frozen: bool
) -> None:
    plugin = plugin_of(efficient)
    with accelerator(world, precision, plugin) as accelerate:
        model = built(torch.bfloat16, frozen)
        if efficient and torch.distributed.get_rank() != 0:
            for parameter in model.parameters():  # only the first rank has loaded it
                if parameter.requires_grad:
                    torch.nn.init.zeros_(parameter)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        if efficient and frozen:
            before = parameters_of(optimizer)
            with pytest.raises(NotImplementedError, match="cpu_ram_efficient_loading=False"):
                accelerate.prepare(model, optimizer)
            assert parameters_of(optimizer) == before
            return
        model, optimizer = accelerate.prepare(model, optimizer)
        assert parameters_of(optimizer) == list(map(id, model.parameters()))

        # accelerate makes masters in fp32 for mixed precision
        wanted = built(torch.bfloat16 if precision == "no" else torch.float32, frozen)
        sharded_as_accelerate_does(wanted, world, plugin.mixed_precision_policy)
        trained = torch.optim.AdamW(wanted.parameters(), lr=1e-2)
        for _ in range(3):
            losses = [m(TOKENS).float().square().mean() for m in (model, wanted)]
            assert torch.equal(*[loss.detach() for loss in losses])
            accelerate.backward(losses[0])
            losses[1].backward()
            pairs = list(zip(model.parameters(), wanted.parameters(), strict=True))
            for ours, theirs in pairs:
                assert (ours.grad is None) == (not ours.requires_grad)
                if ours.requires_grad:
                    assert torch.equal(ours.grad.full_tensor(), theirs.grad.full_tensor())
            for each in (optimizer, trained):
                each.step()
                each.zero_grad()
            for ours, theirs in pairs:
                assert ours.dtype == theirs.dtype
                if ours.requires_grad:
                    assert torch.equal(whole(ours), whole(theirs))
        assert reductions(model) == reductions(wanted) == 3
        model.blocks[0].unshard()
        for part in (model.blocks[0].up, model.blocks[0].down):
            assert isinstance(part.weight, BlockwiseFP8Tensor)  # what was gathered


@on_ranks(2, gpus=())
def test_its_sharded_checkpoints_have_frozen_weights(
    world: int, device: str, tmp_path: Path
) -> None:
    plugin = plugin_of(efficient=False, state_dict_type="SHARDED_STATE_DICT")
    with accelerator(world, "no", plugin) as accelerate:
        model = built(torch.bfloat16, frozen=True)
        model, _ = accelerate.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
        wanted = model(TOKENS)
        save_fsdp_model(plugin, accelerate, model, tmp_path)
        for local in (p._local_tensor for p in model.parameters()):
            if isinstance(local, FrozenShard):
                for x in (local.data_rows, local.scale):
                    x.view(torch.uint8).bitwise_xor_(1)
        assert not torch.equal(model(TOKENS), wanted)
        load_fsdp_model(plugin, accelerate, model, tmp_path)
        assert torch.equal(model(TOKENS), wanted)


@on_ranks(2, gpus=())
def test_a_model_that_transformers_has_converted(world: int, device: str) -> None:
    """Sharded, trained and saved: the state that is gathered for the first rank is written."""
    pytest.importorskip("transformers", minversion="5.17")
    from tests.support import pretrained

    with TemporaryDirectory() as home, pretrained.quiet():
        homes = [home]
        torch.distributed.broadcast_object_list(homes)  # the first rank alone writes
        folder = pretrained.saved(Path(homes[0], "source"), pretrained.llama().bfloat16())
        torch.distributed.barrier()
        with accelerator(world, "bf16", plugin_of(efficient=False)) as accelerate:
            model = pretrained.loaded(folder, dtype="auto")
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
            model, optimizer = accelerate.prepare(model, optimizer)
            for _ in range(2):
                accelerate.backward(model(pretrained.TOKENS, labels=pretrained.TOKENS).loss)
                optimizer.step()
                optimizer.zero_grad()
            # as Accelerator.get_state_dict gathers it
            whole_state = StateDictOptions(full_state_dict=True, cpu_offload=True)
            state = get_model_state_dict(model, options=whole_state)
            if accelerate.is_main_process:
                model.save_pretrained(Path(home, "saved"), state_dict=state)
                saved = pretrained.loaded(Path(home, "saved"), dtype="auto").state_dict()
                assert saved.keys() == state.keys()
                for name, x in saved.items():
                    assert x.dtype == state[name].dtype and torch.equal(x, state[name]), name
            torch.distributed.barrier()
