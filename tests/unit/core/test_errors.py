from __future__ import annotations

import pickle

from anybatch.errors import BudgetError


def test_a_budget_error_travels_between_processes() -> None:
    """One that could not be read again had shifted the answers of a pool of ranks."""
    error = pickle.loads(pickle.dumps(BudgetError("too little", needed=3, budget=2)))
    assert (str(error), error.needed, error.budget) == ("too little", 3, 2)
