"""The audit of a model as a check that tests share: nothing runs in high precision by mistake."""

from __future__ import annotations

from typing import Any

from torch import nn

from blocktensor import audit
from blocktensor.reports import AuditReport


def assert_no_marked_product(model: nn.Module, *args: Any, **kwargs: Any) -> AuditReport:
    """Every product that should be FP8 is, in a forward and a backward; some product is FP8."""
    report = audit(model, *args, **kwargs)
    assert report.marked == (), f"\n{report}"
    assert report.fp8_share > 0, f"\n{report}"
    return report
