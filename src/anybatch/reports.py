"""Classes of results and of their parts: calls return them, and code rarely names them."""

from anybatch.conv.chooser import Convolutions
from anybatch.core.divisions import Configuration, Division, Divisions, KernelPart
from anybatch.core.evidence import Evidence
from anybatch.core.memory import Candidate, Memory
from anybatch.core.pace import Pace
from anybatch.core.plan import OffloadPlan, States
from anybatch.core.scale import Scale, ScaleRow
from anybatch.execution.records import StepReport
from anybatch.memory.step_timeline import Move, StepTimeline
from anybatch.offload.offload import Offload, OffloadReport
from anybatch.offload.optimizer_states import OffloadedStates, StatesReport
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
