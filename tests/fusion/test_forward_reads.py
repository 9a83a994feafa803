"""A fused module runs as written once anything that its forward reads has changed."""

from __future__ import annotations

import copy
import functools
import pickle
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from blocktensor import fuse, unfuse
from blocktensor.fusion.forward_reads import Reads
from tests.support.compiling import afresh
from tests.support.fused_kinds import count_runs
from tests.support.gated import assert_bits
from tests.support.mlps import MLP, Model, X, converted, fused_in, results
from tests.support.model_changes import TwiceMLP, twice

__all__ = ["afresh"]

HERE = sys.modules[__name__]
FACTOR = 1.0


def hidden(gate: Tensor, up: Tensor) -> Tensor:
    return F.silu(gate) * up


class Traced(MLP):
    """SwiGLU by way of all that a forward may read and Dynamo may guard."""

    of_class, of_tuple = 1.0, (1.0, "x")

    def __init__(self) -> None:
        super().__init__()
        self.of_instance, self.is_on = 1, False
        self.config = SimpleNamespace(scale=1.0, other=3)
        self.unread = 1

    def method(self, x: Tensor) -> Tensor:
        return hidden(self.gate_proj(x), self.up_proj(x))

    @staticmethod
    def alone(x: Tensor) -> Tensor:
        return x

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down_proj(self.method(self.alone(x)))
        if self.is_on:
            y = -y
        factors = self.of_instance, self.of_class, self.of_tuple[0], self.config.scale
        for factor in (x * FACTOR for x in factors):  # code inside of code
            y = y * factor if factor != 1 else y
        return y


class Varied(Traced):
    """And by way of a property."""

    @property
    def computed(self) -> float:
        return self.of_class

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.computed


def times(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda *args, **kwargs: function(*args, **kwargs) * 2


def method_twice(self: Any, x: Tensor) -> Tensor:
    return hidden(self.gate_proj(x), self.up_proj(x)) * 2


CHANGES: dict[str, Callable[[Any], tuple[Any, str, Any]]] = {
    "an attribute of the class": lambda m: (Traced, "of_class", 2.0),
    "a tuple": lambda m: (Traced, "of_tuple", (2.0, "x")),
    "an attribute": lambda m: (m, "of_instance", 2),
    "a flag": lambda m: (m, "is_on", True),
    "an attribute of the class, on the instance": lambda m: (m, "of_class", 2.0),
    "a setting": lambda m: (m.config, "scale", 2.0),
    "a global": lambda m: (HERE, "FACTOR", 2.0),
    "a function": lambda m: (HERE, "hidden", times(hidden)),
    "a method": lambda m: (Traced, "method", times(Traced.method)),
    "a method of the instance": lambda m: (m, "method", times(m.method)),
    "a static method": lambda m: (Traced, "alone", staticmethod(times(Traced.alone))),
    "a property": lambda m: (Varied, "computed", property(lambda m: 2.0)),
    "the code of a method": lambda m: (Traced.method, "__code__", method_twice.__code__),
    "F.silu": lambda m: (F, "silu", times(F.silu)),
    "F.linear": lambda m: (F, "linear", times(F.linear)),
}
"""A change of a model: an object, the name of an attribute, and its new value."""
OF_INSTANCES = {
    "an attribute",
    "a flag",
    "a setting",
    "a method of the instance",
    "an attribute of the class, on the instance",
}


def runs_fused(model: nn.Module) -> bool:
    return count_runs(model, X.bfloat16()) > 0


def fused() -> tuple[Any, Any]:
    model = converted(Varied())
    twin = copy.deepcopy(model)
    assert fuse(model).left_alone == ()
    return model, twin


@pytest.mark.parametrize("name", CHANGES)
def test_what_a_forward_reads_counts(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, twin = fused()
    before, copied, pickled = results(twin), copy.deepcopy(model), pickle.dumps(model)
    with monkeypatch.context() as patch:
        for each in (model, twin, copied) if name in OF_INSTANCES else (model,):
            patch.setattr(*CHANGES[name](each))
        wanted = results(twin)
        assert not torch.equal(wanted[0], before[0])
        late = model if name == "a method of the instance" else copy.deepcopy(model)
        in_pickles = name not in {*OF_INSTANCES, "a property", "the code of a method"}
        loaded = pickle.loads(pickled) if in_pickles else model  # pickles know names of code alone
        for each in (model, copied, late, loaded):
            assert_bits(results(each), wanted)
            assert not runs_fused(each)
    for each in (model, copied, pickle.loads(pickled)):
        assert_bits(results(each), before)
        assert runs_fused(each)


def test_what_it_does_not_read_does_not_count() -> None:
    model, twin = fused()
    for each in (model, twin):
        each.unread, each.config.other, each.new = 2, 4, 5
        each.of_instance = 1.0 if each.of_instance != 1 else int("1")
    model.eval()
    assert runs_fused(model)
    assert_bits(results(model.train()), results(twin))


@pytest.mark.parametrize("kind", ["of_instance", "scale"])
def test_copies_have_settings_of_their_own(kind: str) -> None:
    (model, twin), copied = fused(), None
    copied = copy.deepcopy(model)
    setattr(copied if kind == "of_instance" else copied.config, kind, 2)
    assert runs_fused(model) and not runs_fused(copied)
    assert_bits(results(model), results(twin))


def test_pickles_compare_names_in_no_order() -> None:
    """Those of code are sets, whose order another process does not share."""
    reads = fused()[0]._fused_reads.found
    assert len(reads) > 10
    assert Reads(reads).names == Reads(reads[::-1]).names


def test_a_second_fuse_reads_anew() -> None:
    model, _ = fused()
    model.of_instance = 1.0  # was an int
    assert not runs_fused(model)
    fuse(model)
    assert runs_fused(model)


def wrapped(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda *args: function(*args)


class Wrapped(MLP):
    """SwiGLU by way of a decorator."""

    factor = 1.0

    @wrapped
    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(hidden(self.gate_proj(x), self.up_proj(x))) * self.factor


@pytest.mark.parametrize(
    ("make", "owner", "name", "value"),
    [
        (Wrapped, "", "factor", 2.0),
        (lambda: MLP(act=nn.GELU("tanh")), "act_fn", "approximate", "none"),
    ],
    ids=["a decorated forward", "an activation"],
)
def test_settings_of_other_modules(make: Any, owner: str, name: str, value: Any) -> None:
    model, twin = converted(make()), converted(make())
    assert fuse(model).left_alone == ()
    assert runs_fused(model)
    for each in (model, twin):
        setattr(each.get_submodule(owner), name, value)
    assert_bits(results(model), results(twin))
    assert not runs_fused(model)


def test_they_are_few() -> None:
    model: Any = converted(MLP())
    fuse(model)
    names = sorted(read.name for read in model._fused_reads.found)
    of_forwards = [*["__code__", "__defaults__", "forward"] * 3, *["__call__"] * 2]
    of_objects = ["F", "F", "inplace", "linear", "silu", "act_fn", *["bias"] * 3]
    assert names == sorted([*of_forwards, *of_objects])


@pytest.mark.parametrize("make", [MLP, Varied])
def test_compilers_see_the_fused_function(make: type[MLP]) -> None:
    model, seen = converted(make()), []

    def backend(graph: Any, example: Any) -> Any:
        seen.append(str(graph.graph))
        return graph

    fuse(model)
    torch.compile(model, fullgraph=True, backend=backend)(X.bfloat16())
    assert ("_gated_mlp_whole" in seen[0]) == (make is MLP)


UNSEEN = {"a property", "the code of a method", "F.silu"}
"""Changes of which Dynamo is not shown, or does not see; it takes a replaced F.silu for torch's."""


def test_compiled_forwards_see_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    model, seen = converted(Traced()), []
    twin, x = copy.deepcopy(model), X.bfloat16()

    def backend(graph: Any, example: Any) -> Any:
        seen.append("_gated_mlp_whole" in str(graph.graph))
        return graph

    fuse(model)
    compiled = torch.compile(model, fullgraph=True, backend=backend)
    with torch.no_grad(), torch._dynamo.config.patch(recompile_limit=64):
        before = compiled(x)
        assert seen == [True]
        for name in (name for name in CHANGES if name not in UNSEEN):
            with monkeypatch.context() as patch:
                for each in (model, twin) if name in OF_INSTANCES else (model,):
                    patch.setattr(*CHANGES[name](each))
                assert torch.equal(compiled(x), twin(x)), name
                assert not seen[-1], name
            assert torch.equal(compiled(x), before), name


@pytest.mark.parametrize("later", ["unfuse", "another class"])
def test_a_forward_that_was_wrapped_while_it_was_fused(later: str) -> None:
    model, twin = (converted(Model()) for _ in range(2))
    fuse(model)
    for each in (model, twin):
        for layer in each.layers:
            layer["mlp"].forward = functools.partial(twice, layer["mlp"].forward)
    if later == "unfuse":
        unfuse(model)
    else:
        for layer in (*model.layers, *twin.layers):
            layer["mlp"].__class__ = TwiceMLP
    assert_bits(results(model), results(twin))
    assert fused_in(model) == []
