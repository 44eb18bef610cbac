"""Any batch size, in the memory you have, with the gradient of the full batch."""

from anybatch import errors, reports
from anybatch.conv.convolutions import convolutions
from anybatch.core.batch import LazyBatch
from anybatch.core.plan import Plan
from anybatch.engine.engine import Engine
from anybatch.execution.composite import Encoders, joint
from anybatch.lockstep.coupled import coupled
from anybatch.lockstep.gathered import gather_batch
from anybatch.lockstep.sync_batchnorm import Adaptive, Plateau, global_batchnorm
from anybatch.loss.base import Loss
from anybatch.loss.chunked import chunked_losses
from anybatch.loss.contrastive import contrastive
from anybatch.offload.offload import offload
from anybatch.offload.optimizer_states import offload_states
from anybatch.tools.check import check
from anybatch.tools.planning import plan
from anybatch.tools.profile import profile

__version__ = "0.1.0"

__all__ = [
    "Adaptive",
    "Encoders",
    "Engine",
    "LazyBatch",
    "Loss",
    "Plan",
    "Plateau",
    "check",
    "chunked_losses",
    "contrastive",
    "convolutions",
    "coupled",
    "errors",
    "gather_batch",
    "global_batchnorm",
    "joint",
    "offload",
    "offload_states",
    "plan",
    "profile",
    "reports",
]
