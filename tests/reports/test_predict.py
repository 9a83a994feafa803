"""Predicted times of linear layers, against measured ones and against sums by hand."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from blocktensor import Recipe, explain
from blocktensor.ops.devices import CARDS
from blocktensor.reports.predict import (
    LayerTime,
    bf16_matmul_us,
    casts_us,
    speedups,
    tokens_to_gain,
)

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
ALL = "fprop", "dgrad", "wgrad"
BF16 = torch.bfloat16, torch.bfloat16


@pytest.mark.parametrize(("card", "folder"), [("H200", "."), ("H100", "h100")])
@pytest.mark.parametrize(("choice", "of"), [("1x128", "rows_"), ("128x128", "")])
def test_speedups_are_within_10_percent_of_measured_ones(
    card: str, folder: str, choice: str, of: str
) -> None:
    rows = json.loads((RESULTS / folder / "linear.json").read_text())["rows"]
    assert len(rows) >= 8
    recipe = Recipe(wgrad_input=choice)  # type: ignore[arg-type]
    for row in rows:
        explained = explain([(row["m"], row["n"], row["k"])], device=card, recipe=recipe)
        in_graphs, _ = speedups(explained.layers)
        assert in_graphs == pytest.approx(row[f"graph_{of}speedup"], rel=0.1), row
        (layer,) = explained.layers
        assert layer.bf16_us == pytest.approx(1e3 * row["graph_bf16_ms"], rel=0.12)
        assert layer.fp8_us == pytest.approx(1e3 * row[f"graph_{of or 'fp8_'}ms"], rel=0.12)


def test_casts_by_hand() -> None:
    card, shape = CARDS["H200"], (1000, 300, 200)
    x, g, w = 1000 * 200, 1000 * 300, 300 * 200

    def us(*moved: int) -> float:
        return 3.0 * len(moved) + sum(moved) / 3.75e6

    def casts(
        kinds: tuple[str, ...] = ALL, recipe: Recipe | None = None, of_w: torch.dtype = BF16[1]
    ) -> float:
        return casts_us(shape, kinds, recipe or Recipe(), (BF16[0], of_w), card)

    assert casts() == pytest.approx(us(4 * x, 4 * g, 3 * w, 2 * w))
    assert casts(of_w=torch.float32) == pytest.approx(us(4 * x, 4 * g, 5 * w, 2 * w))
    accurate = Recipe(wgrad_input="high_precision")
    assert casts(recipe=accurate) == pytest.approx(us(3 * x, 3 * g, 3 * w, 2 * w))
    assert casts(("fprop", "dgrad")) == pytest.approx(us(3 * x, 3 * g))


def test_eager_mode_waits_for_the_slower_of_host_and_gpu() -> None:
    large, small = LayerTime("large", 3000.0, 2000.0), LayerTime("small", 60.0, 50.0)
    assert speedups([large]) == (1.5, 1.5)
    assert speedups([small]) == (1.2, 150 / 170)
    assert speedups([large, small]) == (3060 / 2050, 3060 / 2050)
    assert speedups([small] * 9 + [large])[1] == 3540 / 2450
    assert speedups([small] * 19 + [large])[1] == 4140 / 3400


def test_small_matmuls_take_their_launch() -> None:
    assert bf16_matmul_us(8, 8, 8, CARDS["H100"]) == 7.5
    assert bf16_matmul_us(8192, 8192, 8192, CARDS["H100"]) == pytest.approx(1 + 2 * 8192**3 / 710e6)


def test_tokens_from_which_eager_mode_gains() -> None:
    card, host = CARDS["H200"], {"bf16": 150.0, "fp8": 560.0}
    tokens = tokens_to_gain(4096, 4096, host, card)
    assert tokens == 3840  # the slowest host that we met: ``convert`` counts on 4096
    assert 3 * bf16_matmul_us(tokens, 4096, 4096, card) >= 560
    assert 3 * bf16_matmul_us(tokens - 256, 4096, 4096, card) < 560
    assert tokens_to_gain(2048, 2048, host, card) == 4 * tokens
    assert tokens_to_gain(4096, 4096, {"bf16": 1.0, "fp8": 1.0}, card) == 256
