"""Classes of results and of their parts: calls return them, and code rarely names them."""

from anybatch.conv.chooser import Convolutions
from anybatch.core.plan import OffloadPlan, States
from anybatch.core.plan_sections import (
    Candidate,
    Configuration,
    Division,
    Divisions,
    Evidence,
    KernelPart,
    Memory,
    Pace,
    Scale,
    ScaleRow,
)
from anybatch.engine.measurement import StepReport
from anybatch.memory.ledger import Move, StepTimeline
from anybatch.offloading.offload import Offload, OffloadReport
from anybatch.offloading.optimizer_states import OffloadedStates, StatesReport
from anybatch.tools.check import Report
from anybatch.tools.profiled import Profile

__all__ = [
    "Candidate",
    "Configuration",
    "Convolutions",
    "Division",
    "Divisions",
    "Evidence",
    "KernelPart",
    "Memory",
    "Move",
    "Offload",
    "OffloadPlan",
    "OffloadReport",
    "OffloadedStates",
    "Pace",
    "Profile",
    "Report",
    "Scale",
    "ScaleRow",
    "States",
    "StatesReport",
    "StepReport",
    "StepTimeline",
]
