"""A conversion that cannot be done raises before anything changes."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from blocktensor import convert, freeze, unfreeze
from blocktensor import to_blockwise_fp8_weights as apply
from blocktensor.recipe import MIGRATING
from tests.support.conversions import LAST, everything, refused
from tests.support.models import DIM, LINEARS, TOKENS, Model, converted_names, randn


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
        "other content; drop them first, or convert copy.deepcopy(model): torch.export and "
        "compiled optimizers keep theirs"
    )
    copied = copy.deepcopy(model)
    everything(copied)
    assert converted_names(copied) == LINEARS
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


def test_freezing_a_weight_without_values() -> None:
    model = Model()
    model.get_submodule(LAST).to("meta")  # as accelerate offloads one
    everything(model)
    text = refused(model, ValueError, freeze)
    assert text.startswith(f"the weight of '{LAST}' is on the meta device and has no values")
    values = randn(DIM, 3 * DIM, dtype=torch.float32)
    model.get_submodule(LAST).load_state_dict({"weight": values}, assign=True)  # the remedy
    assert LAST in freeze(model)


def test_a_backward_that_is_under_way_goes_on() -> None:
    layer = nn.Linear(DIM, DIM)
    model = nn.Sequential(layer, nn.LazyLinear(DIM))
    loss = layer(randn(3, DIM, dtype=torch.float32)).sum()
    refused(model, ValueError)
    loss.backward()
    assert layer.weight.grad is not None
