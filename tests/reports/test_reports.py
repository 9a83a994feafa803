"""Text, HTML and values of every report come from one table."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple
from xml.etree import ElementTree

import pytest
import torch
from torch import Tensor, nn

from blocktensor import (
    audit,
    convert,
    explain,
    fuse,
    load_fp8,
    monitor,
    plan,
    reports,
    save_fp8,
    saved_tensors_in_fp8,
    share_inputs,
)
from blocktensor.reports import Monitor, Report
from tests.support.mlps import MLP, K
from tests.support.models import Model, linear, randn

ODD = "a<b>&'c'"
"""A name that is no HTML."""


class Odd(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.add_module(ODD, MLP())

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.get_submodule(ODD)(x)
        return made


def converted() -> Odd:
    model = Odd()
    convert(model, skip_small=False)
    return model


def shared() -> Report:
    model = converted()
    report = share_inputs(model)
    model(randn(3, K, dtype=torch.float32))
    return report


def loaded(folder: Path) -> Report:
    save_fp8(converted(), folder)
    return load_fp8(Odd(), folder)


def watched(steps: int = 2) -> Monitor:
    model = converted()
    health = monitor(model, every=1)
    for _ in range(steps):
        with health:
            y = model(randn(3, K, dtype=torch.float32))
            y.backward(randn(*y.shape, dtype=torch.float32))
    return health


def saved() -> Report:
    report, model = saved_tensors_in_fp8(), converted()
    with report:
        model(randn(64, K, dtype=torch.float32, grad=True) * 1)
    return report


MADE: dict[str, Callable[[Path], Report]] = {
    "ConversionReport": lambda folder: convert(Odd(), skip_small=False),
    "Explanation": lambda folder: explain(converted(), device="H100"),
    "AuditReport": lambda folder: audit(Odd(), randn(3, K, dtype=torch.float32)),
    "FusionReport": lambda folder: fuse(converted()),
    "SharingReport": lambda folder: shared(),
    "LoadReport": loaded,
    "Monitor": lambda folder: watched(),
    "SavedTensors": lambda folder: saved(),
    "TrainingPlan": lambda folder: plan(type(ODD, (nn.Linear,), {})(4096, 4096)),
}
EMPTY: dict[str, Callable[[], Report]] = {
    "Explanation": lambda: explain(nn.Sequential()),
    "AuditReport": lambda: audit(nn.ReLU(), randn(2, grad=True)),
    "FusionReport": lambda: fuse(linear(128, 128)),
    "Monitor": lambda: watched(0),
    "SavedTensors": saved_tensors_in_fp8,
}


def test_every_class_of_reports_is_made_here() -> None:
    classes = (getattr(reports, name) for name in reports.__all__)
    wanted = {x.__name__ for x in classes if issubclass(x, Report) and x is not Report}
    assert MADE.keys() == wanted, "make each in MADE: all tests of this file then run with it"


def parsed(html: str) -> list[Any]:
    """The lines and the cells of tables of a page; a tag that it does not know is an error."""
    page, parts = ElementTree.fromstring(f"<page>{html}</page>"), list[Any]()
    for part in page:
        cells = {"thead": "th", "tbody": "td"}
        for group in part:
            assert {cell.tag for row in group for cell in row} == {cells[group.tag]}
        rows = [[cell.text or "" for cell in row] for row in part.iter("tr")]
        parts.append(rows if part.tag == "table" else part.text)
    tags = {(x.tag, *x.attrib) for x in page.iter()} - {("page",)}
    styled = {(tag, "style") for tag in ("table", "th", "td")}
    assert tags <= styled | {(tag,) for tag in ("thead", "tbody", "tr", "p")}
    left = {x.attrib["style"] for x in page.iter() if x.tag in ("th", "td")}
    assert left <= {"text-align: left"}, "notebooks put cells to the right"
    return parts


def words(text: str) -> list[str]:
    """All words in their order, without the rules below headers and what pads columns."""
    return [word for word in text.split() if set(word) != {"-"}]


@pytest.mark.parametrize("kind", MADE)
def test_a_notebook_shows_what_print_shows(kind: str, tmp_path: Path) -> None:
    report = MADE[kind](tmp_path)
    parts = parsed(report._repr_html_())
    cells = [cell for x in parts for row in ([[x]] if isinstance(x, str) else x) for cell in row]
    assert words(" ".join(cells)) == words(str(report))
    assert "" not in parts
    tables = [part for part in parts if not isinstance(part, str)]
    assert len(tables) == (2 if kind in ("Explanation", "AuditReport", "TrainingPlan") else 1)
    for header, *rows in tables:
        assert rows and {len(row) for row in rows} == {len(header)}
    assert any(ODD in cell for cell in cells) == (kind != "SavedTensors")  # it names no module
    assert "<b>" not in report._repr_html_()


@pytest.mark.parametrize("kind", EMPTY)
def test_a_report_of_nothing_is_text(kind: str) -> None:
    report = EMPTY[kind]()
    assert type(report).__name__ == kind
    assert parsed(report._repr_html_()) == str(report).split("\n")
    json.dumps(report.to_dict())


@pytest.mark.parametrize("kind", MADE)
def test_values_survive_json(kind: str, tmp_path: Path) -> None:
    values = MADE[kind](tmp_path).to_dict()
    assert values
    assert json.loads(json.dumps(values, allow_nan=False)) == values


def test_the_values_of_a_conversion() -> None:
    model = Model()
    report = convert(model, skip_small=False, dry_run=True)
    values = report.to_dict()
    assert values == {
        "entries": [
            asdict(e) | {"shape": list(e.shape), "dtype": "float32"} for e in report.entries
        ],
        "parameters": sum(p.numel() for p in model.parameters()),
        "fast_path": report.fast_path,
        "bytes_before": sum(p.nbytes for p in model.parameters() if p.ndim == 2),
        "bytes_after": report.bytes_after,
        "fp8_share": report.fp8_share,
    }
    assert len(values["entries"]) == 6


def test_the_values_of_other_reports() -> None:
    model = converted()
    explained, audited = explain(model, tokens=3, device="H200"), audit(model, randn(3, K).float())
    values = explained.to_dict()
    assert values.keys() == {"matmuls", "fast_path", "layers"}
    assert values["layers"] == [asdict(x) for x in explained.layers]
    assert values["matmuls"] == [{**asdict(p), "sizes": p.sizes} for p in explained.matmuls]
    values = audited.to_dict()
    assert values.keys() == {"entries", "notes", "hidden", "flops", "fp8_share"}
    assert values["entries"] == [asdict(e) for e in audited.entries]
    assert (values["notes"], values["flops"]) == (list(audited.notes), audited.flops)
    fused = fuse(model)
    assert fused.to_dict() == {"entries": [asdict(entry) for entry in fused.entries]}
    assert len(fused.entries) == 1


class Found(NamedTuple):
    name: str
    dtype: torch.dtype


@dataclass(frozen=True)
class OfFound(Report):
    entries: tuple[Found, ...]
    by_step: dict[int, list[Found]]


def test_values_of_dictionaries_and_named_tuples_keep_their_names() -> None:
    found = Found("up", torch.bfloat16)
    wanted = {"name": "up", "dtype": "bfloat16"}
    values = OfFound((found,), {7: [found]}).to_dict()
    assert values == {"entries": [wanted], "by_step": {"7": [wanted]}}


def test_the_values_of_shared_inputs() -> None:
    values = shared().to_dict()
    assert (values["casts"], values["saved"]) == (2, 1)
    (group,) = values["groups"]
    assert group["name"] == ODD
    assert group["linears"] == ["gate_proj", "up_proj", "down_proj"]
