"""Expert parallel in transformers with tokens sent in FP8.

``DistributedConfig(ep_implementation="all_to_all_fp8")`` names it.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.compiler import is_compiling
from transformers.distributed.expert_parallel import AllToAllEP, EPImplementationInterface

from ...recipe import Recipe
from ...sharding.dtensor import fp8_part
from ...tensor_parallel.all_to_all import all_to_all_fp8

NAME = "all_to_all_fp8"


class AllToAllFP8EP(AllToAllEP):
    """transformers' ``AllToAllEP`` whose tokens travel to the experts in FP8; outputs do not."""

    def __init__(self, experts: Any, ep_mesh: Any, tp_mesh: Any) -> None:
        """Remember the experts.

        Raises:
            NotImplementedError: ranks of tensor parallelism share a batch.
        """
        super().__init__(experts, ep_mesh, tp_mesh)
        self._experts = experts
        if tp_mesh.size() > 1:
            raise NotImplementedError(
                f"ep_implementation={NAME!r} with {tp_mesh.size()} ranks that share a batch: set "
                f"tp_size=1, or ep_implementation='all_to_all'"
            )

    def __call__(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Return the weighted sum of the experts' outputs for each token of this rank."""
        experts = self._experts
        was_cut = experts._is_expert_parallel
        experts._is_expert_parallel = False  # else rows are masked in place, and none is masked
        try:
            output: Tensor = super().__call__(hidden_states, top_k_index, top_k_weights)
        finally:
            experts._is_expert_parallel = was_cut
        return output

    def _dispatch_tokens(
        self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
    ) -> Any:
        # no width: super() makes the order and the counts, and sends nothing
        _, expert_ids, _, state = super()._dispatch_tokens(
            hidden_states[:, :0], top_k_index, top_k_weights
        )
        rows = hidden_states[state.order // top_k_index.size(-1)]
        sizes = state.recv_sizes, state.send_sizes
        group: dist.ProcessGroup = self.ep_mesh.get_group()
        tokens: Tensor = all_to_all_fp8(rows, *sizes, group, recipe=self._recipe())
        if tokens.shape[0] == 0 and not is_compiling():
            tokens = tokens.dequantize()  # super() adds up no rows, which FP8 tensors do not
        weights = torch.ones_like(expert_ids, dtype=tokens.dtype)
        return tokens, expert_ids, weights, state

    def _recipe(self) -> Recipe:
        """Return the recipe of the experts.

        Raises:
            ValueError: they are in high precision.
        """
        part = fp8_part(self._experts.down_proj)
        if part is None:
            raise ValueError(
                f"ep_implementation={NAME!r} for {type(self._experts).__name__}, whose stacks are "
                f"in high precision: convert them (blocktensor.convert), or set "
                f"ep_implementation='all_to_all'"
            )
        recipe: Recipe = part.recipe
        return recipe


EPImplementationInterface.register(NAME, AllToAllFP8EP)
