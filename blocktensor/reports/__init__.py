"""The classes of reports that ``convert``, ``fuse``, ``audit`` and others return."""

from ..autograd.saved_report import SavedKind
from ..autograd.saved_tensors import SavedTensors
from ..checkpoint.load import LoadReport
from ..conversion.report import ConversionReport
from ..fusion.fuse import FusionEntry, FusionReport
from ..fusion.share_inputs import SharingReport
from ..text_table import Report
from .audit_report import AuditReport
from .explain import Explanation
from .monitor import Health, Monitor
from .plan.report import Alternative, Estimate, Part, TrainingPlan
from .plan.setup import Setup

__all__ = [
    "Alternative",
    "AuditReport",
    "ConversionReport",
    "Estimate",
    "Explanation",
    "FusionEntry",
    "FusionReport",
    "Health",
    "LoadReport",
    "Monitor",
    "Part",
    "Report",
    "SavedKind",
    "SavedTensors",
    "Setup",
    "SharingReport",
    "TrainingPlan",
]


def __dir__() -> list[str]:
    return __all__
