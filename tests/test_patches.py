"""Changes to other libraries: the mechanism, the table, and that an import makes none."""

from __future__ import annotations

import os
import pickle
import re
import subprocess
import sys
import threading
import time
import types
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from torch import nn

from blocktensor import convert, patches
from blocktensor.patches import PATCHES, Patch
from tests.support.models import complaint

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "design" / "patches.md"

# The mechanism, on a library of its own


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
def test_a_function_is_replaced_once_and_put_back(library: Library, target: str) -> None:
    made = patch(target)
    owner = library.Model if "." in target else library
    name = target.rpartition(".")[2]
    before, calls = dict(vars(owner)), []

    @made.made_by
    def make(original: Any) -> Any:
        calls.append(original)
        return TARGETS[target](original)

    assert not made.is_applied and not made.undo()
    theirs = getattr(owner, name)()
    for _ in range(2):
        assert made.apply() and made.is_applied
    assert getattr(owner, name)() == f"ours, {theirs}"
    assert made.original() == theirs
    assert made.undo() and not made.undo()
    assert dict(vars(owner)) == before  # the same staticmethod, and nothing that was inherited
    assert made.apply() and getattr(owner, name)() == f"ours, {theirs}"
    assert len(calls) == 2


def test_an_attribute_that_is_missing_is_gone_afterwards(library: Library) -> None:
    made = patch("later")
    made.made_by(lambda original: lambda: original)
    assert made.apply() and library.later() is None
    assert made.undo() and not hasattr(library, "later")


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
    text = complaint(RuntimeError, made.undo)
    assert text.startswith("patch 'tried': their_library:function was replaced by <function")
    library.function = ours
    assert made.undo() and library.function() == "theirs"


def test_a_function_that_the_library_got_back_is_replaced_again(library: Library) -> None:
    made, theirs = patch("function"), library.function
    made.made_by(lambda original: lambda: f"ours, {original()}")
    made.apply()
    library.function = theirs
    assert not made.is_applied
    assert made.apply() and library.function() == "ours, theirs"
    assert made.undo() and library.function is theirs


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
    assert "keep their class" in complaint(NotImplementedError, made.undo)


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

    class Handle:
        def remove(self) -> None:
            hooks.clear()

    made = patch("hooks", kind="global hook")

    @made.made_by
    def add() -> Handle:
        hooks.append("ours")
        return Handle()

    for _ in range(2):
        assert made.apply() and hooks == ["ours"]
        assert made.apply() and hooks == ["ours"]
        assert made.undo() and not made.undo() and hooks == []


# The table


def documented() -> str:
    """The table of the page."""
    head = ("name", "changes", "why: the library …", "needed with", "applied at", "without it")
    rows = [
        (
            f"`{each.name}`",
            f"`{each.target.replace(':', '.')}` ({each.kind})",
            each.reason,
            each.versions,
            each.when,
            ("raises: " if each.is_required else "") + each.without,
        )
        for each in PATCHES
    ]
    lines = [" | ".join(row) for row in (head, ["---"] * len(head), *rows)]
    return "\n".join(f"| {line} |" for line in lines)


def test_the_page_has_the_table() -> None:
    """Copy what the failure prints."""
    assert documented() in PAGE.read_text("utf-8"), f"{PAGE} needs this table:\n\n{documented()}"


@pytest.mark.parametrize("each", PATCHES, ids=lambda each: each.name)
def test_every_patch_is_made_in_one_place_and_has_a_test(each: Patch) -> None:
    files = [x for x in (ROOT / "blocktensor").rglob("*.py") if x.name != "patches.py"]
    sources = [path.read_text("utf-8") for path in files]
    (variable,) = [name for name, value in vars(patches).items() if value is each]
    assert sum(source.count(f"{variable}.made_by") for source in sources) == 1
    used = rf"\b{variable}\.(apply|during|give_class)\("
    by_weights = each.when.startswith(patches.FP8_TENSOR)
    assert by_weights or any(re.search(used, source) for source in sources)
    file, _, name = each.test.partition("::")
    assert not name or f"def {name}(" in (ROOT / file).read_text("utf-8")
    assert (ROOT / file).is_file()
    assert len({other.name for other in PATCHES}) == len(PATCHES)


@pytest.mark.parametrize("each", PATCHES, ids=lambda each: each.name)
def test_the_target_exists(each: Patch) -> None:
    """Where the library is installed; of torch in every version, but for what it lacks."""
    module, _, path = each.target.partition(":")
    if module.partition(".")[0] == "torchtitan" and torch.__version__ < (2, 13):
        pytest.skip("torchtitan 0.3 needs torch 2.13")
    owner: Any = pytest.importorskip(module)
    for name in path.split("."):
        if each is not patches.SET_TIMEOUT:
            owner = getattr(owner, name)


def test_facts_are_those_of_the_table() -> None:
    facts = patches.facts()
    assert [each["name"] for each in facts] == [each.name for each in PATCHES]
    assert {each["state"] for each in facts} <= {"applied", "not applied"}
    assert str(patches.table()).count("\n") == len(PATCHES) + 1


# Nothing is changed by an import

OPTIONAL = [name for name in ("transformers", "peft", "triton") if find_spec(name)]

SNAPSHOT = """
import sys, types, warnings
warnings.simplefilter("ignore")
import torch, torch.distributed.fsdp, torch.distributed.pipelining
for name in ("transformers.modeling_utils", "transformers.quantizers.auto", "triton",
             "peft.tuners.lora.dora"):
    try: __import__(name)
    except ImportError: pass
import torch.nn.modules.module as of_modules

def snapshot():
    found = {}
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] not in ("torch", "transformers", "peft", "triton"):
            continue
        for key, value in list(vars(module).items()):
            found[name, key] = value
            if isinstance(value, type) and value.__module__ == name:
                found.update({(name, f"{key}.{x}"): y for x, y in list(vars(value).items())})
    found["hooks", ""] = tuple(of_modules._global_parameter_registration_hooks)
    found["config", ""] = torch.compiler.config.cache_key_tag
    return found

def changes(before):
    after = snapshot()
    modules = {module for module, _ in before}
    changed = [k for k, x in before.items() if after.get(k, before) is not x and after.get(k) != x]
    new = [k for k, x in after.items() if k not in before and k[0] in modules
           and not isinstance(x, types.ModuleType)]
    return sorted(f"{module}:{key}" for module, key in changed + new)

before = snapshot()
import blocktensor, blocktensor.distributed, blocktensor.reports
IMPORTED = changes(before)
"""
"""What a process says that has imported all libraries before this one."""

REGISTERED = ["torch._weights_only_unpickler:_marked_safe_globals_set"]
"""Types of this package that torch.load(weights_only=True) accepts."""


def process(code: str, *arguments: str, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **environment},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_an_import_changes_nothing_and_a_conversion_what_it_needs() -> None:
    told = process(
        f"""{SNAPSHOT}
print(IMPORTED)
before = snapshot()
blocktensor.convert(torch.nn.Linear(8, 8), skip_small=False)
print([x for x in changes(before) if "Tensor" not in x.partition(":")[2]])
"""
    )
    imported, converted = map(eval, told.splitlines())
    assert imported == REGISTERED
    expected = ["hooks:", "torch.utils:swap_tensors"]
    if torch.__version__ < "2.13":
        expected.append("config:")
    if "transformers" in OPTIONAL:
        of_models = "transformers.modeling_utils:PreTrainedModel"
        expected += [f"{of_models}.{x}" for x in ("resize_token_embeddings", "save_pretrained")]
    assert [x for x in converted if x in expected] == sorted(expected)
    theirs = {each.target for each in PATCHES}
    assert not theirs.intersection(converted).difference(expected)


@pytest.mark.skipif("transformers" not in OPTIONAL, reason="needs transformers")
def test_the_integration_of_transformers_changes_nothing_before_its_first_config() -> None:
    told = process(
        f"""{SNAPSHOT}
before = snapshot()
from blocktensor.integrations.transformers import BlockwiseFP8Config
print([x for x in changes(before) if "weights_only" not in x])
import pickle
config = BlockwiseFP8Config.__new__(BlockwiseFP8Config)
print([x for x in changes(before) if "weights_only" not in x])
"""
    )
    assert list(map(eval, told.splitlines())) == [
        [],
        [
            "transformers.modeling_utils:convert_and_load_state_dict_in_model",
            "transformers.quantizers.auto:AutoHfQuantizer.merge_quantization_configs",
        ],
    ]


# First uses other than a conversion

MOVED = """
import sys, weakref
import torch
from torch import nn

original = torch.utils.swap_tensors

def moved(module):
    "Move a weight that has weak references, which torch refuses."
    assert torch.utils.swap_tensors is not original
    reference = weakref.ref(module.weight)
    module.to()
    assert module.weight is reference()
    if not module.weight.is_meta:  # torch makes one of a pickle that is no leaf
        module.half()
        assert module.weight is reference() and module.weight.dtype == torch.float16
        other = nn.Linear(module.in_features, module.out_features)
        other.weight = module.weight
        assert other._load_state_dict_pre_hooks
"""

FIRST_USES = {
    "pickle": """
import pickle
moved(pickle.load(open(sys.argv[1], "rb")))
""",
    "pickle on meta": """
import pickle
moved(pickle.load(open(sys.argv[1] + ".meta", "rb")))
""",
    "torch.load": """
moved(torch.load(sys.argv[1] + ".pt", weights_only=False))
""",
    "torch.load of a state": """
import blocktensor
module = nn.Linear(64, 64, bias=False)
state = torch.load(sys.argv[1] + ".state", weights_only=True)
module.load_state_dict(state, assign=True)
moved(module)
""",
    "a copy of a pickle": """
import copy, pickle
moved(copy.deepcopy(pickle.load(open(sys.argv[1], "rb"))))
""",
    "a weight by hand": """
import blocktensor
module = nn.Linear(64, 64, bias=False)
module.weight = nn.Parameter(blocktensor.BlockwiseFP8Weight(module.weight.data))
moved(module)
""",
    "a frozen weight by hand, swapped": """
import blocktensor
torch.__future__.set_swap_module_params_on_conversion(True)
module = nn.Linear(64, 64, bias=False)
frozen = blocktensor.BlockwiseFP8Tensor.from_values(module.weight.data, (128, 128))
module.weight = nn.Parameter(frozen, requires_grad=False)
moved(module)
""",
    "torch.distributed.checkpoint": """
import blocktensor, torch.distributed.checkpoint as dcp
module = nn.Linear(64, 64, bias=False)
module.weight = nn.Parameter(blocktensor.BlockwiseFP8Weight(module.weight.data))
dcp.save(module.state_dict(), checkpoint_id=sys.argv[1] + ".dcp")
dcp.load(module.state_dict(), checkpoint_id=sys.argv[1] + ".dcp")
moved(module)
""",
}


@pytest.fixture(scope="module")
def pickles(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A frozen and converted linear, written in several ways."""
    file = tmp_path_factory.mktemp("pickles") / "module"
    module = nn.Linear(64, 64, bias=False)
    frozen = nn.Linear(64, 64, bias=False).requires_grad_(False)
    for each in (module, frozen):
        convert(each, skip_small=False)
    torch.save(module, f"{file}.pt")
    torch.save(frozen.state_dict(), f"{file}.state")
    file.write_bytes(pickle.dumps(frozen))
    Path(f"{file}.meta").write_bytes(pickle.dumps(module.to("meta")))
    return str(file)


def test_processes_that_convert_nothing(pickles: str) -> None:
    """Each use has a process of its own, forked from one that has imported torch alone."""
    code = f"""{MOVED}
import os, traceback
for use, code in {FIRST_USES!r}.items():
    if not os.fork():
        try:
            exec(code)
        except BaseException:
            print(use, traceback.format_exc(), flush=True)
        os._exit(0)
    os.wait()
"""
    assert process(code, pickles) == ""


def test_patches_are_left_out_of_a_process() -> None:
    code = """
import warnings, weakref
import blocktensor, torch
module = torch.nn.Linear(64, 64)
with warnings.catch_warnings(record=True) as found:
    warnings.simplefilter("always")
    blocktensor.convert(module, skip_small=False)
print([str(x.message).partition(",")[0] for x in found])
reference = weakref.ref(module.weight)
try: module.to()
except RuntimeError as error: print("weakref" in str(error.__cause__ or error))
"""
    told = process(code, BLOCKTENSOR_WITHOUT_PATCHES="swap_tensors, parameter_registration")
    said = "BLOCKTENSOR_WITHOUT_PATCHES leaves out"
    names = ("swap_tensors", "parameter_registration")
    assert told.splitlines() == [repr([f"{said} '{name}'" for name in names]), "True"]
    code = """
import blocktensor, torch
module = torch.nn.Linear(64, 64)
try: blocktensor.convert(module, skip_small=False)
except ValueError as error: print(error)
print(type(module.weight).__name__)
"""
    told = process(code, BLOCKTENSOR_WITHOUT_PATCHES="swap")
    assert told.splitlines()[0].startswith("BLOCKTENSOR_WITHOUT_PATCHES names ['swap']")
    assert told.splitlines()[1] == "Parameter"


# What a patch is for


@pytest.fixture
def registration() -> Iterator[Patch]:
    made = patches.PARAMETER_REGISTRATION
    made.apply()
    yield made
    made.apply()


def test_a_weight_that_is_assigned_brings_its_hooks(registration: Patch) -> None:
    kinds = []
    for change in (registration.apply, registration.undo):
        source, other = nn.Linear(64, 64), nn.Linear(64, 64)
        convert(source, skip_small=False)
        change()
        other.weight = source.weight
        other.load_state_dict(nn.Linear(64, 64).state_dict(), assign=True)
        kinds.append(type(other.weight).__name__)
    assert kinds == ["BlockwiseFP8Weight", "Parameter"]


def test_threads_make_the_first_tensor_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patches, "is_pending", True)
    ready = threading.Barrier(4)

    def make(_: int) -> bool:
        ready.wait(30)
        convert(nn.Linear(8, 8), skip_small=False)
        return patches.SWAP_TENSORS.is_applied

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(make, range(4)))
    assert not hasattr(torch.utils.swap_tensors.__wrapped__, "__wrapped__")  # type: ignore[attr-defined]
