"""Watch the health of FP8 while a model trains: what casts lose, layer by layer.

In a step that is measured, ``watching`` sees every cast of an activation or a gradient,
``ModuleTracker`` tells its module, and fused modules run op by op. Weights are cast once more at
the end. Figures stay on the device until they are read, so that no step waits for the GPU.
"""

from __future__ import annotations

import math
import warnings
import weakref
from contextlib import ExitStack
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..autograd.packed import Packed
from ..model.matrix import fp8_weights
from ..model.names import check_module
from ..model.running_module import ModuleTracker
from ..model.weights import kind_of
from ..ops import reference
from ..ops.cast.ops import dequantize, quantize_rowwise
from ..ops.cross_entropy.ops import gradient_of_logits
from ..ops.formats import BlockFormat, ceil_div
from ..ops.op import OPS
from ..ops.runtime.launch import this_thread
from ..ops.runtime.specialize import watching
from ..tensor.base import MasterBase
from ..text_table import Report, Table, plain

Figures = dict[tuple[str, str], Tensor]
"""Sums and counts by layer and operand, from which :func:`_health` computes figures."""

_ROWS = 256
"""The most rows of a tensor that are measured, at equal distances."""

_CASTS = [
    OPS[name]
    for name in ("quantize_rowwise", "quantize_both", "quantize_columnwise", "quantize_grouped")
]
"""Ops that cast activations and gradients; the first argument is what they cast."""


class Health(NamedTuple):
    """Figures of the casts of one operand of a layer.

    Attributes:
        sqnr: signal to quantization noise in dB; 31 to 32 for normally distributed values.
        flushed: share of the nonzero values that become 0.
        saturated: share of the nonzero values that become the largest number, 448; the maximum of
            every block does. 1.3% for normally distributed values in 1x128 blocks.
        amax_min, amax_max: the smallest and the largest amax of a block, without zeros.
        nonfinite: values that are NaN or Inf.
    """

    sqnr: float
    flushed: float
    saturated: float
    amax_min: float
    amax_max: float
    nonfinite: float


class Monitor(Report):
    """A context that measures every n-th step of a training loop; see :func:`monitor`.

    Attributes:
        every: every how many steps one is measured.
        step: the number of steps so far.
    """

    def __init__(self, model: nn.Module, every: int) -> None:
        self.every, self.step = every, 0
        self._model = model
        self._stack: ExitStack | None = None
        self._found: Figures | None = None  # figures of the step that is running
        self._measured: dict[int, tuple[list[tuple[str, str]], Tensor]] = {}

    def __enter__(self) -> Monitor:
        """Begin a step."""
        if self._stack is not None:
            raise RuntimeError("a step of this monitor is running: leave its `with` block first")
        with ExitStack() as stack:
            if self.step % self.every == 0:
                if this_thread.watch is not None:
                    raise RuntimeError(
                        "another monitor measures a step: leave its `with` block first, or monitor "
                        "both models as one: monitor(nn.ModuleList([a, b]))"
                    )
                figures: Figures = {}
                tracker = ModuleTracker(self._model)
                stack.enter_context(tracker)
                stack.enter_context(watching(_Casts(tracker, figures)))
                self._found = figures
            self._stack = stack.pop_all()
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        """End the step; one that raised is not counted."""
        assert self._stack is not None
        stack, found, self._stack, self._found = self._stack, self._found, None, None
        stack.close()
        if kind is None:
            if found is not None:
                found |= _weights(self._model)
                self._warn_of_nothing(found)
                self._measured[self.step] = _in_one(found)
            self.step += 1

    def _warn_of_nothing(self, found: Figures) -> None:
        """Warn, after the first measured step, that no layer ran in FP8."""
        if not (found or self._measured):
            warnings.warn(
                f"the monitor measured nothing: no cast of this {kind_of(self._model)} ran in the "
                f"step. Convert the model first (blocktensor.convert), and run forward and "
                f"backward in the `with` block",
                stacklevel=3,
            )

    def health(self) -> dict[int, dict[str, dict[str, Health]]]:
        """Return the figures of measured steps by step, layer and operand.

        Operands are ``"x"``, ``"w"``, ``"g"`` and ``"saved"``. Waits for the GPU.
        """
        return {step: _by_layer(*found) for step, found in self._measured.items()}

    def _latest(self) -> dict[str, dict[str, Health]]:
        return _by_layer(*self._measured[max(self._measured)]) if self._measured else {}

    def to_dict(self) -> dict[str, Any]:
        """Return ``every``, ``step``, and :meth:`health` with figures by name, for JSON."""
        return {**super().to_dict(), "health": plain(self.health())}

    def scalars(self) -> dict[str, float]:
        """Return the latest figures by names such as ``"fp8/layers.0.up/x/sqnr"``.

        ``wandb.log`` takes them, and ``SummaryWriter.add_scalar`` each of them. Empty before the
        first step.
        """
        return {
            f"fp8/{layer}/{operand}/{name}": value
            for layer, operands in self._latest().items()
            for operand, health in operands.items()
            for name, value in health._asdict().items()
        }

    def plot(self) -> Any:
        """Draw the lowest and the median SQNR of ``x``, ``w`` and ``g`` by step.

        Returns:
            A ``matplotlib.figure.Figure``; needs matplotlib.
        """
        from matplotlib.figure import Figure

        figure = Figure(figsize=(7, 4), layout="constrained")
        axes = figure.add_subplot(xlabel="step", ylabel="SQNR, dB")
        measured = self.health()
        for operand, color in (("x", "tab:blue"), ("w", "tab:gray"), ("g", "tab:orange")):
            by_step = {
                step: [x.sqnr for layer in layers.values() if (x := layer.get(operand))]
                for step, layers in measured.items()
            }
            steps = [step for step, values in by_step.items() if values]
            for style, of in (("-", median), (":", min)):
                label = f"{operand}, {'median' if of is median else 'lowest'} of all layers"
                axes.plot(steps, [of(by_step[s]) for s in steps], style, color=color, label=label)
        axes.legend()
        return figure

    def _parts(self) -> list[Table | str]:
        if not self._measured:
            return ["no step was measured"]
        rows = [
            (
                layer,
                operand,
                f"{x.sqnr:.1f}",
                f"{x.flushed:.2%}",
                f"{x.saturated:.2%}",
                f"{x.amax_min:.2g} to {x.amax_max:.2g}",
                f"{x.nonfinite:.0f}",
            )
            for layer, operands in self._latest().items()
            for operand, x in operands.items()
        ]
        header = "", "SQNR, dB", "flushed to 0", "saturated", "amax of blocks", "NaN or Inf"
        return [f"step {max(self._measured)}", Table(("layer", *header), rows)]


def monitor(model: nn.Module, every: int = 100) -> Monitor:
    """Measure what the casts of a model lose, every ``every``-th step.

    Enter the monitor for each step, forward and backward; only every n-th one is measured, the
    first among them::

        health = blocktensor.monitor(model, every=100)
        for batch in loader:
            with health:
                model(**batch).loss.backward()
            optimizer.step()
            if health.step % 100 == 1:
                wandb.log(health.scalars())

    For each FP8 layer it measures the input ``x``, the weight ``w`` and the gradient of the output
    ``g``, of at most 256 rows each. The inputs of all matmuls of a module of experts are
    measured together. ``saved`` are the tensors that ``saved_tensors_in_fp8`` has packed while a
    module ran, except in its submodules. A measured step computes the same bits; it takes longer,
    and compiled regions and fused modules run op by op in it. Each rank measures its own parts.

    Args:
        model: any module. Its FP8 layers are measured.
        every: measure the first of as many steps.

    Returns:
        The monitor, a context for each step. ``print`` shows the latest measured step.

    Raises:
        TypeError: ``model`` is no module.
        ValueError: ``every`` is less than 1.

    Warns:
        UserWarning: the first measured step has no FP8 weight and no cast.

    Examples:
        >>> model = nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 256)).bfloat16()
        >>> _ = blocktensor.convert(model, skip_small=False)
        >>> health = blocktensor.monitor(model, every=100)
        >>> for _ in range(2):
        ...     with health:
        ...         model(torch.randn(64, 256, dtype=torch.bfloat16)).sum().backward()
        >>> 25 < health.scalars()["fp8/0/x/sqnr"] < 35
        True
    """
    check_module(model, "monitor")
    given: Any = every
    if not isinstance(given, int) or given < 1:
        raise ValueError(f"every={every!r}: expected a number of steps, at least 1")
    return Monitor(model, every)


class _Casts:
    """Measure every cast of an activation or a gradient that this thread computes."""

    def __init__(self, tracker: ModuleTracker, found: Figures) -> None:
        self._tracker, self._found = tracker, found
        self._latest: tuple[Any, ...] = None, None, None
        self._gradient: Any = lambda: None  # of logits: a loss casts it in the forward

    def __call__(self, op: Any, args: tuple[Any, ...]) -> None:
        """Measure what an op is about to cast, if it is one of the casts."""
        place = self._tracker.place()
        if op is gradient_of_logits:
            self._gradient = weakref.ref(args[0])
        if not (op is Packed or op in _CASTS) or place.recomputed:
            return
        format = next(x for x in args if isinstance(x, BlockFormat))
        if format.rows == 1:  # weights have square blocks
            is_gradient = place.in_backward or self._gradient() is args[0]
            key = place.module, "saved" if op is Packed else "g" if is_gradient else "x"
            made = self._measured(args[0], format)
            self._found[key] = _joined(self._found[key], made) if key in self._found else made

    def _measured(self, x: Tensor, format: BlockFormat) -> Tensor:
        """Return the figures of ``x``; several linear layers in turn may cast it."""
        like = x.data_ptr(), x.shape, x.stride(), x.is_inference() or x._version, format
        if like != self._latest[0]:
            self._latest = like, x, _figures(x, format)  # keep x, so that its memory is not reused
        made: Tensor = self._latest[2]
        return made


def _weights(model: nn.Module) -> Figures:
    tracker, found = ModuleTracker(model), {}
    for module in model.modules():
        for matrix in fp8_weights(module, tracker.name_of(module)):
            weight = matrix.fp8
            if isinstance(weight, MasterBase) and weight.master.numel():  # frozen ones are FP8
                found[matrix.label, "w"] = _figures(weight.master, weight.format)
    return found


@torch.no_grad()
def _figures(x: Tensor, format: BlockFormat) -> Tensor:
    """Return sums and counts of a sample of ``x``, in fp64, for :func:`_health`."""
    sample = _sample(x.detach(), format)
    cast = quantize_rowwise(sample, format)
    values = sample.float()
    errors = dequantize(cast, torch.float32) - values
    measured = errors.isfinite()  # without blocks that hold values which are not finite
    values, errors = values.where(measured, 0), errors.where(measured, 0)
    rounded = cast.data.float().where(measured, 0)
    nonzero, kept = values.count_nonzero(), rounded.count_nonzero()
    saturated = (rounded.abs() == torch.finfo(format.dtype).max).sum()
    nonfinite = sample.numel() - sample.isfinite().sum()
    amax = reference.shard_amax(values, format, 0, 0)
    sums = [part.double().square().sum() for part in (values, errors)]
    sums += [nonzero, nonzero - kept, saturated, nonfinite]
    if amax.numel() == 0:
        return torch.stack([*sums, sums[0] + math.inf, sums[0]])
    return torch.stack([*sums, amax.where(amax > 0, math.inf).min(), amax.max()])


def _joined(a: Tensor, b: Tensor) -> Tensor:
    return torch.cat(
        [a[:-2] + b[:-2], torch.minimum(a[-2:-1], b[-2:-1]), torch.maximum(a[-1:], b[-1:])]
    )


def _in_one(found: Figures) -> tuple[list[tuple[str, str]], Tensor]:
    """Return all figures of a step in one tensor: many small ones would fragment memory."""
    rows = [*found.values()]
    return [*found], torch.stack([x.to(rows[0].device) for x in rows]) if rows else torch.empty(0)


def _by_layer(keys: list[tuple[str, str]], figures: Tensor) -> dict[str, dict[str, Health]]:
    layers: dict[str, dict[str, Health]] = {}
    for (layer, operand), row in sorted(zip(keys, figures.tolist(), strict=True)):
        layers.setdefault(layer, {})[operand] = _health(row)
    return layers


def _health(figures: list[float]) -> Health:
    squares, errors, nonzero, flushed, saturated, nonfinite, smallest, largest = figures
    sqnr = math.inf if errors == 0 else 10 * math.log10(squares / errors)
    count = max(nonzero, 1)
    return Health(
        sqnr, flushed / count, saturated / count, min(smallest, largest), largest, nonfinite
    )


def _sample(x: Tensor, format: BlockFormat) -> Tensor:
    """Return rows at equal distances, or whole blocks of rows; of some experts of a stack."""
    if format.rows == 1:
        rows = x.reshape(-1, x.shape[-1])
        return rows[:: max(1, ceil_div(len(rows), _ROWS))]
    if x.ndim == 3:
        return x[:: max(1, ceil_div(len(x) * format.rows, _ROWS)), : format.rows]
    return x[:_ROWS]
