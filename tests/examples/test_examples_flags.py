"""Bad flags of the examples are explained: what is wrong, and what would be right."""

from __future__ import annotations

import pytest

pytest.importorskip("rich")

from tests.support.scripts import Load

FLAGS: dict[str, list[tuple[list[str], str]]] = {
    "train_lm": [
        (["--dim", "64", "--heads", "5"], "heads must divide dim: 64 is not a multiple of 5"),
        (["--dim", "9", "--heads", "3"], "dim / heads must be even"),
        (["--steps", "0"], "argument --steps: must be a whole number of at least 1, got '0'"),
        (["--batch", "two"], "argument --batch: must be a whole number of at least 1, got 'two'"),
        (["--samples", "-1"], "argument --samples: must be a whole number of at least 0"),
        (["--lr", "nan"], "argument --lr: must be a positive number, got 'nan'"),
        (["--device", "toaster"], "argument --device: 'toaster' cannot be used here"),
        (["--device", "meta"], "argument --device: 'meta' cannot be used here"),
        (["--recipe", "int4"], "argument --recipe: invalid choice: 'int4'"),
        (["--wgrad-input", "fp8"], "argument --wgrad-input: invalid choice: 'fp8'"),
        (["--out", __file__], "is not a folder"),
        (["--experts", "2", "--top-k", "3"], "top-k must be from 1 to the number of experts, 2"),
        (["--experts", "4", "--dim", "20", "--heads", "2"], "dim must be a multiple of 8"),
        (["--experts", "-1"], "argument --experts: must be a whole number of at least 0"),
    ],
    "fsdp2_llama": [
        (["--gather", "bf16"], "--gather is about FP8 weights: give --precision fp8 as well"),
        (["--fuse"], "--fuse is about FP8 weights: give --precision fp8"),
        (["--head", "fp8"], "--head fp8 needs --precision fp8, without --gather bf16"),
        (
            ["--precision", "fp8", "--head", "fp8", "--loss-chunk", "50"],
            "--head fp8: --loss-chunk must be a multiple of 128, got 50",
        ),
        (["--checkpoint-every", "5"], "--checkpoint-every needs a folder: give --checkpoint DIR"),
        (["--steps", "0"], "--steps must be at least 1, got 0"),
        (["--steps", "5", "--warmup-steps", "5"], "--warmup-steps 5 leaves no step to time"),
        (
            ["--steps", "5", "--warmup-steps", "3", "--trace", "t.json"],
            "leaves no step to time: it must be less than --steps 5, less the 2 of --trace",
        ),
        (["--trace", f"{__file__}/t.json"], f"{__file__} is not a folder"),
        (["--trace", "."], "--trace . is a folder: give the name of a file"),
        (["--loss-chunk", "-1"], "--loss-chunk must be at least 0"),
        (["--lr", "nan"], "--lr must be a positive number, got nan"),
        (["--peak-tflops", "0"], "--peak-tflops must be a positive number"),
        (["--model", "70b"], "argument --model: invalid choice: '70b'"),
        (["--fake-ranks", "0"], "--fake-ranks must be at least 1, got 0"),
        (["--fake-ranks", "2", "--checkpoint", "x"], "nothing to --checkpoint"),
        (["--checkpoint", __file__], "is not a folder"),
    ],
    "lora_fp8": [(["--base-steps", "0"], "--base-steps must be at least 1")],
    "merge_lora": [(["--rank", "0"], "--rank must be at least 1")],
    "finetune_hf": [
        (["--steps", "0"], "--steps must be at least 1"),
        (["--model", "nowhere"], "no config.json there"),
    ],
    "grpo_fp8": [(["--steps", "0"], "--steps must be at least 1, got 0")],
}
NEEDED = {"train_lm": ["matplotlib"], "lora_fp8": ["safetensors"]}
NEEDED["finetune_hf"] = ["peft", "accelerate", "transformers"]
NEEDED["grpo_fp8"] = ["trl", "datasets"]


@pytest.mark.parametrize(
    ("script", "flags", "message"),
    [(script, *case) for script, cases in FLAGS.items() for case in cases],
)
def test_bad_flags_are_explained(
    script: str, flags: list[str], message: str, load: Load, capsys: pytest.CaptureFixture[str]
) -> None:
    for package in NEEDED.get(script, []):
        pytest.importorskip(package)
    with pytest.raises(SystemExit) as stopped:
        load(script).main(flags)
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err
