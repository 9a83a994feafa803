"""Models of transformers there and back: what is written is what each reader reads.

The readers are transformers, where it dequantizes and where it makes FP8 modules (emulated without
a GPU), ``load_fp8``, and ``from_pretrained`` with our config. ``ARCHITECTURES`` names other model
types than those of each kind that is known, or classes, with commas between them; ``all`` is a
class of every model type (30 minutes), ``classes`` are all other classes. ``-s`` shows a line for
each, ``-rs`` why some cannot be made.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("safetensors")
pytest.importorskip("accelerate")
pytest.importorskip("transformers", minversion="5.17")

import transformers
from packaging.version import Version
from transformers.quantizers.quantizer_finegrained_fp8 import FineGrainedFP8HfQuantizer

from blocktensor import BlockwiseFP8Tensor, convert, load_fp8
from blocktensor.integrations.transformers import save_pretrained_fp8
from tests.support.architectures import architectures, other_classes, small
from tests.support.pretrained import choices
from tests.support.pretrained import silent as silent

KINDS: dict[str, tuple[int, int]] = {
    "llama": (14, 14),
    # transformers stacks experts, splits and joins other weights, and computes some
    "mixtral": (12, 12),
    "minimax_m3_vl": (48, 48),
    "bailing_hybrid": (42, 41),
    "radio": (13, 13),
    "kimi_k25": (32, 30),
    # it stores stacks whole, transposed or not, and leaves out their scales where it dequantizes
    "qwen3_vl_moe_text": (12, 8),
    "llama4_text": (40, 28),
    "inkling_text": (28, 20),
    # it keeps weights in high precision, by several lists of names
    "t5": (32, 28),
    "deepseek_v4": (52, 41),
    "hy_v4": (48, 36),
    # it makes no FP8 modules of experts with a bias, or that hold other modules
    "gpt_oss": (24, 16),
    "muse_spark_text": (36, 28),
    # it writes names that it does not read
    "shieldgemma2": (42, 42),
    # it shares a weight between modules, of which one would have scales
    "neomme": (31, 30),
}
"""Model types, with the numbers of weights in FP8, and of those that are stored in FP8.

The others are stored in high precision, also those whose blocks transformers takes for others.
"""

RAISING = {"radio", "neomme"}
"""Model types with weights of sizes for which transformers raises where it dequantizes."""

REFUSED = {
    "gpt2": "transformers has no FP8 module for it",
    "dinov2": "transformers fails as it makes FP8 modules: source keys=",
}
"""Model types of which no weight can be stored in FP8 for transformers, with the reason."""

SINCE = {"dinov2": "5.23"}
"""Versions of transformers since which a model type is refused."""

ASKED = os.environ.get("ARCHITECTURES", "")
LISTS = {"all": lambda: [*architectures()], "classes": other_classes}
CASES = LISTS[ASKED]() if ASKED in LISTS else [x for x in ASKED.split(",") if x]


def made(model_type: str, seed: int = 0) -> Any:
    try:
        return small(model_type, seed)
    except RuntimeError as error:
        pytest.skip(f"{model_type} cannot be made: {error}")


def by_dequantizing(kind: Any, folder: Path, patch: pytest.MonkeyPatch) -> Any:
    patch.setattr(torch.cuda, "is_available", lambda: False)
    return kind.from_pretrained(folder, dtype="auto")


def by_fp8_modules(kind: Any, folder: Path, patch: pytest.MonkeyPatch) -> Any:
    patch.setattr(FineGrainedFP8HfQuantizer, "validate_environment", lambda *_, **__: None)
    return kind.from_pretrained(folder, dtype="auto", device_map="cpu")


def by_our_config(kind: Any, folder: Path, patch: pytest.MonkeyPatch) -> Any:
    return kind.from_pretrained(folder, dtype="auto", quantization_config=choices(frozen=True))


Reader = Callable[[Any, Path, pytest.MonkeyPatch], Any]
READERS: tuple[Reader, ...] = (by_dequantizing, by_fp8_modules, by_our_config)


def values(model: nn.Module) -> dict[str, Tensor]:
    """All tensors, with the scales of FP8 modules multiplied."""
    state, found = model.state_dict(keep_vars=True), dict[str, Tensor]()
    for name, x in state.items():
        if isinstance(x, BlockwiseFP8Tensor):
            found[name] = x.dequantize()
        elif isinstance(x, Tensor) and x.dtype == torch.float8_e4m3fn:
            scale = state[f"{name}_scale_inv"].detach().float()
            fp8 = BlockwiseFP8Tensor.from_data(
                x.detach(), scale, block_shape=(128, 128), dtype=torch.bfloat16
            )
            found[name] = fp8.dequantize()
        elif isinstance(x, Tensor):
            found[name] = x.detach()
    return found


def differing(found: nn.Module, wanted: nn.Module) -> set[str]:
    """The names of tensors that have other values, in the dtypes of ``wanted``.

    transformers makes some in fp32 whatever the dtype of the model, HunYuan's routers for example.
    """
    these = values(found)
    return {
        name
        for name, x in values(wanted).items()
        if name not in these or not torch.equal(these[name].to(x.dtype), x)
    }


def changed_by_transformers(model_type: str, folder: Path) -> set[str]:
    """The names of tensors that it does not load as it has saved them, in high precision."""
    model = small(model_type, 0)
    model.save_pretrained(folder)
    return differing(type(model).from_pretrained(folder, dtype="auto"), model)


def check(model_type: str, folder: Path, **options: Any) -> tuple[int, int, dict[str, str]]:
    """Write a model and read it; return both numbers of weights, and what each reader did."""
    source = made(model_type).requires_grad_(False)
    with warnings.catch_warnings():
        # of convolutions, and of stacks that are no experts
        warnings.filterwarnings("ignore", r"(no weight of this|\d+ stacks of matrices) ")
        convert(source, skip_small=False)
    fp8 = sum(isinstance(x, BlockwiseFP8Tensor) for x in source.parameters())
    if not fp8:
        pytest.skip(f"{model_type}: no weight is converted")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", r"\d+ of \d+ FP8 weights are stored in high precision")
        save_pretrained_fp8(source, folder, **options)
    loaded = small(model_type, 1)
    stored = len(load_fp8(loaded, folder).fp8)
    outcomes, wrong = dict[str, str](), {"load_fp8": differing(loaded, source)}
    for reader in READERS if not options else READERS[2:]:
        with pytest.MonkeyPatch.context() as patch:
            try:
                found = reader(type(source), folder, patch)
            except Exception as error:
                outcomes[reader.__name__] = f"{type(error).__name__}: {error}"
                continue
        wrong[reader.__name__] = differing(found, source)
    if any(wrong.values()):
        known = changed_by_transformers(model_type, folder / "plain")
        wrong = {name: names - known for name, names in wrong.items()}
    outcomes |= {name: "DIFFERENT" if names else "equal" for name, names in wrong.items()}
    assert not any(wrong.values()), {name: sorted(names)[:5] for name, names in wrong.items()}
    return fp8, stored, outcomes


@pytest.mark.filterwarnings("ignore::UserWarning:torch")
@pytest.mark.parametrize("model_type", CASES or KINDS)
def test_each_reader_reads_what_is_written(model_type: str, tmp_path: Path) -> None:
    """Or raises: where it dequantizes, transformers does for some sizes and classes."""
    refused = ""
    try:
        fp8, stored, outcomes = check(model_type, tmp_path / "fp8")
    except ValueError as error:
        refused = str(error)
    if refused:
        assert CASES and "all_in_fp8=True" in refused, refused
        check(model_type, tmp_path / "all", all_in_fp8=True)  # the remedy
        print(f"{model_type}: refused ({refused[:300]})")
        return
    print(f"{model_type}: {stored} of {fp8} in FP8, {outcomes}")
    if any(x != "equal" for name, x in outcomes.items() if name != "by_dequantizing"):
        with pytest.raises(OSError, match="does not appear to have a file named"):
            changed_by_transformers(model_type, tmp_path / "plain")  # nor does it load its own
    if not CASES:
        assert (fp8, stored) == KINDS[model_type]
        assert (outcomes["by_dequantizing"] == "equal") == (model_type not in RAISING)


@pytest.mark.skipif(bool(CASES), reason="they are among those that ARCHITECTURES asks for")
@pytest.mark.parametrize("model_type", REFUSED)
def test_what_cannot_be_stored_is_refused(model_type: str, tmp_path: Path) -> None:
    if Version(transformers.__version__) < Version(SINCE.get(model_type, "0")):
        pytest.skip(f"transformers {transformers.__version__} reads {model_type}")
    with pytest.raises(ValueError, match=r"no FP8 weight of this .* can be stored") as raised:
        check(model_type, tmp_path / "fp8")
    assert REFUSED[model_type] in str(raised.value)
    assert not (tmp_path / "fp8").exists()
    fp8, stored, _ = check(model_type, tmp_path / "fp8", all_in_fp8=True)  # the remedy
    assert fp8 == stored > 0
