from __future__ import annotations

import numpy as np
import pytest

from anybatch.memory.ledger import BLOCKS, Interval, Move, StepTimeline, Timeline, grid, sparkline

OWNERS = ("weights", "saved")


def step(rows: int = 50, *, timed: bool = False, budget: int = 2000, seed: int = 0) -> StepTimeline:
    draw = np.random.default_rng(seed)
    live = draw.integers(0, 900, (rows, 2))
    seconds = tuple(np.sort(draw.uniform(0, 4, rows)) - 0.0) if timed else None
    return StepTimeline(
        "a step",
        Timeline(OWNERS, tuple(f"e{i}" for i in range(rows)), live),
        budget,
        seconds=seconds,
        end=5.0 if timed else 0.0,
        runs=(Interval(0.5, 1.0), Interval(2.0, 5.0)) if timed else (),
        moves=(Move("a", 7, False, 1.0, 2.5), Move("a", 7, True, 3.0, 3.5)) if timed else (),
    )


@pytest.mark.parametrize("timed", [False, True])
@pytest.mark.parametrize("count", [1, 7, 50, 333])
def test_a_column_has_the_most_bytes_of_its_stretch(count: int, timed: bool) -> None:
    for seed in range(5):
        one = step(timed=timed, seed=seed)
        columns, edges = one.columns(count), one.edges
        assert len(columns) == (count if timed else min(count, 50))
        total = one.ledger.live.sum(1)
        borders = np.linspace(edges[0], edges[-1], len(columns) + 1)
        for column, low, high in zip(columns, borders, borders[1:], strict=False):
            there = [i for i in range(50) if edges[i] < high and edges[i + 1] > low]
            inside = there or [int(np.searchsorted(edges, low, side="right")) - 1]
            assert sum(column.owners.values()) >= max(total[i] for i in inside)
        assert max(sum(column.owners.values()) for column in columns) == one.peak


def test_busy_shares_add_up_to_the_seconds_of_runs_and_copies() -> None:
    one = step(timed=True)
    columns = one.columns(13)
    width = (one.edges[-1] - one.edges[0]) / 13
    shares = np.array([column.busy for column in columns]).sum(0) * width
    clipped = 3.5 - max(0.0, min(one.edges[0], 1.0) - 0.5)
    assert shares == pytest.approx([clipped, 1.5, 0.5])
    assert one.stall == 1.5
    assert [m.back for m in one.moved(back=True)] == [True]
    assert all(column.busy == (0.0, 0.0, 0.0) for column in step().columns(5))


def test_letters_stand_for_bytes_and_their_owner() -> None:
    live = np.array([[4, 0], [5, 3], [8, 8], [0, 1], [0, 0]])
    one = StepTimeline("five", Timeline(OWNERS, tuple("abcde"), live), 16)
    rows = ["".join(cell.text for cell in row) for row in grid(one, height=2)]
    assert rows == ["  █  ", "▄██▁ "]
    owners = [[cell.owner for cell in row] for row in grid(one, height=2)]
    assert owners[0][2] == "saved"
    assert owners[1] == ["weights", "weights", "weights", "saved", ""]
    assert sparkline([0, 0.001, 0.5, 1]) == f" {BLOCKS[1]}▄█"


def test_a_chart_tells_peak_budget_and_what_was_busy() -> None:
    assert str(step()).startswith("a step\npeak 1.6 KiB of 2.0 KiB; 50 events\n")
    lines = ["".join(cell.text for cell in line) for line in step(timed=True).chart(30)]
    assert lines[1].endswith("5 s, of which 1.5 s wait for copies; 7 B out, 7 B back")
    assert [line.split("│")[0].strip() for line in lines[-3:]] == ["kernels", "out", "back"]
    assert lines[2] == f"   2.0 KiB ┌{'╌' * 30} budget"
    assert {len(line) for line in lines[3:]} == {12 + 30}
    assert [line[:10].strip() for line in lines[3:6]] == ["", "", "1.5 KiB"]
    far = str(step(budget=10**6)).splitlines()
    assert far[2].strip().startswith("1.6 KiB")  # to scale with the peak


def test_a_step_without_events_is_an_empty_chart() -> None:
    none = StepTimeline("none", Timeline((), (), np.zeros((0, 0), np.int64)), 10)
    assert none.peak == 0
    assert none.columns(5) == []
    assert str(none).splitlines()[1] == "peak 0 B of 10 B; 0 events"
