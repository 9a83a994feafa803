"""Fused norms under torch.compile: the forms that are saved for backward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func
from torch._functorch.partitioners import min_cut_rematerialization_partition

from blocktensor.overrides import dynamo
from tests.support.compiling import afresh, graphs  # noqa: F401
from tests.support.gated import assert_bits
from tests.support.mlps import results
from tests.support.norms import NAMES, Norm, OfTorch, fused_blocks

dynamo.announce()


# Dynamo itself instantiates the Functions that it traces.
@pytest.mark.filterwarnings("ignore:.*should not be instantiated.*:DeprecationWarning")
@pytest.mark.parametrize("norm", [Norm, OfTorch])
def test_one_form_of_each_input_is_saved(norm: Any) -> None:
    saved: list[torch.Tensor] = []

    def see_forward(graph: Any, example: object) -> Callable[..., object]:
        results = graph.graph.output_node().args[0]
        found = (getattr(x, "meta", {}).get("val") for x in results)
        saved.extend(x for x in found if getattr(x, "dtype", None) == torch.float8_e4m3fn)
        return make_boxed_func(graph.forward)

    model, twin = fused_blocks(norm, fused=NAMES if norm is Norm else [])
    backend = aot_autograd(
        fw_compiler=see_forward,
        partition_fn=min_cut_rematerialization_partition,
    )
    run = torch.compile(model, fullgraph=True, backend=backend)
    assert_bits(results(model, run=run), results(twin))
    assert graphs() == 1
    # Of each layer: the input of o_proj and two norms. That of down_proj is made by backward.
    assert len(saved) == 6
