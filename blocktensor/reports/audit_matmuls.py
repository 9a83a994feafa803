"""Recognize the ops that are matmuls: shape, precision and FLOPs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from .audit_report import FP8

aten = torch.ops.aten
ours = torch.ops.blocktensor


class Matmul(NamedTuple):
    """The matmul that an op computes; see :class:`~.audit_report.AuditedMatmul`.

    Attributes:
        is_wgrad: the op computes only weight gradients.
        is_attention: the op computes attention.
        is_batched: it multiplies a stack of matrices by another.
    """

    batch: int
    m: int
    n: int
    k: int
    precision: str
    flops: int
    is_wgrad: bool = False
    is_attention: bool = False
    is_batched: bool = False

    def of_tokens(self, tokens: int) -> Matmul:
        """Return the matmul with K = ``tokens``, without the zeros that casts have appended."""
        return self._replace(k=tokens, flops=2 * self.batch * self.m * self.n * tokens)


_LEFT_OPERAND = {
    ours.gemm: 0,
    ours.grouped_gemm: 0,
    ours.grouped_gemm_wgrad: 0,
    **{
        getattr(aten, name): index
        for index, names in (
            (0, "mm bmm mv dot vdot _int_mm _scaled_mm _grouped_mm _scaled_grouped_mm"),
            (1, "addmm addmm_ _addmm_activation baddbmm baddbmm_ addbmm addbmm_ addmv addmv_"),
        )
        for name in names.split()
        if hasattr(aten, name)  # torch versions differ
    },
}
"""The position of the left operand in matmuls of ``[..., M, K]`` by ``[..., K, N]``."""

_COLUMNWISE = {
    ours.quantize_both: (2,),
    ours.quantize_columnwise: (0,),
}
"""The places of columnwise data in the results of casts. Casts in groups have a wgrad op."""

_THIN = {ours.thin_rows, ours.thin_products}
"""Our matmuls of adapters, which are not in FP8."""

_PRODUCERS = {ours.gated: 3, ours.gated_backward: 4, ours.joint_gated_backward: 3}
"""The place of the rowwise format's name in arguments of producers; columnwise is next."""

_ATTENTION = {
    *(packet for packet in flop_registry if "attention" in str(packet)),
    # torch has no FLOP formula for these
    *(
        getattr(aten, f"_scaled_dot_product_{kind}{direction}")
        for kind in ("flash_attention_for_cpu", "fused_attention_overrideable")
        for direction in ("", "_backward")
    ),
}

_HIDE_MATMULS = {
    aten._cudnn_rnn,
    aten._cudnn_rnn_backward,
    aten.miopen_rnn,
    aten.miopen_rnn_backward,
    aten.mkldnn_rnn_layer,
    aten.mkldnn_rnn_layer_backward,
    aten._trilinear,
    aten._native_multi_head_attention,
    aten._transformer_encoder_layer_fwd,
}
"""Ops with matmuls that no dispatch mode sees."""

_WITHOUT_MATMULS = {
    "aten",
    "prim",
    "prims",
    "blocktensor",
    "c10d",
    "_c10d_functional",
    "fsdp",
    "_dtensor",
    "_c10d_functional_autograd",
    "inductor",
    "profiler",
    "streams",
    "debugprims",
}
"""Namespaces of ops whose matmuls are all known here."""

_SHORT = {
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float32: "fp32",
    torch.float64: "fp64",
}


def packet_of(func: Any) -> Any:
    """Return the op of an overload; a higher-order operator is its own."""
    return getattr(func, "overloadpacket", func)


def matmul_of(func: Any, args: Sequence[Any], kwargs: dict[str, Any], out: Any) -> Matmul | None:
    """Return the matmul that ``func(*args, **kwargs)`` computed with result ``out``, if any."""
    packet = packet_of(func)
    left = _LEFT_OPERAND.get(packet)
    if left is not None:
        return _of_matrices(packet, left, args, out)
    if packet in _ATTENTION:
        return _of_attention(packet, args, kwargs, out)
    formula = flop_registry.get(packet)
    tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
    if formula is None or not tensors:
        return None
    # a convolution, or an op of a library that has registered its FLOPs
    if packet is aten.convolution_backward:
        flops = _flops_of_convolution_backward(args)
    else:
        flops = formula(*args, **kwargs, out_val=out)
    rows, weight = (args[0], args[2]) if packet is aten.convolution_backward else (out, None)
    n = m = k = 0
    if isinstance(rows, Tensor) and rows.ndim > 1:
        n = rows.shape[1]
        m = rows.numel() // max(n, 1)
        k = flops // max(2 * m * n, 1) if weight is None else weight.numel() // max(n, 1)
    return Matmul(1, m, n, k, _precision(packet, tensors[0]), flops)


def factors(func: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the operands of a matmul, without the tensor that it adds to."""
    return args[_LEFT_OPERAND.get(packet_of(func), 0) :]


def columnwise_data(func: Any, args: Sequence[Any], out: Any) -> list[Tensor]:
    """Return the data of the columnwise forms that ``func`` made."""
    packet = packet_of(func)
    if packet in _COLUMNWISE:
        return [out[place] for place in _COLUMNWISE[packet]]
    if packet in _PRODUCERS:
        first = _PRODUCERS[packet]
        row, col = (format is not None for format in args[first : first + 2])
        step = 2 * (row + col)  # data and scale of each form; the columnwise one is the last
        return [out[end - 2] for end in range(step, len(out) + 1, step)] if col else []
    return []


def hides_matmuls(func: Any) -> bool:
    """Return True if ``func``, which is no matmul, may run matmuls unseen."""
    packet = packet_of(func)
    if packet in flop_registry:
        return False
    if isinstance(func, torch._ops.HigherOrderOperator) or packet in _HIDE_MATMULS:
        return True
    if func.namespace == "symm_mem":  # collectives, some of which multiply what they gather
        return "mm" in packet.__name__ or "matmul" in packet.__name__
    return func.namespace not in _WITHOUT_MATMULS


def _of_matrices(packet: Any, left: int, args: Sequence[Any], out: Any) -> Matmul:
    a, b = args[left : left + 2]
    *lead, k = a.shape
    if packet is ours.grouped_gemm_wgrad:
        k = args[7]  # tokens; the operands are wider
    # casts in groups have more rows than the output
    m = out.shape[-2] if out.ndim > 1 else lead[-1] if lead else 1
    n = out.shape[-1] if out.ndim > 1 else 1
    is_batched = a.ndim == b.ndim == 3
    batch = a.shape[0] if is_batched else 1
    return Matmul(
        batch,
        m,
        n,
        k,
        _precision(packet, a),
        2 * batch * m * n * k,
        is_wgrad=packet is ours.grouped_gemm_wgrad,
        is_batched=is_batched,
    )


def _flops_of_convolution_backward(args: Sequence[Any]) -> int:
    """Return the FLOPs of the gradients of the input and of the weight.

    Each takes the FLOPs of the forward. torch's formula ignores groups: a depthwise convolution of
    C channels counts C times in it.
    """
    grad, x, weight = args[:3]
    rows = x if args[7] else grad  # transposed: every element of the input meets the weight
    flops: int = 2 * rows.shape[0] * math.prod(rows.shape[2:]) * weight.numel()
    return flops * sum(map(bool, args[10][:2]))


def _of_attention(packet: Any, args: Sequence[Any], kwargs: dict[str, Any], out: Any) -> Matmul:
    name = str(packet)
    is_backward = "backward" in name
    # backward ops take the output's gradient first, except for flex attention
    first = int(is_backward and "flex" not in name)
    q, k, v = args[first : first + 3]
    queries, keys = list(q.shape), list(k.shape)
    if "._flash" in name or "._efficient" in name:  # [..., length, heads, size]
        for shape in (queries, keys):
            shape[-3], shape[-2] = shape[-2], shape[-3]
    *lead, length, size = queries
    batch, n = math.prod(lead), keys[-2]
    if q.ndim == 3:  # sequences of several lengths, one by one
        flops = flop_registry[packet](*args, **kwargs, out_val=out)
    else:
        # scores, and scores by values; in the backward scores again, and four gradients
        sizes = 3 * size + 2 * v.shape[-1] if is_backward else size + v.shape[-1]
        flops = 2 * batch * length * n * sizes
    return Matmul(batch, length, n, size, _precision(packet, q), flops, is_attention=True)


def _precision(packet: Any, x: Tensor) -> str:
    if str(packet).startswith("blocktensor.") and packet not in _THIN:
        return FP8
    return _SHORT.get(x.dtype, str(x.dtype).removeprefix("torch."))
