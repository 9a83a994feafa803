"""What a monitor measures, against sums by hand, and that steps are as without it."""

from __future__ import annotations

import importlib.util
import json
import math
import pickle
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from statistics import median
from threading import Event
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from expecttest import assert_expected_inline
from torch import Tensor, nn
from torch._dynamo import eval_frame
from torch.autograd.graph import save_on_cpu
from torch.distributed.fsdp import fully_shard
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from blocktensor import Recipe, convert, functional, fuse, monitor, quantize, share_inputs
from blocktensor.ops import reference
from blocktensor.ops.formats import BlockFormat
from blocktensor.reports import Health, Monitor
from tests.support.asserts import no_synchronization
from tests.support.compiling import reads_grad
from tests.support.mlps import MLP, K
from tests.support.models import RECIPES, linear, randn
from tests.support.moe_models import TitanMoE
from tests.support.ranks import on_ranks
from tests.support.steps import assert_bits, step


def by_hand(x: Tensor, format: BlockFormat) -> Health:
    """Of rows that are all measured."""
    values = x.reshape(-1, x.shape[-1]).double()
    made = reference.dequantize(reference.quantize_rowwise(x, format), torch.float32)
    made = made.reshape(values.shape).double()
    error = (values - made).square().sum()
    data = reference.quantize_rowwise(x, format).data.reshape(values.shape).float()
    blocks = [
        part.abs().max().item()
        for strip in values.split(format.rows)
        for part in strip.split(format.cols, 1)
    ]
    nonzero = int((values != 0).sum())
    return Health(
        float(10 * torch.log10(values.square().sum() / error)),
        int(((values != 0) & (made == 0)).sum()) / nonzero,
        int((data.abs() == 448).sum()) / nonzero,
        min(b for b in blocks if b > 0),
        max(blocks),
        0.0,
    )


def assert_close(got: Health, want: Health) -> None:
    assert got == pytest.approx(want, rel=1e-5)


def measured(health: Monitor) -> dict[str, dict[str, Health]]:
    (found,) = health.health().values()
    return found


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda r: r.scale)
@pytest.mark.parametrize("tokens", [5, 256, 3000])
def test_the_figures_are_those_of_sums_by_hand(recipe: Recipe, tokens: int) -> None:
    model = nn.Sequential(linear(300, 200, recipe=recipe))
    x, g = randn(tokens, 200, grad=True), 1e-25 * randn(tokens, 300, seed=1)
    with torch.no_grad():
        x[0] = 0
        x[:, 130] *= 2**-18  # beside values around 1
        model[0].weight.mul_(torch.linspace(0, 1, 200).bfloat16() ** 8)
    health = monitor(model)
    with health:
        model(x).backward(g)
    rows = slice(None, None, -(-tokens // 256))
    found = measured(health)
    assert list(found) == ["0"]
    assert_close(found["0"]["x"], by_hand(x.detach()[rows], recipe.activation_format))
    assert_close(found["0"]["g"], by_hand(g[rows], recipe.gradient_format))
    assert_close(
        found["0"]["w"], by_hand(model[0].weight.master.detach()[:256], recipe.weight_format)
    )
    assert found["0"]["x"].flushed > 0 < found["0"]["w"].flushed


def test_values_that_are_not_finite_and_zeros() -> None:
    model = linear(128, 256)
    x = randn(4, 256, grad=True)
    wanted = by_hand(torch.cat([x[1:2, :128], x[3:, 128:]]).detach(), Recipe().activation_format)
    with torch.no_grad():
        x[0, :2] = torch.tensor([math.nan, math.inf])
        x[1:3, 128:] = 0
        x[0, 128:] = 0
        x[2:, :128] = 0
    for run in (model, lambda x: checkpoint(model, x, use_reentrant=False)):
        with monitor(model) as health:
            run(x).backward(torch.zeros(4, 128, dtype=torch.bfloat16))
        found = measured(health)["(model)"]
        assert_close(found["x"], wanted._replace(nonfinite=2.0))
        assert found["g"] == (math.inf, 0, 0, 0, 0, 0)


def test_an_input_of_no_rows() -> None:
    model = linear(128, 256)
    with monitor(model) as health:
        model(randn(0, 256, grad=True)).sum().backward()
    assert measured(health)["(model)"]["x"] == (math.inf, 0, 0, 0, 0, 0)


class Model(nn.Module):
    def __init__(self, checkpoints: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.q, self.k, self.mlp = nn.Linear(K, K), nn.Linear(K, K), MLP()
        self.checkpoints = checkpoints

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.q(x) * self.k(x)
        y: Tensor = (
            checkpoint(self.mlp, x, use_reentrant=False) if self.checkpoints else self.mlp(x)
        )
        return y


def converted(**options: Any) -> Model:
    model = Model(**options).bfloat16()
    convert(model, skip_small=False)
    return model


LAYERS = ["k", "mlp.down_proj", "mlp.gate_proj", "mlp.up_proj", "q"]


@reads_grad
@pytest.mark.parametrize("way", ["plain", "fused, checkpointed", "shared", "offloaded", "compiled"])
def test_a_measured_step_has_the_bits_of_others(way: str) -> None:
    model: Any = converted(checkpoints="checkpointed" in way)
    plain, x = converted(), randn(70, K)
    if "fused" in way:
        assert len(fuse(model).fused) == 1
    elif way == "shared":
        share_inputs(model)
    elif way == "compiled":
        model.mlp = torch.compile(model.mlp, backend="eager")
    wanted = step(plain, x)
    assert_bits(step(model, x), wanted)
    health, of_plain = monitor(model, every=2), monitor(plain)
    for _ in range(3):
        with health, save_on_cpu() if way == "offloaded" else nullcontext():
            assert_bits(step(model, x), wanted)
    with of_plain:
        step(plain, x)
    assert_bits(step(model, x), wanted)
    assert [*health.health()] == [0, 2] and health.step == 3
    assert sum(isinstance(x, Tensor) for x in tree_leaves(health._measured)) == 2
    first, last = health.health().values()
    assert first == last
    (alone,) = of_plain.health().values()
    assert [*alone] == LAYERS
    assert first == alone


def test_other_threads_and_copies() -> None:
    layer, x = nn.Sequential(linear(K, K)), randn(5, K)
    first, second = monitor(layer), monitor(nn.Identity())
    inside, leave = Event(), Event()

    def wait(*_: Any) -> None:
        inside.set()
        leave.wait(60)

    with ThreadPoolExecutor(1) as pool:
        with first:
            pickle.dumps(layer)
            pool.submit(second.__enter__).result()
            layer[0].register_forward_pre_hook(wait)
            other = pool.submit(layer, x)
            assert inside.wait(60)
            functional.linear(x, linear(K, K).weight)
            leave.set()
            other.result()
        pool.submit(second.__exit__, None, None, None).result()
    assert [(name, *x) for name, x in measured(first).items()] == [("(model)", "x"), ("0", "w")]
    assert eval_frame._stance.stance == "default"


def test_the_gradient_of_logits_is_no_input() -> None:
    w, x, target = linear(256, K).weight, randn(20, K, grad=True), torch.arange(20)
    whole, in_chunks = monitor(nn.Identity()), monitor(nn.Identity())
    with whole:
        F.cross_entropy(functional.linear(x, w).float(), target).backward()
    with in_chunks:
        functional.linear_cross_entropy(x, w, target).backward()
    assert measured(whole) == measured(in_chunks)


def test_an_input_that_is_changed_in_place_is_measured_anew() -> None:
    class Doubled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = linear(K, K), linear(K, K)

        def forward(self, x: Tensor) -> Tensor:
            y = self.a(x)
            x *= 2
            return y + self.b(x)

    model, x = Doubled(), randn(40, K)
    wanted = {
        name: by_hand(x * factor, Recipe().activation_format)
        for name, factor in (("a", 1), ("b", 2))
    }
    with monitor(model) as health, torch.no_grad():
        model(x)
    found = measured(health)
    for name, figures in wanted.items():
        assert_close(found[name]["x"], figures)


@pytest.mark.parametrize("factor", [1, 8])
def test_several_forwards_are_measured_together(factor: int) -> None:
    model = converted()
    a, b = randn(40, K), factor * randn(60, K, seed=3)
    with monitor(model) as health:
        for x in (a, b):
            model(x).sum().backward()
    assert_close(measured(health)["q"]["x"], by_hand(torch.cat([a, b]), Recipe().activation_format))


class Regression(nn.Module):
    """A model as transformers' Trainer takes it."""

    def __init__(self) -> None:
        super().__init__()
        self.up = linear(128, 128, dtype=torch.float32)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"loss": self.up(x).square().mean()}


@pytest.mark.parametrize(("accumulated", "steps"), [(1, 12), (4, 4)])
def test_a_trainer_counts_steps_of_the_optimizer(
    accumulated: int, steps: int, tmp_path: Path
) -> None:
    """The callback of the guide; in each of two epochs 4 batches and 2 are accumulated."""
    transformers = pytest.importorskip("transformers")
    model = Regression()
    health = monitor(model, every=1)

    class Watch(transformers.TrainerCallback):  # type: ignore[misc, name-defined]
        def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
            health.__enter__()

        def on_pre_optimizer_step(self, *args: Any, **kwargs: Any) -> None:
            health.__exit__(None, None, None)

    arguments = transformers.TrainingArguments(
        str(tmp_path),
        num_train_epochs=2,
        per_device_train_batch_size=1,
        gradient_accumulation_steps=accumulated,
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        save_strategy="no",
    )
    data = [{"x": row} for row in randn(6, 128, dtype=torch.float32)]
    trainer = transformers.Trainer(model, arguments, train_dataset=data, callbacks=[Watch()])
    trainer.train()
    assert health.step == trainer.state.global_step == steps
    assert [figures.keys() for figures in health.health().values()] == [{"up"}] * steps
    assert all({"x", "w", "g"} == figures["up"].keys() for figures in health.health().values())


def test_experts() -> None:
    moe = TitanMoE(4, 128, 256).bfloat16()
    convert(moe, skip=["gate"], skip_small=False)
    with monitor(moe) as health:
        moe(randn(60, 128, grad=True)).sum().backward()
    found = measured(health)
    assert [*found] == ["experts", "experts.w1_EFD", "experts.w2_EDF", "experts.w3_EFD"]
    assert [*found["experts"]] == ["g", "x"]
    stack = moe.experts.w2_EDF.master.detach()
    assert_close(found["experts.w2_EDF"]["w"], by_hand(stack[::2], Recipe().weight_format))


def test_frozen_weights_and_inputs_that_are_fp8() -> None:
    model = nn.Sequential(linear(K, K, frozen=True), linear(K, K))
    with monitor(model) as health:
        model(randn(20, K, grad=True)).sum().backward()
    assert {name: [*x] for name, x in measured(health).items()} == {
        "0": ["g", "x"],
        "1": ["g", "w", "x"],
    }
    with torch.inference_mode(), monitor(model[:1]) as health:
        model[:1](randn(20, K))
    assert [*measured(health)["0"]] == ["x"]
    if importlib.util.find_spec("matplotlib"):
        assert [len(line.get_xdata()) for line in health.plot().axes[0].lines] == [1] * 2 + [0] * 4
    w = linear(K, K).weight
    with monitor(model) as health:
        functional.linear(randn(20, K, grad=True), w).sum().backward()
    assert [*measured(health)] == ["(model)", "1"]


def test_a_model_without_fp8_warns_once() -> None:
    model = nn.Linear(64, 64)
    health = monitor(model, every=1)

    def measured_step() -> None:
        with health:
            model(randn(8, 64, dtype=torch.float32)).sum().backward()

    with pytest.warns(UserWarning, match="measured nothing: no cast of this Linear ran") as told:
        measured_step()
    assert [x.filename for x in told] == [__file__]
    measured_step()  # warnings are errors
    convert(model, skip_small=False)
    measured_step()
    assert health.scalars()


def test_a_step_that_raises_is_not_counted() -> None:
    model = converted()
    health = monitor(model)
    handle = model.mlp.register_forward_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError), health:
        model(randn(5, K))
    handle.remove()
    assert (health.step, health.health(), str(health)) == (0, {}, "no step was measured")
    assert not any(module._forward_hooks for module in model.modules())
    for other in (health, monitor(model)):
        with health, pytest.raises(RuntimeError, match="leave its `with` block first"), other:
            pass
        assert health.scalars() and health.step > 0
        health.step = 0


def test_a_cast_that_raises_inside_of_a_step() -> None:
    """What the caller handles does not end the measurement."""
    model = converted()
    with monitor(model) as health:
        with pytest.raises(TypeError, match=r"torch\.float64"):
            quantize(torch.ones(4, K, dtype=torch.float64))
        model(randn(5, K)).sum().backward()
    assert all({"x", "w", "g"} <= operands.keys() for operands in measured(health).values())


def test_what_is_logged_and_shown() -> None:
    model = nn.Sequential(linear(128, 128))
    health = monitor(model, every=10)
    assert health.scalars() == {}
    assert health.to_dict() == {"every": 10, "step": 0, "health": {}}
    with health:
        model(torch.full((4, 128), 2.0).bfloat16()).backward(torch.ones(4, 128).bfloat16())
    logged = health.scalars()
    assert json.loads(json.dumps({k: v for k, v in logged.items() if math.isfinite(v)}))
    assert len(logged) == 3 * 6
    assert logged["fp8/0/x/amax_max"] == 2.0
    assert all(type(value) is float for value in logged.values())
    values = health.to_dict()
    assert (values["every"], values["step"]) == (10, 1)
    for operand, figures in values["health"]["0"]["0"].items():
        assert figures == {name: logged[f"fp8/0/{operand}/{name}"] for name in figures}
    assert_expected_inline(
        str(health),
        """\
step 0
layer     SQNR, dB  flushed to 0  saturated  amax of blocks  NaN or Inf
-----  -  --------  ------------  ---------  --------------  ----------
0      g  inf       0.00%         100.00%    1 to 1          0
0      w  31.6      0.00%         0.01%      0.37 to 0.37    0
0      x  inf       0.00%         100.00%    2 to 2          0""",
    )


def test_the_plot_has_the_lowest_and_the_median_of_all_layers() -> None:
    pytest.importorskip("matplotlib")
    model = converted()
    health = monitor(model, every=2)
    for seed in range(3):
        with health:
            step(model, randn(20, K, seed=seed))
    lines = {line.get_label(): line.get_xydata() for line in health.plot().axes[0].lines}
    assert len(lines) == 6
    for operand in "xwg":
        values = [
            [layer[operand].sqnr for layer in layers.values()]
            for layers in health.health().values()
        ]
        for name, of in (("median", median), ("lowest", min)):
            line = lines[f"{operand}, {name} of all layers"]
            assert line.tolist() == [[0, of(values[0])], [2, of(values[1])]]


@pytest.mark.parametrize("every", [0, -1, 2.5, None])
def test_what_is_refused(every: Any) -> None:
    with pytest.raises(ValueError, match=f"^every={every}: expected a number of steps, at least 1"):
        monitor(linear(128, 128), every)
    with pytest.raises(TypeError, match="monitor"):
        monitor(randn(3))  # type: ignore[arg-type]


@on_ranks(2)
def test_under_fsdp2(mesh: Any, world: int, device: str) -> None:
    """A rank measures its tokens and its rows of the weights."""
    whole, model = converted().to(device), converted().to(device)
    fully_shard(model.mlp, mesh=mesh)
    fully_shard(model, mesh=mesh)
    x = randn(64, K, device=device, seed=mesh.get_rank())
    step(model, x)
    with monitor(model) as health:
        y = model(x)
        y.backward(torch.ones_like(y))
    with monitor(whole) as alone:
        z = whole(x)
        z.backward(torch.ones_like(z))
    found, want = measured(health), measured(alone)
    assert torch.equal(y, z)
    assert [*found] == LAYERS
    for layer in LAYERS:
        assert {"g", "x"} < found[layer].keys()
        assert found[layer]["x"] == want[layer]["x"]
        assert found[layer]["w"].sqnr == pytest.approx(want[layer]["w"].sqnr, abs=0.3)


@pytest.mark.unchecked
@pytest.mark.gpu
def test_no_step_waits_for_the_gpu() -> None:
    model, x = converted().cuda(), randn(300, K, device="cuda")
    health = monitor(model, every=1)
    with health:
        model(x).backward(x)
    with no_synchronization(), health:
        model(x).backward(x)
    assert [*health.health()] == [0, 1]
