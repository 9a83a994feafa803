"""Styles on models: before and after convert, in reports, on ranks that disagree."""

from __future__ import annotations

import copy
import io
import pickle
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.distributed.tensor.parallel as torch_styles
from torch import Tensor, nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import parallelize_module
from torch.utils.checkpoint import checkpoint

from blocktensor import BlockwiseFP8Weight, Recipe, convert, explain, freeze
from blocktensor.distributed import ColwiseParallel, PrepareModuleInput, RowwiseParallel
from tests.support.audited import assert_no_marked_product
from tests.support.numeric import assert_same, relative_error
from tests.support.parallel_blocks import (
    UNALIGNED,
    Computed,
    Mlp,
    assert_alike,
    batch,
    block,
    compute,
    parallelize,
    tokens_of,
)
from tests.support.parallel_linears import converted, drawn, local, plain
from tests.support.ranks import on_ranks
from tests.support.sharded import mesh_of
from tests.support.wire import Wire


@pytest.mark.parametrize("sequence", [False, True])
@on_ranks(2)
def test_a_block_computes_what_one_process_does(world: int, device: str, sequence: bool) -> None:
    mesh = mesh_of(world, device)
    for tokens in (256, 150):
        x, grad = batch(1, tokens).to(device), batch(2, tokens).to(device)
        model = block(**UNALIGNED).to(device)
        parallelize(model, mesh, sequence)
        got = compute(model, tokens_of(mesh, x, sequence), tokens_of(mesh, grad, sequence))
        want = compute(block(**UNALIGNED).to(device), x, grad)
        assert relative_error(got.y, tokens_of(mesh, want.y, sequence)) < 1e-2
        assert relative_error(got.dx, tokens_of(mesh, want.dx, sequence)) < 2e-2
        for name, p in model.named_parameters():
            got_grad = p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad
            assert relative_error(got_grad, want.grads[name]) < 0.05, name


@on_ranks(2)
def test_the_order_of_convert_does_not_matter(world: int, device: str) -> None:
    mesh, steps = mesh_of(world, device), []
    for before in (True, False):
        model = block(Recipe() if before else None, **UNALIGNED).to(device)
        identities = [id(p) for p in model.parameters()]
        parallelize(model, mesh)
        if not before:
            identities = [id(p) for p in model.parameters()]
            report = convert(model, skip_small=False)
            assert len(report.converted) == 7
            assert [id(p) for p in model.parameters()] == identities
        weight: Any = model.attention.k.weight
        assert isinstance(weight.to_local(), BlockwiseFP8Weight)
        x, grad = (tokens_of(mesh, batch(seed).to(device)) for seed in (1, 2))
        steps.append(compute(model, x, grad))
    assert_alike(*steps)


@on_ranks(2, gpus=())
def test_another_recipe_is_taken(world: int, device: str) -> None:
    mesh, recipe, steps = mesh_of(world, device), Recipe(scale="power_of_two"), []
    for again in (False, True):
        model = block(Recipe() if again else recipe, **UNALIGNED)
        parallelize(model, mesh)
        if again:
            convert(model, recipe, skip_small=False)
        steps.append(compute(model, *(tokens_of(mesh, batch(seed)) for seed in (1, 2))))
    assert_alike(*steps)


@on_ranks(2, gpus=())
def test_no_tokens(world: int, device: str) -> None:
    model = block(**UNALIGNED)
    parallelize(model, mesh_of(world, device))
    got = compute(model, batch(1)[:, :0], batch(2)[:, :0])
    assert got.y.shape == (2, 0, 256)
    assert not any(local(grad).any() for grad in got.grads.values())


@on_ranks(2)
def test_a_copy_has_its_own_weights(world: int, device: str) -> None:
    mesh = mesh_of(world, device)
    model = block(**UNALIGNED).to(device)
    parallelize(model, mesh)
    x = tokens_of(mesh, batch(1).to(device))
    y = model(x)
    other = copy.deepcopy(model)
    assert_same(other(x), y)
    with torch.no_grad():
        other.mlp.gate.weight.mul_(2)
    assert_same(model(x), y)
    assert (other(x) != y).any()


@on_ranks(2, gpus=())
def test_what_is_pickled(world: int, device: str, tmp_path: Path) -> None:
    folder = [str(tmp_path)]
    dist.broadcast_object_list(folder)
    mesh, x = mesh_of(world, device), drawn((64, 256), torch.bfloat16, 1)
    for style in (ColwiseParallel(), RowwiseParallel(input_layouts=Replicate())):
        made, other = (
            parallelize_module(converted(256, 256, True, torch.bfloat16), mesh, style)
            for _ in range(2)
        )
        with torch.no_grad():
            made.weight.mul_(2)
        for save in (lambda model: torch.save(model, io.BytesIO()), pickle.dumps):
            with pytest.raises(NotImplementedError, match=r"model\.state_dict\(\) with torch\.dis"):
                save(nn.Sequential(made))
        dcp.save(made.state_dict(), checkpoint_id=folder[0])
        state = other.state_dict()
        dcp.load(state, checkpoint_id=folder[0])
        other.load_state_dict(state)
        assert_same(other(x), made(x))


@on_ranks(2, gpus=())
def test_the_report_judges_the_whole_weight(world: int, device: str) -> None:
    model = nn.Sequential(nn.Linear(2048, 4096, bias=False), nn.Linear(2048, 1024, bias=False))
    parallelize_module(model.bfloat16(), mesh_of(world, device), {"0": ColwiseParallel()})
    first, second = convert(model).entries
    assert first.reason == "trainable, tensor parallel: 2048 x 2048 a rank"
    assert second.reason.startswith("small: N K=2097152 <")
    report = convert(block(None, **UNALIGNED), skip_small=False)
    assert report.bytes_after > 0
    model = block(None, **UNALIGNED)
    parallelize(model, mesh_of(world, device))
    entries = {e.name: e for e in convert(model, skip_small=False).converted}
    assert entries["attention.k"].shape == (128, 256)
    assert entries["attention.k"].reason == (
        "trainable, tensor parallel: 64 x 256 a rank, small for its speed: N=64 < 1024 and "
        "K=256 < 1024 and N K=16384 < 4194304"
    )
    sizes = {(p.layer, p.kind): p.sizes for p in explain(model, 512).products}
    assert sizes["attention.k", "fprop"] == "512 x 64 x 256"
    assert sizes["attention.o", "dgrad"] == "512 x 128 x 256"


@on_ranks(2, gpus=())
def test_styles_of_torch_name_ours(world: int, device: str) -> None:
    mesh = mesh_of(world, device)
    for style in (torch_styles.ColwiseParallel(), torch_styles.RowwiseParallel()):
        module = converted(256, 256, True, torch.bfloat16)
        with pytest.raises(NotImplementedError, match="ColwiseParallel or RowwiseParallel of"):
            parallelize_module(module, mesh, style)
        x = drawn((128, 256), torch.bfloat16, 1)
        assert module(x).shape == (128, 256)  # as it was
        module = parallelize_module(plain(256, 256, True, torch.bfloat16), mesh, style)
        with pytest.raises(NotImplementedError, match="ColwiseParallel or RowwiseParallel of"):
            convert(module, skip_small=False)
        assert type(module.weight.to_local()) is Tensor


@on_ranks(2, gpus=())
def test_what_cannot_be_cut_raises(world: int, device: str) -> None:
    mesh = mesh_of(world, device)
    for style in (ColwiseParallel(), RowwiseParallel()):
        module = converted(255, 255, False, torch.bfloat16)
        with pytest.raises(NotImplementedError, match="expected a multiple of 2;"):
            parallelize_module(module, mesh, style)
        assert isinstance(module.weight, BlockwiseFP8Weight)
        frozen = converted(384, 384, False, torch.bfloat16)
        freeze(frozen)
        with pytest.raises(NotImplementedError, match=r"a frozen FP8 weight .* a multiple of 256;"):
            parallelize_module(frozen, mesh, style)
        cut = parallelize_module(converted(256, 256, False, torch.bfloat16), mesh, style)
        with pytest.raises(NotImplementedError, match="and each linear once"):
            parallelize_module(cut, mesh, style)
    for kind in (ColwiseParallel, RowwiseParallel, PrepareModuleInput):
        with pytest.raises(TypeError, match=r"reduce_dtype=torch.int8: expected one of"):
            kind(reduce_dtype=torch.int8)


@on_ranks(2)
def test_frozen_weights(world: int, device: str) -> None:
    mesh, x = mesh_of(world, device), drawn((128, 512), torch.bfloat16, 1).to(device)
    rank = dist.get_rank()
    for style, dim in ((ColwiseParallel(), 0), (RowwiseParallel(in_rank_order=True), 1)):
        whole = converted(512, 512, False, torch.bfloat16).to(device)
        freeze(whole)
        module = parallelize_module(copy.deepcopy(whole), mesh, style)
        assert not any(parameter.requires_grad for parameter in module.parameters())
        mine = x if dim == 0 else x.chunk(world, -1)[rank].contiguous()
        got, want = module(mine), whole(x)
        if dim == 0:
            assert_same(got, want.chunk(world, -1)[rank].contiguous())
        else:
            assert relative_error(got, want) < 4e-3


@on_ranks(2)
def test_no_product_is_in_high_precision(world: int, device: str) -> None:
    mesh = mesh_of(world, device)
    for sequence in (False, True):
        model = block(**UNALIGNED).to(device)
        parallelize(model, mesh, sequence)
        # of a length that no other test has: DTensor asks for shapes that it has not met
        x = tokens_of(mesh, batch(1, 66).to(device), sequence)
        notes = assert_no_marked_product(model, x).notes
        # 33 tokens a rank and sequence
        assert [note.partition(",")[0] for note in notes] == sequence * [
            "tokens travel in high precision for weight gradients"
        ]
        if sequence:
            gathered = notes[0].rpartition(": ")[2].split(", ")
            assert {"attention.o", "mlp.down"} < set(gathered)
        x = tokens_of(mesh, batch(1, 256).to(device), sequence)
        assert assert_no_marked_product(model, x).notes == ()


@pytest.mark.parametrize("what", ["converted", "recipe", "alone"])
@on_ranks(2, gpus=())
def test_ranks_that_disagree(world: int, device: str, what: str) -> None:
    rank = dist.get_rank()
    recipes = {
        "converted": (Recipe(), None),
        "recipe": (Recipe(), Recipe(scale="power_of_two")),
        "alone": (Recipe(), Recipe()),
    }
    started = time.monotonic()
    if what == "alone":  # a linear without a shared input
        module = plain(256, 256, False, torch.bfloat16)
        if rank:
            convert(module, skip_small=False)
        module = parallelize_module(
            module, mesh_of(world, device), ColwiseParallel(input_layouts=Shard(0))
        )
        with pytest.raises(RuntimeError, match=r"^ranks disagree on tensor parallel linears: rank"):
            module(drawn((128, 256), torch.bfloat16, 1))
    else:
        model = block(None)
        parallelize(model, mesh_of(world, device))
        recipe = recipes[what][rank]
        if recipe is not None:
            convert(model, recipe, skip_small=False)
        for _ in range(2):  # nothing that differs is remembered as agreed on
            with pytest.raises(RuntimeError, match=r"^ranks disagree on inputs of tensor parallel"):
                model(tokens_of(mesh_of(world, device), batch(1)))
    assert time.monotonic() - started < 30


@on_ranks(2)
def test_activation_checkpointing(world: int, device: str) -> None:
    mesh, steps = mesh_of(world, device), []

    def run(kind: str) -> Computed:
        model = block(**UNALIGNED).to(device)
        parallelize(model, mesh)
        x, grad = (tokens_of(mesh, batch(seed).to(device)) for seed in (1, 2))
        if kind == "checkpointed":
            forward = model.forward
            model.forward = lambda x: checkpoint(forward, x, use_reentrant=False)  # type: ignore[method-assign]
        return compute(model, x, grad)

    steps = [run(kind) for kind in ("eager", "checkpointed")]
    assert_alike(steps[1], steps[0])


@on_ranks(2)
def test_inputs_and_outputs_as_dtensors(world: int, device: str) -> None:
    """As SequenceParallel gives them, and as loss_parallel takes them."""
    mesh = mesh_of(world, device)
    x = drawn((2, 256, 256), torch.bfloat16, 1).to(device)
    plan = {
        "0": torch_styles.SequenceParallel(),
        "1": ColwiseParallel(use_local_output=False),
        "2": RowwiseParallel(output_layouts=Shard(1), use_local_output=False),
    }
    model = nn.Sequential(
        nn.RMSNorm(256),
        nn.Linear(256, 512, bias=False),
        nn.Linear(512, 256, bias=False),
    ).bfloat16()
    convert(model, skip_small=False)
    whole = copy.deepcopy(model).to(device)
    parallelize_module(model.to(device), mesh, plan)
    y = model(tokens_of(mesh, x))
    assert y.placements == (Shard(1),)
    y.full_tensor().float().square().sum().backward()
    want = whole(x)
    want.float().square().sum().backward()
    assert relative_error(y.full_tensor(), want) < 1e-2
    for got, one in zip(model.parameters(), whole.parameters(), strict=True):
        assert relative_error(got.grad.full_tensor(), one.grad) < 0.05


@on_ranks(2)
def test_state_dict_holds_masters(world: int, device: str) -> None:
    mesh = mesh_of(world, device)
    model = block(**UNALIGNED).to(device)
    parallelize(model, mesh)
    plain_block = block(None, **UNALIGNED).to(device).state_dict()
    for name, value in model.state_dict().items():
        assert type(local(value)) is Tensor
        whole = value.full_tensor() if hasattr(value, "full_tensor") else value
        assert_same(whole, plain_block[name])
    other = block(**UNALIGNED).to(device)
    with torch.no_grad():
        for p in other.parameters():
            p.zero_()
    parallelize(other, mesh)
    other.load_state_dict(model.state_dict())
    x, grad = (tokens_of(mesh, batch(seed).to(device)) for seed in (1, 2))
    assert_alike(compute(other, x, grad), compute(model, x, grad))
    other.load_state_dict(model.state_dict(), assign=True)
    weight: Any = other.mlp.gate.weight
    assert isinstance(weight.to_local(), BlockwiseFP8Weight)


@on_ranks(2, gpus=())
def test_a_weight_that_changed_is_cast_again(world: int, device: str) -> None:
    """The casts of parts off the grid follow the master, and a change before backward raises."""
    for policy in ("backward", "step", False):
        recipe = Recipe(cache_weight=policy)  # type: ignore[arg-type]
        module = parallelize_module(
            converted(384, 256, False, torch.bfloat16, recipe),
            mesh_of(world, device),
            ColwiseParallel(),
        )
        x = drawn((128, 256), torch.bfloat16, 1).requires_grad_()
        before = module(x)
        with torch.no_grad():
            module.weight.mul_(2)
        assert_same(module(x), before * 2)
        (part,) = module.weight.to_local().cache.parts()  # with the whole's scales
        casts = part.casts
        module(x)
        assert part.casts == casts + (policy != "step")
        y = module(x)
        with torch.no_grad():
            module.weight.mul_(2)
        with pytest.raises(RuntimeError, match=r"modified by an in-?place operation"):
            y.sum().backward()


@on_ranks(2, gpus=())
def test_unconverted_linears_send_what_torchs_do(world: int, device: str) -> None:
    mesh, sent = mesh_of(world, device), []
    ours = ColwiseParallel, RowwiseParallel, PrepareModuleInput
    torchs = tuple(getattr(torch_styles, style.__name__) for style in ours)
    for colwise, rowwise, prepare in (ours, torchs):
        torch.manual_seed(0)
        model = Mlp(512).bfloat16()
        plan = {"gate": colwise(), "up": colwise(), "down": rowwise(output_layouts=Shard(1))}
        parallelize_module(model, mesh, plan)
        shared = prepare(input_layouts=Shard(1), desired_input_layouts=Replicate())
        parallelize_module(model, mesh, shared)
        x = tokens_of(mesh, batch(1)).requires_grad_()
        model(x)  # ranks compare
        with Wire() as wire:
            y = model(x)
            y.sum().backward()
        traffic = [sorted(t.nbytes for t in kind) for kind in
                   (wire.gathered, wire.reduced, wire.scattered)]  # fmt: skip
        sent.append((traffic, y.detach(), x.grad))
    assert sent[0][0] == sent[1][0]
    assert sum(map(len, sent[0][0])) == 4
    assert_same(sent[0][1], sent[1][1])
    assert sent[0][2] is not None and sent[1][2] is not None
    assert_same(sent[0][2], sent[1][2])
