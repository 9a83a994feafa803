"""Runs by overrides, configs and code; checkpointing saves FP8 products as it saves ``mm``."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, fields
from datetime import timedelta
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import nn

from tests.docs.code_blocks import pages
from tests.docs.test_lists import named_on
from tests.support import titan_cpu
from tests.support.compiling import compiled_graphs, fresh, instantiates, ops_in
from tests.support.models import Trace

titan_cpu.skip_without_torchtitan()
titan_cpu.patch_torchtitan()

from torchtitan.components.quantization import QuantizationConverter
from torchtitan.config import ConfigManager
from torchtitan.config.override import OverrideConfig, apply_overrides
from torchtitan.distributed.activation_checkpoint import FullAC, SelectiveAC
from torchtitan.models.llama3.config_registry import llama3_debugmodel

from blocktensor import BlockwiseFP8Weight, convert
from blocktensor.integrations.torchtitan import (
    BlockwiseFP8Converter,
    BlockwiseFP8SelectiveAC,
    with_blockwise_fp8,
)
from blocktensor.patches import SET_TIMEOUT

HERE = "blocktensor.integrations.torchtitan"

MM, GEMM = "aten.mm", "blocktensor.gemm"
SIZES = (256, 384, 512, 128, 640)


class Blocks(nn.Module):
    def __init__(self, fp8: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        linears = [nn.Linear(k, n, bias=False) for k, n in pairwise(SIZES)]
        self.layers = nn.ModuleDict({"0": nn.Sequential(*linears).bfloat16()})
        if fp8:
            convert(self, skip_small=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.layers["0"](x)
        return out


def backward_of(policy: Any, fp8: bool, **options: Any) -> tuple[Counter[str], list[Any]]:
    """The ops of a backward with checkpointing by ``policy``; the output and all gradients."""
    model = Blocks(fp8)
    options.setdefault("force_recompute_mm_shapes_by_fqns", [])
    if policy is not None:
        policy.Config(**options).build().apply(model)
    x = torch.randn(64, SIZES[0], generator=torch.Generator().manual_seed(1))
    x = x.bfloat16().requires_grad_()
    with Trace() as trace:  # below checkpointing, which answers for the ops it has saved
        y = model(x)
        trace.ops.clear()
        y.float().square().sum().backward()
    grads = [p.grad for p in model.parameters()]
    return Counter(op.split()[0] for op in trace.ops), [y.detach(), x.grad, *grads]


@pytest.mark.parametrize(
    ("options", "again"),
    [
        ({}, 2),  # every second of four
        ({"force_recompute_mm_shapes_by_fqns": ["layers.0.1", "layers.0.3"]}, 3),
    ],
)
def test_as_many_products_run_again_as_in_high_precision(
    options: dict[str, Any], again: int
) -> None:
    gradients = 2 * 4  # dgrad and wgrad
    for policy in (SelectiveAC, BlockwiseFP8SelectiveAC):
        calls, _ = backward_of(policy, fp8=False, **options)
        assert calls[MM] == gradients + again
    calls, got = backward_of(BlockwiseFP8SelectiveAC, fp8=True, **options)
    assert calls[GEMM] == gradients + again and calls[MM] == 0
    _, want = backward_of(None, fp8=True)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    # torchtitan's own policy runs all FP8 products again
    calls, _ = backward_of(SelectiveAC, fp8=True)
    assert calls[GEMM] == 2 * 4 + 4


@instantiates
@pytest.mark.parametrize(
    ("policy", "names", "again"),
    [
        (None, [], 0),
        (BlockwiseFP8SelectiveAC, [], 1),  # every second
        (BlockwiseFP8SelectiveAC, ["layers.0.1", "layers.0.3"], 2),
        (SelectiveAC, [], 3),
    ],
)
def test_compiled_products_run_again_as_in_eager_mode(
    policy: Any, names: list[str], again: int
) -> None:
    """Another op computes and casts there; no backward reads the result of the last of four."""
    model = Blocks(fp8=True)
    if policy is not None:
        policy.Config(force_recompute_mm_shapes_by_fqns=names).build().apply(model)
    x = torch.randn(64, SIZES[0]).bfloat16().requires_grad_()
    with fresh():
        _, backward = compiled_graphs(model, x)
    calls = Counter(ops_in(backward))
    assert calls["blocktensor.linear_backward"] == 4
    assert calls["blocktensor.linear_fprop"] == again


def test_names_must_be_those_of_linears() -> None:
    names = {"force_recompute_mm_shapes_by_fqns": ["layers.0"]}
    with pytest.raises(ValueError, match=r"expected to match a nn.Linear, but got: Sequential"):
        backward_of(BlockwiseFP8SelectiveAC, fp8=True, **names)


# Configs of runs


def test_overrides_reach_the_config_that_the_trainer_has() -> None:
    run = llama3_debugmodel()
    held = run.model_spec.model  # the trainer takes it before it applies overrides
    options = {"skip_small": False, "filter_fqns": ["wo"]}
    imports = [(f"{HERE}.overrides.blockwise_fp8", options), f"{HERE}.overrides.selective_ac"]
    apply_overrides(OverrideConfig(imports=imports), run)
    with torch.device("meta"):
        model = held.build()
    fp8 = [n for n, p in model.named_parameters() if isinstance(p, BlockwiseFP8Weight)]
    assert {name.split(".")[-2] for name in fp8} == {"w1", "w2", "w3", "wqkv"}
    assert isinstance(run.activation_checkpoint, BlockwiseFP8SelectiveAC.Config)


def test_command_line() -> None:
    fp8 = f'{HERE}.overrides.blockwise_fp8={{"filter_fqns": ["wo"]}}'
    ac = f"{HERE}.overrides.selective_ac"
    stock = ("--module", "llama3", "--config", "llama3_debugmodel")
    run = ConfigManager().parse_args([*stock, "--override.imports", fp8, ac])
    assert run.override.imports == [(fp8.partition("=")[0], {"filter_fqns": ["wo"]}), ac]


def test_the_guide() -> None:
    (block,) = (x for x in pages()["docs/guides/torchtitan.md"] if x.language == "python")
    names: dict[str, Any] = {}
    exec(block.code, names)
    options = names["my_run"]().model_spec.model.to_dict()["blockwise_fp8"]
    assert options["filter_fqns"] == ["layers.0."]


def test_the_guide_names_all_options() -> None:
    ours, theirs = (
        {each.name for each in fields(kind)}
        for kind in (BlockwiseFP8Converter.Config, QuantizationConverter.Config)
    )
    assert ours - theirs - named_on("guides/torchtitan.md") == set()


@pytest.mark.usefixtures("group")
def test_torchtitan_can_set_timeouts() -> None:
    """After the first step it calls a function that torch 2.13 lacks."""
    lacks = SET_TIMEOUT.is_applied or not hasattr(torch.distributed, "set_timeout")
    with_blockwise_fp8(llama3_debugmodel())
    assert SET_TIMEOUT.is_applied == lacks
    timeout = timedelta(seconds=7)
    torch.distributed.set_timeout(timeout, None)
    backend = torch.distributed.group.WORLD._get_backend(torch.device("cpu"))
    assert backend.options._timeout == timeout


class OtherSelectiveAC(SelectiveAC):
    @dataclass(kw_only=True, slots=True)
    class Config(SelectiveAC.Config):
        pass


@pytest.mark.parametrize(
    ("policy", "wanted"),
    [
        (SelectiveAC, BlockwiseFP8SelectiveAC),
        (FullAC, FullAC),
        (OtherSelectiveAC, OtherSelectiveAC),
    ],
)
def test_only_the_checkpointing_of_torchtitan_changes(policy: Any, wanted: Any) -> None:
    run = llama3_debugmodel()
    run.activation_checkpoint = policy.Config()
    assert with_blockwise_fp8(run) is run
    assert type(run.activation_checkpoint) is wanted.Config
