"""The modules of a source tree and their imports, read without importing anything."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

PACKAGE = "blocktensor"

Graph = dict[str, set[str]]


def modules_of(root: Path) -> dict[str, Path]:
    """The dotted name of every module of the package under ``root``, with its file."""
    modules = {}
    for path in sorted((root / PACKAGE).rglob("*.py")):
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
