"""The outside of the library, pinned: public names, signatures, options, and five plans.

It changes only on purpose. ``python -m tests.repository.test_pinned`` writes `pinned.json` anew,
and the changelog lists what has changed.
"""

from __future__ import annotations

import inspect
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from scripts import reference
from torch import Tensor, nn
from torch.nn import functional as F

import anybatch
from anybatch.__main__ import app

HERE = Path(__file__).parent
PINNED = HERE / "pinned.json"
FORWARD = re.compile(r"ForwardRef\('(.*?)'\)")
VERSION = torch.__version__.partition("+")[0]


def images(norm: Any = None) -> nn.Module:
    first = [nn.Conv2d(3, 8, 3), *([norm(8)] if norm else []), nn.ReLU()]
    return nn.Sequential(*first, nn.Flatten(), nn.Linear(8 * 36, 5))


def spread(embeddings: Tensor) -> Tensor:
    """Couple the samples by hand."""
    return (embeddings @ embeddings.T).logsumexp(1).mean()


def plans() -> dict[str, anybatch.Plan]:
    """Return a plan of each mechanism, by its name in this table."""
    torch.manual_seed(0)
    x, y = torch.randn(64, 3, 8, 8), torch.randint(5, (64,))

    def plan(model: nn.Module, loss: Any, batch: Any, memory: str, **more: Any) -> anybatch.Plan:
        return anybatch.plan(model, loss, batch, memory=memory, timed=False, **more)

    deep = nn.Sequential(*[m for _ in range(6) for m in (nn.Linear(64, 64), nn.Tanh())])
    long = nn.Sequential(nn.Linear(16, 16), *(nn.Tanh() for _ in range(15)))
    rows = torch.randn(8, 256, 64, 16)
    return {
        "undivided": plan(images(), F.cross_entropy, (x, y), "2MiB"),
        "streaming": plan(images(), F.cross_entropy, (x, y), "128KiB"),
        "two passes": plan(deep, spread, (torch.randn(256, 64), None), "4MiB", micro_batch=64),
        "lockstep": plan(images(nn.BatchNorm2d), F.cross_entropy, (x, y), "200KiB"),
        # Of a GPU that is not there nothing is timed: the link decides what leaves.
        "offload": plan(long, F.mse_loss, (rows, rows), "80MiB", device="cuda:1GiB"),
    }


def of_readme() -> list[str]:
    """Return the plan of the README's example after a step, without times."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
    batch, loss = (torch.randn(1000, 64), torch.randint(10, (1000,))), nn.CrossEntropyLoss()
    optimizer = torch.optim.AdamW(model.parameters())
    plan = anybatch.plan(model, loss, batch, memory="256KiB", optimizer=optimizer, timed=False)
    engine = anybatch.Engine(model, loss, optimizer=optimizer, plan=plan)
    engine.backward(*batch)
    return str(engine.plan).splitlines()


def signature(of: Any) -> str:
    try:
        return FORWARD.sub(r"\1", str(inspect.signature(of)))
    except ValueError:
        return ""


def members(of: type) -> dict[str, str]:
    """Return the public methods and attributes that a class has of its own, with signatures."""
    found = {}
    for name, member in sorted(reference.own(of).items()):
        if not name.startswith("_"):
            found[name] = signature(member) if callable(member) else type(member).__name__
    return found


def outside() -> dict[str, Any]:
    """Return all that is pinned."""
    names: dict[str, Any] = {}
    for name, public in sorted(reference.public().items()):
        is_class = isinstance(public, type)
        names[name] = [signature(public), members(public)] if is_class else signature(public)
    commands = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    made = plans()
    return {
        "torch": VERSION,
        "names": names,
        "options": {
            name: sorted(option for one in command.params for option in one.opts)
            for name, command in sorted(commands.items())
        },
        "plans": {name: json.loads(plan.to_json()) for name, plan in made.items()},
        "texts": {name: str(plan).splitlines() for name, plan in made.items()},
        "readme": of_readme(),
    }


def main() -> None:
    """Write it anew."""
    PINNED.write_text(json.dumps(outside(), indent=1, ensure_ascii=False) + "\n")


@pytest.fixture(scope="module")
def found() -> Any:
    return json.loads(json.dumps(outside()))


@pytest.mark.parametrize("part", ["names", "options", "plans", "texts", "readme"])
def test_the_outside_is_as_pinned(part: str, found: Any) -> None:
    pinned = json.loads(PINNED.read_text())
    if part in ("plans", "texts", "readme") and pinned["torch"] != VERSION:
        pytest.skip(f"bytes are pinned with torch {pinned['torch']}, and this is {VERSION}")
    assert found[part] == pinned[part]


if __name__ == "__main__":
    main()
