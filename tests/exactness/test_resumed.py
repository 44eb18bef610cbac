"""A run that is interrupted and goes on in a new process ends in the bits of one that was not."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.pool import PROCESSES
from torch import nn
from torch.nn import functional as F

import anybatch
from anybatch import Adaptive, Engine

STEPS, STOP = 16, 12


def model_of(kind: str) -> nn.Module:
    torch.manual_seed(0)
    norm = nn.Identity() if kind == "plain" else nn.BatchNorm1d(64)
    return nn.Sequential(nn.Linear(16, 64), norm, nn.ReLU(), nn.Dropout(0.3), nn.Linear(64, 4))


def run(kind: str, options: dict[str, Any], first: int, last: int, folder: Path) -> Any:
    """Train from a checkpoint if there is one; leave one at `STOP`, and return the parameters."""
    model = model_of(kind)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    adaptive = Adaptive(every=2) if kind == "adaptive" else "exact"
    engine = Engine(model, F.cross_entropy, optimizer, batchnorm=adaptive, cache=None, **options)
    path = folder / "checkpoint.pt"
    if first:
        saved = torch.load(path, weights_only=True)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        engine.load_state_dict(saved["engine"])
        torch.set_rng_state(saved["rng"])
    else:
        torch.manual_seed(1)
    sizes = []
    for step in range(first, last):
        batch = torch.Generator().manual_seed(step)
        x, y = torch.randn(48, 16, generator=batch), torch.randint(4, (48,), generator=batch)
        optimizer.zero_grad()
        engine.backward(x, y)
        optimizer.step()
        sizes.append((engine.last.micro_batch, engine.last.batchnorm))
        if step + 1 == STOP and not first:
            rng, states = torch.get_rng_state(), (model, optimizer, engine)
            names = ("model", "optimizer", "engine")
            every = {n: copy.deepcopy(s.state_dict()) for n, s in zip(names, states, strict=True)}
            torch.save(every | {"rng": rng}, path)
    return [p.detach() for p in (*model.parameters(), *model.buffers())], sizes


KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "streaming": ("plain", {"memory": "60KiB"}),
    "undivided": ("plain", {"memory": "1MiB"}),
    "lockstep": ("norm", {"memory": "80KiB"}),
    "adaptive": ("adaptive", {"memory": "100KiB"}),
    "a size": ("norm", {"micro_batch": 20}),
    "draws of the batch": ("plain", {"memory": "90KiB", "rng": "batch"}),
}


def resume(name: str, folder: Path) -> None:
    """Go on from the checkpoint in a folder, and leave what `run` returns there."""
    kind, options = KINDS[name]
    torch.save(run(kind, options, STOP, STEPS, folder), folder / "end")


@pytest.mark.large(few=3)
@pytest.mark.parametrize("name", KINDS)
def test_a_resumed_run_ends_in_the_same_bits(name: str, tmp_path: Path) -> None:
    kind, options = KINDS[name]
    want, sizes = run(kind, options, 0, STEPS, tmp_path)
    process = PROCESSES.Process(target=resume, args=(name, tmp_path))
    process.start()
    process.join()
    assert process.exitcode == 0
    found, others = torch.load(tmp_path / "end")
    assert others == sizes[STOP:]
    assert all(torch.equal(a, b) for a, b in zip(found, want, strict=True))


def engine_of(model: nn.Module, **options: Any) -> Engine:
    return Engine(model, F.cross_entropy, memory="1MiB", cache=None, **options)


def test_a_foreign_or_damaged_state_is_one_sentence() -> None:
    engine = engine_of(model_of("plain"))
    state = engine.state_dict()
    assert state["plan"] is None
    wrong = {"plan": "{"}, {"format": 0}, {"limit": "x"}, {"adaptive": {}}
    for one in [None, [], {}, *({**state, **entry} for entry in wrong)]:
        with pytest.raises(ValueError, match=r"what engine\.state_dict\(\) returned in this vers"):
            engine.load_state_dict(one)
    with pytest.raises(ValueError, match=r"of the same model, and 0\.weight is another"):
        engine_of(nn.Sequential(nn.Linear(2, 4))).load_state_dict(state)
    with pytest.raises(
        ValueError, match="the same mode of BatchNorm, and it is of the exact or local"
    ):
        engine_of(model_of("plain"), batchnorm="adaptive").load_state_dict(state)


def test_a_state_of_another_budget_is_planned_anew() -> None:
    model, x, y = model_of("plain"), torch.randn(48, 16), torch.randint(4, (48,))
    engine = engine_of(model)
    engine.backward(x, y)
    other = Engine(model, F.cross_entropy, memory="60KiB", cache=None)
    other.load_state_dict(engine.state_dict())
    other.backward(x, y)
    assert other.last is not None
    assert other.last.micro_batch < 48
    share = Engine(model, F.cross_entropy, memory="50%", cache=None)
    share.load_state_dict(other.state_dict())
    share.backward(x, y)
    assert isinstance(share.plan, anybatch.Plan)
    assert share.plan.memory is not None
    assert share.plan.memory.budget == 60 * 1024
