"""Find all that a forward may read, watch it, and refuse what cannot be watched.

A fused module computes what its forward computed when ``fuse`` verified it. So ``fuse`` first looks
for every object that the forward can reach. It begins with the code of the forward
(:mod:`.code_names`), looks up the names that the code reads in all objects that the code can reach,
and goes on with the code that it finds there. Constants, functions, classes and objects with
attributes are watched: every later forward compares them. A forward that reads anything else (a
list, a tensor, a counter), or that writes an attribute or a variable, is refused. Parameters, and
hooks of inner linear layers, are checked by the patterns.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from enum import Enum
from functools import partial
from types import (
    BuiltinFunctionType,
    CellType,
    CodeType,
    EllipsisType,
    FunctionType,
    GetSetDescriptorType,
    MemberDescriptorType,
    MethodDescriptorType,
    MethodType,
    MethodWrapperType,
    ModuleType,
    NotImplementedType,
    SimpleNamespace,
    WrapperDescriptorType,
)
from typing import Any, NamedTuple

import torch
from torch import nn

from .code_names import CannotWatch, Names, check_builtin, names_of

_MISSING = object()

_CONSTANTS = (
    int,
    float,
    complex,
    bool,
    str,
    bytes,
    type(None),
    slice,
    range,
    EllipsisType,
    NotImplementedType,
    Enum,
    CodeType,
    torch.dtype,
    torch.device,
    torch.layout,
    torch.memory_format,
    torch.Size,
)
"""Types of immutable objects, which are compared by value."""

_COLLECTIONS = (tuple, frozenset)
"""Types of objects that are immutable if their elements are."""

_BUILTIN_CODE = (
    BuiltinFunctionType,
    MethodDescriptorType,
    WrapperDescriptorType,
    MethodWrapperType,
)

_LIBRARIES = (
    "torch",
    "blocktensor",
    "transformers.integrations",
    "builtins",
    "math",
    "operator",
    "typing",
    "collections",
)
"""Files whose functions and classes keep no state of forwards."""

_CONFIGS = "transformers.configuration_utils"
"""The file of the base class of transformers' configs, which have ordinary attributes."""

_METACLASSES = ("abc", "enum", "torch", "typing", "builtins")

_NOT_RUN = frozenset(
    (
        "__init_subclass__",
        "__class_getitem__",
        "__set_name__",
        "__del__",
        "__repr__",
        "__str__",
        "__format__",
        "__dir__",
        "__sizeof__",
        "__setattr__",
        "__delattr__",
        "__getstate__",
        "__setstate__",
        "__reduce__",
        "__reduce_ex__",
        "__deepcopy__",
        "__copy__",
    )
)
"""Special methods that no expression in a forward runs."""

_MAKES_OBJECTS = ("__init__", "__new__", "__post_init__")
"""Special methods that run when an object is created."""


_OF_VALUES = frozenset(name for x in (torch.Tensor, str, tuple, list, dict) for name in dir(x))
"""Names of attributes of tensors, text and collections, which a forward computes."""


class Read(NamedTuple):
    """An attribute that a forward may read, and its value when the forward was verified.

    Attributes:
        holder: the object that has it, or a dictionary of parameters; None for the module itself,
            since a reference would delay its freeing.
    """

    holder: Any
    name: str
    value: Any


_COMPARED = frozenset((int, float, complex, bool, str, bytes, tuple, dict, frozenset))
"""Types whose objects are compared by value: equal objects compute the same."""


def _is_other(now: Any, was: Any) -> bool:
    """Return True if a forward may compute something else with the value ``now``."""
    if type(was) in _COMPARED:
        return type(now) is not type(was) or now != was
    return getattr(now, "__func__", now) is not was  # each read of a method creates a new object


class Reads:
    """All that a forward may read, with the values when the forward was verified.

    Attributes:
        found: the reads; None in a pickled copy.
        are_traced: True if Dynamo can compare and guard all values: it knows no properties.
        names: a description, equal in every process.
    """

    def __init__(self, found: tuple[Read, ...] | None, names: Any = None) -> None:
        self.found = found
        self.are_traced = all(map(_is_traced, found or ()))
        # sorted, because the names in code are a set, whose order differs between processes
        self.names = names or sorted(map(_described, found or ()), key=repr)

    def have_changed(self, module: nn.Module) -> bool:
        """Return True if the forward of ``module`` may compute something else now."""
        if self.found is None:
            return True
        for holder, name, was in self.found:
            if type(holder) is dict:
                now = holder.get(name, _MISSING)
            else:
                now = getattr(module if holder is None else holder, name, _MISSING)
            if now is not was and _is_other(now, was):
                return True
        return False

    def __deepcopy__(self, memo: Any) -> Reads:
        """Return reads of the copied objects: the modules and settings of the copy."""
        if self.found is None:
            return self
        found = (Read(memo.get(id(x), x), name, memo.get(id(y), y)) for x, name, y in self.found)
        return Reads(tuple(found), self.names)

    def __reduce__(self) -> Any:
        return Reads, (None, self.names)


def _described(read: Read) -> Any:
    """Describe a read by its name and its value or qualified name, equally in every process."""
    value = read.value
    if value is _MISSING:
        return read.name, "missing"
    return read.name, _text_of(value)


def _text_of(value: Any) -> Any:
    if isinstance(value, CodeType):
        return value.co_name, value.co_code, value.co_names, *map(_text_of, value.co_consts)
    if isinstance(value, (tuple, frozenset)):
        return type(value).__name__, sorted(map(_text_of, value), key=repr)
    if isinstance(value, dict):
        return sorted((key, _text_of(x)) for key, x in value.items())
    if isinstance(value, _CONSTANTS):
        return repr(value)
    return getattr(value, "__module__", ""), getattr(value, "__qualname__", "")


def _is_traced(read: Read) -> bool:
    """Return True if Dynamo guards the value: it guards no properties and no closures."""
    return not (_is_computed(read.value) or isinstance(read.holder, (CellType, partial)))


def reads_of(module: nn.Module, code: Iterable[Any]) -> tuple[Read, ...]:
    """Return all that the forward of ``module`` may read.

    Args:
        module: a module whose children have no children.
        code: the functions that run in place of its forward, or the forward itself.

    Raises:
        CannotWatch: the forward reads or changes something that cannot be watched.
    """
    search = _Search(module)
    for function in (*code, *(type(x).forward for x in module._modules.values() if x is not None)):
        if not isinstance(function, FunctionType):
            raise CannotWatch("is no function")
        search.add_code(function)
    return search.run()


_HEAP_TYPE = 1 << 9
"""The flag ``Py_TPFLAGS_HEAPTYPE``, which classes that are written in Python have."""


class _Holder(NamedTuple):
    """An object with attributes that a forward can reach.

    Attributes:
        path: how the forward names it: ``config.`` for an attribute of the module, or empty.
    """

    object: Any
    path: str


class _Search:
    """The objects that a forward can reach, and the names of attributes that it reads.

    Every name is looked up in every object, whichever code reads the name.
    """

    def __init__(self, module: nn.Module) -> None:
        self._modules = (module, *(x for x in module._modules.values() if x is not None))
        self._holders: dict[int, _Holder] = {}
        self._names: set[str] = set()
        self._tried: set[str] = set()
        self._found: dict[tuple[int, str], Read] = {}
        self._seen: dict[int, Any] = {}
        for name, inner in module._modules.items():
            if inner is not None:
                self._add_object(inner, f"{name}.")
        self._add_object(module, "")
        kind = written_class(module)
        for holder, name in (
            (kind, "forward"),
            *((type(x), name) for x in self._modules[1:] for name in ("forward", "__call__")),
            *((module, name) for name, x in module._modules.items() if _has_no_parameters(x)),
        ):
            self._watch(holder, name, getattr(holder, name))

    def run(self) -> tuple[Read, ...]:
        """Look up names until there are no new names and no new objects."""
        before = None
        while before != (before := (len(self._holders), len(self._names), len(self._tried))):
            for holder in tuple(self._holders.values()):
                for name in sorted(self._names | self._tried):
                    self._look_up(holder, name)
        missing = self._missing_names()
        for holder in self._holders.values():
            is_torch = isinstance(holder.object, ModuleType) and _is_of_library(holder.object)
            for name in () if is_torch else missing:
                if getattr(holder.object, name, _MISSING) is _MISSING:
                    self._watch(holder.object, name, _MISSING)
        return tuple(self._found.values())

    def _missing_names(self) -> set[str]:
        """Return the names that code may read without an error although they are missing now."""
        held = {name for _, name in self._found}
        of_modules = {name for module in self._modules for name in dir(module)}
        return self._tried | (self._names - held - of_modules - _OF_VALUES)

    def _watch(self, holder: Any, name: str, value: Any) -> None:
        value = getattr(value, "__func__", value)
        of = None if holder is self._modules[0] else holder
        self._found.setdefault((id(holder), name), Read(of, name, value))

    def _look_up(self, holder: _Holder, name: str) -> None:
        """Watch an attribute and go on with its value, if the object or its class has it."""
        owner = holder.object
        if (id(owner), name) in self._found:
            return
        own = getattr(owner, "__dict__", {})
        if isinstance(owner, nn.Module) and name not in own:
            if owner._parameters.get(name, _MISSING) is None:
                self._watch(owner._parameters, name, None)
            own = owner._buffers
        if name in own and name != "training":
            self._admit(owner, name, own[name], holder.path)
        for kind in owner.__mro__[1:] if isinstance(owner, type) else type(owner).__mro__:
            if name not in vars(kind) or _is_of_library(kind):
                continue
            value = vars(kind)[name]
            if isinstance(value, (MemberDescriptorType, GetSetDescriptorType)):  # a slot
                value = getattr(owner, name, _MISSING)
                if not isinstance(owner, type) and value is not _MISSING:
                    self._admit(owner, name, value, holder.path)
                continue
            self._admit(kind, name, value, holder.path)
            if name not in own and name != "forward" and not _is_computed(value):
                self._watch(owner, name, getattr(owner, name))  # it may get its own attribute

    def _admit(self, holder: Any, name: str, value: Any, path: str) -> None:
        """Watch a value, unless patterns check it, and go on with it."""
        if not isinstance(value, nn.Parameter) and not any(value is x for x in self._modules):
            self.add(value, f"{path}{name}", holder)
            self._watch(holder, name, value)

    def add(self, value: Any, label: str, holder: Any = None) -> None:
        """Go on with a value that the forward can read.

        Args:
            value: a constant, code, or an object with attributes.
            label: its name in the forward.
            holder: the object that holds it, if known.

        Raises:
            CannotWatch: the value is of another kind.
        """
        if id(value) in self._seen or isinstance(value, _CONSTANTS):
            return
        self._seen[id(value)] = value
        go_on = next((method for kinds, method in _KINDS if isinstance(value, kinds)), None)
        if go_on is not None:
            go_on(self, value, label)
        elif _is_plain_object(value):
            self._add_object(value, f"{label}.")
        elif not _is_of_library_file(value, holder):
            raise CannotWatch(f"reads {label}, a {type(value).__name__}")

    def _add_collection(self, values: Any, label: str) -> None:
        """Go on with the elements of an immutable collection."""
        for each in values:
            if not isinstance(each, (*_CONSTANTS, *_COLLECTIONS, FunctionType)):
                raise CannotWatch(f"reads {label}, a {type(values).__name__}")
            self.add(each, label)

    def _add_method(self, method: MethodType, label: str) -> None:
        """Go on with a bound method, and with its object."""
        self.add(method.__func__, label)
        if not any(method.__self__ is x for x in self._modules):
            self.add(method.__self__, label)

    def _add_partial(self, function: partial[Any], label: str) -> None:
        """Go on with a function and its arguments."""
        self.add(function.func, label)
        self.add((*function.args, *function.keywords.values()), label)
        self._watch(function, "keywords", dict(function.keywords))

    def _add_function(self, function: FunctionType, label: str) -> None:
        """Go on with a function that the forward can call."""
        if not _is_of_library(function):
            self.add_code(function)
            return
        for name, cell in _cells(function):  # it may wrap another function
            if isinstance(cell.cell_contents, (FunctionType, MethodType)):
                self.add(cell.cell_contents, name)

    def add_code(self, function: FunctionType) -> None:
        """Go on with all that the code of a function reads."""
        self._seen[id(function)] = function
        self._watch(function, "__code__", function.__code__)
        self._watch(function, "__defaults__", function.__defaults__)
        named_defaults = dict(function.__kwdefaults__ or {})
        if named_defaults:
            self._watch(function, "__kwdefaults__", named_defaults)
        for value in (*(function.__defaults__ or ()), *named_defaults.values()):
            self.add(value, f"a default of {function.__qualname__}")
        for name, cell in _cells(function):
            self.add(cell.cell_contents, name)
            if name != "__class__":  # super() finds its class by it
                self._watch(cell, "cell_contents", cell.cell_contents)
        if vars(function):
            self._holders.setdefault(id(function), _Holder(function, f"{function.__qualname__}."))
        names = names_of(function.__code__)
        self._check_parameters(names)
        self._names |= names.attributes
        self._tried |= names.tried
        for name in sorted(names.variables):
            self._add_variable(function, name)

    def _check_parameters(self, names: Names) -> None:
        """Refuse code that reads attributes of a parameter, which others may replace."""
        parameters = [item for module in self._modules for item in module._parameters.items()]
        for name, parameter in parameters:
            own = vars(parameter).keys() if parameter is not None else ()
            if name in names.tried_on or not names.attributes.isdisjoint(own):
                raise CannotWatch(f"reads an attribute of the parameter {name}")

    def _add_variable(self, function: FunctionType, name: str) -> None:
        """Go on with a global variable of a function."""
        variables = function.__globals__
        file = sys.modules.get(variables.get("__name__", ""))
        if getattr(file, "__dict__", None) is not variables:
            raise CannotWatch(f"reads {name} of a file that is not imported")
        if name not in variables:
            check_builtin(name)
            self._watch(file, name, _MISSING)
            return
        value = variables[name]
        if not _is_of_library(function) or isinstance(value, ModuleType):
            self.add(value, f"{variables['__name__']}.{name}", file)
        self._watch(file, name, value)

    def _add_class(self, kind: type, label: str) -> None:
        """Go on with a class that a forward may instantiate."""
        if _is_of_library(kind) or kind in (object, partial):
            return
        if not _is_of(type(kind), _METACLASSES):
            raise CannotWatch(f"reads {label}, which looks up its attributes itself")
        self._holders.setdefault(id(kind), _Holder(kind, f"{label}."))
        if issubclass(kind, nn.Module):
            self._add_methods(kind, f"{label}.", _is_run_by_operators)
        elif any(_is_of_library(base) for base in kind.__mro__[:-1]):  # these may call any of them
            self._add_methods(kind, f"{label}.", lambda name: True)
        else:
            self._add_methods(
                kind, f"{label}.", lambda name: _is_run_by_operators(name) or name in _MAKES_OBJECTS
            )

    def _add_object(self, owner: Any, path: str) -> None:
        """Go on with an object whose attributes a forward may read."""
        self._holders[id(owner)] = _Holder(owner, path)
        self._add_methods(type(owner), path, _is_run_by_operators)

    def _add_methods(self, kind: type, path: str, chosen: Callable[[str], bool]) -> None:
        """Go on with special methods, which code runs without naming them."""
        for each in kind.__mro__:
            if not _is_of_library(each) and each.__module__ != _CONFIGS:
                for name, value in vars(each).items():
                    if isinstance(value, (FunctionType, staticmethod, classmethod)) and chosen(
                        name
                    ):
                        self._admit(each, name, value, path)

    def _add_file(self, file: ModuleType, label: str) -> None:
        """Go on with an imported module."""
        looks_up = "__getattr__" in vars(file) or type(file) is not ModuleType
        if looks_up and not _is_of_library(file):
            raise CannotWatch(f"reads {label}, which looks up its attributes itself")
        self._holders.setdefault(id(file), _Holder(file, f"{file.__name__}."))


_KINDS: tuple[tuple[Any, Callable[[_Search, Any, str], None]], ...] = (
    (_COLLECTIONS, _Search._add_collection),
    (FunctionType, _Search._add_function),
    ((staticmethod, classmethod), lambda search, x, label: search.add(x.__func__, label)),
    (property, lambda search, x, label: search.add(x.fget, label)),
    (MethodType, _Search._add_method),
    (partial, _Search._add_partial),
    (type, _Search._add_class),
    (ModuleType, _Search._add_file),
)
"""Methods by which the search goes on with a value, by its type."""


def written_class(module: nn.Module) -> type[nn.Module]:
    """Return the class of a module before it was fused."""
    kind: type[nn.Module] = getattr(type(module), "_class_before", type(module))
    return kind


def _is_run_by_operators(name: str) -> bool:
    """Return True for the name of a special method that an expression may run."""
    return (
        name.startswith("__") and name.endswith("__") and name not in (*_NOT_RUN, *_MAKES_OBJECTS)
    )


def _has_no_parameters(module: nn.Module | None) -> bool:
    return module is not None and not any(True for _ in module.parameters())


def _cells(function: FunctionType) -> Iterator[tuple[str, CellType]]:
    """Yield the variables of a function's closure that have a value."""
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            cell.cell_contents  # noqa: B018
        except ValueError:  # the cell is empty
            continue
        yield name, cell


def _is_computed(x: Any) -> bool:
    """Return True for an attribute of a class that is a property or another descriptor."""
    return hasattr(type(x), "__get__") and not isinstance(
        x, (FunctionType, staticmethod, classmethod)
    )


def _is_plain_object(x: Any) -> bool:
    """Return True for an object whose whole state is its attributes."""
    if type(x) is SimpleNamespace:
        return True
    make: Any = type(x).__new__
    is_written_in_python = type(x).__flags__ & _HEAP_TYPE and make is object.__new__
    return bool(is_written_in_python) and not isinstance(x, (nn.Module, torch.Tensor))


def _is_of_library_file(value: Any, holder: Any) -> bool:
    """Return True for a value in a module of a library, also for its functions in C."""
    is_held = isinstance(holder, ModuleType) and _is_of_library(holder)
    return is_held or (isinstance(value, _BUILTIN_CODE) and _is_of_library(value))


def _is_of_library(x: Any) -> bool:
    """Return True for a function, class or file of a library that keeps no state of forwards."""
    return _is_of(x, _LIBRARIES)


def _is_of(x: Any, files: tuple[str, ...]) -> bool:
    """Return True for a function, class or module in one of these files or folders."""
    name = _file_of(x)
    return any(name == file or name.startswith(f"{file}.") for file in files)


def _file_of(x: Any) -> str:
    """Return the name of the module that defines a function or class, or of a module itself."""
    if isinstance(x, FunctionType):
        return str(x.__globals__.get("__name__", ""))
    if isinstance(x, ModuleType):
        return x.__name__
    if isinstance(x, type) or x.__module__:
        return str(x.__module__)
    owner = getattr(x, "__self__", None)  # a method that is written in C, such as torch.rsqrt
    owner = owner if isinstance(owner, type) else type(owner)
    return "" if owner.__module__ == "builtins" else str(owner.__module__)
