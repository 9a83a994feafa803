"""Find the names that compiled Python code reads, and refuse code that cannot be watched."""

from __future__ import annotations

import builtins
import dis
import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from types import CodeType

from torch import Tensor, nn

_VARIABLES = ("LOAD_GLOBAL", "LOAD_NAME")
_ATTRIBUTES = ("LOAD_ATTR", "LOAD_METHOD", "LOAD_SUPER_ATTR", "LOAD_SUPER_METHOD")

_NOTHING = ("CACHE", "EXTENDED_ARG", "NOP", "PUSH_NULL", "NOT_TAKEN")
"""Instructions without an effect of their own."""

_WRITES = {
    "STORE_ATTR": "changes",
    "DELETE_ATTR": "changes",
    "STORE_GLOBAL": "changes",
    "DELETE_GLOBAL": "changes",
    "IMPORT_NAME": "imports",
}
"""Instructions that change something or read all of a module, and a verb for the message."""

_LOCALS = ("LOAD_FAST", "LOAD_FAST_BORROW", "LOAD_FAST_CHECK", "LOAD_DEREF")
_CONSTANTS = ("LOAD_CONST", "LOAD_SMALL_INT")
_BY_NAME = ("getattr", "hasattr")

_BUILTINS = frozenset(
    (
        "abs",
        "all",
        "any",
        "bool",
        "bytes",
        "callable",
        "chr",
        "complex",
        "dict",
        "divmod",
        "enumerate",
        "filter",
        "float",
        "frozenset",
        "getattr",
        "hasattr",
        "hash",
        "int",
        "isinstance",
        "issubclass",
        "iter",
        "len",
        "list",
        "map",
        "max",
        "min",
        "next",
        "object",
        "ord",
        "pow",
        "property",
        "range",
        "repr",
        "reversed",
        "round",
        "set",
        "slice",
        "sorted",
        "str",
        "sum",
        "super",
        "tuple",
        "type",
        "zip",
        "Ellipsis",
        "NotImplemented",
        *(n for n, x in vars(builtins).items() if isinstance(x, type) and issubclass(x, Exception)),
    )
)
"""Functions and classes that read only their arguments, and have no side effects."""

_SPECIAL = frozenset(("__class__", "__name__", "__qualname__", "__init__", "__call__", "__new__"))
"""Special attributes of Python that lead only to objects which code can also name in other ways."""

_BY_ANY_NAME = frozenset(
    name for name in vars(nn.Module) if not hasattr(Tensor, name) and not name.startswith("__")
) - {"forward", "training", "apply", "_call_impl"}
"""Methods of modules that read or change attributes by names that are not in the code."""

_HOOKS = frozenset(name for name in dir(Tensor) if name.startswith("register_")) | {"retain_grad"}
"""Methods that register a hook on a tensor."""


class CannotWatch(Exception):
    """Raised if a forward reads or changes what cannot be watched; the message names it."""


@dataclass
class Names:
    """Names in some code, and in the functions that it defines.

    Attributes:
        variables: variables of the file, and builtins.
        attributes: attributes of anything.
        tried: attributes that may be missing: ``getattr`` with a default, ``hasattr``.
        tried_on: attributes on whose values these are tried: ``weight`` in
            ``hasattr(m.weight, "x")``.
    """

    variables: set[str] = field(default_factory=set)
    attributes: set[str] = field(default_factory=set)
    tried: set[str] = field(default_factory=set)
    tried_on: set[str] = field(default_factory=set)


@functools.lru_cache(maxsize=512)
def names_of(code: CodeType) -> Names:
    """Return the names that ``code`` reads.

    Raises:
        CannotWatch: the code changes or imports something, or reads attributes without naming them.
    """
    names = Names()
    for each in _nested(code):
        instructions = [x for x in dis.get_instructions(each) if x.opname not in _NOTHING]
        for index, (op, name) in enumerate((x.opname, x.argval) for x in instructions):
            if op in _WRITES and not _fills_new_object(each, instructions, index):
                raise CannotWatch(f"{_WRITES[op]} {name}")
            if op in ("STORE_DEREF", "DELETE_DEREF") and name in code.co_freevars:
                raise CannotWatch(f"changes {name}")
            if op == "LOAD_BUILD_CLASS":
                raise CannotWatch("defines a class")
            if op in _VARIABLES:
                names.variables.add(name)
                if name in _BY_NAME:
                    *owners, tried = _chain_given(name, instructions[index + 1 :])
                    names.tried.add(tried)
                    names.tried_on.update(owners[-1:])
            elif op in _ATTRIBUTES:
                _check_attribute(name)
                names.attributes.add(name)
    return names


def _fills_new_object(code: CodeType, instructions: Sequence[dis.Instruction], index: int) -> bool:
    """Return True if ``__init__`` writes an attribute of the new object."""
    is_init = code.co_name == "__init__" and instructions[index].opname == "STORE_ATTR"
    return is_init and instructions[index - 1].argval == code.co_varnames[0]


def check_builtin(name: str) -> None:
    """Check that a builtin reads only its arguments.

    Raises:
        CannotWatch: it may read or change anything, such as ``vars``.
    """
    if hasattr(builtins, name) and name not in _BUILTINS:
        raise CannotWatch(f"uses {name}")


def _check_attribute(name: str) -> None:
    is_special = name.startswith("__") and name.endswith("__") and name not in _SPECIAL
    if is_special or name in _BY_ANY_NAME or name in _HOOKS:
        raise CannotWatch(f"uses {name}")


def _nested(code: CodeType) -> Iterator[CodeType]:
    """Yield code, and the code of all functions that it defines."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _nested(constant)


def _chain_given(function: str, after: Sequence[dis.Instruction]) -> list[str]:
    """Return the names that ``getattr(x.y.z, "name", ...)`` reads: here y, z and name.

    Args:
        function: ``getattr`` or ``hasattr``.
        after: the instructions that follow the one which loads the function.

    Raises:
        CannotWatch: the name is computed, or the object is not a variable or an attribute.
    """
    chain: list[str] = []
    rest = list(after)
    if rest and rest[0].opname in (*_LOCALS, *_VARIABLES):
        rest.pop(0)
        while rest and rest[0].opname in _ATTRIBUTES:
            chain.append(rest.pop(0).argval)
        name = rest.pop(0) if rest and rest[0].opname == "LOAD_CONST" else None
        while rest and rest[0].opname in (*_CONSTANTS, *_LOCALS, *_VARIABLES, *_ATTRIBUTES):
            rest.pop(0)  # the default of getattr
        is_called = bool(rest) and rest[0].opname.startswith(("CALL", "PRECALL"))
        if name is not None and isinstance(name.argval, str) and is_called:
            _check_attribute(name.argval)
            return [*chain, name.argval]
    raise CannotWatch(f"uses {function} with a name or a default that is computed")
