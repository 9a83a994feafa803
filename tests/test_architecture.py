"""The shape of the repository: small files, no import circles, arrows that only point down.

Sources are parsed, never imported. Imports inside functions count as much as those at the top;
only those under ``if TYPE_CHECKING`` do not.
"""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = "blocktensor"
SOURCE_FOLDERS = (PACKAGE, "examples", "benchmarks", "tests")
MAX_LINES = 400

# From top to bottom. A module imports only from floors below its own. ``name.*`` is a package whose
# modules may also import each other; it includes the package itself.
FLOORS: tuple[tuple[str, ...], ...] = (
    ("blocktensor",),
    ("blocktensor.convert",),
    ("blocktensor.explain",),
    ("blocktensor.memory",),
    ("blocktensor.sharing",),
    ("blocktensor.groups",),
    ("blocktensor.functional",),
    ("blocktensor.overrides",),
    ("blocktensor.autograd",),
    ("blocktensor.plans",),
    ("blocktensor.checkpoint.*",),
    ("blocktensor.slicing",),
    ("blocktensor.dispatch",),
    ("blocktensor.state",),
    ("blocktensor.distributed.*",),
    ("blocktensor.weight",),
    ("blocktensor.tensor",),
    ("blocktensor.forms",),
    ("blocktensor.recipe",),
    ("blocktensor.tables",),
    ("blocktensor.ops",),
    ("blocktensor.ops.fused",),
    ("blocktensor.ops.dgrad", "blocktensor.ops.part", "blocktensor.ops.pinned"),
    ("blocktensor.ops.library",),
    ("blocktensor.ops.backends",),
    ("blocktensor.ops.gluon.*",),
    ("blocktensor.ops.cublas", "blocktensor.ops.triton.*"),
    ("blocktensor.ops.reference",),
    ("blocktensor.ops.prepared",),
    ("blocktensor.ops.checks",),
    ("blocktensor.ops.layouts",),
)

# Who imports the package need not have these.
OPTIONAL = ("rich", "matplotlib", "hypothesis", "safetensors")

Graph = dict[str, set[str]]


# ---------------------------------------------------------------------------
# Reading a tree


def modules_of(root: Path, package: str = PACKAGE) -> dict[str, Path]:
    """The dotted name of every module of ``package`` under ``root``, with its file."""
    modules = {}
    for path in sorted((root / package).rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        modules[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return modules


def is_type_checking(test: ast.expr) -> bool:
    """Whether ``test`` is ``TYPE_CHECKING`` or ``typing.TYPE_CHECKING``."""
    name = test.attr if isinstance(test, ast.Attribute) else getattr(test, "id", None)
    return name == "TYPE_CHECKING"


def runtime_nodes(node: ast.AST) -> Iterator[ast.AST]:
    """``node`` and all below it, but for what only a type checker reads."""
    yield node
    children: list[ast.AST] = list(ast.iter_child_nodes(node))
    if isinstance(node, ast.If):
        if is_type_checking(node.test):
            children = list(node.orelse)
        elif isinstance(node.test, ast.UnaryOp) and is_type_checking(node.test.operand):
            children = list(node.body)
    for child in children:
        yield from runtime_nodes(child)


def imported_names(tree: ast.AST, package: str) -> Iterator[str]:
    """Absolute dotted names that ``tree`` imports; relative imports start from ``package``.

    ``from a import b`` gives ``a.b``, and ``import_module("a.b")`` with a literal the same.
    """
    for node in runtime_nodes(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                above = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*above, base] if base else above)
            yield from (f"{base}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            called = getattr(node.func, "attr", getattr(node.func, "id", None))
            if called in ("import_module", "__import__") and isinstance(node.args[0].value, str):
                yield node.args[0].value


def import_graph(modules: dict[str, Path]) -> Graph:
    """For every module the modules of the same tree that it imports.

    A name that is no module is looked up in the package that defines it: ``from a import f`` is an
    import of ``a``. Parent packages that an import merely passes through do not count.
    """
    graph: Graph = {}
    for module, path in modules.items():
        package = module if path.name == "__init__.py" else module.rpartition(".")[0]
        graph[module] = set()
        for name in imported_names(ast.parse(path.read_text("utf-8"), str(path)), package):
            target = name
            while target and target not in modules:
                target = target.rpartition(".")[0]
            if target and target != module:
                graph[module].add(target)
    return graph


# ---------------------------------------------------------------------------
# The rules: each returns its violations as lines to print


def long_files(root: Path, limit: int = MAX_LINES) -> list[str]:
    """Source files of more than ``limit`` lines."""
    files = (path for folder in SOURCE_FOLDERS for path in sorted((root / folder).rglob("*.py")))
    counts = ((path, len(path.read_text("utf-8").splitlines())) for path in files)
    return [f"{path.relative_to(root)}: {n} lines" for path, n in counts if n > limit]


def import_circles(graph: Graph) -> list[str]:
    """One circle of imports, if there is any."""
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return [" imported by ".join(error.args[1])]
    return []


def floor_of(module: str) -> tuple[int, str] | None:
    """The number of the floor of ``module``, counted from the top, and its entry there."""
    for number, entries in enumerate(FLOORS):
        for entry in entries:
            package = entry.removesuffix(".*")
            if module == package or (entry != package and module.startswith(f"{package}.")):
                return number, entry
    return None


def unknown_modules(graph: Graph) -> list[str]:
    """Modules that stand on no floor."""
    return sorted(module for module in graph if floor_of(module) is None)


def upward_arrows(graph: Graph) -> list[str]:
    """Imports that do not point down. Modules on no floor are another rule's concern."""
    wrong = []
    for module, imported in sorted(graph.items()):
        for target in sorted(imported):
            here, there = floor_of(module), floor_of(target)
            if here is None or there is None:
                continue
            same_package = here == there and here[1].endswith(".*")
            if there[0] <= here[0] and not same_package:
                wrong.append(f"{module} imports {target}, which is not below it")
    return wrong


IMPORT_ALONE = f"""
import sys
sys.modules["triton"] = None
import {PACKAGE}
found = sorted(set({OPTIONAL!r}) & set(sys.modules))
sys.exit(f"{PACKAGE} imports {{', '.join(found)}}" if found else 0)
"""


def import_alone(root: Path) -> subprocess.CompletedProcess[str]:
    """Import the package of ``root`` in a new interpreter that has no Triton."""
    paths = [str(root), *filter(None, [os.environ.get("PYTHONPATH")])]
    return subprocess.run(
        [sys.executable, "-c", IMPORT_ALONE],
        cwd=root,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


# ---------------------------------------------------------------------------
# This repository


@pytest.fixture(scope="module")
def graph() -> Graph:
    return import_graph(modules_of(ROOT))


def test_no_file_is_long() -> None:
    assert long_files(ROOT) == [], f"one concept a file, at most {MAX_LINES} lines"


def test_imports_make_no_circle(graph: Graph) -> None:
    assert import_circles(graph) == []


def test_every_module_has_a_floor(graph: Graph) -> None:
    assert unknown_modules(graph) == [], f"add the modules to FLOORS in {Path(__file__).name}"


def test_imports_point_down(graph: Graph) -> None:
    assert upward_arrows(graph) == []


def test_import_needs_neither_triton_nor_extras() -> None:
    done = import_alone(ROOT)
    assert done.returncode == 0, done.stderr


# ---------------------------------------------------------------------------
# The rules themselves, on small made-up trees


def make_tree(root: Path, files: dict[str, str]) -> Path:
    """Write ``files`` (paths inside the package) under ``root``."""
    for name, text in files.items():
        path = root / PACKAGE / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def graph_of(root: Path, files: dict[str, str]) -> Graph:
    return import_graph(modules_of(make_tree(root, {"__init__.py": "", **files})))


@pytest.mark.parametrize(
    ("source", "target"),
    [
        ("import blocktensor.recipe", "blocktensor.recipe"),
        ("import torch, blocktensor.recipe as r", "blocktensor.recipe"),
        ("from blocktensor.recipe import Recipe", "blocktensor.recipe"),
        ("from blocktensor import recipe", "blocktensor.recipe"),
        ("from blocktensor import quantize", "blocktensor"),
        ("from . import layouts", "blocktensor.ops.layouts"),
        ("from .layouts import BLOCK", "blocktensor.ops.layouts"),
        ("from . import BLOCK", "blocktensor.ops"),
        ("from .. import recipe", "blocktensor.recipe"),
        ("from ..recipe import Recipe", "blocktensor.recipe"),
        ("from .. import *", "blocktensor"),
        ("def f():\n    from ..recipe import Recipe", "blocktensor.recipe"),
        ("try:\n    from .. import recipe\nexcept ImportError:\n    pass", "blocktensor.recipe"),
        ("import importlib\nimportlib.import_module('blocktensor.recipe')", "blocktensor.recipe"),
        ("if TYPE_CHECKING:\n    pass\nelse:\n    from .. import recipe", "blocktensor.recipe"),
        ("if not TYPE_CHECKING:\n    from .. import recipe", "blocktensor.recipe"),
        ("if TYPE_CHECKING:\n    from .. import recipe", None),
        ("import typing\nif typing.TYPE_CHECKING:\n    from .. import recipe", None),
        ("import torch\nfrom torch.ops import recipe\nprint('blocktensor.recipe')", None),
    ],
)
def test_an_import_is_found(tmp_path: Path, source: str, target: str | None) -> None:
    files = {"recipe.py": "", "ops/__init__.py": "", "ops/layouts.py": "", "ops/library.py": source}
    found = graph_of(tmp_path, files)["blocktensor.ops.library"]
    assert found == ({target} if target else set())


def test_a_package_imports_its_own_modules(tmp_path: Path) -> None:
    graph = graph_of(tmp_path, {"ops/__init__.py": "from .library import mm", "ops/library.py": ""})
    assert graph["blocktensor.ops"] == {"blocktensor.ops.library"}


@pytest.mark.parametrize("back", ["from .a import x", "def f():\n    from . import a"])
def test_a_circle_is_found(tmp_path: Path, back: str) -> None:
    files = {"a.py": "from .b import y", "b.py": "import blocktensor.c", "c.py": back}
    (circle,) = import_circles(graph_of(tmp_path, files))
    assert {f"blocktensor.{name}" for name in "abc"} == set(circle.split(" imported by "))


def test_a_type_checking_import_closes_no_circle(tmp_path: Path) -> None:
    files = {"a.py": "from .b import y", "b.py": "if TYPE_CHECKING:\n    from .a import x"}
    assert import_circles(graph_of(tmp_path, files)) == []


@pytest.mark.parametrize(
    ("module", "source", "allowed"),
    [
        ("weight.py", "from . import tensor", True),
        ("tensor.py", "from . import weight", False),
        ("tensor.py", "from . import quantize", False),
        ("tensor.py", "def f():\n    from . import weight", False),
        ("tensor.py", "from .ops import library", True),
        ("ops/library.py", "from .. import tensor", False),
        ("ops/library.py", "from . import backends", True),
        ("ops/backends.py", "from .triton import cast", True),
        ("ops/cublas.py", "from .triton import cast", False),
        ("ops/gluon/gemm.py", "from ..triton import cast", True),
        ("ops/triton/gemm.py", "from ..gluon import cast", False),
        ("ops/triton/gemm.py", "from . import cast", True),
        ("ops/triton/gemm.py", "from .. import reference", True),
        ("ops/triton/gemm.py", "from .. import backends", False),
        ("ops/reference.py", "from . import layouts", True),
        ("ops/layouts.py", "from . import reference", False),
    ],
)
def test_an_upward_arrow_is_found(tmp_path: Path, module: str, source: str, allowed: bool) -> None:
    names = "weight tensor ops/__init__ ops/library ops/backends ops/cublas ops/reference"
    names += " ops/layouts ops/triton/__init__ ops/triton/cast"
    graph = graph_of(tmp_path, {**{f"{name}.py": "" for name in names.split()}, module: source})
    assert unknown_modules(graph) == []
    assert bool(upward_arrows(graph)) != allowed


def test_an_unknown_module_is_found(tmp_path: Path) -> None:
    graph = graph_of(tmp_path, {"helpers.py": "", "ops/triton/anything.py": "", "tensor.py": ""})
    assert unknown_modules(graph) == ["blocktensor.helpers"]


def test_a_long_file_is_found(tmp_path: Path) -> None:
    make_tree(tmp_path, {"short.py": "x = 1\n" * 400, "long.py": "x = 1\n" * 401})
    assert long_files(tmp_path) == ["blocktensor/long.py: 401 lines"]


@pytest.mark.parametrize(
    ("source", "complaint"),
    [
        ("try:\n    import triton\nexcept ImportError:\n    triton = None", None),
        ("import triton", "import of triton halted"),
        ("import sys, types\nsys.modules['rich'] = types.ModuleType('rich')", "imports rich"),
    ],
)
def test_a_needed_extra_is_found(tmp_path: Path, source: str, complaint: str | None) -> None:
    done = import_alone(make_tree(tmp_path, {"__init__.py": source}))
    assert (done.returncode == 0) == (complaint is None), done.stderr
    assert complaint is None or complaint in done.stderr
