"""A conversion that cannot be done raises before anything changes, with the remedy."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from expecttest import assert_expected_inline
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from blocktensor import (
    Recipe,
    audit,
    convert,
    explain,
    freeze,
    memory_report,
    share_inputs,
    to_blockwise_fp8_weights,
    unfreeze,
    unfuse,
)
from tests.support.models import (
    DIM,
    POWER_OF_TWO,
    TOKENS,
    Model,
    complaint,
    converted_names,
    plain,
    randn,
)

if dist.is_available():
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Shard, distribute_tensor

    from tests.support.ranks import on_ranks
    from tests.support.sharded import batch, build, mesh_of, shard

LAST = "blocks.1.down"
"""The last linear that is converted."""


def everything(**options: Any) -> Callable[[nn.Module], Any]:
    return lambda model: convert(model, auto_filter_small_kn=False, **options)


def refused(
    model: nn.Module, kind: type[Exception], run: Callable[[nn.Module], Any] | None = None
) -> str:
    """The complaint of a conversion, which leaves the model as it was."""

    def state() -> list[Any]:
        hooks = [len(m._state_dict_hooks) for m in model.modules()]
        parameters = [(n, id(p), type(p), p.requires_grad) for n, p in model.named_parameters()]
        return [hooks, parameters, [getattr(p, "recipe", None) for p in model.parameters()]]

    before = state()
    text = complaint(kind, lambda: (run or everything())(model))
    assert state() == before
    return text


def test_a_recipe_by_name() -> None:
    for run in (
        everything(recipe="power_of_two"),
        lambda model: model.apply(lambda m: to_blockwise_fp8_weights(m, "power_of_two")),
    ):
        assert_expected_inline(
            refused(Model(), TypeError, run),
            """\
recipe='power_of_two' is a str: expected a blocktensor.Recipe, e.g.
Recipe(scale='power_of_two')""",
        )
    assert refused(Model(), TypeError, everything(recipe=3)).endswith(
        "e.g. Recipe() or Recipe.fast()"
    )


def test_a_bad_filter() -> None:
    def fail(module: nn.Module, name: str) -> bool:
        if name == LAST:
            raise KeyError(name)
        return True

    refused(Model(), KeyError, everything(filter=fail))
    assert_expected_inline(
        refused(Model(), TypeError, everything(filter=lambda m, n: None if n == LAST else True)),
        """\
filter returned None for 'blocks.1.down': expected True to convert it, False to skip
it""",
    )
    assert_expected_inline(
        refused(Model(), TypeError, everything(filter="*.up")),
        """filter='*.up' is not callable: expected filter(module, name) -> bool""",
    )


def test_a_lazy_linear_has_no_shape_yet() -> None:
    model = Model()
    model.blocks[1].down = nn.LazyLinear(DIM)
    assert_expected_inline(
        refused(model, ValueError),
        """\
the weight of 'blocks.1.down' has no shape yet (nn.LazyLinear): run a batch through
the model first, then convert it""",
    )
    refused(model, ValueError, convert)
    refused(model.blocks[1].down, ValueError, to_blockwise_fp8_weights)
    report = convert(model, skip=[LAST], auto_filter_small_kn=False)
    row = next(line for line in str(report).splitlines() if line.startswith(LAST))
    assert row.split()[:5] == [LAST, "?", "float32", "-", "-"]
    assert report.parameters == sum(
        p.numel() for name, p in model.named_parameters() if not name.startswith(LAST)
    )
    model(TOKENS)
    assert converted_names(model) == ["blocks.0.up", "blocks.0.down", "blocks.1.up"]
    everything()(model)
    assert converted_names(model)[-1] == LAST


@pytest.mark.parametrize("trainable", [True, False])
def test_a_linear_in_float64(trainable: bool) -> None:
    layer = nn.Linear(DIM, DIM, dtype=torch.float64).requires_grad_(trainable)
    text = refused(layer, TypeError, to_blockwise_fp8_weights)
    assert text.startswith("the weight has dtype torch.float64")


@pytest.mark.parametrize("fake", ["weights", "mode"])
def test_fake_tensors(fake: str) -> None:
    model = Model()
    with FakeTensorMode(allow_non_fake_inputs=True):
        if fake == "weights":
            model = Model()
        assert_expected_inline(
            refused(model, NotImplementedError),
            """\
cannot convert under FakeTensorMode, which keeps weak references to parameters, so
that none can change in place: convert the model before entering the mode, or build
it with torch.device('meta')""",
        )
        refused(model.blocks[0].up, NotImplementedError, to_blockwise_fp8_weights)


def test_a_weight_that_is_in_use() -> None:
    model = Model()
    x = randn(3, 3 * DIM, dtype=torch.float32, grad=True)
    y = model.get_submodule(LAST)(x)
    assert_expected_inline(
        refused(model, RuntimeError),
        """\
cannot convert the weight of 'blocks.1.down' [64, 192] in place: an autograd graph
or a wrapper such as DDP uses it; convert the model before wrapping it in DDP or
FSDP, and not between a forward and its backward""",
    )
    y.sum().backward()
    del y
    assert model.get_submodule(LAST).weight.grad is not None
    reference = weakref.ref(model.get_submodule(LAST).weight)
    assert_expected_inline(
        refused(model, RuntimeError),
        """\
cannot convert the weight of 'blocks.1.down' [64, 192] in place: there are weak
references to it (weakref.ref), which would point to other content; drop them first""",
    )
    del reference
    everything()(model)
    assert converted_names(model)[-1] == LAST


@pytest.mark.parametrize("change", [freeze, unfreeze])
def test_freezing_a_weight_that_is_in_use(change: Callable[[nn.Module], Any]) -> None:
    model = Model()
    everything()(model)
    if change is unfreeze:
        freeze(model)
    last = model.get_submodule(LAST)
    y = last(randn(3, 3 * DIM, dtype=torch.float32, grad=True))
    view = last.weight.view_as(last.weight)
    y.register_hook(lambda grad, held=view: None)
    del view
    refused(model, RuntimeError, change)
    del y
    assert len(change(model)) == 4


def test_a_backward_that_is_under_way_goes_on() -> None:
    layer = nn.Linear(DIM, DIM)
    model = nn.Sequential(layer, nn.LazyLinear(DIM))
    loss = layer(randn(3, DIM, dtype=torch.float32)).sum()
    refused(model, ValueError)
    loss.backward()
    assert layer.weight.grad is not None


# Converting again


def test_another_recipe_is_taken_and_all_else_kept() -> None:
    model = Model()
    everything()(model)
    up = model.blocks[0].up
    up.weight.grad = torch.ones(3 * DIM, DIM)
    up.weight.main_grad = buffer = torch.zeros(3 * DIM, DIM)
    up.weight.tag = "mine"
    seen: list[str] = []
    up.weight.register_hook(lambda grad: seen.append("grad"))
    weights = [p for p in model.parameters() if hasattr(p, "master")]
    masters = [p.master for p in weights]
    identities = [id(p) for p in model.parameters()]

    report = convert(model, POWER_OF_TWO)  # its size no longer matters
    assert {e.reason for e in report.converted} == {"trainable"}
    assert [id(p) for p in model.parameters()] == identities
    assert {p.recipe for p in weights} == {POWER_OF_TWO}
    assert all(p.master is m for p, m in zip(weights, masters, strict=True))
    assert up.weight.main_grad is buffer
    assert up.weight.tag == "mine"
    assert torch.equal(up.weight.grad, torch.ones(3 * DIM, DIM))
    assert len(up._state_dict_hooks) == 1

    fresh = Model()
    everything(recipe=POWER_OF_TWO)(fresh)
    assert torch.equal(model(TOKENS), fresh(TOKENS))
    up.weight.main_grad = None
    model(TOKENS).sum().backward()
    assert seen == ["grad"]
    assert not torch.equal(up.weight.grad, torch.ones(3 * DIM, DIM))


def test_without_a_recipe_nothing_changes() -> None:
    model = Model()
    model.blocks[0].up.weight.requires_grad_(False)
    everything(recipe=POWER_OF_TWO)(model)
    everything()(model)
    model.apply(to_blockwise_fp8_weights)
    everything(recipe=Recipe(), skip=["blocks"])(model)
    found = {p.recipe for n, p in model.named_parameters() if hasattr(p, "recipe") and "b" in n}
    weights = [model.get_submodule(name).weight for name in converted_names(model)]
    assert [w.recipe for w in weights] == [POWER_OF_TWO] * 4 + [Recipe()]
    assert found


def test_a_frozen_weight_keeps_its_recipe() -> None:
    model = Model()
    model.get_submodule(LAST).requires_grad_(False)
    everything()(model)
    assert_expected_inline(
        refused(model, ValueError, everything(recipe=POWER_OF_TWO)),
        """\
the weight of 'blocks.1.down' is frozen in FP8, without its high-precision values:
it was cast with scale='fp32' and cannot be cast with scale='power_of_two'; convert
the original weights, or call without a recipe, which leaves alone what is FP8
already""",
    )
    layer = model.get_submodule(LAST)
    refused(layer, ValueError, lambda m: to_blockwise_fp8_weights(m, POWER_OF_TWO))
    report = everything(recipe=POWER_OF_TWO, skip=[LAST])(model)
    assert report.entries[-2].reason == "already converted"
    assert layer.weight.recipe == Recipe()
    assert model.blocks[0].up.weight.recipe == POWER_OF_TWO


# Sharded models

if dist.is_available():

    @on_ranks(2, gpus=())
    def test_after_an_fsdp2_forward(world: int, device: str) -> None:
        for reshard in (True, False):
            model = build()
            shard(model, mesh_of(world, device), reshard_after_forward=reshard)
            model(batch(0, device))
            text = refused(model, NotImplementedError)
            if reshard:
                assert "'up' is a DTensor [300, 192] that FSDP2 has gathered" in " ".join(
                    text.split()
                )
            assert "convert the model before" in " ".join(text.split())
            model(batch(0, device)).sum().backward()

    @on_ranks(2, gpus=())
    def test_a_frozen_dtensor(world: int, device: str) -> None:
        model = build()
        model.down.requires_grad_(False)
        shard(model, mesh_of(world, device))
        text = refused(model, NotImplementedError).replace("\n", " ")
        assert text.startswith("the weight of 'down' is a frozen DTensor [130, 300]")
        report = convert(model, skip=["down"], auto_filter_small_kn=False)
        assert [e.name for e in report.converted] == ["up", "mid"]

    @on_ranks(2, gpus=())
    def test_a_weight_of_ddp(world: int, device: str) -> None:
        text = refused(nn.parallel.DistributedDataParallel(build()), RuntimeError)
        assert "a wrapper such as DDP uses it" in text.replace("\n", " ")

    @on_ranks(2, gpus=())
    def test_a_sharded_weight_stays_as_it_is(world: int, device: str) -> None:
        for requires_grad in (True, False):
            model = build()
            model.requires_grad_(requires_grad)
            everything()(model)
            shard(model, mesh_of(world, device), reshard_after_forward=False)
            kinds = [type(p) for p in model.parameters()]
            for run in (freeze, unfreeze):
                text = refused(model, NotImplementedError, run)
                assert "the weight of 'up' is sharded by FSDP2" in text
                assert "before fully_shard" in text.replace("\n", " ")
            refused(model, ValueError, everything(recipe=POWER_OF_TWO))
            report = everything()(model)
            assert {e.reason for e in report.converted} == {"already converted"}
            assert [type(p) for p in model.parameters()] == kinds
            model(batch(0, device))
            for run in (freeze, unfreeze):
                if requires_grad:
                    refused(model, NotImplementedError, run)

    @on_ranks(2, gpus=())
    def test_tensor_parallel_weights(world: int, device: str) -> None:
        from torch.distributed.device_mesh import init_device_mesh

        model = nn.Sequential(nn.Linear(DIM, DIM, bias=False), nn.Linear(DIM, DIM, bias=False))
        mesh = init_device_mesh(device, (1, world), mesh_dim_names=("data", "tensor"))
        for layer in model:
            whole = plain(layer.weight)
            layer.weight = nn.Parameter(distribute_tensor(whole, mesh["tensor"], [Shard(0)]))
        text = refused(model, NotImplementedError)
        assert "ColwiseParallel or RowwiseParallel of blocktensor" in text.replace("\n", " ")
        fully_shard(model, mesh=mesh["data"])
        text = refused(model, NotImplementedError)
        assert "ColwiseParallel or RowwiseParallel of blocktensor" in text.replace("\n", " ")


@pytest.mark.parametrize("given", [None, 5, [nn.Linear(2, 2)]])
def test_what_is_no_module(given: Any) -> None:
    kind = type(given).__name__
    alone = convert, to_blockwise_fp8_weights, freeze, unfreeze, unfuse, audit, memory_report
    for call in (*alone, share_inputs):
        with pytest.raises(TypeError, match=rf"^{call.__name__} takes a model.*: got a {kind}"):
            call(given)
    if kind != "list":  # of shapes
        with pytest.raises(TypeError, match=rf"^explain takes a model, .*: got a {kind}"):
            explain(given)
