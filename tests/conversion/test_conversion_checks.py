"""A conversion that cannot be done raises before anything changes; who else holds a weight."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from blocktensor import BlockwiseFP8Tensor, BlockwiseFP8Weight, Recipe, convert, freeze, unfreeze
from blocktensor import to_blockwise_fp8_weights as apply
from blocktensor.recipe import MIGRATING
from tests.support.models import (
    DIM,
    LINEARS,
    POWER_OF_TWO,
    TOKENS,
    Model,
    complaint,
    converted_names,
    plain,
    randn,
    reasons,
)

if dist.is_available():
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Shard, distribute_tensor

    from tests.support.ranks import on_ranks
    from tests.support.sharded import batch, build, mesh_of, shard

LAST = LINEARS[-1]
everything = partial(convert, skip_small=False)


def refused(
    model: nn.Module,
    kind: type[Exception],
    run: Callable[[nn.Module], Any] | None = None,
    **options: Any,
) -> str:
    """The complaint of ``run``, which leaves the model as it was; without it, of ``convert``.

    A dry run of ``convert`` has the same complaint.
    """

    def state() -> list[Any]:
        hooks = [len(m._state_dict_hooks) for m in model.modules()]
        parameters = [(n, id(p), type(p), p.requires_grad) for n, p in model.named_parameters()]
        return [hooks, parameters, [getattr(p, "recipe", None) for p in model.parameters()]]

    before = state()
    runs = [run or partial(everything, dry_run=dry, **options) for dry in (False, True)]
    text, again = (complaint(kind, lambda run=run: run(model)) for run in runs)
    assert text == again
    assert state() == before
    return " ".join(text.split())


def fails_on_the_last(module: nn.Module, name: str) -> bool:
    if name == LAST:
        raise KeyError(name)
    return True


A_RECIPE = "expected a blocktensor.Recipe, e.g. Recipe"
A_STR = f"recipe='power_of_two' is a str: {A_RECIPE}(scale='power_of_two')"


class Float8LinearConfig:
    """As torchao's."""

    __module__ = "torchao.float8.config"

    def __repr__(self) -> str:
        return "Float8LinearConfig()"


FLOAT8_CONFIG = Float8LinearConfig()


def test_the_page_that_messages_name_exists() -> None:
    assert (Path(__file__).parents[2] / MIGRATING).is_file()


@pytest.mark.parametrize(
    ("kind", "options", "text"),
    [
        (TypeError, {"recipe": "power_of_two"}, A_STR),
        (TypeError, {"recipe": 3}, f"recipe=3 is a int: {A_RECIPE}() or Recipe.deepseek()"),
        (KeyError, {"filter": fails_on_the_last}, f"'{LAST}'"),
        (
            TypeError,
            {"filter": lambda m, n: None if n == LAST else True},
            f"filter returned None for '{LAST}': expected True to convert it, False to skip it",
        ),
        (
            TypeError,
            {"filter": "*.up"},
            "filter='*.up' is not callable: expected filter(module, name) -> bool",
        ),
        (
            TypeError,
            {"module_filter_fn": lambda m, n: True},
            "convert() has no argument 'module_filter_fn', which is torchao's: pass filter=, a "
            "function of the same arguments (module, name); docs/guides/migrating.md compares the "
            "two libraries",
        ),
        (
            TypeError,
            {"config": FLOAT8_CONFIG},
            "convert() has no argument 'config', which is torchao's: pass recipe=, a "
            "blocktensor.Recipe; docs/guides/migrating.md compares the two libraries",
        ),
        (
            TypeError,
            {"recipe": FLOAT8_CONFIG},
            f"recipe=Float8LinearConfig() is a Float8LinearConfig: {A_RECIPE}() or "
            f"Recipe.deepseek(); docs/guides/migrating.md says which recipe does the same",
        ),
        (TypeError, {"skipsmall": 1}, "convert() got an unexpected keyword argument 'skipsmall'"),
        (TypeError, {"skip_small": "yes"}, "skip_small='yes': expected True, False or a MinSizes"),
        (TypeError, {"convert_head": "fp8"}, "convert_head='fp8': expected True or False"),
        (
            ValueError,
            {"skip": ["*.nothing"]},
            "skip pattern '*.nothing' matches no weight of this Model that could be converted: "
            "expected a pattern of the names of linear layers or modules above them; names of such "
            "weights end in up, down, lm_head",
        ),
    ],
)
def test_bad_choices(kind: type[Exception], options: dict[str, Any], text: str) -> None:
    assert refused(Model(), kind, **options) == text


def test_other_bad_choices() -> None:
    assert refused(Model().lm_head, TypeError, lambda m: apply(m, "power_of_two")) == A_STR  # type: ignore
    with pytest.raises(TypeError, match=r"^dry_run=1: expected True or False$"):
        convert(Model(), dry_run=1)  # type: ignore[arg-type]


def test_a_lazy_linear_has_no_shape_yet() -> None:
    model = Model()
    model.blocks[1].down = nn.LazyLinear(DIM)
    assert refused(model, ValueError) == (
        "the weight of 'blocks.1.down' has no shape yet (nn.LazyLinear): run a batch through the "
        "model first, then convert it"
    )
    refused(model, ValueError, skip_small=True)
    refused(model.blocks[1].down, ValueError, apply)
    report = convert(model, skip=[LAST], skip_small=False)
    row = next(line for line in str(report).splitlines() if line.startswith(LAST))
    assert row.split()[:5] == [LAST, "?", "float32", "-", "-"]
    assert report.parameters == sum(
        p.numel() for name, p in model.named_parameters() if not name.startswith(LAST)
    )
    model(TOKENS)
    assert converted_names(model) == LINEARS[:-1]
    everything(model)
    assert converted_names(model) == LINEARS


@pytest.mark.parametrize("fake", ["weights", "mode"])
def test_fake_tensors(fake: str) -> None:
    model = Model()
    with FakeTensorMode(allow_non_fake_inputs=True):
        if fake == "weights":
            model = Model()
        assert refused(model, NotImplementedError) == (
            "cannot convert under FakeTensorMode, which keeps weak references to parameters, so "
            "that none can change in place: convert the model before entering the mode, or build "
            "it with torch.device('meta')"
        )
        refused(model.blocks[0].up, NotImplementedError, apply)


def test_a_weight_that_is_in_use() -> None:
    model = Model()
    last, start = (
        model.get_submodule(LAST),
        "cannot convert the weight of 'blocks.1.down' [64, 192]",
    )
    y = last(randn(3, 3 * DIM, dtype=torch.float32, grad=True))
    assert refused(model, RuntimeError) == (
        f"{start} in place: an autograd graph or a wrapper such as DDP uses it; convert the model "
        "before wrapping it in DDP or FSDP, and not between a forward and its backward: run the "
        "backward, or drop what the forward returned (del loss)"
    )
    y.sum().backward()
    del y
    assert last.weight.grad is not None
    reference = weakref.ref(last.weight)
    assert refused(model, RuntimeError) == (
        f"{start} in place: there are weak references to it (weakref.ref), which would point to "
        "other content; drop them first"
    )
    del reference
    everything(model)
    assert converted_names(model) == LINEARS


@pytest.mark.parametrize("change", [freeze, unfreeze])
def test_freezing_a_weight_that_is_in_use(change: Callable[[nn.Module], Any]) -> None:
    model = Model()
    everything(model)
    if change is unfreeze:
        freeze(model)
    last = model.get_submodule(LAST)
    y = last(randn(3, 3 * DIM, dtype=torch.float32, grad=True))
    view = last.weight.view_as(last.weight)
    y.register_hook(lambda grad, held=view: None)
    del view
    text = refused(model, RuntimeError, change)
    assert text.startswith(f"cannot {change.__name__} the weight of 'blocks.1.down' [64, 192] in")
    assert f"{change.__name__} the model before wrapping it" in text
    del y  # the remedy
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
    everything(model)
    up = model.blocks[0].up
    up.weight.grad = torch.ones(3 * DIM, DIM)
    up.weight.tag = "mine"
    seen: list[str] = []
    up.weight.register_hook(lambda grad: seen.append("grad"))
    weights = [model.get_submodule(name).weight for name in LINEARS]
    masters = [p.master for p in weights]
    identities = [id(p) for p in model.parameters()]

    report = convert(model, POWER_OF_TWO)  # its size no longer matters
    assert {e.reason for e in report.converted} == {"trainable"}
    assert [id(p) for p in model.parameters()] == identities
    assert {p.recipe for p in weights} == {POWER_OF_TWO}
    assert all(p.master is m for p, m in zip(weights, masters, strict=True))
    assert up.weight.tag == "mine"
    assert torch.equal(up.weight.grad, torch.ones(3 * DIM, DIM))
    assert len(up._state_dict_hooks) == 1

    fresh = Model()
    everything(fresh, recipe=POWER_OF_TWO)
    assert torch.equal(model(TOKENS), fresh(TOKENS))
    model(TOKENS).sum().backward()
    assert seen == ["grad"]
    assert not torch.equal(up.weight.grad, torch.ones(3 * DIM, DIM))


def test_without_a_recipe_nothing_changes() -> None:
    model = Model()
    model.blocks[0].up.weight.requires_grad_(False)
    everything(model, recipe=POWER_OF_TWO)
    everything(model)
    model.apply(apply)
    everything(model, recipe=Recipe(), skip=["blocks"])
    weights = [model.get_submodule(name).weight for name in converted_names(model)]
    assert [w.recipe for w in weights] == [POWER_OF_TWO] * 4 + [Recipe()]


def test_a_frozen_weight_keeps_its_recipe() -> None:
    model = Model()
    model.get_submodule(LAST).requires_grad_(False)
    everything(model)
    assert refused(model, ValueError, recipe=POWER_OF_TWO) == (
        "the weight of 'blocks.1.down' is frozen in FP8, without its high-precision values: it "
        "was cast with scale='fp32' and cannot be cast with scale='power_of_two'; convert the "
        "original weights, or unfreeze(model) first, to cast the FP8 values, or call without a "
        "recipe, which leaves alone what is FP8 already"
    )
    other = copy.deepcopy(model)
    unfreeze(other)
    everything(other, recipe=POWER_OF_TWO)
    assert other.get_submodule(LAST).weight.recipe == POWER_OF_TWO
    layer = model.get_submodule(LAST)
    refused(layer, ValueError, lambda m: apply(m, POWER_OF_TWO))
    report = everything(model, recipe=POWER_OF_TWO, skip=[LAST])
    assert report.entries[-2].reason == "already converted"
    assert layer.weight.recipe == Recipe()
    assert model.blocks[0].up.weight.recipe == POWER_OF_TWO


# Sharded models

if dist.is_available():

    @on_ranks(2, gpus=())
    def test_sharded_and_wrapped_models(world: int, device: str) -> None:
        for reshard, by_layer in ((True, True), (False, True), (False, False)):
            model = build()
            shard(model, mesh_of(world, device), by_layer, reshard_after_forward=reshard)
            model(batch(0, device))
            text = refused(model, NotImplementedError)
            if reshard:
                assert "'up' is a DTensor [300, 192] that FSDP2 has gathered" in text
            assert "convert the model before" in text
            model(batch(0, device)).sum().backward()

        text = refused(nn.parallel.DistributedDataParallel(build()), RuntimeError)
        assert "a wrapper such as DDP uses it" in text

        model = build()
        model.down.requires_grad_(False)
        shard(model, mesh_of(world, device))
        text = refused(model, NotImplementedError)
        assert text.startswith("the weight of 'down' is a frozen DTensor [130, 300]")
        report = convert(model, skip=["down"], skip_small=False)
        assert [e.name for e in report.converted] == ["up", "mid"]

    @pytest.mark.usefixtures("group")
    @pytest.mark.parametrize("requires_grad", [True, False])
    def test_sharded_on_the_meta_device(requires_grad: bool) -> None:
        """It has no values that could be lost: what it holds is loaded later."""
        with torch.device("meta"):
            model = build().requires_grad_(requires_grad)
        shard(model, mesh_of(1, "cpu"))
        assert len(everything(model).converted) == 3
        assert {p.requires_grad for p in model.parameters()} == {requires_grad}

    @on_ranks(2, gpus=())
    def test_a_sharded_weight_stays_as_it_is(world: int, device: str) -> None:
        for requires_grad in (True, False):
            model = build()
            model.requires_grad_(requires_grad)
            everything(model)
            shard(model, mesh_of(world, device), reshard_after_forward=False)
            kinds = [type(p) for p in model.parameters()]
            for run in (freeze, unfreeze):
                text = refused(model, NotImplementedError, run)
                assert "the weight of 'up' is sharded by FSDP2" in text
                assert "before fully_shard" in text
            refused(model, ValueError, recipe=POWER_OF_TWO)
            assert {e.reason for e in everything(model).converted} == {"already converted"}
            assert [type(p) for p in model.parameters()] == kinds
            model(batch(0, device))
            for run in (freeze, unfreeze) if requires_grad else ():
                refused(model, NotImplementedError, run)

    @on_ranks(2, gpus=())
    def test_tensor_parallel_weights(world: int, device: str) -> None:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor.parallel import parallelize_module

        from blocktensor.distributed import RowwiseParallel

        model = nn.Sequential(nn.Linear(DIM, DIM, bias=False), nn.Linear(DIM, DIM, bias=False))
        mesh = init_device_mesh(device, (1, world), mesh_dim_names=("data", "tensor"))
        for layer in model:
            whole = plain(layer.weight)
            layer.weight = nn.Parameter(distribute_tensor(whole, mesh["tensor"], [Shard(0)]))
        remedy = "ColwiseParallel or RowwiseParallel of blocktensor"
        assert remedy in refused(model, NotImplementedError)
        fully_shard(model, mesh=mesh["data"])
        assert remedy in refused(model, NotImplementedError)

        model = nn.Sequential(nn.Linear(256, 256))
        parallelize_module(model, mesh["tensor"], {"0": RowwiseParallel()})
        convert(model, skip_small=False, dry_run=True)
        fully_shard(model, mesh=mesh["data"])
        text = refused(model, NotImplementedError)
        assert "a tensor parallel DTensor [256, 256] that FSDP2 shards besides" in text


# Other modules that hold a weight


def test_apply_does_not_see_the_embedding_of_a_frozen_weight() -> None:
    model = Model(tied=True).requires_grad_(False).apply(apply)
    assert model.lm_head.weight is model.embed.weight
    assert isinstance(model.embed.weight, BlockwiseFP8Tensor)
    with pytest.raises(NotImplementedError, match=r"embedding.*dequantize"):
        model(TOKENS)


HOLDERS: dict[str, Callable[[], tuple[nn.Module, nn.Module]]] = {
    "Module": lambda: (holder := nn.Module(), holder),
    "Embedding": lambda: (holder := nn.Embedding(DIM, DIM), holder),
    "NonDynamicallyQuantizableLinear": lambda: (
        attention := nn.MultiheadAttention(DIM, 2),
        attention.out_proj,
    ),
}
"""Modules, and the part of each that may hold the weight of a linear."""


@pytest.mark.parametrize("frozen", [True, False])
@pytest.mark.parametrize("kind", HOLDERS)
def test_convert_and_freeze_know_other_holders(kind: str, frozen: bool) -> None:
    model = nn.Sequential(nn.Linear(DIM, DIM), nn.Linear(DIM, DIM))
    whole, holder = HOLDERS[kind]()
    holder.weight = model[0].weight
    model.append(whole).requires_grad_(not frozen)
    report = convert(model, skip_small=False, convert_head=True)
    if frozen:
        assert isinstance(model[1].weight, BlockwiseFP8Tensor)
        assert type(model[0].weight) is nn.Parameter
        why = f"frozen, and another module holds it too: {kind}"
        assert reasons(report)["0"] == ("tied to embedding '2'" if kind == "Embedding" else why)
    elif kind == "Module":  # which may be anything
        assert isinstance(holder.weight, BlockwiseFP8Weight)
        assert reasons(report) == {"2": "not the weight of a linear layer: in Module; tied to '0'"}
    else:
        model[0].apply(apply)
    if not frozen:
        text = refused(model, ValueError, freeze)
        assert f"'0' cannot be frozen, because another module reads its values too ({kind})" in text
        assert unfreeze(model) == []  # it is trainable already
