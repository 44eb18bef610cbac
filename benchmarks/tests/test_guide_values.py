"""The table of memory that depends on values, and steps of its benchmark."""

from __future__ import annotations

from benchmarks.guide.values import run
from benchmarks.guide.values.rows import guide_values


def test_a_step_over_its_budget_is_noticed_and_later_ones_fit() -> None:
    found = run.steps("places", run.CHANGE + 4)
    held = [one["held"] for one in found]
    assert held[run.CHANGE] > run.BUDGET
    assert held[-1] <= run.BUDGET
    assert max(one["error"] for one in found) < 1e-12


def test_the_table_says_which_steps_were_over() -> None:
    steps = [{"held": held, "error": 1e-16} for held in (5, 12, 11, 8)]
    rows = [{"way": "a way", "steps": steps, "cost": 1.234}]
    line = "| a way | now | 2 | 1 of 2 | 1.10 of the budget | 1e-16 | 1.23 |"
    assert line in guide_values({"budget": 10, "rows": rows})
