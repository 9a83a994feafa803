"""torchtitan's experts on several ranks, with tokens that are sent in FP8."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.support import ranks, titan_cpu
from tests.support.models import X_IN_POWERS
from tests.support.titan_cpu import (
    compiled,
    debug_config,
    in_fp8,
    one_step,
    parallel,
    train,
)

titan_cpu.skip_without_torchtitan()

pytestmark = pytest.mark.slow


def sent(trainer: Any) -> list[tuple[torch.dtype, int]]:
    """Return dtype and bytes of all exchanges of tokens in a step."""
    found: list[tuple[torch.dtype, int]] = []

    class Sent(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            if "all_to_all_single" in str(func) and args[0].dtype != torch.int64:  # no counts
                found.append((args[0].dtype, args[0].nbytes))
            return func(*args, **(kwargs or {}))

    with Sent():
        one_step(trainer)
    return found


def runs_on_two(rank: int, world: int, folder: str) -> dict[str, Any]:
    titan_cpu.start()

    def config(**options: Any) -> Any:
        made = parallel(debug_config("deepseek_v3", folder, 2), expert_parallel_degree=2)
        made.activation_checkpoint = None
        return in_fp8(made, scale=X_IN_POWERS.scale, **options)

    return {
        "bf16": train(config(), sent),
        "fp8": train(config(dispatch_in_fp8=True), sent),
        "compiled": train(compiled(config(dispatch_in_fp8=True)))[0],
    }


def test_tokens_sent_in_fp8(tmp_path: Path) -> None:
    """Half of the bytes to the experts; results and gradients come back in bf16."""
    for rank in ranks.run(runs_on_two, 2, tmp_path / "two"):
        (losses, plain), (ours, wires) = rank["bf16"], rank["fp8"]
        assert ours == losses  # the same tokens are cast, before the send or after it
        assert len(rank["compiled"]) == len(losses) == 2
        for got, want in zip(rank["compiled"], losses, strict=True):
            assert got == pytest.approx(want, rel=0.01)
        assert {dtype for dtype, _ in plain} == {torch.bfloat16}
        assert len(wires) == len(plain) > 0
        pairs = zip(wires, plain, strict=True)
        in_bytes = [size / of for (dtype, size), (_, of) in pairs if dtype == torch.uint8]
        assert len(in_bytes) * 4 == len(wires)
        assert all(share <= 0.53 for share in in_bytes)  # of 256 features, and other routes
