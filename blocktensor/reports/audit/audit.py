"""What ran in FP8 and what did not: every matrix product of one forward and backward."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields, is_dataclass
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd import set_multithreading_enabled
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from ...model.names import is_module
from ...model.running_module import ModuleTracker, Place
from ...ops.checks import HIGH_PRECISION
from ...ops.formats import named
from .products import Product, columnwise_data, factors, hides_products, product_of
from .report import BY_RECIPE, FP8, IN_SQUARES, AuditedProduct, AuditReport
from .state import left_as_it_is
from .weights import WeightMemory


def audit(model: nn.Module, /, *args: Any, **kwargs: Any) -> AuditReport:
    """Run one forward and backward, and report every matrix product with its precision.

    The backward is that of ``output.loss``, if there is one, else of the sum of all floating-point
    outputs; none runs under ``torch.no_grad()`` or where nothing requires a gradient. For another
    loss use :func:`audit_step`.

    A product that should have been FP8 and was not is marked: one that reads the master of an FP8
    weight, a view or a copy of it, values computed from it, or the dequantized bytes.

    The run computes the bits that it computes outside of an audit, and the model is left as it was,
    also if the run raises: gradients, ``main_grad``, FP8 forms, buffers, training mode, torch's
    random numbers. Hooks on parameters do not run. Regions under ``torch.compile`` run in eager
    mode. In a process group, every rank must call it; the report is that of the calling rank. Under
    FSDP2, call it between steps, not while gradients are accumulated without reduction. Weight
    gradients that ``Recipe(wgrad_input="high_precision")`` asks for are labelled, not marked.

    Args:
        model: any module, converted or not.
        args, kwargs: of its forward. None of them is an option of ``audit``.

    Returns:
        The report; ``print(report)`` shows it as a table.
    """
    is_module(model, "audit")
    args, kwargs = tree_map_only(Tensor, _detached, (args, kwargs))

    def step() -> None:
        loss = _loss_of(model(*args, **kwargs))
        if loss is not None:
            loss.backward()

    return audit_step(model, step)


def audit_step(model: nn.Module, step: Callable[[], object]) -> AuditReport:
    """Audit whatever ``step()`` runs: any loss, several forwards and backwards.

    Args:
        model: the modules that products are attributed to, and that are left as they were.
        step: is called once. It may run any forward and backward, but no optimizer: what it writes
            to parameters stays.
    """
    is_module(model, "audit_step")
    tracker, weights = ModuleTracker(model), WeightMemory(model)
    with (
        left_as_it_is(model),
        torch.compiler.set_stance("force_eager"),
        set_multithreading_enabled(False),  # autograd's sequence numbers are those of one thread
        tracker,
        _Products(tracker, weights) as products,
    ):
        step()
    return AuditReport(tuple(products.entries), tuple(products.notes()))


_NO_RULES: Any = Tensor.__torch_dispatch__

_GATHERS: Any = torch.ops._c10d_functional.all_gather_into_tensor_coalesced.default
"""By which tensor parallel linears gather; DTensor and FSDP2 have other ops."""


class _Products(TorchDispatchMode):
    """Makes an entry for every product that runs."""

    supports_higher_order_operators = True  # flex attention is one

    def __init__(self, tracker: ModuleTracker, weights: WeightMemory) -> None:
        super().__init__()
        self.entries: list[AuditedProduct] = []
        self._tracker, self._weights = tracker, weights
        self._recorded_by: dict[int, AuditedProduct] = {}  # an autograd node, by its number
        self._columnwise: WeakValueDictionary[int, Tensor] = WeakValueDictionary()  # by id
        self._hidden: dict[str, None] = {}
        self._sent: dict[str, None] = {}  # modules whose tokens travel in high precision

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if any(issubclass(kind, FakeTensor) for kind in types):
            return func(*args, **kwargs)  # DTensor asks for shapes: nothing is computed
        if any(kind.__torch_dispatch__ is not _NO_RULES for kind in types):
            # subclasses, whose own rules run ops on plain tensors
            self._weights.meet(args, kwargs)
            return NotImplemented
        if isinstance(func, torch._ops.OpOverload):
            with self:  # inference mode leaves to us what is made of other ops
                out = func.decompose(*args, **kwargs)
            if out is not NotImplemented:
                return out
        place = self._tracker.place()
        out = func(*args, **kwargs)
        product = product_of(func, args, kwargs, out)
        for cast in columnwise_data(func, args, out):
            self._columnwise[id(cast)] = cast
        if product is not None:
            self._add(product, place, (factors(func, args), kwargs))
        elif func is _GATHERS and _is_high_precision(args[0]):
            self._sent[place.module] = None
        elif hides_products(func):
            self._hidden[f"{func} in {place.module}"] = None
        elif not place.in_backward:
            self._weights.follow(func, (args, kwargs), out)
        return out

    def _add(self, product: Product, place: Place, operands: Any) -> None:
        is_fp8 = product.precision == FP8
        is_attention = product.is_attention
        kind = "fprop" if is_fp8 else "forward"
        reason = "" if is_fp8 else self._weights.misread(operands)
        note = ""
        if not place.in_backward:
            is_attention |= product.is_batched and not self._weights.reads_weight(operands)
        else:
            kind = "dgrad" if self._is_dgrad(product, operands) else "wgrad"
            forward = self._recorded_by.get(place.node)
            if is_fp8:
                if kind == "wgrad" and any(named(name).transposes for name in product.formats):
                    note = IN_SQUARES
            elif forward is not None and forward.precision == FP8 and not reason:
                kind, note = "wgrad", BY_RECIPE  # nothing else in an FP8 linear's backward is
            else:
                kind = "backward"
                if forward is not None:  # the gradient of the weight does not read the weight
                    reason, is_attention = reason or forward.reason, forward.attention
        entry = AuditedProduct(
            place.module,
            kind,
            *product[:4],
            product.precision,
            product.flops,
            is_attention,
            place.recomputed,
            reason,
            note,
        )
        if not place.in_backward:
            self._recorded_by.setdefault(place.node, entry)
        self.entries.append(entry)

    def _is_dgrad(self, product: Product, operands: Any) -> bool:
        """Return True if a product of a backward computes the gradient of an input."""
        if product.is_dgrad is not None:
            return product.is_dgrad
        left = operands[0][0]  # rowwise in dgrad, columnwise in wgrad
        return self._columnwise.get(id(left)) is not left

    def notes(self) -> list[str]:
        """Notes on what runs products that no entry tells of."""
        notes = [f"may run products that are not shown: {op}" for op in self._hidden]
        if self._sent:
            notes.append(
                f"tokens travel in high precision for weight gradients, those of a rank being no "
                f"whole blocks, or by recipe: {', '.join(name or '(model)' for name in self._sent)}"
            )
        return notes


def _is_high_precision(tensors: Sequence[Tensor]) -> bool:
    """Return True if what is gathered are tokens as they came, not bytes."""
    return any(x.dtype in HIGH_PRECISION for x in tensors)


def _detached(x: Tensor) -> Tensor:
    """Return ``x`` without its history, so that a backward ends there."""
    return x.detach().requires_grad_() if x.requires_grad else x


def _loss_of(output: Any) -> Tensor | None:
    """Return the tensor that a backward begins at; None if nothing requires a gradient."""
    loss = output.get("loss") if isinstance(output, dict) else getattr(output, "loss", None)
    outputs = [loss] if isinstance(loss, Tensor) else _tensors(output)
    parts = [x.float().sum() for x in outputs if x.requires_grad and x.is_floating_point()]
    return sum(parts[1:], parts[0]) if parts else None


def _tensors(output: Any) -> Iterator[Tensor]:
    for x in tree_leaves(output):
        if isinstance(x, Tensor):
            yield x
        elif is_dataclass(x):
            yield from _tensors([getattr(x, field.name) for field in fields(x)])
