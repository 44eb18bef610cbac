"""The parts of `anybatch.plan`, for programs that check its arguments or need its engine.

Most code calls `anybatch.plan`. The command checks the options of a plan before it opens any data,
makes the plan by a `Question`, and trains with the engine that has foreseen it.
"""

from anybatch.conv.convolutions import plan_file
from anybatch.memory.spill import require_states, spill_of
from anybatch.planner.earlier_plans import PlanFile
from anybatch.tools.gpus import efficiency, speedup, speedup_limit
from anybatch.tools.planning import Question
from anybatch.tools.scaled import goal_of

__all__ = [
    "Question",
    "efficiency",
    "forget_plans",
    "goal_of",
    "require_states",
    "speedup",
    "speedup_limit",
    "spill_of",
]


def forget_plans() -> int:
    """Forget the plans of earlier starts; the next start of a program plans anew.

    Returns:
        How many programs had some in your file.

    Raises:
        OSError: the file cannot be removed.

    Example:
        >>> anybatch.planning.forget_plans()
        0
    """
    path = plan_file()
    return 0 if path is None else PlanFile(path).forget()
