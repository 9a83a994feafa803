"""The choice of the first backend that takes a problem, and the reasons that are given."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from blocktensor.ops import reference, registry
from blocktensor.ops.registry import (
    Backend,
    Choice,
    NotCompiled,
    first_choice,
    give_up,
    last_line,
)

CPU = torch.device("cpu")


def says(reason: str | None) -> Callable[[Any], str | None]:
    return lambda _: reason


def backend(name: str, **reasons: str) -> Backend[int]:
    """A backend that gives these reasons, if any, whatever it is asked about."""
    return Backend(name, (), **{what: says(why) for what, why in reasons.items()})


LAST = Backend("last", (), why=lambda problem: f"takes {problem} too")


def test_the_first_that_takes_a_problem_is_chosen() -> None:
    first, second = backend("first"), backend("second")
    choice = first_choice((first, second, LAST), 3, CPU)
    assert choice == Choice(first, "takes this problem")
    assert (choice.name, choice.reason, choice.others) == ("first", "takes this problem", "")


@pytest.mark.parametrize("what", ["unusable", "declines", "yields"])
def test_one_that_objects_is_passed_over(what: str) -> None:
    choice = first_choice((backend("first", **{what: "is busy"}), LAST), 3, CPU)
    assert choice.name == "last"
    assert (choice.why, choice.others) == ("takes 3 too", "first: is busy")
    assert choice.reason == "takes 3 too; first: is busy"


def test_the_first_objection_counts() -> None:
    """A backend may assume a device that it can use, and, to yield, a problem that it can run."""

    def unasked(_: object) -> str | None:
        raise AssertionError("asked for nothing")

    absent = Backend("absent", (), says("not here"), unasked, unasked, unasked)
    unable = Backend("unable", (), says(None), says("too large"), unasked, unasked)
    choice = first_choice((absent, unable, LAST), 3, CPU)
    assert choice.others == "absent: not here; unable: too large"


def test_backends_with_one_reason_share_it() -> None:
    reasons = {"a": "no GPU", "b": "too large", "c": "no GPU", "d": "no GPU"}
    backends = [backend(name, unusable=reason) for name, reason in reasons.items()]
    choice = first_choice((*backends, LAST), 3, CPU)
    assert choice.others == "a, c, d: no GPU; b: too large"


def test_what_follows_the_choice_is_not_asked() -> None:
    def unasked(_: object) -> str | None:
        raise AssertionError("asked for nothing")

    later = Backend("later", (), unasked, unasked, unasked, unasked)
    assert first_choice((backend("first"), later), 3, CPU).name == "first"


def test_backends_are_told_the_device_and_the_problem() -> None:
    def on_the_cpu(device: torch.device) -> str | None:
        return None if device == CPU else f"not on {device}"

    def small(problem: int) -> str | None:
        return None if problem < 10 else f"{problem} is too large"

    picky = Backend("picky", (), on_the_cpu, small, why=lambda problem: f"likes {problem}")
    assert first_choice((picky, LAST), 3, CPU).reason == "likes 3"
    assert first_choice((picky, LAST), 30, CPU).others == "picky: 30 is too large"
    assert first_choice((picky, LAST), 3, torch.device("meta")).others == "picky: not on meta"


# Kernels that do not compile


def refuses(_: int) -> int:
    try:
        raise ValueError("no such instruction")
    except ValueError as root:
        failure = f"Triton does not compile double_kernel: {last_line(wrapped(root))}"
        raise NotCompiled(failure) from root


def wrapped(root: Exception) -> Exception:
    """As Triton wraps an error, once for every function that it was compiling."""
    error = RuntimeError("at 3:8:\n    x = double(x)\n        ^")
    error.__cause__ = root
    return error


@pytest.fixture
def broken() -> Iterator[Backend[int]]:
    """A backend whose kernel does not compile; whoever gives it up is forgotten."""
    made: Backend[int] = Backend("broken", (SimpleNamespace(double=refuses),))
    yield made
    registry._given_up.pop(made, None)


def test_a_kernel_that_does_not_compile_names_its_backend(broken: Backend[int]) -> None:
    double = broken.function("double")
    assert double is not None
    with pytest.raises(NotCompiled, match="double_kernel: no such instruction") as failure:
        double(3)
    assert failure.value.backend is broken


def test_functions_without_launches_are_called_as_they_are() -> None:
    made: Backend[int] = Backend("plain", (SimpleNamespace(double=abs),), launches=False)
    assert made.function("double") is abs


def test_a_function_is_that_of_the_first_module_that_has_one() -> None:
    made: Backend[int] = Backend("plain", (SimpleNamespace(largest=max), "reference"))
    assert made.function("largest") is not None
    assert made.function("largest")(3, 4) == 4  # type: ignore[misc]
    assert made.function("transpose").__wrapped__ is reference.transpose  # type: ignore[union-attr]
    assert made.function("triple") is None
    with pytest.raises(ModuleNotFoundError):
        Backend[int]("absent", ("no_such_module",)).function("double")


def test_a_backend_that_was_given_up_is_passed_over(broken: Backend[int]) -> None:
    with pytest.raises(NotCompiled) as failure:
        broken.function("double")(3)  # type: ignore[misc]
    last: Backend[int] = Backend("last", (SimpleNamespace(double=abs),))
    assert first_choice((broken, last), 3, CPU).name == "broken"
    with pytest.warns(UserWarning, match="The next backend runs from now on"):
        give_up(failure.value)
    give_up(failure.value)  # and warns no more
    choice = first_choice((broken, last), 3, CPU)
    assert choice.name == "last"
    assert choice.others == "broken: Triton does not compile double_kernel: no such instruction"
    assert broken.why_not(CPU) == "Triton does not compile double_kernel: no such instruction"


def test_a_kernel_of_no_backend_cannot_be_given_up() -> None:
    failure = NotCompiled("Triton does not compile lonely_kernel")
    with pytest.raises(NotCompiled, match="does not compile lonely_kernel"):
        give_up(failure)


def test_the_last_line_of_the_first_error() -> None:
    assert last_line(wrapped(ValueError("no such\ninstruction"))) == "instruction"
    assert last_line(wrapped(ValueError())) == "ValueError"
    assert pickle.loads(pickle.dumps(NotCompiled("why"))).args == ("why",)
