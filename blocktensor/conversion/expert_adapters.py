"""Let peft's adapters of expert stacks run as thin matmuls on FP8 stacks.

peft's ``target_parameters`` wrap the module of a parameter. For the time of a forward they replace
the parameter by ``W + B A``, through a parametrization. For an FP8 stack, our wrapper of that
function replaces the parameter by an :class:`~.AdaptedWeight`, which computes no sum. The function
is wrapped when a weight becomes FP8, if peft is imported by then, or by
``import blocktensor.integrations.peft``.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ..overrides.matmul_functions import is_stack
from ..patches import EXPERT_ADAPTERS
from ..sharding.dtensor import fp8_part
from ..tensor.adapted import AdaptedWeight, LowRank
from ..tensor.base import FP8Base
from ..tensor.fp8_tensor import BlockwiseFP8Tensor
from ..tensor.torch_internals.frames import only_inlined
from .cut_expert_adapters import check_cut, thin_matrices


@EXPERT_ADAPTERS.made_by
def _adapting(theirs: Any) -> Any:
    @functools.wraps(theirs)
    @only_inlined
    def _activate_lora(self: Any, active_adapters: Sequence[str]) -> AbstractContextManager[None]:
        module, name = self.get_base_layer(), self.parameter_name
        weight = module._parameters.get(name)
        adapters = [x for x in active_adapters or () if x in self.lora_A]
        part = fp8_part(weight)
        is_cut = part is not weight
        if not adapters or part is None or not (is_cut or is_stack(part)):
            made: AbstractContextManager[None] = theirs(self, active_adapters)
            return made
        if is_cut:
            check_cut(weight, name)
        stack = weight.to_local() if is_cut else weight
        return _in_place_of(module, name, _adapted(stack, _terms(self, adapters, len(stack))))

    return _activate_lora


@only_inlined
def _adapted(weight: Any, terms: Sequence[LowRank]) -> Tensor:
    """Return an AdaptedWeight; make it of a frozen stack by a function that Dynamo keeps whole."""
    if not isinstance(weight, BlockwiseFP8Tensor):
        return AdaptedWeight(weight, terms)
    made: Tensor = weight
    for b, a, scaling in terms:
        made = torch.baddbmm(made, b, a, alpha=scaling)
    return made


@contextmanager
@only_inlined
def _in_place_of(module: nn.Module, name: str, adapted: Tensor) -> Iterator[None]:
    """Put a tensor in the place of a parameter."""
    parameters: Any = module._parameters
    weight = parameters[name]
    parameters[name] = adapted
    try:
        yield
    finally:
        parameters[name] = weight


def _terms(wrapper: Any, adapters: Sequence[str], experts: int) -> list[LowRank]:
    """Return the adapters' matrices ``[E, N, r]`` and ``[E, r, K]`` for a stack ``[E, N, K]``.

    peft stores A as ``[E r, in]`` and B as ``[out, r E]``; stacks are ``[E, out, in]``, or
    ``[E, in, out]`` in modules with ``is_transposed``. ``experts``: E, on this rank.
    """
    made = []
    for adapter in adapters:
        held = wrapper.lora_A[adapter].weight, wrapper.lora_B[adapter].weight
        if any(isinstance(x, FP8Base) for x in held):
            raise NotImplementedError(
                f"the matrices of an adapter of {wrapper.parameter_name!r} are FP8 weights, but "
                f"are multiplied in high precision: convert the model before get_peft_model, or "
                f"with blocktensor.convert, which leaves them as they are"
            )
        a, b = thin_matrices(wrapper, adapter, experts)
        b = b.permute(2, 0, 1)
        if not wrapper._did_swap_in_out_features:
            a, b = b.transpose(1, 2), a.transpose(1, 2)
        made.append(LowRank(b, a, wrapper.scaling[adapter]))
    return made
