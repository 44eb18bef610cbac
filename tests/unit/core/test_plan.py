from __future__ import annotations

import json
from dataclasses import replace

import pytest

from anybatch import Plan
from anybatch.core.plan import FORESEEN, UNDIVIDED, Facts, OffloadPlan, decide
from anybatch.reports import Candidate, Evidence, Memory, Pace
from anybatch.units import show_seconds

FACTS = Facts(
    micro_batch=64,
    divided=True,
    loss="cross_entropy",
    coupled=False,
    late=False,
    half=(),
    before=False,
    local=0,
    looked=1,
)
LOCAL = Evidence("inexact", 'batchnorm="local" was requested')
LITERAL = Evidence("inexact", "Loss.algorithm1 was requested")


def test_the_plain_case() -> None:
    plan = decide(FACTS)
    assert plan == Plan(
        micro_batch=64,
        mechanism="streaming",
        accumulate="in place",
        loss="cross_entropy",
        exact=Evidence("shown", "each sample was followed to its own row alone", 1),
        reasons=("the loss is a sum over samples: one pass",),
    )


@pytest.mark.parametrize(
    ("change", "field", "value", "reason"),
    [
        ({"coupled": True}, "mechanism", "two-pass", "second forward pass"),
        ({"divided": False}, "mechanism", "undivided", "torch's own step"),
        ({"half": ("bfloat16",)}, "accumulate", "accumulator", "bfloat16 gradients are summed"),
        ({"before": True}, "accumulate", "accumulator", "set aside"),
        ({"late": True}, "mechanism", "streaming", "made good at the end"),
        ({"local": 3}, "exact", LOCAL, "3 BatchNorm layers"),
        ({"lanes": True}, "mechanism", "lockstep", "samples meet in BatchNorm"),
        ({"doubts": ("a", "b")}, "exact", Evidence("not shown", "a; b", 1), "one pass"),
        ({"looked": 0}, "exact", FORESEEN, "one pass"),
        ({"divided": False, "doubts": ("a",)}, "exact", UNDIVIDED, "own step"),
        ({"lanes": True, "divided": False}, "mechanism", "undivided", "torch's own step"),
        ({"loss": "MBS Algorithm 1: x"}, "exact", LITERAL, "to the letter"),
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


@pytest.mark.parametrize("mechanism", ["gathering", "lanes", "two passes", "Streaming", "", None])
def test_a_plan_of_another_mechanism_is_refused(mechanism: str | None) -> None:
    """Earlier versions had two of these words, and their plans ran as if they were streaming."""
    plan = decide(FACTS)
    told = r"mechanism must be one of \['undivided', 'lockstep', 'two-pass', 'streaming'\]"
    with pytest.raises(ValueError, match=told):
        replace(plan, mechanism=mechanism)
    written = json.dumps(json.loads(plan.to_json()) | {"mechanism": mechanism})
    with pytest.raises(ValueError, match="a plan must hold what to_json writes, and " + told):
        Plan.from_json(written)


def test_what_is_no_plan_is_refused() -> None:
    with pytest.raises(ValueError, match="a plan must be JSON"):
        Plan.from_json("{")
    with pytest.raises(ValueError, match="a plan must hold .*, and it holds list"):
        Plan.from_json("[]")
    with pytest.raises(ValueError, match=r"it holds \['micro_batch'\]"):
        Plan.from_json('{"micro_batch": 3}')


HERE = (Candidate(4, 50, 3.0), Candidate(8, 90, 2.0), Candidate(16, 180))
OFFLOADED = (Candidate(16, 99, 1.0, offloaded=True), Candidate(32, 100, 4.0, offloaded=True))
LEFT = OffloadPlan("file", None, (50, 50), 80, 160, 90, 0.1)


def of_memory(*candidates: Candidate) -> Memory:
    return Memory(100, "as given", 90, (("activations", 90),), 20, 300, "nobody", candidates)


def test_a_plan_says_which_candidates_are_offloaded_and_what_was_faster() -> None:
    memory = of_memory(*sorted((*HERE, *OFFLOADED), key=lambda one: one.micro_batch))
    text = str(decide(replace(FACTS, micro_batch=16), memory, LEFT))
    rows = [
        "4        50 B                3   runner-up: 200 % slower",
        "8        90 B                2   runner-up: 100 % slower",
        "16       180 B                -   does not fit: 80 B too much",
        "16        99 B                1   saved tensors offloaded; chosen: the fastest timed",
        "32       100 B                4   saved tensors offloaded; 300 % slower",
        "a step takes 1 s in micro-batches of 16 with saved tensors "
        "offloaded, and 2 s in micro-batches of 8 without",
    ]
    assert [row for row in rows if row not in text] == []
    stays = str(
        decide(replace(FACTS, micro_batch=8), of_memory(*HERE, replace(OFFLOADED[0], seconds=3)))
    )
    assert (
        "16        99 B                3   saved tensors offloaded; runner-up: 50 % slower" in stays
    )
    assert "8        90 B                2   chosen: the fastest timed" in stays
    assert "a step takes 3 s in micro-batches of 16 with saved tensors offloaded" in stays
    assert "offloaded" not in str(decide(replace(FACTS, micro_batch=8), of_memory(*HERE)))


@pytest.mark.parametrize(("candidates", "left"), [(HERE, None), (OFFLOADED, LEFT)])
def test_a_plan_of_before_candidates_said_what_leaves_loads(
    candidates: tuple[Candidate, ...], left: OffloadPlan | None
) -> None:
    plan = decide(replace(FACTS, micro_batch=16), of_memory(*candidates), left)
    old = json.loads(plan.to_json())
    for one in old["memory"]["candidates"]:
        del one["offloaded"]
    assert Plan.from_json(json.dumps(old)) == plan == Plan.from_json(plan.to_json())
    assert "saved tensors offloaded;" not in str(plan)


def test_two_runners_up_are_those_that_lost_by_least() -> None:
    every = tuple(Candidate(n, 50, 1.0 + abs(n - 6)) for n in (2, 3, 5, 6, 8, 11))
    text = str(decide(replace(FACTS, micro_batch=6), of_memory(*every, Candidate(16, 60))))
    rows = [row for row in text.splitlines() if "slower" in row or "chosen" in row]
    said = {int(row.split()[0]): "runner-up" in row for row in rows}
    assert said == {2: False, 3: False, 5: True, 6: False, 8: True, 11: False}
    untimed = str(decide(replace(FACTS, micro_batch=16), of_memory(*every, Candidate(16, 60))))
    assert "runner-up" not in untimed


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [(0.041234, "0.0412 s"), (99.5, "99.5 s"), (360, "6 min"), (7200, "2 h"), (5994, "99.9 min")],
)
def test_seconds_are_shown_in_a_unit_that_a_person_would_use(seconds: float, shown: str) -> None:
    assert show_seconds(seconds) == shown


def test_a_pace_is_reported_and_goes_through_json() -> None:
    pace = Pace(0.5, (0.25, 1.0), 9, 0.125, epoch=240)
    plan = replace(decide(FACTS), pace=pace)
    assert Plan.from_json(plan.to_json()) == plan
    lines = str(plan).splitlines()
    (at,) = [k for k, line in enumerate(lines) if line.startswith("  time ")]
    assert lines[at].endswith("0.5 s (0.25 s to 1 s) a step, of 9 steps of the real loop")
    assert lines[at + 1].strip() == "2 min (60 s to 4 min) an epoch of 240 steps"
    assert pace.of(3) == (1.5, 0.75, 3.0)
    few = replace(pace, steps=2)
    assert few.in_words(1) == "0.5 s"  # two steps tell no interval


def test_a_plan_within_a_budget_says_how_it_is() -> None:
    facts = Facts(4, True, "sum", False, False, (), False, 0, segments="CUDA memory is in pages")
    memory = Memory(1 << 30, "given", 1 << 20, (), 1, 1, "fakes")
    assert "because      CUDA memory is in pages" in str(decide(facts, memory))
    assert "pages" not in str(decide(facts))
