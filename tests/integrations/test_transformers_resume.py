"""History: a run that goes on from a checkpoint splits its batches as it would have."""

from __future__ import annotations

from pathlib import Path

import torch
from tests.cases import own_loss
from torch import Tensor, nn
from torch.nn import functional as F

from anybatch import Engine
from anybatch.integrations.transformers import NAME, History

LENGTHS = (8, 20, 5, 33, 12, 40)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(9, 16), nn.Linear(16, 9)

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.head(self.embed(input_ids))
        return {"loss": F.cross_entropy(logits.flatten(0, 1), labels.flatten())}


def run(history: History, lengths: tuple[int, ...], folder: Path | None) -> list[int]:
    """Return the micro-batch of each step; the history is saved before the last three."""
    torch.manual_seed(0)
    model, loss = own_loss(Model())
    engine = Engine(model, loss, **(history.options() or {"memory": "96KiB"}))
    history.replay(engine)
    sizes = []
    for at, length in enumerate(lengths):
        ids = torch.randint(9, (24, length))
        rows = {"input_ids": ids, "labels": ids}
        decided = engine._decisions
        engine.backward(rows)
        model.zero_grad()
        if engine._decisions > decided:
            history.note(engine, rows, None)
        assert engine.last is not None
        sizes.append(engine.last.micro_batch)
        if folder is not None and at == len(lengths) - 4:
            history.save(str(folder), engine)
    return sizes


def test_batches_of_any_length_are_split_as_before(tmp_path: Path) -> None:
    searched = (LENGTHS[0],) * 10  # the first steps find the fastest size
    full = run(History(), searched + LENGTHS, tmp_path)
    assert len(set(full)) > 1
    resumed = History()
    resumed.load(str(tmp_path))
    assert run(resumed, LENGTHS[-3:], None) == full[-3:]


def test_without_a_file_nothing_is_recorded(tmp_path: Path) -> None:
    history = History()
    history.load(str(tmp_path))
    history.save(str(tmp_path), None)
    assert history.plan is None
    assert not (tmp_path / NAME).exists()
