"""Stateless FP8: the same results as a converted model, without subclasses in it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, overload

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from .autograd import gated_mlp as _gated_mlp
from .autograd import linear as _linear
from .autograd import quantize as _quantize
from .autograd.linear_cross_entropy import CrossEntropy
from .autograd.quantize import quantize
from .ops import checks
from .ops.norm.reference import NormKind
from .ops.producers.ops import ActivationName
from .overrides import dynamo as _whole_functions
from .recipe import DEFAULT_RECIPE, Recipe, is_recipe
from .tensor.base import FP8Base
from .tensor.fp8_tensor import BlockwiseFP8Tensor

__all__ = [
    "gated_activation", "gated_experts", "gated_mlp", "grouped_linear", "linear",
    "linear_cross_entropy", "quantize", "rms_norm",
]  # fmt: skip


def __dir__() -> list[str]:
    return __all__


def linear(
    x: Tensor, w: Tensor, bias: Tensor | None = None, *, recipe: Recipe | None = None
) -> Tensor:
    """Return ``x wᵀ (+ bias)`` in blockwise FP8, forward and backward, for plain tensors.

    A converted model (:func:`blocktensor.convert`) computes the same bits.

    With ``torch.compile`` and activation checkpointing together, torch 2.11 saves intermediates of
    this function within a checkpointed region, as of any ``autograd.Function`` (pytorch#177396;
    2.13 does not): convert the model there.

    Args:
        x: ``[..., K]`` bf16, fp16 or fp32, or ``blocktensor.quantize(x)``.
        w: ``[N, K]``, of x's dtype (any, under autocast).
        bias: ``[N]`` or None.
        recipe: numeric choices; default ``Recipe()``.

    Returns:
        ``[..., N]`` in x's dtype, or autocast's.

    Raises:
        TypeError, ValueError: dtypes, shapes, devices or recipes that do not fit together.
    """
    _check(recipe, {"x": x, "w": w}, {"bias": bias})
    if _stays_whole(w):
        return torch.nn.functional.linear(x, w, bias)
    return _linear.linear(x, w, bias, recipe=recipe)


def gated_mlp(
    x: Tensor,
    w_gate: Tensor,
    w_up: Tensor | None,
    w_down: Tensor,
    bias_gate: Tensor | None = None,
    bias_up: Tensor | None = None,
    bias_down: Tensor | None = None,
    *,
    activation: ActivationName = "silu",
    recompute: bool = False,
    store_fp8: bool = False,
    recipe: Recipe | None = None,
) -> Tensor:
    """Return ``down(activation(gate(x)) * up(x))`` in FP8, without passes for casts.

    x is cast once for gate and up. ``h = activation(gate(x)) * up(x)`` is cast as it is computed,
    and is never stored in high precision; so are the gradients of gate and up in the backward, from
    one read of what they depend on. The bits, forward and backward, are those of three
    :func:`linear` with eager ops between them. With ``Recipe(wgrad_input="high_precision")``, whose
    weight gradients read high precision, it runs these.

    :func:`blocktensor.fuse` lets the MLPs of a converted model run so.

    Args:
        x: ``[..., K]`` bf16, fp16 or fp32, or ``blocktensor.quantize(x)``.
        w_gate, w_up: ``[I, K]``, of x's dtype (any, under autocast); or one weight ``[2I, K]`` of
            both, gate first, and None.
        w_down: ``[N, I]``, alike.
        bias_gate, bias_up, bias_down: ``[I]``, ``[I]`` and ``[N]``, or None; without ``w_up``,
            ``[2I]``, None and ``[N]``. Where a bias of gate or up is trained, the gradients of gate
            and up are stored in high precision.
        activation: "silu", "gelu" (by erf), "gelu_tanh" or "relu2" (the square of relu).
        recompute: backward makes the columnwise form of h again, which takes another read of gate
            and up, in place of saving it: a byte for each of its elements.
        store_fp8: gate and up are saved for backward as rowwise FP8, a byte for each element in
            place of two. The output keeps its bits. Gradients do not: those of gate and up, and h
            where it is made again, are computed from the dequantized values. No effect where
            weight gradients read high precision.
        recipe: numeric choices; default ``Recipe()``, or that of the weights.

    Returns:
        ``[..., N]`` in x's dtype, or autocast's.

    Raises:
        TypeError, ValueError: an unknown activation; dtypes, shapes, devices or recipes that do not
            fit together.
    """
    _check(recipe, {"x": x}, {"bias_gate": bias_gate, "bias_up": bias_up, "bias_down": bias_down})
    weights, biases = (w_gate, w_up, w_down), (bias_gate, bias_up, bias_down)
    return _gated(x, weights, biases, None, activation, recompute, store_fp8, recipe)


def gated_experts(
    x: Tensor,
    w_gate: Tensor,
    w_up: Tensor | None,
    w_down: Tensor,
    offs: Tensor,
    *,
    activation: ActivationName = "silu",
    recompute: bool = False,
    store_fp8: bool = False,
    recipe: Recipe | None = None,
) -> Tensor:
    """Run :func:`gated_mlp` for a mixture of experts: rows of group e by the MLP of expert e.

    The bits, forward and backward, are those of three :func:`grouped_linear` with eager ops between
    them. h and the gradients of gate and up take no memory in high precision. Rows of no group,
    from ``offs[-1]`` on, are zeros in the output and in the gradient of ``x``.

    Args:
        x: ``[T, K]``, sorted by expert, as :func:`grouped_linear` takes it.
        w_gate, w_up: ``[E, I, K]``, of x's dtype (any, under autocast), or transposed stacks; or
            one stack ``[E, 2I, K]`` of both, gate first, and None.
        w_down: ``[E, N, I]``, alike.
        offs: int32 ``[E]``, the row after the last of each group.
        activation, recompute, store_fp8, recipe: as in :func:`gated_mlp`.

    Returns:
        ``[T, N]`` in x's dtype, or autocast's.

    Raises:
        TypeError, ValueError: an unknown activation; dtypes, shapes, devices or recipes that do not
            fit together.
    """
    _check(recipe, {"x": x, "offs": offs})
    weights, biases = (w_gate, w_up, w_down), (None, None, None)
    return _gated(x, weights, biases, offs, activation, recompute, store_fp8, recipe)


def gated_activation(
    gate: Tensor,
    up: Tensor,
    activation: ActivationName = "silu",
    recipe: Recipe | None = None,
) -> BlockwiseFP8Tensor:
    """Return ``quantize(activation(gate) * up)`` in one read, with no high-precision product.

    SwiGLU, if ``activation`` is "silu". The bits, forward and backward, are those of eager ops and
    :func:`quantize`. Saved for backward: gate and up. :func:`gated_mlp` also casts the gradients as
    they are computed.

    Args:
        gate: ``[..., I]`` bf16, fp16 or fp32.
        up: alike.
        activation: "silu", "gelu" (by erf), "gelu_tanh" or "relu2" (the square of relu).
        recipe: that of the weights the result will meet; default ``Recipe()``. With
            ``wgrad_input="high_precision"`` the product is computed and kept.

    Returns:
        ``[..., I]`` in FP8, both forms; for linears.

    Raises:
        TypeError, ValueError: an unknown activation; shapes, dtypes or devices that differ; a
            scalar.
    """
    _check(recipe, {"gate": gate, "up": up})
    recipe = recipe or DEFAULT_RECIPE
    if is_dynamo_compiling():
        return _whole_functions.gated_activation(gate, up, activation, recipe)
    _whole_functions.announce_if_loaded()
    return _quantize.gated_activation(gate, up, activation, recipe)


def rms_norm(
    x: Tensor,
    weight: Tensor,
    eps: float = 1e-6,
    kind: NormKind = "llama",
    recipe: Recipe | None = None,
) -> BlockwiseFP8Tensor:
    """Return ``quantize`` of an RMS norm, for the linears that read it (q, k, v; gate, up).

    The bits, forward and backward, are those of transformers' norms in eager mode and
    :func:`quantize`; an fp32 x that has other uses may sum its gradients in another order. The
    result in high precision is neither stored nor saved: backward reads x.

    Args:
        x: ``[..., K]`` bf16, fp16 or fp32.
        weight: ``[K]``. Of another dtype than x, the norm is computed by torch's ops.
        eps: added to the mean square.
        kind: "llama": ``weight * (x / rms).to(x.dtype)``, as Llama, Mistral, Qwen and DeepSeek
            write it; "gemma": ``(x / rms * (1 + weight))`` in fp32, then rounded.
        recipe: that of the weights the result will meet; default ``Recipe()``. With
            ``wgrad_input="high_precision"`` the norm is computed by torch's ops and kept.

    Returns:
        ``[..., K]`` in FP8, both forms; for linears.

    Raises:
        TypeError, ValueError: an unknown kind; shapes, dtypes or devices that do not fit.
    """
    _check(recipe, {"x": x, "weight": weight})
    checks.number(eps, "eps")
    recipe = recipe or DEFAULT_RECIPE
    checks.high_precision(x, "x")
    checks.high_precision(weight, "the weight of a norm")
    if is_dynamo_compiling():
        return _whole_functions.rms_norm(x, weight, eps, kind, recipe)
    _whole_functions.announce_if_loaded()
    return _quantize.rms_norm(x, weight, eps, kind, recipe)


def linear_cross_entropy(
    x: Tensor,
    w: Tensor,
    target: Tensor,
    bias: Tensor | None = None,
    *,
    class_weight: Tensor | None = None,
    reduction: str = "mean",
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    chunk_size: int | None = None,
    recipe: Recipe | None = None,
) -> Tensor:
    """Return ``F.cross_entropy`` of fp32 ``x wᵀ + bias`` in FP8, without all tokens' logits.

    Logits and their gradients exist for ``chunk_size`` tokens at a time. The gradients of x, w and
    bias are computed in the forward; backward scales them by the gradient of the loss, which may
    round them once more unless it is 1. The gradient of w is summed over several chunks in an fp32
    ``[N, K]`` buffer. Second derivatives raise. ``torch.compile`` breaks its graph here; it has the
    logits of all tokens if it meets this function before any eager call.

    Under FSDP2, call it where the weight is gathered: in the forward of the module that FSDP2 wraps
    the head with.

    Args:
        x: ``[..., K]`` bf16, fp16 or fp32, as the head takes it.
        w: ``[N, K]``: the weight of a converted head (``convert(model, convert_head=True)``), or a
            plain one, which is cast.
        target: int64 ``[...]``, the indices of classes.
        bias: ``[N]`` or None.
        class_weight: fp32 ``[N]``, the ``weight`` of ``F.cross_entropy``.
        reduction, ignore_index, label_smoothing: as in ``F.cross_entropy``; the reductions are
            "mean" and "sum".
        chunk_size: tokens of a chunk, a multiple of 128; by default as many as take 4 GiB of
            temporary memory: a logit and 2 bytes on a GPU; and 12 elsewhere, or with
            ``class_weight`` or ``label_smoothing``.
        recipe: numeric choices where x and w are plain; default ``Recipe()``.

    Returns:
        The loss, an fp32 scalar. Of no tokens it is 0 as a sum and nan as a mean.

    Raises:
        TypeError, ValueError: dtypes, shapes, devices, recipes or options that do not fit together.
        NotImplementedError: fake tensors, torch.func; ``weight.main_grad`` under DDP.
    """
    _check(recipe, {"x": x, "w": w, "target": target}, {"bias": bias, "class_weight": class_weight})
    if class_weight is not None and class_weight.dtype != torch.float32:
        raise TypeError(
            f"class_weight has dtype {class_weight.dtype}: expected that of the loss, fp32; pass "
            f"class_weight.float()"
        )
    loss = CrossEntropy(class_weight, reduction, ignore_index, label_smoothing)
    if not is_dynamo_compiling():
        _whole_functions.announce_if_loaded()
    return _whole_functions.linear_cross_entropy(x, w, target, bias, loss, chunk_size, recipe)


def _check(
    recipe: object, needed: Mapping[str, object], optional: Mapping[str, object] | None = None
) -> None:
    """Raise TypeError unless all are tensors and a recipe; ``optional`` ones may be None."""
    for name, x in (*needed.items(), *(optional or {}).items()):
        if x is not None or name in needed:
            checks.tensor(x, name)
    is_recipe(recipe)


def _gated(
    x: Tensor,
    weights: tuple[Tensor, Tensor | None, Tensor],
    biases: tuple[Tensor | None, Tensor | None, Tensor | None],
    offs: Tensor | None,
    activation: ActivationName,
    recompute: bool,
    store_fp8: bool,
    recipe: Recipe | None,
) -> Tensor:
    """Run a gated MLP, of experts with ``offs``; the plan checks ``w_down``."""
    _check(None, {}, {"w_gate": weights[0], "w_up": weights[1]})
    for option, value in (("recompute", recompute), ("store_fp8", store_fp8)):
        if not isinstance(value, bool):
            raise TypeError(f"{option}={value!r}: expected True or False")
    options = activation, recompute, store_fp8
    if any(map(_stays_whole, weights)):
        return _whole_functions.gated_mlp(x, weights, biases, offs, *options)
    if not is_dynamo_compiling():
        _whole_functions.announce_if_loaded()
    return _gated_mlp.gated_mlp(x, *weights, *biases, *options, recipe, offs)


def _stays_whole(w: Tensor | None) -> bool:
    """Return True if a matmul with ``w`` must be a torch function while Dynamo traces.

    It looks into others, and would take casts for inputs of its graph, made anew at every guard.
    """
    return is_dynamo_compiling() and isinstance(w, FP8Base)


@overload
def grouped_linear(
    x: Tensor, w: Tensor, offs: Tensor, bias: Tensor | None = None, *, recipe: Recipe | None = None
) -> Tensor: ...


@overload
def grouped_linear(
    x: Tensor,
    w: Sequence[Tensor],
    offs: Tensor,
    bias: Sequence[Tensor | None] | None = None,
    *,
    recipe: Recipe | None = None,
) -> tuple[Tensor, ...]: ...


def grouped_linear(
    x: Tensor,
    w: Tensor | Sequence[Tensor],
    offs: Tensor,
    bias: Tensor | Sequence[Tensor | None] | None = None,
    *,
    recipe: Recipe | None = None,
) -> Tensor | tuple[Tensor, ...]:
    """Multiply the rows of group e by expert ``w[e]`` in blockwise FP8, forward and backward.

    ``y[rows of group e] = x[rows of group e] w[e]ᵀ (+ bias[e])``. The rows of ``x`` belong to
    groups, one after the other. Groups may have any sizes, which no step reads on the host: a
    training step does not synchronise, and one CUDA graph serves all sizes. Rows of no group, from
    ``offs[-1]`` on, are zeros in the output and in the gradient of ``x``, whatever they held.

    ``F.grouped_mm(x, w.transpose(-2, -1), offs=offs)`` of a converted ``w`` computes the same bits.

    Args:
        x: ``[T, K]`` bf16, fp16 or fp32, sorted by expert. ``blocktensor.quantize(x)`` serves
            weights that need no gradient; a tensor that holds its rowwise form alone, as
            :func:`blocktensor.distributed.all_to_all_fp8` returns it, serves all, and is cast again
            for the gradient of the weight.
        w: ``[E, N, K]``, of x's dtype (any, under autocast); ``w.transpose(1, 2)`` of a stack
            ``[E, K, N]``, at no cost. Or several such weights (gate, up), for which x is cast once.
        offs: int32 ``[E]`` on the device of ``x``, the row after the last of each group:
            ``tokens_per_expert.cumsum(0, dtype=torch.int32)``. Nondecreasing, at most T.
        bias: ``[E, N]`` or None; one for each of several weights.
        recipe: numeric choices; default ``Recipe()``.

    Returns:
        ``[T, N]`` in x's dtype, or autocast's; a tuple of them for several weights.

    Raises:
        TypeError, ValueError: dtypes, shapes, devices or recipes that do not fit together.
    """
    is_several = isinstance(w, (list, tuple))
    many: Any = w
    several = {f"w[{i}]": each for i, each in enumerate(many)} if is_several else {"w": w}
    _check(recipe, {"x": x, "offs": offs, **several})
    if isinstance(w, Tensor):
        if bias is not None and not isinstance(bias, Tensor):
            raise TypeError(f"one weight has one bias [E, N], got a {type(bias).__name__}")
        if _stays_whole(w):
            made: Tensor = torch._grouped_mm(x, w.transpose(1, 2), offs, bias)
            return made
        return _linear.grouped_linear(x, w, offs, bias, recipe=recipe)
    biases = [None] * len(w) if bias is None else bias
    if isinstance(biases, Tensor) or len(biases) != len(w) or not len(w):
        raise ValueError(
            f"{len(w)} weights with "
            f"{'a single bias' if isinstance(biases, Tensor) else f'{len(biases)} biases'}: "
            f"expected one for each of at least one weight, or bias=None"
        )
    if any(map(_stays_whole, w)):  # compilers find that the casts of x are one
        pairs = zip(w, biases, strict=True)
        return tuple(grouped_linear(x, each, offs, b, recipe=recipe) for each, b in pairs)
    return _linear.grouped_linears(x, w, offs, biases, recipe)
