"""FP8 as functions: the same results as a converted model, without tensor subclasses."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from .autograd import any_linear as _linear
from .autograd import gated_mlp as _gated_mlp
from .autograd import norm as _norm
from .autograd.linear_cross_entropy import CrossEntropy
from .autograd.norm import Rounding
from .autograd.quantize import quantize
from .ops import checks
from .ops.producers.activations import ActivationName
from .overrides import dynamo as _whole_functions
from .recipe import Recipe, check_recipe
from .tensor.base import FP8Base

__all__ = [
    "gated_experts",
    "gated_mlp",
    "grouped_linear",
    "linear",
    "linear_cross_entropy",
    "quantize",
    "rms_norm",
]


def __dir__() -> list[str]:
    return __all__


def linear(
    x: Tensor, w: Tensor, bias: Tensor | None = None, *, recipe: Recipe | None = None
) -> Tensor:
    """Return ``x wᵀ (+ bias)`` in blockwise FP8, forward and backward, for plain tensors.

    A converted model (:func:`blocktensor.convert`) computes the same bits.

    With ``torch.compile`` and activation checkpointing together, torch 2.11 saves the intermediates
    of any ``autograd.Function``, including this one, within a checkpointed region (pytorch#177396;
    fixed in 2.12). Convert the model instead.

    Args:
        x: ``[..., K]`` bf16, fp16 or fp32, or ``blocktensor.quantize(x)``, or bytes and scales in
            1x128 blocks (``BlockwiseFP8Tensor.from_data``), whose scales must be powers of two if w
            needs a gradient.
        w: ``[N, K]``, of x's dtype (any, under autocast).
        bias: ``[N]`` or None.
        recipe: numeric choices; default ``Recipe()``.

    Returns:
        ``[..., N]`` in x's dtype, or autocast's.

    Raises:
        TypeError, ValueError: dtypes, shapes, devices or recipes that do not fit together.

    Examples:
        >>> x = torch.randn(8, 256, dtype=torch.bfloat16, requires_grad=True)
        >>> w = torch.randn(512, 256, dtype=torch.bfloat16, requires_grad=True)
        >>> y = blocktensor.functional.linear(x, w)
        >>> y.sum().backward()
        >>> y.shape, w.grad.shape
        (torch.Size([8, 512]), torch.Size([512, 256]))
    """
    _check(recipe, {"x": x, "w": w}, {"bias": bias})
    if _stays_whole(w, recipe):
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
    recipe: Recipe | None = None,
) -> Tensor:
    """Return ``down(activation(gate(x)) * up(x))`` in FP8, without separate kernels for casts.

    x is cast once for gate and up. One kernel computes ``h = activation(gate(x)) * up(x)`` and
    casts it, so that h is never stored in high precision. In backward, one kernel does the same for
    the gradients of gate and up. Forward and backward have the same bits as three :func:`linear`
    with eager ops between them. With ``Recipe(wgrad_input="high_precision")``, whose weight
    gradients read tensors in high precision, the separate ops run instead.

    :func:`blocktensor.fuse` makes the MLPs of a converted model use this function.

    Args:
        x: ``[..., K]`` bf16, fp16 or fp32, or ``blocktensor.quantize(x)``.
        w_gate, w_up: ``[I, K]``, of x's dtype (any, under autocast); or one weight ``[2I, K]`` of
            both, gate first, and None.
        w_down: ``[N, I]``, of the same dtype.
        bias_gate, bias_up, bias_down: ``[I]``, ``[I]`` and ``[N]``, or None; without ``w_up``,
            ``[2I]``, None and ``[N]``. Where a bias of gate or up is trained, the gradients of gate
            and up are stored in high precision.
        activation: "silu", "gelu" (by erf), "gelu_tanh" (by tanh), or "relu2" (the square of relu).
        recompute: save no form of h, for any activation, and compute the gradients of gate and up
            one after the other. This needs the least memory, and two more reads.
        recipe: numeric choices; default: the recipe of the weights, or ``Recipe()`` if they are
            plain.

    Returns:
        ``[..., N]`` in x's dtype, or autocast's.

    Raises:
        TypeError, ValueError: an unknown activation; dtypes, shapes, devices or recipes that do not
            fit together.

    Examples:
        >>> x = torch.randn(8, 256, dtype=torch.bfloat16)
        >>> gate, up = torch.randn(2, 512, 256, dtype=torch.bfloat16)
        >>> down = torch.randn(256, 512, dtype=torch.bfloat16)
        >>> blocktensor.functional.gated_mlp(x, gate, up, down, activation="gelu").shape
        torch.Size([8, 256])
    """
    _check(recipe, {"x": x}, {"bias_gate": bias_gate, "bias_up": bias_up, "bias_down": bias_down})
    weights, biases = (w_gate, w_up, w_down), (bias_gate, bias_up, bias_down)
    return _gated(x, weights, biases, None, activation, recompute, recipe)


def gated_experts(
    x: Tensor,
    w_gate: Tensor,
    w_up: Tensor | None,
    w_down: Tensor,
    offs: Tensor,
    *,
    activation: ActivationName = "silu",
    recompute: bool = False,
    recipe: Recipe | None = None,
) -> Tensor:
    """Run :func:`gated_mlp` for a mixture of experts: the MLP of expert e on the rows of group e.

    Forward and backward have the same bits as three :func:`grouped_linear` with eager ops between
    them. h and the gradients of gate and up are never stored in high precision. Rows of no group,
    from ``offs[-1]`` on, are zeros in the output and in the gradient of ``x``.

    Args:
        x: ``[T, K]``, sorted by expert, as :func:`grouped_linear` takes it.
        w_gate, w_up: ``[E, I, K]``, of x's dtype (any, under autocast), or transposed stacks; or
            one stack ``[E, 2I, K]`` of both, gate first, and None.
        w_down: ``[E, N, I]``, of the same dtype.
        offs: int32 ``[E]``, the row after the last of each group.
        activation, recompute, recipe: as in :func:`gated_mlp`.

    Returns:
        ``[T, N]`` in x's dtype, or autocast's.

    Raises:
        TypeError, ValueError: an unknown activation; dtypes, shapes, devices or recipes that do not
            fit together.

    Examples:
        >>> x = torch.randn(8, 256, dtype=torch.bfloat16)  # sorted by expert
        >>> gate, up = torch.randn(2, 3, 512, 256, dtype=torch.bfloat16)
        >>> down = torch.randn(3, 256, 512, dtype=torch.bfloat16)
        >>> tokens_per_expert = torch.tensor([5, 0, 3])
        >>> offs = tokens_per_expert.cumsum(0, dtype=torch.int32)
        >>> blocktensor.functional.gated_experts(x, gate, up, down, offs).shape
        torch.Size([8, 256])
    """
    _check(recipe, {"x": x, "offs": offs})
    weights, biases = (w_gate, w_up, w_down), (None, None, None)
    return _gated(x, weights, biases, offs, activation, recompute, recipe)


def linear_cross_entropy(
    x: Tensor,
    w: Tensor,
    target: Tensor,
    bias: Tensor | None = None,
    *,
    reduction: str = "mean",
    ignore_index: int = -100,
    chunk_size: int | None = None,
    recipe: Recipe | None = None,
    weight: Tensor | None = None,
    label_smoothing: float = 0.0,
) -> Tensor:
    """Return ``F.cross_entropy`` of fp32 ``x wᵀ + bias`` in FP8, without all tokens' logits.

    Logits and their gradients exist for ``chunk_size`` tokens at a time. The gradients of x, w and
    bias are computed in the forward; backward scales them by the gradient of the loss, which may
    round them once more unless it is 1. The gradient of w is summed over several chunks in an fp32
    ``[N, K]`` buffer. Second derivatives raise. ``torch.compile`` breaks its graph here; if it
    traces this function before any eager call, the logits of all tokens exist.

    Under FSDP2, call it where the weight is gathered: in the forward of the module that FSDP2 wraps
    the head with.

    Args:
        x: ``[..., K]`` bf16, fp16 or fp32, as the head takes it.
        w: ``[N, K]``: the weight of a converted head (``convert(model, convert_head=True)``), or a
            plain one, which is cast.
        target: int64 ``[...]``, the indices of classes.
        bias: ``[N]`` or None.
        reduction, ignore_index: as in ``F.cross_entropy``; the reductions are "mean" and "sum". The
            mean is divided by the number of targets that are not ignored or, with ``weight``, by
            the sum of their weights.
        chunk_size: tokens of a chunk, a multiple of 128; by default as many as fit in 4 GiB of
            temporary memory, at itemsize + 2 bytes a logit on a GPU, itemsize + 12 elsewhere.
        recipe: numeric choices where x and w are plain; default ``Recipe()``.
        weight: fp32 ``[N]``, the weights of the classes, without a gradient; or None.
        label_smoothing: from 0 to 1, as in ``F.cross_entropy``: the share of the loss that is the
            mean over all classes.

    Returns:
        The loss, an fp32 scalar. For no tokens the sum is 0 and the mean is nan.

    Raises:
        TypeError, ValueError: dtypes, shapes, devices, recipes or options that do not fit together.
        NotImplementedError: fake tensors, torch.func; a ``weight`` that requires a gradient.

    Examples:
        >>> x = torch.randn(300, 256, dtype=torch.bfloat16, requires_grad=True)
        >>> w = torch.zeros(1000, 256, dtype=torch.bfloat16, requires_grad=True)
        >>> target = torch.arange(300)
        >>> loss = blocktensor.functional.linear_cross_entropy(x, w, target, label_smoothing=0.1)
        >>> loss.backward()
        >>> round(loss.item(), 4)  # log(1000)
        6.9078
    """
    _check(recipe, {"x": x, "w": w, "target": target}, {"bias": bias})
    loss = CrossEntropy(reduction, ignore_index, weight, label_smoothing)
    if not _stays_whole(w, recipe) and not is_dynamo_compiling():
        _whole_functions.announce_if_loaded()
    return _whole_functions.linear_cross_entropy(x, w, target, bias, loss, chunk_size, recipe)


def rms_norm(
    x: Tensor,
    weight: Tensor | None = None,
    eps: float | None = None,
    *,
    kind: Rounding = "torch",
) -> Tensor:
    """Return ``x / sqrt(mean(x²) + eps) * weight`` over the last dimension, in the dtype of x.

    "torch" is ``torch.nn.functional.rms_norm(x, x.shape[-1:], weight, eps)``, and runs torch's
    kernel. torch has none for "llama" and "gemma", the norms of transformers. Written out, their
    forward runs eight kernels and saves x in fp32 and the normalized x. Here each direction runs
    one kernel, with the same bits; x and a number for each row are saved. Compilers get the ops as
    written out, and fuse them.

    Several linear layers that read the result can share one cast of it:
    ``y = quantize(rms_norm(x, weight))`` is cast once for all of them, and saved for their
    backwards in FP8. In a module, :func:`blocktensor.share_inputs` does the same.

    Args:
        x: ``[..., K]`` bf16, fp16 or fp32.
        weight: ``[K]``, of x's dtype ("torch" takes any), or None for ones ("gemma": zeros).
        eps: added to the mean of the squares; default ``torch.finfo(torch.float32).eps``, as
            torch's.
        kind: where values are rounded. All compute ``r = x / sqrt(mean(x²) + eps)`` in fp32.
            "torch": ``r * weight`` in fp32, then rounded; "llama": r is rounded, then multiplied by
            the weight (Llama, Mistral, Qwen, DeepSeek); "gemma": ``r * (1 + weight)`` in fp32, then
            rounded.

    Raises:
        TypeError, ValueError: an unknown kind; dtypes, shapes or devices that do not fit together.
        NotImplementedError: second derivatives of "llama" and "gemma".

    Examples:
        >>> x, weight = torch.tensor([[3.0, 4.0, 0.0, 0.0]]), torch.full((4,), 2.0)
        >>> blocktensor.functional.rms_norm(x, weight)
        tensor([[2.4000, 3.2000, 0.0000, 0.0000]])
    """
    _check(None, {"x": x}, {"weight": weight})
    return _norm.rms_norm(x, weight, eps, kind)


def _check(
    recipe: object, needed: Mapping[str, object], optional: Mapping[str, object] | None = None
) -> None:
    """Check that arguments are tensors and a recipe, else TypeError; ``optional`` may be None."""
    for name, x in (*needed.items(), *(optional or {}).items()):
        if x is not None or name in needed:
            checks.tensor(x, name)
    check_recipe(recipe)


def _gated(
    x: Tensor,
    weights: tuple[Tensor, Tensor | None, Tensor],
    biases: tuple[Tensor | None, Tensor | None, Tensor | None],
    *how: Any,
) -> Tensor:
    """Run a gated MLP or, with ``offs``, gated experts. The plan checks ``w_down``.

    ``how``: the arguments offs, activation, recompute and recipe.
    """
    offs, _, recompute, recipe = how
    _check(None, {}, {"w_gate": weights[0], "w_up": weights[1]})
    checks.flag(recompute, "recompute")
    if any(_stays_whole(w, recipe) for w in weights):
        linears = _gated_mlp.linears_by(linear, grouped_linear, offs, recipe)
        return _whole_functions.gated_mlp(linears, x, weights, biases, *how)
    if not is_dynamo_compiling():
        _whole_functions.announce_if_loaded()
    return _gated_mlp.gated_mlp(x, weights, biases, *how)


def _stays_whole(w: Tensor | None, recipe: Recipe | None) -> bool:
    """Return True if a matmul with ``w`` must be a torch function while Dynamo traces.

    Dynamo traces into functions that are not torch's. The cached casts of a weight would then
    become inputs of its graph, and every guard would cast again.

    Raises:
        NotImplementedError: ``recipe`` is not the weight's, and torch functions take none.
    """
    whole = is_dynamo_compiling() and isinstance(w, FP8Base)
    if whole and recipe not in (None, getattr(w, "recipe", None)):
        raise NotImplementedError(
            "torch.compile of a function of blocktensor with an FP8 weight and another recipe: "
            "leave out the recipe, and make the weight with it: BlockwiseFP8Weight(w, recipe)"
        )
    return whole


def grouped_linear(
    x: Tensor, w: Tensor, offs: Tensor, bias: Tensor | None = None, *, recipe: Recipe | None = None
) -> Tensor:
    """Multiply the rows of group e by expert ``w[e]`` in blockwise FP8, forward and backward.

    ``y[rows of group e] = x[rows of group e] w[e]ᵀ (+ bias[e])``. Groups are consecutive rows of
    ``x``. They may have any sizes, which the host never reads: a training step does not
    synchronise, and one CUDA graph works for all sizes. Rows of no group, from ``offs[-1]`` on, are
    zeros in the output and in the gradient of ``x``, whatever they held.

    ``F.grouped_mm(x, w.transpose(-2, -1), offs=offs)`` with a converted ``w`` computes the same
    bits.

    Args:
        x: ``[T, K]`` bf16, fp16 or fp32, sorted by expert; or in FP8, as bytes and scales in 1x128
            blocks (``BlockwiseFP8Tensor.from_data``) or ``blocktensor.quantize(x)``, whose scales
            must be powers of two if w needs a gradient.
        w: ``[E, N, K]``, of x's dtype (any, under autocast); ``w.transpose(1, 2)`` of a stack
            ``[E, K, N]``, at no cost.
        offs: int32 ``[E]`` on the device of ``x``, the row after the last of each group:
            ``tokens_per_expert.cumsum(0, dtype=torch.int32)``. Nondecreasing, at most T.
        bias: ``[E, N]`` or None.
        recipe: numeric choices; default ``Recipe()``.

    Returns:
        ``[T, N]`` in x's dtype, or autocast's.

    Raises:
        TypeError, ValueError: dtypes, shapes, devices or recipes that do not fit together.

    Examples:
        >>> x = torch.randn(8, 256, dtype=torch.bfloat16)  # sorted by expert
        >>> w = torch.randn(3, 512, 256, dtype=torch.bfloat16)
        >>> offs = torch.tensor([5, 0, 3]).cumsum(0, dtype=torch.int32)
        >>> blocktensor.functional.grouped_linear(x, w, offs).shape
        torch.Size([8, 512])
    """
    _check(recipe, {"x": x, "w": w, "offs": offs}, {"bias": bias})
    if _stays_whole(w, recipe):
        made: Tensor = torch._grouped_mm(x, w.transpose(1, 2), offs, bias)
        return made
    return _linear.grouped_linear(x, w, offs, bias, recipe=recipe)
