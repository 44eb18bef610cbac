"""Classes of results: calls return them, and code rarely names them."""

from anybatch.conv.chooser import Convolutions
from anybatch.execution.records import StepReport
from anybatch.memory.step_timeline import StepTimeline
from anybatch.offload.offload import Offload, OffloadReport
from anybatch.offload.optimizer_states import OffloadedStates, StatesReport
from anybatch.tools.check import Report
from anybatch.tools.profiled import Profile

__all__ = [
    "Convolutions",
    "Offload",
    "OffloadReport",
    "OffloadedStates",
    "Profile",
    "Report",
    "StatesReport",
    "StepReport",
    "StepTimeline",
]
