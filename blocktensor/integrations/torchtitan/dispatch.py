"""Let torchtitan's token dispatchers send tokens to the ranks of their experts in FP8."""

from __future__ import annotations

from collections.abc import Sequence
from types import MethodType
from typing import Any

from torch import Tensor, nn
from torchtitan.models.common.moe import RoutedExperts
from torchtitan.models.common.token_dispatcher import AllToAllTokenDispatcher, LocalTokenDispatcher

from ...sharding.dtensor import fp8_part
from ...tensor.fp8_tensor import BlockwiseFP8Tensor
from ...tensor_parallel.all_to_all import all_to_all_fp8


def dispatch_in_fp8(model: nn.Module) -> list[str]:
    """Send the tokens of all experts in FP8; results return in high precision.

    Experts in high precision get their tokens in high precision.

    Returns:
        The names of the modules whose dispatchers send so.

    Raises:
        NotImplementedError: a dispatcher other than torchtitan's all-to-all.
    """
    found = []
    for name, module in model.named_modules():
        if isinstance(module, RoutedExperts) and _is_in_fp8(module.inner_experts):
            dispatcher = module.token_dispatcher
            if type(dispatcher) is LocalTokenDispatcher:
                continue  # nothing is sent
            if type(dispatcher) is not AllToAllTokenDispatcher:
                raise NotImplementedError(
                    f"dispatch_in_fp8=True: {name!r} has a {type(dispatcher).__name__}, which "
                    f"sends tokens by itself; use torchtitan's AllToAllTokenDispatcher "
                    f"(moe_comm_backend='standard'), or dispatch_in_fp8=False"
                )
            dispatcher._dispatch_token_exchange = MethodType(_exchange_in_fp8, dispatcher)
            dispatcher.blockwise_fp8_recipe = module.inner_experts.w1_EFD.recipe
            found.append(name)
    return found


def _is_in_fp8(experts: nn.Module) -> bool:
    stacks = [x for x in experts.parameters(recurse=False) if x.ndim == 3]
    return stacks != [] and all(fp8_part(x) is not None for x in stacks)


def _exchange_in_fp8(
    dispatcher: Any,
    routed_input_ND: Tensor,
    pg: Any,
    output_splits: Sequence[int],
    input_splits: Sequence[int],
) -> BlockwiseFP8Tensor:
    """Replace ``AllToAllTokenDispatcher._dispatch_token_exchange``."""
    return all_to_all_fp8(
        routed_input_ND,
        output_splits,
        input_splits,
        dispatcher.ep_mesh,
        recipe=dispatcher.blockwise_fp8_recipe,
    )
