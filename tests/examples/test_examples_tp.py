"""The example of tensor parallel training, on ranks of the CPU."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

pytest.importorskip("rich")

from tests.support.ranks import on_ranks
from tests.support.scripts import examples

TINY = ["--seq", "128", "--batch", "1", "--steps", "4", "--warmup-steps", "1", "--device", "cpu"]


@on_ranks(4, gpus=())
def test_precisions_and_cuts_learn_alike(world: int, device: str, tmp_path: Path) -> None:
    def run(name: str, *flags: str) -> dict[str, Any]:
        out = tmp_path / name
        assert example.main([*TINY, *flags, "--out", str(out)]) == 0
        dist.barrier()
        result: dict[str, Any] = json.loads((out / "result.json").read_text())
        assert result["losses"][-1] < result["losses"][0]
        assert result["tokens_per_second"] > 0
        return result

    with examples() as load:
        example = load("tp_llama")
        bf16 = run("bf16", "--sp")
        cut = run("fp8", "--sp", "--precision", "fp8")
        whole = run("without sp", "--precision", "fp8")
        both = run("fsdp2", "--tp", "2", "--sp", "--precision", "fp8")
        with pytest.raises(SystemExit, match="--tp 3 must divide the 4 ranks"):
            example.main([*TINY, "--tp", "3"])
    assert [x["fp8_linears"] for x in (bf16, cut, whole, both)] == [0, 14, 14, 14]
    for result in (bf16, whole):
        assert result["losses"] == pytest.approx(cut["losses"], rel=0.01)
    assert both["losses"][0] == pytest.approx(cut["losses"][0], rel=0.05)  # of other tokens, too
    key = "all_gather_into_tensor_coalesced"
    assert key not in whole["wire_bytes"]
    # of 4 inputs and 4 gradients: e4m3 and scales rowwise, bf16 for the columnwise form of tokens
    # that are no multiple of 128 a rank
    tokens, dim = 128 // 4, 256
    assert cut["wire_bytes"][key] == 8 * tokens * dim * (1 + 4 / 128 + 2)
