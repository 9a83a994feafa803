"""Audit a model: report every matmul of one forward and backward, and leave the model as it was.

Only a dispatch mode sees every matmul. ``ModuleTracker`` tells it the module of each, and
``WeightMemory`` whether an operand is a weight that should have been read in FP8.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import fields, is_dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.weak import WeakTensorKeyDictionary

from ..model.names import check_module
from ..model.running_module import MODEL, ModuleTracker, Place
from ..model.weights import casts_itself, is_fully_sharded
from ..ops.checks import HIGH_PRECISION
from ..sharding.dtensor import fp8_part
from ..tensor.fp8_tensor import BlockwiseFP8Tensor
from ..tensor.weight import BlockwiseFP8Weight
from ..tensor.weight_cache import FP8Cache
from .audit_matmuls import Matmul, columnwise_data, factors, hides_matmuls, matmul_of
from .audit_remedies import remedies
from .audit_report import (
    BY_RECIPE,
    FP8,
    OUTER_PRODUCT,
    AuditedMatmul,
    AuditReport,
    HiddenMatmuls,
)
from .audit_weights import BUFFER, FP8_WEIGHT, Part, WeightMemory


def audit(model: nn.Module, /, *args: Any, **kwargs: Any) -> AuditReport:
    """Run one forward and backward, and report every matmul with its precision.

    The backward starts from ``output.loss``, if there is one, else from the sum of all
    floating-point outputs. It does not run under ``torch.no_grad()`` or if nothing requires a
    gradient. For another loss use :func:`audit_step`.

    The report marks matmuls that should have been FP8 and were not: they read the master of an FP8
    weight, a view of it, what an op computed from it, or the dequantized bytes. For each other
    matmul with a weight in high precision it says what would convert the weight. In a test of your
    model, call :meth:`AuditReport.assert_fp8 <blocktensor.reports.AuditReport.assert_fp8>`.

    The run computes the same bits as without an audit. Afterwards, also if it raises, the model is
    as before: gradients, FP8 forms, buffers, training mode, torch's random numbers. Hooks on
    parameters do not run. Regions under ``torch.compile`` run in eager mode. In a process group,
    every rank must call it; each gets a report of its own matmuls. Under FSDP2, call it between
    steps, not while gradients are accumulated without reduction. Gradients in high precision that
    ``wgrad_input`` or ``backward`` of a Recipe asks for are labelled, not marked.

    Args:
        model: any module, converted or not.
        args, kwargs: arguments of its forward. ``audit`` has no options.

    Returns:
        The report; ``print(report)`` shows it as a table.

    Raises:
        TypeError: ``model`` is no module. Errors of the model itself are raised as they are.

    Examples:
        >>> model = nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 256)).bfloat16()
        >>> _ = blocktensor.convert(model, skip_small=False)
        >>> report = blocktensor.audit(model, torch.randn(8, 256, dtype=torch.bfloat16))
        >>> report.assert_fp8()
        >>> report.fp8_share
        1.0
    """
    check_module(model, "audit")
    args, kwargs = tree_map_only(Tensor, _detached, (args, kwargs))

    def step() -> None:
        loss = _loss_of(model(*args, **kwargs))
        if loss is not None:
            loss.backward()

    return audit_step(model, step)


def audit_step(model: nn.Module, step: Callable[[], object]) -> AuditReport:
    """Audit whatever ``step()`` runs: any loss, several forwards and backwards.

    Args:
        model: the module whose matmuls are reported, and that is left as before.
        step: a function that is called once. It may run any forward and backward, but no optimizer:
            writes to parameters are not undone.

    Returns:
        The report, as :func:`audit` returns it.

    Raises:
        TypeError: ``model`` is no module, or ``step`` no function. Errors of ``step`` itself are
            raised as they are.

    Examples:
        >>> model = nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 256)).bfloat16()
        >>> _ = blocktensor.convert(model, skip_small=False)
        >>> x = torch.randn(8, 256, dtype=torch.bfloat16)
        >>> blocktensor.audit_step(model, lambda: model(x).sum().backward()).fp8_share
        1.0
    """
    check_module(model, "audit_step")
    if not callable(step):
        raise TypeError(
            f"audit_step takes a function that runs a step, such as lambda: loss_of(batch)"
            f".backward(): got a {type(step).__name__}"
        )
    tracker, weights = ModuleTracker(model), WeightMemory(model)
    with left_as_it_is(model), tracker, _Matmuls(tracker, weights) as matmuls:
        step()
    return AuditReport(
        tuple(matmuls.entries_with(remedies(model))),
        tuple(matmuls.notes()),
        tuple(matmuls.hidden),
    )


_GATHERS: Any = torch.ops._c10d_functional.all_gather_into_tensor_coalesced.default
"""The ops by which tensor parallel linear layers gather; DTensor and FSDP2 use other ops."""


class _Matmuls(TorchDispatchMode):
    """A dispatch mode that makes an entry for every matmul."""

    supports_higher_order_operators = True  # flex attention is one

    def __init__(self, tracker: ModuleTracker, weights: WeightMemory) -> None:
        super().__init__()
        self.entries: list[AuditedMatmul] = []
        self._tracker, self._weights = tracker, weights
        self._recorded_by: dict[int, AuditedMatmul] = {}  # by the number of an autograd node
        # the columnwise data of activations and gradients, with the number of tokens: casts add
        # columns; 0 where casts of several ranks were put together
        self._columnwise = WeakTensorKeyDictionary()
        self.hidden: dict[HiddenMatmuls, None] = {}
        self._sent: dict[str, None] = {}  # modules whose tokens travel in high precision

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if _asks_for_shapes(types):
            return func(*args, **kwargs)
        if _has_own_rules(types):
            self._weights.meet(args, kwargs)
            return NotImplemented
        if isinstance(func, torch._ops.OpOverload):
            with self:  # under inference mode composite ops arrive here whole
                out = func.decompose(*args, **kwargs)
            if out is not NotImplemented:
                return out
        place = self._tracker.place()
        out = func(*args, **kwargs)
        matmul = matmul_of(func, args, kwargs, out)
        for cast in columnwise_data(func, args, out):
            self._columnwise[cast] = len(args[0])
        casts = [] if matmul else [x for x in _tensors(args) if x in self._columnwise]
        if casts:
            for x in _tensors(out):  # a view of the bytes, or gathered bytes
                if x.element_size() == 1:
                    is_same = x.numel() == casts[0].numel()
                    self._columnwise[x] = self._columnwise[casts[0]] if is_same else 0
        if matmul is not None:
            self._add(matmul, place, (factors(func, args), kwargs))
        elif func is _GATHERS and any(x.dtype in HIGH_PRECISION for x in args[0]):
            self._sent[place.module] = None  # tokens in high precision, not bytes
        elif hides_matmuls(func):
            self._module_at(place)
            read = self._weights.read((args, kwargs))
            weight = "" if read is None or read.kind == BUFFER else read.name
            self.hidden[HiddenMatmuls(str(func), place.module, weight)] = None
        else:
            self._weights.follow(func, (args, kwargs), out)
        return out

    def _module_at(self, place: Place) -> nn.Module | None:
        """Return the module that runs, and remember the memory of its parameters."""
        module = self._tracker.module_of(place.module)
        if module is not None:
            self._weights.enter(module, "" if place.module == MODEL else place.module)
        return module

    def _is_dgrad_by_recipe(
        self, matmul: Matmul, forward: AuditedMatmul, read: Part | None
    ) -> bool:
        """Return True for a data gradient of a matmul in FP8 that a recipe wants in high precision.

        Its sizes say so. With as many tokens as output features the weight gradient has the same
        sizes; then it is the matmul that reads a weight.
        """
        sizes = matmul.m, matmul.n, matmul.k
        is_wgrad = sizes == (forward.n, forward.k, forward.m) and read is None
        is_dgrad = sizes == (forward.m, forward.k, forward.n) and not is_wgrad
        return is_dgrad and self._weights.dgrad_in_high_precision

    def _add(self, matmul: Matmul, place: Place, operands: Any) -> None:
        is_fp8, is_attention = matmul.precision == FP8, matmul.is_attention
        read, reason = None, ""
        if not (is_fp8 or is_attention):
            module = self._module_at(place)
            read = self._weights.read(operands)
            reason = _why_not_fp8(module, read)
        weight = "" if read is None else read.name
        kind, note = "fprop" if is_fp8 else "forward", ""
        if not place.in_backward:
            is_attention |= matmul.is_batched and read is None and not is_fp8
            is_outer = matmul.k == 1 and (read is None or read.kind == BUFFER)
            note = OUTER_PRODUCT if is_outer and not is_fp8 and not is_attention else ""
        elif is_fp8:
            tokens = self._columnwise.get(operands[0][0])
            kind = "wgrad" if matmul.is_wgrad or tokens is not None else "dgrad"
            if tokens and not matmul.is_wgrad:
                matmul = matmul.of_tokens(tokens)
        else:
            kind, forward = "backward", self._recorded_by.get(place.node)
            if forward is not None and forward.precision != FP8:
                # wgrad does not read the weight
                reason, is_attention = reason or forward.reason, forward.attention
                weight, note = weight or forward.weight, forward.note
            elif forward is not None and self._is_dgrad_by_recipe(matmul, forward, read):
                # dgrad may read the master, which is no fault then
                kind, note, reason, weight = "dgrad", BY_RECIPE, "", ""
            elif forward is not None and not reason and self._weights.reads_high_precision:
                kind, note = "wgrad", BY_RECIPE  # nothing else in an FP8 linear layer's backward is
            elif forward is not None and not reason:
                reason = "is a gradient of a matmul in FP8"
        entry = AuditedMatmul(
            place.module,
            kind,
            *matmul[:4],
            matmul.precision,
            matmul.flops,
            attention=is_attention,
            recomputed=place.recomputed,
            reason=reason,
            note=note,
            weight=weight,
        )
        if not place.in_backward:
            self._recorded_by.setdefault(place.node, entry)
        self.entries.append(entry)

    def entries_with(self, remedies: Mapping[str, str]) -> Iterator[AuditedMatmul]:
        """Return the entries; those in high precision with the reason for their weight."""
        for entry in self.entries:
            why = "" if entry.reason or entry.note else remedies.get(entry.weight, "")
            yield replace(entry, remedy=why) if why else entry

    def notes(self) -> list[str]:
        """Return a note for each op that may run matmuls without an entry."""
        notes = [f"may run matmuls that are not shown: {op}" for op in self.hidden]
        if self._sent:
            notes.append(
                f"tokens travel in high precision for weight gradients, because a rank has no "
                f"whole blocks of them, or by recipe: {', '.join(self._sent)}"
            )
        return notes


def _why_not_fp8(module: nn.Module | None, read: Part | None) -> str:
    """Return why a matmul in high precision should be in FP8; empty if it should not."""
    other = None if module is None else casts_itself(module)
    held = () if module is None or other is None else module.parameters(recurse=False)
    if any(fp8_part(parameter) is not None for parameter in held):
        return f"is of {other}: convert with one of the two libraries"
    if read is not None and read.kind == FP8_WEIGHT:
        return f"reads {read.what} of {read.name}"
    return ""


def _detached(x: Tensor) -> Tensor:
    """Return ``x`` detached from its graph, so that a backward ends there."""
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


# State that a run changes


@contextmanager
def left_as_it_is(model: nn.Module) -> Iterator[None]:
    """Restore, at the end, everything that a forward and a backward change in ``model``.

    These are gradients, the FP8 forms that weights hold, buffers, training mode, and torch's random
    state. Hooks on parameters do not run. DDP does not reduce gradients; FSDP2 does, and frees
    them. Its weights are sharded at the end.
    """
    with ExitStack() as stack:
        # listed, since torch warns about several GPUs otherwise
        devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
        stack.enter_context(torch.random.fork_rng(devices))
        stack.enter_context(_sharded(model))
        for module in model.modules():
            _restore_later(stack, module, "training")
            values = {k: x.detach().clone() for k, x in module._buffers.items() if x is not None}
            stack.callback(_restore_buffers, module, dict(module._buffers), values)
            if isinstance(module, nn.parallel.DistributedDataParallel):
                stack.enter_context(module.no_sync())
        for parameter in model.parameters():
            _set_aside_gradient(stack, parameter)
            fp8 = fp8_part(parameter)
            if isinstance(fp8, BlockwiseFP8Weight):
                _restore_later(stack, fp8, "cache")
                fp8.cache = FP8Cache(fp8.cache.master, fp8.cache.recipe)
            elif isinstance(fp8, BlockwiseFP8Tensor):  # the run may add a columnwise form
                _restore_later(stack, fp8, "columnwise_data", "columnwise_scale")
        # autocast's casts of weights, which would be used again without their graphs
        stack.callback(torch.clear_autocast_cache)
        yield


def _restore_later(stack: ExitStack, owner: object, *names: str) -> None:
    """Restore the present values of attributes when ``stack`` ends."""
    for name in names:
        stack.callback(setattr, owner, name, getattr(owner, name))


def _set_aside_gradient(stack: ExitStack, parameter: nn.Parameter) -> None:
    """Remove the gradient and the hooks of a parameter until ``stack`` ends."""
    _restore_later(stack, parameter, "grad")
    parameter.grad = None
    for hooks in (parameter._backward_hooks, parameter._post_accumulate_grad_hooks):
        if hooks:
            stack.callback(hooks.update, dict(hooks))
            hooks.clear()  # autograd reads this dictionary


def _restore_buffers(
    module: nn.Module, buffers: dict[str, Tensor | None], values: dict[str, Tensor]
) -> None:
    module._buffers.clear()
    module._buffers.update(buffers)
    for name, old in values.items():
        buffer: Any = buffers[name]
        layouts = [(x.shape, x.dtype, x.device) for x in (buffer, old)]
        if layouts[0] != layouts[1]:  # resized in place, as observers of torch.ao do
            buffer.data = old
        # without a change, do not write: a write would invalidate earlier graphs
        elif not (old.is_meta or torch.equal(buffer, old)):
            with torch.no_grad():
                buffer.copy_(old)


@contextmanager
def _sharded(model: nn.Module) -> Iterator[None]:
    """Free what FSDP2 has gathered, before and after: a root would keep it."""
    modules: list[Any] = [x for x in model.modules() if is_fully_sharded(type(x))]

    def reshard() -> None:
        for module in modules:
            module.reshard()

    reshard()
    try:
        yield
    except BaseException:
        for module in modules:
            # all but roots raise; so do roots that have not run, and torch before 2.13
            with suppress(RuntimeError, AttributeError):
                module.reset_iter_state()
        raise
    finally:
        reshard()


def _asks_for_shapes(types: Iterable[type]) -> bool:
    """Return True for an op on fake tensors, which DTensor runs to find shapes."""
    return any(issubclass(kind, FakeTensor) for kind in types)


def _has_own_rules(types: Iterable[Any]) -> bool:
    """Return True for an op on tensor subclasses, which run it as ops on plain tensors."""
    return any(kind.__torch_dispatch__ is not _NO_RULES for kind in types)


_NO_RULES: Any = Tensor.__torch_dispatch__
