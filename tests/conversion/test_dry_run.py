"""A conversion that only reports: what it says, and that it changes nothing."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from blocktensor import BlockwiseFP8Weight, Recipe, convert, explain
from blocktensor import to_blockwise_fp8_weights as apply
from blocktensor.model.weights import fp8_weights
from tests.support.matrices import every_matrix
from tests.support.models import DIM, Model, reasons
from tests.support.moe_models import TitanMoE
from tests.support.ranks import on_ranks
from tests.support.sharded import build, shard

OPTIONS: dict[str, Any] = {"skip_small": False}
NAMED = OPTIONS | {"stacks": {"*.experts": ["gate_up_proj", "down_proj"]}}


def all_frozen() -> nn.Module:
    model = every_matrix()
    for parameter in model.parameters():
        parameter.requires_grad = False  # requires_grad_ refuses lazy ones
    return model


def partly_frozen() -> nn.Module:
    model = Model()
    model.blocks[0].requires_grad_(False)
    return model


def on_meta() -> nn.Module:
    with torch.device("meta"):
        return partly_frozen()


def with_hooks() -> nn.Module:
    model = Model()
    model.blocks[0].up.register_forward_hook(lambda *args: None)
    model.blocks[0].up.weight.register_hook(lambda g: g)
    model.blocks[0].up.weight.attribute = 3
    return model


def twice_converted() -> nn.Module:
    """Some weights of another recipe, one of them tied to what is no linear and comes first."""
    model = nn.Sequential(nn.Module(), *partly_frozen().blocks, nn.Embedding(DIM, 3 * DIM))
    model[0].alias = model[2].up.weight
    model[3].weight = model[2].up.weight
    model[2].apply(lambda module: apply(module, Recipe(scale="power_of_two")))
    return model


Case = tuple[Callable[[], nn.Module], dict[str, Any]]
CASES: dict[str, Case] = {
    "kinds": (every_matrix, OPTIONS),
    "kinds, frozen": (all_frozen, NAMED),
    "stacks": (every_matrix, NAMED),
    "experts": (lambda: TitanMoE(2, 128, 256), OPTIONS),
    "partly frozen": (partly_frozen, OPTIONS | {"convert_head": True, "skip": ["*.1.up"]}),
    "meta": (on_meta, OPTIONS),
    "hooks": (with_hooks, OPTIONS | {"recipe": Recipe(cache_weight=False)}),
    "again": (twice_converted, OPTIONS),
    "recast": (twice_converted, OPTIONS | {"recipe": Recipe(wgrad_input="128x128")}),
    "one linear": (lambda: nn.Linear(DIM, DIM), OPTIONS),
}


def marks(model: nn.Module) -> list[Any]:
    """All that a conversion could change: objects, classes, hooks, attributes, storage."""

    def held(x: Any) -> Any:
        return [(key, id(value)) for key, value in x.items()] if isinstance(x, dict) else id(x)

    objects = [*model.modules(), *model.parameters(), *model.buffers()]
    return [
        (id(x), type(x), {key: held(value) for key, value in vars(x).items()}) for x in objects
    ] + [
        (p.requires_grad, p._version, p._backward_hooks and list(p._backward_hooks))
        for p in model.parameters()
    ]


@pytest.mark.parametrize("case", CASES)
def test_it_changes_nothing_and_is_the_report_of_the_conversion(case: str) -> None:
    """A report that also counts the layers that ``explain`` lists, as does a later one."""
    make, options = CASES[case]
    model = make()
    before, values = marks(model), copy.deepcopy(model).state_dict()
    report = convert(model, dry_run=True, **options)
    assert report.converted
    assert marks(model) == before
    for name, value in model.state_dict().items():
        is_known = not isinstance(value, nn.UninitializedParameter) and not value.is_meta
        assert not is_known or torch.equal(value, values[name])
    assert convert(model, **options) == report
    assert marks(model) != before or case == "again"
    listed = dict.fromkeys(product.layer for product in explain(model).products)
    again = convert(model, **(options | {"stacks": None}))
    for each in (report, again):
        assert [entry.name for entry in each.converted] == list(listed)
    assert again.bytes_after == report.bytes_after
    assert again.fp8_share == report.fp8_share > 0


@pytest.mark.parametrize("case", sorted(CASES.keys() - {"meta", "again", "recast"}))
def test_the_bytes_are_those_that_the_model_holds(case: str) -> None:
    make, options = CASES[case]
    options = options | {"recipe": Recipe(cache_weight=False)}
    model = make()
    converted = convert(model, dry_run=True, **options).converted
    convert(model, **options)
    told = {"frozen": 0, "trainable": 0}
    for entry in converted:
        told["frozen" if entry.reason.startswith("frozen") else "trainable"] += entry.bytes_after
    held = {"frozen": 0, "trainable": 0}
    for weight in {m.get_parameter(key) for m in model.modules() for key in fp8_weights(m)}:
        if isinstance(weight, BlockwiseFP8Weight):
            held["trainable"] += weight.master.nbytes
        else:
            held["frozen"] += weight.operand.nbytes()  # type: ignore[operator]
    assert told == held


def test_what_is_fp8_already_keeps_its_recipe() -> None:
    model = Model()
    held = convert(model, Recipe(cache_weight=False), **OPTIONS).bytes_after
    again = convert(model, dry_run=True, **OPTIONS)
    assert (again.bytes_before, again.bytes_after) == (held, held)


def test_the_row_of_the_linear_counts_a_weight_that_another_module_holds_first() -> None:
    model = nn.Sequential(nn.Module(), nn.Linear(DIM, DIM, bias=False))
    model[0].alias = model[1].weight
    size = DIM * DIM
    for options in (OPTIONS | {"dry_run": True}, OPTIONS, OPTIONS):
        report = convert(model, **options)
        assert [(e.converted, e.elements) for e in report.entries] == [(False, 0), (True, size)]
        assert (report.fp8_share, report.bytes_after) == (1.0, 4 * size + size + 4)


def test_an_embedding_in_fp8_is_no_layer() -> None:
    model = nn.Sequential(nn.Embedding(50, DIM), nn.Linear(DIM, DIM))
    model[0].weight = nn.Parameter(BlockwiseFP8Weight(model[0].weight.detach()))
    report = convert(model, **OPTIONS)
    assert reasons(report) == {"0": "embedding"}


@on_ranks(2)
def test_a_sharded_model(mesh: DeviceMesh, device: str) -> None:
    model = build().to(device)
    shard(model, mesh)
    before = marks(model)
    report = convert(model, skip_small=False, dry_run=True)
    assert marks(model) == before
    assert {e.reason for e in report.converted} == {"trainable, gathered in FP8"}
    assert report.bytes_after == report.bytes_before
    assert convert(model, skip_small=False) == report


def test_it_warns_as_the_conversion_does() -> None:
    with pytest.warns(UserWarning, match="^no weight of this Model is in FP8: skip_small=False"):
        convert(Model(), dry_run=True)
