from __future__ import annotations

import json
from dataclasses import replace

import pytest

from anybatch import Plan
from anybatch._plan import Facts, decide

FACTS = Facts(
    micro_batch=64,
    divided=True,
    loss="cross_entropy",
    coupled=False,
    late=False,
    half=(),
    before=False,
    local=0,
)


def test_the_plain_case() -> None:
    plan = decide(FACTS)
    assert plan == Plan(
        micro_batch=64,
        mechanism="streaming",
        accumulate="in place",
        loss="cross_entropy",
        exact=True,
        reasons=("the loss is a sum over samples: one pass",),
    )


@pytest.mark.parametrize(
    ("change", "field", "value", "reason"),
    [
        ({"coupled": True}, "mechanism", "gathering", "second forward pass"),
        ({"divided": False}, "mechanism", "undivided", "torch's own step"),
        ({"half": ("bfloat16",)}, "accumulate", "accumulator", "bfloat16 gradients are summed"),
        ({"before": True}, "accumulate", "accumulator", "set aside"),
        ({"late": True}, "mechanism", "streaming", "made good at the end"),
        ({"local": 3}, "exact", False, "3 BatchNorm layers"),
        ({"lanes": True}, "mechanism", "lanes", "samples meet in BatchNorm"),
        ({"lanes": True, "coupled": True}, "exact", True, "wait for each other there"),
        ({"lanes": True, "divided": False}, "mechanism", "undivided", "torch's own step"),
        ({"loss": "MBS Algorithm 1: x"}, "exact", False, "to the letter"),
        ({"half": ("bfloat16",), "divided": False}, "accumulate", "in place", "own step"),
    ],
)
def test_each_fact_has_its_consequence_and_its_reason(
    change: dict[str, object], field: str, value: object, reason: str
) -> None:
    plan = decide(replace(FACTS, **change))
    assert getattr(plan, field) == value
    assert reason in " ".join(plan.reasons)
    assert reason in str(plan)


def test_a_plan_survives_json() -> None:
    plan = decide(replace(FACTS, coupled=True, half=("float16",)))
    assert Plan.from_json(plan.to_json()) == plan


def test_a_plan_of_before_there_were_budgets_loads() -> None:
    plan = decide(FACTS)
    old = {name: value for name, value in json.loads(plan.to_json()).items() if name != "memory"}
    assert Plan.from_json(json.dumps(old)) == plan


def test_what_is_no_plan_is_refused() -> None:
    with pytest.raises(ValueError, match="a plan must be JSON"):
        Plan.from_json("{")
    with pytest.raises(ValueError, match="a plan must hold .*, and it holds list"):
        Plan.from_json("[]")
    with pytest.raises(ValueError, match=r"it holds \['micro_batch'\]"):
        Plan.from_json('{"micro_batch": 3}')
