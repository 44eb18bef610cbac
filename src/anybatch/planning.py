"""The parts of `anybatch.plan`, for programs that check its arguments or need its engine.

Most code calls `anybatch.plan`. `why` compares a plan with other ways to hold less. The command
checks the options of a plan before it opens any data, makes the plan by a `Question`, and trains
with the engine that has foreseen it.
"""

from typing import TYPE_CHECKING

from anybatch.core.lazy import lazy

if TYPE_CHECKING:
    from anybatch.memory.spill import require_states, spill_of
    from anybatch.planner.earlier_plans import forget_plans
    from anybatch.tools.gpus import efficiency, speedup, speedup_limit
    from anybatch.tools.planning import Question
    from anybatch.tools.scaled import goal_of
    from anybatch.tools.why import ways_of, why

__getattr__, __dir__ = lazy(
    __name__,
    {
        "anybatch.memory.spill": "require_states spill_of",
        "anybatch.planner.earlier_plans": "forget_plans",
        "anybatch.tools.gpus": "efficiency speedup speedup_limit",
        "anybatch.tools.planning": "Question",
        "anybatch.tools.scaled": "goal_of",
        "anybatch.tools.why": "ways_of why",
    },
)

__all__ = [
    "Question",
    "efficiency",
    "forget_plans",
    "goal_of",
    "require_states",
    "speedup",
    "speedup_limit",
    "spill_of",
    "ways_of",
    "why",
]
