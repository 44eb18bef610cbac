"""The language model's benchmark: rows, the four ways to a gradient, and its table."""

import json
from itertools import islice
from pathlib import Path

import pytest
from benchmarks.integrations.language import rows as table
from benchmarks.integrations.language import run
from benchmarks.integrations.language.arms import ARMS, backward_of
from benchmarks.integrations.language.text import (
    IGNORED,
    LENGTH,
    VOCABULARY,
    batch_of,
    batches,
    paragraphs,
)
from torch import Tensor

from anybatch.tools.exactness import error_of, tolerance


def worst(got: dict[str, Tensor], want: dict[str, Tensor]) -> float:
    return max(error_of(got, want).values())


def test_rows_are_padded_and_no_target_of_padding_counts() -> None:
    tokens, targets = batch_of([b"abc", b"de"])
    assert tokens.tolist() == [[97, 98], [100, 0]]
    assert targets.tolist() == [[98, 99], [101, IGNORED]]


def test_what_is_held_out_is_not_trained_on_and_lengths_are_uneven() -> None:
    rows, held = paragraphs()
    assert not {*rows} & {*held}
    lengths = sorted(map(len, rows))
    assert max(map(max, rows)) < VOCABULARY
    assert 10 * lengths[0] < lengths[-1] == LENGTH + 1
    first, again = (list(islice(batches(rows, 8, seed=1), 3)) for _ in range(2))
    assert first == again


def test_ours_is_the_gradient_of_the_batch_and_those_by_hand_are_not() -> None:
    rows = next(batches(paragraphs()[0], 13, seed=0))
    found = {}
    for arm in ARMS:
        model = run.initial(0).double()
        backward_of(arm, model, 4)(rows)
        found[arm] = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert worst(found["anybatch"], found["undivided"]) <= tolerance()
    for arm in ("by hand", "by hand, by length"):
        assert worst(found[arm], found["undivided"]) > 1e-3


@pytest.mark.large(of="tiny runs of benchmarks", few=2)
def test_it_runs_and_its_table_is_written(tmp_path: Path) -> None:
    run.main(quick=True, out=tmp_path)
    results = json.loads((tmp_path / "results.json").read_text())
    text = table.language(results)
    assert text.count("\n") == 1 + len(ARMS)
    assert (tmp_path / "curves.png").stat().st_size > 0
