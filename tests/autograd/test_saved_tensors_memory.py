"""Activations saved in FP8: which memory is packed, once, and for how long."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from blocktensor import BlockwiseFP8Weight, saved_tensors_in_fp8
from blocktensor.autograd import saved_report
from blocktensor.autograd.packed_once import _shared
from tests.support.models import randn
from tests.support.saved import K, T, assert_bits, data, model, rounding


def test_memory_is_packed_once() -> None:
    """Also for views of all shapes; other versions and other memory are packed anew."""
    x = model(layers=0)(data())
    with saved_tensors_in_fp8() as saved:
        kept = [
            x.sin(),
            x.cos(),
            x.view(-1, 1, K).transpose(0, 1).sin(),
            x[:].sin(),
            x.view(-1).sin(),
        ]
        assert [kind.tensors for kind in saved.kinds] == [1]
        x.view(-1)[:4096].square()  # other memory
        assert [kind.tensors for kind in saved.kinds] == [1, 1]
        with torch.no_grad():
            x += 1
        kept.append(x.sin())
        assert [kind.tensors for kind in saved.kinds] == [2, 1]
        x.data = x.data + 1  # other memory at the same version
        kept.append(x.sin())
        assert sum(kind.tensors for kind in saved.kinds) == 4
    with saved_tensors_in_fp8() as other:
        kept.append(x.cos())  # found, though another context has packed it
    assert other.kinds == ()
    assert saved.bytes_before == 3 * x.nbytes + 2 * 4096


def test_the_values_at_the_time_of_saving_are_packed() -> None:
    w = nn.Parameter(torch.eye(K))
    x = randn(T, K, dtype=torch.float32)
    with saved_tensors_in_fp8():
        a = x @ w
        first = a.sin()
        b = a.detach()  # counts changes with a, but has no view of it
        b.mul_(2)
        second = a.sin()
    with pytest.raises(RuntimeError, match=r"\[32, 512\], saved in FP8, is at version 1; expected"):
        first.sum().backward(retain_graph=True)
    second.sum().backward()
    with rounding():
        wanted = torch.autograd.grad((x @ w).mul(2).sin().sum() / 2, w)
    assert w.grad is not None
    assert torch.equal(w.grad, wanted[0])


def test_counters_of_changes_are_not_mixed_up() -> None:
    """Two tensors in one memory that do not count changes together: no version tells values."""

    class Alias(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.data

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            return grad

    w = nn.Parameter(torch.eye(K))
    x = randn(T, K, dtype=torch.float32)

    def run() -> list[Tensor]:
        a = (x @ w).mul_(1)
        first = a.sin()
        b = Alias.apply(a).mul_(3)
        assert a._version == b._version == 1
        return [*torch.autograd.grad(b.sin().sum(), w, retain_graph=True), first.detach()]

    with saved_tensors_in_fp8():
        packed = run()
    with rounding():
        assert_bits(packed, run())


def test_memory_is_freed_and_found_no_more() -> None:
    """A tensor that gets the memory or the id of a freed one has a cast of its own."""
    w = nn.Parameter(torch.eye(K))
    before = len(_shared)
    with saved_tensors_in_fp8():
        for i in range(20):
            x = randn(T, K, seed=i, dtype=torch.float32)
            a = x @ w
            y, storage = a.sin(), weakref.ref(a.untyped_storage())
            del a
            assert storage() is None  # autograd holds the cast alone
            (dw,) = torch.autograd.grad(y.sum(), w)
            with rounding():
                wanted = torch.autograd.grad((x @ w).sin().sum(), w)
            assert torch.equal(dw, wanted[0])
    del y
    gc.collect()
    assert len(_shared) == before


def test_casts_are_freed_with_their_graph() -> None:
    x = model(layers=0)(data()) * 1  # stays alive
    with saved_tensors_in_fp8():
        y = x.sin()
    (entry,) = [entry for entry in _shared.values() if entry.base() is x]
    assert entry.packed() is not None
    y.sum().backward()
    assert entry.packed() is None


def test_memory_that_is_kept_anyway() -> None:
    """The output of attention is kept; a view of it, which a linear layer saves, is too."""
    x = model(layers=0)(data())
    with saved_tensors_in_fp8() as saved:
        y = x.view(2, T, 4, 128).exp()  # saves its output, in heads
        z = y.flatten(2).sin()
        assert {kind.kept_as for kind in saved.kinds} == {"in heads, for attention"}
        assert saved.bytes_after == y.nbytes
        del y, z
        x.view(2, T, 4, 128).exp().flatten(2).sin()
    assert saved.bytes_after == 2 * x.nbytes


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta state")
@pytest.mark.parametrize("layout", ["coo", "csr", "nested", "jagged"])
def test_tensors_without_strides(layout: str) -> None:
    def run() -> Tensor:
        x = randn(64, 256, dtype=torch.float32).requires_grad_()
        if layout in ("coo", "csr"):
            y = x.to_sparse() if layout == "coo" else x.to_sparse_csr()
            torch.mm(y * 1, x.detach().t() @ x).sum().backward()
        else:
            kind = torch.strided if layout == "nested" else torch.jagged
            parts = torch.nested.as_nested_tensor([x[:20], x[20:]], layout=kind)
            ((parts * 1).sin() * 1).to_padded_tensor(0.0).sum().backward()
        assert x.grad is not None
        return x.grad

    wanted = run()
    with saved_tensors_in_fp8():
        made = run()
    assert (made - wanted).square().sum() < 0.01 * wanted.square().sum()


def test_memory_in_no_rows_of_blocks() -> None:
    x = model(layers=0)(data()).view(-1, K)
    with saved_tensors_in_fp8() as saved:
        x[:1].expand(T, K).exp()  # the result is packed
        x[:1].expand(T, K).sin()
        (x * 1)[:, ::2].sin()
    assert [kind.kept_as for kind in saved.kinds if kind.kept_as != "FP8"] == [
        "less than 4096 elements",
        "not in rows of 128 elements",
    ]


def test_intermediates_of_others_functions() -> None:
    """They are not taken for those of a compiled graph."""

    class Masked(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.save_for_backward(torch.rand(x.shape))
            return x * 1

    with saved_tensors_in_fp8() as saved:
        Masked.apply(model(layers=0)(data()))
    assert {kind.kept_as for kind in saved.kinds} == {"needs no gradient"}


def test_a_context_around_many_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(saved_report, "_MAX_KEPT", 20)
    x = model(layers=0)(data())
    with saved_tensors_in_fp8() as saved:
        for _ in range(30):
            y = x.exp() * x.view(2, T, 4, 128).exp().flatten(2)
        assert len(saved._kept) <= 21
        assert not saved.holds(y)
    assert saved._kept == {}


def test_a_weight_in_another_dtype_is_not_copied() -> None:
    """Matmuls read its FP8 form, and give the same outputs as without a context."""
    w = nn.Parameter(BlockwiseFP8Weight(randn(K, K, dtype=torch.float32)))
    x = randn(T, K).requires_grad_()

    def twice() -> tuple[Any, list[Tensor]]:
        late = w.to(torch.bfloat16)
        return late, [F.linear(x, late), F.linear(x, late)]

    _, wanted = twice()
    with saved_tensors_in_fp8():
        late, got = twice()
    assert all(torch.equal(a, b) for a, b in zip(got, wanted, strict=True))
    assert late._late._copy is None


def test_a_result_that_is_a_weight_does_not_hold_its_graph() -> None:
    w = nn.Parameter(BlockwiseFP8Weight(randn(K, K, dtype=torch.float32)))
    with saved_tensors_in_fp8():
        result = w.exp()  # an operation that saves its result
    alive = weakref.ref(w)
    del w, result
    assert alive() is None
