"""Activations saved in FP8: compiled graphs keep theirs, or the context is refused."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from torch import Tensor

from blocktensor import saved_tensors_in_fp8
from tests.support.saved import assert_bits, data, gradients, model, rounding, small_model


def test_compiled_graphs_are_kept() -> None:
    torch._dynamo.reset()
    made = small_model()
    compiled = torch.compile(made, backend="aot_eager")
    plain = gradients(made, compiled, nullcontext())
    saved = saved_tensors_in_fp8()
    with pytest.warns(UserWarning, match="what a compiled graph saves is kept in high precision"):
        assert_bits(gradients(made, compiled, saved), plain)
    assert "of a compiled graph" in {kind.kept_as for kind in saved.kinds}
    assert saved.bytes_before == saved.bytes_after


def test_a_compiled_module_with_hooks() -> None:
    torch._dynamo.reset()
    made = small_model()
    plain = gradients(made, torch.compile(made, backend="aot_eager"), nullcontext())
    torch._dynamo.reset()
    saved = saved_tensors_in_fp8()
    saved.register(made)
    compiled = torch.compile(made, backend="aot_eager", fullgraph=True)
    with pytest.warns(UserWarning, match="what a compiled graph saves"):
        assert_bits(gradients(made, compiled, nullcontext()), plain)


def test_a_context_in_a_compiled_function() -> None:
    made = model(layers=0)

    def run(x: Tensor) -> Tensor:
        with saved_tensors_in_fp8():
            return made(x).exp()

    with pytest.raises(Exception, match="saved_tensors_in_fp8 in a compiled function"):
        torch.compile(run, backend="eager", fullgraph=True)(data())


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_a_compiled_function_that_runs_eagerly() -> None:
    """Dynamo gives up at the context, and must not trace what enters it and what packs."""
    torch._dynamo.reset()
    made, saved = model(layers=1), saved_tensors_in_fp8()

    def run(x: Tensor) -> Tensor:
        with saved:
            return made(x)

    assert_bits(
        gradients(made, torch.compile(run, backend="eager"), nullcontext()),
        gradients(made, made, rounding()),
    )
    assert "FP8" in {kind.kept_as for kind in saved.kinds}


def test_compiled_autograd_is_refused() -> None:
    from torch._dynamo.utils import maybe_enable_compiled_autograd

    made = small_model()
    with saved_tensors_in_fp8():
        y = made(data())
    with (
        pytest.raises(Exception, match="compiled autograd cannot unpack what saved_tensors_in_fp8"),
        maybe_enable_compiled_autograd(True),
    ):
        y.sum().backward()
