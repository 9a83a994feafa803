"""Tests of Triton kernels without a GPU: a process in which Triton interprets them on the CPU.

Triton decides when it is imported whether ``@triton.jit`` compiles or interprets: so kernels run in
a process of their own, which all tests share. Gluon has no interpreter.

Triton 3.6 interprets some steps in other ways than a GPU computes them. Here they are mended: casts
between floats round to nearest even, to e4m3 with saturation (Triton's lose the carry of a rounding
and cut bf16), matrices in bf16 multiply, ``fma`` rounds once, and PTX runs
(``tests/support/ptx.py``). What remains is the order of sums, and the last bits of ``exp`` and
``log``.
"""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from blocktensor.ops.runtime.launch import Launch, Rows
from tests.support import numeric, ptx

TIMEOUT = 240.0
"""Seconds that a test may take, imports on two busy cores included."""

Test = Callable[..., None]


def interpreted(function: Test) -> Test:
    """Make a test of a function that runs where Triton interprets kernels, on CPU tensors.

    Its arguments are those of a test, and travel to another process.
    """

    @functools.wraps(function)
    def test(**given: Any) -> None:
        pytest.importorskip("triton")
        try:
            _process().submit(_run, test, given).result(TIMEOUT)
        except BrokenProcessPool:
            _process.cache_clear()
            raise

    return test


@functools.cache
def _process() -> ProcessPoolExecutor:
    """The process, which starts with the first task and ends with the tests."""
    pool = ProcessPoolExecutor(1, get_context("spawn"), _prepare)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")
        pool.submit(os.getpid).result(TIMEOUT)
    return pool


def _run(test: Test, given: dict[str, Any]) -> None:
    inspect.unwrap(test)(**given)


# In the process


def _prepare() -> None:
    from triton.runtime import interpreter

    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)  # as conftest.py: fresh memory is full of NaN
    np.seterr(all="ignore")  # of numbers that a GPU takes without a word, too
    patch = pytest.MonkeyPatch()
    patch.setattr(Launch, "__call__", _launch)
    patch.setattr(interpreter, "_convert_float", _convert)
    patch.setattr(interpreter, "_patch_lang", _patched_once(interpreter._patch_lang))
    builder = interpreter.InterpreterBuilder
    for name in ("create_masked_load", "create_masked_store"):
        patch.setattr(builder, name, _checked(getattr(builder, name)))
    patch.setattr(builder, "create_dot", _dot(builder.create_dot))
    patch.setattr(builder, "create_fma", _fma)
    patch.setattr(builder, "create_inline_asm", _inline_asm)


_patched: set[int] = set()
"""The modules of Triton's language that are patched for the running kernel."""


def _patched_once(patch_language: Callable[..., Any]) -> Callable[..., Any]:
    """Patch the language once for a kernel: Triton does so again in each call of a function."""
    from triton import language
    from triton.runtime import interpreter

    def patch(function: Any) -> Any:
        seen = {id(x) for x in function.__globals__.values() if x is language or x is language.core}
        if seen <= _patched:
            return interpreter._LangPatchScope()
        _patched.update(seen)
        return patch_language(function)

    return patch


_MARGIN = 4096
"""Bytes between the tensors of a kernel, at least."""

_places: Any = (np.zeros(0, np.uint64), np.zeros(0, np.uint64))
"""Where the memory of the tensors of the running kernel begins, in order, and where it ends."""


def _launch(self: Launch) -> None:
    """Run the kernel on copies of its tensors, each in memory of its own."""
    global _places
    if self.grid[0] == 0:
        return
    copies: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
    args = [int(x) if type(x) is Rows else x for x in self.args]
    for i, x in enumerate(args):
        if isinstance(x, torch.Tensor):
            storage = x.untyped_storage()
            if storage.data_ptr() not in copies:
                whole = torch.empty(0, dtype=torch.uint8).set_(storage)
                wide = torch.zeros(len(whole) + 2 * _MARGIN, dtype=torch.uint8)
                wide[_MARGIN:-_MARGIN] = whole
                copies[storage.data_ptr()] = whole, wide
            _, wide = copies[storage.data_ptr()]
            place = x.storage_offset() + _MARGIN // x.itemsize
            args[i] = x.new_empty(0).set_(wide.untyped_storage(), place, x.shape, x.stride())
    places = sorted((wide.data_ptr() + _MARGIN, len(whole)) for whole, wide in copies.values())
    starts, sizes = np.array(places, np.uint64).T
    _places = starts, starts + sizes
    _patched.clear()
    self.kernel[self.grid](*args, **self.constants)
    for whole, wide in copies.values():
        whole.copy_(wide[_MARGIN:-_MARGIN])


def _checked(access: Callable[..., Any]) -> Callable[..., Any]:
    """Make a load or a store fail where it leaves the memory of the kernel's tensors.

    A GPU may stop there, also if the values that it reads are not used.
    """

    def checked(builder: Any, pointers: Any, *rest: Any, **options: Any) -> Any:
        mask = rest[0] if access.__name__ == "create_masked_load" else rest[1]
        mask.data = mask.data.astype(bool)  # `&` makes integers
        at = pointers.data[np.broadcast_to(mask.data, pointers.data.shape)]
        starts, ends = _places
        of = np.searchsorted(starts, at, "right").astype(np.int64) - 1
        size = np.uint64(pointers.get_element_ty().primitive_bitwidth // 8)
        inside = (of >= 0) & (at + size <= ends[of])
        assert inside.all(), f"{access.__name__}: {(~inside).sum()} of {at.size} outside of tensors"
        return access(builder, pointers, *rest, **options)

    return checked


def _torch_dtype(of_triton: Any) -> torch.dtype:
    names = {"fp8e4nv": "float8_e4m3fn", "bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
    made: torch.dtype = getattr(torch, names[of_triton.name])
    return made


def _convert(x: np.ndarray, source: Any, target: Any, rounding: Any) -> np.ndarray:
    """Round the numbers whose bits are ``x``; return bits."""
    bits = {8: np.int8, 16: np.int16, 32: np.int32}
    given = torch.from_numpy(np.array(x).view(bits[source.primitive_bitwidth]))
    values = given.view(_torch_dtype(source))
    if target.name == "fp8e4nv":
        return numeric.e4m3_bytes(values.double().numpy())
    made = values.to(_torch_dtype(target)).view(getattr(torch, f"int{target.primitive_bitwidth}"))
    return made.numpy().view(f"uint{target.primitive_bitwidth}")


def _dot(dot: Callable[..., Any]) -> Callable[..., Any]:
    """Multiply matrices in bf16 as fp32: Triton would multiply their bits."""
    import triton.language as tl
    from triton.runtime.interpreter import TensorHandle

    def wide(x: Any) -> Any:
        if x.dtype.scalar.name != "bf16":
            return x
        made = torch.from_numpy(np.array(x.data).view(np.int16)).view(torch.bfloat16).float()
        return TensorHandle(made.numpy(), tl.float32)

    return lambda builder, a, b, *rest: dot(builder, wide(a), wide(b), *rest)


def _fma(builder: Any, x: Any, y: Any, z: Any) -> Any:
    from triton.runtime.interpreter import TensorHandle

    product = x.data.astype(np.float64) * y.data  # exact, as those of fp32 numbers are
    return TensorHandle((product + z.data).astype(np.float32), z.dtype.scalar)


def _inline_asm(
    builder: Any,
    code: str,
    constraints: str,
    given: Sequence[Any],
    types: Any,
    pure: bool,
    pack: int,
) -> Any:
    from triton.runtime.interpreter import TensorHandle

    like = given[0].data
    words = [np.ascontiguousarray(x.data).reshape(-1).view(ptx.U32) for x in given]
    pairs = {"bf16x2": torch.bfloat16, "f16x2": torch.float16}
    dtype = next((kind for name, kind in pairs.items() if name in code), torch.float32)
    made = ptx.run(code, words, dtype).view(like.dtype).reshape(like.shape)
    return SimpleNamespace(get_result=lambda _: TensorHandle(made, given[0].dtype.scalar))
