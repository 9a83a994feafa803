"""The report of a plan, what it accepts, and what it refuses."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from torch import nn

import blocktensor
from blocktensor import plan
from blocktensor.reports import TrainingPlan
from blocktensor.reports.plan.models import KNOWN, model_of
from blocktensor.reports.plan.setup import Setup
from blocktensor.reports.plan.speed import ATTENTION_FLOPS, attention_rate

transformers = pytest.importorskip("transformers")

SMALL = {"hidden_size": 1024, "num_hidden_layers": 2, "vocab_size": 1000}


@pytest.fixture(scope="module")
def too_large() -> TrainingPlan:
    layers = {"num_hidden_layers": 32}
    return plan("Llama-3.1-8B", sizes=layers, sequence=8192, gpus=2, compile="blocks")


def test_the_report(too_large: TrainingPlan) -> None:
    assert_expected_inline(
        str(too_large),
        """\
Llama-3.1-8B: 8.03B parameters
2 x H100, FSDP2: 1 x 8192 tokens a GPU
adamw, masters fp32, compiled blocks

memory of a GPU, GiB  bf16   FP8
--------------------  -----  -----
weights               14.96  14.96
gathered weights      1.38   1.18
optimizer states      29.92  29.92
activations           34.03  29.53
head and logits       11.93  11.93
cuBLAS workspaces     0.06   0.06
peak                  92.28  87.58
of H100's 79.1 GiB    117%   111%
longest sequence      5,120  5,120

time of a step, ms        bf16   FP8
------------------------  -----  ------
fprop                     161.3  91.5
dgrad                     161.3  91.0
wgrad                     161.3  88.8
casts                     0.0    56.9
attention                 129.6  129.6
norms, activations, sums  41.0   41.0
head and loss             50.4   50.4
optimizer                 88.7   88.7
copies of shards          86.4   47.9
waiting for other GPUs    8.0    8.0
step                      888.0  693.6
tokens/s a GPU            9,225  11,810

80% of the FLOPs run in FP8; a step is 1.28x as fast as in bf16
most memory is allocated in the backward of the loss
does not fit in FP8; what would fit:

change                                          peak, GiB  tokens/s a GPU
----------------------------------------------  ---------  --------------
checkpointing of blocks                         62.6       9,584
checkpointing, loss in chunks                   62.1       9,881
8-bit AdamW                                     65.1       12,281
masters in bf16                                 65.1       12,841
LoRA of rank 16                                 51.8       16,487
LoRA of rank 16, checkpointing, loss in chunks  11.0       12,727
H200                                            87.6       12,865
4 GPUs, FSDP2                                   65.1       12,798
4 GPUs, FSDP2, checkpointing, loss in chunks    32.9       10,615""",
    )
    assert max(map(len, str(too_large).splitlines())) <= 80
    assert not too_large.fits


def test_alternatives_fit(too_large: TrainingPlan) -> None:
    """Each of them, planned by its own settings, fits as the report says."""
    settings: dict[str, dict[str, Any]] = {
        "checkpointing of blocks": {"checkpointing": "blocks"},
        "H200": {"card": "H200"},
        "4 GPUs, FSDP2": {"gpus": 4},
    }
    found = {x.change: x.fp8 for x in too_large.alternatives}
    for change, changed in settings.items():
        again = plan(
            "Llama-3.1-8B", **{"sequence": 8192, "gpus": 2, "compile": "blocks", **changed}
        )
        assert again.fits
        assert again.alternatives == ()
        assert again.fp8 == found[change]


def test_the_parts_add_up(too_large: TrainingPlan) -> None:
    values = json.loads(json.dumps(too_large.to_dict()))
    for precision in ("bf16", "fp8"):
        parts = values[precision]
        assert parts["peak_bytes"] == pytest.approx(sum(x["value"] for x in parts["memory"]))
        assert parts["step_us"] == pytest.approx(sum(x["value"] for x in parts["time"]))
        assert parts["tokens_per_second"] == pytest.approx(8192e6 / parts["step_us"])
    assert values["fp8_share"] == pytest.approx(too_large.fp8.fp8_flops / too_large.fp8.flops)


def test_flops_by_hand() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(4096, 4096, bias=False), nn.Linear(4096, 64, bias=False))
    found = plan(model, batch=2, sequence=1000)
    assert found.fp8.flops == 6 * 2000 * (4096**2 + 64 * 4096)
    assert found.fp8.fp8_flops == 6 * 2000 * 4096**2
    assert found.bf16.fp8_flops == 0


def test_nothing_fits() -> None:
    report = plan("Llama-3.1-405B", sequence=1_000_000)
    assert report.alternatives == ()
    assert "no change that was tried makes it fit" in str(report)


def test_attention_has_measured_rates() -> None:
    for length, rate in ATTENTION_FLOPS:
        assert attention_rate(length) == pytest.approx(rate)
    assert attention_rate(128) == attention_rate(2048) < attention_rate(3000) < attention_rate(4096)
    assert attention_rate(1_000_000) == attention_rate(8192)


# Sources of models


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("meta-llama/Llama-3.2-1B", 1.236),
        ("llama-3.1-8b", 8.030),
        ("Llama-3.1-70B", 70.554),
        ("Qwen3-8B", 8.191),
        ("Qwen/Qwen3-30B-A3B", 30.532),
        ("Qwen3-235B-A22B", 235.094),
        ("Mixtral-8x7B-v0.1", 46.703),
        ("DeepSeek-V3", 671.026),
    ],
)
def test_known_models_have_the_parameters_of_their_names(name: str, billions: float) -> None:
    _, model = model_of(name)
    count = sum(p.numel() for p in model.parameters())
    assert count / 1e9 == pytest.approx(billions, abs=5e-4)
    assert all(p.is_meta for p in model.parameters())


def test_every_source_gives_the_same_plan(tmp_path: Path) -> None:
    config = transformers.LlamaConfig(**SMALL)
    config.save_pretrained(tmp_path)
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config)
    sources = [config, str(tmp_path), tmp_path / "config.json", model]
    plans = [plan(source) for source in sources]
    plans.append(plan("LlamaConfig", sizes=SMALL))
    assert {x.fp8.peak_bytes for x in plans} == {plans[0].fp8.peak_bytes}
    assert {x.bf16.step_us for x in plans} == {plans[0].bf16.step_us}
    assert config.num_hidden_layers == 2


def test_a_folder_of_an_fp8_checkpoint(tmp_path: Path) -> None:
    """Its config asks transformers for FP8 layers, which a plan does not build."""
    transformers.LlamaConfig(**SMALL).save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps(config | {"quantization_config": {"quant_method": "fp8"}}))
    assert plan(tmp_path).fp8 == plan("LlamaConfig", sizes=SMALL).fp8


def test_converted_models_are_planned_as_they_were() -> None:
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(4096, 4096) for _ in range(2)))
    before = plan(model)
    blocktensor.convert(model)
    assert plan(model) == before


# Refusals


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"gpus": 0}, "gpus=0: expected 1 or more"),
        ({"gpus": -8}, "gpus=-8: expected 1 or more"),
        ({"batch": -1}, "batch=-1: expected 1 or more"),
        ({"sequence": 0}, "sequence=0: expected 1 or more"),
        ({"lora": 0}, "lora=0: expected 1 or more"),
        ({"card": "B200"}, "card='B200': expected one of 'H100', 'H200'"),
        ({"optimizer": "lion"}, "optimizer='lion': expected one of 'adamw', 'adamw_8bit'"),
        ({"fuse": "yes"}, "fuse='yes': expected one of True, False"),
        ({"gpus": 1, "sharding": "fsdp2"}, "gpus=1 shards nothing: pass sharding='none'"),
        ({"recompute": True}, "is an option of fuse: pass fuse=True too"),
        ({"loss": "chunks"}, "is the loss of a head in FP8: pass convert_head=True too"),
        ({"lora_experts": True}, "lora_experts=True is counted for adapters alone: pass lora"),
        ({"expert_parallel": True}, "expert_parallel=True is counted for adapters alone"),
        ({"lora": 8, "expert_parallel": True}, "FSDP2 shards all but the experts"),
    ],
)
def test_settings_that_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        plan(nn.Linear(8, 8), **settings)


@pytest.mark.parametrize("gpus", [True, 1.5, "8", None])
def test_counts_are_integers(gpus: Any) -> None:
    with pytest.raises(TypeError, match="expected an integer"):
        plan(nn.Linear(8, 8), gpus=gpus)


def test_a_recipe_is_a_recipe() -> None:
    with pytest.raises(TypeError, match=r"expected a blocktensor\.Recipe"):
        Setup(recipe="fp32")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("source", "sizes", "error", "message"),
    [
        (
            "llama-3.1-8",
            {},
            ValueError,
            "unknown model 'llama-3.1-8': did you mean llama-3.1-8b or",
        ),
        ("nothing", {}, ValueError, "Expected an id of 'meta-llama/Llama-3.2-1B'"),
        (
            "LlamaConfig",
            {"hidden": 64},
            ValueError,
            "has no 'hidden': did you mean hidden_act or hidden_size",
        ),
        ("LlamaConfig", {"num_hidden_layers": -1}, ValueError, "num_hidden_layers=-1: expected 1"),
        ("ViTConfig", {}, ValueError, "cannot build a causal language model from this ViTConfig"),
        (
            "LlamaConfig",
            {"hidden_size": "abc"},
            ValueError,
            "cannot build LlamaConfig(hidden_size='abc'): ",
        ),
        (
            "Llama-3.1-8B",
            {"num_attention_heads": 7},
            ValueError,
            "cannot build LlamaConfig(num_attention_heads=7): ",
        ),
        (
            transformers.LlamaConfig(),
            {"hidden_size": 2.5},
            ValueError,
            "cannot build LlamaConfig(hidden_size=2.5): ",
        ),
        ("AutoConfig", {}, ValueError, "cannot build AutoConfig(): "),
        ("BartConfig", {}, ValueError, "BartConfig describes an encoder and a decoder"),
        ("T5Config", {}, ValueError, "AutoModelForSeq2SeqLM.from_config(config)"),
        (nn.Linear(8, 8), {"x": 1}, TypeError, "change a config: build the Linear with them"),
        (8, {}, TypeError, "plan takes a module, a config of transformers, or the name of one"),
    ],
)
def test_sources_that_are_refused(
    source: Any, sizes: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=re.escape(message)):
        plan(source, sizes=sizes)


def test_an_error_that_lists_all_classes_of_transformers_is_cut() -> None:
    with pytest.raises(ValueError, match="Model type should be one of") as error:
        plan("ViTConfig")
    assert len(str(error.value)) < 500


@pytest.mark.parametrize("text", ["{}", "no JSON", '{"model_type": "llama", "hidden_size": "x"}'])
def test_a_config_that_transformers_cannot_read(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ValueError, match=r"^transformers cannot read '.*config\.json': "):
        plan(tmp_path)


def test_a_folder_without_a_config(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"has no config.json: expected the folder of a model"):
        plan(tmp_path)


def test_known_ids_have_short_names_of_their_own() -> None:
    short = [name.rpartition("/")[2].lower() for name in KNOWN]
    assert len(set(short)) == len(KNOWN)


def test_experts_that_each_gpu_holds_are_not_gathered() -> None:
    """Tokens travel in their place; adapters of experts are cut as well."""
    pytest.importorskip("transformers")
    sizes = {"num_hidden_layers": 4}
    common: dict[str, Any] = {"gpus": 8, "lora": 8, "card": "H200", "sizes": sizes}
    none, gathered, cut = (
        plan("Qwen3-30B-A3B", **common, **more)
        for more in (
            {},
            {"lora_experts": True},
            {"lora_experts": True, "expert_parallel": True},
        )
    )

    def part(report: TrainingPlan, name: str) -> float:
        parts = (*report.fp8.memory, *report.fp8.time)
        return next(x.value for x in parts if x.name == name)

    experts = 4 * 3 * 768 * 2048 * 128
    adapters = 4 * 128 * 8 * (2 * 768 + 2048 + 768 + 2048)
    more = part(gathered, "weights") - part(none, "weights")
    assert more == pytest.approx(4 * adapters / 8)
    less = part(gathered, "gathered weights") - part(cut, "gathered weights")
    assert less == pytest.approx((experts + 4 * adapters) / 4)  # of one block
    assert part(cut, "tokens sent to experts") > 0 == part(gathered, "tokens sent to experts")
    assert part(cut, "casts") < part(gathered, "casts")
    assert any("experts get no adapters" in x for x in none.notes)
    assert not any("experts get no adapters" in x for x in cut.notes)
    assert "FSDP2 and expert parallelism" in str(cut) and "experts too" in str(cut)


def test_the_longest_sequence_is_the_last_that_fits() -> None:
    model = nn.Sequential(*(nn.Linear(4096, 4096, device="meta") for _ in range(4)))
    longest = plan(model).longest_fp8
    assert longest % 1024 == 0
    assert plan(model, sequence=longest).fits and not plan(model, sequence=longest + 1024).fits
    with torch.device("meta"):
        huge = nn.Sequential(*(nn.Linear(65536, 65536) for _ in range(4)))
    report = plan(huge)
    assert report.longest_fp8 == report.longest_bf16 == 0
    assert re.search(r"longest sequence +none +none", str(report))


def test_larger_ranks_than_matmuls_add_take_longer() -> None:
    _, model = model_of("Llama-3.2-1B")
    times = []
    for rank in (8, 64, 65):
        parts = plan(model, lora=rank, skip_small=False).fp8.time
        times.append(next(part.value for part in parts if part.name == "adapters"))
    assert times[0] == times[1] < times[2]


def test_fuse_is_proposed_with_adapters_too() -> None:
    _, model = model_of("Llama-3.2-1B")
    longest = plan(model, lora=16, card="H100").longest_fp8
    report = plan(model, lora=16, card="H100", sequence=longest + 1024)
    assert not report.fp8.fits("H100")
    assert "fuse" in [each.change for each in report.alternatives]
