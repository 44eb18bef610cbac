"""The parts of `anybatch.plan`, for programs that check its arguments or need its engine.

Most code calls `anybatch.plan`. The command checks the options of a plan before it opens any data,
makes the plan by a `Question`, and trains with the engine that has foreseen it.
"""

from anybatch.conv.convolutions import decision_file
from anybatch.memory.spill import require_states, spill_of
from anybatch.planner.decisions import DecisionFile
from anybatch.tools.gpus import efficiency, speedup, speedup_limit
from anybatch.tools.planning import Question
from anybatch.tools.scaled import goal_of

__all__ = [
    "Question",
    "efficiency",
    "forget_decisions",
    "goal_of",
    "require_states",
    "speedup",
    "speedup_limit",
    "spill_of",
]


def forget_decisions() -> int:
    """Forget the decisions of earlier starts; the next start of a program plans anew.

    Returns:
        How many programs had some in your file.

    Raises:
        OSError: the file cannot be removed.

    Example:
        >>> anybatch.planning.forget_decisions()
        0
    """
    path = decision_file()
    return 0 if path is None else DecisionFile(path).forget()
