"""Place the ops that saved-tensor hooks add to compiled graphs next to the ops that they belong to.

AOTAutograd adds what packs at the end of the forward, and what unpacks at the beginning of the
backward. Compilers keep that order, so that all tensors would exist in high precision at once.
"""

from __future__ import annotations

from typing import Any

from torch import fx

_END = "blocktensor_end"


def note_end(asked: dict[str, Any]) -> None:
    """Note the last node of the forward graph, after which AOTAutograd adds what packs a tensor."""
    asked["_node"].meta[_END] = asked["_fw_graph"].output_node().prev


def place_ops(asked: dict[str, Any]) -> None:
    """Pack a tensor after the node that computes it, and unpack it before the first that reads it.

    Call this while AOTAutograd asks how the tensor is unpacked. The forward then has the ops that
    pack; the backward gets its own afterwards, and then AOTAutograd erases the node that returned
    the unpacked tensor.
    """
    forward, computes = asked["_fw_graph"], asked["_node"]
    for node in reversed(_between(computes.meta.pop(_END), forward.output_node())):
        computes.append(node)

    module = asked["_bw_graph"].owning_module

    def before_erasing(node: fx.Node) -> None:
        if node.op != "output":
            return
        module._unregister_erase_node_hook(before_erasing)
        (unpacked,) = node.all_input_nodes
        begin = node.prev
        while begin.op != "placeholder":
            begin = begin.prev
        made = _between(begin, node)
        first = min(user for user in unpacked.users if user is not node)
        for each in made:
            first.prepend(each)

    module._register_erase_node_hook(before_erasing)


def _between(begin: fx.Node, end: fx.Node) -> list[fx.Node]:
    nodes = []
    while (begin := begin.next) is not end:
        nodes.append(begin)
    return nodes
