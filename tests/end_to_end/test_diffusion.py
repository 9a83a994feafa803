"""Diffusion transformers: which layers are converted, gradients at odd sizes, training."""

from __future__ import annotations

import copy
from pathlib import Path
from statistics import median

import pytest
import torch
from torch import Tensor, nn

import blocktensor
from blocktensor import BlockwiseFP8Weight, audit_step, convert
from tests.support.diffusion_models import MODELS, DiT, Wan, loss_of
from tests.support.numeric import relative_error

each_model = pytest.mark.parametrize("kind", MODELS, ids=lambda kind: kind.__name__)


def build(kind: type[nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return kind()


def awake(model: nn.Module) -> nn.Module:
    """Give weights that begin at zero some values, so that all layers count."""
    with torch.no_grad():
        for parameter in model.parameters():
            if not parameter.any():
                parameter.normal_(std=0.1)
    return model


def gradients(model: nn.Module, seed: int = 0, count: int = 3) -> dict[str, Tensor]:
    model.zero_grad()
    loss_of(model, seed, count).backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def train(model: nn.Module, steps: int) -> list[float]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    losses = []
    for seed in range(steps):
        loss = loss_of(model, seed)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@each_model
def test_linear_layers_alone_are_converted(kind: type[nn.Module]) -> None:
    model = build(kind)
    convert(model, skip=kind.MODULATION, skip_small=False, convert_head=True)
    linears = {f"{n}.weight" for n, m in model.named_modules() if isinstance(m, nn.Linear)}
    fp8 = {n for n, p in model.named_parameters() if isinstance(p, BlockwiseFP8Weight)}
    left = linears - fp8
    assert fp8 < linears  # no convolution, embedding, table of positions or of modulation
    parts = [pattern.rpartition(".")[2] for pattern in kind.MODULATION]
    assert left == {n for n in linears if any(part in n.split(".") for part in parts)}
    report = audit_step(model, lambda: loss_of(model, 0).backward())
    patches = [name for name, _ in model.named_children() if name.startswith("patch")]
    report.assert_fp8([*kind.MODULATION, *patches])


@each_model
@pytest.mark.parametrize("count", [1, 3])
def test_gradients_at_odd_sizes(kind: type[nn.Module], count: int) -> None:
    """One image is one row of the modulation layers, which are converted here, too."""
    plain = awake(build(kind))
    model = copy.deepcopy(plain)
    convert(model, skip_small=False, convert_head=True)
    wanted, got = gradients(plain, count=count), gradients(model, count=count)
    assert got.keys() == wanted.keys()
    errors = {
        name: relative_error(got[name], wanted[name])
        for name in got
        if not (kind is Wan and name.endswith("k.bias"))  # 0 but for rounding: softmax ignores it
    }
    assert max(errors.values()) < 0.2
    assert median(errors.values()) < 0.1


def test_weights_that_begin_at_zero_learn() -> None:
    """adaLN-Zero: a block of zeros has the scale 1, and its gradient is no zero."""
    model = build(DiT)
    convert(model, skip_small=False, convert_head=True)
    assert not model.final.weight.master.any()
    first = gradients(model)
    assert all(grad.isfinite().all() for grad in first.values())
    assert first["final.weight"].any()
    losses = train(model, 3)
    modulation = model.blocks[0].adaLN_modulation[1].weight.master
    assert modulation.any() and losses[-1] < losses[0]


@each_model
def test_training_follows_high_precision(kind: type[nn.Module]) -> None:
    plain = build(kind)
    model = copy.deepcopy(plain)
    convert(model, skip=kind.MODULATION, skip_small=False, convert_head=True)
    wanted, got = train(plain, 24), train(model, 24)
    last = sum(wanted[-6:]), sum(got[-6:])
    assert last[0] < 0.8 * sum(wanted[:6])  # it learns
    assert abs(last[1] / last[0] - 1) < 0.03


@each_model
def test_one_cast_for_q_k_and_v_has_the_same_bits(kind: type[nn.Module]) -> None:
    model = awake(build(kind))
    convert(model, skip_small=False)
    before = gradients(model)
    blocktensor.share_inputs(model)
    after = gradients(model)
    assert after.keys() == before.keys()
    assert all(torch.equal(after[name], before[name]) for name in before)


@each_model
def test_an_fp8_checkpoint_computes_the_same(kind: type[nn.Module], tmp_path: Path) -> None:
    pytest.importorskip("safetensors")
    model = awake(build(kind))
    convert(model, skip=kind.MODULATION, skip_small=False)
    blocktensor.save_fp8(model, tmp_path / "saved")
    fresh = build(kind)
    blocktensor.load_fp8(fresh, tmp_path / "saved")
    with torch.no_grad():
        assert torch.equal(loss_of(fresh, 0), loss_of(model, 0))
