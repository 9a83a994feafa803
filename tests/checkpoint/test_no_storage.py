"""Files of FP8 tensors by other means than save_fp8: an error that names it."""

from __future__ import annotations

from pathlib import Path

import pytest
from expecttest import assert_expected_inline

pytest.importorskip("safetensors")

from safetensors.torch import save_file, save_model

from tests.support.checkpoint_models import filled
from tests.support.models import complaint


def test_safetensors_of_a_frozen_model(tmp_path: Path) -> None:
    model = filled(frozen=True)
    tensors = dict(model.state_dict())
    del tensors["head.weight"]
    assert_expected_inline(
        complaint(RuntimeError, lambda: save_file(tensors, tmp_path / "x")),
        """\
this BlockwiseFP8Tensor [200, 300] has no storage of its own, so that safetensors
cannot write it: blocktensor.save_fp8(model, path) writes the model in FP8; in high
precision write .dequantize() of a frozen weight, and state_dict() of trainable
ones, which holds plain tensors""",
    )
    with pytest.raises(RuntimeError, match=r"blocktensor.save_fp8\(model, path\) writes"):
        save_model(model, str(tmp_path / "x"))
    with pytest.raises(RuntimeError, match=r"this BlockwiseFP8Weight \[200, 300\] has no stor"):
        filled().up.weight.storage()
    plain = filled().state_dict()
    del plain["head.weight"]
    save_file(plain, tmp_path / "x")
