"""Complete the overrides of products: handle the options that all products share.

``out=``, ``out_dtype=`` and products that are added in place come down to the product that returns
a new tensor. A product of a weight and itself without gradients, as optimizers compute it, is in
high precision.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..ops import checks
from ..tensor.base import FP8Base, MasterBase

_IN_PLACE = {Tensor.addmm_: torch.addmm, Tensor.baddbmm_: torch.baddbmm}
"""Products that are added in place, and those that return the sum."""

_ADDING = {
    *_IN_PLACE,
    *(torch.addmm, torch.baddbmm, torch.addbmm, torch.addr),
    *(Tensor.addmm, Tensor.baddbmm, Tensor.addbmm, Tensor.addr, Tensor.addbmm_, Tensor.addr_),
}
"""Products that are added to their first argument."""

_OWN = {
    *_ADDING,
    *(torch.mm, torch.mv, torch.matmul, torch.bmm, torch.einsum, torch.tensordot, torch.inner),
    *(torch.chain_matmul, torch.linalg.matmul, torch.linalg.multi_dot, F.linear),
    *(Tensor.mm, Tensor.mv, Tensor.matmul, Tensor.bmm, Tensor.inner),
    *(Tensor.__matmul__, Tensor.__rmatmul__),
}
"""Products that an optimizer may compute of a weight and itself."""


def in_all_forms(func: Any, override: Callable[..., Any]) -> Callable[..., Any]:
    """Return the override of a product, with the options of ``func`` and its high precision case.

    Args:
        func: a torch function.
        override: takes its arguments but ``out`` and ``out_dtype``, and returns a new tensor.
    """
    is_adding, may_be_own = func in _ADDING, func in _OWN

    def run(*args: Any, **kwargs: Any) -> Any:
        if kwargs and kwargs.get("out") is not None:
            return _into(func, args, **kwargs)
        if kwargs and kwargs.get("out_dtype") is not None:
            return _in_dtype(func, args, **kwargs)
        if is_adding or (may_be_own and not torch.is_grad_enabled()):
            factors = _factors(is_adding, args, kwargs)
            if _is_one_weight(factors):
                args, kwargs = torch.utils._pytree.tree_map(_readable, (args, kwargs))
                return func(*args, **kwargs)
            if is_adding and not factors:  # it is added to a weight
                with torch._C.DisableTorchFunctionSubclass():
                    return func(*args, **kwargs)
        return override(*args, **kwargs)

    return run


def _factors(is_adding: bool, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[FP8Base]:
    """Return the FP8 factors of a product, without the term it is added to (a LoRA's base)."""
    if is_adding:
        args, kwargs = args[1:], {name: x for name, x in kwargs.items() if name != "input"}
    lists = [x if isinstance(x, (list, tuple)) else (x,) for x in (*args, *kwargs.values())]
    return [x for operands in lists for x in operands if isinstance(x, FP8Base)]


def _is_one_weight(factors: list[FP8Base]) -> bool:
    """Return True for a product, without gradients, of a trainable weight with itself.

    Such a product is an optimizer's, and no layer's: it runs in high precision.
    """
    if len(factors) < 2 or torch.is_grad_enabled():
        return False
    weights = [x for x in factors if isinstance(x, MasterBase)]
    return len(weights) == len(factors) and all(x.counted is weights[0].counted for x in weights)


def _readable(x: Any) -> Any:
    return x.readable if isinstance(x, MasterBase) else x


def _into(func: Any, args: tuple[Any, ...], *, out: Tensor, **kwargs: Any) -> Tensor:
    """Compute ``func(..., out=out)``.

    Raises:
        RuntimeError: with gradients, as torch.
        TypeError, ValueError: another dtype, or another shape unless ``out`` is empty.
    """
    given = [x for x in torch.utils._pytree.tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
    name = getattr(func, "__name__", func)
    if torch.is_grad_enabled() and any(x.requires_grad for x in (*given, out)):
        raise RuntimeError(
            f"{name}(..., out=...) has no gradient, and one of its arguments requires one: use the "
            f"result, or run it under torch.no_grad()"
        )
    made: Tensor = func(*args, **kwargs)
    if out.dtype != made.dtype:
        raise TypeError(f"{name}(..., out=...) makes {made.dtype}, and out has {out.dtype}")
    if out.shape != made.shape:
        if out.numel():
            raise ValueError(
                f"{name}(..., out=...) makes {list(made.shape)}, and out has {list(out.shape)}: "
                f"expected one of them, or an empty tensor"
            )
        out.resize_(made.shape)
    return out.copy_(made)


def _in_dtype(func: Any, args: tuple[Any, ...], *, out_dtype: torch.dtype, **kwargs: Any) -> Tensor:
    """Compute ``func(..., out_dtype=out_dtype)``: operands of that dtype have the same casts."""
    checks.gemm_output(out_dtype)

    def converted(x: Any) -> Any:
        return x.to(out_dtype) if isinstance(x, Tensor) and x.is_floating_point() else x

    args, kwargs = torch.utils._pytree.tree_map(converted, (args, kwargs))
    made: Tensor = func(*args, **kwargs)
    return made


def _added_in_place(func: Any) -> Callable[..., Tensor]:
    def run(self: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return self.copy_(func(self, *args, **kwargs))

    return run


IN_PLACE: dict[Any, Callable[..., Any]] = {
    in_place: _added_in_place(func) for in_place, func in _IN_PLACE.items()
}
"""Overrides of the products that are added in place."""


def plus(product: Tensor, term: Tensor, beta: Any, alpha: Any) -> Tensor:
    """Return ``beta * term + alpha * product``; a ``beta`` of 0 ignores nan and inf in ``term``."""
    term = term.nan_to_num(0, 0, 0) if beta == 0 else term
    return product.mul(alpha).add(term, alpha=beta)
