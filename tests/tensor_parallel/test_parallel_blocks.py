"""Parallel blocks and layers compute what one process does, whatever runs them."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed.tensor.parallel as torch_styles
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.parallel import parallelize_module
from torch.utils.checkpoint import checkpoint

from blocktensor import Recipe, convert, freeze
from blocktensor.distributed import ColwiseParallel, RowwiseParallel
from tests.support.asserts import assert_no_marked_product
from tests.support.numeric import assert_same, relative_error
from tests.support.parallel_linears import (
    BF16,
    assert_alike,
    batch,
    batches,
    block,
    compute,
    converted,
    drawn,
    local,
    my_part,
    parallel_block,
    tokens_of,
)
from tests.support.ranks import on_ranks
from tests.support.sharded import Wire, scale, whole


@pytest.mark.parametrize("sequence", [False, True])
@on_ranks(2)
def test_a_block_computes_what_one_process_does(
    mesh: DeviceMesh, device: str, sequence: bool
) -> None:
    for tokens in (256, 150):
        model = parallel_block(mesh, sequence)
        got = compute(model, *batches(mesh, tokens, sequence))
        want = compute(block().to(device), *(batch(i, tokens).to(device) for i in (1, 2)))
        assert relative_error(got.y, tokens_of(mesh, want.y, sequence)) < 1e-2
        assert relative_error(got.dx, tokens_of(mesh, want.dx, sequence)) < 2e-2
        for name, p in model.named_parameters():
            assert relative_error(whole(p.grad), want.grads[name]) < 0.05, name


@on_ranks(2, gpus=())
def test_no_tokens(mesh: DeviceMesh) -> None:
    got = compute(parallel_block(mesh), batch(1)[:, :0], batch(2)[:, :0])
    assert got.y.shape == (2, 0, 256)
    assert not any(grad.any() for grad in got.grads.values())


@on_ranks(2)
def test_frozen_weights(mesh: DeviceMesh, device: str) -> None:
    x, single = drawn((128, 512), BF16, 1).to(device), converted(512, 512).to(device)
    of_bias = parallelize_module(converted(512, 512, True).to(device), mesh, RowwiseParallel())
    of_bias.weight.requires_grad_(False)
    of_bias(my_part(mesh, x, -1)).sum().backward()
    assert (of_bias.bias.grad.to_local() == 128).all()
    freeze(single)
    want = single(x)
    colwise = parallelize_module(copy.deepcopy(single), mesh, ColwiseParallel())
    assert_same(colwise(x), my_part(mesh, want, -1))
    uneven = distribute_tensor(x[:127], mesh, [Shard(0)])
    assert_same(colwise(uneven), my_part(mesh, single(x[:127]), -1))
    with Wire() as wire:
        assert_same(colwise(distribute_tensor(x, mesh, [Shard(0)])), my_part(mesh, want, -1))
    assert {sent.dtype for sent in wire.gathered} == {torch.uint8}  # in FP8 where parts are equal
    rowwise = parallelize_module(single, mesh, RowwiseParallel(in_rank_order=True))
    assert relative_error(rowwise(my_part(mesh, x, -1)), want) < 4e-3
    assert not any(p.requires_grad for m in (colwise, rowwise) for p in m.parameters())


@on_ranks(2, gpus=())
def test_tokens_in_unequal_parts(mesh: DeviceMesh) -> None:
    x, grad, whole = drawn((127, 256), BF16, 1), drawn((127, 512), BF16, 2), converted(512)
    want = compute(whole, x, grad)
    module = parallelize_module(converted(512), mesh, ColwiseParallel())
    cut = distribute_tensor(x, mesh, [Shard(0)]).requires_grad_()
    module(cut).backward(my_part(mesh, grad, -1))
    assert relative_error(cut.grad.full_tensor(), want.dx) < 4e-3
    assert_same(local(module.weight.grad), my_part(mesh, want.grads["weight"], 0))


@on_ranks(2)
def test_no_product_is_in_high_precision(mesh: DeviceMesh) -> None:
    for sequence in (False, True):
        model = parallel_block(mesh, sequence)
        # of a length that no other test has: DTensor asks for shapes that it has not met
        notes = assert_no_marked_product(model, batches(mesh, 66, sequence)[0]).notes
        # 33 tokens a rank and sequence
        assert [note.partition(",")[0] for note in notes] == sequence * [
            "tokens travel in high precision for weight gradients"
        ]
        if sequence:
            assert {"attention.o", "mlp.down"} < set(notes[0].rpartition(": ")[2].split(", "))
        report = assert_no_marked_product(model, batches(mesh, 256, sequence)[0])
        assert report.notes == ()
        kinds = [e.kind for e in report.entries if e.precision == "FP8"]
        assert len({kinds.count(kind) for kind in ("fprop", "dgrad", "wgrad")}) == 1


@on_ranks(2)
def test_activation_checkpointing(mesh: DeviceMesh, monkeypatch: pytest.MonkeyPatch) -> None:
    want = compute(parallel_block(mesh), *batches(mesh))
    model = parallel_block(mesh)
    forward = model.forward
    monkeypatch.setattr(model, "forward", lambda x: checkpoint(forward, x, use_reentrant=False))
    assert_alike(compute(model, *batches(mesh)), want)


@on_ranks(2)
def test_inputs_and_outputs_as_dtensors(mesh: DeviceMesh, device: str) -> None:
    """As SequenceParallel gives them, and as loss_parallel takes them."""
    plan = {
        "0": torch_styles.SequenceParallel(),
        "1": ColwiseParallel(use_local_output=False),
        "2": RowwiseParallel(output_layouts=Shard(1), use_local_output=False),
    }
    up, down = nn.Linear(256, 512, bias=False), nn.Linear(512, 256, bias=False)
    model = nn.Sequential(nn.RMSNorm(256), up, down).to(device, BF16)
    convert(model, skip_small=False)
    single = copy.deepcopy(model)
    parallelize_module(model, mesh, plan)
    y = model(batches(mesh)[0])
    assert y.placements == (Shard(1),)
    y.full_tensor().float().square().sum().backward()
    want = single(batch(1).to(device))
    want.float().square().sum().backward()
    assert relative_error(y.full_tensor(), want) < 1e-2
    for got, one in zip(model.parameters(), single.parameters(), strict=True):
        assert relative_error(got.grad.full_tensor(), one.grad) < 0.05


@pytest.mark.parametrize("policy", ["backward", False])
@on_ranks(2, gpus=())
def test_a_weight_that_changed_is_cast_again(mesh: DeviceMesh, policy: Any) -> None:
    """The casts of parts off the grid follow the master, and a change before backward raises."""
    module = converted(384, 256, recipe=Recipe(cache_weight=policy))
    parallelize_module(module, mesh, ColwiseParallel())
    x = drawn((128, 256), BF16, 1).requires_grad_()
    before = module(x)
    scale(2, module.weight)
    assert_same(module(x), before * 2)
    (part,) = module.weight.to_local().cache.parts()  # with the whole's scales
    casts = part.casts
    y = module(x)
    assert part.casts == casts + 1
    scale(2, module.weight)
    with pytest.raises(RuntimeError, match=r"modified by an in-?place operation"):
        y.sum().backward()
