"""Pack what compiled graphs save, by hooks that AOTAutograd puts into the graphs of a function.

AOTAutograd inlines saved-tensor hooks that are graph modules: it asks them about each intermediate
that a forward graph saves (neither inputs nor outputs), and traces what they do into both graphs.
The hooks of this file decide with the node that computes the tensor, not with autograd's graph.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeAlias

import torch
from torch import Tensor, fx

from ..ops.cast.ops import dequantize, quantize_rowwise
from ..ops.formats import BLOCKS_1X128, Quantized
from ..tensor.torch_internals.callers import inputs_held_by_modules
from .graph_order import note_end, place_ops
from .saved_kinds import MAX_HEAD, MIN_ELEMENTS

PackedInGraph: TypeAlias = Tensor | tuple[Tensor, Tensor, torch.dtype] | tuple[Tensor, int, int]
"""A saved tensor; its e4m3 data in its shape, the scales and its dtype; or one of the heads that
repeat, the dimension of heads and how often each repeats."""

_ATTENTION = "attention", "attn"
_IN_ORDER = "aten.view", "aten._unsafe_view", "aten.clone"
"""Operations whose results have the elements of the input, in the same order."""

_MATMULS = "blocktensor.", "aten.mm", "aten.addmm", "aten.bmm", "aten.baddbmm", "aten.convolution"
_EQUALITY = "aten.eq.", "aten.ne."
_ORDER = "aten.lt.Tensor", "aten.le.Tensor", "aten.gt.Tensor", "aten.ge.Tensor"
_PROBABILITIES = "softmax", "sumexp", "aten.amax"
"""Parts of the names of operations that compute probabilities, or begin to."""

_PRODUCTS = ("aten.prod.",)
"""Parts of the names of operations whose result backward divides by their inputs."""


def inlined_hook(function: Callable[[Any], Any]) -> Any:
    """Return a saved-tensor hook that AOTAutograd takes for a graph module, and inlines.

    AOTAutograd traces calls of it, and reads its graph for the keys of caches alone. Compiled
    autograd looks up what modules have, and refuses ``function``, which Dynamo must not trace.

    Args:
        function: runs a call, without another Python frame, which Dynamo would trace.
    """
    graph = fx.Graph()
    graph.output(graph.placeholder("x"))
    members = {
        "__class__": property(lambda self: fx.GraphModule),
        **dict.fromkeys(("__call__", "_call_impl", "forward"), staticmethod(function)),
        **dict.fromkeys(("named_parameters", "named_buffers"), lambda self, *_: ()),
    }
    hook: Any = type("InlinedHook", (), members)()
    hook.graph = graph
    return hook


def graphs() -> dict[str, Any] | None:
    """Return what AOTAutograd asks the hooks about; None in eager mode.

    ``_node`` of ``_fw_graph`` computes the tensor; ``_bw_graph`` gets it under the same name.
    """
    aot_autograd = sys.modules.get("torch._functorch._aot_autograd.graph_compile")
    return None if aot_autograd is None else aot_autograd._get_saved_tensor_hook_context()


def pack_in_graph(x: Tensor, asked: dict[str, Any]) -> PackedInGraph:
    """Return what the forward graph saves of a tensor, and the backward graph gets.

    Heads that repeat are saved once, exactly.
    """
    node = asked["_node"]
    heads = _repeated_heads(x, node)
    if heads is not None:
        note_end(asked)
        dim, times = heads
        return x.unflatten(dim, (-1, times)).select(dim + 1, 0).contiguous(), dim, times
    if not _is_activation(x, node) or node.name in _read_exactly(asked["_bw_graph"]):
        return x
    note_end(asked)
    data, scale, _ = quantize_rowwise(x.flatten(0, -2), BLOCKS_1X128)
    return data.view(x.shape), scale, x.dtype


def unpack_in_graph(saved: PackedInGraph, asked: dict[str, Any]) -> Tensor:
    """Return the tensor with rounded values."""
    if isinstance(saved, Tensor):
        return saved
    place_ops(asked)
    if isinstance(saved[1], int):
        heads, dim, times = saved
        return heads.repeat_interleave(times, dim)
    data, scale, dtype = saved
    rows = Quantized(data.flatten(0, -2), scale, BLOCKS_1X128)
    made: Tensor = dequantize(rows, dtype).view(data.shape)
    return made


def _is_activation(x: Tensor, node: fx.Node) -> bool:
    """Return True for the values that an eager context packs, as far as a graph tells them.

    Values in fp32 are statistics, where a model computes in 16 bits.
    """
    from torch.fx.experimental.symbolic_shapes import guard_or_false  # imports SymPy

    return (
        x.dtype in (torch.bfloat16, torch.float16)
        and 1 < x.ndim <= 3
        and guard_or_false(x.numel() >= MIN_ELEMENTS)
        and guard_or_false(x.shape[-1] >= BLOCKS_1X128.cols)
        and not (x.ndim == 3 and guard_or_false(x.shape[-1] <= MAX_HEAD))  # of attention
        and x.is_contiguous()
        and node.op != "placeholder"
        and not _needs_exact_values(node)
        and not _is_of_parameters(node)
    )


def _repeated_heads(x: Tensor, node: fx.Node) -> tuple[int, int] | None:
    """Return the dimension of heads and how often each repeats, for keys and values of groups.

    Models repeat them by an added dimension, which is expanded, copied and merged into the heads.
    """
    while node.op == "call_function" and _is_named(node, _IN_ORDER):
        node = node.all_input_nodes[0]
    if not (_is_named(node, ("aten.expand",)) and x.is_contiguous()):
        return None
    one, expanded = (each.meta["val"].shape for each in (node.all_input_nodes[0], node))
    for dim, times in enumerate(expanded[1:]):
        rest = one[dim + 2 :]
        if (
            isinstance(times, int)
            and times > 1
            and one[dim + 1 : dim + 2] == (1,)
            and expanded == (*one[: dim + 1], times, *rest)
            and x.shape == (*one[:dim], one[dim] * times, *rest)
        ):
            return dim, times
    return None


def _needs_exact_values(node: fx.Node) -> bool:
    """Return True for logits, for probabilities, and for factors of a product.

    Backward computes exponentials of their values, or divides by them.
    """
    readers = _walk([node], lambda x: x.users if x is node or not _is_named(x, _MATMULS) else ())
    return any(_is_named(x, _PROBABILITIES + _PRODUCTS) for x in readers)


def _read_exactly(graph: fx.Graph) -> set[str]:
    """Return the names of the inputs of a backward graph that must have their exact values.

    They are queries, keys, values and outputs of attention, and tensors that are compared with each
    other, such as an input of ``amax`` with its result. The graph may get them in other shapes, or
    before operations that it computes again; it computes no matmul again but in checkpointed parts.
    """
    operands: list[fx.Node] = []
    for node in graph.nodes:
        if _is_named(node, _ATTENTION) and _is_named(node, ("backward",)):
            operands += node.all_input_nodes[1:]  # the first is the gradient
        elif _is_named(node, _EQUALITY + _ORDER):
            operands += node.all_input_nodes
    made_of = _walk(operands, lambda x: () if _is_named(x, _MATMULS) else x.all_input_nodes)
    return {x.name for x in made_of if x.op == "placeholder"}


def _is_of_parameters(node: fx.Node) -> bool:
    """Return True if a value is computed from parameters and buffers alone."""
    inputs = node.graph.find_nodes(op="placeholder")
    held = {inputs[i] for i in inputs_held_by_modules()}
    made_of = _walk([node], lambda x: x.all_input_nodes)
    return all(x in held for x in made_of if x.op == "placeholder")


def _walk(
    nodes: Iterable[fx.Node], following: Callable[[fx.Node], Iterable[fx.Node]]
) -> Iterator[fx.Node]:
    """Yield nodes and all that follow them, each once."""
    found = dict.fromkeys(nodes)
    waiting = [*found]
    while waiting:
        node = waiting.pop()
        yield node
        new = dict.fromkeys(x for x in following(node) if x not in found)
        found |= new
        waiting += new


def _is_named(node: fx.Node, parts: tuple[str, ...]) -> bool:
    """Return True if the name of the operation has one of these parts."""
    name = str(node.target)
    return any(part in name for part in parts)
