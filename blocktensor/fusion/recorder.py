"""Run a forward on a twin of its module: record what it reads, refuse what cannot be compared later.

A fused form computes what the forward computed when it was verified: it looks at no flags, and
leaves nothing behind. So a module is fused only if its forward writes nothing, and if all that it
reads can be compared again in every call. Two observers see a value before the forward gets it:

- Twins see every attribute of the module, of the modules in it and of the objects that they hold,
  however it is read, and attributes that are asked for and are missing.
- A trace function sees every Python function before it runs: the variables of its file and of its
  closure that it names, its defaults, and the attributes of files, classes and functions that have
  a name in it. A function to which no name leads does not run.

``Recorder._admit`` decides what a forward may read: constants, code, and objects that can have
twins. Containers, tensors and all other objects may change and stay the same object.
"""

from __future__ import annotations

import builtins
import functools
import gc
import logging
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from enum import Enum
from numbers import Number
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from .code_names import names_of, nested
from .forward_reads import MISSING, Place, Reads, class_of
from .twin import OF_TORCH, Twin, can_have_twin

_LIBRARIES = ("torch", "blocktensor", "transformers.utils", "transformers.configuration_utils")
"""Packages whose functions keep no state that their callers could notice."""

_STDLIB = frozenset(
    (
        *("abc", "builtins", "collections", "contextlib", "copy", "dataclasses", "enum"),
        *("functools", "itertools", "math", "numbers", "operator", "types", "typing", "warnings"),
        *("weakref", "_weakrefset", "_collections_abc", "_operator", "_functools"),
    )
)
"""Packages of Python that lead to no state of the process."""

_BY_ANY_NAME = {"getattr", "hasattr", "setattr", "delattr", "attrgetter", "methodcaller"}
"""Functions that read attributes of names that the code need not contain."""

_LEAD_ANYWHERE = {
    *("globals", "locals", "vars", "dir", "eval", "exec", "compile", "__import__", "__dict__"),
    *("__getattribute__", "__globals__", "__closure__", "__code__", "__builtins__", "f_globals"),
    *("__subclasses__", "f_locals", "f_back"),
}
_OUTLIVE = {
    *("open", "print", "input", "register_hook", "register_prehook"),
    *("register_post_accumulate_grad_hook", "register_multi_grad_hook"),
}
_FORBIDDEN = _LEAD_ANYWHERE | _OUTLIVE
"""Names of what leads to any object, and of what has effects that outlive a forward."""

_CONSTANTS = (
    *(Number, str, bytes, type(None), Enum, range, slice, type(...), type(NotImplemented)),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format, logging.Logger),
)
_BUILT_IN = (
    *(types.BuiltinFunctionType, types.MethodDescriptorType, types.WrapperDescriptorType),
    types.ClassMethodDescriptorType,
)
_METHODS = FunctionType, staticmethod, classmethod

_NOT_OF_FORWARDS = ("__getattribute__", "__getattr__", "__torch_function__", "__torch_dispatch__")
"""Methods that look up attributes, whose results are recorded, and of modes that watch ops."""

_MACHINERY = frozenset(
    getattr(nn.Module, name).__code__
    for name in (
        *("__getattr__", "__setattr__", "__delattr__", "_call_impl", "_wrapped_call_impl"),
        *("_get_backward_hooks", "_get_backward_pre_hooks"),
    )
)
"""Code of torch that looks at a module for its caller. Patterns check hooks."""


class Refused(BaseException):
    """A forward may not be fused. No ``except Exception`` of the forward catches it."""


class Recorder:
    """What the forward of one module reads.

    Attributes:
        reason: why the module cannot be fused; empty if nothing was found.
    """

    def __init__(self, module: nn.Module, tables_of: Callable[[Any], Sequence[str]]) -> None:
        """Record nothing yet.

        Args:
            module: the module.
            tables_of: names the attributes of an object that are all its state, dictionaries of
                functions; none of an object that a forward may not read.
        """
        self.reason = ""
        self._module, self._tables_of = module, tables_of
        self._is_on = False
        self._places: dict[Place, None] = {}
        self._twins: dict[int, Twin] = {}
        """By the ids of originals and of copies."""
        self._with_parameters = set[int]()
        self._functions: dict[CodeType, tuple[FunctionType, Place]] = {}
        """Those to which a name leads."""
        self._holders: dict[int, tuple[Any, Place, bool]] = {}
        """Files, classes and functions that hold attributes; those of twins are marked."""
        self._attributes, self._stores = set[str](), set[str]()
        self._reads_by_any_name = self._reads_classes = False
        self._bases = set[int]()
        """The ids of classes that ``super()`` looks at."""
        self._stored: dict[tuple[int, str], tuple[Any, Place, Any]] = {}
        self._checked = set[CodeType]()

    def reads(self) -> Reads:
        """Return all that was read, with the values that the module has."""
        return Reads.of(self._module, self._places)

    # Twins

    def twin(self) -> Any:
        """Return a new copy of the module. The module itself does not change."""
        self._twins.clear()
        self._with_parameters.clear()
        return self._twin_of(self._module, Place())

    def forward(self, *args: Any) -> Any:
        """Run the forward of the module's class on its latest twin."""
        made = self._twins[id(self._module)].made
        return super(type(made), made).forward(*args)

    def _check_state(self) -> None:
        """Restore what a forward has changed outside of twins.

        Raises:
            Refused: it has changed anything.
        """
        changed = list[str]()
        for (_, name), (holder, place, was) in self._stored.items():
            if vars(holder).get(name, MISSING) is not was:
                delattr(holder, name) if was is MISSING else setattr(holder, name, was)
                changed.append(_shown(place))
        for twin in self._each_twin():
            changed += (
                _shown(twin.place.at(name))
                for name, was, now in twin.changes()
                if self._original(now) is not was
            )
        if changed:
            self._refuse(f"its forward changes {changed[0]}")

    def _each_twin(self) -> list[Twin]:
        return list(dict.fromkeys(self._twins.values()))

    def _original(self, x: Any) -> Any:
        twin = self._twins.get(id(x))
        return x if twin is None else twin.original

    def _twin_of(self, x: Any, place: Place) -> Any:
        if id(x) in self._twins:
            return self._twins[id(x)].made
        twin = Twin(x, place, self)
        self._twins[id(x)] = self._twins[id(twin.made)] = twin
        for at, kind in twin.classes:
            self._hold(kind, at, is_of_twin=True)
        if isinstance(x, nn.Module):
            modules = twin.held["_modules"]
            if any(True for _ in x.parameters()):
                self._with_parameters.add(id(twin.made))
            for name, each in x._modules.items():
                modules[name] = None if each is None else self._twin_of(each, place.at(name))
            at, kind = twin.classes[0]
            self._places[at.at("forward")] = None
            if isinstance(kind.forward, FunctionType):  # also of a class of torch
                self._functions[kind.forward.__code__] = kind.forward, at.at("forward")
            if place.steps:  # a module inside of the module is called
                self._places[at.at("__call__")] = None
        return twin.made

    def read(self, twin: Twin, name: str, value: Any, code: CodeType) -> Any:
        """Return what ``code`` gets for an attribute of a twin."""
        if not self._is_on or code in _MACHINERY:
            return value
        with self._pausing():
            return self._read(twin, name, value, code)

    def missing(self, twin: Twin, name: str, code: CodeType) -> None:
        """Record an attribute that is missing."""
        if self._is_on and code not in _MACHINERY:
            with self._pausing():
                self._places[twin.place.at(name)] = None

    @contextmanager
    def _pausing(self) -> Iterator[None]:
        """Observe nothing that the recorder itself does."""
        self._is_on = False
        try:
            yield
        finally:
            self._is_on = True

    def _read(self, twin: Twin, name: str, value: Any, code: CodeType) -> Any:
        if name == "training":
            return value
        if name == "__class__":
            return class_of(twin.original)
        if name == "__dict__":
            self._refuse_value(value, twin.place.at(name))
        if isinstance(twin.original, nn.Module):
            if value is not None and value is twin.held["_parameters"].get(name):
                return value  # patterns check parameters, and the modules that have some
            if id(value) in self._with_parameters:
                return value
            if value is None and code is nn.Linear.forward.__code__:
                return value
        if twin.place.steps and twin.original is not self._module:
            self._places[twin.place] = None
        place = twin.place.at(name)
        if name not in twin.held:
            found = next((x for x in twin.classes if name in vars(x[1])), None)
            if found is not None:
                at, kind = found
                if hasattr(type(vars(kind)[name]), "__get__") and not _is_library(kind.__module__):
                    self._places[at.at(name)] = None  # where Dynamo looks for methods, too
                if _is_computed(vars(kind)[name]):
                    return value  # from what was recorded
        self._places[place] = None
        return self._admit(value, place, is_given=True)

    # Code

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Observe what is read.

        Raises:
            Refused: it cannot be compared, or something was changed; nothing stays changed.
        """
        trace, collects = sys.gettrace(), gc.isenabled()
        for twin in self._each_twin():
            twin.note_state()
        gc.disable()  # it would run code of others
        self._is_on = True
        sys.settrace(self._before_call)
        try:
            yield
        finally:
            sys.settrace(trace)
            self._is_on = False
            if collects:
                gc.enable()
            self._check_state()
        if self.reason:  # and the forward has caught the exception
            raise Refused(self.reason)

    def _before_call(self, frame: Any, event: str, arg: Any) -> None:
        """Check a function that a name leads to, or that checked code calls."""
        code = frame.f_code
        if not self._is_on or code in self._checked or code.co_name in _NOT_OF_FORWARDS:
            return
        file = _file_of(frame)
        if code not in self._functions:
            caller = frame.f_back
            if _is_library(file) or caller is None or caller.f_code not in self._checked:
                return  # libraries call others
            x = frame.f_globals.get(code.co_name)
            if isinstance(x, FunctionType) and x.__code__ is code:
                self._know(x, Place(file, (code.co_name,)))
        if code in self._functions:
            self._places[self._functions[code][1]] = None
            self._check(*self._functions[code])
        elif not _is_stdlib(file):
            self._refuse(f"its forward runs {file}.{code.co_name}, to which no name leads")
        elif _root(file) not in _STDLIB:
            self._refuse(f"its forward runs {file}.{code.co_name}")

    def _know(self, x: Any, place: Place) -> None:
        """Remember a function to which a name leads: it is checked if it runs."""
        if isinstance(x, property):
            for name in ("fget", "fset", "fdel"):
                self._know(getattr(x, name), place.at(name))
        elif isinstance(x, functools.cached_property):
            self._know(x.func, place.at("func"))
        elif isinstance(x, classmethod):
            self._know(x.__func__, place.at("__func__"))
        elif isinstance(x, staticmethod):
            self._know(x.__func__, place)
        elif isinstance(x, FunctionType):
            if not (_is_library(_file_of(x)) or _is_stdlib(_file_of(x))):
                self._functions.setdefault(x.__code__, (x, place))
                return
            for index, cell in enumerate(x.__closure__ or ()):  # of a decorator, perhaps
                self._know(_content_of(cell), place.in_cell(index))

    def _check(self, function: FunctionType, place: Place) -> None:
        """Admit all that a function names."""
        code, file, names = function.__code__, _file_of(function), names_of(function.__code__)
        self._checked.update(nested(code))
        self._places[place.at("__code__")] = None
        if _is_library(file):
            for chain in sorted(names.chains):
                self._follow(function, file, chain)
            return
        if getattr(sys.modules.get(file), "__dict__", None) is not function.__globals__:
            self._refuse(f"its forward runs {file}.{code.co_name}, whose file is not imported")
        if names.outer:
            self._refuse(f"its forward changes {min(names.outer)}")
        if names.imports:
            self._refuse(f"its forward imports {min(names.imports)}")
        all_names = names.attributes.union(*names.chains)
        if forbidden := all_names & _FORBIDDEN:
            self._refuse(f"its forward uses {min(forbidden)}")
        for name in ("__defaults__", "__kwdefaults__"):
            self._admit_all(getattr(function, name) or (), place.at(name))
        for index, cell in enumerate(function.__closure__ or ()):
            at = place.in_cell(index)
            self._places[at] = None
            x = self._admit(_content_of(cell), at, shown=code.co_freevars[index])
            if code.co_freevars[index] == "__class__" and ("super",) in names.chains:
                self._bases.update(map(id, x.__mro__))
        for chain in sorted(names.chains):
            self._follow(function, file, chain)
        self._hold(function, place)
        self._attributes |= names.attributes
        self._stores |= names.stores
        self._reads_by_any_name |= bool(all_names & _BY_ANY_NAME)
        self._reads_classes |= ("type",) in names.chains or "__class__" in names.attributes
        self._check_holders()

    def _follow(self, function: FunctionType, file: str, chain: tuple[str, ...]) -> None:
        """Admit a variable of a file, or an attribute of a file that is one."""
        place, variables = Place(file, chain), function.__globals__
        *before, name = chain
        if not before:
            is_exception = isinstance(getattr(builtins, name, None), type) and name != name.lower()
            if name in variables or not (name == "super" or is_exception):
                self._places[place] = None  # the file may get a variable of a builtin's name
            if name in variables and not _is_library(file):
                self._admit(variables[name], place)
            return
        holder = functools.reduce(
            lambda x, name: vars(x).get(name) if isinstance(x, ModuleType) else None,
            before[1:],
            variables.get(before[0]),
        )
        if isinstance(holder, ModuleType) and name in vars(holder):
            self._places[place] = None
            self._know(vars(holder)[name], place)

    def _hold(self, holder: Any, place: Place, is_of_twin: bool = False) -> None:
        """Let :meth:`_check_holders` look at a file, a class or a function."""
        file = holder.__name__ if isinstance(holder, ModuleType) else str(holder.__module__)
        if id(holder) in self._holders or _is_library(file) or _is_stdlib(file):
            return
        self._holders[id(holder)] = holder, place, is_of_twin
        for name, x in vars(holder).items() if isinstance(holder, type) else ():
            if name not in _NOT_OF_FORWARDS:
                self._know(x, place.at(name))

    def _check_holders(self) -> None:
        """Admit all attributes of files, classes and functions that have a name in code."""
        done = 0
        while done < len(self._holders):  # more are found on the way
            holder, place, is_of_twin = list(self._holders.values())[done]
            done += 1
            held = dict(vars(holder))
            if is_of_twin and not (self._reads_classes or id(holder) in self._bases):
                continue
            for name in self._stores:
                before = holder, place.at(name), held.get(name, MISSING)
                self._stored.setdefault((id(holder), name), before)
            if self._reads_by_any_name and not isinstance(holder, FunctionType):
                if self._reads_classes or not is_of_twin:
                    self._refuse(f"its forward may read any attribute of {holder.__name__}")
            for name in sorted(self._attributes & held.keys()):
                at = place.at(name)
                if at not in self._places:
                    self._places[at] = None
                    self._know(held[name], at)
                    if not hasattr(type(held[name]), "__get__"):
                        self._admit(held[name], at)
        for twin in self._each_twin():  # in lines that did not run
            state = vars(twin.original) if isinstance(twin.original, nn.Module) else {}
            for name in self._attributes & state.keys() - OF_TORCH:
                if isinstance(state[name], _CONSTANTS):
                    self._places[twin.place.at(name)] = None

    # Values

    def _admit_all(self, values: Any, place: Place) -> None:
        """Admit the values of a tuple or a dictionary, which is compared as a whole."""
        if values:
            self._places[place] = None
        for key, x in values.items() if isinstance(values, dict) else enumerate(values):
            self._admit(x, place.at(("item", key)))

    def _admit(self, x: Any, place: Place, is_given: bool = False, shown: str = "") -> Any:
        """Return a value that the forward may read, or its twin.

        Args:
            x: the value.
            place: where the forward reads it.
            is_given: the forward gets what this returns, and not ``x``.
            shown: the name of the value in a reason, if the place does not have it.

        Raises:
            Refused: the value cannot be compared later.
        """
        if id(x) in self._twins and is_given:
            return self._twins[id(x)].made
        if isinstance(x, FunctionType):
            self._know(x, place)
            self._hold(x, place)
        elif isinstance(x, MethodType):
            self._know(x.__func__, place.at("__func__"))
            owner = self._admit(x.__self__, place.at("__self__"), is_given, shown)
            return x if owner is x.__self__ else MethodType(x.__func__, owner)
        elif isinstance(x, type) and _is_constant(x):
            self._hold(x, place)
            for name, each in vars(x).items() if issubclass(x, torch.autograd.Function) else ():
                self._know(each, place.at(name))  # its backward may run in a thread of torch
                if isinstance(each, (FunctionType, staticmethod)) and not _is_library(x.__module__):
                    self._check(getattr(each, "__func__", each), place.at(name))
        elif isinstance(x, ModuleType) and _is_constant(x):
            self._hold(x, place)
        elif type(x) is functools.partial:
            self._admit_all(x.args, place.at("args"))
            self._admit_all(x.keywords, place.at("keywords"))
            self._places[place.at("func")] = None
            function = self._admit(x.func, place.at("func"), is_given, shown)
            return x if function is x.func else functools.partial(function, *x.args, **x.keywords)
        elif tables := self._tables_of(x):
            self._places.update((place.at(name), None) for name in tables)
            for index, kind in enumerate(class_of(x).__mro__):
                self._hold(kind, place.at(("class", index)), is_of_twin=True)
        elif is_given and can_have_twin(x):
            return self._twin_of(x, place)
        elif not _is_constant(x):
            self._refuse_value(x, place, shown)
        return x

    def _refuse_value(self, x: Any, place: Place, shown: str = "") -> NoReturn:
        self._refuse(f"its forward reads {shown or _shown(place)}, a {type(x).__name__}")

    def _refuse(self, reason: str) -> NoReturn:
        self.reason = self.reason or reason
        raise Refused(self.reason)


def _is_constant(x: Any) -> bool:
    """Return True for what stays as it is as long as it is the same object."""
    if type(x) in (tuple, frozenset, torch.Size):
        return all(map(_is_constant, x))
    if isinstance(x, (type, ModuleType, *_BUILT_IN)):
        owner = getattr(x, "__self__", None)
        file = x.__name__ if isinstance(x, ModuleType) else str(x.__module__)
        is_free = owner is None or isinstance(owner, (type, ModuleType))
        return is_free and (not _is_stdlib(file) or _root(file) in _STDLIB)
    if isinstance(x, FunctionType):
        return _is_library(_file_of(x))
    if isinstance(x, functools._lru_cache_wrapper):
        return _is_library(str(x.__module__))
    if type(x) in _CONSTANTS or isinstance(x, _CONSTANTS):
        return True
    of_torch = _is_library(type(x).__module__) or _root(type(x).__module__) == "typing"
    return of_torch and callable(x) and not isinstance(x, (Tensor, nn.Module))


def _is_computed(x: Any) -> bool:
    """Return True for an attribute of a class that code computes, such as a property."""
    is_held = isinstance(x, (*_METHODS, types.MemberDescriptorType))
    return hasattr(type(x), "__get__") and not is_held


def _root(file: str) -> str:
    return file.partition(".")[0]


def _is_library(file: str) -> bool:
    return any(file == x or file.startswith(f"{x}.") for x in _LIBRARIES)


def _is_stdlib(file: str) -> bool:
    return _root(file) in sys.stdlib_module_names and file != "__main__"


def _file_of(x: Any) -> str:
    """Return the name of the Python module of a function or of a frame."""
    variables = x.__globals__ if isinstance(x, FunctionType) else x.f_globals
    return str(variables.get("__name__"))


def _content_of(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # it is empty
        return None


def _shown(place: Place) -> str:
    """Return the name of a place for a reason."""
    names = [step for step in place.steps if isinstance(step, str)]
    return ".".join((place.file, *names) if place.file else names)
