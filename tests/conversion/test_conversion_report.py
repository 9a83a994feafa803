"""The report of a conversion, and what a user is told where only the portable kernels run."""

from __future__ import annotations

import dataclasses
import textwrap
import warnings
from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from torch import nn
from torch.nn.utils import skip_init

from blocktensor import MinSizes, Recipe, convert, explain
from blocktensor import to_blockwise_fp8_weights as apply
from blocktensor.conversion import fast_path
from blocktensor.ops.gemm.choose_backend import GEMM_BACKENDS
from blocktensor.ops.grouped_gemm.choose_backend import GROUPED_BACKENDS
from tests.support.backends import CPU, CUDA, OFF, Pretend, pretend
from tests.support.matrices import Experts, every_matrix
from tests.support.models import DIM, Model, reasons
from tests.support.moe_models import TitanMoE

__all__ = ["pretend"]


@pytest.mark.parametrize("size", ["1024", 1024.0, True, None, -1])
def test_sizes_are_numbers(size: Any) -> None:
    with pytest.raises((TypeError, ValueError), match=r"^MinSizes\(k=.*\): expected"):
        MinSizes(k=size)


def test_the_report_of_a_small_model() -> None:
    model = Model()
    model.blocks[0].down.weight.requires_grad_(False)
    report = convert(model, skip=["*.1.up"], skip_small=MinSizes(n=DIM, k=100, size=0))
    assert_expected_inline(
        str(report),
        """\
parameter      shape   dtype    share  runs in  why
-------------  ------  -------  -----  -------  -------------------------------------------
embed          50x64   float32  5.7%   -        embedding
blocks.0.up    192x64  float32  21.9%  -        small: K=64 < 100 (skip_small)
blocks.0.down  64x192  float32  21.9%  fp8      frozen: high-precision copy dropped
blocks.1.up    192x64  float32  21.9%  -        skip pattern '*.1.up'
blocks.1.down  64x192  float32  21.9%  fp8      trainable
lm_head        50x64   float32  5.7%   -        lm head: 50 outputs, the entries of 'embed'
2 converted, 4 skipped; 43.7% of 56,192 parameters in FP8; 217.0 KiB before, 193.0 KiB with FP8 forms""",  # noqa: E501
    )
    again = convert(model, skip_small=MinSizes(n=DIM, k=100, size=0))
    assert {e.reason for e in again.converted} == {"already converted"}
    assert "\n0 converted, 2 already in FP8, 4 skipped; 43.7% of" in str(again)
    assert again.bytes_before == again.bytes_after == report.bytes_after


def test_every_matrix_has_a_row() -> None:
    assert_expected_inline(
        str(convert(every_matrix(), skip_small=False)),
        """\
parameter                               shape     dtype    share  runs in  why
--------------------------------------  --------  -------  -----  -------  ---------------------------------------------------------------------
embed                                   50x64     float32  1.7%   -        embedding
same                                    50x64     float32  -      -        tied to 'embed'
bag                                     10x64     float32  0.3%   -        embedding
layers.*.fc1 (2)                        64x64     float32  4.3%   fp8      trainable
layers.*.experts.gate_up_proj (2)       4x128x64  float32  34.5%  -        stack of matrices: in Experts; stacks={...} would name it
layers.*.experts.down_proj (2)          4x64x64   float32  17.3%  -        stack of matrices: in Experts; stacks={...} would name it
layers.*.experts.router (2)             4x64      float32  0.3%   -        not the weight of a linear layer: in Experts
attention.in_proj_weight                192x64    float32  6.5%   -        nn.MultiheadAttention multiplies by it without calling a linear layer
attention.out_proj                      64x64     float32  2.2%   -        nn.MultiheadAttention multiplies by it without calling it
conv1d                                  64x192    float32  6.5%   fp8      trainable (Conv1D)
conv                                    64x3x4x4  float32  1.6%   -        convolution
mixed                                   64x64     float32  2.2%   fp8      trainable (subclass Mixed)
mixed.lora_a                            4x64      float32  0.1%   -        not the weight of a linear layer: in Mixed
norm.parametrizations.weight.original0  64x1      float32  <0.1%  -        parametrized: a weight is computed from it
norm.parametrizations.weight.original1  64x64     float32  2.2%   -        parametrized: a weight is computed from it
tied                                    64x64     float32  -      fp8      tied to 'mixed'
rnn.weight_ih_l0                        256x64    float32  8.6%   -        not the weight of a linear layer: in LSTM
rnn.weight_hh_l0                        256x64    float32  8.6%   -        not the weight of a linear layer: in LSTM
lazy                                    ?         float32  -      -        convolution
wide                                    64x64     float64  2.2%   -        dtype torch.float64
lm_head                                 50x64     float32  -      -        tied to embedding 'embed'
alias.positions                         1x5x64    float32  0.2%   -        not the weight of a linear layer: in Module
alias.of_tied                           64x64     float32  -      -        not the weight of a linear layer: in Module; tied to 'mixed'
5 converted, 22 skipped; 12.9% of 189,824 parameters in FP8; 751.5 KiB before, 775.5 KiB with FP8 forms""",  # noqa: E501
    )


def test_the_default_thresholds_keep_large_layers() -> None:
    sizes = {"large": (2048, 2048), "wide": (1024, 4096), "flat": (4096, 1024)}
    sizes |= {"narrow": (1023, 8192), "small": (2047, 2048), "huge": (8192, 8192)}
    report = convert(linears(sizes))
    assert [e.name for e in report.converted] == ["large", "wide", "flat", "huge"]
    assert reasons(report)["narrow"] == "small: K=1023 < 1024 (skip_small)"
    assert reasons(report)["small"] == "small: N K=4192256 < 4194304 (skip_small)"


def linears(sizes: dict[str, tuple[int, int]]) -> nn.ModuleDict:
    with torch.device("meta"):
        return nn.ModuleDict({name: nn.Linear(k, n) for name, (k, n) in sizes.items()})


def llama_sizes(dim: int, kv: int, hidden: int) -> dict[str, tuple[int, int]]:
    attention = {"q": (dim, dim), "k": (dim, kv), "v": (dim, kv), "o": (dim, dim)}
    return attention | {"gate": (dim, hidden), "up": (dim, hidden), "down": (hidden, dim)}


MLP = ["gate", "up", "down"]


@pytest.mark.parametrize(
    ("sizes", "converted"),
    [
        (llama_sizes(4096, 1024, 14336), ["q", "k", "v", "o", *MLP]),  # Llama 8B
        (llama_sizes(2048, 512, 8192), ["q", "o", *MLP]),  # Llama 1B
        (llama_sizes(2048, 1024, 6144), ["q", "o", *MLP]),  # Qwen3 1.7B
        (llama_sizes(1024, 1024, 3072), []),  # Qwen3 0.6B, nearly
    ],
)
@pytest.mark.filterwarnings("ignore:no weight of this ModuleDict is in FP8")
def test_what_the_default_takes_of_models(
    sizes: dict[str, tuple[int, int]], converted: list[str]
) -> None:
    model = linears(sizes)
    assert [e.name for e in convert(model).converted] == converted


def test_what_takes_another_recipe_is_not_small() -> None:
    model = linears({"fp8": (4096, 2048), "large": (4096, 4096)})
    convert(model["fp8"], skip_small=False)
    recipe = Recipe(scale="power_of_two")
    convert(model, recipe)
    assert model["fp8"].weight.recipe == model["large"].weight.recipe == recipe


def warning(model: nn.Module, **options: object) -> str:
    with pytest.warns(UserWarning, match="^no weight of this") as warned:
        report = convert(model, **options)
    assert report.converted == ()
    assert report.fp8_share == 0
    assert [w.filename for w in warned] == [__file__]
    return textwrap.fill(str(warned[0].message), 84)


def test_a_conversion_of_nothing_warns() -> None:
    assert_expected_inline(
        warning(Model()),
        """\
no weight of this Model is in FP8: skip_small=False converts small weights too.
Matrices left alone: embedding (1), small (4), lm head (1)""",
    )
    assert_expected_inline(
        warning(Model(), filter=lambda m, name: False, skip_small=False),
        """\
no weight of this Model is in FP8: filter and skip leave weights alone. Matrices
left alone: embedding (1), filter (4), lm head (1)""",
    )
    assert_expected_inline(
        warning(nn.Sequential(nn.Embedding(50, DIM), Experts())),
        """\
no weight of this Sequential is in FP8: stacks={'1': ['gate_up_proj', 'down_proj']}
names experts that convert does not know. Matrices left alone: embedding (1), stack
of matrices (2), not the weight of a linear layer (1)""",
    )
    assert warning(nn.Sequential()).endswith("Matrices left alone: none")


@pytest.fixture
def hopper(pretend: Pretend, monkeypatch: pytest.MonkeyPatch) -> Pretend:
    """An H100 beside the CPU, where the models of these tests are; it warns anew."""
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H100")
    fast_path._warn.cache_clear()
    return pretend


def large(n: int = 5120, k: int = 5120) -> nn.Sequential:
    return nn.Sequential(skip_init(nn.Linear, k, n, bias=False, dtype=torch.bfloat16))


def test_asking_does_not_start_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: pytest.fail("CUDA would start"))
    report = convert(large())
    assert report.fast_path is None
    assert "fast path" not in str(report)


def test_the_fast_path_is_reported(hopper: Pretend) -> None:
    hopper((9, 0))
    assert fast_path.gpu_of(CPU) == fast_path.gpu_of(CUDA) == CUDA
    report = convert(large())  # a warning would be an error
    assert str(report).endswith("\nfast path: yes")
    assert str(explain([(4096, 4096, 4096)], device=CUDA)).endswith("\nfast path: yes")
    hopper((8, 9))  # it has no fast path with any Triton
    convert(large())
    hopper((8, 0))
    assert fast_path.gpu_of(CUDA) is None


def test_a_missing_fast_path_warns_once(hopper: Pretend) -> None:
    hopper((9, 0), fast=False)
    with pytest.warns(UserWarning, match="the fast path is missing on this NVIDIA H100") as caught:
        report = convert(large())
    convert(large())
    large().apply(apply)
    said = str(caught[0].message)
    remedies = ("Triton 3.6 to 3.9", "torch 2.11 to 2.15", "python -m blocktensor")
    assert all(part in said for part in (OFF, *remedies, "leaves alone"))
    assert caught[0].filename == __file__
    line = f"fast path: no (casts, GEMMs, grouped GEMMs: {OFF})"
    assert str(report).endswith(line)
    assert str(explain([(4096, 4096, 4096)], device=CUDA)).endswith(line)


@pytest.mark.parametrize(
    ("lost", "converted"), [(GEMM_BACKENDS, ["1", "2.experts"]), (GROUPED_BACKENDS, ["0", "1"])]
)
def test_each_kind_of_product_is_left_alone_for_itself(
    lost: Any, converted: list[str], hopper: Pretend, monkeypatch: pytest.MonkeyPatch
) -> None:
    hopper((9, 0))
    name = next(name for name, backends in fast_path.FAMILIES.items() if backends is lost)
    without = dataclasses.replace(lost[0], unusable=lambda device: "its kernel is wrong")
    monkeypatch.setitem(fast_path.FAMILIES, name, [without, *lost[1:]])
    model = nn.Sequential(*large(4096, 2048), *large(8192, 4096), TitanMoE(4, 1024, 1536))
    with pytest.warns(UserWarning, match="its kernel is wrong"):
        report = convert(model)
    names = {entry.name.rpartition(".")[0] or entry.name for entry in report.converted}
    assert sorted(names) == converted


def test_a_gpu_is_asked_once(hopper: Pretend, monkeypatch: pytest.MonkeyPatch) -> None:
    hopper((9, 0))
    asked = []
    for name, (first, *others) in list(fast_path.FAMILIES.items()):

        def unusable(device: torch.device, name: str = name, first: Any = first) -> str | None:
            asked.append(name)
            return first.unusable(device)

        backends = [dataclasses.replace(first, unusable=unusable), *others]
        monkeypatch.setitem(fast_path.FAMILIES, name, backends)
    convert(nn.Sequential(*large(4096, 2048), *large(8192, 4096), TitanMoE(4, 1024, 1536)))
    assert sorted(asked) == sorted(fast_path.FAMILIES)


def test_where_all_is_left_alone_the_reason_is_said(hopper: Pretend) -> None:
    hopper((9, 0), fast=False)
    with pytest.warns(UserWarning, match="fast path") as caught:
        report = convert(TitanMoE(4, 1024, 1536))
    said = [str(warning.message) for warning in caught]
    assert "the fast path is missing" in said[0]
    assert "skip_small=False converts" in said[1]
    assert "no fast path (4)" in said[1]  # the router too
    assert (report.fast_path or "").startswith("fast path: no")


def test_a_warning_that_is_an_error_leaves_the_model_as_it_was(hopper: Pretend) -> None:
    hopper((9, 0), fast=False)
    model = large()
    for run in (lambda: convert(model), lambda: model.apply(apply)):
        fast_path._warn.cache_clear()
        with pytest.raises(UserWarning, match="the fast path is missing"):
            run()
        assert type(model[0].weight) is nn.Parameter


SLOW = "no fast path: experts are slower than bf16 (skip_small)"
LEFT = {
    "0": "no fast path: small: N K=8388608 < 12582912 (skip_small)",
    "2": "no fast path: N=10944, K=2048 are not multiples of 128 (skip_small)",
    **{f"moe.experts.{name}": SLOW for name in ("w1_EFD", "w2_EDF", "w3_EFD")},
}


@pytest.mark.parametrize("asked", [True, False, MinSizes()], ids=["small", "none", "sizes"])
@pytest.mark.parametrize("capability", [(9, 0), (8, 9), (10, 0)])
def test_what_is_left_alone_without_it(
    capability: tuple[int, int], asked: bool | MinSizes, hopper: Pretend
) -> None:
    hopper(capability, fast=capability != (9, 0))
    model = nn.Sequential(*large(4096, 2048), *large(7168, 2048), *large(10944, 2048))
    model.add_module("moe", TitanMoE(4, 1024, 1536))
    model.add_module("embed", skip_init(nn.Embedding, 5003, 4096))
    model.add_module("lm_head", large(5003, 4096)[0])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        report = convert(model, skip=["*.gate"], skip_small=asked, convert_head=True)
    left = {"moe.gate": "skip pattern '*.gate'", "embed": "embedding"}
    assert reasons(report) == {**(LEFT if asked is True else {}), **left}
