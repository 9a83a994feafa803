"""An import patches nothing; the first use of an FP8 weight in a process does."""

from __future__ import annotations

import pickle
import tempfile
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from torch import nn

from blocktensor import convert
from blocktensor.patches import PATCHES
from tests.support import ranks

ROOT = Path(__file__).parents[1]


OPTIONAL = [name for name in ("transformers", "peft", "triton") if find_spec(name)]

SNAPSHOT = """
import sys, types, warnings
warnings.simplefilter("ignore")
import torch, torch.distributed.fsdp, torch.distributed.pipelining
for name in ("transformers.modeling_utils", "transformers.quantizers.auto", "triton",
             "peft.tuners.lora.layer"):
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

BEGIN = f"""
import os, sys
assert "blocktensor" not in sys.modules
os.environ.update(environment)
os.chdir({str(ROOT)!r})
sys.path.insert(0, {str(ROOT)!r})
sys.argv[1:] = arguments
sys.stdout, sys.stderr = (open(os.path.join(folder, name), "w") for name in ("stdout", "stderr"))
exec(code, {{"__name__": "__main__"}})
"""
"""The beginning of a process that is forked from the server of ranks."""

REGISTERED = ["torch._weights_only_unpickler:_marked_safe_globals_set"]
"""Types of this package that torch.load(weights_only=True) accepts."""


def process(code: str, *arguments: str, **environment: str) -> str:
    """Return what ``code`` prints in a process that has imported other libraries alone."""
    with tempfile.TemporaryDirectory() as folder:
        given = {"code": code, "folder": folder, "arguments": arguments, "environment": environment}
        started = ranks.forking().Process(target=exec, args=(BEGIN, given))
        started.start()
        started.join(ranks.TIMEOUT)
        started.kill()
        started.join()
        printed, errors = (Path(folder, name).read_text() for name in ("stdout", "stderr"))
    assert started.exitcode == 0, errors
    return printed.strip()


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
    if "peft" in OPTIONAL:
        methods = "Linear.forward", "ParamWrapper._activate_lora", "ParamWrapper.update_layer"
        expected += [f"peft.tuners.lora.layer:{x}" for x in methods]
        expected.append("peft.tuners.tuners_utils:BaseTuner.inject_adapter")
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
    """Each use has a process of its own, forked from one that has not imported this package."""
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
