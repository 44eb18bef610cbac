"""Any batch size, in the memory you have, with the gradient of the whole batch."""

from anybatch.conv.chooser import Convolutions
from anybatch.conv.convolutions import convolutions
from anybatch.core.batch import LazyBatch
from anybatch.core.errors import (
    AnybatchError,
    BatchError,
    BudgetError,
    LaneMismatchError,
    LossError,
    NotExactError,
    NotReproducibleError,
    NotYetError,
    RankError,
    StoreError,
)
from anybatch.core.plan import Plan
from anybatch.engine.engine import Engine
from anybatch.execution.encoders import Encoders
from anybatch.execution.joint import joint
from anybatch.execution.records import StepReport
from anybatch.lockstep.adaptive import Adaptive, Plateau
from anybatch.lockstep.coupled import coupled
from anybatch.lockstep.gathered import all_gather
from anybatch.lockstep.ranks import global_batchnorm
from anybatch.loss.contrastive import contrastive
from anybatch.loss.declared import Loss
from anybatch.memory.step_timeline import StepTimeline
from anybatch.offload.offload import Offload, OffloadReport, offload
from anybatch.offload.optimizer_states import OffloadedStates, StatesReport, offload_states
from anybatch.tools.check import Report, check
from anybatch.tools.planning import plan
from anybatch.tools.profile import profile
from anybatch.tools.profiled import Profile

__version__ = "0.1.0"

__all__ = [
    "Adaptive",
    "AnybatchError",
    "BatchError",
    "BudgetError",
    "Convolutions",
    "Encoders",
    "Engine",
    "LaneMismatchError",
    "LazyBatch",
    "Loss",
    "LossError",
    "NotExactError",
    "NotReproducibleError",
    "NotYetError",
    "Offload",
    "OffloadReport",
    "OffloadedStates",
    "Plan",
    "Plateau",
    "Profile",
    "RankError",
    "Report",
    "StatesReport",
    "StepReport",
    "StepTimeline",
    "StoreError",
    "all_gather",
    "check",
    "contrastive",
    "convolutions",
    "coupled",
    "global_batchnorm",
    "joint",
    "offload",
    "offload_states",
    "plan",
    "profile",
]
