"""Any batch size, in the memory you have, with the gradient of the whole batch."""

from anybatch._check import Report, check
from anybatch._convolutions import convolutions
from anybatch._coupled import coupled
from anybatch._offload import Offload, OffloadReport, offload
from anybatch._plan import Plan
from anybatch._profile import profile
from anybatch._states import OffloadedStates, StatesReport, offload_states
from anybatch.batch import LazyBatch
from anybatch.conv.chooser import Convolutions
from anybatch.encoders import Encoders
from anybatch.engine import Engine
from anybatch.errors import (
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
from anybatch.gathered import all_gather
from anybatch.joint import joint
from anybatch.loss.contrastive import contrastive
from anybatch.loss.declared import Loss
from anybatch.norm.adaptive import Adaptive, Plateau
from anybatch.norm.ranks import global_batchnorm
from anybatch.planning import plan
from anybatch.profiling.profiled import Profile
from anybatch.records import StepReport
from anybatch.step_timeline import StepTimeline

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
