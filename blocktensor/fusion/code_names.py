"""The names that compiled Python code reads and writes."""

from __future__ import annotations

import dis
import functools
from dataclasses import dataclass, field
from types import CodeType

_GLOBALS = {"LOAD_GLOBAL", "LOAD_NAME"}
_ATTRIBUTES = {"LOAD_ATTR", "LOAD_METHOD", "LOAD_SUPER_ATTR", "IMPORT_FROM"}
_STORES = {"STORE_ATTR", "DELETE_ATTR"}
_OUTER = {"STORE_GLOBAL", "DELETE_GLOBAL", "STORE_DEREF", "DELETE_DEREF"}


@dataclass
class Names:
    """Names in some code, and in functions that it defines.

    Attributes:
        chains: variables of the file, each with the attributes that are read from it directly:
            ``("torch", "float32")`` of ``torch.float32``.
        attributes: names of all attributes that are read or written.
        stores: names of attributes that are written.
        outer: names of variables that are written, of the file or of a closure.
        imports: names of files that are imported.
    """

    chains: set[tuple[str, ...]] = field(default_factory=set)
    attributes: set[str] = field(default_factory=set)
    stores: set[str] = field(default_factory=set)
    outer: set[str] = field(default_factory=set)
    imports: set[str] = field(default_factory=set)


def nested(code: CodeType) -> list[CodeType]:
    """Return code, and the code of all functions that it defines."""
    inner = [x for x in code.co_consts if isinstance(x, CodeType)]
    return [code, *(x for each in inner for x in nested(each))]


@functools.lru_cache(maxsize=512)
def names_of(code: CodeType) -> Names:
    """Return the names in ``code``."""
    made = Names()
    for each in nested(code):
        chain: tuple[str, ...] = ()
        for instruction in dis.get_instructions(each):
            op, name = instruction.opname, instruction.argval
            if op in _GLOBALS:
                chain = (name,)
            elif op in _ATTRIBUTES and chain:
                chain = (*chain, name)
            elif op not in ("PUSH_NULL", "EXTENDED_ARG", "CACHE"):
                chain = ()
            if chain:
                made.chains.add(chain)
            if op in _ATTRIBUTES | _STORES:
                made.attributes.add(name)
            if op in _STORES:
                made.stores.add(name)
            if op in _OUTER and not (op.endswith("DEREF") and name not in code.co_freevars):
                made.outer.add(name)
            if op == "IMPORT_NAME":
                made.imports.add(name)
    return made
