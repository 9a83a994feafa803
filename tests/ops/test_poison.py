"""The fixture that fills fresh memory with NaN, for every way this package allocates."""

from __future__ import annotations

import pytest
import torch

from tests.support.numeric import DTYPES, E4M3


@pytest.mark.parametrize("dtype", [E4M3, *DTYPES])
def test_fresh_memory_is_nan(dtype: torch.dtype, device: torch.device) -> None:
    x = torch.zeros(7, dtype=dtype, device=device)
    for fresh in (
        torch.empty((3, 5), dtype=dtype, device=device),
        torch.empty_like(x),
        torch.empty_strided((3, 4), (1, 3), dtype=dtype, device=device),
        x.new_empty(9),
        x[:0].clone().resize_(64),
    ):
        assert fresh.device.type == device.type
        assert fresh.float().isnan().all()
