"""Adapters of experts on a base that is read by shard: losses and gradients of one process.

Five published architectures in each of twenty layouts of 2 and 4 ranks. By default a few of these
run; ``ADAPTED_LAYOUTS=all`` runs all, in 25 minutes on two busy cores.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

pytest.importorskip("safetensors")
pytest.importorskip("transformers", minversion="5.23")
pytest.importorskip("peft")

from blocktensor import load_fp8
from tests.support.adapted_layouts import (
    OF_FOUR,
    OF_TWO,
    Layout,
    adapted,
    add_by_ranks,
    cut_before,
    gradients,
    meshes,
    recompute,
    wrap,
)
from tests.support.published import TOKENS, empty, written
from tests.support.ranks import on_ranks

MODELS = ("DeepSeek-V3", "GLM-MoE", "Qwen3-MoE", "MiniMax-M2", "gpt-oss")
FEW_OF_TWO = {("gpt-oss", Layout("", "FSDP")), ("DeepSeek-V3", Layout("EP, sent", "FSDP around"))}
FEW_OF_FOUR = {("GLM-MoE", Layout("EP", "FSDP"))}


def cases(layouts: tuple[Layout, ...], of: set[tuple[str, Layout]]) -> list[object]:
    is_all = os.environ.get("ADAPTED_LAYOUTS") == "all"
    return [
        pytest.param(kind, layout, id=f"{kind}, {layout}")
        for kind in MODELS
        for layout in layouts
        if is_all or (kind, layout) in of
    ]


def loss_of(model: torch.nn.Module, tokens: Tensor) -> Tensor:
    loss: Tensor = model(input_ids=tokens, labels=tokens).loss
    return loss


def check(kind: str, layout: Layout, world: int, folder: Path) -> None:
    """Compare a step of ranks with a step of one process."""
    if dist.get_rank() == 0:
        written(kind, folder)
    dist.barrier()
    plain = empty(kind, converted=False)
    load_fp8(plain, folder)
    single = adapted(plain, layout.cut)
    if layout.cut == "EP":
        add_by_ranks(single, meshes(layout, world)[0].size())
    rows = TOKENS.repeat(2, 1).add(torch.arange(4)[:, None]) % 64
    is_sent = layout.cut == "EP, sent"  # each rank has tokens of its own
    batches = list(rows.split(1))[:world] if is_sent else [TOKENS] * world
    losses = [loss_of(single, x) for x in (batches if is_sent else batches[:1])]
    torch.stack(losses).mean().backward()
    want = losses[dist.get_rank() if is_sent else 0].detach()

    model = empty(kind)
    of_cut, of_fsdp = meshes(layout, world)
    cut_before(model, layout, of_cut)
    model = adapted(model, layout.cut)
    if layout.wrapped not in ("", "DDP"):
        wrap(model, layout, of_fsdp)
    if layout.recomputed:
        recompute(model)
    assert not load_fp8(model.get_base_model(), folder).missing
    run = DistributedDataParallel(model) if layout.wrapped == "DDP" else model
    loss = loss_of(run, batches[dist.get_rank()])
    loss.backward()

    got, expected = gradients(model), gradients(single)
    assert got.keys() == expected.keys() and len(got) >= 4
    bound = bound_of(layout, of_cut.size())
    torch.testing.assert_close(loss.detach(), want, rtol=bound / 10, atol=0)
    for name, x in expected.items():
        assert (got[name] - x).norm() <= bound * x.norm(), name


def bound_of(layout: Layout, ranks: int) -> float:
    """Return the largest relative difference; 0 if every sum has the order of one process."""
    if layout.cut == "EP, sent":
        return 1e-5  # gradients are sums over tokens in another order
    if layout.cut == "EP" and ranks > 2:
        return 0.1  # outputs of more than two ranks are added, and rounded, in gloo's order
    return 0.05 if layout.cut == "TP" else 0  # ranks round sums before they are added


@pytest.mark.parametrize(("kind", "layout"), cases(OF_TWO, FEW_OF_TWO))
@on_ranks(2, gpus=())
def test_two_ranks_train_adapters_as_one_process(
    world: int, kind: str, layout: Layout, tmp_path: Path
) -> None:
    check(kind, layout, world, tmp_path / "fp8")


@pytest.mark.parametrize(("kind", "layout"), cases(OF_FOUR, FEW_OF_FOUR))
@on_ranks(4, gpus=())
def test_four_ranks_train_adapters_as_one_process(
    world: int, kind: str, layout: Layout, tmp_path: Path
) -> None:
    check(kind, layout, world, tmp_path / "fp8")
