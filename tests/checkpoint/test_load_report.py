"""The table that a load returns."""

from __future__ import annotations

from expecttest import assert_expected_inline

from blocktensor import LoadReport


def test_the_table() -> None:
    report = LoadReport(
        fp8=tuple(f"layers.{i}.{name}.weight" for i in range(12) for name in ("up", "down")),
        plain=("embed.weight", *(f"layers.{i}.norm.weight" for i in range(12))),
        missing=("head.weight",),
        unexpected=("layers.61.extra.weight", "layers.61.extra.bias"),
    )
    assert_expected_inline(
        str(report),
        """\
tensor                     outcome    as
-------------------------  ---------  ---------------------
layers.*.up.weight (12)    loaded     FP8, frozen
layers.*.down.weight (12)  loaded     FP8, frozen
embed.weight               loaded     the model's dtype
layers.*.norm.weight (12)  loaded     the model's dtype
head.weight                unchanged  not in the checkpoint
layers.61.extra.weight     not read   not in the model
layers.61.extra.bias       not read   not in the model
24 loaded in FP8, 13 in the model's dtype; 1 missing, 2 unexpected""",
    )


def test_of_nothing() -> None:
    assert_expected_inline(
        str(LoadReport((), (), (), ())),
        """\
tensor  outcome  as
------  -------  --
0 loaded in FP8, 0 in the model's dtype; 0 missing, 0 unexpected""",
    )
