"""How tensors are stored that transformers would misread: what is tried, in which order."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
from torch import nn

pytest.importorskip("safetensors")
pytest.importorskip("transformers", minversion="5.17")

from blocktensor import convert
from blocktensor.checkpoint import described
from blocktensor.checkpoint.described import Described, readable
from blocktensor.checkpoint.export import Exported, exported
from blocktensor.checkpoint.fp8_readers import Checkpoint, Misread
from blocktensor.checkpoint.stored import Stored, whole
from tests.support.moe_models import transformers_moe

OTHERS = [[whole(name, (128, 128))] for name in ("a", "z")]
"""Groups of other tensors, of names before and behind those in question."""


def ways(*stored: Stored) -> list[described._Way]:
    """Return the ways of the tensor "m", which are tried until none is left."""
    found = Exported(nn.Module(), {}, (), [], [*OTHERS, list(stored)], False)
    tried = [described._Way.FP8]
    while tried[-1] is not described._Way.NONE:
        tried.append(described._next_way(found, "m", tried[-1]))
    return tried


@pytest.mark.parametrize(
    "stored",
    [
        [whole("n", (128, 128))._replace(of=("m",))],
        [whole("l", (128, 128))._replace(of=("m",))],
        [whole(f"m.{i}", (128, 128))._replace(of=("m",)) for i in range(2)],
        [whole("m", (128, 128)), whole("o", (128, 128))],
    ],
    ids=["renamed behind", "renamed before", "cut", "joined"],
)
def test_a_tensor_under_other_names_may_get_its_own(stored: list[Stored]) -> None:
    assert ways(*stored) == [*described._Way]


def test_a_tensor_under_its_own_name_has_no_other() -> None:
    assert [way.name for way in ways(whole("m", (128, 128)))] == ["FP8", "PLAIN", "NONE"]


# A reader in place of transformers', which says what it misreads

LAYER = "model.layers.0"
EXPERTS, GATE = f"{LAYER}.mlp.experts", f"{LAYER}.mlp.gate"
STORED = f"{LAYER}.block_sparse_moe"
"""The module of both in the checkpoint."""

STACK, ROUTER, Q, NORM = (
    f"{EXPERTS}.down_proj",
    f"{GATE}.weight",
    f"{LAYER}.self_attn.q_proj.weight",
    "model.norm.weight",
)
Wrong = dict[str, Misread]
Reader = Callable[[Checkpoint], Wrong]


def reader(name: str, reads: Callable[[Checkpoint], bool], module: str = "") -> Reader:
    """Return a reader that reads all but one tensor, and that one where ``reads`` says so.

    If it would replace ``module``, the config must also tell it not to.
    """

    def read(x: Checkpoint) -> Wrong:
        is_left = not module or module in x.config["modules_to_not_convert"]
        return {} if reads(x) and is_left else {name: Misread("why", module)}

    return read


def plain(name: str) -> Callable[[Checkpoint], bool]:
    return lambda x: name not in x.fp8


def own_name(name: str) -> Callable[[Checkpoint], bool]:
    return lambda x: {stored.name for stored in x.stored if name in stored.of} == {name}


def both(*reads: Callable[[Checkpoint], bool]) -> Callable[[Checkpoint], bool]:
    return lambda x: all(each(x) for each in reads)


def described_for(read: Reader, monkeypatch: pytest.MonkeyPatch) -> tuple[Described, list[str]]:
    """Return how a model is stored for a reader, and the warnings."""
    model = transformers_moe("mixtral")
    convert(model, skip_small=False)
    monkeypatch.setattr(described, "misread", lambda _, checkpoint: read(checkpoint))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        made = readable(Described(exported(model, "save_fp8", False), ()))
    assert read(made.checkpoint) == {}
    return made, [str(x.message) for x in caught]


CASES: dict[str, tuple[Reader, set[str], set[str]]] = {
    "nothing": (lambda _: {}, set(), set()),
    "a module that it would replace": (
        reader(NORM, lambda _: True, "model.norm"),
        set(),
        {"model.norm"},
    ),
    "a module of another name": (
        reader(ROUTER, lambda _: True, GATE),
        set(),
        {GATE, f"{STORED}.gate"},
    ),
    "a weight": (reader(Q, plain(Q)), {Q}, {f"{LAYER}.self_attn.q_proj"}),
    "a weight of a module": (
        reader(Q, plain(Q), f"{LAYER}.self_attn.q_proj"),
        {Q},
        {f"{LAYER}.self_attn.q_proj"},
    ),
    "a weight of a module around it": (
        reader(Q, plain(Q), f"{LAYER}.self_attn"),
        {Q},
        {f"{LAYER}.self_attn", f"{LAYER}.self_attn.q_proj"},
    ),
    "a stack of a module": (
        reader(STACK, plain(STACK), EXPERTS),
        {STACK},
        {EXPERTS, f"{STORED}.experts"},
    ),
    "a stack under other names": (reader(STACK, own_name(STACK)), set(), set()),
    "a plain stack under other names": (
        reader(STACK, both(own_name(STACK), plain(STACK))),
        {STACK},
        {EXPERTS},
    ),
    "a plain tensor under other names": (reader(ROUTER, own_name(ROUTER)), set(), set()),
}
"""Readers; the weights that are then not in FP8, and the modules that are listed."""


@pytest.mark.parametrize("case", CASES)
def test_what_a_reader_misreads(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    read, left, listed = CASES[case]
    before, _ = described_for(lambda _: {}, monkeypatch)
    made, warned = described_for(read, monkeypatch)
    assert set(before.found.fp8) - set(made.found.fp8) == left
    known, modules = (set(x.config["modules_to_not_convert"]) for x in (before, made))
    assert modules == known | listed and listed.isdisjoint(known)
    assert len(warned) == bool(left) and all(name in warned[0] for name in left)


@pytest.mark.parametrize(
    ("name", "module"), [(NORM, ""), (NORM, "model.norm"), (ROUTER, ""), (Q, ""), (STACK, EXPERTS)]
)
def test_a_tensor_that_it_misreads_in_every_way(
    name: str, module: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    message = rf"^{name} of this .* cannot be stored for transformers: why; all_in_fp8=True"
    with pytest.raises(ValueError, match=message):
        described_for(reader(name, lambda _: False, module), monkeypatch)


def test_a_reader_that_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: Checkpoint) -> Any:
        raise KeyError("other")

    with pytest.raises(RuntimeError, match=r"transformers could not be asked .*KeyError: 'other'"):
        described_for(fail, monkeypatch)


def test_no_weight_is_left_in_fp8(monkeypatch: pytest.MonkeyPatch) -> None:
    def read(x: Checkpoint) -> Wrong:
        return dict.fromkeys(x.fp8, Misread("why"))

    with pytest.raises(
        ValueError, match=r"no FP8 weight of this .* can be stored .*\(why: .*, …\)"
    ):
        described_for(read, monkeypatch)
