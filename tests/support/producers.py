"""What tests of producers share."""

from __future__ import annotations

from collections.abc import Iterable

from blocktensor.ops.formats import Quantized
from tests.support.numeric import assert_same


def assert_same_forms(got: Iterable[Quantized | None], want: Iterable[Quantized | None]) -> None:
    """The same forms are there, of the same formats, bytes and scales."""
    for ours, theirs in zip(got, want, strict=True):
        if ours is None or theirs is None:
            assert ours is theirs
            continue
        assert ours.format is theirs.format
        assert_same(ours.data.cpu(), theirs.data.cpu())
        assert_same(ours.scale.cpu(), theirs.scale.cpu())
