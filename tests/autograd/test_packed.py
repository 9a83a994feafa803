"""Packing: which rows of memory are cast, what comes back, and what is held meanwhile."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from blocktensor.autograd.packed import KeptTensor, Packed, SavedTensor, Version, rows_of
from tests.support.models import randn
from tests.support.saved import in_rows

Pick = Callable[[Tensor], Tensor]


def packed(x: Tensor) -> SavedTensor:
    rows = rows_of(x)
    assert rows is not None
    return SavedTensor(x, Packed(x, rows))


# name: the tensor that autograd saves, given its base [4, 16, 384], and its rows in a cast
LAYOUTS: dict[str, tuple[Pick, Pick]] = {
    "whole": (lambda x: x, lambda x: x.view(-1, 384)),
    "flat": (lambda x: x.view(-1), lambda x: x.view(-1, 384)),
    "heads": (lambda x: x.view(4, 16, 3, 128).transpose(1, 2), lambda x: x.view(-1, 384)),
    "narrow heads": (lambda x: x.view(4, 16, 6, 64).transpose(1, 2), lambda x: x.view(-1, 384)),
    "transposed": (lambda x: x.view(-1, 384).t(), lambda x: x.view(-1, 384)),
    "rows": (lambda x: x[1:3], lambda x: x[1:3].reshape(-1, 384)),
    "tokens": (lambda x: x[:, :-1], lambda x: x[:, :-1].reshape(-1, 384)),
    "a third": (lambda x: x[..., 128:256], lambda x: x[..., 128:256].reshape(-1, 128)),
    "two heads of it": (
        lambda x: x[..., 64:256].view(4, 16, 3, 64).transpose(1, 2),
        lambda x: x[..., 64:256].reshape(-1, 192),
    ),
    "expanded": (
        lambda x: x[:, :, None].expand(4, 16, 2, 384),
        lambda x: x.view(-1, 384),
    ),
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_views(layout: str, dtype: torch.dtype, device: torch.device) -> None:
    pick, rows = LAYOUTS[layout]
    x = randn(4, 16, 384, dtype=dtype, device=device)
    x *= randn(4, 16, 1, seed=1, dtype=dtype, device=device).exp()  # rows of different sizes
    saved = pick(x)
    made = packed(saved).unpack()
    wanted = in_rows(rows(x).contiguous())
    if layout == "expanded":
        assert made.stride(2) == 0
        made = made[:, :, 0]
    elif layout in ("a third", "tokens", "two heads of it"):  # physical order, without gaps
        assert made.stride() == torch.empty_like(saved).stride()
    else:
        assert made.stride() == saved.stride()
    assert made.dtype == dtype
    # write the values into the places that the view has, and compare whole rows
    back = torch.zeros_like(x)
    (back if layout == "expanded" else pick(back)).copy_(made)
    assert torch.equal(rows(back), wanted)


OTHERS: dict[str, tuple[Tensor, int | None]] = {
    "ragged rows": (torch.zeros(64, 1000), 1000),
    "short rows": (torch.zeros(64, 96), 128),
    "an attention output": (torch.zeros(2, 64, 8, 64).transpose(1, 2), 128),
    "an image": (torch.zeros(2, 8, 28, 28).contiguous(memory_format=torch.channels_last), 128),
    "odd short rows": (torch.zeros(63, 97), None),
    "every other element": (torch.zeros(64, 512)[:, ::2], None),
    "windows": (torch.zeros(4096).unfold(0, 256, 128), None),
    "short parts of rows": (torch.zeros(64, 512)[:, :64], None),
    "one number": (torch.zeros(1).expand(64, 256), None),
    "a negated view": (torch._neg_view(torch.zeros(64, 256)), None),
    "empty": (torch.zeros(0, 256), None),
    "a scalar": (torch.zeros(()), None),
}


@pytest.mark.parametrize("name", OTHERS)
def test_the_width_of_rows(name: str) -> None:
    x, width = OTHERS[name]
    rows = rows_of(x)
    assert (None if rows is None else rows.width) == width
    if rows is not None:
        made = packed(x).unpack()
        assert (made.shape, made.stride()) == (x.shape, x.stride())


def test_all_views_of_short_rows_are_one() -> None:
    x = torch.zeros(2, 64, 8, 64).transpose(1, 2)  # an attention output, and what follows
    assert rows_of(x) == rows_of(x.transpose(1, 2)) == rows_of(x.transpose(1, 2).flatten(2))


def test_values_that_are_not_finite() -> None:
    x = randn(32, 256, dtype=torch.float32)
    x[3, 5], x[4, 200] = float("inf"), float("nan")
    made = packed(x).unpack()
    torch.testing.assert_close(made, in_rows(x), rtol=0, atol=0, equal_nan=True)
    assert made[3, :128].isnan().all()
    assert made[3, 128:].isfinite().all()


def test_bytes() -> None:
    x = randn(64, 512)
    rows = rows_of(x)
    assert rows is not None
    assert (rows.numel, Packed(x, rows).nbytes) == (64 * 512, 64 * 512 + 64 * 4 * 4)


def test_a_version_holds_no_memory() -> None:
    x = torch.zeros(64, 64)
    view, storage = x.view(-1), weakref.ref(x.untyped_storage())
    version = Version(x)
    version.check(x.dtype, x.shape)
    view.add_(1)
    with pytest.raises(RuntimeError, match=r"\[64, 64\], saved in FP8, is at version 1; expected"):
        version.check(x.dtype, x.shape)
    del x, view
    gc.collect()
    assert storage() is None


def test_a_kept_output_is_freed_with_its_graph() -> None:
    x = torch.zeros(4, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(KeptTensor, KeptTensor.unpack):
        y = x.exp()  # saves y
    freed = weakref.ref(y.untyped_storage())
    del y
    gc.collect()
    assert freed() is None


def test_a_kept_tensor_that_was_changed_is_refused() -> None:
    x = torch.zeros(4, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(KeptTensor, KeptTensor.unpack):
        y = x.exp()
    with torch.no_grad():
        y.add_(1)
    with pytest.raises(RuntimeError, match=r"a torch.float32 tensor \[4\] is at version 1"):
        y.sum().backward()
