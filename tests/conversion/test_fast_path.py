"""What a user is told, and what convert leaves alone, where only the portable kernels run."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import nn

import blocktensor
from blocktensor import MinSizes
from blocktensor.conversion import fast_path
from blocktensor.ops import registry
from blocktensor.ops.gemm.choose_backend import GEMM_BACKENDS
from blocktensor.ops.grouped_gemm.choose_backend import GROUPED_BACKENDS
from blocktensor.ops.runtime.triton_compat import launcher
from tests.support.models import reasons
from tests.support.moe_models import TitanMoE
from tests.support.pretended_gpu import CPU, CUDA, OFF, Pretend, pretend

__all__ = ["pretend"]


@pytest.fixture
def hopper(pretend: Pretend, monkeypatch: pytest.MonkeyPatch) -> Pretend:
    """An H100 beside the CPU, where the models of these tests are; it warns anew."""
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H100")
    monkeypatch.setattr(fast_path, "_launches_slowly", lambda: False)
    fast_path._warn.cache_clear()
    return pretend


def large(n: int = 5120, k: int = 5120) -> nn.Sequential:
    return nn.Sequential(nn.Linear(k, n, bias=False, dtype=torch.bfloat16))


def test_nothing_is_said_without_a_gpu() -> None:
    report = blocktensor.convert(large())
    assert report.fast_path is None
    assert "fast path" not in str(report)


def test_the_fast_path_is_reported(hopper: Pretend) -> None:
    hopper((9, 0))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        report = blocktensor.convert(large())
    assert str(report).endswith("\nfast path: yes")
    explained = blocktensor.explain([(4096, 4096, 4096)], device=CUDA)
    assert str(explained).endswith("\nfast path: yes")


def test_a_missing_fast_path_warns_once(hopper: Pretend) -> None:
    hopper((9, 0), fast=False)
    with pytest.warns(UserWarning, match="the fast path is missing on this NVIDIA H100") as caught:
        report = blocktensor.convert(large())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        blocktensor.convert(large())
        large().apply(blocktensor.to_blockwise_fp8_weights)
    said = str(caught[0].message)
    for part in (
        OFF,
        "Triton 3.6 to 3.9",
        "torch 2.11 to 2.15",
        "python -m blocktensor",
        "experts",
    ):
        assert part in said
    assert caught[0].filename == __file__
    line = f"fast path: no (casts, GEMMs, grouped GEMMs: {OFF})"
    assert str(report).endswith(line)
    assert str(blocktensor.explain([(4096, 4096, 4096)], device=CUDA)).endswith(line)


def test_slow_launches_are_a_part_that_is_missing(
    hopper: Pretend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is left alone for them, and nothing else is said."""
    hopper((9, 0))
    monkeypatch.setattr(fast_path, "_launches_slowly", lambda: True)
    assert fast_path.described(CUDA) == (
        "fast path: no (repeated launches: this Triton launches kernels in an unknown way)"
    )
    with pytest.warns(UserWarning, match="eager steps of small layers run at a third") as caught:
        report = blocktensor.convert(TitanMoE(4, 1024, 1024))
    assert "alone" not in str(caught[0].message)
    assert sum(entry.converted for entry in report.entries if len(entry.shape) == 3) == 3
    monkeypatch.undo()
    monkeypatch.setattr(launcher, "launcher", lambda: None)
    assert fast_path._launches_slowly()


@pytest.mark.parametrize(
    ("lost", "converted"), [(GEMM_BACKENDS, ["1.experts"]), (GROUPED_BACKENDS, ["0"])]
)
def test_each_kind_of_product_is_left_alone_for_itself(
    lost: Any, converted: list[str], hopper: Pretend, monkeypatch: pytest.MonkeyPatch
) -> None:
    hopper((9, 0))
    monkeypatch.setitem(registry._given_up, lost[0], "its kernel does not compile")
    model = nn.Sequential(*large(4096, 2048), TitanMoE(4, 1024, 1024))
    with pytest.warns(UserWarning, match="its kernel does not compile"):
        report = blocktensor.convert(model)
    names = {entry.name.rpartition(".")[0] or entry.name for entry in report.converted}
    assert sorted(names) == converted


def test_where_all_is_left_alone_the_reason_is_said(hopper: Pretend) -> None:
    hopper((9, 0), fast=False)
    with pytest.warns(UserWarning, match="fast path") as caught:
        report = blocktensor.convert(TitanMoE(4, 1024, 1024))
    said = [str(warning.message) for warning in caught]
    assert "the fast path is missing" in said[0]
    assert "skip_small=False converts" in said[1]
    assert "no fast path (4)" in said[1]  # the router too
    assert (report.fast_path or "").startswith("fast path: no")


def test_a_warning_that_is_an_error_leaves_the_model_as_it_was(hopper: Pretend) -> None:
    hopper((9, 0), fast=False)
    model = large()
    for convert in (
        lambda: blocktensor.convert(model),
        lambda: model.apply(blocktensor.to_blockwise_fp8_weights),
    ):
        fast_path._warn.cache_clear()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            with pytest.raises(UserWarning, match="the fast path is missing"):
                convert()
        assert type(model[0].weight) is nn.Parameter


def test_asking_does_not_start_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> int:
        raise AssertionError("CUDA would start")

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    monkeypatch.setattr(torch.cuda, "current_device", refuse)
    assert blocktensor.convert(large()).fast_path is None


def test_other_gpus_do_not_warn(hopper: Pretend) -> None:
    """They have no fast path with any Triton."""
    hopper((8, 9))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        blocktensor.convert(large())


def test_the_gpu_of_a_model(hopper: Pretend) -> None:
    hopper((9, 0))
    assert fast_path.gpu_of(CPU) == fast_path.gpu_of(CUDA) == CUDA
    hopper((8, 0))
    assert fast_path.gpu_of(CUDA) is None


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
    """A head that is asked for may have any number of words."""
    hopper(capability, fast=capability != (9, 0))
    model = nn.Sequential(*large(4096, 2048), *large(7168, 2048), *large(10944, 2048))
    model.add_module("moe", TitanMoE(4, 1024, 1024))
    model.add_module("embed", nn.Embedding(5003, 4096))
    model.add_module("lm_head", large(5003, 4096)[0])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        report = blocktensor.convert(model, skip=["*.gate"], skip_small=asked, convert_head=True)
    left = {"moe.gate": "skip pattern '*.gate'", "embed": "embedding"}
    assert reasons(report) == {**(LEFT if asked is True else {}), **left}
