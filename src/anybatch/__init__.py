"""Any batch size, in the memory you have, with the gradient of the full batch."""

from typing import TYPE_CHECKING

from anybatch import errors
from anybatch.core.lazy import lazy

if TYPE_CHECKING:
    from anybatch import planning as planning
    from anybatch import reports
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
    from anybatch.offloading.offload import offload
    from anybatch.offloading.optimizer_states import offload_states
    from anybatch.tools.check import check
    from anybatch.tools.planning import plan
    from anybatch.tools.profile import profile

# torch takes a second to import, and the command's help needs none (test_help_needs_no_torch).
__getattr__, __dir__ = lazy(
    __name__,
    {
        "": "planning reports",
        "anybatch.conv.convolutions": "convolutions",
        "anybatch.core.batch": "LazyBatch",
        "anybatch.core.plan": "Plan",
        "anybatch.engine.engine": "Engine",
        "anybatch.execution.composite": "Encoders joint",
        "anybatch.lockstep.coupled": "coupled",
        "anybatch.lockstep.gathered": "gather_batch",
        "anybatch.lockstep.sync_batchnorm": "Adaptive Plateau global_batchnorm",
        "anybatch.loss.base": "Loss",
        "anybatch.loss.chunked": "chunked_losses",
        "anybatch.loss.contrastive": "contrastive",
        "anybatch.offloading.offload": "offload",
        "anybatch.offloading.optimizer_states": "offload_states",
        "anybatch.tools.check": "check",
        "anybatch.tools.planning": "plan",
        "anybatch.tools.profile": "profile",
    },
)

__version__ = "0.2.0"

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
