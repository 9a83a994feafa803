"""Activations saved in FP8: contexts, registered modules, threads, what the report shows."""

from __future__ import annotations

import copy
import json
import pickle
import threading
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu

from blocktensor import saved_tensors_in_fp8
from tests.support.saved import assert_bits, data, gradients, is_activation, model, rounding


def test_contexts_in_each_other() -> None:
    """The innermost one applies, as with all saved-tensor hooks of torch."""
    x = model(layers=0)(data())
    outer, inner = saved_tensors_in_fp8(), saved_tensors_in_fp8(enabled=False)
    with outer:
        with inner:
            x.exp()
        with save_on_cpu():
            x.exp()
        with outer:
            x.exp()
        x.sin()
    assert [kind.kept_as for kind in inner.kinds] == ["not enabled"]
    assert sum(kind.tensors for kind in outer.kinds) == 2
    assert {kind.kept_as for kind in outer.kinds} == {"FP8"}
    with save_on_cpu(), outer:
        x.cos()
    assert [kind.tensors for kind in outer.kinds] == [1]
    with outer, torch.no_grad():
        x.exp()
    assert outer.kinds == ()
    assert str(outer) == "nothing was saved"


def test_what_a_report_shows() -> None:
    made = model(layers=1)
    with saved_tensors_in_fp8() as saved:
        y = made(data())
    text = str(saved)
    ratio = f"({saved.bytes_after / saved.bytes_before:.2f}x)"
    assert text.endswith(ratio)
    assert "as it is: needs no gradient" in text
    assert "in FP8" in text
    assert json.loads(json.dumps(saved.to_dict()))["bytes_after"] == saved.bytes_after
    assert sum(kind.bytes_after for kind in saved.kinds) == saved.bytes_after
    with saved:
        pass
    assert saved.bytes_before == 0
    del y


def test_a_registered_module() -> None:
    made = model()
    saved = saved_tensors_in_fp8()
    handle = saved.register(made)
    packed = gradients(made, made, nullcontext())
    assert saved.bytes_before > 0
    handle.remove()
    assert_bits(packed, gradients(made, made, rounding()))
    plain = gradients(made, made, nullcontext())
    assert not all(torch.equal(a, b) for a, b in zip(packed, plain, strict=True))


def test_a_module_that_is_left_out() -> None:
    made = model()
    saved_tensors_in_fp8().register(made)
    saved_tensors_in_fp8(enabled=False).register(made[2])
    packed = gradients(made, made, nullcontext())
    inside = False

    def outside(x: Tensor) -> bool:
        return not inside and is_activation(x)

    def enter(*_: Any) -> None:
        nonlocal inside
        inside = not inside

    twin = model()
    twin[2].register_forward_pre_hook(enter)
    twin[2].register_forward_hook(enter)
    assert_bits(packed, gradients(twin, twin, rounding(outside)))


@pytest.mark.parametrize("way", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_copies_of_a_registered_module(way: Any) -> None:
    made = model()
    saved = saved_tensors_in_fp8()
    handle = saved.register(made)
    twin = way(made)
    handle.remove()
    packed = gradients(twin, twin, nullcontext())
    assert_bits(packed, gradients(made, made, rounding()))
    assert saved.bytes_before == 0  # the copy has a context of its own


def saves_exactly(x: Tensor) -> Tensor:
    """What an operation outside of all contexts saves of ``x``."""
    return x.sin().grad_fn._saved_self  # type: ignore[union-attr]


def test_contexts_that_are_left_below_other_hooks() -> None:
    x, inner = model(layers=0)(data()), torch.autograd.graph.save_on_cpu()
    with saved_tensors_in_fp8():
        inner.__enter__()
    inner.__exit__(None, None, None)
    assert torch.equal(saves_exactly(x), x)
    assert torch._C._autograd._top_saved_tensors_default_hooks(False) is None


def test_a_module_that_calls_itself() -> None:
    """The context ends with the outer forward."""

    class Twice(nn.Module):
        def forward(self, x: Tensor, n: int = 1) -> Tensor:
            if n:
                self(x, n - 1)
            return x.sin()

    x, saved = model(layers=0)(data()), saved_tensors_in_fp8()
    made = Twice()
    saved.register(made)
    y = made(x)
    assert not torch.equal(y.grad_fn._saved_self, x)
    assert torch.equal(saves_exactly(x), x)


def test_forwards_that_fail() -> None:
    class Fails(nn.Module):
        def forward(self, x: Tensor, error: Any) -> Tensor:
            if error is not None:
                raise error
            return x.exp()

    x = model(layers=0)(data())
    made, saved = Fails(), saved_tensors_in_fp8()
    saved.register(made)
    top = torch._C._autograd._top_saved_tensors_default_hooks
    with pytest.raises(ValueError, match="none"):
        made(x, ValueError("none"))
    assert top(False) is None
    with pytest.raises(KeyboardInterrupt):
        made(x, KeyboardInterrupt())  # no hook of the module runs
    assert top(False) is not None
    assert torch.equal(saves_exactly(x), x)
    assert top(False) is None
    with pytest.raises(KeyboardInterrupt):
        made(x, KeyboardInterrupt())
    made(x, None)
    assert top(False) is None
    with saved_tensors_in_fp8(), pytest.raises(KeyboardInterrupt):
        made(x, KeyboardInterrupt())
    assert top(False) is None
    refuses = made.register_forward_pre_hook(lambda *_: 1 / 0, prepend=True)
    with pytest.raises(ZeroDivisionError):
        made(x, None)  # fails before it enters
    refuses.remove()
    assert top(False) is None


def test_threads() -> None:
    x = model(layers=0)(data())
    found = []
    with saved_tensors_in_fp8() as saved:
        thread = threading.Thread(target=lambda: found.append(x.exp()))
        thread.start()
        thread.join()
        assert saved.kinds == ()
        x.exp()
    assert [kind.tensors for kind in saved.kinds] == [1]


def test_wrong_arguments() -> None:
    made: Any = nn.Linear(8, 8)
    with pytest.raises(
        TypeError, match=r"got a Linear: expected enabled=True or False; .*register"
    ):
        saved_tensors_in_fp8(made)
    with pytest.raises(TypeError, match="register got a function: expected a module"):
        saved_tensors_in_fp8().register(made.forward.__func__)
