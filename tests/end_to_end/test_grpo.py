"""The GRPO example: rollouts of a second process have the log-probabilities of the trainer."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

pytest.importorskip("trl")
pytest.importorskip("datasets")

import blocktensor
from blocktensor import BlockwiseFP8Tensor
from tests.support.scripts import examples

STEPS = 6
LINEARS = {f"self_attn.{x}_proj" for x in "qkvo"} | {
    f"mlp.{x}_proj" for x in ("gate", "up", "down")
}


@pytest.fixture(scope="module")
def example() -> Iterator[ModuleType]:
    with examples() as load:
        yield load("grpo_fp8")


def in_bytes(pairs: Any) -> dict[str, torch.Tensor]:
    return {name: x.detach().clone().view(torch.uint8) for name, x in pairs}


def test_weights_arrive_in_a_frozen_model(example: ModuleType) -> None:
    torch.manual_seed(0)
    policy, frozen = example.llama(trains=True), example.llama(trains=False)
    sent, before = (in_bytes(blocktensor.iter_fp8(model)) for model in (policy, frozen))
    assert sum(name.endswith("_scale_inv") for name in sent) == 2 * len(LINEARS)
    example.load_weights(frozen, blocktensor.iter_fp8(policy))
    after = in_bytes(blocktensor.iter_fp8(frozen))
    assert list(after) == list(sent)
    for name, x in sent.items():
        assert torch.equal(after[name], x)
        assert "norm" in name or not torch.equal(before[name], x)
    kinds = [type(x) for x in frozen.parameters() if x.ndim == 2]
    assert kinds.count(BlockwiseFP8Tensor) == 2 * len(LINEARS) == len(kinds) - 2  # embedding, head


@pytest.mark.slow
def test_every_step_has_equal_bits(
    example: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the last step the engine gets no weights: it is one step late, and is noticed."""
    sent: list[dict[str, torch.Tensor]] = []
    reports: list[Any] = []
    iter_fp8, compute_loss = blocktensor.iter_fp8, example.Trainer.compute_loss

    def watched(model: Any) -> Any:
        sent.append(in_bytes(iter_fp8(model)))
        return iter_fp8(model) if len(sent) <= STEPS else iter(())

    def audited(trainer: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
        def step() -> None:
            compute_loss(trainer, model, *args, **kwargs).backward()

        if not reports:
            reports.append(blocktensor.audit_step(model, step))
        return compute_loss(trainer, model, *args, **kwargs)

    monkeypatch.setattr(blocktensor, "iter_fp8", watched)
    monkeypatch.setattr(example.Trainer, "compute_loss", audited)
    monkeypatch.chdir(tmp_path)
    rewards, differences = zip(*example.train(STEPS + 1, lr=3e-3), strict=True)

    assert differences[:STEPS] == (0.0,) * STEPS
    assert differences[STEPS] > 1e-3
    assert sum(rewards[-2:]) > sum(rewards[:2]) + 0.1
    assert len(sent) == STEPS + 1
    for i in range(STEPS):
        assert all("norm" in x or not torch.equal(sent[i][x], sent[i + 1][x]) for x in sent[i])
    (report,) = reports
    assert report.marked == ()
    ran = {(x.module, x.kind) for x in report.entries if x.precision == "FP8"}
    names = {f"model.layers.{i}.{linear}" for i in range(2) for linear in LINEARS}
    assert ran == {(name, kind) for name in names for kind in ("fprop", "dgrad", "wgrad")}
