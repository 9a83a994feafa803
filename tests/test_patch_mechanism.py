"""How a patch is applied, put back and left out, on a library of its own."""

from __future__ import annotations

import sys
import time
import types
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from expecttest import assert_expected_inline

from blocktensor import patches
from blocktensor.patches import PATCHES, Patch
from tests.support.models import complaint


class Library(types.ModuleType):
    """A stand-in for another library."""

    def __init__(self) -> None:
        super().__init__("their_library")
        self.function = lambda: "theirs"

        class Base:
            @classmethod
            def inherited(cls) -> str:
                return cls.__name__

        class Model(Base):
            @staticmethod
            def static() -> str:
                return "static"

        self.Model = Model


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Library:
    made = Library()
    monkeypatch.setitem(sys.modules, "their_library", made)
    monkeypatch.delenv(patches.VARIABLE, raising=False)
    return made


def patch(target: str, **others: Any) -> Patch:
    told: dict[str, Any] = {"kind": "attribute", "reason": "", "versions": "", "when": ""}
    told |= {"test": "", "without": "nothing works", **others}
    return Patch(name="tried", target=f"their_library:{target}", **told)


TARGETS: dict[str, Callable[[Any], Any]] = {
    "function": lambda call: lambda: f"ours, {call()}",
    "Model.static": lambda call: staticmethod(lambda: f"ours, {call()}"),
    "Model.inherited": lambda call: classmethod(lambda cls: f"ours, {call()}"),
}


@pytest.mark.parametrize("target", TARGETS)
def test_a_function_is_replaced_once(library: Library, target: str) -> None:
    made, calls = patch(target), []
    owner = library.Model if "." in target else library
    name = target.rpartition(".")[2]
    held = getattr(owner, name)

    @made.made_by
    def make(original: Any) -> Any:
        calls.append(original)
        return TARGETS[target](original)

    assert not made.is_applied
    theirs = held()
    for _ in range(2):
        assert made.apply() and made.is_applied
    assert getattr(owner, name)() == f"ours, {theirs}"
    assert len(calls) == 1
    setattr(owner, name, held)  # the library got it back
    assert not made.is_applied
    assert made.apply() and getattr(owner, name)() == f"ours, {theirs}"


def test_an_attribute_that_is_missing_is_added(library: Library) -> None:
    made = patch("later")
    made.made_by(lambda original: lambda: original)
    assert made.apply() and made.is_applied and library.later() is None


def test_a_function_around_another(library: Library) -> None:
    made, theirs = patch("function"), library.function

    @made.around
    def ours(original: Any, *args: Any) -> str:
        return f"ours {args}, {original()}"

    assert made.apply() and library.function(1) == "ours (1,), theirs"
    assert library.function.__wrapped__ is theirs


def test_a_library_that_is_not_imported_is_asked_again(
    library: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = patch("function")
    made.made_by(lambda original: lambda: f"ours, {original()}")
    monkeypatch.delitem(sys.modules, "their_library")
    assert not made.apply() and not made.is_applied
    for _ in range(2):  # it may be imported anew
        again = Library()
        monkeypatch.setitem(sys.modules, "their_library", again)
        assert not made.is_applied
        assert made.apply() and made.apply()
        assert again.function() == "ours, theirs"


def test_a_replacement_of_the_replacement_is_left(library: Library) -> None:
    made = patch("function")
    made.made_by(lambda original: lambda: f"ours, {original()}")
    made.apply()
    ours, library.function = library.function, lambda: f"another, {ours()}"
    assert made.apply() and library.function() == "another, ours, theirs"


def test_threads_apply_it_once(library: Library) -> None:
    made, calls = patch("function"), []

    @made.made_by
    def make(original: Any) -> Any:
        calls.append(original)
        time.sleep(0.02)
        return lambda: f"ours, {original()}"

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(lambda _: made.apply(), range(8)))
    assert len(calls) == 1 and library.function() == "ours, theirs"


def test_for_a_while_it_nests_and_ends_with_an_error(library: Library) -> None:
    made, theirs = patch("function", kind="attribute for a while"), library.function
    made.made_by(lambda original: lambda: f"ours, {original()}")

    def fail() -> None:
        with made.during(), made.during():
            assert library.function() == "ours, ours, theirs"
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert library.function is theirs and not made.is_applied
    absent = patch("later", kind="attribute for a while")
    absent.made_by(lambda original: original)
    with absent.during():
        assert library.later is None
    assert not hasattr(library, "later")


def test_one_object_gets_a_derived_class(library: Library) -> None:
    made, one, other = patch("Model", kind="class of instances"), library.Model(), library.Model()

    @made.made_by
    def make(kind: Any, what: str) -> Any:
        return type("Ours", (kind,), {"what": what})

    assert not made.is_applied
    for what in ("first", "second"):
        made.give_class(one, what)
    assert isinstance(one, library.Model) and one.what == "first"
    assert type(other) is library.Model and made.is_applied


def left_out(monkeypatch: pytest.MonkeyPatch, library: Library, **others: Any) -> Patch:
    made = patch("function", **others)
    made.made_by(lambda original: lambda: f"ours, {original()}")
    monkeypatch.setattr(patches, "PATCHES", (*PATCHES, made))
    monkeypatch.setenv(patches.VARIABLE, " tried, ptxas,")
    patches._names_in.cache_clear()
    return made


def test_a_patch_that_is_left_out_warns_once(
    library: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = left_out(monkeypatch, library)
    with pytest.warns(UserWarning, match="tried") as found:
        assert not made.apply()
    assert [str(each.message) for each in found] == [
        "BLOCKTENSOR_WITHOUT_PATCHES leaves out 'tried', which changes their_library:function: "
        "nothing works"
    ]
    assert not made.apply() and library.function() == "theirs"
    with made.during():
        assert library.function() == "theirs"
    assert made.state() == "left out"


def test_a_required_patch_that_is_left_out_raises(
    library: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = left_out(monkeypatch, library, is_required=True)
    for use in (made.apply, lambda: made.give_class(library.Model())):
        assert_expected_inline(
            complaint(NotImplementedError, use),
            """\
BLOCKTENSOR_WITHOUT_PATCHES leaves out 'tried', which changes
their_library:function: nothing works; remove 'tried' from
BLOCKTENSOR_WITHOUT_PATCHES""",
        )
    monkeypatch.setenv(patches.VARIABLE, "")
    assert made.apply()


def test_a_name_that_no_patch_has(library: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    made = left_out(monkeypatch, library)
    monkeypatch.setenv(patches.VARIABLE, "tried,swap-tensors")
    text = complaint(ValueError, made.apply)
    assert text.startswith("BLOCKTENSOR_WITHOUT_PATCHES names ['swap-tensors']: expected names")
    assert library.function() == "theirs"


def test_a_global_hook(library: Library) -> None:
    hooks: list[str] = []
    made = patch("hooks", kind="global hook")
    made.made_by(lambda: hooks.append("ours"))
    for _ in range(2):
        assert made.apply() and made.is_applied and hooks == ["ours"]
