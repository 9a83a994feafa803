"""Explain which backend runs each matmul of a model, and why; predict what FP8 gains."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ..conversion.fast_path import FastPath
from ..model.matrix import all_fp8_weights
from ..model.weights import experts_per_token
from ..ops.checks import given_dtype, is_integer
from ..ops.devices import CARDS, HOPPER, Card, capability, card
from ..ops.formats import BlockFormat
from ..ops.gemm.choose_backend import GemmProblem, choose_gemm, predict_gemm
from ..ops.grouped_gemm.choose_backend import GROUPED_BACKENDS, GroupedProblem, choose_grouped
from ..ops.scale_layouts import columnwise_width
from ..recipe import DEFAULT_RECIPE, Recipe, check_recipe
from ..text_table import Report, Table, collapse
from .predict import LayerTime, bf16_matmul_us, casts_us, speedups

WHOLE_STEPS = "whole steps, with attention, the loss and the optimizer: blocktensor.plan"
"""The line under predicted times, which only linear layers have."""

_META = torch.device("meta")
Shape = tuple[int, int, int]


@dataclass(frozen=True)
class Matmul:
    """One GEMM of one layer, with output ``[M, N]`` and contraction K.

    Attributes:
        groups: the number of groups of tokens, one for each expert of a stack; else 1. Only the
            device knows their sizes. fprop has M rows in all groups together, and wgrad contracts
            all K.
        us: predicted microseconds, for linear layers on an H100 or H200 with the fast path.
    """

    layer: str
    kind: str
    m: int
    n: int
    k: int
    backend: str
    reason: str
    groups: int = 1
    us: float | None = None

    @property
    def sizes(self) -> str:
        """M x N x K, and the number of groups."""
        sizes = f"{self.m} x {self.n} x {self.k}"
        return sizes if self.groups == 1 else f"{sizes} in {self.groups} groups"


@dataclass(frozen=True)
class Explanation(Report):
    """The matmuls of a model; ``print(explanation)`` shows them as a table.

    Attributes:
        matmuls: every GEMM of every layer.
        fast_path: whether the fast kernels run on the GPU, and why not; None without a GPU.
        layers: predicted times of linear layers whose matmuls have predictions. Casts count for
            each layer, as without ``fuse`` and ``share_inputs``.
    """

    matmuls: tuple[Matmul, ...]
    fast_path: str | None = None
    layers: tuple[LayerTime, ...] = ()

    @property
    def backends(self) -> tuple[str, ...]:
        """The sorted names of the backends in use."""
        return tuple(sorted({p.backend for p in self.matmuls}))

    def _parts(self) -> list[Table | str]:
        if not self.matmuls:
            return ["no FP8 layers: convert the model first with blocktensor.convert(model)"]
        cells = ((p.layer, p.kind, p.sizes, p.backend, p.reason) for p in self.matmuls)
        rows = collapse(cells, across=True)
        header = ("layer", "matmul", "M x N x K", "backend", "why")
        parts: list[Table | str] = [Table(header, rows)]
        if self.layers:
            parts += "", self._times(), WHOLE_STEPS
        return [*parts, *filter(None, [self.fast_path])]

    def _times(self) -> Table:
        cells = [(x.layer, *_cells([x])) for x in self.layers]
        rows = [*collapse(cells, across=True), ("linear layers alone", *_cells(self.layers))]
        header = "bf16, us", "FP8, us", "in CUDA graphs", "eager"
        return Table(("predicted, forward + backward", *header), rows)


def _cells(layers: Sequence[LayerTime]) -> tuple[str, ...]:
    times = sum(x.bf16_us for x in layers), sum(x.fp8_us for x in layers)
    return *(f"{us:.0f}" for us in times), *(f"{x:.2f}x" for x in speedups(layers))


def explain(
    model_or_shapes: nn.Module | Sequence[Shape],
    tokens: int = 4096,
    *,
    dtype: torch.dtype = torch.bfloat16,
    device: torch.device | str | None = None,
    recipe: Recipe | None = None,
) -> Explanation:
    """Return the backend of every FP8 matmul, forward and backward, and why it was chosen.

    On an H100 or H200, or with ``device="H100"`` on any machine, it also predicts how much faster
    linear layers are than in bf16, by their GPU time and with the host time of eager mode. A model
    on the meta device will do.

    Args:
        model_or_shapes: a converted model, or linear layers as (M tokens, N out, K in).
        tokens: rows of the input (batch x sequence) for a model. A stack of experts gets ``tokens``
            times ``num_experts_per_tok`` of the module's config, or times 1 without this setting.
        dtype: dtype of activations and their gradients. Weight gradients have the weight's dtype;
            for shapes, this one.
        device: for shapes; default CUDA if available, else CPU. ``"H100"`` or ``"H200"``, also for
            a model: explain as on this card.
        recipe: for shapes, default ``Recipe()``; a model's weights have theirs.

    Returns:
        The report, with a row for each matmul; ``print`` it.

    Raises:
        TypeError: ``tokens`` is no integer, ``recipe`` no recipe, ``dtype`` not bf16, fp16 or fp32.
        ValueError: negative ``tokens``, a shape that is not three sizes, an unknown device, or a
            ``BLOCKTENSOR_GEMM`` that cannot run them.

    Examples:
        >>> report = blocktensor.explain([(8192, 4096, 4096)], device="H200")
        >>> [f"{each.kind}: {each.backend}" for each in report.matmuls]
        ['fprop: gluon', 'dgrad: gluon', 'wgrad: gluon']
    """
    given: Any = model_or_shapes
    if not isinstance(given, (nn.Module, Sequence)) or isinstance(given, str):
        raise TypeError(
            f"explain takes a model, or a list of shapes (M, N, K): got a {type(given).__name__}"
        )
    if not is_integer(tokens):
        raise TypeError(f"tokens={tokens!r} is a {type(tokens).__name__}: expected an integer")
    if tokens < 0:
        raise ValueError(f"tokens={tokens}: expected the rows of an input, 0 or more")
    given_dtype(dtype, "dtype")
    check_recipe(recipe)
    matmuls: list[Matmul] = []
    times: list[LayerTime] = []
    asked, of_shapes = _device(device), recipe or DEFAULT_RECIPE
    if isinstance(model_or_shapes, nn.Module):
        devices: set[torch.device | Card] = set()
        for matrix in all_fp8_weights(model_or_shapes):
            weight, module, casts = matrix.parameter, matrix.module, matrix.fp8.recipe
            kinds = ("fprop", "dgrad", "wgrad") if weight.requires_grad else ("fprop", "dgrad")
            experts, n, k = matrix.sizes_here
            where = asked if isinstance(asked, Card) else weight.device
            devices.add(where)
            is_stack = experts is not None
            has_bias = not is_stack and getattr(module, "bias", None) is not None
            rows = tokens * experts_per_token(module) if is_stack else tokens
            shape, dtypes, bias = (rows, n, k), (dtype, weight.dtype), dtype if has_bias else None
            is_kn = is_stack and matrix.is_transposed
            of_layer = _matmuls(
                matrix.label, shape, kinds, casts, dtypes, where, bias, experts, is_kn
            )
            matmuls += of_layer
            times += _times_of(of_layer, shape, casts, dtypes, where)
        return Explanation(tuple(matmuls), _fast_path(devices), tuple(times))
    shapes: Sequence[Any] = model_or_shapes
    for shape in shapes:
        is_shape = isinstance(shape, Sequence) and len(shape) == 3
        if not is_shape or not all(is_integer(size) and size >= 0 for size in shape):
            raise ValueError(
                f"shape {shape!r}: expected (M tokens, N out, K in), integers from 0 on"
            )
        label, kinds = "x".join(str(s) for s in shape), ("fprop", "dgrad", "wgrad")
        of_layer = _matmuls(label, shape, kinds, of_shapes, (dtype, dtype), asked)
        matmuls += of_layer
        times += _times_of(of_layer, shape, of_shapes, (dtype, dtype), asked)
    return Explanation(tuple(matmuls), _fast_path({asked}), tuple(times))


def _device(device: torch.device | str | None) -> torch.device | Card:
    """Return the device or the card of this name; by default CUDA if available, else the CPU."""
    if isinstance(device, str) and device in CARDS:
        return CARDS[device]
    try:
        return torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    except RuntimeError:
        cards = " or ".join(map(repr, CARDS))
        raise ValueError(f"device={device!r}: expected a device of torch, or {cards}") from None


def _fast_path(devices: set[torch.device | Card]) -> str | None:
    for device in sorted(devices, key=str):
        if isinstance(device, Card):
            return f"fast path: as on an {device.name} that has it"
        if device.type == "cuda":
            return str(FastPath.of(device))
    return None


def _times_of(
    matmuls: Sequence[Matmul],
    shape: Shape,
    recipe: Recipe,
    dtypes: tuple[torch.dtype, torch.dtype],
    where: torch.device | Card,
) -> list[LayerTime]:
    """Return the predicted times of one layer; none if a matmul has no prediction."""
    times = [matmul.us for matmul in matmuls if matmul.us is not None]
    if len(times) < len(matmuls):
        return []
    gpu = where if isinstance(where, Card) else card(where)
    casts = casts_us(shape, [matmul.kind for matmul in matmuls], recipe, dtypes, gpu)
    bf16 = sum(bf16_matmul_us(p.m, p.n, p.k, gpu) for p in matmuls)
    return [LayerTime(matmuls[0].layer, bf16, casts + sum(times))]


def _matmuls(
    layer: str,
    shape: Shape,
    kinds: Sequence[str],
    recipe: Recipe,
    dtypes: tuple[torch.dtype, torch.dtype],
    where: torch.device | Card,
    bias: torch.dtype | None = None,
    experts: int | None = None,
    is_kn: bool = False,
) -> list[Matmul]:
    """Return the matmuls with a weight, or a stack.

    ``dtypes``: the dtypes of activations and of the weight. ``is_kn``: experts are ``[E, K, N]``.
    """
    (m, n, k), (dtype, weight_dtype) = shape, dtypes
    squares, of_grad = recipe.weight_format.stored, recipe.gradient_format
    x_format = recipe.wgrad_input_format_kn if is_kn else recipe.wgrad_input_format
    of_x = "" if x_format is None or x_format.transposes else f"x in {x_format.name} blocks; "
    matmuls = []
    for kind in kinds:
        sizes = {"fprop": (m, n, k), "dgrad": (m, k, n), "wgrad": (n, k, m)}[kind]
        is_plain = x_format is None if kind == "wgrad" else recipe.backward != "fp8"
        if kind != "fprop" and is_plain:
            name = str(dtype).removeprefix("torch.")
            choice = (
                f"wgrad_input={recipe.wgrad_input!r}"
                if recipe.backward == "fp8"
                else f"backward={recipe.backward!r}"
            )
            backend, reason = "torch", f"{name}, by Recipe({choice})"
            gpu = _predicted_for(where)
            us = None if gpu is None or experts else bf16_matmul_us(*sizes, gpu)
        elif kind != "wgrad":
            added = bias if kind == "fprop" else None
            invariant = kind == "fprop" and recipe.batch_invariant
            formats = recipe.activation_format if kind == "fprop" else of_grad, squares
            backend, reason, us = _chosen(
                kind, sizes, formats, dtype, where, added, experts, invariant
            )
        else:
            assert x_format is not None
            formats = of_grad, x_format
            backend, reason, us = _chosen(kind, sizes, formats, weight_dtype, where, None, experts)
            reason = of_x + reason
        groups = 1 if experts is None else experts
        matmuls.append(Matmul(layer, kind, *sizes, backend, reason, groups, us))
    return matmuls


def _chosen(
    kind: str,
    sizes: Shape,
    formats: tuple[BlockFormat, BlockFormat],
    out_dtype: torch.dtype,
    where: torch.device | Card,
    bias: torch.dtype | None,
    experts: int | None,
    batch_invariant: bool = False,
) -> tuple[str, str, float | None]:
    """Return the backend, the reason, and predicted microseconds if there is a prediction."""
    (m, n, k), device = sizes, _META if isinstance(where, Card) else where
    if experts is None:
        if kind == "wgrad":
            k = columnwise_width(k, formats[1])
        of = GemmProblem(
            m, n, k, *formats, out_dtype, device, bias=bias, batch_invariant=batch_invariant
        )
        if isinstance(where, Card):
            return predict_gemm(of, where)
        choice, gpu = choose_gemm(of), _predicted_for(where)
        name, _, us = ("", "", None) if gpu is None else predict_gemm(of, gpu)
        return choice.name, choice.reason, us if name == choice.name else None
    if kind == "wgrad":
        problem = GroupedProblem("wgrad", k, m, n, experts, *formats, out_dtype, device)
    else:
        problem = GroupedProblem("gemm", m, n, k, experts, *formats, out_dtype, device)
    if isinstance(where, Card):
        return "gluon", GROUPED_BACKENDS[0].why(problem), None
    grouped = choose_grouped(problem)
    return grouped.name, grouped.reason, None


def _predicted_for(where: torch.device | Card) -> Card | None:
    """Return the card whose predictions apply; None for other devices."""
    if isinstance(where, Card):
        return where
    is_hopper = where.type == "cuda" and capability(where) == HOPPER
    return card(where) if is_hopper else None
