"""A run of a model that leaves it as it was: gradients, caches, buffers, hooks, random numbers."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import torch
from torch import Tensor, nn

from ...model.weights import fp8_part
from ...tensor.fp8_tensor import BlockwiseFP8Tensor
from ...tensor.weight import BlockwiseFP8Weight
from ...tensor.weight_cache import FP8Cache


@contextmanager
def left_as_it_is(model: nn.Module) -> Iterator[None]:
    """Restore, at the end, what a forward and a backward change in ``model``.

    That is gradients and ``main_grad`` buffers, the FP8 forms that weights hold, buffers, training
    mode, and torch's random numbers. Hooks on parameters do not run. DDP does not reduce gradients;
    FSDP2 does, and frees them. Its weights are sharded at the end.
    """
    with ExitStack() as stack:
        # named, since torch warns where there are several
        devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
        stack.enter_context(torch.random.fork_rng(devices))
        stack.enter_context(_sharded(model))
        for module in model.modules():
            stack.callback(setattr, module, "training", module.training)
            saved = [(name, x, _copy(x)) for name, x in module._buffers.items()]
            stack.callback(_restore_buffers, module, saved)
            if isinstance(module, nn.parallel.DistributedDataParallel):
                stack.enter_context(module.no_sync())
        for parameter in model.parameters():
            _set_aside_gradient(stack, parameter)
            fp8 = fp8_part(parameter)
            if isinstance(fp8, BlockwiseFP8Weight):
                _set_aside_cache(stack, fp8)
                if "main_grad" in vars(parameter):  # of a DTensor, which its to_local() reads
                    _set_aside_main_grad(stack, parameter)
            elif isinstance(fp8, BlockwiseFP8Tensor):  # may come to keep a columnwise form
                for name in ("columnwise_data", "columnwise_scale"):
                    stack.callback(setattr, fp8, name, getattr(fp8, name))
        # casts of weights, which would be used again without their graphs
        stack.callback(torch.clear_autocast_cache)
        yield


def _set_aside_gradient(stack: ExitStack, parameter: nn.Parameter) -> None:
    """Give a parameter no gradient and no hooks until ``stack`` ends."""
    stack.callback(setattr, parameter, "grad", parameter.grad)
    parameter.grad = None
    for hooks in (parameter._backward_hooks, parameter._post_accumulate_grad_hooks):
        if hooks:
            stack.callback(hooks.update, dict(hooks))
            hooks.clear()  # autograd reads this dictionary


def _set_aside_cache(stack: ExitStack, weight: BlockwiseFP8Weight) -> None:
    """Give a weight another cache, with a ``main_grad`` of its own if it has one."""
    cache, main_grad = weight.cache, weight.main_grad
    stack.callback(setattr, weight, "cache", cache)
    weight.cache = FP8Cache(cache.master, cache.recipe)
    if main_grad is not None:
        weight.main_grad = torch.zeros_like(main_grad)


def _set_aside_main_grad(stack: ExitStack, parameter: Any) -> None:
    main_grad = parameter.main_grad
    stack.callback(setattr, parameter, "main_grad", main_grad)
    parameter.main_grad = None if main_grad is None else torch.zeros_like(main_grad)


def _copy(buffer: Tensor | None) -> Tensor | None:
    return None if buffer is None else buffer.detach().clone()


def _restore_buffers(
    module: nn.Module, saved: list[tuple[str, Tensor | None, Tensor | None]]
) -> None:
    module._buffers.clear()
    for name, buffer, values in saved:
        module._buffers[name] = buffer
        # a write would invalidate graphs that were made before
        if buffer is not None and values is not None and not _same(buffer, values):
            with torch.no_grad():
                buffer.copy_(values)


def _same(a: Tensor, b: Tensor) -> bool:
    return a.is_meta or torch.equal(a, b)


@contextmanager
def _sharded(model: nn.Module) -> Iterator[None]:
    """Free what FSDP2 has gathered, before and after: a root keeps it by default."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    modules: list[Any] = []
    if fsdp is not None:
        modules = [module for module in model.modules() if isinstance(module, fsdp.FSDPModule)]

    def reshard() -> None:
        for module in modules:
            module.reshard()

    reshard()
    try:
        yield
    except BaseException:
        for module in modules:
            # raised by all but roots; by roots that have not run, and before torch 2.13
            with suppress(RuntimeError, AttributeError):
                module.reset_iter_state()
        raise
    finally:
        reshard()
