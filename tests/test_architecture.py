"""The shape of the repository: rooms with ranks, small files, no import circles.

Sources are parsed, never imported; grimp finds their imports. Those inside functions count as much
as those at the top; only those under ``if TYPE_CHECKING`` do not.
"""

from __future__ import annotations

import ast
from collections.abc import Callable
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import Any

import grimp
import pytest

PACKAGE = "blocktensor"
ROOT = Path(__file__).resolve().parent.parent
MAX_ROOT_MODULES = 19

# Rooms from top to bottom: a module imports from its own room and from rooms below it. A room is a
# folder with all in it that has no rank of its own, or one module.
RANKS = (
    "blocktensor.__main__",
    "blocktensor",
    "blocktensor.registration",
    "blocktensor.integrations",
    "blocktensor.reports",
    "blocktensor.reports.plan",
    "blocktensor.reports.predict",
    "blocktensor.checkpoint",
    "blocktensor.distributed",
    "blocktensor.fusion",
    "blocktensor.conversion",
    "blocktensor.model",
    "blocktensor.functional",
    "blocktensor.overrides",
    "blocktensor.tensor_parallel",
    "blocktensor.autograd",
    "blocktensor.sharding.whole",
    "blocktensor.sharding.cuts",
    "blocktensor.sharding.fsdp",
    "blocktensor.sharding",
    "blocktensor.tensor.aten",
    "blocktensor.tensor.compat",
    "blocktensor.tensor",
    "blocktensor.tensor.torch_internals",
    "blocktensor.recipe",
    "blocktensor.ops.producers",
    "blocktensor.ops.norm",
    "blocktensor.ops.cross_entropy",
    "blocktensor.ops.linear_layer",
    "blocktensor.ops.thin",
    "blocktensor.ops.grouped_gemm",
    "blocktensor.ops.gemm",
    "blocktensor.ops.gemm.hopper",
    "blocktensor.ops.cast",
    "blocktensor.ops.op",
    "blocktensor.ops.runtime",
    "blocktensor.ops.runtime.triton_compat",
    "blocktensor.ops.runtime.launch",
    "blocktensor.ops.runtime.triton_compat.compiler",
    "blocktensor.ops",
    "blocktensor.patches",
    "blocktensor.text_table",
)

# Modules that a user may import; all other folders say in their docstring that they are internal.
PUBLIC = (
    "blocktensor",
    "blocktensor.functional",
    "blocktensor.distributed",
    "blocktensor.recipe",
    "blocktensor.reports",
    "blocktensor.integrations",
    "blocktensor.integrations.torchtitan",
    "blocktensor.integrations.transformers",
)

FORMATS = "blocktensor.ops.formats"
"""The one module that knows the size of a block."""

LAZY = "blocktensor.distributed"
"""The one module with a ``__getattr__``: DTensor would double the time of ``import blocktensor``.

Its names are imported under ``TYPE_CHECKING``, too, where go-to-definition finds them.
"""

OWNED = {
    "_local_tensor": "blocktensor.sharding.dtensor",
    **dict.fromkeys(
        ("_getframe", "f_back", "f_locals"), "blocktensor.tensor.torch_internals.callers"
    ),
}
"""Names that one module alone may use."""

MAY_SET_CLASS = {
    "blocktensor.fusion.fused_class",  # of the user's modules
    "blocktensor.tensor.compat.swap_in",  # of the user's parameters
}
"""Modules other than ``patches.py`` that change the class of an object."""

IN_A_SCOPE = {"blocktensor.ops.runtime.triton_compat.compiler": "tools.ptxas"}
"""Attributes of other libraries that are set in a scope of theirs, which resets them."""

Graph = dict[str, set[str]]
"""For every module the modules that it imports."""

Rule = Callable[[Any], list[str]]
# The rules: each returns its violations as lines to print


def import_circles(graph: Graph) -> list[str]:
    """One circle of imports, if there is any."""
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return [" imported by ".join(error.args[1])]
    return []


def folder_circles(graph: Graph) -> list[str]:
    """One circle of folders within a room, if there is any: give one of them a rank."""
    folders = {name.rpartition(".")[0] for name in graph}

    def folder_of(module: str) -> str:
        return module if module in folders else module.rpartition(".")[0]

    arrows: Graph = {}
    for module, imported in graph.items():
        below = {folder_of(x) for x in imported if room_of(x) == room_of(module)}
        arrows.setdefault(folder_of(module), set()).update(below - {folder_of(module)})
    return import_circles(arrows)


def room_of(module: str) -> int:
    """The rank of a module's room, counted from the top; the root folder holds no other module."""
    name = module
    while name not in RANKS or (name == PACKAGE and module != PACKAGE):
        name = name.rpartition(".")[0]
        if not name:
            return -1
    return RANKS.index(name)


def modules_without_room(graph: Graph) -> list[str]:
    """Modules in no room."""
    return sorted(module for module in graph if room_of(module) < 0)


def upward_arrows(graph: Graph) -> list[str]:
    """Imports from a room above. Modules in no room are another rule's concern."""
    return [
        f"{module} imports {target}, which is above it"
        for module, imported in sorted(graph.items())
        for target in sorted(imported)
        if 0 <= room_of(target) < room_of(module)
    ]


def is_kernel(tree: ast.AST) -> bool:
    """Whether a module defines Triton or Gluon functions, or the tile of one."""
    return any(
        isinstance(node, ast.Attribute) and node.attr in ("jit", "constexpr_function", "builtin")
        for node in ast.walk(tree)
    )


def block_sizes(modules: dict[str, Path]) -> list[str]:
    """Literal block sizes, and ``power_of_two`` as a parameter, outside of formats and kernels."""
    found = []
    for module, path in modules.items():
        tree = ast.parse(path.read_text("utf-8"))
        in_kernels = is_kernel(tree) or module.startswith(f"{PACKAGE}.ops.gemm.hopper.")
        if module == FORMATS or in_kernels:
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and type(node.value) is int and node.value == 128:
                found.append(f"{module}:{node.lineno}: 128")
            if isinstance(node, ast.arg) and node.arg == "power_of_two":
                found.append(f"{module}:{node.lineno}: power_of_two")
    return found


def duck_typing(modules: dict[str, Path]) -> list[str]:
    """``__getattr__``, which go-to-definition cannot follow, and names that another owns."""
    found = []
    for module, path in modules.items():
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            is_getattr = isinstance(node, ast.FunctionDef) and node.name == "__getattr__"
            if is_getattr and module != LAZY:
                found.append(f"{module}:{node.lineno}: __getattr__")
            name = getattr(node, "attr", None) or getattr(node, "value", None)
            if isinstance(name, str) and OWNED.get(name, module) != module:
                found.append(f"{module}:{node.lineno}: {name}")
    return found


def _root(node: ast.AST) -> str:
    """The variable that a chain of attributes begins with."""
    while isinstance(node, (ast.Attribute, ast.Call, ast.Subscript)):
        node = node.func if isinstance(node, ast.Call) else node.value
    return getattr(node, "id", "")


def _others(tree: ast.AST) -> set[str]:
    """Names of other libraries' objects in a module: imported, or read from one that is."""
    found = set()
    nodes = list(ast.walk(tree))
    for node in nodes:
        if isinstance(node, ast.Import):
            found |= {(alias.asname or alias.name).partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            found |= {alias.asname or alias.name for alias in node.names}
    found.discard(PACKAGE)
    for node in nodes:
        if isinstance(node, (ast.Assign, ast.AnnAssign)) and node.value is not None:
            text = ast.unparse(node.value)
            is_module = text.startswith(("sys.modules", "importlib.import_module"))
            is_read = isinstance(node.value, ast.Attribute) and _root(node.value) in found
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            if is_module or is_read:
                found |= {x.id for x in targets if isinstance(x, ast.Name)}
    return found


def patches_elsewhere(modules: dict[str, Path]) -> list[str]:
    """Attributes of other libraries that are set outside of ``patches.py``, which lists them."""
    found = []
    for module, path in modules.items():
        if module == f"{PACKAGE}.patches":
            continue
        tree = ast.parse(path.read_text("utf-8"))
        theirs = _others(tree)
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and not isinstance(node.ctx, ast.Load):
                if node.attr == "__class__" and module not in MAY_SET_CLASS:
                    found.append(f"{module}:{node.lineno}: __class__")
                changed: ast.AST = node
            elif isinstance(node, ast.Call) and _root(node.func) in ("setattr", "delattr"):
                changed = node.args[0]
            else:
                continue
            if _root(changed) in theirs and ast.unparse(changed) != IN_A_SCOPE.get(module):
                found.append(f"{module}:{changed.lineno}: {ast.unparse(changed)}")
    return found


def packed_lines(modules: dict[str, Path]) -> list[str]:
    """Unpacked displays, ``*(a, b)``, whose lines the formatter does not lay out."""
    return [
        f"{module}:{node.lineno}: an unpacked display"
        for module, path in modules.items()
        for node in ast.walk(ast.parse(path.read_text("utf-8")))
        if isinstance(node, ast.Starred) and isinstance(node.value, (ast.Tuple, ast.List))
    ]


def open_rooms(modules: dict[str, Path]) -> list[str]:
    """Folders that are neither public nor say that they are internal."""
    folders = {name: path for name, path in modules.items() if path.name == "__init__.py"}
    return [
        name
        for name, path in folders.items()
        if name not in PUBLIC
        and not (ast.get_docstring(ast.parse(path.read_text())) or "").startswith("Internal:")
    ]


OF_GRAPHS: tuple[Rule, ...] = (
    import_circles,
    folder_circles,
    modules_without_room,
    upward_arrows,
)
RULES = {
    rule.__name__: rule
    for rule in (
        *OF_GRAPHS,
        block_sizes,
        duck_typing,
        patches_elsewhere,
        packed_lines,
        open_rooms,
    )
}

# This repository


def modules_of(root: Path) -> dict[str, Path]:
    """The dotted name of every module of the package under ``root``, with its file."""
    modules = {}
    for path in sorted((root / PACKAGE).rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        modules[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return modules


@pytest.fixture(scope="module")
def modules() -> dict[str, Path]:
    return modules_of(ROOT)


@pytest.fixture(scope="module")
def graph(modules: dict[str, Path]) -> Graph:
    found = grimp.build_graph(PACKAGE, exclude_type_checking_imports=True, cache_dir=None)
    assert found.modules == modules.keys()
    return {name: found.find_modules_directly_imported_by(name) for name in modules}


@pytest.mark.parametrize("rule", RULES)
def test_the_package_keeps_the_rules(rule: str, modules: dict[str, Path], graph: Graph) -> None:
    """A new folder needs a place in ``RANKS``."""
    given = graph if RULES[rule] in OF_GRAPHS else modules
    assert RULES[rule](given) == [], RULES[rule].__doc__


def test_no_file_packs_lines() -> None:
    """The formatter lays out code, but for some tables and argument lists of kernels."""
    folders = ("blocktensor", "tests", "benchmarks", "examples")
    files = {str(path): path for folder in folders for path in (ROOT / folder).rglob("*.py")}
    assert packed_lines(files) == []
    marker = "# fmt:" + " skip"
    assert sum(path.read_text("utf-8").count(marker) for path in files.values()) <= 60


def test_the_root_is_small(modules: dict[str, Path]) -> None:
    below = {name.split(".")[1] for name in modules if name != PACKAGE} - {"__main__"}
    assert len(below) + 1 <= MAX_ROOT_MODULES, f"{sorted(below)} and __init__"


# The rules themselves, on small made-up trees


@pytest.mark.parametrize("back", [True, False])
def test_a_circle_is_found(back: bool) -> None:
    found = import_circles({"a": {"b"}, "b": {"c"}, "c": {"a"} if back else set()})
    assert [set(circle.split(" imported by ")) for circle in found] == [set("abc")] * back


@pytest.mark.parametrize(
    ("target", "found"), [("fusion.mlp.size", True), ("fusion.mlp", True), ("fusion.b", False)]
)
def test_a_circle_of_folders_is_found(target: str, found: bool) -> None:
    """No modules form a circle here."""
    rooms: Graph = {
        "fusion": set(),
        "fusion.a": {target},
        "fusion.b": set(),
        "fusion.mlp": set(),
        "fusion.mlp.size": set(),
        "fusion.mlp.time": {"fusion.b"},
    }
    graph = {f"{PACKAGE}.{x}": {f"{PACKAGE}.{y}" for y in below} for x, below in rooms.items()}
    assert import_circles(graph) == upward_arrows(graph) == []
    assert bool(folder_circles(graph)) == found


@pytest.mark.parametrize(
    ("module", "target", "allowed"),
    [
        ("tensor.weight", "tensor.base", True),
        ("tensor.weight", "autograd.linear", False),
        ("tensor.weight", "", False),
        ("tensor.weight", "ops.cast.ops", True),
        ("autograd.linear", "tensor.base", True),
        ("ops.cast.ops", "tensor.base", False),
        ("tensor.base", "tensor.torch_internals.callers", True),
        ("tensor.torch_internals.callers", "tensor.base", False),
        ("tensor.compat.swap_in", "tensor.weight", True),
        ("tensor.weight", "tensor.compat.swap_in", False),
        ("patches", "ops.formats", False),
        ("ops.gemm.ops", "ops.cast", True),
        ("ops.gemm.hopper.launch", "ops.gemm.ops", False),
        ("ops.gemm.ops", "ops.gemm.hopper.launch", True),
        ("ops.formats", "ops.runtime.record", False),
        ("ops.runtime.record", "ops.formats", True),
        ("ops.runtime.triton_compat.launcher", "ops.runtime.launch", True),
        ("ops.runtime.triton_compat.launcher", "ops.runtime.record", False),
        ("sharding.cuts", "sharding.fsdp.shards", True),
        ("sharding.fsdp.shards", "sharding.cuts", False),
    ],
)
def test_an_upward_arrow_is_found(module: str, target: str, allowed: bool) -> None:
    graph = {f"{PACKAGE}.{module}": {f"{PACKAGE}.{target}".rstrip(".")}}
    assert modules_without_room(graph) == []
    assert bool(upward_arrows(graph)) != allowed


@pytest.mark.parametrize(
    ("rule", "file", "source", "found"),
    [
        ("modules_without_room", "helpers.py", "", "helpers"),
        ("modules_without_room", "ops/cast/anything.py", "", None),
        ("modules_without_room", "tensor/x.py", "", None),
        ("open_rooms", "tensor/__init__.py", "", "tensor"),
        ("open_rooms", "ops/__init__.py", '"""Internal: ops."""', None),
        ("block_sizes", "ops/formats.py", "BLOCK = 128", None),
        ("block_sizes", "tensor/x.py", "edge = 128", "tensor.x:1: 128"),
        ("block_sizes", "tensor/x.py", "shape = (1, 128)", "tensor.x:1: 128"),
        ("block_sizes", "tensor/x.py", "def f(power_of_two): ...", "tensor.x:1: power_of_two"),
        ("block_sizes", "tensor/x.py", '"""128x128 blocks."""\nedge = 1280', None),
        ("block_sizes", "tensor/x.py", "import triton\n@triton.jit\ndef f(): return 128", None),
        ("duck_typing", "sharding/dtensor.py", "x._local_tensor", None),
        ("duck_typing", "model/x.py", "x._local_tensor", "model.x:1: _local_tensor"),
        ("duck_typing", "model/x.py", "getattr(x, '_local_tensor')", "model.x:1: _local_tensor"),
        ("duck_typing", "model/x.py", "sys._getframe(1)", "model.x:1: _getframe"),
        ("duck_typing", "model/x.py", "def __getattr__(self, x): ...", "model.x:1: __getattr__"),
        ("patches_elsewhere", "patches.py", "x.__class__ = y", None),
        ("patches_elsewhere", "model/x.py", "import torch\nx = torch.y()\nself.z = x.z", None),
        ("patches_elsewhere", "model/x.py", "import torch\ntorch.f += 1", "model.x:2: torch.f"),
        ("patches_elsewhere", "model/x.py", "from a import B\nsetattr(B, c, 1)", "model.x:2: B"),
        ("patches_elsewhere", "model/x.py", "x = sys.modules[y]\nx.f = 1", "model.x:2: x.f"),
        ("patches_elsewhere", "model/x.py", "import a\nx = a.b\nx.f = 1", "model.x:3: x.f"),
        ("patches_elsewhere", "model/x.py", "x.__class__ = y", "model.x:1: __class__"),
        ("packed_lines", "model/x.py", "x = [*(1, 2), 3]", "model.x:1: an unpacked display"),
        ("packed_lines", "model/x.py", "x = [*a, *(b for b in c)]", None),
    ],
)
def test_a_violation_is_found(
    tmp_path: Path, rule: str, file: str, source: str, found: str | None
) -> None:
    (path := tmp_path / PACKAGE / file).parent.mkdir(parents=True, exist_ok=True)
    path.write_text(source)
    modules = modules_of(tmp_path)
    given = dict.fromkeys(modules, ()) if RULES[rule] in OF_GRAPHS else modules
    assert RULES[rule](given) == ([f"{PACKAGE}.{found}"] if found else [])
